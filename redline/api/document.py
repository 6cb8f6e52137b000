"""A result in Python: the dict that `--json` prints, which a notebook shows as tables and plots.

    found = redline.lint("gpt2", gpu="H200");  print(found);  found["findings"][0]["fix"];  json.dumps(found)

It is a dict in every way: equality, JSON, keys. Only `print` and notebooks see the table and the page.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from importlib import import_module
from typing import Any

COLUMNS = 100
# The functions that show each kind: the terminal's table and the page. They are imported when used, so that holding a
# dict needs neither rich nor jinja2.
SHOWN = {
    "ladder": ("table.print_ladder", "page.render_page"),
    "tune": ("tune.print_tune", "tune_page.render_tune_page"),
    "profile": ("profile.print_profile", "profile_page.render_profile_page"),
    "lint": ("lint.print_lint", "notebook.render_lint"),
    "estimate": ("estimate.print_estimate", "notebook.render_estimate_page"),
    "hardware": ("hardware.print_hardware", "notebook.render_hardware_page"),
    "meter": ("meter.print_meter", "notebook.render_meter_page"),
}


class Document(dict[str, Any]):
    """A result that can show itself. `kind` says what made it: a key of `SHOWN`."""

    def __init__(self, content: Mapping[str, Any], *, kind: str) -> None:
        super().__init__(content)
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep `kind` in copies, also pickled ones."""
        return _again, (dict(self), self.kind)

    def __str__(self) -> str:
        """Return the terminal's table, at most 100 columns wide."""
        from rich.console import Console

        if self.get("status") == "failed":
            return f"nothing to show, {self.kind} failed: {self['reason']}"
        text = io.StringIO()
        _shower(SHOWN[self.kind][0])(self, Console(file=text, width=COLUMNS, color_system=None))
        return text.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        from redline.report.notebook import in_notebook

        return in_notebook(_shower(SHOWN[self.kind][1])(self))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return the page for Jupyter, and the table for where no page can be shown."""
        return {"text/html": self._repr_html_(), "text/plain": str(self)}


def _again(content: dict[str, Any], kind: str) -> Document:
    return Document(content, kind=kind)


def _shower(name: str) -> Any:
    module, function = name.split(".")
    return getattr(import_module(f"redline.report.{module}"), function)
