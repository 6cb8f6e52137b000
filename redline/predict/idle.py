"""Idle time of a profile: what causes it, and how much of it a change of plan would save.

    idle_gains(profile, shape=shape, micro_batch=64, before=plan, after=replace(plan, cuda_graphs=True))
    -> {"forward": 0.0004, "backward": 0.0001, "optimizer": 0.0}

A device is idle because the host is late with its launches, or because the device itself pauses before each kernel, for
about a microsecond. The first shrinks with the launches, the second with the kernels, and in a recorded graph only by
the measured share. Phases are separate: fewer launches in one save nothing in another. Waiting for data and idle time
after synchronisations are handled in predict/advice.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from redline.core.plan import Plan
from redline.core.profile import BACKWARD, FORWARD, IDLE, PHASES, UPDATE, WORK_GROUPS, Profile
from redline.core.workload import Shape
from redline.predict.operations import operations

PHASE_OF = {"forward": FORWARD, "backward": BACKWARD, "recompute": BACKWARD, "update": UPDATE}
# Share of the device's own pauses that a recorded graph removes: 0.49 of 2.96 ms for GPT-2 at micro batch 64 on an
# H200, by the records of `tune` and `profile` of 2026-11-15. The gain is within the noise of `tune` and may be smaller.
GRAPH_GAIN = 0.49 / 2.96


def idle_gains(profile: Profile, *, shape: Shape, micro_batch: int, before: Plan, after: Plan) -> dict[str, float]:
    """Return the idle seconds saved by phase; negative if the new plan launches more."""
    host, idle = host_share(profile), idle_of(profile)
    old, new = (kernels_of(shape, plan, micro_batch) for plan in (before, after))
    late = fewer(launches(old, before), launches(new, after))
    own = fewer(pauses(old, before), pauses(new, after))
    return {phase: idle[phase] * (host * late[phase] + (1 - host) * own[phase]) for phase in late}


def idle_of(profile: Profile) -> dict[str, float]:
    """Return idle seconds by phase, without idle time after synchronisations. The phase of that is unknown, so every
    phase is reduced in proportion."""
    idle = {
        phase: sum(part.seconds for part in profile.parts if part.group == IDLE and part.phase == phase)
        for phase in PHASES
    }
    whole = sum(idle.values())
    kept = max(0.0, 1 - profile.sync_idle_seconds / whole) if whole > 0 else 0.0
    return {phase: kept * seconds for phase, seconds in idle.items()}


def host_share(profile: Profile) -> float:
    """Return the share of idle time that the host causes: how much longer issuing a step takes than its work. The
    profiler slows the host, so the share is too high rather than too low. On a CPU the host is the device."""
    if profile.device == "cpu":
        return 1.0
    idle, groups = sum(idle_of(profile).values()), profile.by_group()
    late = profile.host_seconds - sum(groups[group] for group in WORK_GROUPS)
    return min(1.0, max(0.0, late / idle)) if idle > 0 else 0.0


def keeps_up(profile: Profile) -> bool:
    """True if the host causes less than half of the idle time."""
    return host_share(profile) < 0.5


def kernels_of(shape: Shape, plan: Plan, micro_batch: int) -> dict[str, float]:
    kernels: dict[str, float] = dict.fromkeys((FORWARD, BACKWARD, UPDATE), 0.0)
    for each in operations(shape, plan, micro_batch=micro_batch):
        kernels[PHASE_OF[each.direction]] += each.kernels
    return kernels


def launches(kernels: Mapping[str, float], plan: Plan) -> dict[str, float]:
    """Return the host's launches by phase; a recorded graph is one launch forward and one backward."""
    return {phase: 1.0 if recorded(plan, phase) else count for phase, count in kernels.items()}


def pauses(kernels: Mapping[str, float], plan: Plan) -> dict[str, float]:
    """Return the device's own pauses by phase: one before each kernel, shorter in a recorded graph."""
    return {phase: count * (1 - GRAPH_GAIN * recorded(plan, phase)) for phase, count in kernels.items()}


def recorded(plan: Plan, phase: str) -> bool:
    return plan.cuda_graphs and phase != UPDATE


def fewer(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the share by which each count falls."""
    return {phase: 1 - after[phase] / count if count else 0.0 for phase, count in before.items()}
