"""`redline train --gpus N`: starts the ranks, and what each of them does.

    start_ranks(options)      # the command the user typed: torchrun's agent with N ranks of the same words
    run_rank(options)         # in each of them, also where somebody else's torchrun started it

Rank 0 is the command as it is without ranks: it checks, makes the run directory, prepares data, shows and writes. The
others get the finished order from it and train. On a CPU the ranks are processes that share its cores: slower than
one, and the same numbers, which is good for learning and tests.
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
    take_screen,
    tell_why,
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
    """How many there are, where this process is one of them: torchrun says so in the environment."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    count = int(os.environ["WORLD_SIZE"])
    return count if count > 1 or "TORCHELASTIC_RUN_ID" in os.environ else None


def check_alone(command: str) -> None:
    """Of every command but `train`, which is made for ranks."""
    count = ranks_here()
    if count is not None and count > 1:
        gpus = f", with --gpus {count} instead" if command in ("ladder", "tune", "profile") else ""
        raise UserError(
            f"redline {command} in one of {count} processes that torchrun started",
            "each of them would run the whole command",
            f"leave torchrun out{gpus}: only `redline train` runs under it",
        )


def wait_for_rank_0() -> bool:
    """In a rank that has found a mistake before it joined the others: whether another has found the same. That one
    ends them all; who leaves first would have it ended before it could say why."""
    if not follows_rank_0():
        return False
    with suppress(KeyboardInterrupt):  # the agent's SIGTERM, which comes as one
        time.sleep(TELLING_SECONDS)
    return True


# --- starting them ----------------------------------------------------------------------------------------------------


def start_ranks(options: argparse.Namespace) -> int:
    """Everything that can be refused is refused here, before a process is started."""
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
            # A session of their own: Ctrl-C reaches the ranks through us, and once.
            process = subprocess.Popen(
                agent_words(options, folder), env=environment, stdin=2, stderr=log, start_new_session=True
            )
        try:
            code = follow(process, pid_file)
        finally:
            kill_group(process)
        if process.returncode < 0 and code == EXIT_FAILED:  # it could not say so itself
            see_off(pid_file)
            tell_why(
                pid_file, f"the process that holds the ranks together {killed_by(-process.returncode)}", sys.stderr
            )
        if (kept := keep_log(Path(folder), code)) is not None and code == EXIT_FAILED:
            print(f"tracebacks, and what torch wrote: {kept}", file=sys.stderr)
        if code == EXIT_FAILED:
            tell_in_run(Path(folder), order, options)
        if code is None:
            raise KeyboardInterrupt
        return code


def see_off(pid_file: Path) -> None:
    """Until rank 0 has noticed that its agent is gone, and writes no more."""
    until = time.monotonic() + TELLING_SECONDS
    with suppress(OSError, ValueError):  # there is none, or not any more
        while time.monotonic() < until:
            os.kill(int(pid_file.read_text(encoding="utf-8")), 0)
            time.sleep(0.05)


def keep_log(folder: Path, code: int | None) -> Path | None:
    """The run's log, with what the agent wrote, and the ranks before they knew the run directory. Where there is none,
    a file that stays, if anything failed: what they write when they are interrupted is of no use to anybody. None:
    nobody wrote anything."""
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


def tell_in_run(folder: Path, order: TrainOrder, options: argparse.Namespace) -> None:
    """What ended the ranks, where rank 0 did not come to it: in the run's metrics and on its page, and as `--json`."""
    from redline.commands.train import show_lost_run
    from redline.core.training import METRICS_FILE
    from redline.report.training import MetricsLog

    reason = folder / REASON
    if not reason.exists() or (run := run_directory(folder)) is None or not (run / METRICS_FILE).exists():
        return
    text, last = reason.read_text(encoding="utf-8"), (run / METRICS_FILE).read_text(encoding="utf-8").splitlines()[-1:]
    if json.dumps(text) not in "".join(last):  # rank 0 may have come to telling the same
        log = MetricsLog(run / METRICS_FILE)
        log("end", ended="failed", reason=text, checkpoint=None)
        log.close()
    show_lost_run(replace(order, out=str(run)), options)


def run_directory(folder: Path) -> Path | None:
    """Where the ranks trained; None: they had not come to that, or their mistake has left nothing."""
    name = folder / RUN_NAME
    run = Path(json.loads(name.read_text(encoding="utf-8"))[0]) if name.exists() else None
    return run if run is not None and run.is_dir() else None


def agent_words(options: argparse.Namespace, logs: str) -> list[str]:
    agent = [sys.executable, "-m", "redline.engine.agent", "--standalone", f"--nproc-per-node={options.gpus}"]
    return [*agent, f"--log-dir={logs}", "-m", "redline", *without_gpus(options.words)]


def without_gpus(words: Sequence[str]) -> list[str]:
    """The command for each rank, which records it as typed (`TYPED`). argparse takes `--gpus=4` too, and `--gp 4`."""
    kept, skip = [], False
    for word in words:
        name, _, value = word.partition("=")
        is_gpus = len(name) > 3 and "--gpus".startswith(name)
        if not skip and not is_gpus:
            kept.append(word)
        skip = is_gpus and not value
    return kept


