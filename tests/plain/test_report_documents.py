"""The ladder documents that the report's tests draw, and the promise that every one of them is drawn whatever it lacks.

The other test_report files read this one with runpy: tests are no package, so they cannot import each other.
"""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from redline.report.charts import ladder_chart, loss_chart
from redline.report.live import finished_line
from redline.report.markdown import markdown_table
from redline.report.page import render_page
from redline.report.table import ladder_table, print_ladder

Document = dict[str, Any]
CONVENTION = "PaLM: 6N plus the full attention square"
LONG_REASON = (
    "cuDNN refused the graph for a head size of 64 with a causal mask on this driver; the log of the job is in jobs/x"
)
SCRIPT = "<script>alert('redline')</script>"


def loss_curve(start: float, steps: int = 20, wobble: float = 0.0) -> list[float]:
    return [start - 3.9 * (1 - math.exp(-step / 9)) + wobble * math.sin(1.7 * step) for step in range(steps)]


def ok_row(rung: str, ms: float, step: float | None, base_ms: float = 138.5, **changes: Any) -> dict[str, Any]:
    """A measured row of gpt2 at a micro batch of 16: 16,384 tokens a step."""
    rate = 16384 / ms * 1e3
    row = {
        "rung": rung,
        "title": f"{rung}, as the ladder names it",
        "status": "ok",
        "reason": None,
        "kept": True,
        "recipe": [rung],
        "micro_batch": 16,
        "step_seconds": {"median": ms / 1e3, "p10": ms * 0.991 / 1e3, "p90": ms * 1.012 / 1e3, "n": 40},
        "tokens_per_second": rate,
        "speedup_total": base_ms / ms,
        "speedup_step": step,
        "within_noise": False,
        "mfu": rate * 855.2e6 / 989.4e12,
        "mfu_convention": CONVENTION,
        "hfu": rate * 855.2e6 / 989.4e12,
        "peak_bytes": int(31.4 * 1024**3),
        "outside_bytes": 540 * 1024**2,
        "predicted_peak_bytes": int(30.9 * 1024**3),
        "compile_seconds": None,
        "loss_first": 10.97,
        "loss_last": 7.54,
        "loss_curve": loss_curve(10.97),
        "reference_curve": loss_curve(10.975),
        "equivalence": {
            "class": "rounding-only",
            "verdict": "rounding",
            "detail": "largest gap 0.0031 at step 14; band 0.0180",
        },
        "kernels": {"attention": "naive", "matmul_dtypes": ["bf16"], "graph_breaks": None, "syncs_per_step": 1.0},
    }
    return {**row, **changes}


def empty_row(rung: str, status: str, reason: str) -> dict[str, Any]:
    """A rung that did not run: every figure is null."""
    unknown = dict.fromkeys(ok_row("x", 1.0, None))
    return {**unknown, "rung": rung, "title": rung, "status": status, "reason": reason, "recipe": []}


def twelve_rows() -> list[dict[str, Any]]:
    same = {"class": "bit-exact", "verdict": "same", "detail": "all 20 losses agree to the last bit"}
    wrong = {"class": "changes-maths", "verdict": "different", "detail": "starts at 16.42, ln V is 10.82"}
    flash = {"attention": "flash_fwd_kernel", "matmul_dtypes": ["bf16"], "graph_breaks": 0, "syncs_per_step": 0.1}
    return [
        ok_row("baseline", 138.5, None, equivalence=same, kernels={"attention": "naive", "matmul_dtypes": ["fp32"]}),
        ok_row("tf32", 72.3, 1.916, loss_curve=loss_curve(10.97, wobble=0.01)),
        ok_row("no-sync", 72.1, 1.003, within_noise=True, equivalence=same),
        ok_row("bf16", 54.8, 1.316, loss_curve=loss_curve(10.97, wobble=0.03)),
        ok_row(
            "fp16", 55.9, 1.29, kept=False, reason="slower than bf16: 0.98x", loss_curve=loss_curve(10.97, wobble=0.02)
        ),
        ok_row("compile", 36.1, 1.518, compile_seconds=48.2, loss_curve=loss_curve(10.98, wobble=0.02), kernels=flash),
        ok_row("flash", 27.4, 1.318, compile_seconds=41.0, peak_bytes=int(24.2 * 1024**3), kernels=flash),
        empty_row("cudnn-attention", "failed", LONG_REASON),
        ok_row("padded-vocab", 26.2, 1.046, loss_curve=loss_curve(10.98, wobble=0.015), kernels=flash),
        ok_row(
            "tied-weights", 25.8, 1.015, equivalence=wrong, loss_first=16.42, loss_curve=loss_curve(16.42, wobble=0.1)
        ),
        ok_row("fused-adamw", 25.2, 1.04, loss_curve=loss_curve(10.97, wobble=0.012), kernels=flash),
        empty_row(
            "loader-workers", "skipped", "one core only: a worker process would take it from the training process"
        ),
    ]


