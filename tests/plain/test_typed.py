"""What a user's type checker sees of the package once it is installed."""

from __future__ import annotations

import tomllib
from pathlib import Path


def test_the_package_says_that_it_is_typed(repository: Path) -> None:
    """Without the marker mypy takes everything of it for Any (PEP 561), and a wheel has only what is listed."""
    data = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    assert "py.typed" in data["tool"]["setuptools"]["package-data"]["redline"]
    assert (repository / "redline" / "py.typed").is_file()
