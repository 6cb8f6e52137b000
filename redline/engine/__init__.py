"""Runs one job at a time. Modules here may import torch; the parent process imports none of them."""
