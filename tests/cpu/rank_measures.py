"""What the ranks of tests/cpu/test_ranks_measure.py run: one start of two for many measurements, some with a fault.

rank_measures.py 2 FOLDER     # ranks; FOLDER/jobs.json: {name: {"job", "fault"}}

A fault is planted in the measured step alone: the reference is rank 0's. It is one of the ranks that take the second
share of the batch, or of the second rank of a tensor group, or of the sums that a whole group makes together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from forked_ranks import run_ranks
from torch._C._distributed_c10d import PrefixStore

from redline.core.job import Job
from redline.core.values import from_json, to_json
from redline.engine import build, measure
from redline.engine.distributed import Ranks, join
from redline.engine.shard import Replicated
from redline.engine.step import TrainStep
from redline.model import tensor_parallel


def unreduced(step: TrainStep, batch: Any) -> torch.Tensor:
    """Takes part in the reduction, and goes on with its own gradients."""
    assert isinstance(step.shared, Replicated)
    alone = step.shared.ddp.module(*step.adapter.arguments(batch))
    own = torch.autograd.grad(alone, step.parameters)  # past what DDP hangs onto the parameters
    loss = compute_gradients(step, batch)
    for parameter, gradient in zip(step.parameters, own, strict=True):
        parameter.grad = gradient
    return loss


compute_gradients = TrainStep.compute_gradients
batches_of = build.batches_of


def share_of_rank_0(workload: Any, micro_batch: int, tokens: Path, ranks: Ranks) -> Any:
    first: Any = SimpleNamespace(place=ranks.layout.place(0), layout=ranks.layout)
    return batches_of(workload, micro_batch, tokens, first)


def twice(step: TrainStep, batch: Any) -> torch.Tensor:
    """One piece of one matrix, after everything else has gone right."""
    loss = compute_gradients(step, batch)
    gradient = step.model.get_parameter("h.0.mlp.c_fc.weight").grad
    assert gradient is not None
    gradient *= 2
    return loss


ACROSS = {**tensor_parallel.CUTS, "attn.c_attn.weight": (0, 1)}  # rows of the fused matrix, and not of each third


@contextmanager
def fault(kind: str | None, ranks: Ranks) -> Iterator[None]:
    faults: dict[str, tuple[bool, Any]] = {
        "unreduced": (ranks.place.data > 0, partial(patch.object, TrainStep, "compute_gradients", unreduced)),
        "other-share": (ranks.place.data > 0, partial(patch.object, build, "batches_of", share_of_rank_0)),
        "cut-across": (ranks.place.tensor > 0, partial(patch.object, tensor_parallel, "CUTS", ACROSS)),
        "twice": (ranks.place.tensor > 0, partial(patch.object, TrainStep, "compute_gradients", twice)),
        "unsummed": (True, partial(patch.object, tensor_parallel, "read_by_all", lambda x, mesh: x)),
    }
    here, plant = (False, None) if kind is None else faults[kind]
    with plant() if here else nullcontext():
        yield


def run(folder: Path) -> None:
    found = {}
    measure.WARMUP_LIMIT_SECONDS = 0.0  # nobody reads the times
    with join(60, watches=False) as ranks:  # as a worker; and a watch would look into the store while it is exchanged
        device = ranks.connect("cpu")
        for name, case in json.loads((folder / "jobs.json").read_text()).items():
            job = from_json(Job, case["job"])
            ranks.arrange(job.arranged)
            bench = measure.Bench(
                job=job, tokens=folder / job.tokens, device=device, report=lambda *_, **__: None, ranks=ranks
            )
            ranks._store = PrefixStore(name, ranks._store)  # as if each were a job of its own
            with fault(case["fault"], ranks):
                found[name] = to_json(measure.measure(bench))
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(run_ranks(int(sys.argv[1]), lambda: run(Path(sys.argv[2]))))
