"""`redline train --gpus N`: starts the ranks, and runs each of them.

    start_ranks(options)      # in the user's process: torchrun's agent, with N ranks of the same command
    run_rank(options)         # in each rank, also if the user's own torchrun started it

Rank 0 does what the command does without ranks: it checks, makes the run directory, prepares data, shows and writes.
The others receive the finished order from it and train. On a CPU the ranks are processes that share its cores: slower
than one process and with the same numbers, which is good for learning and tests.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.commands.common import check_sizes
from redline.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, UserError
from redline.core.rank_processes import (
    ASKED,
    OWN_INTERRUPT,
    RANK_PID_FILE,
    RANKS_LOG,
    REASON,
    RUN_NAME,
    SCREEN,
    TYPED,
    agent_environment,
    follows_rank_0,
    killed_by,
    log_to,
    mark_interrupted,
    mark_left,
    mark_over,
    rank_pid_file,
    report_why,
    take_screen,
    was_interrupted,
)
from redline.core.units import counted

if TYPE_CHECKING:
    from redline.core.layout import Layout
    from redline.core.recipe import Recipe
    from redline.core.workload import Workload
    from redline.engine.distributed import Ranks
    from redline.engine.session import TrainOrder
    from redline.predict.parallel import Beside


TELLING_SECONDS = 5.0


def ranks_here() -> int | None:
    """Return the number of ranks if the environment says that torchrun started this process as one; else None."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    count = int(os.environ["WORLD_SIZE"])
    return count if count > 1 or "TORCHELASTIC_RUN_ID" in os.environ else None


def check_alone(command: str) -> None:
    """Refuse to run as one of several ranks, in every command but `train`."""
    count = ranks_here()
    if count is not None and count > 1:
        gpus = f", with --gpus {count} instead" if command in ("ladder", "tune", "profile") else ""
        raise UserError(
            f"redline {command} in one of {count} processes that torchrun started",
            "each of them would run the whole command",
            f"leave torchrun out{gpus}: only `redline train` runs under it",
        )


def wait_for_rank_0() -> bool:
    """In a rank other than 0 that found a mistake before it joined the others, wait and return True. Rank 0 finds the
    same mistake, and its exit ends them all; if this rank left first, the agent would end rank 0 before it could say
    why. Return False in any other process."""
    if not follows_rank_0():
        return False
    with suppress(KeyboardInterrupt):  # the agent's SIGTERM arrives as one
        time.sleep(TELLING_SECONDS)
    return True


# --- starting them ----------------------------------------------------------------------------------------------------


def start_ranks(options: argparse.Namespace) -> int:
    """Check all that can be checked before a process is started, then start the ranks and wait for their end."""
    from rich.console import Console

    from redline.commands.train_order import check_order
    from redline.search.launch import import_environment, kill_group

    check_sizes(options, ("gpus",))
    if ranks_here() is not None:
        raise UserError(
            f"--gpus {options.gpus} in a process that torchrun started",
            "torchrun has made the ranks already, and says how many there are",
            "leave --gpus out, or leave torchrun out",
        )
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        order, hardware = check_order(options, Console(file=nowhere), ranks=options.gpus)
    if hardware.kind == "cpu":
        print(f"{options.gpus} ranks share this CPU: the same numbers, and no faster", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="redline-ranks-") as folder:
        pid_file = Path(folder) / "rank-0"
        environment = {
            **agent_environment(options.gpus, hardware.cpu_cores),
            **import_environment(),
            RANK_PID_FILE: str(pid_file),
            SCREEN: "1",
            TYPED: json.dumps(list(options.words)),
        }
        with open(Path(folder) / RANKS_LOG, "wb") as log:
            # In a session of their own: Ctrl-C reaches the ranks only through this process, and only once.
            process = subprocess.Popen(
                agent_command(options, folder), env=environment, stdin=2, stderr=log, start_new_session=True
            )
        try:
            code = follow(process, pid_file)
        finally:
            kill_group(process)
        if process.returncode < 0 and code == EXIT_FAILED:  # the agent was killed and could not report it
            see_off(pid_file)
            report_why(
                pid_file, f"the process that holds the ranks together {killed_by(-process.returncode)}", sys.stderr
            )
        if (kept := keep_log(Path(folder), code)) is not None and code == EXIT_FAILED:
            print(f"tracebacks, and what torch wrote: {kept}", file=sys.stderr)
        if code == EXIT_FAILED:
            record_end(Path(folder), order, options)
        if code is None:
            raise KeyboardInterrupt
        return code


