"""`redline lint`: sizes of a model that cost speed, what they cost on a device, and the nearest good ones."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.commands.common import add_common, check_html, check_sizes, command_line, write_html
from redline.core.errors import EXIT_DONE, EXIT_FAILED, UserError, explained, unknown_name
from redline.core.host import timestamp

if TYPE_CHECKING:
    from redline.core.devices import Device
    from redline.core.workload import Shape, Workload
    from redline.predict.lint import Report, Seconds
    from redline.predict.subject import Subject
    from redline.workloads import Resolved

DEFAULT_WORKLOAD = "gpt2"
DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp8")
USUAL_SEQUENCE = 4096  # a config states the longest context, and few train at that
USUAL_TOKENS = 16384  # per step and GPU unless given: enough to fill any device
MEASURE_SECONDS = 20.0
NO_FILE = ""  # --fix without a value


def add_lint(commands: Any) -> None:
    parser = commands.add_parser(
        "lint",
        help="find the sizes that cost speed, and the nearest good ones",
        description="Find the sizes of a model that cost speed on a GPU (alignment, tiles, waves, rules of thumb), "
        "what they cost by prediction, and the nearest good ones.",
        epilog="Exit codes: 0 done; 1 findings that cost speed, with --strict; 2 a mistake in the command.",
    )
    parser.add_argument(
        "workload",
        nargs="?",
        default=DEFAULT_WORKLOAD,
        metavar="WORKLOAD",
        help="a preset, a Hugging Face config.json, a model folder, a shape file, or FILE.py:FACTORY (default: gpt2)",
    )
    parser.add_argument("--gpu", metavar="NAME", help="the device, such as A100-80 (default: this machine's, if known)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="precision of the matmuls (default: bf16, or fp16 where a device lacks it)"
    )
    parser.add_argument("--tp", metavar="N", type=int, default=1, help="tensor-parallel GPUs (default: 1)")
    parser.add_argument("--micro-batch", metavar="N", type=int, help="sequences per step (default: the preset's)")
    parser.add_argument(
        "--sequence", metavar="N", type=int, help="tokens per sequence (default: the model's context, 4096 at most)"
    )
    parser.add_argument(
        "--ignore", metavar="RULE,...", help="leave these rules out, such as head-count when the weights are given"
    )
    parser.add_argument("--strict", action="store_true", help="leave with exit code 1 if a finding costs speed")
    parser.add_argument(
        "--fix",
        nargs="?",
        const=NO_FILE,
        metavar="FILE",
        help="write the suggested config or shape (default: NAME.fixed.json here)",
    )
    parser.add_argument("--overwrite", action="store_true", help="with --fix: FILE may exist, and may be the input")
    parser.add_argument(
        "--measure", action="store_true", help="time the GEMMs before and after on this machine's GPU (needs torch)"
    )
    parser.add_argument(
        "--seconds", metavar="S", type=float, help=f"with --measure: time to spend (default: {MEASURE_SECONDS:g})"
    )
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page with every GEMM and its efficiency, before and after"
    )
    add_common(parser)
    parser.set_defaults(run=run_lint)


def run_lint(options: argparse.Namespace) -> int:
    if options.html is not None:
        check_html(options.html, "lint.html")
    found = lint(options)
    show(found, options)
    if options.html is not None:
        write_page(found, options.html)
    costly = any(not finding["mild"] for finding in found["findings"])
    return EXIT_FAILED if options.strict and costly else EXIT_DONE


def lint(options: argparse.Namespace) -> dict[str, Any]:
    """Return the document that --json prints; measure and write if the options say so."""
    from redline.predict.lint import document
    from redline.predict.lint import lint as lint_subject
    from redline.workloads import resolve_shape
    from redline.workloads.python_file import is_python_file

    check_options(options)
    ignored = ignored_rules(options.ignore)
    if is_python_file(options.workload):
        return lint_python_file(options, ignored)
    resolved = resolve_shape(options.workload)
    device, hardware = measured_device(options) if options.measure else known_device(options)
    subject, notes = choose_subject(options, resolved, device)
    report = lint_subject(subject, ignored)
    target = fix_target(options, resolved, report)
    seconds = measure(report, options) if options.measure and report.changes else None
    return {
        "name": resolved.name,
        "origin": resolved.origin.text,
        "date": timestamp(),
        "command": command_line(),
        **document(report, hardware, seconds),
        "notes": [*notes, *resolved.origin.notes, *write_fix(target, resolved, report, options)],
    }


def lint_python_file(options: argparse.Namespace, ignored: tuple[str, ...]) -> dict[str, Any]:
    from redline.search.inspect import find_workload

    refuse_for_python(options)
    workload = find_workload(options.workload, sequence=options.sequence)
    return lint_traced(options, ignored, workload, f"Python file {options.workload}")


def lint_traced(
    options: argparse.Namespace, ignored: tuple[str, ...], workload: Workload, origin: str
) -> dict[str, Any]:
    """Lint a user's own model by the sizes and lines seen in its trace. If the file describes a shape, its sizes are
    linted like those of any shape, and only the lines come from the trace."""
    from redline.core.traced import Traced
    from redline.core.workload import Shape
    from redline.predict.lint import document
    from redline.predict.lint import lint as lint_subject
    from redline.predict.subject import Subject
    from redline.predict.traced_lint import findings_of, quiet_sizes, traced_lint_document, unjudged_products
    from redline.workloads.python_file import without_autocast

    traced = workload.shape
    assert isinstance(traced, Traced)
    device, hardware = known_device(options)
    size, dtype = options.micro_batch or workload.micro_batch, choose_dtype(options.dtype, device)
    described = None if traced.described is None else Shape(**traced.described)
    sizes_are_linted = described is None and "layer-size" not in ignored
    found = findings_of(
        traced,
        micro_batch=size,
        dtype=dtype,
        device=device,
        ignore=ignored if described is None else (*ignored, "layer-size"),
    )
    if described is None:
        body = traced_lint_document(traced, found, hardware=hardware, micro_batch=size, dtype=dtype)
    else:
        subject = Subject(shape=described, micro_batch=size, dtype=dtype, device=device)
        body = document(lint_subject(subject, ignored), hardware)
        body["findings"] += [finding.document() for finding in found]
    return {
        "name": workload.name,
        "origin": origin,
        "date": timestamp(),
        "command": command_line(),
        **body,
        "notes": [
            *([] if traced.no_autocast is None else [without_autocast(traced.no_autocast)]),
            *(quiet_sizes(traced, micro_batch=size, dtype=dtype, device=device) if sizes_are_linted else ()),
            *(unjudged_products(traced, dtype) if sizes_are_linted else ()),
            *([] if options.micro_batch else [f"micro batch {size} is assumed (--micro-batch)"]),
        ],
    }


def refuse_for_python(options: argparse.Namespace) -> None:
    for name, why in (
        ("fix", "its sizes are written in its own code: there is no config to write"),
        ("measure", "only the changed code can show what a change of it gains"),
        ("html", "the page shows the matmuls of a described shape"),
        ("tp", "how a model of one's own is cut among GPUs is not known"),
    ):
        if getattr(options, name) not in (None, False, 1):
            raise UserError(f"--{name} with a Python file", why, f"leave --{name} out")


def check_options(options: argparse.Namespace) -> None:
    check_sizes(options, ("micro_batch", "tp", "sequence"))
    if options.seconds is not None:
        from redline.search.matmuls import check_seconds

        check_seconds(options.seconds)
    needs = {"overwrite": ("--fix", options.fix is not None), "seconds": ("--measure", options.measure)}
    for name, (other, given) in needs.items():
        if getattr(options, name) and not given:
            raise UserError(f"--{name} without {other}", f"only {other} uses it", f"add {other}, or drop --{name}")


def ignored_rules(words: str | None) -> tuple[str, ...]:
    from redline.predict.lint_rules import RULES
    from redline.predict.traced_lint import RULES as TRACED_RULES

    names = tuple(word.strip() for word in (words or "").split(",") if word.strip())
    known = [*(rule.name for rule in RULES), *TRACED_RULES]
    for name in names:
        if name not in known:
            raise unknown_name("rule", name, known)
    return names


# the device


def known_device(options: argparse.Namespace) -> tuple[Device | None, dict[str, Any]]:
    """Return the named device, or this machine's if the driver and the table know it, and its part of the document."""
    from redline.core.devices import find_device
    from redline.machine import this_machine

    if options.gpu is not None:
        device = find_device(options.gpu)
        return device, hardware_json(device, None)
    machine = this_machine()
    return machine.known, hardware_json(machine.known, f"{machine.name}: {machine.reason}")


