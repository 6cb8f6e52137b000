"""Hand-written kernels behind plain functions. Each has a plain torch version with the same contract."""
