"""How the ranks of a training run are arranged: which of them hold one layer together, and which take other data.

    layout = Layout(ranks=16, tensor=2, pipeline=2, replicas=2)
    layout.data, layout.shards        -> 4, 2: micro batches at once, and ranks that FSDP cuts a tensor among
    layout.place(5)                   -> Place(pipeline=0, data=2, tensor=1)

Ranks count tensor fastest, then data, then pipeline, as in `predict/parallel.py`: a tensor group are neighbours, which
torchrun puts into one node. The degrees are options of a command and no part of a recipe. Whether a model can be cut
that way is asked in `commands/ranks.py`, before anything starts; what is impossible for any model is an error here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Place:
    """The coordinates of a rank."""

    pipeline: int
    """Its stage."""
    data: int
    """Its share of every global batch; ranks of one tensor group, and of one pipeline, have the same."""
    tensor: int
    """Its part of every layer."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    ranks: int = 1
    tensor: int = 1
    """Ranks that hold each layer together."""
    pipeline: int = 1
    """Stages that hold the layers one after the other."""
    replicas: int = 1
    """With FSDP: copies of the model, each cut among data / replicas ranks (hybrid sharding)."""

    def __post_init__(self) -> None:
        if min(self.ranks, self.tensor, self.pipeline, self.replicas) < 1:
            raise ValueError(f"degrees count from 1: {self}")
        if self.ranks % (self.tensor * self.pipeline) or self.data % self.replicas:
            raise ValueError(f"the ranks do not divide: {self}")

    @property
    def data(self) -> int:
        """Parts of a global batch that are computed at once: GBS = MBS x data x accumulation."""
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def shards(self) -> int:
        """Ranks that FSDP cuts one copy of the model among."""
        return self.data // self.replicas

    @property
    def is_plain(self) -> bool:
        """Ranks differ in their data alone."""
        return self.data == self.ranks and self.replicas == 1

    def words_of_bubble(self, micro_batches: int) -> str:
        """What filling and draining the pipeline with so many per update costs."""
        share = bubble(self.pipeline, micro_batches)
        few = " (fewer than stages: a larger --global-batch idles less)" if micro_batches < self.pipeline else ""
        return (
            f"{micro_batches:,} micro batch{'' if micro_batches == 1 else 'es'} per update through "
            f"{self.pipeline} stages: each idles {share:.0%} of the time{few}"
        )

    def place(self, rank: int) -> Place:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"there is no rank {rank} of {self.ranks}")
        group, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(group, self.data)
        return Place(pipeline=pipeline, data=data, tensor=tensor)

    def options(self) -> str:
        """As `redline train` takes it, on one machine: '--gpus 4 --tensor 2'; nothing for one process."""
        degrees = {"gpus": self.ranks, "tensor": self.tensor, "pipeline": self.pipeline, "replicas": self.replicas}
        return " ".join(f"--{name} {size}" for name, size in degrees.items() if size > 1)

    def words(self, way: str = "none") -> str:
        """'4 ranks: tensor 2 x data 2 (fsdp)', with the degrees that are more than one. `way`: a plan's `parallel`, in
        which those with data of their own share a step."""
        degrees = {"pipeline": self.pipeline, "replicas": self.replicas, "tensor": self.tensor}
        said = [f"{name} {size}" for name, size in degrees.items() if size > 1]
        data = f"shards {self.shards}" if self.replicas > 1 else f"data {self.data}"
        shared = "" if way == "none" else f" ({way})"
        return f"{self.ranks} ranks: {' x '.join([*said, data])}{shared}"


def options_of_ranks(layout: Layout | None, parallel: str | None) -> str:
    """The layout's, and `--parallel` where somebody gave it."""
    degrees = "" if layout is None else layout.options()
    return degrees if parallel is None else f"{degrees} --parallel {parallel}".lstrip()


def bubble(stages: int, micro_batches: int) -> float:
    """(p-1)/(m+p-1), for stages that take equally long (GPipe, arXiv 1811.06965)."""
    return (stages - 1) / (micro_batches + stages - 1)
