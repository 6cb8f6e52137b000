"""Proves what ran, after the timing: kernel names and matmul dtypes from a short profile, graph breaks from the
compiler's counters, synchronisations from torch's sync debug mode. A row that says "flash" must show a flash kernel."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from redline.core.measurement import Compiled, Proof
from redline.core.plan import Plan
from redline.core.profile import COMMUNICATION, GROUPS
from redline.engine.build import Training
from redline.engine.findings import collecting_syncs
from redline.engine.profiling_groups import ATTENTION_KERNELS, OWN_PRODUCTS
from redline.engine.profiling_summary import parts_of, work_factor
from redline.engine.profiling_timeline import DATA_RANGE, STEP, WINDOW, Timeline, read_timeline
from redline.engine.profiling_work import DTYPES

PROFILED_STEPS, SHARED_STEPS = 1, 3  # of one process, and of ranks, whose waits for one another vary from step to step
SYNC_STEPS = 10  # a whole cycle of the no-sync rung, so that its one read counts as a tenth
MATMUL_LEAVES = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", *OWN_PRODUCTS)
MATMUL_WORDS = ("gemm", "nvjet", "cutlass", "xmma")  # cuBLAS, old and new, and CUTLASS


@dataclass(frozen=True)
class Shares:
    """One rank's part of `core.measurement.Sharing`."""

    communication_seconds: float
    exposed_seconds: float
    compute_seconds: float
    by_group: dict[str, float] | None = None
    """Seconds of communication within tensor groups and among data ranks; None if the trace does not say."""


def prove(
    training: Training, plan: Plan, device: torch.device, step_seconds: float, compiled: Compiled | None = None
) -> tuple[Proof, Shares]:
    """Return the proof and this rank's shares. `step_seconds`: the time of a step without a profiler. `compiled`: what
    the compiler made of the first step."""
    syncs = count_syncs(training) if device.type == "cuda" else None
    events = profile_steps(training, device)
    timeline = read_timeline(events)
    proof = Proof(
        attention=attention_kernel(events),
        matmul=longest_matmul(events),
        matmul_dtypes=matmul_dtypes(events),
        graph_breaks=graph_breaks() if plan.compile else None,
        compiled=compiled,
        syncs_per_step=syncs,
        groups=groups_of(timeline, step_seconds, device),
    )
    return proof, shares_of(timeline, step_seconds, device)


def shares_of(timeline: Timeline, step_seconds: float, device: torch.device) -> Shares:
    """Return this rank's shares, scaled like the step's groups to the step without a profiler."""
    exposed = groups_of(timeline, step_seconds, device).get(COMMUNICATION, 0.0)
    factor = work_factor(timeline, step_seconds, device=device.type)
    groups = timeline.communication_by_group
    return Shares(
        # If all of it is exposed, adding up in another order must not make the total less than that part.
        communication_seconds=max(exposed, factor * timeline.communication_seconds / timeline.steps),
        exposed_seconds=exposed,
        compute_seconds=step_seconds - exposed,
        by_group=groups and {name: factor * seconds / timeline.steps for name, seconds in groups.items()},
    )


def groups_of(timeline: Timeline, step_seconds: float, device: torch.device) -> dict[str, float]:
    """Return the seconds of the step by group, as the profile reads the trace."""
    spent: dict[str, float] = defaultdict(float)
    for part in parts_of(timeline, step_seconds, device=device.type):
        spent[part.group] += part.seconds
    return {group: spent[group] for group in GROUPS if group in spent}


def shares_step(plan: Plan) -> bool:
    """True if data-parallel or tensor-parallel ranks communicate within a step."""
    return plan.parallel != "none" or plan.tensor_parallel


def profile_steps(training: Training, device: torch.device) -> list[dict[str, Any]]:
    steps = SHARED_STEPS if shares_step(training.step.plan) else PROFILED_STEPS
    with profiler_of(device) as profiler:
        run_marked(training.step, training.batches, steps, device)
    return events_of(exported(profiler))


