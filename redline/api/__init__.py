"""The Python API: a recipe on a user's own module, a meter in their loop, documents that a notebook can show.

redline/__init__.py has the few public names; the files here implement them, beside the commands and above the engine.
What needs torch is imported on first use: importing redline imports nothing heavy.
"""
