"""How fast, and whether it is still right: what one worker process brings back.

Times are seconds, sizes are bytes. A field is None when it could not be known, never when it was zero.
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


def spread_of(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    return Spread(
        median=statistics.median(ordered), p10=quantile(ordered, 0.1), p90=quantile(ordered, 0.9), n=len(ordered)
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest of the sorted values."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True, kw_only=True)
class GradientCheck:
    """Step 0 against the plain fp32 model: same weights, same batch. Errors are relative L2 norms, tensors go by
    their published names."""

    loss: float
    reference_loss: float
    error: float
    """All gradients taken as one vector."""
    yardstick: float
    """The same error of plain eager code at the row's precision: what that precision costs by itself."""
    tensor_errors: dict[str, float]
    tensor_yardsticks: dict[str, float]
    update_errors: dict[str, float] = field(default_factory=dict)
    """What the first optimizer step did to each tensor, where its gradient is more than rounding."""
    tensor_noise: dict[str, float] = field(default_factory=dict)
    """How far the plain fp32 gradient moves when the last bits of the weights do, of its size: about 1 where there is
    no gradient but rounding, which then is the size that errors are relative to. Empty in older records."""
    tensor_swing: dict[str, float] = field(default_factory=dict)
    """How far it moves when the weights move by the epsilon of the row's precision. Empty for fp32, and in older
    records."""


MOST_PLACES = 2  # of the compiler's troubles that are told; a model has hundreds of lines, and a note one


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler made of the first step. A frame is a function, or what is left of one behind a break."""

    frames: int
    """Those it was asked to compile."""
    graphs: int
    left: int
    """Frames that it gave up on: they run as plain Python."""
    places: tuple[str, ...] = ()
    """'FILE:LINE: why', of every break and of every frame that was given up."""

    @property
    def trouble(self) -> str | None:
        """None where the whole step is one graph, or several that nobody's code has cut."""
        more = f"; and {len(self.places) - MOST_PLACES} more" if len(self.places) > MOST_PLACES else ""
        places = "; ".join(self.places[:MOST_PLACES]) + more or "the compiler does not say where"
        if not self.graphs:
            return f"nothing was compiled, every step runs in eager: {places}"
        if self.left:
            return f"{self.left} of {self.frames} frames run in eager, not compiled: {places}"
        return f"compiled in {self.graphs} graphs: {places}" if self.places else None


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What really ran, read off a profile, the compiler's counters and torch's sync debug mode."""

    attention: str | None = None
    matmul: str | None = None
    """The matmul kernel that took most of the time (GPU only)."""
    matmul_dtypes: tuple[str, ...] = ()
    graph_breaks: int | None = None
    compiled: Compiled | None = None
    syncs_per_step: float | None = None
    groups: dict[str, float] | None = None
    """Seconds of a step by what they go into (core/profile.py, GROUPS); they add up to the step that was timed."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What ranks cost one another: seconds of a step, read off a profile of each rank."""

    communication_seconds: float
    """In which a collective is under way, its wait for slower ranks included; of the rank that has most."""
    exposed_seconds: float
    """Of that rank's: in which nothing else runs on the device. On a CPU: in which the step stands and waits."""
    compute_seconds: tuple[float, ...]
    """Of each rank: its step without the exposed part."""
    by_group: dict[str, float] | None = None
    """The communication of that rank among those it shares layers with ('tensor') and those it shares data with
    ('data'); both may be under way at once. None where a trace does not tell them apart: gloo's names no group."""

    @property
    def straggler_seconds(self) -> float:
        """What the slowest rank computes longer than the middle one, of two than the other: they wait for it."""
        return max(self.compute_seconds) - statistics.median_low(self.compute_seconds)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    loss_curve: tuple[float, ...]
    """The first K steps from the initial weights, on the batches every rung sees."""
    step_seconds: tuple[float, ...] = ()
    """Every timed step; empty for a reference job, which is not timed."""
    compile_seconds: float | None = None
    warmup_steps: int = 0
    peak_bytes: int | None = None
    """The allocator's peak during the timed steps and an evaluation behind them (resident set on a CPU)."""
    outside_bytes: int | None = None
    """Device memory in use that the allocator did not hand out: context, libraries, other processes."""
    alloc_retries: int | None = None
    """Over the same stretch: how often the allocator found no memory, gave its cache back and asked again."""
    gradients: GradientCheck | None = None
    pair_bitwise: bool | None = None
    """Bit-exact rungs only: plain steps with and without the rung gave the same bits. None: they do not even repeat."""
    skipped_updates: int = 0
    """Optimizer steps the loss scaler refused during the curve."""
    proof: Proof = field(default_factory=Proof)
    sharing: Sharing | None = None
    """Of several ranks, whose worst the times and the memory above are; None of one, and where nothing was profiled."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A job that ended without a measurement. `kind` is one of oom, compile, timeout, killed, error, and
    different: a size of the batch at which gradients are wrong."""

    kind: str
    reason: str
    mistake: tuple[str, ...] | None = None
    """Problem, why and fix of a mistake in the model itself, which every other job would meet as well."""
