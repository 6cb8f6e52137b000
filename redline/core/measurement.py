"""How fast a recipe is, and whether it is still right: the result of one worker process.

Times are in seconds, sizes in bytes. None means unknown, never zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Spread:
    median: float
    p10: float
    p90: float
    n: int
    mean: float | None = None
    """None in older records. Steps that stall now and then raise it, and not the median."""


def spread_of(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    return Spread(
        median=statistics.median(ordered),
        p10=quantile(ordered, 0.1),
        p90=quantile(ordered, 0.9),
        n=len(ordered),
        mean=statistics.fmean(ordered),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolate linearly between the two nearest of the sorted values."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True, kw_only=True)
class GradientCheck:
    """Step 0 compared with the plain fp32 model's: same weights, same batch. Errors are relative L2 norms; tensors have
    their published names."""

    loss: float
    reference_loss: float
    error: float
    """Error of all gradients taken as one vector."""
    yardstick: float
    """The same error of plain eager code at the row's precision: what that precision costs by itself."""
    tensor_errors: dict[str, float]
    tensor_yardsticks: dict[str, float]
    update_errors: dict[str, float] = field(default_factory=dict)
    """Error of each tensor's first optimizer update, for tensors whose gradient is more than rounding."""
    tensor_noise: dict[str, float] = field(default_factory=dict)
    """Relative change of the plain fp32 gradient when the last bits of the weights change. About 1 where the gradient
    is nothing but rounding; errors are then relative to the size of that rounding. Empty in older records."""
    tensor_swing: dict[str, float] = field(default_factory=dict)
    """Relative change of the same gradient when the weights change by the epsilon of the row's precision. Empty for
    fp32, and in older records."""


MOST_PLACES = 2  # places of compiler trouble in one note; a model has hundreds of lines


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler made of the first step. A frame is a function, or the rest of one after a graph break."""

    frames: int
    """Frames it was asked to compile."""
    graphs: int
    left: int
    """Frames it gave up on, which run as plain Python."""
    places: tuple[str, ...] = ()
    """'FILE:LINE: why' for every graph break and every frame it gave up on."""

    @property
    def trouble(self) -> str | None:
        """What went wrong; None if the step compiled to one graph, or to several without a break in the code."""
        more = f"; and {len(self.places) - MOST_PLACES} more" if len(self.places) > MOST_PLACES else ""
        places = "; ".join(self.places[:MOST_PLACES]) + more or "the compiler does not say where"
        if not self.graphs:
            return f"nothing was compiled, every step runs in eager: {places}"
        if self.left:
            return f"{self.left} of {self.frames} frames run in eager, not compiled: {places}"
        return f"compiled in {self.graphs} graphs: {places}" if self.places else None


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What actually ran, according to a profile, the compiler's counters and torch's sync debug mode."""

    attention: str | None = None
    matmul: str | None = None
    """The matmul kernel that took most of the time (GPU only)."""
    matmul_dtypes: tuple[str, ...] = ()
    graph_breaks: int | None = None
    compiled: Compiled | None = None
    syncs_per_step: float | None = None
    groups: dict[str, float] | None = None
    """Seconds of a step by group (core/profile.py, GROUPS); they add up to the timed step."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What ranks cost one another, in seconds per step, from a profile of each rank."""

    communication_seconds: float
    """Time with a collective under way, including its wait for slower ranks, on the rank that has most of it."""
    exposed_seconds: float
    """The part of it in which nothing else runs on that rank's device; on a CPU, in which its step is blocked."""
    compute_seconds: tuple[float, ...]
    """For each rank, its step without its exposed communication."""
    by_group: dict[str, float] | None = None
    """That rank's communication with the ranks that share its layers ('tensor') and with its data-parallel peers
    ('data'); the two may overlap. None if the trace does not tell them apart: gloo's names no group."""

    @property
    def straggler_seconds(self) -> float:
        """How much longer the slowest rank computes than the median one (of two: the other), which waits for it."""
        return max(self.compute_seconds) - statistics.median_low(self.compute_seconds)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    loss_curve: tuple[float, ...]
    """Losses of the first K steps from the initial weights, on the batches every rung sees; empty if unchecked."""
    step_seconds: tuple[float, ...] = ()
    """Time of every timed step; empty for jobs that time no steps, such as references."""
    cores_missing: float | None = None
    """On a CPU, how many cores that the step's threads needed were taken by other programs while it was timed; None on
    other devices, with several ranks, and where the kernel does not say."""
    compile_seconds: float | None = None
    warmup_steps: int = 0
    peak_bytes: int | None = None
    """The allocator's peak during the timed steps and the evaluation after them (resident set on a CPU)."""
    outside_bytes: int | None = None
    """Device memory in use that the allocator did not reserve: context, libraries, other processes."""
    alloc_retries: int | None = None
    """How often, over the same time as `peak_bytes`, the allocator found no memory, freed its cache and retried."""
    gradients: GradientCheck | None = None
    pair_bitwise: bool | None = None
    """Bit-exact rungs only: whether plain steps with and without the rung gave the same bits. None: plain steps do not
    even repeat themselves."""
    skipped_updates: int = 0
    """Optimizer steps that the loss scaler skipped during the loss curve."""
    proof: Proof = field(default_factory=Proof)
    sharing: Sharing | None = None
    """Set for several ranks, where times and memory above are the worst rank's. None for one rank, and if nothing was
    profiled."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A job that ended without a measurement. `kind` is one of oom, compile, timeout, killed, error, and
    different: the training is not the same at this batch size."""

    kind: str
    reason: str
    mistake: tuple[str, ...] | None = None
    """Problem, why and fix of a mistake in the model itself, which every other job would hit as well."""