def see_off(pid_file: Path) -> None:
    """Wait a few seconds until rank 0 has noticed that its agent is gone and has ended: then it writes nothing more."""
    until = time.monotonic() + TELLING_SECONDS
    with suppress(OSError, ValueError):  # rank 0 has not started, or has ended
        while time.monotonic() < until:
            os.kill(int(pid_file.read_text(encoding="utf-8")), 0)
            time.sleep(0.05)


def keep_log(folder: Path, code: int | None) -> Path | None:
    """Append to the run's log what the agent wrote, and the ranks before they knew the run directory. Return the log's
    path, or None if nobody wrote anything. Without a run directory the log is a file that stays, but only if something
    failed. If the run was interrupted (`code` is None), what they wrote is of no use and is dropped."""
    early = b"" if code is None else (folder / RANKS_LOG).read_bytes()
    if (run := run_directory(folder)) is not None:
        log = run / RANKS_LOG
    elif early and code == EXIT_FAILED:
        log = Path(tempfile.mkstemp(prefix="redline-ranks-", suffix=".log")[1])
    else:
        return None
    with open(log, "ab") as file:
        file.write(early)
    if log.stat().st_size:
        return log
    log.unlink()
    return None


def record_end(folder: Path, order: TrainOrder, options: argparse.Namespace) -> None:
    """Record in the run's metrics, on its page and in the `--json` summary what ended the ranks, if rank 0 did not."""
    from redline.commands.train import show_lost_run
    from redline.core.training import METRICS_FILE
    from redline.report.training import MetricsLog

    reason = folder / REASON
    if not reason.exists() or (run := run_directory(folder)) is None or not (run / METRICS_FILE).exists():
        return
    text, last = reason.read_text(encoding="utf-8"), (run / METRICS_FILE).read_text(encoding="utf-8").splitlines()[-1:]
    if json.dumps(text) not in "".join(last):  # rank 0 may have recorded it already
        log = MetricsLog(run / METRICS_FILE)
        log("end", ended="failed", reason=text, checkpoint=None)
        log.close()
    show_lost_run(replace(order, out=str(run)), options)


def run_directory(folder: Path) -> Path | None:
    """Return the ranks' run directory; None if they had not made one yet, or if a mistake removed it."""
    name = folder / RUN_NAME
    run = Path(json.loads(name.read_text(encoding="utf-8"))[0]) if name.exists() else None
    return run if run is not None and run.is_dir() else None


def agent_command(options: argparse.Namespace, logs: str) -> list[str]:
    agent = [sys.executable, "-m", "redline.engine.agent", "--standalone", f"--nproc-per-node={options.gpus}"]
    return [*agent, f"--log-dir={logs}", "-m", "redline", *without_gpus(options.words)]


def without_gpus(words: Sequence[str]) -> list[str]:
    """Return the command for each rank, without --gpus, which argparse also accepts as `--gpus=4` and `--gp 4`. The
    ranks record the command as it was typed (`TYPED`)."""
    kept, skip = [], False
    for word in words:
        name, _, value = word.partition("=")
        is_gpus = len(name) > 3 and "--gpus".startswith(name)
        if not skip and not is_gpus:
            kept.append(word)
        skip = is_gpus and not value
    return kept


def follow(process: subprocess.Popen[bytes], pid_file: Path) -> int | None:
    """Wait for the agent and return the exit code. A signal goes to rank 0 alone, which informs the others, so that all
    stop after the same update. None if a signal made rank 0 leave without a summary: the command counts as interrupted,
    whatever the ranks' exit codes."""

    def pass_on(number: int, _: object) -> None:
        pid_file.with_name(ASKED).touch()
        try:
            os.kill(int(pid_file.read_text(encoding="utf-8")), number)
        except (OSError, ValueError):  # rank 0 is not there yet, or no longer: the agent ends all ranks
            process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if was_interrupted(pid_file, code):
        return None
    if code == 128 + signal.SIGTERM:  # the agent itself was signalled and passed it on; rank 0 has reported the rest
        return EXIT_INTERRUPTED
    return code if code >= 0 else EXIT_FAILED


# --- being one --------------------------------------------------------------------------------------------------------


