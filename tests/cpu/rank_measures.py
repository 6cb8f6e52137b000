"""What the ranks of tests/cpu/test_ranks_measure.py run: one start of two for many measurements, some with a fault.

rank_measures.py 2 FOLDER     # ranks; FOLDER/jobs.json: {name: {"job", "fault"}}

A fault is planted in rank 1 alone, and in the measured step alone: the reference is rank 0's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    return batches_of(workload, micro_batch, tokens, SimpleNamespace(rank=0, count=ranks.count))  # type: ignore[arg-type]


@contextmanager
def fault(kind: str | None, ranks: Ranks) -> Iterator[None]:
    if kind is None or ranks.leads:
        yield
    elif kind == "unreduced":
        with patch.object(TrainStep, "compute_gradients", unreduced):
            yield
    else:
        with patch.object(build, "batches_of", share_of_rank_0):
            yield


def run(folder: Path) -> None:
    found = {}
    measure.WARMUP_LIMIT_SECONDS = 0.0  # nobody reads the times
    with join(60) as ranks:
        device = ranks.connect("cpu")
        for name, case in json.loads((folder / "jobs.json").read_text()).items():
            job = from_json(Job, case["job"])
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
