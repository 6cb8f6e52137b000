"""Where the time and the memory of a step go: the result of a profiling worker, free of torch.

    profile.by_group()["attention"], profile.by_phase()["backward"], profile.findings[0].where

Times are seconds per step, on the scale of the step without a profiler: the parts add up to `step_seconds.median`. None
means unknown, never zero.
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
"""On a GPU idle means that no kernel runs; on a CPU, time between operators, in Python and in torch's bookkeeping."""

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
    """Name as in `named_modules`; '' is the model itself. Time spent in its children is not included. None: unknown
    (compiled code belongs to no module), or outside the model (the loss)."""
    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class Uncompiled:
    """The modules of the same step without compile. It is a different step, so its shares are shown but its times are
    not used."""

    micro_batch: int
    """The recipe's, or the first half, quarter, ... of it that fits."""
    step_seconds: float
    undone: tuple[str, ...]
    """The rungs that were left out: compile, and those that need it."""
    modules: tuple[ModuleTime, ...]

    @property
    def work_seconds(self) -> float:
        """Seconds of forward and backward, which shares are relative to. Waiting is not included."""
        return sum(row.forward + row.backward for row in self.modules)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """All calls of one kernel in a step (on a CPU: of one operator)."""

    name: str
    group: str
    calls: float
    seconds: float
    flops: float | None
    """FLOPs of all calls; None if the work of any call is unknown."""
    bytes: float | None
    """Bytes of all calls, with each input read and each output written once; None if unknown for any call."""
    dtype: str | None
    """Input dtype of a matmul: 'fp32', 'bf16', ..."""


RECIPE = "the recipe"  # shown in place of a line, for what the step does because its recipe says so


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something in the code that costs time, and its line."""

    kind: str
    """A key of FINDINGS."""
    detail: str
    file: str | None = None
    line: int | None = None
    function: str | None = None
    per_step: float | None = None
    """How often it happens in a step; None if it happens while compiling."""
    rung: str | None = None
    """The rung that removes it, if the recipe causes it and not one of the user's lines."""

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
    """Bytes alive at the peak that one line of Python allocated."""

    file: str
    line: int
    function: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """The allocations of one step, and what is alive at their peak."""

    source: str
    """Where this comes from: the allocator's history, or the dispatcher."""
    peak_bytes: int
    peak_seconds: float
    """Time of the peak since the start of the step."""
    start_bytes: int
    """Bytes held before the step: weights, optimizer, buffers."""
    reserved_bytes: int | None = None
    """The most that the allocator reserved during the step; None if there is no such allocator."""
    categories: dict[str, int] = field(default_factory=dict)
    """Bytes at the peak by category: weights, gradients, optimizer, activations, temporary, ..."""
    modules: dict[str, int] = field(default_factory=dict)
    """Bytes at the peak by the module that a tensor belongs to or was made in; '' is the model itself."""
    elsewhere_bytes: int = 0
    """Bytes at the peak outside all modules: the loss, the batch, temporaries of the backward pass."""
    lines: tuple[MemoryLine, ...] = ()
    """Largest first. Tensors made by the backward pass are attributed to the line that started it, or to none."""
    timeline_seconds: tuple[float, ...] = ()
    timeline_bytes: tuple[int, ...] = ()

    @property
    def fragmentation_bytes(self) -> int | None:
        """Bytes reserved but not in use at the peak, in a step that began with an empty cache."""
        return None if self.reserved_bytes is None else self.reserved_bytes - self.peak_bytes


@dataclass(frozen=True, kw_only=True)
class Profile:
    device: str
    """'cuda' or 'cpu'."""
    steps: int
    """Number of steps that were profiled."""
    step_seconds: Spread
    """Seconds of a step without the profiler."""
    profiled_seconds: float
    """Mean seconds of a step under the profiler."""
    parts: tuple[Part, ...]
    modules: tuple[ModuleTime, ...]
    kernels: tuple[Kernel, ...]
    """Longest time first."""
    launches: float
    """Kernels per step; on a CPU, operator calls that did work."""
    busy_share: float
    """Share of the step without the profiler that is work; on a CPU communication counts as waiting."""
    host_seconds: float
    """Seconds of the main thread in a profiled step, less its waits for the device: the cost of issuing a step."""
    cpu_seconds: float
    """CPU seconds of all threads of the process in a step without the profiler."""
    sync_idle_seconds: float
    """Idle time caused by synchronisations: the device's queue was empty when the host returned from one."""
    attention: str | None
    """The kernel that computed attention."""
    compiled: bool
    uncompiled: Uncompiled | None = None
    """Set if the step is compiled, so that its own modules cannot be told apart."""
    findings: tuple[Finding, ...] = ()
    memory: MemoryProfile | None = None
    memory_reason: str | None = None
    """Why there is no memory profile."""
    sharing: Sharing | None = None
    """Set for several ranks. Everything else is rank 0's, except for the step time, which is the slowest rank's."""
    notes: tuple[str, ...] = ()
    """What could not be examined, and why."""
    trace: str | None = None
    """The Chrome trace's file name, in the run directory."""

    def by_group(self) -> dict[str, float]:
        return _sums(GROUPS, [(part.group, part.seconds) for part in self.parts])

    def by_phase(self) -> dict[str, float]:
        return _sums(PHASES, [(part.phase, part.seconds) for part in self.parts])


def _sums(names: Sequence[str], pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    return {name: sum(seconds for of, seconds in pairs if of == name) for name in names}
