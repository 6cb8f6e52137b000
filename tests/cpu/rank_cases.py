"""What the ranks of tests/cpu/test_ranks.py run: one start of N processes for many training runs.

rank_cases.py 4 FOLDER        # ranks; FOLDER/cases.json: a list of orders

An order goes on with what is in the run directory of its name and "-begun". Also measures what a rank holds after a
step, for the orders under "held".
"""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from forked_ranks import run_ranks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from redline.core.layout import Layout
from redline.core.values import from_json
from redline.engine.build import build_step
from redline.engine.distributed import Ranks, join
from redline.engine.session import TrainOrder, train, training_plan

BEGUN = "-begun"


def run(folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    told: dict[str, Any] = {}
    with join(200) as ranks:  # a compiler that shares its cores with other tests is no rank that hangs
        for order in cases["orders"]:
            if (begun := Path(order["out"] + BEGUN)).exists():  # by an order before this one, with another layout
                if ranks.leads:
                    shutil.copytree(begun, order["out"])
                ranks.gather(None)  # nobody looks before it is there
            events: list[Any] = []
            summary = train(
                from_json(TrainOrder, order), lambda kind, events=events, **f: events.append((kind, f)), ranks
            )
            told[order["out"]] = {"summary": summary, "events": events}
        for order in cases["held"]:
            told[f"held {order['recipe']['rungs']}"] = held(from_json(TrainOrder, order), ranks)
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(told))


def held(order: TrainOrder, ranks: Ranks) -> dict[str, Any]:
    """Bytes of weights, gradients and optimizer state that this rank itself holds, between backward and update; how
    many times gradients were reduced for a batch of three pieces; and every bit of the weights, as a checksum."""
    ranks.arrange(order.layout or Layout(ranks=ranks.count))
    device, plan = ranks.connect("cpu"), training_plan(order.recipe, ranks.layout)
    step = build_step(order.workload, plan, device=device, chunk=1, ranks=ranks)
    shape = order.workload.decoder
    batch = torch.zeros((2, 3, shape.sequence), dtype=torch.int64)
    step(batch)  # makes the optimizer's state
    with Reductions() as seen:
        step.compute_gradients(batch)
    states = [value for state in step.optimizer.state.values() for value in state.values()]
    tensors = {
        "weights": step.parameters,
        "gradients": [parameter.grad for parameter in step.parameters],
        "optimizer": [value for value in states if value.numel() > 1],  # and not the count of steps
    }
    return {
        "reductions": seen.count,
        "checksums": {name: checksum(parameter) for name, parameter in step.model.named_parameters()},
        **{what: sum(local_bytes(tensor) for tensor in found) for what, found in tensors.items()},
    }


class Reductions(TorchDispatchMode):
    """Counts collectives that add up."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).startswith("c10d.") and "reduce" in str(func)
        return func(*args, **(kwargs or {}))


def checksum(tensor: torch.Tensor) -> int:
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return zlib.crc32(here.detach().numpy().tobytes())


def local_bytes(tensor: Any) -> int:
    return int((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(run_ranks(int(sys.argv[1]), lambda: run(Path(sys.argv[2]))))
