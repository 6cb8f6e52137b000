"""Runs one thing. Everything here may import torch; nobody in the parent process imports anything from here."""
