"""A training run's settings and progress: plain values that checkpoints and run.json contain.

TrainSettings(micro_batch=16, global_batch=512, learning_rate=6e-4, budget=Budget(minutes=5))
"""

from __future__ import annotations

from dataclasses import dataclass, field

from redline.core.errors import UserError
from redline.core.workload import check_positive

METRICS_FILE = "metrics.jsonl"


def resume_command(out: str, layout: str = "") -> str:
    """Return the command that resumes a run. `layout`: the options for the same ranks as before."""
    return f"redline train --resume {out} {layout}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Where to stop: whichever comes first. `minutes` counts training time over all sessions of a run."""

    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "tokens"):
            if getattr(self, name) is not None:
                check_positive(f"--{name}", getattr(self, name))
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise UserError(f"--minutes is {self.minutes:g}", "it is the time to train for", "set it above 0")
        if self.steps is None and self.tokens is None and self.minutes is None:
            raise UserError("no budget", "training would never end", "give --steps, --tokens or --minutes")

    def used_up(self, progress: Progress) -> str | None:
        """Which limit was reached, or None."""
        if self.steps is not None and progress.updates >= self.steps:
            return "steps"
        if self.tokens is not None and progress.tokens >= self.tokens:
            return "tokens"
        if self.minutes is not None and progress.seconds >= 60 * self.minutes:
            return "minutes"
        return None


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    micro_batch: int
    """Sequences per forward and backward."""
    global_batch: int
    """Sequences per update, accumulated over micro batches."""
    learning_rate: float
    budget: Budget
    schedule: str = "cosine"
    warmup_steps: int = 20
    schedule_steps: int | None = None
    """Where the schedule ends; None for a constant one."""
    cycle_steps: int = 10
    """Updates between two reads of the device's figures by the host."""
    eval_every: int | None = 100
    """Updates between two evaluations; None: only at the end."""
    eval_batches: int = 10
    eval_batch: int = 0
    """Sequences per evaluation batch; 0: the micro batch. Settings derived from these with another micro batch keep it,
    since losses are comparable only over the same sequences."""
    checkpoint_every: int | None = 500
    """Updates between two checkpoints; there is always one at the end."""
    sample_every: int | None = None
    most_skipped: int = 5
    """Number of updates skipped in a row, because of NaN or infinite gradients, at which the run stops."""
    keep_last: int = 2
    keep_best: int = 1
    """Checkpoints that rotation keeps: the newest, and those with the lowest validation loss."""
    deterministic: bool = False
    """Use only algorithms that repeat bit for bit, at some cost in speed."""

    def __post_init__(self) -> None:
        if self.eval_batch == 0:  # in a new run, and in run.json of versions that had no such field
            object.__setattr__(self, "eval_batch", self.micro_batch)
        for name in ("micro_batch", "global_batch", "cycle_steps", "eval_batches", "most_skipped", "keep_last"):
            check_positive(f"--{name.replace('_', '-')}", getattr(self, name))
        for name in ("eval_every", "checkpoint_every", "sample_every"):
            if getattr(self, name) is not None:
                check_positive(f"--{name.replace('_', '-')}", getattr(self, name))
        if self.warmup_steps < 0:
            raise UserError(f"--warmup-steps is {self.warmup_steps}", "it counts updates", "set it to 0 (none) or more")
        if not 0 < self.learning_rate < float("inf"):  # NaN is neither
            raise UserError(
                f"--learning-rate is {self.learning_rate:g}",
                "each update is as large as it says",
                "set it above 0, such as 6e-4",
            )
        if self.global_batch % self.micro_batch:
            below = self.global_batch // self.micro_batch * self.micro_batch
            nearest = " or ".join(str(size) for size in (below, below + self.micro_batch) if size)
            raise UserError(
                f"a global batch of {self.global_batch} is not a multiple of the micro batch {self.micro_batch}",
                "an update adds up whole micro batches",
                f"set --global-batch to {nearest}, or choose another --micro-batch",
            )


@dataclass
class Progress:
    """How far a run has come. All of it but `rates` is in every checkpoint."""

    updates: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    skipped_in_a_row: int = 0
    validation_tokens: int = 0
    documents: int = 0
    best_validation: float | None = None
    rates: list[float] = field(default_factory=list)
    """Tokens per second of each cycle of this session."""
