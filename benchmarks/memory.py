"""Peak memory of many recipes and micro batches on this GPU, beside what `redline estimate` predicts.

    python benchmarks/memory.py --json > records/DATE-DEVICE-memory.json

Each combination trains a few steps in its own process; its figure is the allocator's peak over the last of them.
Several run at a time as long as their predictions fit the card together: that disturbs times, but not memory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from redline.core.host import core_count
from redline.predict.memory import predict_memory
from redline.rungs import plan_of
from redline.workloads import resolve_workload

PLAIN = ("tf32", "no-sync", "bf16", "padded-vocab", "tied-weights", "fused-adamw")
FLASH, COMPILED = (*PLAIN, "flash"), (*PLAIN, "compile")
LAST = (*COMPILED, "cudnn-attention")
FUSED, CHUNKED = (*LAST, "fused-loss"), (*LAST, "chunked-loss")
NARROW = (*FUSED, "bf16-residual", "sigmoid-gelu")
COMBINATIONS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("gpt2", (), 16),
    ("gpt2", ("tf32", "no-sync", "bf16"), 16),
    ("gpt2", ("tf32", "no-sync", "fp16"), 16),
    ("gpt2", PLAIN, 16),
    ("gpt2", PLAIN, 32),
    ("gpt2", (*PLAIN, "selective-checkpointing"), 32),
    *(("gpt2", FLASH, size) for size in (16, 32, 64)),
    ("gpt2", (*FLASH, "chunked-loss"), 32),
    ("gpt2", (*FLASH, "fused-loss"), 32),
    ("gpt2", (*FLASH, "checkpointing"), 64),
    ("gpt2", (*FLASH, "chunked-loss", "checkpointing"), 64),
    ("gpt2", COMPILED, 16),
    ("gpt2", COMPILED, 32),
    *(("gpt2", LAST, size) for size in (16, 32, 64)),
    *(("gpt2", FUSED, size) for size in (16, 32, 64)),
    *(("gpt2", NARROW, size) for size in (16, 64)),
    *(("gpt2", CHUNKED, size) for size in (16, 64)),
    ("gpt2", (*LAST, "checkpointing"), 64),
    ("gpt2", (*CHUNKED, "checkpointing"), 64),
    ("gpt2-medium", FUSED, 16),
    ("gpt2-large", ("tf32", "no-sync", "bf16", "compile", "flash", "fused-adamw"), 8),
    ("gpt2-xl", FLASH, 4),
    ("gpt2-xl", (*FUSED, "checkpointing"), 1),
)
STEPS = 3  # the first two allocate the optimizer's state and compile
START_SECONDS = 4.0  # between two starts: a process allocates its memory late


def measure(workload_name: str, rungs: list[str], micro_batch: int, device_name: str) -> dict[str, Any]:
    """Train a few steps and return the memory they take; runs in the child."""
    import torch

    from redline.data.tokens import prepare_tokens
    from redline.engine.build import build
    from redline.engine.memory import peak_bytes, reset_peak

    workload, device = resolve_workload(workload_name), torch.device(device_name)
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.npy"
        prepare_tokens(workload, tokens)
        training = build(workload, plan_of(rungs), micro_batch=micro_batch, tokens=tokens, device=device)
        for step in range(2 * STEPS):
            if step == STEPS:
                reset_peak(device)
            training.step(next(training.batches)).item()
        found: dict[str, Any] = {"peak_bytes": peak_bytes(device)}
        if device.type == "cuda":
            found["after_step_bytes"] = torch.cuda.memory_allocated()
            found["reserved_bytes"] = torch.cuda.memory_reserved()
        training.close()
    return found


def prediction(combination: tuple[str, tuple[str, ...], int]) -> Any:
    name, rungs, micro_batch = combination
    return predict_memory(resolve_workload(name).shape, plan_of(rungs), micro_batch=micro_batch)


def start(index: int, device: str, logs: Path) -> subprocess.Popen[bytes]:
    name, rungs, micro_batch = COMBINATIONS[index]
    caches = {f"{tool}_CACHE_DIR": str(logs / f"{tool}-{index}") for tool in ("TORCHINDUCTOR", "TRITON")}
    words = ["--child", name, ",".join(rungs), str(micro_batch), device]
    with open(logs / f"{index}.out", "wb") as out, open(logs / f"{index}.err", "wb") as err:
        return subprocess.Popen(
            [sys.executable, __file__, *words], stdout=out, stderr=err, env={**os.environ, **caches}
        )


def run_all(device: str, budget_bytes: int, logs: Path, chosen: list[int]) -> list[dict[str, Any]]:
    """Run the longest first: compiled ones before others, and large ones before small."""
    waiting = sorted(chosen, key=lambda i: ("compile" not in COMBINATIONS[i][1], -prediction(COMBINATIONS[i]).total))
    running: dict[int, subprocess.Popen[bytes]] = {}
    rows: dict[int, dict[str, Any]] = {}
    try:
        _run_waiting(waiting, running, rows, device, budget_bytes, logs)
    except KeyboardInterrupt:  # what was measured is still recorded
        print(f"stopped; {len(rows)} of {len(chosen)} measured", file=sys.stderr)
        for process in running.values():
            process.kill()
    return [rows[index] for index in sorted(rows)]


def _run_waiting(
    waiting: list[int],
    running: dict[int, subprocess.Popen[bytes]],
    rows: dict[int, dict[str, Any]],
    device: str,
    budget_bytes: int,
    logs: Path,
) -> None:
    while waiting or running:
        used = sum(prediction(COMBINATIONS[index]).total for index in running)
        fits = next(
            (i for i in waiting if not running or used + prediction(COMBINATIONS[i]).total < budget_bytes), None
        )
        if fits is not None and len(running) < core_count() // 2 + 1:
            waiting.remove(fits)
            running[fits] = start(fits, device, logs)
            time.sleep(START_SECONDS if device == "cuda" else 0)
        for index in [index for index, process in running.items() if process.poll() is not None]:
            rows[index] = finished_row(index, running.pop(index), logs)
            print(line_of(rows[index]), file=sys.stderr, flush=True)
        time.sleep(0.2)


def finished_row(index: int, process: subprocess.Popen[bytes], logs: Path) -> dict[str, Any]:
    name, rungs, micro_batch = COMBINATIONS[index]
    expected = prediction(COMBINATIONS[index])
    row: dict[str, Any] = {"workload": name, "rungs": list(rungs), "micro_batch": micro_batch}
    row |= {"predicted_bytes": expected.allocated, "moment": expected.moment}
    if process.returncode:
        text = (logs / f"{index}.err").read_text(errors="replace").strip().splitlines()
        return {**row, "peak_bytes": None, "failed": (text or ["no message"])[-1][:300]}
    return {**row, **json.loads((logs / f"{index}.out").read_text().splitlines()[-1])}


def line_of(row: dict[str, Any]) -> str:
    what = f"{row['workload']:12} B={row['micro_batch']:<3} {'+'.join(row['rungs'][-3:]) or 'baseline':48}"
    if row["peak_bytes"] is None:
        return f"{what} failed: {row['failed']}"
    share = row["predicted_bytes"] / row["peak_bytes"] - 1
    return f"{what} {row['peak_bytes'] / 2**30:7.3f} GiB, predicted {share:+.2%} ({row['moment']})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the record on standard output")
    parser.add_argument("--only", type=int, nargs="*", help="indices into COMBINATIONS")
    parser.add_argument("--child", nargs=4, metavar=("WORKLOAD", "RUNGS", "MICRO_BATCH", "DEVICE"))
    options = parser.parse_args()
    if options.child:
        name, rungs, micro_batch, device = options.child
        print(json.dumps(measure(name, [rung for rung in rungs.split(",") if rung], int(micro_batch), device)))
        return 0
    from redline.search.launch import probe_machine

    hardware, versions = probe_machine(None)
    assert hardware.memory_bytes is not None
    chosen = list(range(len(COMBINATIONS))) if options.only is None else options.only
    with tempfile.TemporaryDirectory() as logs:
        rows = run_all(hardware.kind, int(0.9 * hardware.memory_bytes), Path(logs), chosen)
    if options.json:
        record = {
            "what": "peak device memory of a training step, by recipe and micro batch",
            "how": f"{__doc__.splitlines()[-2]} {__doc__.splitlines()[-1]}",
            "command": "python benchmarks/memory.py --json",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "hardware": {"kind": hardware.kind, "name": hardware.name, "driver": hardware.driver},
            "versions": versions,
            "combinations": rows,
        }
        print(json.dumps(record, indent=1))
    return int(any(row["peak_bytes"] is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
