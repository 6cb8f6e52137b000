"""Does a fast recipe still learn what plain TF32 learns? The same updates on the same batches, several seeds.

    python benchmarks/long_run.py gpt2 --recipe best.json --data shards --out runs/long --json > records/DATE-...json
    python benchmarks/long_run.py ... --changed fp8.json --speed-up 1.17     # and what other maths is worth

A seed decides the initial weights and the order of the data, for both sides alike. The last updates of every run are
made on the same batches, whatever its seed, and their mean loss is the run's final loss; the validation loss is taken
after them, on the same held-out batches. So baselines of different seeds can be compared without the influence of their
batches, and the largest difference between two of them is the band. The fast recipe is equal if its mean over the seeds
lies within the band of the baseline's mean; how many single seeds do is reported too.

The baseline computes in TF32 and fp32 only: naive attention, no autocast; compiling, a padded vocabulary and fused
AdamW merely make it affordable. Several runs share the device at a time, since only their losses count. A finished run
is a file in --out and is not repeated: after an interruption give the same command again.

A recipe that changes the maths (--changed, such as fp8's) is not required to be equal. It makes as many updates, and
the fast recipe repeats its runs with a tenth fewer, their schedules shortened too. Between the two the fast recipe's
loss is assumed to be linear in the logarithm of the updates, which gives the number of updates after which it reaches
the changed recipe's final loss. That number as a share of all updates is what the changed updates are worth; the
speed-up of a step (--speed-up, measured by other benchmarks) times that share is the speed-up at equal loss.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from redline.core.devices import lookup
from redline.core.errors import UserError
from redline.core.host import timestamp
from redline.core.job import Job, RunDirectory, write_atomically
from redline.core.plan import ADAMWS
from redline.core.recipe import Recipe, load_recipe
from redline.core.units import UNKNOWN
from redline.core.values import from_json, to_json
from redline.core.workload import Workload, check_positive
from redline.data.loader import Loader, WindowBatches
from redline.data.shards import Dataset, open_dataset
from redline.engine.build import build_step
from redline.engine.step import TrainStep
from redline.engine.worker import leave_with_parent
from redline.optim.schedule import make_schedule
from redline.predict.roofline import predict_step, reachable, sheet_peaks
from redline.rungs import plan_of
from redline.search.launch import kill_group, probe_machine, worker_environment
from redline.workloads import resolve_workload

PLAIN, FAST = SIDES = ("plain", "fast")
CHANGED, SHORTER = "changed", "shorter"
SHORTER_BY = 0.9  # of the updates
PLAIN_RUNGS = ("tf32", "no-sync", "compile", "padded-vocab", "tied-weights", "fused-adamw", "loader-workers")
METRICS = {"final_loss": "final loss", "validation_loss": "validation loss"}
COMMON_SEED = 1337  # of the batches that all runs see: the last ones, and the held-out ones
READ_EVERY = 100  # updates after which the host waits for the device
WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Order:
    """One run: what a child process reads, and what identifies a finished run."""

    side: str
    seed: int
    workload: Workload
    rungs: tuple[str, ...]
    steps: int
    tail: int
    """The number of last updates, on batches that all runs share."""
    batch: int
    """Sequences in an update."""
    warmup_steps: int
    validation_batches: int
    device: str
    data: str
    """The shards' fingerprint."""

    @property
    def name(self) -> str:
        return f"{self.side}-{self.seed}"


def main(words: list[str] | None = None) -> int:
    options = read_options(words)
    if options.child is not None:
        leave_with_parent()
        return work(options.child, options.data, options.out)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends it as Ctrl-C does
    try:  # as politely.py does, which the children could not import: they only see the package
        return run(options)
    except UserError as error:
        for label, text in error.lines():
            print(f"{label + ':':9}{text}", file=sys.stderr)
        return 2


