"""The whole step of several recipes, in one process and in turns, so that the card's temperature is the same for all.

    python benchmarks/step.py gpt2 --recipe best.json --micro-batch 64 \
        --add tuned-matmuls --add packed-attention --add tuned-matmuls,packed-attention --without fused-backward \
        --json steps.json

It times the recipe of the file, and one more for every --add (its rungs and these) and --without (its rungs less
these), with commas between several rungs. In each round every recipe takes a turn of ten steps, on one batch of random
tokens; figures are medians over all rounds. Peak memory is a recipe's own: what the others keep between their turns is
subtracted. A process has one attention backend, one matmul precision, one activation budget and one setting of
expandable segments, so recipes that differ in those are refused: `redline ladder` measures them. It runs on a CPU too,
for a small workload.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config as dynamo
from made import made
from politely import politely

from redline.core.errors import UserError
from redline.core.plan import Plan
from redline.core.recipe import Recipe, load_recipe
from redline.core.workload import Workload
from redline.engine.build import build_step
from redline.engine.probe import probe, versions
from redline.rungs import find_rung, plan_of
from redline.search.ladder import check_alternatives, check_recipe_applies
from redline.workloads import resolve_workload

STEPS = 10
SWITCHES = ("attention", "matmul_precision", "activation_budget", "expandable_segments")
"""Fields of a plan that hold for a whole process."""

Figures = dict[str, float | None]


def main(words: list[str] | None = None) -> int:
    return politely(run, read_options(words))


def read_options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="?", default="gpt2")
    parser.add_argument("--recipe", type=Path, required=True, help="the base: best.json of a tune, or any recipe")
    parser.add_argument("--micro-batch", type=int, help="sequences (default: the recipe's)")
    parser.add_argument("--add", action="append", default=[], metavar="RUNGS", help="the base and these; repeatable")
    parser.add_argument("--without", action="append", default=[], metavar="RUNGS", help="the base less these")
    parser.add_argument("--rounds", type=int, default=5, help=f"of {STEPS} steps each (default 5)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args(words)


def run(options: argparse.Namespace) -> int:
    workload, hardware = resolve_workload(options.workload), probe(options.device)
    base = load_recipe(options.recipe)
    base = replace(base, micro_batch=options.micro_batch or base.micro_batch)
    recipes = varied(base, options.add, options.without)
    for recipe in recipes.values():
        check_alternatives(recipe.rungs)
        check_recipe_applies(recipe, workload, hardware)
    rungs = {name: recipe.rungs for name, recipe in recipes.items()}
    found = time_recipes(workload, rungs, base.micro_batch, options.rounds, torch.device(options.device))
    for line in lines(found):
        print(line)
    if options.json is not None:
        about = {"workload": workload.name, "micro_batch": base.micro_batch, "rounds": options.rounds, "steps": STEPS}
        rows = {name: {"rungs": rungs[name], **figures} for name, figures in found.items()}
        whole = {**made(), **about, "device": hardware.name, "versions": versions(), "recipes": rows}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 0


def varied(base: Recipe, add: list[str], without: list[str]) -> dict[str, Recipe]:
    """Return the base and its variants, by their names in the table."""
    recipes = {"base": base}
    for words in add:
        names = tuple(find_rung(name).name for name in words.split(","))
        recipes[f"+ {words}"] = replace(base, rungs=(*base.rungs, *names))
    for words in without:
        names = words.split(",")
        for name in names:
            if name not in base.rungs:
                raise UserError(
                    f"--without {name}: the recipe does not have it",
                    f"it has {', '.join(base.rungs) or 'no rungs'}",
                    "name rungs of the recipe",
                )
        recipes[f"without {words}"] = replace(base, rungs=tuple(one for one in base.rungs if one not in names))
    return recipes


def time_recipes(
    workload: Workload, recipes: Mapping[str, tuple[str, ...]], micro_batch: int, rounds: int, device: torch.device
) -> dict[str, Figures]:
    """Return by name: milliseconds of a step, tokens per second, and peak memory (None on a CPU and of CUDA graphs)."""
    plans = {name: plan_of(rungs) for name, rungs in recipes.items()}
    check_switches(plans)
    shape = workload.decoder
    batch = torch.randint(shape.vocab, (2, micro_batch, shape.sequence), device=device)
    # One function is compiled once for each recipe. Past the limit it would run eagerly, reported only in a log.
    limit = max(dynamo.recompile_limit, 2 * len(plans))
    with dynamo.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
        turns = {}
        for name, plan in plans.items():
            turns[name] = Turns(workload, plan, batch)
            print(f"{name}: ready", file=sys.stderr)
        with telling_of_a_stop():
            for _ in range(rounds):
                for each in turns.values():
                    each.take()
    if not all(each.taken for each in turns.values()):
        raise UserError("stopped before everybody had a turn", "nothing can be compared", "give it more time")
    return {name: each.figures() for name, each in turns.items()}


@contextlib.contextmanager
def telling_of_a_stop() -> Iterator[None]:
    """Keep the turns that were taken when a time limit or Ctrl-C interrupts, and say so."""
    try:
        yield
    except KeyboardInterrupt:
        print("stopped; what was measured stays", file=sys.stderr)


def check_switches(plans: Mapping[str, Plan]) -> None:
    for field in SWITCHES:
        values = {name: getattr(plan, field) for name, plan in plans.items()}
        (first, value), *others = values.items()
        for name, other in others:
            if other != value:
                raise UserError(
                    f"{first} and {name} differ in {field.replace('_', ' ')}: {value} and {other}",
                    "that is a switch of the process, and they live in one",
                    "compare them with redline ladder --from RECIPE --rungs ..., which gives each its own process",
                )


class Turns:
    """A recipe's step, its times so far, and the memory it keeps between its turns."""

    def __init__(self, workload: Workload, plan: Plan, batch: torch.Tensor) -> None:
        self.batch, self.device = batch, batch.device
        # Replaying a CUDA graph allocates nothing: the peak was reached while recording it.
        self.tells_peak = self.device.type == "cuda" and not plan.cuda_graphs
        before = allocated(self.device)
        self.step = build_step(workload, plan, device=self.device)
        milliseconds(self.step, batch)  # compiles and warms up
        self.kept_bytes = allocated(self.device) - before
        self.taken: list[float] = []
        self.peak_bytes = 0

    def take(self) -> None:
        others = allocated(self.device) - self.kept_bytes
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.taken += milliseconds(self.step, self.batch)
        if self.device.type == "cuda":
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self.device) - others)

    def figures(self) -> Figures:
        ordered, tenth = sorted(self.taken), len(self.taken) // 10
        median = statistics.median(ordered)
        return {
            "timed_steps": len(ordered),
            "median_ms": median,
            "p10_ms": ordered[tenth],
            "p90_ms": ordered[-1 - tenth],
            "tokens_per_second": 1e3 * self.batch[0].numel() / median,
            "peak_gb": self.peak_bytes / 1e9 if self.tells_peak else None,
        }


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def milliseconds(step: Callable[[torch.Tensor], Any], batch: torch.Tensor) -> list[float]:
    """Return the milliseconds of each step of a turn. A CUDA device marks them itself, so the host may run ahead."""
    if batch.device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(STEPS):
            step(batch)
            times.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step(batch)
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]


def lines(found: Mapping[str, Figures]) -> Iterator[str]:
    """Yield the table's lines. Names get what 100 columns leave for them, and are cut there."""
    width = min(44, max(map(len, found)))
    yield f"{'':{width}}{'ms':>10}{'p10':>10}{'p90':>10}{'tokens/s':>13}{'gain':>8}{'GB':>7}"
    (base, *_) = found.values()
    for name, each in found.items():
        gain = each["tokens_per_second"] / base["tokens_per_second"] - 1
        peak = "—" if each["peak_gb"] is None else f"{each['peak_gb']:.1f}"
        shown = name if len(name) <= width else name[: width - 1] + "…"
        times = f"{each['median_ms']:10.3f}{each['p10_ms']:10.3f}{each['p90_ms']:10.3f}"
        yield f"{shown:{width}}{times}{each['tokens_per_second']:13,.0f}{gain:+8.2%}{peak:>7}"


if __name__ == "__main__":
    sys.exit(main())
