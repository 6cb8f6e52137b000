"""Summarises a timeline: parts that add up to the step without a profiler, modules, kernels with their work.

    parts = parts_of(timeline, step_seconds=0.036)      # sum(part.seconds for part in parts) == 0.036

The profiler slows down the host, not the kernels. On a GPU, therefore, work keeps its measured seconds and waiting
fills the rest of the step; on a CPU every operator is slowed, and all parts shrink alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from redline.core.profile import BACKWARD, FORWARD, WAITING, Kernel, ModuleTime, Part
from redline.engine.profiling_timeline import Call, Timeline

SHOWN_KERNELS = 30
CLOCK_SECONDS = 1e-9  # resolution of a trace


def parts_of(timeline: Timeline, step_seconds: float, *, device: str) -> tuple[Part, ...]:
    return fit_parts(_measured_parts(timeline), step_seconds, keep_work=device == "cuda")


def work_factor(timeline: Timeline, step_seconds: float, *, device: str) -> float:
    """Return the factor that turns seconds of work in the trace into seconds of work in the parts."""
    return _factors(_measured_parts(timeline), step_seconds, keep_work=device == "cuda")[0]


def _measured_parts(timeline: Timeline) -> tuple[Part, ...]:
    spent: dict[tuple[str, str], float] = defaultdict(float)
    for segment in timeline.segments:
        spent[segment.phase, segment.group] += segment.seconds / timeline.steps
    return tuple(Part(phase=phase, group=group, seconds=seconds) for (phase, group), seconds in spent.items())


def fit_parts(parts: Sequence[Part], step_seconds: float, *, keep_work: bool) -> tuple[Part, ...]:
    """Scale the parts so that their sum is `step_seconds`."""
    work, waiting = _factors(parts, step_seconds, keep_work=keep_work)
    return tuple(replace(part, seconds=part.seconds * (waiting if part.group in WAITING else work)) for part in parts)


def _factors(parts: Sequence[Part], step_seconds: float, *, keep_work: bool) -> tuple[float, float]:
    """Return the factors for work and for waiting. They are equal if work is not kept, if it exceeds the step, or if
    there is no waiting."""
    work = sum(part.seconds for part in parts if part.group not in WAITING)
    waiting = sum(part.seconds for part in parts if part.group in WAITING)
    if keep_work and waiting > CLOCK_SECONDS and work <= step_seconds:
        return 1.0, (step_seconds - work) / waiting
    return (step_seconds / (work + waiting),) * 2


def modules_of(timeline: Timeline, factor: float) -> tuple[ModuleTime, ...]:
    """Return the work of each module, longest first."""
    spent: dict[tuple[str | None, str], float] = defaultdict(float)
    for segment in timeline.segments:
        if segment.group not in WAITING and segment.phase in (FORWARD, BACKWARD):
            spent[segment.module, segment.phase] += segment.seconds * factor / timeline.steps
    names = dict.fromkeys(module for module, _ in spent)
    rows = (
        ModuleTime(module=name, forward=spent[name, FORWARD], backward=spent[name, BACKWARD])  # absent: 0.0
        for name in names
    )
    return tuple(sorted(rows, key=lambda row: row.forward + row.backward, reverse=True))


@dataclass
class Row:
    """Accumulates the calls of one kernel."""

    group: str
    seconds: float = 0.0
    calls: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    unknown_seconds: float = 0.0
    dtypes: set[str] = field(default_factory=set)


def kernels_of(timeline: Timeline, factor: float, *, device: str) -> tuple[Kernel, ...]:
    """Return kernels by name and group, longest first. An operator's work is counted once, for the kernel that took
    most of its time."""
    rows: dict[tuple[str, str], Row] = {}
    instances: dict[int, list[Call]] = defaultdict(list)
    for call in timeline.calls:
        row = rows.setdefault((call.name, call.segment.group), Row(call.segment.group))
        row.seconds += call.seconds
        if device == "cuda":
            row.calls += 1
        instances[id(call.operator) if call.operator is not None else id(call)].append(call)
    for calls in instances.values():
        _count_work(calls, rows, device)
    found = (_kernel(name, row, factor, timeline.steps) for (name, _), row in rows.items())
    return tuple(sorted(found, key=lambda kernel: kernel.seconds, reverse=True)[:SHOWN_KERNELS])


def _count_work(calls: list[Call], rows: dict[tuple[str, str], Row], device: str) -> None:
    """Count the work of one operator. `calls`: its kernels, or on a CPU the pieces of its own time."""
    spent: dict[tuple[str, str], float] = defaultdict(float)
    for call in calls:
        spent[call.name, call.segment.group] += call.seconds
    main = max(spent, key=lambda key: spent[key])
    for key, seconds in spent.items():
        if key != main or calls[0].work is None:
            rows[key].unknown_seconds += seconds
    if device != "cuda":
        rows[main].calls += 1
    work = calls[0].work
    if work is not None:
        rows[main].flops += work.flops
        rows[main].bytes += work.bytes
        rows[main].dtypes |= {work.dtype} if work.dtype else set()


def _kernel(name: str, row: Row, factor: float, steps: int) -> Kernel:
    known = row.unknown_seconds == 0
    return Kernel(
        name=name,
        group=row.group,
        calls=row.calls / steps,
        seconds=row.seconds * factor / steps,
        flops=row.flops / steps if known and row.flops else None,
        bytes=row.bytes / steps if known else None,
        dtype=next(iter(row.dtypes)) if len(row.dtypes) == 1 else None,
    )


def launches_of(timeline: Timeline, *, device: str) -> float:
    """Return the kernels per step; on a CPU, the operators that did work."""
    if device == "cuda":
        return len(timeline.calls) / timeline.steps
    return len({id(call.operator) for call in timeline.calls}) / timeline.steps
