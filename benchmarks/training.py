"""A recipe trained for minutes: is it as fast as the ladder said, and does it learn as the plain TF32 model does?

    python benchmarks/training.py gpt2 --recipe best.json --data shards --json > records/DATE-DEVICE-train.json

Three runs on one machine: the ladder's figure for the recipe, `redline train` with it, and `redline train` with plain
TF32 (the same model, batches and learning rate) for --plain-minutes. Both trainings see the same tokens in the same
order, so their losses are compared at equal updates, as far as the slower one got.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PLAIN = ("tf32", "tied-weights")  # the published model, one line away from fp32
WINDOW = 50  # updates: single losses vary with their batches, which are the same in both runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload")
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="a folder made by `redline data prepare`")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--plain-minutes", type=float, default=2.0, help="0 leaves the plain run out")
    parser.add_argument("--json", action="store_true", help="print the record on standard output")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = measure(options, Path(folder))
    print(summary(record), file=sys.stderr)
    if options.json:
        print(json.dumps(record, indent=1))
    return 0


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    recipe = json.loads(options.recipe.read_text(encoding="utf-8"))
    plain = folder / "plain.json"
    plain.write_text(json.dumps({**recipe, "rungs": list(PLAIN)}), encoding="utf-8")
    once = ("--rungs", "none", "--check-steps", "10", "--out", str(folder / "ladder"), "--json")
    ladder = json.loads(redline("ladder", options.workload, "--from", str(options.recipe), *once))
    runs = {"recipe": trained(options, options.recipe, options.minutes, folder / "fast")}
    if options.plain_minutes:
        runs["plain"] = trained(options, plain, options.plain_minutes, folder / "plain")
    return compose(ladder, runs)


def redline(*words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "redline", *words], stdout=subprocess.PIPE, check=True, text=True
    ).stdout


def trained(options: argparse.Namespace, recipe: Path, minutes: float, out: Path) -> dict[str, Any]:
    where = ("--recipe", str(recipe), "--data", str(options.data), "--out", str(out))
    summary = json.loads(redline("train", options.workload, *where, "--minutes", str(minutes), "--json"))
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        "run": json.loads((out / "run.json").read_text(encoding="utf-8")),
        "summary": summary,
        "metrics": [json.loads(line) for line in lines],
    }


def compose(ladder: dict[str, Any], runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compose the record. `ladder` is the ladder's document; each run is what `trained` returns."""
    figure = ladder["rows"][0]["tokens_per_second"]
    first = runs["recipe"]["run"]
    record: dict[str, Any] = {
        "what": "a recipe trained for minutes, against the ladder's figure and against plain TF32 at equal tokens",
        "command": "python benchmarks/training.py",
        "date": first["date"],
        "hardware": first["hardware"],
        "versions": first["versions"],
        "ladder": {"tokens_per_second": figure, "command": ladder["command"], "date": ladder["date"]},
    }
    for name, run in runs.items():
        record[name] = {
            "command": run["run"]["command"],
            "recipe": run["run"]["order"]["recipe"],
            "summary": run["summary"],
            "speed": speeds(run["metrics"], figure if name == "recipe" else None),
            "curve": [[row["updates"], row["tokens"], row["loss"]] for row in run["metrics"] if row["kind"] == "cycle"],
            "validation": [
                [row["updates"], row["tokens"], row["loss"]] for row in run["metrics"] if row["kind"] == "validation"
            ],
        }
    record["at_equal_tokens"] = compared(*(runs[name]["metrics"] for name in runs)) if len(runs) == 2 else None
    return record


def speeds(metrics: list[dict[str, Any]], ladder: float | None) -> dict[str, Any]:
    """Return three rates: while training; with evaluations and checkpoints, once compiled; and from the very start."""
    cycles = [row for row in metrics if row["kind"] == "cycle"]
    start, end = cycles[0], cycles[-1]
    found = {
        "while_training": statistics.median(row["tokens_per_second"] for row in cycles),
        "with_evaluation_and_checkpoints": (end["tokens"] - start["tokens"]) / (end["time"] - start["time"]),
        "with_start_up": end["tokens"] / (end["time"] - start["time"] + start["seconds"]),
        "first_cycle_seconds": start["seconds"],
        "data_wait": statistics.median(row["data_wait"] for row in cycles),
    }
    if ladder is None:
        return found
    return {**found, "of_the_ladder": {name: found[name] / ladder for name in list(found)[:3]}}


def compared(fast: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean losses over the last window of updates that both made, and the largest difference in any window."""
    one, other = ([loss for row in run if row["kind"] == "cycle" for loss in row["losses"]] for run in (fast, plain))
    updates = min(len(one), len(other))
    ends = range(WINDOW, updates + 1, WINDOW)
    windows = [(statistics.mean(one[end - WINDOW : end]), statistics.mean(other[end - WINDOW : end])) for end in ends]
    return {
        "updates": updates,
        "window": WINDOW,
        "recipe_loss": windows[-1][0] if windows else None,
        "plain_loss": windows[-1][1] if windows else None,
        "largest_difference": max((abs(a - b) for a, b in windows), default=None),
    }


def summary(record: dict[str, Any]) -> str:
    speed = record["recipe"]["speed"]
    lines = [f"ladder {record['ladder']['tokens_per_second']:,.0f} tok/s"]
    lines += [
        f"{name.replace('_', ' ')}: {speed[name]:,.0f}, {share:.1%}" for name, share in speed["of_the_ladder"].items()
    ]
    equal = record["at_equal_tokens"]
    if equal and equal["recipe_loss"] is not None:
        lines.append(
            f"after {equal['updates']} updates: loss {equal['recipe_loss']} against {equal['plain_loss']} of plain TF32"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
