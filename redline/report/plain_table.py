"""The plain table of estimates and profiles: a heading, a rule, no frame.

table = plain_table("operation", "GFLOP ", "share ")     # names that end in a space are numbers
"""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table


def plain_table(*columns: str) -> Table:
    """Columns whose name ends in a space are numbers, the others text."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        number = name.endswith(" ")
        table.add_column(name.strip(), justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table
