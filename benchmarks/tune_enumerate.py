"""How good is the search? Every recipe of a small space is timed on this device, and `redline tune` searches the same.

    python benchmarks/tune_enumerate.py tiny --rungs flash,padded-vocab,fused-adamw,loader-workers --micro-batch 4
    python benchmarks/tune_enumerate.py gpt2 --fixed tf32,no-sync,bf16,compile,fused-adamw,loader-workers \\
        --rungs flash,cudnn-attention,padded-vocab,fused-loss,chunked-loss --micro-batch 32

The micro batch is given, so that the space is finite. Rungs of --fixed are in every recipe. Enumerated recipes are
timed in rounds, so that a drift of the machine hits all of them alike. The recipe found is judged by its enumerated
rate: the search must not be its own judge. The last line says whether it came within 2 % at a quarter of the trials.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from redline.core.job import Job, RunDirectory
from redline.core.measurement import Measurement
from redline.core.recipe import Recipe
from redline.search.answers import TrialAnswers
from redline.search.launch import probe_machine, remove_caches
from redline.search.space import Space, open_space
from redline.search.trials import Budget, Trial, TuneSettings
from redline.search.tune import Tuner
from redline.workloads import resolve_workload

WITHIN, SHARE = 0.02, 0.25


def main() -> None:
    options = read_options()
    hardware, versions = probe_machine(options.device)
    workload = resolve_workload(options.workload)
    fixed = tuple(filter(None, options.fixed.split(",")))
    space = with_fixed(
        open_space(workload, hardware, rungs=(*options.rungs.split(","), *fixed), micro_batch=options.micro_batch),
        fixed,
    )
    recipes = [recipe for recipe in space.recipes(options.micro_batch) if set(fixed) <= set(recipe.rungs)]
    say(f"{len(recipes)} recipes on {hardware.name}")
    with tempfile.TemporaryDirectory() as folder:
        enumerated, enumerating = timed(lambda: enumerate_all(Path(folder) / "all", space, recipes, options))
        tuner, tuning = timed(lambda: search(Path(folder) / "search", space, options))
    result = {
        **compare(enumerated, tuner),
        "enumerating_seconds": enumerating,
        "tuning_seconds": tuning,
        "rates": {" + ".join(recipe.rungs): rate for recipe, rate in enumerated.items()},
        "workload": workload.name,
        "micro_batch": options.micro_batch,
        "hardware": hardware.name,
        "versions": versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
    }
    print(json.dumps(result, indent=2))
    say(verdict(result))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--rungs", required=True, help="the choices")
    parser.add_argument("--fixed", default="", help="rungs of every recipe")
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=2, help="times each recipe is timed (default: 2)")
    parser.add_argument("--steps", type=int, help="timed steps (default: a few seconds' worth)")
    parser.add_argument("--check-steps", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--device", choices=("cuda", "cpu"))
    return parser.parse_args()


def with_fixed(space: Space, fixed: Sequence[str]) -> Space:
    """Knobs whose choice is one of these have no other."""
    knobs = [
        replace(knob, choices=tuple(one for one in knob.choices if one in fixed) or knob.choices)
        for knob in space.knobs
    ]
    return replace(space, knobs=tuple(knobs))


def enumerate_all(
    folder: Path, space: Space, recipes: Sequence[Recipe], options: argparse.Namespace
) -> dict[Recipe, float]:
    """Tokens per second of all that run: the median of the rounds."""
    answers = open_answers(folder, space, options)
    seconds: dict[Recipe, list[float]] = {}
    for repeat in range(options.rounds):
        for number, recipe in enumerate(recipes, start=1):
            say(f"round {repeat + 1}, {number} of {len(recipes)}: {' + '.join(recipe.rungs)}")
            job = Job(
                workload=space.workload,
                recipe=recipe,
                device=space.hardware.kind,
                tokens="tokens.npy",
                kind="look",
                timed_steps=options.steps,
                repeat=repeat,
            )
            result = answers.ask(job, options.timeout).result
            if isinstance(result, Measurement):
                seconds.setdefault(recipe, []).append(statistics.median(result.step_seconds))
            else:
                say(f"  failed: {result.reason}")
    remove_caches(answers.directory)
    tokens = options.micro_batch * space.workload.shape.sequence
    return {recipe: tokens / statistics.median(rounds) for recipe, rounds in seconds.items()}


def search(folder: Path, space: Space, options: argparse.Namespace) -> Tuner:
    """As `redline tune` does it, with all the time in the world and nothing remembered."""
    settings = TuneSettings(
        device=space.hardware.kind,
        minutes=float("inf"),
        micro_batch=options.micro_batch,
        check_steps=options.check_steps,
        timed_steps=options.steps,
    )
    tuner = Tuner(space, settings, open_answers(folder, space, options), Budget(float("inf")), Spoken())
    tuner.run()
    return tuner


def open_answers(folder: Path, space: Space, options: argparse.Namespace) -> TrialAnswers:
    from redline.data.tokens import prepare_tokens

    folder.mkdir()
    prepare_tokens(space.workload, folder / "tokens.npy")
    return TrialAnswers(
        RunDirectory(folder),
        cache=None,
        device=space.hardware.kind,
        timeout_seconds=options.timeout,
        on_phase=lambda *_, **__: None,
    )


class Spoken:
    def trial_started(self, label: str, number: int) -> None:
        say(f"search {number}: {label}")

    def trial_finished(self, trial: Trial) -> None:
        pass


def compare(enumerated: dict[Recipe, float], tuner: Tuner) -> dict[str, Any]:
    best = max(enumerated, key=lambda recipe: enumerated[recipe])
    found = None if tuner.best is None else tuner.best.recipe
    return {
        "recipes": len(enumerated),
        "best": list(best.rungs),
        "best_tokens_per_second": enumerated[best],
        "found": None if found is None else list(found.rungs),
        "found_tokens_per_second": None if found is None else enumerated.get(found),
        "of_best": None if found is None or found not in enumerated else enumerated[found] / enumerated[best],
        "recipes_tried": len(tuner.trials),
        "answers": tuner.asked,
        "share_tried": len(tuner.trials) / len(enumerated),
    }


def verdict(result: dict[str, Any]) -> str:
    near = result["of_best"] is not None and result["of_best"] >= 1 - WITHIN
    few = result["share_tried"] <= SHARE
    share = "unknown" if result["of_best"] is None else f"{result['of_best']:.1%}"
    how_near, how_many = "within" if near else "NOT within", "at" if few else "NOT at"
    words = f"{how_near} {WITHIN:.0%}, {how_many} a quarter of the trials or fewer"
    return f"{share} of the best, after {result['recipes_tried']} of {result['recipes']} recipes: {words}"


def timed(work: Any) -> tuple[Any, float]:
    started = time.monotonic()
    return work(), time.monotonic() - started


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
