"""Idle time of a profile: whose doing it is, and what a change of plan would gain of it.

    idle_gains(profile, shape=shape, micro_batch=64, before=plan, after=replace(plan, cuda_graphs=True))
    -> {"forward": 0.0004, "backward": 0.0001, "optimizer": 0.0}

A device is idle because the host is late with its launches, or because it pauses before each kernel by itself, a
microsecond or so. The first shrinks with the launches, the second with the kernels, and in a recorded graph only by
what was measured. Each phase has its own: a rung that launches less in one gains nothing of another. Waiting for data
and what synchronisations leave behind are not weighed here: predict/advice.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from redline.core.plan import Plan
from redline.core.profile import BACKWARD, FORWARD, IDLE, PHASES, UPDATE, WORK_GROUPS, Profile
from redline.core.workload import Shape
from redline.predict.operations import operations

PHASE_OF = {"forward": FORWARD, "backward": BACKWARD, "recompute": BACKWARD, "update": UPDATE}
# Of the device's own pauses, what a recorded graph removes: 0.49 of 2.96 ms for GPT-2 at micro batch 64 on an H200, by
# the records of `tune` and `profile` of 2026-11-15. That gain lies inside the noise of `tune`: it may well be less.
GRAPH_GAIN = 0.49 / 2.96


def idle_gains(profile: Profile, *, shape: Shape, micro_batch: int, before: Plan, after: Plan) -> dict[str, float]:
    """Seconds by phase; less than none where a plan launches more."""
    host, idle = host_share(profile), idle_of(profile)
    old, new = (kernels_of(shape, plan, micro_batch) for plan in (before, after))
    late = fewer(launches(old, before), launches(new, after))
    own = fewer(pauses(old, before), pauses(new, after))
    return {phase: idle[phase] * (host * late[phase] + (1 - host) * own[phase]) for phase in late}


def idle_of(profile: Profile) -> dict[str, float]:
    """Seconds by phase, without what synchronisations left behind. Of that no phase is known: each gives its share."""
    idle = {
        phase: sum(part.seconds for part in profile.parts if part.group == IDLE and part.phase == phase)
        for phase in PHASES
    }
    whole = sum(idle.values())
    kept = max(0.0, 1 - profile.sync_idle_seconds / whole) if whole > 0 else 0.0
    return {phase: kept * seconds for phase, seconds in idle.items()}


def host_share(profile: Profile) -> float:
    """Of the idle time, what is the host's doing: by how much issuing a step takes longer than its work. The profiler
    slows the host, so it is rather too much than too little. On a CPU the host is the device."""
    if profile.device == "cpu":
        return 1.0
    idle, groups = sum(idle_of(profile).values()), profile.by_group()
    late = profile.host_seconds - sum(groups[group] for group in WORK_GROUPS)
    return min(1.0, max(0.0, late / idle)) if idle > 0 else 0.0


def keeps_up(profile: Profile) -> bool:
    """Is less than half of the idle time the host's doing?"""
    return host_share(profile) < 0.5


def kernels_of(shape: Shape, plan: Plan, micro_batch: int) -> dict[str, float]:
    kernels: dict[str, float] = dict.fromkeys((FORWARD, BACKWARD, UPDATE), 0.0)
    for each in operations(shape, plan, micro_batch=micro_batch):
        kernels[PHASE_OF[each.direction]] += each.kernels
    return kernels


def launches(kernels: Mapping[str, float], plan: Plan) -> dict[str, float]:
    """What the host launches; a recorded graph is one launch forward and one backward."""
    return {phase: 1.0 if recorded(plan, phase) else count for phase, count in kernels.items()}


def pauses(kernels: Mapping[str, float], plan: Plan) -> dict[str, float]:
    """The device's own: one before each kernel, and a shorter one in a recorded graph."""
    return {phase: count * (1 - GRAPH_GAIN * recorded(plan, phase)) for phase, count in kernels.items()}


def recorded(plan: Plan, phase: str) -> bool:
    return plan.cuda_graphs and phase != UPDATE


def fewer(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By which share of them."""
    return {phase: 1 - after[phase] / count if count else 0.0 for phase, count in before.items()}