def measured_device(options: argparse.Namespace) -> tuple[Device | None, dict[str, Any]]:
    """Return the device that torch sees, which is the one measured whatever NVML says, and its part of the document."""
    from redline.core.devices import find_device, why_unknown
    from redline.search.launch import probe_machine

    wanted = None if options.gpu is None else find_device(options.gpu)
    seen, versions = probe_machine(None)
    if seen.kind != "cuda":
        raise UserError(
            "no GPU to measure on",
            "torch sees no CUDA device here",
            "run --measure on a machine with a GPU; without it, --gpu NAME predicts for any",
        )
    device = seen.device
    if wanted is not None and wanted != device:
        raise UserError(
            f"--gpu {options.gpu} with --measure",
            f"what is measured is this machine's {seen.name}, and a prediction for another says nothing about it",
            "drop --gpu",
        )
    found = hardware_json(device, f"{seen.name}: {why_unknown(seen.name)}")
    return device, {**found, "measured": {"name": seen.name, "driver": seen.driver, "versions": versions}}


def hardware_json(device: Device | None, reason: str | None) -> dict[str, Any]:
    known = ("multiprocessors", "alignment_bytes", "source")
    return {
        "name": None if device is None else device.label,
        **{name: None if device is None else getattr(device, name) for name in known},
        "reason": reason if device is None else None,
        "measured": None,
    }


