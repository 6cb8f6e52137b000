"""Where the time and the memory of a step go: what a profiling worker brings back, and nothing of torch in it.

    profile.by_group()["attention"], profile.by_phase()["backward"], profile.findings[0].where

Times are seconds of one step, against the step without a profiler: the parts add up to `step_seconds.median`. A field
is None when it could not be known, never when it was zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from redline.core.measurement import Sharing, Spread

CONTRACTION, ATTENTION, NORMALISATION, ELEMENTWISE = "tensor contraction", "attention", "normalisation", "element-wise"
LOSS, OPTIMIZER, MOVEMENT, COMMUNICATION = "loss", "optimizer", "data movement", "communication"
OTHER, IDLE, DATA_WAIT = "other", "idle", "data wait"
WORK_GROUPS = (
    CONTRACTION,
    ATTENTION,
    NORMALISATION,
    ELEMENTWISE,
    LOSS,
    OPTIMIZER,
    MOVEMENT,
    COMMUNICATION,
    OTHER,
)
WAITING = (IDLE, DATA_WAIT)
GROUPS = (*WORK_GROUPS, *WAITING)
"""Idle on a GPU: no kernel runs. On a CPU: between operators, in Python and in torch's own bookkeeping."""

DATA, FORWARD, BACKWARD, UPDATE = "data", "forward", "backward", "optimizer"
PHASES = (DATA, FORWARD, BACKWARD, UPDATE)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A share of the step. Idle time belongs to the phase of the work that it delays."""

    phase: str
    group: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ModuleTime:
    module: str | None
    """As named_modules calls it, without what its own children took; '' is the model itself. None: unknown (compiled
    code belongs to no module any more), or outside the model (the loss)."""
    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class Uncompiled:
    """The modules of the same step without compile. It is another step, of which shares are shown and no times are
    taken over."""

    micro_batch: int
    """The recipe's, or the first half, quarter, ... of it that fits."""
    step_seconds: float
    undone: tuple[str, ...]
    """The rungs that were taken out: compile, and what needs it."""
    modules: tuple[ModuleTime, ...]

    @property
    def work_seconds(self) -> float:
        """Of forward and backward: what the shares are of. Waiting is no part of it."""
        return sum(row.forward + row.backward for row in self.modules)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """All calls of one kernel in a step (on a CPU: of one operator)."""

    name: str
    group: str
    calls: float
    seconds: float
    flops: float | None
    """Of all calls; None where one of them has unknown work. So are bytes: each input read and each output written
    once."""
    bytes: float | None
    dtype: str | None
    """Of what a matmul reads: 'fp32', 'bf16', ..."""


RECIPE = "the recipe"  # in the place of a line, of what the step does because its recipe says so


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something in the code that costs time, and the line it stands in."""

    kind: str
    """A key of FINDINGS."""
    detail: str
    file: str | None = None
    line: int | None = None
    function: str | None = None
    per_step: float | None = None
    """How often it happens in a step; None for what happens while compiling."""
    rung: str | None = None
    """Where it is none of the user's lines but the recipe's doing: the rung that removes it."""

    @property
    def where(self) -> str | None:
        if self.rung is not None:
            return RECIPE
        return None if self.file is None else f"{self.file}:{self.line}"


FINDINGS = {
    "synchronisation": "leave the value on the device; read it every so many steps, or not at all",
    "fp32-matmul": "let autocast see it: no .float() before it, no autocast(enabled=False) around it",
    "math-attention": "give SDPA what a fused kernel takes: 16 bit, no float mask, heads a multiple of 8 wide",
    "host-tensor": "create it on the device: torch.arange(n, device=x.device)",
    "host-copy": "copy once before the loop, or in the loader with pinned memory and non_blocking=True",
    "graph-break": "move it out of the compiled function, or write it with operators that torch.compile can trace",
    "recompile": "keep shapes, dtypes and Python values the same from step to step",
    "loader-starvation": "let more workers make batches ahead of the step, or prepare the data beforehand",
}
"""What to do about each kind."""


@dataclass(frozen=True, kw_only=True)
class MemoryLine:
    """Bytes alive at the peak that one line of Python asked for."""

    file: str
    line: int
    function: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """One step, allocation by allocation, and its fullest moment."""

    source: str
    """Who told: the allocator's history, or the dispatcher."""
    peak_bytes: int
    peak_seconds: float
    """Since the start of the step."""
    start_bytes: int
    """Held before the step: weights, optimizer, buffers."""
    reserved_bytes: int | None = None
    """By the allocator, at most during the step; None where there is no such allocator."""
    categories: dict[str, int] = field(default_factory=dict)
    """At the peak: weights, gradients, optimizer, activations, temporary, ..."""
    modules: dict[str, int] = field(default_factory=dict)
    """At the peak, by the module that the tensor belongs to or was made in; '' is the model itself."""
    elsewhere_bytes: int = 0
    """At the peak, of no module: the loss, the batch, temporaries of the backward pass."""
    lines: tuple[MemoryLine, ...] = ()
    """Largest first; tensors made by the backward pass stand at the line that started it, or at none."""
    timeline_seconds: tuple[float, ...] = ()
    timeline_bytes: tuple[int, ...] = ()

    @property
    def fragmentation_bytes(self) -> int | None:
        """Reserved and not in use at the peak, by a step that began with an empty cache."""
        return None if self.reserved_bytes is None else self.reserved_bytes - self.peak_bytes


@dataclass(frozen=True, kw_only=True)
class Profile:
    device: str
    """'cuda' or 'cpu'."""
    steps: int
    """That were profiled."""
    step_seconds: Spread
    """Without the profiler."""
    profiled_seconds: float
    """Mean of a step under it."""
    parts: tuple[Part, ...]
    modules: tuple[ModuleTime, ...]
    kernels: tuple[Kernel, ...]
    """Most time first."""
    launches: float
    """Kernels per step; on a CPU, operator calls that did work."""
    busy_share: float
    """Of the step without the profiler: what the parts that are work fill."""
    host_seconds: float
    """Of the main thread in a profiled step, less its waits for the device: what it takes to issue a step."""
    cpu_seconds: float
    """Of all threads of the process in a step without the profiler."""
    sync_idle_seconds: float
    """Idle time that a synchronisation left behind: the queue was empty when the host came back."""
    attention: str | None
    """The kernel that computed attention."""
    compiled: bool
    uncompiled: Uncompiled | None = None
    """Where compiled code left no module to be told apart."""
    findings: tuple[Finding, ...] = ()
    memory: MemoryProfile | None = None
    memory_reason: str | None = None
    """Why there is no memory profile."""
    sharing: Sharing | None = None
    """Of several ranks. Everything else is rank 0's, but the time of the step, which is the slowest rank's."""
    notes: tuple[str, ...] = ()
    """What could not be looked at, and why."""
    trace: str | None = None
    """The Chrome trace's file name, in the run directory."""

    def by_group(self) -> dict[str, float]:
        return _sums(GROUPS, [(part.group, part.seconds) for part in self.parts])

    def by_phase(self) -> dict[str, float]:
        return _sums(PHASES, [(part.phase, part.seconds) for part in self.parts])


def _sums(names: Sequence[str], pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    return {name: sum(seconds for of, seconds in pairs if of == name) for name in names}