def read_options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="gpt2", help="a preset or a config (default: gpt2)")
    parser.add_argument("--recipe", type=Path, help="the fast side, such as best.json of a ladder")
    parser.add_argument(
        "--changed", type=Path, help="a recipe that changes the maths, to be weighed against the fast one"
    )
    parser.add_argument("--speed-up", type=float, help="of its step over the fast one's, as it was measured elsewhere")
    parser.add_argument("--data", type=Path, required=True, help="a folder made by `redline data prepare`")
    parser.add_argument("--out", type=Path, required=True, help="where finished runs are kept")
    parser.add_argument("--plain", default=",".join(PLAIN_RUNGS), metavar="A,B", help="rungs of the baseline")
    parser.add_argument("--steps", type=int, default=2000, help="updates of a run (default: 2000)")
    parser.add_argument("--batch", type=int, default=8, help="sequences in an update (default: 8)")
    parser.add_argument("--seeds", default="1,2,3", help="of weights and data order (default: 1,2,3)")
    parser.add_argument("--tail", type=int, default=100, help="last updates, on the same batches (default: 100)")
    parser.add_argument("--warmup-steps", type=int, default=100, help="of the learning rate (default: 100)")
    parser.add_argument("--validation-batches", type=int, default=20, help="at most (default: 20)")
    parser.add_argument("--at-once", type=int, default=3, help="runs that share the device (default: 3)")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--json", action="store_true", help="print the record on standard output")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def run(options: argparse.Namespace) -> int:
    seeds = read_seeds(options)
    if options.recipe is None:
        raise UserError("no recipe", "the fast side is one", "give --recipe FILE, such as best.json of a ladder")
    workload, fast, plain = (
        resolve_workload(options.workload),
        load_recipe(options.recipe).rungs,
        tuple(options.plain.split(",")),
    )
    check_sides(plain, fast)
    sides = {PLAIN: (plain, options.steps), FAST: (fast, options.steps)} | weighed_sides(options, plain, fast)
    data = open_dataset(options.data, vocab=workload.decoder.vocab, tokenizer_name=workload.tokenizer)
    hardware, versions = probe_machine(options.device)
    orders = [
        Order(
            side=side,
            seed=seed,
            workload=workload,
            rungs=rungs,
            steps=steps,
            tail=options.tail,
            batch=options.batch,
            warmup_steps=options.warmup_steps,
            validation_batches=options.validation_batches,
            device=hardware.kind,
            data=data.fingerprint,
        )
        for side, (rungs, steps) in sides.items()  # what is compared first runs first, to survive a time limit
        for seed in seeds
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    missing = [order for order in orders if finished(order, options.out) is None]
    say(cost_words(missing, hardware.name))
    about = {"hardware": to_json(hardware), "versions": versions}
    try:
        run_all(missing, options, about)
    except KeyboardInterrupt:
        say("stopped; finished runs are kept: the same command goes on")
    runs = {order.name: known for order in orders if (known := finished(order, options.out)) is not None}
    record = {
        "what": "a fast recipe beside plain TF32 over long runs: final losses, and the band of two baselines",
        "how": " ".join(" ".join(__doc__.split("\n\n")[2:]).split()),
        "command": shlex.join(["python", *sys.argv]),
        "date": timestamp(),
        **about,
        "workload": workload.name,
        "recipes": {side: list(rungs) for side, (rungs, _) in sides.items()},
        "data": data.identity,
        "settings": {name: getattr(orders[0], name) for name in ("steps", "tail", "batch", "warmup_steps")},
        "seeds": list(seeds),
        "finished": len(runs) == len(orders),
        "runs": {name: {**found, "losses": thinned(found["losses"])} for name, found in runs.items()},
        **judged(runs, seeds),
        **({} if options.changed is None else {"worth": worth(runs, seeds, options.speed_up)}),
    }
    show(record, Console(file=sys.stderr if options.json else sys.stdout, width=WIDTH))
    if options.json:
        print(json.dumps(record, indent=1))
    return 0 if record["equal"] else 1


# what to run


def read_seeds(options: argparse.Namespace) -> tuple[int, ...]:
    for name in ("steps", "batch", "tail", "warmup_steps", "validation_batches", "at_once"):
        check_positive(f"--{name.replace('_', '-')}", getattr(options, name))
    if max(options.tail, options.warmup_steps) >= options.steps:
        raise UserError(
            f"{options.steps} updates are too few",
            f"{options.warmup_steps} of them warm up, and the last {options.tail} are compared",
            "give more --steps, or a shorter --tail or --warmup-steps",
        )
    words = options.seeds.split(",")
    if len(set(words)) < 2 or not all(word.isdecimal() for word in words):
        raise UserError(
            f"--seeds is {options.seeds!r}", "the band is what two baselines differ by", "give two or more: 1,2,3"
        )
    return tuple(int(word) for word in dict.fromkeys(words))


def check_sides(plain: tuple[str, ...], fast: tuple[str, ...]) -> None:
    """Raise a UserError unless both train the same model with AdamW and the baseline is no coarser than TF32."""
    one, other = plan_of(plain), plan_of(fast)
    if one.precision not in ("fp32", "tf32"):
        raise UserError(
            f"the baseline computes in {one.precision}", "16 bits are compared with it", "leave its rung out of --plain"
        )
    if one.tied != other.tied or not {one.optimizer, other.optimizer} <= set(ADAMWS):
        raise UserError(
            "the two sides train different models, or not both with AdamW",
            "their losses would differ by that",
            "give both tied-weights or neither, and AdamW: --plain, --recipe",
        )


def weighed_sides(
    options: argparse.Namespace, plain: tuple[str, ...], fast: tuple[str, ...]
) -> dict[str, tuple[tuple[str, ...], int]]:
    """Return the changed recipe, and the fast one with fewer updates; neither without --changed."""
    if options.changed is None:
        if options.speed_up is not None:
            raise UserError("--speed-up without --changed", "it is that recipe's", "give --changed RECIPE")
        return {}
    changed = load_recipe(options.changed).rungs
    check_sides(plain, changed)
    return {CHANGED: (changed, options.steps), SHORTER: (fast, round(SHORTER_BY * options.steps))}


def cost_words(orders: list[Order], device: str) -> str:
    """Say what is left to run, predicted by the roofline: runs that share a device reach about the rate of one."""
    what = f"{len(orders)} runs to go"
    seconds = [predicted_seconds(order, device) for order in orders]
    known = [one for one in seconds if one is not None]
    if not orders or len(known) < len(orders):
        return what
    return f"{what}: about {sum(known):.0f} s of the device by prediction, and a minute for every start"


def predicted_seconds(order: Order, device_name: str) -> float | None:
    device, plan = lookup(device_name), plan_of(order.rungs)
    sheet = None if device is None else sheet_peaks(plan, device)
    if device is None or sheet is None:
        return None
    found = predict_step(
        order.workload.decoder, plan, micro_batch=order.batch, sheet=sheet, reached=reachable(plan, device)
    )
    return order.steps * found.expected.seconds


# the runs


def finished(order: Order, out: Path) -> dict[str, Any] | None:
    path = out / f"{order.name}.json"
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found["order"] != to_json(order):
        differing = [name for name, value in to_json(order).items() if found["order"].get(name) != value]
        raise UserError(
            f"{path} is of another comparison",
            f"it differs in {', '.join(differing)}",
            "give another folder with --out, or the command that the folder was begun with",
        )
    return found


def run_all(waiting: list[Order], options: argparse.Namespace, about: dict[str, Any]) -> None:
    """Run a few at a time, in order. One that fails is reported and leaves no file."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < options.at_once:
                    order = waiting.pop(0)
                    running[order.name] = start(order, Path(folder), options, about)
                for name in [name for name, process in running.items() if process.poll() is not None]:
                    process = running.pop(name)
                    assert process.stdin is not None
                    process.stdin.close()
                    code = process.returncode
                    say(f"{name}: " + (f"failed with exit code {code}" if code else "finished"))
                time.sleep(0.2)
        finally:
            for process in running.values():
                kill_group(process)


def start(order: Order, folder: Path, options: argparse.Namespace, about: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start a run. The seeds of a recipe compile the same code, and share it."""
    path = folder / f"{order.name}.json"
    path.write_text(json.dumps({"order": to_json(order), **about}), encoding="utf-8")
    recipe = Recipe(rungs=order.rungs, micro_batch=order.batch)
    job = Job(workload=order.workload, recipe=recipe, device=order.device, tokens="")
    return subprocess.Popen(
        [sys.executable, __file__, "--child", str(path), "--data", str(options.data), "--out", str(options.out)],
        env=worker_environment(RunDirectory(folder), job, order.side),
        stdin=subprocess.PIPE,  # held open: the run leaves when it closes
        stdout=2,  # standard error: standard output is for the record
        start_new_session=True,
    )


def work(path: Path, data: Path, out: Path) -> int:
    """Train one run, in the child."""
    asked = json.loads(path.read_text(encoding="utf-8"))
    order = from_json(Order, asked["order"])
    found = trained(order, open_dataset(data, vocab=order.workload.decoder.vocab))
    date = timestamp()
    write_atomically(out / f"{order.name}.json", json.dumps({**asked, "date": date, **found}))
    return 0


def trained(order: Order, data: Dataset) -> dict[str, Any]:
    """Train with the step that `redline train` runs, on the batches that its loader makes."""
    started, device = time.monotonic(), torch.device(order.device)
    workload = replace(order.workload, seed=order.seed)
    peak, plan = workload.learning_rate, replace(plan_of(order.rungs), read_loss_every=0)
    rate = make_schedule("cosine", peak=peak, warmup_steps=order.warmup_steps, steps=order.steps)
    step = build_step(workload, plan, device=device, learning_rate=rate)
    losses: list[float | None] = []
    for seed, count in ((order.seed, order.steps - order.tail), (COMMON_SEED, order.tail)):
        with Loader(
            data.train,
            seed=seed,
            micro_batch=order.batch,
            sequence=workload.decoder.sequence,
            device=device,
            workers=plan.loader_workers,
        ) as loader:
            for read in stretches(count):
                losses += numbers(torch.stack([step(next(loader)) for _ in range(read)]))
                say(f"{order.name}: {len(losses):,} updates, loss {losses[-1]}")
    return {
        "losses": losses,
        "final_loss": mean(losses[-order.tail :]),
        "validation_loss": mean(validation_losses(order, data, step)),
        "seconds": time.monotonic() - started,
    }


def stretches(count: int) -> Iterator[int]:
    """Yield the numbers of updates after which the host reads the losses."""
    yield from itertools.repeat(READ_EVERY, count // READ_EVERY)
    if count % READ_EVERY:
        yield count % READ_EVERY


def validation_losses(order: Order, data: Dataset, step: TrainStep) -> list[float | None]:
    """Return losses on the same batches for every run; none if no text is held out."""
    sequence = order.workload.decoder.sequence
    if data.val is None or data.val.tokens <= sequence:
        return []
    batches = WindowBatches(split=data.val, seed=COMMON_SEED, micro_batch=order.batch, sequence=sequence)
    enough = max(1, batches.windows // order.batch)
    with step.adapter.evaluating(step.model):
        # Gradients stay on although they are not needed: without them a compiled loss would be compiled again.
        found = [
            step.loss(batches[index].to(step.device)).detach() for index in range(min(enough, order.validation_batches))
        ]
    return numbers(torch.stack(found))


def numbers(losses: torch.Tensor) -> list[float | None]:
    return [loss if math.isfinite(loss) else None for loss in losses.tolist()]


def mean(losses: list[float | None]) -> float | None:
    """Return the mean; None if there are no losses, or if one of them is None (NaN or infinity)."""
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if known and len(known) == len(losses) else None


def thinned(losses: list[float | None]) -> list[float | None]:
    """Return means over READ_EVERY updates for the record; a run's own file has all losses."""
    return [mean(losses[first : first + READ_EVERY]) for first in range(0, len(losses), READ_EVERY)]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# the verdict


def judged(runs: dict[str, dict[str, Any]], seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return the comparison and its verdict; `equal` is None while unknown."""
    found = {metric: compared(runs, seeds, metric) for metric in METRICS}
    answers = [one["equal"] for one in found.values() if one["measured"]]
    equal = None if not answers or None in answers else all(answers)
    return {"comparison": found, "equal": equal, "verdict": " ".join(words(runs, seeds, found, equal))}


def compared(runs: dict[str, dict[str, Any]], seeds: tuple[int, ...], metric: str) -> dict[str, Any]:
    values: dict[str, list[Any]] = {
        side: [runs.get(f"{side}-{seed}", {}).get(metric) for seed in seeds] for side in SIDES
    }
    known = values[PLAIN] + values[FAST]
    # A corpus without held-out text has no validation loss in any run: there is nothing to compare.
    measured = metric == "final_loss" or any(value is not None for value in known)
    if None in known:
        unknown = dict.fromkeys(
            ("band", "differences", "mean_difference", "standard_error", "equal", "seeds_inside", "every_seed")
        )
        return {"measured": measured, **values, **unknown}
    band = max(abs(one - other) for one, other in itertools.combinations(values[PLAIN], 2))
    differences = [fast - plain for plain, fast in zip(values[PLAIN], values[FAST], strict=True)]
    middle = statistics.fmean(differences)
    return {
        "measured": measured,
        **values,
        "band": band,
        "differences": differences,
        "mean_difference": middle,
        "standard_error": statistics.stdev(differences) / math.sqrt(len(seeds)) if len(seeds) > 1 else None,
        "equal": abs(middle) <= band,
        "seeds_inside": sum(abs(difference) <= band for difference in differences),
        "every_seed": max(map(abs, differences)) <= band,
    }


def words(
    runs: dict[str, dict[str, Any]], seeds: tuple[int, ...], found: dict[str, dict[str, Any]], equal: bool | None
) -> Iterator[str]:
    lacking = [f"{side}-{seed}" for seed in seeds for side in SIDES if f"{side}-{seed}" not in runs]
    if lacking:
        yield f"Not finished: {', '.join(lacking)}."
        return
    broken = [name for name, one in runs.items() if one["final_loss"] is None]
    if broken:
        yield f"Losses that are no numbers: {', '.join(broken)}."
    if equal is not None:
        yield "Equal." if equal else "Not equal."
    for metric, one in found.items():
        if one["mean_difference"] is not None:
            yield describe_difference(METRICS[metric], one)


def describe_difference(metric: str, one: dict[str, Any]) -> str:
    side = "above" if one["mean_difference"] > 0 else "below"
    where = "within the band" if one["equal"] else "outside the band"
    seeds = len(one["differences"])
    error = "" if one["standard_error"] is None else f" (standard error {one['standard_error']:.4f})"
    return (
        f"The fast recipe's {metric} is {abs(one['mean_difference']):.4f} {side} the baseline's over {seeds} "
        f"seeds{error}; two baselines differ by up to {one['band']:.4f}: {where}; {one['seeds_inside']} of {seeds} "
        "single seeds lie within it."
    )


# what changed maths is worth


def worth(runs: dict[str, dict[str, Any]], seeds: tuple[int, ...], speed_up: float | None) -> dict[str, Any]:
    found = {metric: worth_by(runs, seeds, metric) for metric in METRICS}
    share = found["final_loss"]["share"]
    matched = None if share is None or speed_up is None else speed_up * share
    told = [worth_words(METRICS[metric], one) for metric, one in found.items() if one["gap"] is not None]
    if matched is not None:
        told.append(f"Its steps are {speed_up:.3f} times as fast: {matched:.3f} times at equal loss.")
    return {**found, "speed_up": speed_up, "at_equal_loss": matched, "words": " ".join(told) or "Not known yet."}


def worth_by(runs: dict[str, dict[str, Any]], seeds: tuple[int, ...], metric: str) -> dict[str, Any]:
    """Weigh the changed recipe by one metric. `share` is the share of all updates after which the fast recipe reaches
    the changed one's loss; None if unknown, or if the fast recipe's last updates did not improve it."""
    values = {side: [runs.get(f"{side}-{seed}", {}).get(metric) for seed in seeds] for side in (FAST, CHANGED, SHORTER)}
    if any(None in one for one in values.values()):
        return {**values, "gaps": None, "gap": None, "gain": None, "share": None}
    gaps = [changed - fast for fast, changed in zip(values[FAST], values[CHANGED], strict=True)]
    gain = statistics.fmean(values[SHORTER]) - statistics.fmean(values[FAST])
    gap = statistics.fmean(gaps)
    share = SHORTER_BY ** (gap / gain) if gain > 0 else None
    return {**values, "gaps": gaps, "gap": gap, "gain": gain, "share": share}


def worth_words(metric: str, one: dict[str, Any]) -> str:
    gaps = one["gaps"]
    far = f"{abs(one['gap']):.4f} {'above' if one['gap'] > 0 else 'below'}"
    text = (
        f"The changed recipe's {metric} is {far} the fast one's ({min(gaps):+.4f} to {max(gaps):+.4f} over the seeds)"
    )
    if one["share"] is None:
        return f"{text}; what that is in updates is not known: {1 - SHORTER_BY:.0%} more of them did not help."
    return f"{text}, which the fast one reaches with {one['share']:.1%} of the updates."


def show(record: dict[str, Any], console: Console) -> None:
    settings = record["settings"]
    console.print(
        f"{record['workload']}, {record['hardware']['name']}: {settings['steps']:,} updates of {settings['batch']} "
        f"sequences, the last {settings['tail']} on the same batches",
        markup=False,
        highlight=False,
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for heading in ("seed", *(f"{side} {name}" for name in METRICS.values() for side in SIDES)):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, seed in enumerate(record["seeds"]):
        values = [record["comparison"][metric][side][index] for metric in METRICS for side in SIDES]
        table.add_row(str(seed), *(UNKNOWN if value is None else f"{value:.4f}" for value in values))
    console.print(table)
    console.print(record["verdict"], markup=False, highlight=False)
    if "worth" in record:
        console.print(record["worth"]["words"], markup=False, highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
