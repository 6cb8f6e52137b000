"""`redline hardware`: what this machine is, what its data sheet promises, and what it reaches when measured."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from redline.commands.common import add_common, check_sizes, command_line
from redline.core.errors import EXIT_DONE, UserError

if TYPE_CHECKING:
    from redline.core.devices import Device
    from redline.core.hardware import MeasuredPeaks

DEFAULT_WORKLOAD = ""  # --measure without a value: the default depends on the machine


def add_hardware(commands: Any) -> None:
    hardware = commands.add_parser(
        "hardware",
        help="what this machine is, its data-sheet peaks, and what it measures",
        description="What this machine is, what the data sheet promises, and with --measure what it really does.",
        epilog="Exit codes: 0 done; 2 a mistake in the command. A device we do not know has no peaks and says why.",
    )
    hardware.add_argument("--name", metavar="NAME", help="look up a device by label or driver name, such as A100-80")
    hardware.add_argument("--list", action="store_true", help="print every device we know, and exit")
    hardware.add_argument(
        "--measure",
        metavar="WORKLOAD",
        nargs="?",
        const=DEFAULT_WORKLOAD,
        help="time this workload's own matrix products, square ones and memory traffic, and keep the result "
        "(default: gpt2 on a CUDA device, tiny elsewhere)",
    )
    hardware.add_argument("--micro-batch", metavar="N", type=int, help="with --measure: sequences per step")
    hardware.add_argument(
        "--seconds", metavar="S", type=float, help="with --measure: time to spend (default: 20, on a CPU 10)"
    )
    hardware.add_argument(
        "--device", choices=("cuda", "cpu"), help="with --measure (default: cuda where torch sees one)"
    )
    add_common(hardware)
    hardware.set_defaults(run=run_hardware)


def run_hardware(options: argparse.Namespace) -> int:
    check_together(options)
    if options.list:
        return list_devices(options)
    return show(hardware(options), options)


def hardware(options: argparse.Namespace) -> dict[str, Any]:
    """Return the document that --json prints."""
    check_together(options)
    if options.name is not None:
        return look_up(options.name)
    return describe_machine() if options.measure is None else measure_machine(options)


def check_together(options: argparse.Namespace) -> None:
    """Refuse options that would be ignored."""
    asked = [name for name in ("name", "list", "measure") if getattr(options, name) not in (None, False)]
    if len(asked) > 1:
        raise UserError(
            " and ".join(f"--{name}" for name in asked) + " were given together",
            "each is a question of its own",
            "ask one at a time",
        )
    for name in ("micro_batch", "seconds", "device"):
        if getattr(options, name) is not None and options.measure is None:
            option = "--" + name.replace("_", "-")
            raise UserError(
                f"{option} without --measure", "only a measurement has it", f"add --measure, or drop {option}"
            )
    check_sizes(options, ("micro_batch",))


def look_up(name: str) -> dict[str, Any]:
    """Describe a device by name. A driver's name that we do not know is an answer, not a mistake."""
    from redline.core.devices import find_device, looks_like_driver_name, lookup, why_unknown
    from redline.machine import find_measured

    try:
        device, reason = lookup(name) or find_device(name), None
    except UserError:
        if not looks_like_driver_name(name):
            raise
        device, reason = None, why_unknown(name)
    measured, notes = find_measured((name,) if device is None else device.names)
    return document(this=None, known=device, reason=reason, measured=measured, notes=notes)


def describe_machine() -> dict[str, Any]:
    from redline.core.values import to_json
    from redline.machine import find_measured, this_machine

    machine = this_machine()
    names = (machine.name,) if machine.known is None else machine.known.names
    measured, passed_over = find_measured(names, machine.driver)
    notes = (*machine.notes, *passed_over)
    return document(this=to_json(machine), known=machine.known, reason=machine.reason, measured=measured, notes=notes)