def follow(process: subprocess.Popen[bytes], pid_file: Path) -> int | None:
    """Until the agent ends. A signal goes to rank 0 alone: it tells the others, and all stop after the same update. One
    that rank 0 does not answer with its summary interrupts the command, whatever the ranks make of it: None."""

    def pass_on(number: int, _: object) -> None:
        pid_file.with_name(ASKED).touch()
        try:
            os.kill(int(pid_file.read_text(encoding="utf-8")), number)
        except (OSError, ValueError):  # no rank is there yet, or any more: the agent ends those that start
            process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if was_interrupted(pid_file, code):
        return None
    if code == 128 + signal.SIGTERM:  # the agent itself was asked, and has passed it on: rank 0 has told the rest
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
    except KeyboardInterrupt:  # by the user, by their code, or by the agent because of another rank: it tells which
        if mark_interrupted(OWN_INTERRUPT):  # no signal has said so before: their code, whose line the log has
            traceback.print_exc(file=sys.__stderr__)
        if os.environ["RANK"] == "0":
            mark_left()
        return EXIT_INTERRUPTED


def check_meeting_place() -> None:
    """torchrun sets all of them; by hand, or left over in a shell, some may be missing."""
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
        ranks.say("order", None)  # nobody waits for what does not come
        raise
    ranks.say("order", to_json(order))
    code = train_and_show(order, options, console, ranks)
    mark_over(ranks.limit_seconds)
    ranks.say("over", code)
    if code == EXIT_DONE:  # any other makes torchrun end them
        ranks.take_leave()
    return code


def gone_on(options: argparse.Namespace, ranks: Ranks) -> argparse.Namespace:
    """Where torchrun starts the ranks again after a failure: the same words, and the run directory that they made."""
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
        return EXIT_DONE  # rank 0 says why
    order = from_json(TrainOrder, told)
    log_to(Path(order.out))
    summary = train(order, say_nothing, ranks)
    if summary["ended"] == "failed":
        if ranks.hears("over", ranks.mistake_seconds) and ranks.hear("over") != EXIT_DONE:
            ranks.wait_for_rank_0()  # it has failed too, and the agent would end it for this one's sake
            return EXIT_FAILED
        raise RuntimeError(summary["reason"])
    ranks.hear("over")  # whoever left earlier would look like one that failed
    ranks.take_leave()
    return EXIT_DONE


def say_nothing(kind: str, **_: Any) -> None:
    """Rank 0 tells what there is to tell."""


# --- what can be refused ----------------------------------------------------------------------------------------------


DEGREES = ("tensor", "pipeline", "replicas")
LEAST_TIMEOUT, MOST_TIMEOUT = 5, 7 * 24 * 3600  # seconds; ranks give a sign of life once a second


def check_rank_timeout(seconds: float | None) -> None:
    if seconds is not None and not LEAST_TIMEOUT <= seconds <= MOST_TIMEOUT:  # NaN is neither
        raise UserError(
            f"--rank-timeout is {seconds:g}",
            "it is the seconds after which a rank that stands still ends all, and ranks give a sign of life once a "
            "second",
            f"set it from {LEAST_TIMEOUT} to {MOST_TIMEOUT} (a week), or leave it out",
        )


def layout_of(options: argparse.Namespace, ranks: int, workload: Workload, beside: Beside | None = None) -> Layout:
    """Of so many ranks, as the options say. What this model or these ranks do not allow is refused there, with what
    goes with the batch `beside` it."""
    from redline.predict.parallel import ALONE
    from redline.search.ranks import layout_for

    degrees = {name: getattr(options, name) for name in DEGREES}
    return layout_for(ranks, degrees, workload, by_hand=ranks_here() is not None, beside=beside or ALONE)


def asked_layout(options: argparse.Namespace, ranks: int) -> Layout:
    """The degrees of the options, on as many ranks as those take where these do not divide."""
    from redline.core.layout import Layout
    from redline.core.workload import check_positive

    degrees = {name: 1 if getattr(options, name) is None else getattr(options, name) for name in DEGREES}
    for name, size in degrees.items():
        check_positive(f"--{name}", size)
    whole = math.prod(degrees.values())
    return Layout(ranks=max(1, ranks // whole) * whole, **degrees)


def batch_beside(options: argparse.Namespace, workload: Workload, recipe: Recipe | None) -> Beside:
    """The batch of an update that the options ask for, as far as they do."""
    from redline.predict.parallel import Beside

    usual = workload.micro_batch if recipe is None else recipe.micro_batch
    micro_batch: int = usual if options.micro_batch is None else options.micro_batch
    if options.batch_tokens is None:
        return Beside(micro_batch=micro_batch, batch=options.global_batch)
    unit = workload.shape.sequence
    return Beside(micro_batch=micro_batch, batch=options.batch_tokens, option="--batch-tokens", unit=unit)


def check_shares(micro_batch: int, global_batch: int, layout: Layout) -> None:
    """Every rank takes whole micro batches of every update."""
    from redline.core.workload import check_positive
    from redline.predict.parallel import layout_for_batch

    check_positive("--micro-batch", micro_batch)
    check_positive("--global-batch", global_batch)
    if layout.data > 1:  # of one `TrainSettings` says it in fewer words
        layout_for_batch(gpus=layout.data, micro_batch=micro_batch, global_batch=global_batch)


def check_resumed_shares(out: str, micro_batch: int, global_batch: int, layout: Layout) -> None:
    """The same of a run that goes on, whose global batch is what it was: its updates are the run."""
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
    """Fewer ranks, since those are there, or more; a smaller micro batch; or where neither is enough both."""
    from redline.predict.parallel import divisors

    each = layout.ranks // layout.data  # ranks that take the same data

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
    """What to say where another number of ranks goes on, as torchrun's do after a node was lost; None: the same."""
    if before == layout.ranks:
        return None
    size, whole = order.settings.micro_batch, order.settings.global_batch
    return (
        f"{counted(layout.ranks, 'rank')} where the run began with {before}: the global batch stays at "
        f"{counted(whole, 'sequence')}, accumulated from {whole // (layout.data * size)} x {size} on each rank"
    )
