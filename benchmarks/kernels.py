"""The hand-written kernels on a CUDA device, each beside the compiler's version and a plain pass over the same bytes.

    python benchmarks/kernels.py [--micro-batch 64] [--json]      # seconds; GPT-2's sizes, random numbers
    python benchmarks/kernels.py --step [--rounds 5]              # the whole step, with and without, in turns

Times are medians of events around single calls, after three warm-up calls. A floor is torch's own kernel that reads and
writes as many bytes: `mul_`, `add_`, `clone`, `addcmul`. With --step two compiled steps share one process and take
turns of ten steps, so that the card's temperature is the same for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from made import made
from step import Figures, time_recipes

from redline.engine.probe import versions
from redline.kernels.cross_entropy import cross_entropy_, plain_cross_entropy_
from redline.kernels.gelu_backward import gelu_backward_, plain_gelu_backward_
from redline.kernels.norm_backward import norm_backward, plain_norm_backward
from redline.kernels.side_by_side import plain_side_by_side, side_by_side
from redline.rungs import plan_of
from redline.workloads import resolve_workload

CALLS, WARM_UPS = 12, 3
FAST = ("tf32", "no-sync", "bf16", "compile", "cudnn-attention", "padded-vocab", "tied-weights", "fused-adamw")
FAST += ("fused-loss", "bf16-residual", "sigmoid-gelu")
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    floor: Callable[..., Any]
    inputs: tuple[Any, ...]


def cases(tokens: int) -> dict[str, Callable[[], Case]]:
    """Return functions that make the cases, one at a time: the logits alone are 6.6 GB at 65,536 tokens."""
    shape = resolve_workload("gpt2").shape
    C, F, rows = shape.d_model, shape.d_ff, plan_of(FAST).vocab_rows(shape.vocab)

    def loss() -> Case:
        logits = torch.empty(tokens, rows, dtype=torch.bfloat16, device="cuda")
        for piece in logits.split(4096):  # no fp32 copy of all of them
            piece.copy_(torch.randn(piece.shape, device="cuda"))
        targets = torch.randint(shape.vocab, (tokens,), device="cuda")
        inputs = (logits, targets, shape.vocab)
        return Case(kernel=cross_entropy_, plain=plain_cross_entropy_, floor=lambda x, *_: x.mul_(1.0), inputs=inputs)

    def gelu() -> Case:
        inputs = (random(tokens, F), random(tokens, F))
        return Case(kernel=gelu_backward_, plain=plain_gelu_backward_, floor=torch.Tensor.add_, inputs=inputs)

    def beside() -> Case:
        parts, whole = [random(tokens, C) for _ in range(3)], random(tokens, 3 * C)
        return Case(kernel=side_by_side, plain=plain_side_by_side, floor=lambda *_: whole.clone(), inputs=tuple(parts))

    def norm() -> Case:
        parts = [random(tokens, C) for _ in range(3)]
        _, *stats = torch.native_layer_norm(parts[1].float(), (C,), None, None, EPS)
        inputs = (*parts, torch.ones(C, device="cuda"), *stats)
        return Case(
            kernel=norm_backward,
            plain=plain_norm_backward,
            floor=lambda a, b, c, *_: torch.addcmul(a, b, c),
            inputs=inputs,
        )

    return {"cross_entropy_": loss, "gelu_backward_": gelu, "side_by_side": beside, "norm_backward": norm}


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda").bfloat16()


def milliseconds(run: Callable[..., Any], inputs: tuple[Any, ...]) -> float:
    for _ in range(WARM_UPS):
        run(*inputs)
    events = []
    for _ in range(CALLS):
        events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        events[-1][0].record()
        run(*inputs)
        events[-1][1].record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def time_kernels(tokens: int) -> dict[str, dict[str, float]]:
    found = {}
    for name, make in cases(tokens).items():
        case = make()
        compiled = torch.compile(case.plain, dynamic=False)
        runs = {"kernel": case.kernel, "compiled": compiled, "floor": case.floor}
        found[name] = {what: milliseconds(run, case.inputs) for what, run in runs.items()}
        del case
        torch.cuda.empty_cache()
    return found


def time_steps(micro_batch: int, rounds: int) -> dict[str, Figures]:
    recipes = {"without fused-backward": FAST, "with fused-backward": (*FAST, "fused-backward")}
    return time_recipes(resolve_workload("gpt2"), recipes, micro_batch, rounds, torch.device("cuda"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--step", action="store_true", help="the whole step instead of single kernels")
    parser.add_argument("--rounds", type=int, default=5, help="of ten steps each (default 5)")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device here", file=sys.stderr)
        return 2
    tokens = asked.micro_batch * resolve_workload("gpt2").shape.sequence
    found: Mapping[str, Mapping[str, Any]]
    found = time_steps(asked.micro_batch, asked.rounds) if asked.step else time_kernels(tokens)
    if asked.json:
        print(json.dumps({**made(), "device": torch.cuda.get_device_name(), "versions": versions(), "found": found}))
        return 0
    for name, figures in found.items():
        print(f"{name:24}" + "".join(f"  {what} {figure:,.3f}" for what, figure in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
