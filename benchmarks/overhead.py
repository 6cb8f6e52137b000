"""Does measuring slow down what is measured? The ladder's figure for a recipe against a bare loop around the same step.

    python benchmarks/overhead.py gpt2 --recipe runs/.../best.json --rounds 3

Each round measures the recipe as the ladder does, in a worker process, and runs a bare loop in another process: no
clock marks between steps, no progress, one wall clock around all of them. Rounds alternate which goes first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from made import made

from redline.core.job import Job, RunDirectory
from redline.core.measurement import Measurement
from redline.core.recipe import Recipe, load_recipe
from redline.core.values import from_json, to_json
from redline.search.launch import launch, probe_machine, worker_environment
from redline.workloads import resolve_workload

BARE_STEPS, WARM_SECONDS = 100, 5.0


def main() -> None:
    options = read_options()
    workload = resolve_workload(options.workload)
    recipe = load_recipe(options.recipe)
    recipe = Recipe(rungs=recipe.rungs, micro_batch=options.micro_batch or recipe.micro_batch)
    hardware, versions = probe_machine(options.device)
    with tempfile.TemporaryDirectory() as folder:
        from redline.data.tokens import prepare_tokens

        run = RunDirectory(Path(folder))
        prepare_tokens(workload, run.path / "tokens.npy")
        job = Job(workload=workload, recipe=recipe, device=hardware.kind, tokens="tokens.npy")
        pairs = [one_round(run, job, bare_first=number % 2 == 1) for number in range(options.rounds)]
    tokens = recipe.micro_batch * workload.shape.sequence
    ladder, bare = (tokens / statistics.median(column) for column in zip(*pairs, strict=True))
    result = {
        "ladder_tokens_per_second": ladder,
        "bare_tokens_per_second": bare,
        "ratio": ladder / bare,
        "rounds": pairs,
        **made(),
        "recipe": to_json(recipe),
        "workload": workload.name,
        "hardware": hardware.name,
        "versions": versions,
    }
    print(json.dumps(result, indent=2))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"))
    return parser.parse_args()


def one_round(run: RunDirectory, job: Job, bare_first: bool) -> tuple[float, float]:
    """Return seconds per step: as the ladder measures them, and in the bare loop."""
    if bare_first:
        bare = bare_process(run, job)
        return measured(run, job), bare
    return measured(run, job), bare_process(run, job)


def measured(run: RunDirectory, job: Job) -> float:
    result = launch(run, job, 600, lambda *_, **__: None)
    if not isinstance(result, Measurement):
        raise SystemExit(result.reason)
    return statistics.mean(result.step_seconds)  # as the bare loop's one clock sees it


def bare_process(run: RunDirectory, job: Job) -> float:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import overhead; overhead.bare_loop(sys.argv[2])"
    (run.path / "bare.json").write_text(json.dumps(to_json(job)))
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(run.path)]
    done = subprocess.run(command, env=worker_environment(run, job), stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def bare_loop(folder: str) -> None:
    """A plain training loop: batches in, steps out, one clock around many."""
    import torch

    from redline.engine.build import build
    from redline.rungs import plan_of

    job = from_json(Job, json.loads((Path(folder) / "bare.json").read_text()))
    device = torch.device(job.device)
    training = build(
        job.workload,
        plan_of(job.recipe.rungs),
        micro_batch=job.recipe.micro_batch,
        tokens=Path(folder) / job.tokens,
        device=device,
    )
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    started, steps = time.perf_counter(), 0
    while time.perf_counter() - started < WARM_SECONDS or steps < 20:
        training.step(next(training.batches))
        wait()
        steps += 1
    wait()
    started = time.perf_counter()
    for _ in range(BARE_STEPS):
        training.step(next(training.batches))
    wait()
    print((time.perf_counter() - started) / BARE_STEPS)
    training.close()


if __name__ == "__main__":
    main()
