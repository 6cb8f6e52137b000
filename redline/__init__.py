"""redline finds out how fast a machine can train a model, gets it there, and proves that nothing broke on the way."""

__version__ = "0.1.0"