def measure_machine(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, save the result, and compare it with the data sheet of the measured device."""
    from rich.console import Console

    from redline.core.devices import lookup, why_unknown
    from redline.core.values import to_json
    from redline.machine import this_machine
    from redline.report.hardware import MeasureBar
    from redline.search.matmuls import measure_peaks

    with MeasureBar(Console(stderr=True)) as bar:
        peaks = measure_peaks(
            options.measure or None,
            micro_batch=options.micro_batch,
            seconds=options.seconds,
            device=options.device,
            command=getattr(options, "command", None) or command_line(),
            on_progress=bar.phase,
        )
    machine = this_machine()
    known, reason = machine.known, machine.reason
    if peaks.name != machine.name:  # the CPU was asked for, or torch sees a device that NVML does not
        known = lookup(peaks.name) if peaks.kind == "cuda" else None
        reason = why_unknown(peaks.name) if known is None else None
    notes = (*machine.notes, *peaks.failed, *keep(peaks, known))
    return document(this=to_json(machine), known=known, reason=reason, measured=peaks, notes=notes)


def keep(peaks: MeasuredPeaks, known: Device | None) -> tuple[str, ...]:
    """Save a measurement. One that cannot or should not be saved is still shown, with the note returned here."""
    from redline.core.hardware import beyond_the_data_sheet
    from redline.machine import save_measured

    reason = None if known is None else beyond_the_data_sheet(peaks, known)
    if reason is not None:
        return (f"not kept: {reason}",)
    try:
        print(f"kept in {save_measured(peaks)}", file=sys.stderr)
    except OSError as error:
        return (f"not kept: {error}; set XDG_CACHE_HOME to a folder you may write to",)
    return ()


def document(
    *,
    this: dict[str, Any] | None,
    known: Device | None,
    reason: str | None,
    measured: MeasuredPeaks | None,
    notes: tuple[str, ...],
) -> dict[str, Any]:
    return {
        "this": this,
        "known": None if known is None else device_json(known),
        "reason": reason,
        "measured": None if measured is None else measured_json(measured, known),
        "notes": list(notes),
    }


def device_json(device: Device) -> dict[str, Any]:
    """Return a device's row with every dtype in it: null if the device lacks it or no data sheet states it."""
    from redline.core.devices import DTYPES
    from redline.core.values import to_json

    peaks = {dtype: device.peak_tflops.get(dtype) for dtype in DTYPES}
    return {"name": device.names[0], **to_json(device), "peak_tflops": peaks}


def measured_json(measured: MeasuredPeaks, known: Device | None) -> dict[str, Any]:
    """Return the measurement with its rates and their shares of the data sheet: null if a rate cannot be right."""
    from redline.core.hardware import beyond_the_data_sheet
    from redline.core.values import to_json

    if known is not None and beyond_the_data_sheet(measured, known):
        known = None
    rates = [{**to_json(rate), "tflops": rate.tflops, "best_tflops": rate.best_tflops} for rate in measured.rates]
    sheet = {} if known is None else known.peak_tflops
    matmul = {dtype: rate / sheet[dtype] if dtype in sheet else None for dtype, rate in measured.matmul_tflops.items()}
    bandwidth = None if known is None else measured.bandwidth / known.bandwidth
    return {**to_json(measured), "rates": rates, "share": {"matmul": matmul, "bandwidth": bandwidth}}


def list_devices(options: argparse.Namespace) -> int:
    from redline.core.devices import DEVICES

    rows = [device_json(device) for device in DEVICES]
    if options.json:
        print(json.dumps(rows))
        return EXIT_DONE
    from rich.console import Console

    from redline.report.hardware import print_devices

    print_devices(rows, Console())
    return EXIT_DONE


def show(answer: dict[str, Any], options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps(answer))
        return EXIT_DONE
    from rich.console import Console

    from redline.report.hardware import print_hardware

    print_hardware(answer, Console())
    return EXIT_DONE
