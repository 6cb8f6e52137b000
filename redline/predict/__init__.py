"""Predictions from workload, recipe, hardware and measurement: arithmetic without torch, done in milliseconds."""