def profiler_of(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    return profile(activities=activities, record_shapes=True, acc_events=True)


def run_marked(step: Callable[[Any], Any], batches: Iterator[Any], steps: int, device: torch.device) -> None:
    """Run steps under the annotations that `read_timeline` looks for."""
    with record_function(WINDOW):
        for _ in range(steps):
            with record_function(DATA_RANGE):
                batch = next(batches)
            with record_function(STEP):
                step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize()


def exported(profiler: profile) -> bytes:
    """Return a Chrome trace: the only public format with both kernel names and input dtypes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return path.read_bytes()


def events_of(trace: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(trace)["traceEvents"]
    return events


def attention_kernel(events: list[dict[str, Any]]) -> str | None:
    """Return the kernel that computed attention: a fused one by its name, or plain batched matmuls and a softmax; None
    if there was neither."""
    names = Counter(_short(name) for name in _names(events, "kernel") if _is_attention(name))
    if not names:  # no GPU kernels: on a CPU the operator is the kernel
        names = Counter(
            name for name in _names(events, "cpu_op") if "scaled_dot_product" in name and "backward" not in name
        )
        names = Counter({name: count for name, count in names.items() if name != "aten::scaled_dot_product_attention"})
    if names:
        return names.most_common(1)[0][0]
    return "bmm + softmax" if any(name in ("aten::bmm", "aten::baddbmm") for name in _names(events, "cpu_op")) else None


def longest_matmul(events: list[dict[str, Any]]) -> str | None:
    """Return the matmul kernel that took most time. Its name reveals what input dtypes cannot: whether fp32 inputs went
    through TF32. Fused attention kernels, some of which use CUTLASS too, are excluded."""
    spent: Counter[str] = Counter()
    for event in events:
        name = str(event.get("name"))
        if event.get("cat") == "kernel" and _has_one(name, MATMUL_WORDS) and not _has_one(name, ATTENTION_KERNELS):
            spent[_inner(name)] += event.get("dur", 0)
    return spent.most_common(1)[0][0] if spent else None


def matmul_dtypes(events: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the input dtypes of all matmuls that ran, most frequent first."""
    found: Counter[str] = Counter()
    for event in events:
        types = event.get("args", {}).get("Input type") or []
        if event.get("cat") == "cpu_op" and event.get("name") in MATMUL_LEAVES and types:
            first = next((str(kind) for kind in types if kind), "?")
            found[DTYPES[first][0] if first in DTYPES else first] += 1
    return tuple(name for name, _ in found.most_common())


def count_syncs(training: Training) -> float:
    """Return the calls per step that made the host wait for the device."""
    with collecting_syncs() as found:
        for _ in range(SYNC_STEPS):
            training.step(next(training.batches))
    return len(found) / SYNC_STEPS


def graph_breaks() -> int:
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


def _names(events: list[dict[str, Any]], category: str) -> Iterator[str]:
    return (str(event.get("name")) for event in events if event.get("cat") == category)


def _is_attention(name: str) -> bool:
    if name.lower().startswith("triton_"):
        return False  # Inductor names a kernel after neighbouring operators, attention among them
    return _has_one(name, ATTENTION_KERNELS) and not _has_one(
        name, ("bwd", "backward", "dprop", "bprop", "convert", "dot_do_o")
    )


def _has_one(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name.lower() for word in words)


def _inner(name: str) -> str:
    """CUTLASS hides the name in the template: 'void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_...>(...)'."""
    argument = name.partition("<")[2].split(",")[0].split(">")[0].strip()
    return argument if name.startswith("void cutlass::Kernel") and argument else _short(name)


def _short(name: str) -> str:
    """Strip template arguments, which only fill the screen: 'void pytorch_flash::flash_fwd_kernel<...>(...)'."""
    return name.split("<")[0].split("(")[0].removeprefix("void ").strip()
