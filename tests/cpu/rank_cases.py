"""What the ranks of tests/cpu/test_ranks.py run: one start of N processes for many training runs.

rank_cases.py 4 FOLDER        # ranks; FOLDER/cases.json: a list of orders

An order goes on with what is in the run directory of its name and "-begun". Also measures what a rank holds while it
is built, within a step and after one, and what the step sends, for the orders under "held".
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
from wire import Storages, Wire

from redline.core.layout import Layout
from redline.core.values import from_json
from redline.engine.build import build_step
from redline.engine.distributed import Ranks, join
from redline.engine.session import TrainOrder, train, training_plan
from redline.engine.step import TrainStep

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
    """Bytes of weights, gradients and optimizer state that this rank itself holds, between backward and update; what
    it held and sent for a batch of three pieces, and held for one; and every bit of the weights, as a checksum."""
    ranks.arrange(order.layout or Layout(ranks=ranks.count))
    device, plan = ranks.connect("cpu"), training_plan(order.recipe, ranks.layout)
    with Storages() as building:
        step = build_step(order.workload, plan, device=device, chunk=1, ranks=ranks)
    shape = order.workload.decoder
    batch = torch.zeros((2, 3, shape.sequence), dtype=torch.int64)
    for _ in range(2):  # the optimizer's state; and DDP announces its buckets in the forward after the first backward
        step(batch)
    short = Within(step)
    with short.made:
        step.compute_gradients(batch[:, :1])
    step.optimizer.zero_grad()
    within = Within(step)
    with within.made, Wire() as wire:
        step.compute_gradients(batch)
    states = [value for state in step.optimizer.state.values() for value in state.values()]
    tensors = {
        "weights": step.parameters,
        "gradients": [parameter.grad for parameter in step.parameters],
        "optimizer": [value for value in states if value.numel() > 1],  # and not the count of steps
    }
    return {
        "building": {"left": building.bytes, "peak": building.peak},
        "within": {"before": within.before, "forward": within.forward, "most whole": within.most_whole},
        "peaks": [short.peak, within.peak],
        "sent": wire.seen(),
        "checksums": {name: checksum(parameter) for name, parameter in step.model.named_parameters()},
        **{what: sum(local_bytes(tensor) for tensor in found) for what, found in tensors.items()},
    }


class Within:
    """What a step holds: memory that was asked for since it began, before each piece of the batch (that is gradients);
    whole weights when a forward has ended; the most whole weights at any time, and the most of all that together."""

    def __init__(self, step: TrainStep) -> None:
        self.before: list[int] = []
        self.forward: list[int] = []
        self.most_whole = self.peak = 0
        self._whole: dict[int, torch.UntypedStorage] = {}
        self.model, self.made = step.model, Storages(self.look)
        shared, piece, loss = step.shared, step.shared.piece, step.loss

        def noted_piece(last: bool) -> Any:
            self.before.append(self.made.bytes)
            return piece(last)

        def noted_loss(batch: Any) -> torch.Tensor:
            found = loss(batch)
            self.forward.append(self.whole())
            return found

        shared.piece, step.loss = noted_piece, noted_loss  # type: ignore[method-assign]

    def look(self) -> None:
        whole = self.whole()
        self.most_whole = max(self.most_whole, whole)
        self.peak = max(self.peak, whole + self.made.bytes)

    def whole(self) -> int:
        """FSDP puts plain tensors in the place of its own while weights are gathered, and takes their memory away,
        not them, when it gives them back."""
        for parameter in self.model.parameters():
            if not isinstance(parameter, DTensor):
                storage = parameter.untyped_storage()
                self._whole[storage._cdata] = storage
        return sum(storage.nbytes() for storage in self._whole.values())


def checksum(tensor: torch.Tensor) -> int:
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return zlib.crc32(here.detach().numpy().tobytes())


def local_bytes(tensor: Any) -> int:
    return int((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(run_ranks(int(sys.argv[1]), lambda: run(Path(sys.argv[2]))))
