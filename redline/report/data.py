"""Prepared data for the terminal: what a folder holds, what a check found, and how far a preparation has come.

    print_data(document, Console());  with PrepareView(Console(stderr=True)) as view: view.show(to_json(progress))

A document is the plain dict of `redline data ... --json`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from redline.core.units import UNKNOWN, counted, human_bytes, human_percent, human_seconds
from redline.report import Document, one_line
from redline.report.table import Note, notes_grid

LINE_SECONDS = 5.0  # between two lines if there is no terminal


def print_data(document: Document, console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("split")
    for name in ("tokens", "documents", "shards", "of all tokens"):
        table.add_column(name, justify="right")
    total = document["train"]["tokens"] + document["val"]["tokens"]
    for name in ("train", "val"):
        split = document[name]
        share = human_percent(split["tokens"] / total if total else None, 2)
        table.add_row(name, f"{split['tokens']:,}", f"{split['documents']:,}", str(len(split["shards"])), share)
    console.print(table)
    console.print()
    console.print(notes_grid([Note(about=about, text=text) for about, text in data_lines(document)]))


def data_lines(document: Document) -> Iterator[tuple[str, str]]:
    tokenizer, sources, took = document["tokenizer"], document["sources"], document.get("took")
    yield "folder", one_line(document["folder"])
    yield (
        "tokenizer",
        f"{one_line(tokenizer['name'])}, {tokenizer['vocab']:,} ids, {one_line(tokenizer['fingerprint'])}",
    )
    text = document["text_bytes"]
    tokens = document["train"]["tokens"] + document["val"]["tokens"]
    yield "text", f"{human_bytes(text)} of UTF-8, {text / tokens:.2f} bytes per token" if tokens else UNKNOWN
    words = one_line(" ".join(sources["words"]))
    files = "1 file" if sources["files"] == 1 else f"{sources['files']:,} files"
    yield "source", f"{words} ({files}, {human_bytes(sources['bytes'] or None)})"  # unknown for the hub
    yield "prepared", f"{one_line(document['date'])}: {one_line(document['command'])}"
    if took and took["seconds"] and took["text_bytes"]:
        rate = took["text_bytes"] / took["seconds"] / 1e6
        yield "took", f"{human_seconds(took['seconds'])}, {rate:.1f} MB/s of text"
    for note in document["notes"]:
        yield "note", one_line(note)


def print_check(document: Document, console: Console) -> None:
    if document["ok"]:
        whole = (
            f"{counted(document['shards'], 'shard')}, {human_bytes(document['bytes'])}, {document['tokens']:,} tokens"
        )
        console.print(Text(f"whole: {whole}", style="green"))
    for problem in document["problems"]:
        notes = [Note(about=name, text=one_line(problem[name]), kind="failed") for name in ("problem", "why", "fix")]
        console.print(notes_grid(notes))
    for note in document["notes"]:
        console.print(notes_grid([Note(about="note", text=one_line(note))]))


class PrepareView:
    """A bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic, what: str = "preparing") -> None:
        columns = (TextColumn(what, style="cyan"), BarColumn(bar_width=24), TextColumn("{task.description}"))
        self._console, self._clock, self._last = console, clock, clock()
        self._bar = Progress(
            *columns, console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> PrepareView:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, now: Document) -> None:
        text = standing_line(now)
        self._bar.update(
            self._task,
            description=text,
            completed=now["bytes_kept"] + now["bytes_done"],
            total=now["bytes_total"] or None,
        )
        if not self._console.is_terminal and self._clock() - self._last >= LINE_SECONDS:
            self._console.print(Text(text), soft_wrap=True)
            self._last = self._clock()


def standing_line(now: Document) -> str:
    """'12.4 MiB of 98.1 MiB, 8.31 MB/s, 1,204 documents, 3,100,224 tokens, 0:00:12 left'."""
    done = now["bytes_kept"] + now["bytes_done"]
    total = human_bytes(now["bytes_total"] or None)  # unknown for the hub
    rate = None if not now["seconds"] else now["text_bytes"] / now["seconds"] / 1e6
    left = None
    if now["bytes_done"] and now["bytes_total"]:
        left = max(0.0, now["seconds"] * (now["bytes_total"] - done) / now["bytes_done"])
    tokens = "" if now["tokens"] is None else f"{now['tokens']:,} tokens, "  # there are none while text is only read
    return (
        f"{human_bytes(done)} of {total}, {UNKNOWN if rate is None else f'{rate:.2f}'} MB/s, "
        f"{now['documents']:,} documents, {tokens}{clock_time(left)} left"
    )


def clock_time(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