def run_rank(options: argparse.Namespace) -> int:
    from redline.engine.distributed import join, recorded

    check_meeting_place()
    try:
        ranks = join(options.rank_timeout)
        if ranks.leads:
            take_screen()
        with recorded(ranks), ranks:
            return lead(ranks, options) if ranks.leads else train_along(ranks)
    except KeyboardInterrupt:  # from the user, their code, or the agent because of another rank, which it reports
        if mark_interrupted(OWN_INTERRUPT):  # no signal was recorded: their code raised it, and the log needs the line
            traceback.print_exc(file=sys.__stderr__)
        if os.environ["RANK"] == "0":
            mark_left()
        return EXIT_INTERRUPTED


def check_meeting_place() -> None:
    """Refuse incomplete variables, which were set by hand or left over in a shell; torchrun sets all of them."""
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(
            f"RANK and WORLD_SIZE are set, {' and '.join(missing)} not",
            f"this process is one of {os.environ['WORLD_SIZE']} ranks then, and nothing says where they meet",
            "start it with torchrun, which sets them, or unset RANK and WORLD_SIZE",
        )


def lead(ranks: Ranks, options: argparse.Namespace) -> int:
    from rich.console import Console

    from redline.commands.train import train_and_show
    from redline.commands.train_order import make_order
    from redline.core.values import to_json

    console = Console(stderr=True)
    try:
        options = gone_on(options, ranks)
        order = make_order(options, console, ranks=ranks.count)
        ranks.remember("out", order.out)
        if (path := rank_pid_file()) is not None:
            path.with_name(RUN_NAME).write_text(json.dumps([order.out, order.options_of_ranks]), encoding="utf-8")
        log_to(Path(order.out))
    except BaseException:
        ranks.say("order", None)  # so that no rank waits for an order that does not come
        raise
    ranks.say("order", to_json(order))
    code = train_and_show(order, options, console, ranks)
    mark_over(ranks.limit_seconds)
    ranks.say("over", code)
    if code == EXIT_DONE:  # any other code makes torchrun end them
        ranks.take_leave()
    return code


def gone_on(options: argparse.Namespace, ranks: Ranks) -> argparse.Namespace:
    """Return the options or, if torchrun restarted the ranks after a failure, options that resume the run they made."""
    from redline.commands.train_order import FIXED
    from redline.core.job import RUN_FILE

    out = ranks.remembered("out") or options.out
    if ranks.attempt == 0 or options.resume is not None or out is None or not (Path(out) / RUN_FILE).exists():
        return options
    settled = dict.fromkeys((*FIXED, "out"))
    return argparse.Namespace(**{**vars(options), **settled, "resume": Path(out)})


def train_along(ranks: Ranks) -> int:
    from redline.core.values import from_json
    from redline.engine.session import TrainOrder, train

    told = ranks.hear("order")
    if told is None:
        return EXIT_DONE  # rank 0 reports why
    order = from_json(TrainOrder, told)
    log_to(Path(order.out))
    summary = train(order, say_nothing, ranks)
    if summary["ended"] == "failed":
        if ranks.hears("over", ranks.mistake_seconds) and ranks.hear("over") != EXIT_DONE:
            ranks.wait_for_rank_0()  # it has failed too, and the agent would end it if this rank left first
            return EXIT_FAILED
        raise RuntimeError(summary["reason"])
    ranks.hear("over")  # a rank that leaves earlier looks like one that failed
    ranks.take_leave()
    return EXIT_DONE


def say_nothing(kind: str, **_: Any) -> None:
    """Ignore events: rank 0 reports them."""


# --- what can be refused ----------------------------------------------------------------------------------------------


DEGREES = ("tensor", "pipeline", "replicas")
LEAST_TIMEOUT, MOST_TIMEOUT = 5, 7 * 24 * 3600  # seconds; ranks give a sign of life once a second


def check_rank_timeout(seconds: float | None) -> None:
    if seconds is not None and not LEAST_TIMEOUT <= seconds <= MOST_TIMEOUT:  # NaN is refused too
        raise UserError(
            f"--rank-timeout is {seconds:g}",
            "it is the seconds after which a rank that stands still ends the run, and ranks give a sign of life once a "
            "second",
            f"set it from {LEAST_TIMEOUT} to {MOST_TIMEOUT} (a week), or leave it out",
        )


def layout_of(options: argparse.Namespace, ranks: int, workload: Workload, beside: Beside | None = None) -> Layout:
    """Return the layout that the options ask for on this many ranks. `layout_for` refuses what the model or the ranks
    do not allow, and proposes what goes with the batch `beside` it."""
    from redline.predict.parallel import ALONE
    from redline.search.ranks import layout_for

    degrees = {name: getattr(options, name) for name in DEGREES}
    return layout_for(ranks, degrees, workload, by_hand=ranks_here() is not None, beside=beside or ALONE)


