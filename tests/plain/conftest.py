"""A busy machine must not fail a test: no example that Hypothesis draws here has a time limit."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
