"""What would it bring to run memory-bound kernels under matmuls? A matmul and a sum, on one stream and on two.

    python benchmarks/overlap.py gpt2 --micro-batch 64 --json > records/DATE-DEVICE-overlap.json

The matmul is the MLP's first, the sum that of two tensors of the residual stream's size, both in bf16: about what a
step of GPT-2 has of each. Four ways take turns, in blocks that are long enough for the device to reach its power limit:
`in turn` queues matmul, sum, matmul, sum on one stream; `side by side` queues all matmuls on one stream and all sums on
another; `matmuls` and `sums` run one of the two alone. Times are per pair. `hidden` is the share of the sums' own time
that two streams save, round by round: 1 if sums under matmuls were free, 0 if the device is as busy either way.
Operands are random: on zeros a GPU draws less power and is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from made import made
from politely import politely

from redline.core.measurement import spread_of
from redline.core.units import human_seconds
from redline.core.values import to_json
from redline.core.workload import check_positive
from redline.engine.clock import Clock
from redline.engine.probe import versions
from redline.workloads import resolve_workload

MATMUL, SUM = range(2)
WAYS: dict[str, tuple[tuple[int, ...], bool]] = {
    "in turn": ((MATMUL, SUM), False),
    "side by side": ((MATMUL, SUM), True),
    "matmuls": ((MATMUL,), False),
    "sums": ((SUM,), False),
}
"""What each way runs, and whether on two streams."""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="gpt2", help="a preset or a config (default: gpt2)")
    parser.add_argument("--micro-batch", type=int, help="sequences (default: 4 x the workload's)")
    parser.add_argument("--rounds", type=int, default=8, help="in which all ways take turns (default: 8)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a block (default: 0.5)")
    parser.add_argument("--json", action="store_true", help="print the record on standard output")
    return politely(run, parser.parse_args(words))


def run(options: argparse.Namespace) -> int:
    workload = resolve_workload(options.workload)
    micro_batch = options.micro_batch or 4 * workload.micro_batch
    for name, number in (("rounds", options.rounds), ("micro-batch", micro_batch)):
        check_positive(f"--{name}", number)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = workload.decoder
    work = kernels(micro_batch * shape.sequence, shape.d_model, shape.d_ff, device)
    rounds = in_rounds(work, device, rounds=options.rounds, seconds=options.seconds)
    record = {
        "what": "memory-bound kernels under matmuls: what two streams save over one",
        "how": " ".join(" ".join(__doc__.split("\n\n")[2:]).split()),
        **made(),
        "finished": True,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": versions(),
        "workload": workload.name,
        "micro_batch": micro_batch,
        **results(rounds),
    }
    out = sys.stderr if options.json else sys.stdout
    for name, spread in record["seconds"].items():
        print(f"{name:14}{human_seconds(spread['median'])} a pair", file=out)
    median, p10, p90 = (record["hidden"][name] for name in ("median", "p10", "p90"))
    print(f"hidden        {median:.2f} of a sum's time ({p10:.2f} to {p90:.2f})", file=out)
    if options.json:
        print(json.dumps(record, indent=1))
    return 0


def kernels(tokens: int, width: int, inner: int, device: torch.device) -> tuple[Callable[[], object], ...]:
    """Return the matmul and the sum. Both write into the same memory every time, so that nothing is allocated."""

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

    rows, weight, product = drawn(tokens, width), drawn(inner, width), drawn(tokens, inner)
    stream, branch, total = drawn(tokens, width), drawn(tokens, width), drawn(tokens, width)
    return lambda: torch.mm(rows, weight.t(), out=product), lambda: torch.add(stream, branch, out=total)


def in_rounds(
    work: tuple[Callable[[], object], ...], device: torch.device, *, rounds: int, seconds: float
) -> list[dict[str, float]]:
    """Return each round's seconds per pair, by way. The first round only warms the device up and is dropped."""
    block(work, "in turn", 2, device)  # loads the kernels
    count = max(1, round(seconds / block(work, "in turn", 4, device)))
    names = list(WAYS)
    found = []
    for number in range(rounds + 1):
        order = names[number % len(names) :] + names[: number % len(names)]
        found.append({name: block(work, name, count, device) for name in order})
    return found[1:]


def block(work: tuple[Callable[[], object], ...], way: str, count: int, device: torch.device) -> float:
    """Return the seconds per pair of a block of that many."""
    parts, apart = WAYS[way]
    clock = Clock(device)
    clock.mark()
    with beside(device) if apart else contextlib.nullcontext() as under:
        for _ in range(count):
            for part in parts:
                with under if under is not None and part == SUM else contextlib.nullcontext():
                    work[part]()
    clock.mark()
    return clock.seconds()[0] / count


@contextlib.contextmanager
def beside(device: torch.device) -> Any:
    """Yield a context whose kernels run on a second stream, which begins and ends with the current one."""
    if device.type == "cpu":
        yield contextlib.nullcontext()
        return
    here, other = torch.cuda.current_stream(), torch.cuda.Stream()
    other.wait_stream(here)
    yield torch.cuda.stream(other)
    here.wait_stream(other)


def results(rounds: list[dict[str, float]]) -> dict[str, Any]:
    hidden = [(one["in turn"] - one["side by side"]) / one["sums"] for one in rounds]
    return {
        "seconds": {name: to_json(spread_of([one[name] for one in rounds])) for name in WAYS},
        "hidden": to_json(spread_of(hidden)),
    }


if __name__ == "__main__":
    raise SystemExit(main())