def asked_layout(options: argparse.Namespace, ranks: int) -> Layout:
    """Return a layout of the degrees in the options. If they do not divide `ranks`, it has the nearest smaller number
    of ranks that they divide, or else as many as they need."""
    from redline.core.layout import Layout
    from redline.core.workload import check_positive

    degrees = {name: 1 if getattr(options, name) is None else getattr(options, name) for name in DEGREES}
    for name, size in degrees.items():
        check_positive(f"--{name}", size)
    whole = math.prod(degrees.values())
    return Layout(ranks=max(1, ranks // whole) * whole, **degrees)


def batch_beside(options: argparse.Namespace, workload: Workload, recipe: Recipe | None) -> Beside:
    """Return the batch per update that the options ask for, as far as they do, and the micro batch."""
    from redline.predict.parallel import Beside

    usual = workload.micro_batch if recipe is None else recipe.micro_batch
    micro_batch: int = usual if options.micro_batch is None else options.micro_batch
    if options.batch_tokens is None:
        return Beside(micro_batch=micro_batch, batch=options.global_batch)
    unit = workload.shape.sequence
    return Beside(micro_batch=micro_batch, batch=options.batch_tokens, option="--batch-tokens", unit=unit)


def check_shares(micro_batch: int, global_batch: int, layout: Layout) -> None:
    """Refuse a global batch that does not give every rank whole micro batches in every update."""
    from redline.core.workload import check_positive
    from redline.predict.parallel import layout_for_batch

    check_positive("--micro-batch", micro_batch)
    check_positive("--global-batch", global_batch)
    if layout.data > 1:  # for one, `TrainSettings` says it in fewer words
        layout_for_batch(gpus=layout.data, micro_batch=micro_batch, global_batch=global_batch)


def check_resumed_shares(out: str, micro_batch: int, global_batch: int, layout: Layout) -> None:
    """Do the same for a resumed run, which keeps its global batch: another one would change its updates."""
    parts = layout.data
    if global_batch % (parts * micro_batch) == 0:
        return
    raise UserError(
        f"{counted(layout.ranks, 'rank')} cannot go on with {out}",
        f"the run keeps its global batch of {counted(global_batch, 'sequence')}, and that is not a number of passes of "
        f"{parts} x {micro_batch}",
        f"go on {' or '.join(ways_to_go_on(micro_batch, global_batch, layout))}",
    )


def ways_to_go_on(micro_batch: int, global_batch: int, layout: Layout) -> list[str]:
    """Return what would work: fewer ranks, since those are there, or else more; a smaller micro batch; or both, if
    neither is enough."""
    from redline.predict.parallel import divisors

    each = layout.ranks // layout.data  # ranks that read the same data

    def ranks(size: int, replicas: int) -> str | None:
        least = 1 if replicas == 1 else 2 * replicas  # each copy is cut
        takes = (n for n in divisors(global_batch) if n % replicas == 0 and global_batch % (n * size) == 0)
        counts = [n for n in takes if n >= least]
        counts = [n for n in counts if n < layout.data] or counts
        several = "" if [each * n for n in counts] == [1] else "s"
        return f"with {_one_of([each * n for n in counts])} rank{several}" if counts else None

    smaller = [1] if global_batch % layout.data else divisors(global_batch // layout.data)
    size = max((one for one in smaller if one < micro_batch), default=1)
    found = ranks(micro_batch, layout.replicas)
    ways = [found] if found else []
    if global_batch % (layout.data * size) == 0:
        ways.append(f"with --micro-batch {size}")
    if ways:
        return ways
    both = ranks(1, layout.replicas)
    return [f"{both} and --micro-batch 1" if both else f"{ranks(1, 1)}, --micro-batch 1 and no --replicas"]


def _one_of(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def change_of_ranks(before: int, layout: Layout, order: TrainOrder) -> str | None:
    """Return a note if another number of ranks resumes the run, as under torchrun after a node was lost; else None."""
    if before == layout.ranks:
        return None
    size, whole = order.settings.micro_batch, order.settings.global_batch
    return (
        f"{counted(layout.ranks, 'rank')} where the run began with {before}: the global batch stays at "
        f"{counted(whole, 'sequence')}, accumulated from {whole // (layout.data * size)} x {size} on each rank"
    )
