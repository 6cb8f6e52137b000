"""A machine, a device or the whole device table for the terminal: data sheet beside measurement, fitting 100 columns.

    print_hardware(document, Console());  print_devices(rows, Console())

A document is the plain dict of `redline hardware --json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from redline.core.devices import DTYPES
from redline.core.units import UNKNOWN, human_bytes, human_percent
from redline.report import Document, one_line
from redline.report.table import Note, notes_grid

LIST_SHED = {"int8": 4, "fp8": 5, "fp32": 6, "tf32": 7}
LIST_LEVELS, LIST_WIDEST = 7, 200
DETAIL_DTYPES = ("bf16", "fp16", "tf32", "fp32")  # matmuls are shown in the first of these that was measured


def print_hardware(document: Document, console: Console) -> None:
    lines = [*machine_lines(document["this"]), *known_lines(document["known"])]
    console.print(notes_grid([Note(about=about, text=text) for about, text in lines]))
    if document["known"] or document["measured"]:
        console.print()
        console.print(peaks_table(document))
    if document["measured"]:
        console.print()
        console.print(products_table(document["measured"]))
    notes = list(notes_of(document))
    if notes:
        console.print()
        console.print(notes_grid(notes))


def machine_lines(machine: Document | None) -> Iterator[tuple[str, str]]:
    """Yield what the machine reports now; nothing if a device was looked up by name."""
    if machine is None:
        return
    count = f"{machine['count']} x " if machine["count"] > 1 else ""
    yield "device", f"{count}{one_line(machine['name'])}, {human_bytes(machine['memory_bytes'])}"
    if machine["gpus"]:
        yield "driver", f"{_or_dash(machine['driver'])}, runs CUDA up to {_or_dash(machine['cuda_driver'])}"
        yield from gpu_lines(machine["gpus"][0])
        yield (
            "host",
            f"{one_line(machine['cpu_name'])}, {machine['cpu_cores']} cores, {human_bytes(machine['ram_bytes'])}",
        )
    else:
        yield "cores", f"{machine['cpu_cores']} for this process"
    versions = (f"{name} {one_line(version)}" for name, version in machine["versions"].items() if version)
    yield "versions", ", ".join(versions)


def gpu_lines(gpu: Document) -> Iterator[tuple[str, str]]:
    core = f"{_or_dash(gpu['clock_mhz'])} of {_or_dash(gpu['clock_max_mhz'])} MHz"
    memory = f"{_or_dash(gpu['memory_clock_mhz'])} of {_or_dash(gpu['memory_clock_max_mhz'])} MHz"
    yield "clocks", f"{core}, memory {memory}, held by: {held_by(gpu['throttle_reasons'])}"
    limit = f"{_or_dash(gpu['power_watts'], '.0f')} of {_or_dash(gpu['power_limit_watts'], '.0f')} W"
    yield "power", f"{limit}, {_or_dash(gpu['temperature_celsius'])} °C"


def held_by(reasons: list[str] | None) -> str:
    """Say why the clocks are not higher."""
    return UNKNOWN if reasons is None else ", ".join(reasons) or "nothing"


def known_lines(known: Document | None) -> Iterator[tuple[str, str]]:
    if known is None:
        return
    yield "known as", f"{known['label']} ({known['vendor']} {known['architecture']})"
    yield "memory", f"{human_bytes(known['memory_bytes'])}, {known['bandwidth'] / 1e12:.2f} TB/s"
    units = "SMs" if known["vendor"] == "NVIDIA" else "compute units"
    yield units, f"{known['multiprocessors']}; rows of matrices aligned to {known['alignment_bytes']} bytes"


def peaks_table(document: Document) -> Table:
    """One row per dtype and one for memory: data sheet, measured, share."""
    known, measured = document["known"] or {}, document["measured"] or {}
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("peak")
    for name in ("data sheet", "measured", "best", "of the data sheet"):
        table.add_column(name, justify="right")
    sheet, rates = known.get("peak_tflops") or {}, measured.get("matmul_tflops") or {}
    share = measured.get("share") or {}
    for dtype in (dtype for dtype in DTYPES if known or dtype in rates):
        best = max((rate["best_tflops"] for rate in measured.get("rates", ()) if rate["dtype"] == dtype), default=None)
        table.add_row(
            f"{dtype} {'TOP/s' if dtype == 'int8' else 'TFLOP/s'}",
            tflops(sheet.get(dtype)),
            tflops(rates.get(dtype)),
            tflops(best),
            human_percent((share.get("matmul") or {}).get(dtype)),
        )
    table.add_row(
        "memory GB/s",
        gigabytes(known.get("bandwidth")),
        gigabytes(measured.get("bandwidth")),
        UNKNOWN,
        human_percent(share.get("bandwidth")),
    )
    return table


def products_table(measured: Document) -> Table:
    """Tabulate every timed matmul in the dtype that training uses, largest last."""
    dtype = next(dtype for dtype in DETAIL_DTYPES if dtype in measured["matmul_tflops"])
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    table.add_column(f"{dtype}, {one_line(measured['workload'])} at micro batch {measured['micro_batch']}")
    for name in ("m", "n", "k", "TFLOP/s", "best"):
        table.add_column(name, justify="right")
    for rate in measured["rates"]:
        if rate["dtype"] == dtype:
            sizes = (f"{rate[axis]:,}" for axis in "mnk")
            style = "bold green" if rate["tflops"] == measured["matmul_tflops"][dtype] else ""
            table.add_row(
                one_line(rate["where"]), *sizes, tflops(rate["tflops"]), tflops(rate["best_tflops"]), style=style
            )
    return table


def notes_of(document: Document) -> Iterator[Note]:
    known, measured = document["known"], document["measured"]
    if document["reason"]:
        yield Note(about="unknown", text=one_line(document["reason"]), kind="failed")
    if known:
        yield Note(
            about="peaks", text="dense, without sparsity; a dash is a type the device lacks or no data sheet settles"
        )
        yield Note(about="source", text=known["source"])
        if known["accumulate"]:
            yield Note(about="sums in", text=known["accumulate"])
        if known["notes"]:
            yield Note(about="note", text=known["notes"])
    if measured:
        moved = ", ".join(f"{name} {gigabytes(rate)} GB/s" for name, rate in measured["bandwidths"].items())
        yield Note(about="memory", text=f"{moved}; bytes read and written")
        versions = ", ".join(f"{name} {one_line(version)}" for name, version in measured["versions"].items() if version)
        yield Note(about="measured", text=f"{one_line(measured['date'])}, medians; {versions}")
        if any((share or 0) > 1 for share in measured["share"]["matmul"].values()):
            yield Note(about="over 100 %", text="the clock ran above the boost clock that the data sheet counts with")
    for note in document["notes"]:
        yield Note(about="note", text=one_line(note))


def tflops(value: float | None) -> str:
    """Format with up to four digits: data sheets have no more."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def _peak_of(row: Document, dtype: str) -> str:
    return tflops(row["peak_tflops"][dtype])


