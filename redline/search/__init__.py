"""Runs many: asks one worker process after another and never imports torch itself."""
