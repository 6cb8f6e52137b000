"""How good is the search? `redline tune` searches a small space, and then every recipe of it is timed on this device.

    python benchmarks/tune_enumerate.py tiny --rungs flash,padded-vocab,fused-adamw,loader-workers --micro-batch 4
    python benchmarks/tune_enumerate.py gpt2 --layers 4 --micro-batch 16 --fixed tf32,no-sync,bf16 \\
        --rungs flash,cudnn-attention,padded-vocab,fused-adamw,fused-loss,chunked-loss

The micro batch is given, so that the space is finite. Rungs of --fixed are in every recipe; --layers cuts the model
short, since some hundred recipes have to be built. The search runs as `redline tune` does, with a process for each
trial. The enumeration judges independently: one process builds one recipe after the other and times it, in rounds, so
that a drift of the machine affects all of them alike. The recipe found is judged by its enumerated rate. The last line
says whether it came within 2 % of the best with a quarter of the trials. Ctrl-C before the last round keeps the rounds
that are complete.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from made import made

from redline.core.job import RunDirectory
from redline.core.recipe import Recipe
from redline.core.workload import Workload
from redline.search.answers import TrialAnswers
from redline.search.launch import probe_machine
from redline.search.space import Space, open_space
from redline.search.trials import Budget, Trial, TuneSettings
from redline.search.tune import Tuner
from redline.workloads import resolve_workload

WITHIN, SHARE = 0.02, 0.25
WARM_UPS = 6  # the first ones compile and fill the allocator's pools


def main() -> None:
    options = read_options()
    hardware, versions = probe_machine(options.device)
    workload = chosen_workload(options)
    fixed = tuple(filter(None, options.fixed.split(",")))
    space = with_fixed(
        open_space(workload, hardware, rungs=(*options.rungs.split(","), *fixed), micro_batch=options.micro_batch),
        fixed,
    )
    recipes = [recipe for recipe in space.recipes(options.micro_batch) if set(fixed) <= set(recipe.rungs)]
    say(f"{len(recipes)} recipes on {hardware.name}")
    if not recipes:
        sys.exit(f"of {', '.join(fixed)} not all apply here: {space.left_out}")
    with tempfile.TemporaryDirectory() as folder:
        tuner, tuning = timed(lambda: search(Path(folder), space, options))
        rounds, enumerating = timed(lambda: enumerate_all(Path(folder) / "tokens.npy", space, recipes, options))
    enumerated = rates_of(rounds, options.micro_batch * workload.shape.sequence)
    result = {
        **compare(enumerated, tuner),
        "enumerating_seconds": enumerating,
        "tuning_seconds": tuning,
        "rounds": min(map(len, rounds.values())),
        "spread": statistics.median((max(each) - min(each)) / min(each) for each in rounds.values()),
        "rates": {" + ".join(recipe.rungs): rate for recipe, rate in enumerated.items()},
        "workload": workload.name,
        "micro_batch": options.micro_batch,
        "hardware": hardware.name,
        "versions": versions,
        **made(),
    }
    print(json.dumps(result, indent=2))
    say(verdict(result))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--rungs", required=True, help="the choices")
    parser.add_argument("--fixed", default="", help="rungs of every recipe")
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--layers", type=int, help="cut the model to so many")
    parser.add_argument("--rounds", type=int, default=3, help="times each recipe is timed (default: 3)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a round (default: 20)")
    parser.add_argument("--check-steps", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--device", choices=("cuda", "cpu"))
    return parser.parse_args()


def with_fixed(space: Space, fixed: Sequence[str]) -> Space:
    """Leave knobs that offer one of the fixed rungs no other choice."""
    knobs = [
        replace(knob, choices=tuple(one for one in knob.choices if one in fixed) or knob.choices)
        for knob in space.knobs
    ]
    return replace(space, knobs=tuple(knobs))


def chosen_workload(options: argparse.Namespace) -> Workload:
    workload = resolve_workload(options.workload)
    if options.layers is None:
        return workload
    shape = replace(workload.shape, layers=options.layers)
    return replace(workload, name=f"{workload.name} cut to {options.layers} layers", shape=shape)


def enumerate_all(
    tokens: Path, space: Space, recipes: Sequence[Recipe], options: argparse.Namespace
) -> dict[Recipe, list[float]]:
    """Return the median seconds of a step in each round, for every recipe that runs."""
    seconds: dict[Recipe, list[float]] = {}
    fitting = list(recipes)
    try:
        for number in range(options.rounds):
            for recipe in list(fitting):
                say(f"round {number + 1}, {fitting.index(recipe) + 1} of {len(fitting)}: {' + '.join(recipe.rungs)}")
                try:
                    seconds.setdefault(recipe, []).append(step_seconds(space, recipe, tokens, options.steps))
                except RuntimeError as error:
                    say(f"  failed: {error}")
                    fitting.remove(recipe)
                    seconds.pop(recipe, None)
    except KeyboardInterrupt:
        whole = min((len(each) for each in seconds.values()), default=0)
        if not whole or len(seconds) < len(fitting):
            raise
        say(f"interrupted: {whole} whole rounds")
        seconds = {recipe: each[:whole] for recipe, each in seconds.items()}
    return seconds


def step_seconds(space: Space, recipe: Recipe, tokens: Path, steps: int) -> float:
    import torch

    from redline.engine.build import build
    from redline.engine.clock import Clock
    from redline.engine.fit import free_memory
    from redline.rungs import plan_of

    device = torch.device(space.hardware.kind)
    training = build(
        space.workload, plan_of(recipe.rungs), micro_batch=recipe.micro_batch, tokens=tokens, device=device
    )
    for _ in range(WARM_UPS):
        training.step(next(training.batches))
    clock = Clock(device)
    clock.mark()
    for _ in range(steps):
        training.step(next(training.batches))
        clock.mark()
    found = statistics.median(clock.seconds())
    training.close()
    del training
    torch.compiler.reset()  # otherwise the model is kept alive, and past eight Dynamo compiles no other
    free_memory(device)
    return found


def rates_of(rounds: dict[Recipe, list[float]], tokens: int) -> dict[Recipe, float]:
    return {recipe: tokens / statistics.median(each) for recipe, each in rounds.items()}


def search(folder: Path, space: Space, options: argparse.Namespace) -> Tuner:
    """Search as `redline tune` does, with unlimited time and no cached answers."""
    settings = TuneSettings(
        device=space.hardware.kind,
        minutes=float("inf"),
        micro_batch=options.micro_batch,
        check_steps=options.check_steps,
    )
    tuner = Tuner(space, settings, open_answers(folder, space, options), Budget(float("inf")), Spoken())
    tuner.run()
    return tuner


def open_answers(folder: Path, space: Space, options: argparse.Namespace) -> TrialAnswers:
    from redline.data.tokens import prepare_tokens

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
    """Judge the search by the enumeration. The search also tries the plain recipe, as the baseline of speed-ups; that
    does not count as a trial."""
    best = max(enumerated, key=lambda recipe: enumerated[recipe])
    found = None if tuner.best is None else tuner.best.recipe
    tried = [recipe for recipe in tuner.trials if recipe in enumerated]
    return {
        "recipes": len(enumerated),
        "best": list(best.rungs),
        "best_tokens_per_second": enumerated[best],
        "started_with": list(tuner.space.start().rungs),
        "found": None if found is None else list(found.rungs),
        "found_tokens_per_second": None if found is None else enumerated.get(found),
        "of_best": None if found is None or found not in enumerated else enumerated[found] / enumerated[best],
        "tried": [" + ".join(recipe.rungs) for recipe in tried],
        "recipes_tried": len(tried),
        "answers": tuner.asked,
        "share_tried": len(tried) / len(enumerated),
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
