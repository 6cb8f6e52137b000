"""Searches over many measurements: starts one worker process after another and never imports torch itself."""