# Columns of the list after the label, and the order in which a narrow terminal drops them; 0 stays.
LIST_COLUMNS: tuple[tuple[str, int, Callable[[Document], str]], ...] = (
    ("family", 2, lambda row: str(row["architecture"])),
    ("SMs", 3, lambda row: str(row["multiprocessors"])),
    *((dtype, LIST_SHED.get(dtype, 0), partial(_peak_of, dtype=dtype)) for dtype in DTYPES),
    ("GiB", 0, lambda row: f"{row['memory_bytes'] / 1024**3:.0f}"),
    ("TB/s", 0, lambda row: f"{row['bandwidth'] / 1e12:.2f}"),
    ("align", 1, lambda row: f"{row['alignment_bytes']} B"),
)


def print_devices(rows: list[Document], console: Console) -> None:
    """Print the whole table, one line per device. --gpu accepts the label, so it is never cut; other columns are
    dropped instead."""
    free = console.options.update(width=LIST_WIDEST)
    tables = [devices_table(rows, level) for level in range(LIST_LEVELS + 1)]
    fitting = (table for table in tables if console.measure(table, options=free).maximum <= console.width)
    console.print(next(fitting, tables[-1]), soft_wrap=True)
    text = "dense TFLOP/s with fp32 sums (int8: TOP/s); SMs are compute units on AMD; --name has the sources"
    console.print(Text(f"\n{text}", style="dim"))


def devices_table(rows: list[Document], level: int = 0) -> Table:
    """Build the table without the columns that are dropped up to this level."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("device", no_wrap=True)
    columns = [(name, cell) for name, shed, cell in LIST_COLUMNS if shed == 0 or shed > level]
    for name, _ in columns:
        table.add_column(name, justify="left" if name == "family" else "right", no_wrap=True)
    for row in rows:
        table.add_row(row["label"], *(cell(row) for _, cell in columns))
    return table


def gigabytes(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value / 1e9:,.0f}" if value >= 1e11 else f"{value / 1e9:.1f}"


def _or_dash(value: Any, form: str = "") -> str:
    return UNKNOWN if value is None else format(value, form)


class MeasureBar:
    """One bar on a terminal, one line per phase elsewhere."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}", style="cyan"), BarColumn(), TimeElapsedColumn())
        self._console, self._last = console, ""
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> MeasureBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def phase(self, name: str, done: int | None = None, total: int | None = None, seconds: float | None = None) -> None:
        self._bar.update(self._task, description=one_line(name), completed=done or 0, total=total)
        if not self._console.is_terminal and name != self._last:
            self._console.print(Text(one_line(name)), soft_wrap=True)
        self._last = name