def full_document() -> Document:
    """Twelve rungs on an H200, with every kind of row."""
    rows = twelve_rows()
    shape = {"layers": 12, "heads": 12, "d_model": 768, "d_ff": 3072, "vocab": 50257, "sequence": 1024}
    return {
        "workload": {
            "name": "gpt2",
            "shape": shape,
            "tokenizer": "gpt2",
            "micro_batch": 16,
            "learning_rate": 6e-4,
            "corpus": "sample",
        },
        "hardware": {
            "kind": "cuda",
            "name": "NVIDIA H200",
            "count": 1,
            "memory_bytes": 150_000_000_000,
            "capability": [9, 0],
            "multiprocessors": 132,
            "driver": "570.124.06",
            "cpu_name": "Intel(R) Xeon(R) Platinum 8480C",
            "cpu_cores": 16,
            "features": ["bf16", "fp16", "tf32", "flash", "cudnn-attention", "compile"],
            "missing": {},
            "peak_tflops": {"fp32": 67.0, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4},
        },
        "versions": {
            "redline": "0.1.0",
            "python": "3.11.7",
            "torch": "2.11.0",
            "cuda": "12.8",
            "cudnn": None,
            "triton": "3.6.0",
            "numpy": "2.4.6",
        },
        "command": "redline ladder gpt2",
        "date": "2026-11-15T03:00:00+00:00",
        "finished": True,
        "settings": {"check_steps": 20, "timed_seconds": 4.0, "seed": 1337},
        "reference": {"ln_vocab": math.log(50257), "loss_curve": loss_curve(10.975), "precision": "fp32"},
        "noise": {"fraction": 0.012, "source": "within-run"},
        "rows": rows,
        "best": {"rung": "fused-adamw", "micro_batch": 16, "tokens_per_second": rows[10]["tokens_per_second"]},
    }


def empty_document() -> Document:
    """Stopped before the first row; nothing is known but the question."""
    nothing: Document = {
        "hardware": None,
        "versions": {},
        "settings": {},
        "reference": None,
        "noise": {"fraction": None, "source": None},
    }
    return {**full_document(), **nothing, "date": None, "finished": False, "rows": [], "best": None}


def unfinished_document() -> Document:
    document = full_document()
    rows = document["rows"][:4]
    best = {"rung": "bf16", "micro_batch": 16, "tokens_per_second": rows[3]["tokens_per_second"]}
    return {**document, "finished": False, "rows": rows, "best": best}


def unknown_device_document() -> Document:
    """A CPU: no peak, so no MFU; no allocator, so no peak memory."""
    document = full_document()
    document["hardware"].update(kind="cpu", name="AMD EPYC 9R14", peak_tflops=None, driver=None)
    for row in document["rows"]:
        row.update(mfu=None, hfu=None, mfu_convention=None, peak_bytes=None)
    return document


def hostile_document() -> Document:
    """Every text is an attack on whatever prints it: HTML, rich markup, an escape sequence, a table cell."""
    evil = f"{SCRIPT} [bold red]x[/bold red] [/] \x1b[31m | `c` \n\u202e &amp; \"'"

    def poison(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: poison(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [poison(item) for item in value]
        return evil if isinstance(value, str) and key not in ("status", "kind", "verdict", "rung") else value

    return poison(full_document())


DOCUMENTS = {
    "full": full_document,
    "empty": empty_document,
    "unfinished": unfinished_document,
    "unknown-device": unknown_device_document,
    "hostile": hostile_document,
}


def draw_everything(document: Document, widths: tuple[int, ...] = (100, 80, 40)) -> str:
    """Through every public function; what they print, at a wide and at a narrow terminal."""
    printed = []
    for width in widths:
        console = Console(file=io.StringIO(), width=width, color_system=None)
        print_ladder(document, console)
        console.print(ladder_table(document))
        printed.append(console.file.getvalue())
    rows = document.get("rows") or []
    printed += [finished_line(row).plain for row in rows]
    printed += [
        ladder_chart(rows),
        loss_chart(rows, document.get("reference"), 320),
        render_page(document),
        markdown_table(document),
    ]
    return "\n".join(printed)


def nulled(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a document that can be null; of lists, only the rows are entered."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if path[-1:] == ("rows",) else ()
    for key, item in items:
        yield (*path, key)
        yield from nulled(item, (*path, key))


def with_null(document: Document, path: tuple[Any, ...]) -> Document:
    document = copy.deepcopy(document)
    target = document
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = None
    return document


def small_document() -> Document:
    document = full_document()
    return {**document, "rows": [document["rows"][5], document["rows"][7]]}


# A row itself is never null, so paths such as ("rows", 1) are left out.
NULL_PATHS = [path for path in nulled(small_document()) if not (len(path) == 2 and path[0] == "rows")]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_document_is_drawn(name: str) -> None:
    assert draw_everything(DOCUMENTS[name]())


@pytest.mark.parametrize("first", range(0, len(NULL_PATHS), 40))
def test_any_value_may_be_null(first: int) -> None:
    for path in itertools.islice(NULL_PATHS, first, first + 40):
        text = draw_everything(with_null(small_document(), path), widths=(80,))
        assert "None" not in text, f"{path} is printed as None"


def test_all_figures_of_a_row_may_be_null_or_absent() -> None:
    bare = {"rung": "tf32", "status": "ok"}
    assert "None" not in draw_everything({"rows": [bare, {**empty_row("bf16", "ok", ""), "kept": True}]})


def test_a_document_of_nothing_is_drawn() -> None:
    assert "None" not in draw_everything({})
