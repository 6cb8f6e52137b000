"""Arithmetic on the nouns: no torch, milliseconds."""
