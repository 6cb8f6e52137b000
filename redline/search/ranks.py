"""What several ranks change for a ladder, a tune and a profile: what is refused, where they begin, what is predicted.

    hardware = check_ranks(hardware, 4)                          # the machine with four ranks on it
    rate_of_ranks(shape, plan, 16, hardware)                     # tokens/s of all, communication included

A measurement of ranks is one job of that many processes (`engine/worker.py`). Training has its own command line for
them (`commands/ranks.py`), and the same limits.
"""

from __future__ import annotations

import os
from dataclasses import replace

from redline.core.errors import UserError
from redline.core.hardware import Hardware, known_device
from redline.core.interconnects import choose_links
from redline.core.plan import Plan
from redline.core.traced import Traced
from redline.core.units import counted
from redline.core.workload import Shape, Workload
from redline.predict.communication import Fabric
from redline.predict.fitting import Case, case_of
from redline.predict.layouts import expected_peaks, predict_parallel
from redline.predict.parallel import Layout
from redline.rungs.parallel import PIPELINE_GPIPE, PIPELINE_PARALLEL, TENSOR_PARALLEL

HERE = "LOCAL_WORLD_SIZE"  # torchrun's: ranks on this machine
LEAST_ON_CPU, RANKS_PER_CORE = 8, 4  # 8: TP 2 x PP 2 x DP 2, which even a small machine should be able to try
OF_LAYOUTS = {TENSOR_PARALLEL: "--tensor", PIPELINE_PARALLEL: "--pipeline", PIPELINE_GPIPE: "--pipeline"}


def ranks_of_a_node(ranks: int) -> int:
    """torchrun says how many it has started here; --gpus starts all of them here."""
    return int(os.environ.get(HERE, ranks))


def is_torchruns() -> bool:
    return HERE in os.environ


def how_many(ranks: int) -> str:
    """The option that says so, of whoever starts them."""
    return f"--nproc-per-node {ranks}" if is_torchruns() else f"--gpus {ranks}"


def check_ranks(hardware: Hardware, ranks: int) -> Hardware:
    """The machine with that many ranks on it. More than one per device is refused."""
    here = ranks_of_a_node(ranks)
    if hardware.kind == "cuda" and here > hardware.count:
        only = f"this machine has {counted(hardware.count, 'GPU')}"
        fix = f"use {how_many(hardware.count)}" if hardware.count > 1 or is_torchruns() else "leave --gpus out"
        raise UserError(f"{here} ranks on this machine", f"each rank has a GPU of its own, and {only}", fix)
    most = most_on_cpu(hardware.cpu_cores)
    if hardware.kind == "cpu" and here > most:
        raise UserError(
            f"{here} ranks on this CPU",
            f"each is a process that holds torch and shares {counted(hardware.cpu_cores, 'core')} with the others: "
            f"beyond {most} nothing is left to learn from them",
            f"use {how_many(most)} or fewer",
        )
    return replace(hardware, ranks=ranks)


def most_on_cpu(cores: int) -> int:
    """Ranks that make sense there: four on a core, and always as many as try tensor, pipeline and data at once."""
    return max(LEAST_ON_CPU, RANKS_PER_CORE * cores)


def not_measured(name: str) -> str | None:
    """Why a rung is no choice of a ladder, a tune or a profile, whatever the machine is; None for most."""
    if name not in OF_LAYOUTS:
        return None
    return f"the ranks of a measurement share data only: train has {OF_LAYOUTS[name]} N, and estimate predicts it"


def check_shareable(workload: Workload, hardware: Hardware) -> None:
    """The loss of a model that is no mean over its samples is another one when ranks average theirs."""
    if hardware.ranks > 1 and not workload.splits:
        raise UserError(
            f"--gpus {hardware.ranks} with {workload.name}",
            "its loss of a batch is not the mean over the parts of it, so that ranks would train another model",
            "leave --gpus out, or let the loss be a mean over the samples",
        )


def check_global_batch(global_batch: int | None, ranks: int) -> None:
    """Every rank takes the same part of an update."""
    if global_batch is not None and global_batch % ranks:
        below = global_batch // ranks * ranks
        near = " or ".join(str(size) for size in (below, below + ranks) if size)
        raise UserError(
            f"a global batch of {global_batch} does not divide among {ranks} ranks",
            "every rank takes as many sequences of an update as the others",
            f"use --global-batch {near}",
        )


def rate_of_ranks(shape: Shape | Traced, plan: Plan, micro_batch: int, hardware: Hardware) -> float | None:
    """As `redline estimate --gpus N` predicts it; None where device, link or model are not known."""
    device = known_device(hardware.name, hardware.multiprocessors) if hardware.kind == "cuda" else None
    case = case_of(shape, plan, hardware.ranks)
    if device is None or not isinstance(case, Case):
        return None
    layout = Layout(gpus=hardware.ranks, micro_batch=micro_batch)
    fabric = Fabric(gpus_per_node=hardware.ranks, links=choose_links(None, device))
    return predict_parallel(replace(case, layout=layout), fabric, expected_peaks(plan, device, None)).tokens_per_second
