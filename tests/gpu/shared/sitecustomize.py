"""Several ranks on one GPU: Python imports this by itself when its folder is on PYTHONPATH.

SHARED_GPU=2 PYTHONPATH=tests/gpu/shared:. redline profile tiny --gpus 2

The machine is said to have so many GPUs, and every rank takes the first. NCCL refuses two ranks on one GPU of one host,
and each of them is told another host's name: what they send goes over a socket, which is slow and right. Only the place
is changed; model, layout, collectives and NCCL's kernels are those of as many GPUs. PLANTED_FAULT and PLANTED_HASTE are
those of tests/cpu/planted.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

PLANTED = Path(__file__).resolve().parents[2] / "cpu" / "planted" / "sitecustomize.py"
RANKS = ("redline.engine.worker", "redline", "rank_cases.py", "rank_fault.py")


def count_more_gpus(count: int) -> None:
    """In what is told of the machine: torch itself looks at all GPUs that it counts."""
    from redline.core.hardware import Hardware

    real = Hardware.__init__

    def made(self: Hardware, **fields: Any) -> None:
        real(self, **fields | ({"count": count} if fields["kind"] == "cuda" else {}))

    Hardware.__init__ = made  # type: ignore[method-assign, assignment]


def share_the_first() -> None:
    from redline.engine.distributed import Ranks

    real = Ranks.connect

    def connect(self: Ranks, kind: str) -> object:
        os.environ.update({"NCCL_HOSTID": f"rank-{self.rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"})
        self.local = 0
        return real(self, kind)

    Ranks.connect = connect  # type: ignore[method-assign, assignment]


if "SHARED_GPU" in os.environ:
    words = [Path(word).name for word in sys.orig_argv]
    if "redline.engine.probe" in words:
        count_more_gpus(int(os.environ["SHARED_GPU"]))
    elif "rank_cases.py" in words or ("RANK" in os.environ and any(name in words for name in RANKS)):
        share_the_first()
        runpy.run_path(str(PLANTED))
