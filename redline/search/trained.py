"""How `redline train` runs a layout that `estimate` predicts, and the command line for it.

    trained = Trainable(words="gpt2-xl", rungs=rungs, workload=workload, hardware=hardware, gpus=64)
    trained.plan(tp=2, pp=1, zero=3)                  -> Plan(parallel="fsdp", tensor_parallel=True, loss="full", ...)
    trained.reasons(tp=1, pp=1, zero=1)               -> ("train has no ZeRO 1: ...",)
    trained.line(layout, zero=3, gpus_per_node=8)     -> "torchrun --nnodes 8 ... -m redline train gpt2-xl ..."

ZeRO 0 is `ddp` and ZeRO 3 is `fsdp`; there is no ZeRO 1 or 2 here. `fsdp-keep` is ZeRO 3 between updates and holds more
during one (`Rank.keeps`). No ZeRO stage describes that, so a recipe must name it.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace

from redline.core.hardware import Hardware
from redline.core.layout import Layout as Ranked
from redline.core.plan import Plan
from redline.core.recipe import Recipe
from redline.core.values import to_json
from redline.core.workload import Workload
from redline.predict.parallel import Layout
from redline.rungs import plan_of
from redline.rungs.ladder import for_layout, why_not_among
from redline.rungs.parallel import DDP, RANK_RUNGS
from redline.search.ranks import OF_LAYOUTS

WAYS = {0: DDP, 3: "fsdp"}
WHOLE_IN_STAGES = (
    "fsdp in a pipeline keeps a stage's weights and gradients whole during an update (docs/pipeline.md): train holds "
    "more than is predicted here"
)
RECIPE_FILE = "recipe.json"  # in the command line, unless train uses these rungs by default
RENDEZVOUS = "--rdzv-backend c10d --rdzv-id redline --rdzv-endpoint HOST:29500"


@dataclass(frozen=True, kw_only=True)
class Trainable:
    words: str | None
    """The workload as `redline train` accepts it; None if it does not."""
    rungs: tuple[str, ...]
    workload: Workload
    hardware: Hardware
    gpus: int
    own_recipe: str | None = None
    """The recipe file that the rungs come from."""
    usual: bool = True
    """True if train uses these rungs by default."""
    way: str | None = None
    """`--parallel`, if it was given: `fsdp-keep` has no ZeRO stage of its own."""

    def names(self, tp: int, pp: int, zero: int) -> tuple[str, ...]:
        """Return the rungs with those of the layout."""
        layout = Ranked(ranks=self.gpus, tensor=tp, pipeline=pp)
        return for_layout((*self.rungs, self.way or WAYS[zero]), layout)

    def reasons(self, tp: int, pp: int, zero: int) -> tuple[str, ...]:
        """Return every reason why train refuses the layout; empty if it accepts it."""
        if self.way is None and zero not in WAYS:
            return (f"train has no ZeRO {zero}: ddp is ZeRO 0, and fsdp ZeRO 3", *self.reasons(tp, pp, 0))
        names, ranked = self.names(tp, pp, zero), replace(self.hardware, ranks=self.gpus, count=self.gpus)
        found = []
        for name in filter(RANK_RUNGS.__contains__, names):
            reason = why_not_among(name, names, self.workload, ranked)
            found += [] if reason is None else [f"{OF_LAYOUTS.get(name, name)}: {reason}"]
        return tuple(found)

    def plan(self, tp: int, pp: int, zero: int) -> Plan | None:
        """Return the plan of the layout, or None if train refuses it."""
        return None if self.reasons(tp, pp, zero) else plan_of(self.names(tp, pp, zero))

    def advisable_plan(self, tp: int, pp: int, zero: int) -> Plan | None:
        """Return the plan, or None if train refuses the layout or would hold more than is predicted: such a layout is
        not recommended."""
        return None if pp > 1 and zero else self.plan(tp, pp, zero)

    def line(self, layout: Layout, zero: int, gpus_per_node: int) -> str | None:
        """Return the command line, complete except for the first node's name; None if train rejects the workload."""
        if self.words is None:
            return None
        ranked = Ranked(ranks=layout.gpus, tensor=layout.tp, pipeline=layout.pp, replicas=layout.replicas)
        options = ranked.options().split()
        start, nodes = "redline train", layout.gpus // gpus_per_node
        if nodes > 1:
            options = options[2:]  # torchrun sets the number of ranks
            start = f"torchrun --nnodes {nodes} --nproc-per-node {gpus_per_node} {RENDEZVOUS} -m redline train"
        # By default train uses ddp, or what the recipe file says.
        way = ["--parallel", self.way or WAYS[zero]] if zero or self.own_recipe is not None else []
        sizes = f"--micro-batch {layout.micro_batch} --global-batch {layout.global_batch}"
        return " ".join([*self._recipe_first(layout), start, self.words, *options, *way, sizes, *self._recipe()])

    def _recipe(self) -> list[str]:
        if self.own_recipe is not None:
            return ["--recipe", shlex.quote(self.own_recipe)]
        return [] if self.usual else ["--recipe", RECIPE_FILE]

    def _recipe_first(self, layout: Layout) -> list[str]:
        """Return the command that writes the recipe file, since train reads rungs from a file."""
        if self.usual or self.own_recipe is not None:
            return []
        text = json.dumps(to_json(Recipe(rungs=self.rungs, micro_batch=layout.micro_batch)))
        return ["echo", shlex.quote(text), ">", RECIPE_FILE, "&&"]