# the subject


def choose_subject(
    options: argparse.Namespace, resolved: Resolved, device: Device | None
) -> tuple[Subject, tuple[str, ...]]:
    """Return what to lint, and a note for every choice that the user did not make."""
    from redline.predict.subject import DEFAULT_ALIGNMENT_BYTES, Subject

    notes = []
    if device is None:
        notes.append(
            f"unknown device: alignment checked for {DEFAULT_ALIGNMENT_BYTES} bytes; no gains, no tiles, no waves "
            "(--gpu NAME predicts them)"
        )
    sequence = options.sequence or min(resolved.shape.sequence, USUAL_SEQUENCE)
    if options.sequence is None and sequence < resolved.shape.sequence:
        notes.append(
            f"sequences of {sequence} tokens are assumed, the context is {resolved.shape.sequence} (--sequence)"
        )
    micro_batch, assumed = choose_micro_batch(options, resolved, sequence)
    subject = Subject(
        shape=shape_of_run(resolved.shape, sequence),
        micro_batch=micro_batch,
        tp=options.tp,
        dtype=choose_dtype(options.dtype, device),
        device=device,
        batch_is_chosen=options.micro_batch is not None,
    )
    return subject, (*notes, *assumed)


def shape_of_run(shape: Shape, sequence: int) -> Shape:
    """Return the shape at this sequence length. The model stays as it is: its learned positions are kept."""
    return (
        shape if sequence == shape.sequence else replace(shape, sequence=sequence, max_positions=shape.positions_count)
    )


