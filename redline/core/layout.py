"""How the ranks of a training run are arranged: which of them share a layer, and which take different data.

    layout = Layout(ranks=16, tensor=2, pipeline=2, replicas=2)
    layout.data, layout.shards        -> 4, 2: micro batches at once, and ranks that FSDP shards a tensor among
    layout.place(5)                   -> Place(pipeline=0, data=2, tensor=1)

Rank numbers vary fastest along tensor, then data, then pipeline, as in `predict/parallel.py`: the ranks of a tensor
group are neighbours, which torchrun puts on one node. The degrees are options of a command, not part of a recipe.
`search/ranks.py` checks whether a model can be cut that way, before anything starts; what is impossible for any model
is an error here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Place:
    """The coordinates of a rank."""

    pipeline: int
    """Index of its stage."""
    data: int
    """Index of its share of every global batch; the same for all ranks of a tensor group and of a pipeline."""
    tensor: int
    """Index of its part of every layer."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    ranks: int = 1
    tensor: int = 1
    """Ranks that share each layer."""
    pipeline: int = 1
    """Consecutive stages that the layers are divided into."""
    replicas: int = 1
    """With FSDP: copies of the model, each cut among data / replicas ranks (hybrid sharding)."""

    def __post_init__(self) -> None:
        if min(self.ranks, self.tensor, self.pipeline, self.replicas) < 1:
            raise ValueError(f"degrees count from 1: {self}")
        if self.ranks % (self.tensor * self.pipeline) or self.data % self.replicas:
            raise ValueError(f"the ranks do not divide: {self}")

    @property
    def data(self) -> int:
        """Parts of a global batch that are computed at the same time: GBS = MBS x data x accumulation."""
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def shards(self) -> int:
        """Ranks that FSDP shards one copy of the model among."""
        return self.data // self.replicas

    @property
    def is_plain(self) -> bool:
        """True if the ranks differ only in their data."""
        return self.data == self.ranks and self.replicas == 1

    def describe_bubble(self, micro_batches: int) -> str:
        """Describe what filling and draining the pipeline costs with this many micro batches per update."""
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
        """Return `redline train`'s options for it on one machine: '--gpus 4 --tensor 2'; '' for one process."""
        degrees = {"gpus": self.ranks, "tensor": self.tensor, "pipeline": self.pipeline, "replicas": self.replicas}
        return " ".join(f"--{name} {size}" for name, size in degrees.items() if size > 1)

    def words(self, way: str = "none") -> str:
        """Describe the layout: '4 ranks: tensor 2 x data 2 (fsdp)', with the degrees above one. `way`: a plan's
        `parallel`, which is how ranks with different data share a step."""
        degrees = {"pipeline": self.pipeline, "replicas": self.replicas, "tensor": self.tensor}
        said = [f"{name} {size}" for name, size in degrees.items() if size > 1]
        data = f"shards {self.shards}" if self.replicas > 1 else f"data {self.data}"
        shared = "" if way == "none" else f" ({way})"
        return f"{self.ranks} ranks: {' x '.join([*said, data])}{shared}"


def options_of_ranks(layout: Layout | None, parallel: str | None) -> str:
    """Return the layout's options, with `--parallel` if it was given."""
    degrees = "" if layout is None else layout.options()
    return degrees if parallel is None else f"{degrees} --parallel {parallel}".lstrip()


def bubble(stages: int, micro_batches: int) -> float:
    """Return the idle share of a stage, (p-1)/(m+p-1), if all stages take equally long (GPipe, arXiv 1811.06965)."""
    return (stages - 1) / (micro_batches + stages - 1)
