"""What a user's own Python calls: a recipe on their module, a meter in their loop, documents that a notebook can show.

redline/__init__.py has the few names; each is a file here, beside the commands and above the engine. What needs torch
is imported when it is asked for: importing redline imports nothing heavy.
"""