def choose_micro_batch(options: argparse.Namespace, resolved: Resolved, sequence: int) -> tuple[int, tuple[str, ...]]:
    from redline.workloads import PRESETS

    if options.micro_batch is not None:
        return options.micro_batch, ()
    if resolved.origin.kind == "preset":
        return PRESETS[resolved.name].micro_batch, ()
    size = max(1, USUAL_TOKENS // sequence)
    return size, (f"micro batch {size} is assumed, {size * sequence:,} tokens per pass (--micro-batch)",)


def choose_dtype(dtype: str | None, device: Device | None) -> str:
    if dtype is not None and dtype not in DTYPES:  # argparse checks this, a call from Python does not
        raise unknown_name("dtype", dtype, DTYPES)
    if device is None:
        return dtype or DTYPES[0]
    if dtype is None:
        return next(name for name in DTYPES if name in device.peak_tflops)
    if dtype not in device.peak_tflops:
        raise UserError(
            f"{device.label} has no {dtype}",
            "its data sheet states no rate for it",
            f"use one of: {', '.join(name for name in DTYPES if name in device.peak_tflops)}",
        )
    return dtype


# --measure


def measure(report: Report, options: argparse.Namespace) -> Seconds:
    """Return the seconds of one call of every GEMM, as it is and with each fix, timed in one interleaved run."""
    from rich.console import Console

    from redline.predict.lint import gemms_to_time
    from redline.report.hardware import MeasureBar
    from redline.search.matmuls import time_gemms

    gemms = gemms_to_time(report)
    with MeasureBar(Console(stderr=True)) as bar:
        times = time_gemms(
            gemms,
            dtype=report.subject.dtype,
            device="cuda",
            seconds=options.seconds or MEASURE_SECONDS,
            on_progress=bar.phase,
        )
    return dict(zip(gemms, times, strict=True))


# --fix


def fixed_shape(resolved: Resolved, report: Report) -> Shape:
    """Return the suggested shape to write. Unless the model's own sequence length was linted, the length is a setting
    of the run and the model keeps its own."""
    before, after = report.subject.shape, report.suggested.shape
    if before.sequence == resolved.shape.sequence:
        return after
    return replace(after, sequence=resolved.shape.sequence, max_positions=resolved.shape.max_positions)


def fix_target(options: argparse.Namespace, resolved: Resolved, report: Report) -> Path | None:
    """Return where to write the fix, if there is one, checked before anything is measured or printed."""
    if options.fix is None or fixed_shape(resolved, report) == resolved.shape:
        return None
    path = Path(options.fix or f"{resolved.name}.fixed.json").expanduser()
    if path.is_dir():
        raise UserError(
            f"{path} is a folder", "the fix is written into one file", f"name it: --fix {path / 'fixed.json'}"
        )
    if path.exists() and not options.overwrite:
        raise UserError(
            f"{path} exists", "nothing is overwritten unless told to", "choose another FILE, or add --overwrite"
        )
    return path


def write_fix(target: Path | None, resolved: Resolved, report: Report, options: argparse.Namespace) -> tuple[str, ...]:
    """Write the fix and return a note. A config keeps the fields that the fix does not change; anything else becomes a
    shape file."""
    from redline.core.job import write_atomically
    from redline.workloads import changed_document

    if target is None:
        return ("--fix: no size of the shape to change, so nothing was written",) if options.fix is not None else ()
    text = json.dumps(changed_document(resolved, fixed_shape(resolved, report)), indent=2) + "\n"
    with explained(f"cannot write {target}", "choose a FILE you may write to"):
        write_atomically(target, text)
    return (f"wrote {target}",)


# --html


def write_page(found: dict[str, Any], path: Path) -> None:
    from redline.report.lint_page import render_lint_page

    write_html(path, render_lint_page(found))


def show(found: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(found))
        return
    from rich.console import Console

    from redline.report.lint import print_lint

    print_lint(found, Console())
