"""Ranks as forks of one process: torch is imported once and not by each of them, which is most of what a start costs.

    raise SystemExit(run_ranks(4, lambda: run(folder)))      # 0, or 1 where one of them failed; the others are ended

The environment is torchrun's, and the store is the parent's as it is the agent's. torchrun itself, and what it does to
ranks that are lost, is in test_ranks_faults.py.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable

from torch._C._distributed_c10d import TCPStore


def run_ranks(count: int, run: Callable[[], None]) -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = {fork(rank, count, port, run) for rank in range(count)}
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)  # after the forks: it has a thread
    failed = False
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and not failed:
            failed = True
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    del store  # not earlier: the ranks use it
    return int(failed)


def fork(rank: int, count: int, port: int, run: Callable[[], None]) -> int:
    if (pid := os.fork()) != 0:
        return pid
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in here.items()})
    os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"})
    code = 1
    try:
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
