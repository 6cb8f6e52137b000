"""Every matmul of a model's blocks and head: torch's choice beside the fastest that cuBLASLt proposes.

    python benchmarks/products.py gpt2 --micro-batch 64

For each layer, in bf16, in turns, medians: the forward matmul, the gradient of the input and the gradient of the
weight; what bias and GELU epilogues cost; and what it costs to write the weight's gradient in fp32. Several calls run
between two events, all queued while the device is still busy with something else, so that launch overhead does not
show. `gain` is what a step would save, over all layers, with the matmuls that `fused-backward` uses: the two that write
into the residual stream have no bias, the MLP's first has GELU after it. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from made import made

from redline.engine.probe import versions
from redline.kernels import cublaslt
from redline.kernels.products import product, product_and_bias, product_and_gelu
from redline.workloads import resolve_workload

ROUNDS = 12
CALLS = 8
LARGE_FLOPS = 2e12  # above it a matmul takes milliseconds: two calls hide a launch just as well
BUSY_CYCLES = 4_000_000  # of the device's clock, some 2 ms: longer than it takes to queue the calls
FORWARD = {"qkv": "forward + bias", "mlp up": "forward + bias + GELU"}
"""The forward variant that a step uses in a layer; for layers not listed, the plain matmul."""
PAIRS = {"of input": ("torch", "tuned"), "of weight": ("torch + fp32", "tuned fp32")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="?", default="gpt2")
    parser.add_argument("--micro-batch", type=int, default=64)
    options = parser.parse_args()
    if cublaslt.library(torch.device("cuda")) is None:
        print("there is no CUDA device with cuBLASLt here", file=sys.stderr)
        return 2
    shape = resolve_workload(options.workload).decoder
    tokens, rows = options.micro_batch * shape.sequence, -(-shape.vocab // 128) * 128
    layers = {
        "qkv": (shape.d_model, 3 * shape.d_model),
        "attention out": (shape.d_model, shape.d_model),
        "mlp up": (shape.d_model, shape.d_ff),
        "mlp down": (shape.d_ff, shape.d_model),
        "head": (shape.d_model, rows),
    }
    found = []
    for name, (into, out) in layers.items():
        for what, times in of_layer(tokens, into, out, name):
            gain = gain_ms(name, what, times["ms"], shape.layers)
            found.append({"product": f"{name}, {what}", **times, "step_gain_ms": gain})
        torch.cuda.empty_cache()
    for line in lines(found):
        print(line, file=sys.stderr)
    about = {"workload": options.workload, "micro_batch": options.micro_batch, "device": torch.cuda.get_device_name()}
    print(
        json.dumps(
            {**made(), **about, "versions": versions(), "step_gain_ms": total_ms(found), "rows": found}, indent=1
        )
    )
    return 0


def gain_ms(layer: str, what: str, ms: dict[str, float], layers: int) -> float | None:
    """Return the gain in a whole step; None for a variant that no step uses."""
    if what.startswith("forward") and what != FORWARD.get(layer, "forward"):
        return None
    torchs, tuned = PAIRS.get(what, ("torch", "tuned"))
    return (ms[torchs] - ms[tuned]) * (1 if layer == "head" else layers)


def total_ms(rows: list[dict[str, Any]]) -> float:
    return sum(row["step_gain_ms"] for row in rows if row["step_gain_ms"] is not None)


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'ms':30}{'torch':>9}{'tuned':>9}{'torch, fp32':>13}{'tuned fp32':>12}{'TFLOP/s':>9}{'gain':>9}"
    for row in rows:
        ms, gain = row["ms"], row["step_gain_ms"]
        wide = "".join(f"{ms[way]:{width}.3f}" if way in ms else f"{'—':>{width}}" for way, width in WIDE.items())
        rate, gained = row["flops"] / ms["torch"] / 1e9, "—" if gain is None else f"{gain:.3f}"
        yield f"{row['product']:30}{ms['torch']:9.3f}{ms['tuned']:9.3f}{wide}{rate:9.0f}{gained:>9}"
    yield f"{'a step would gain':30}{total_ms(rows):61.3f}"


WIDE = {"torch + fp32": 13, "tuned fp32": 12}


def of_layer(tokens: int, into: int, out: int, name: str) -> list[tuple[str, dict[str, Any]]]:
    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    x, weight, above, bias = drawn(tokens, into), drawn(out, into) / into**0.5, drawn(tokens, out), drawn(out)
    flops = 2 * tokens * into * out
    ways: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {"torch": lambda: x @ weight.t(), "tuned": lambda: product(x, weight.t(), x.dtype)},
        "of input": {"torch": lambda: above @ weight, "tuned": lambda: product(above, weight, x.dtype)},
        "of weight": {
            "torch": lambda: above.t() @ x,
            "tuned": lambda: product(above.t(), x, x.dtype),
            "torch + fp32": lambda: (above.t() @ x).float(),
            "tuned fp32": lambda: product(above.t(), x, torch.float32),
        },
    }
    if name != "head":
        ways["forward + bias"] = {
            "torch": lambda: torch.addmm(bias, x, weight.t()),
            "tuned": lambda: product_and_bias(x, weight, bias),
        }
    if name == "mlp up":
        ways["forward + bias + GELU"] = {
            "torch": lambda: F.gelu(torch.addmm(bias, x, weight.t()), approximate="tanh"),
            "tuned": lambda: product_and_gelu(x, weight, bias),
        }
    calls = 2 if flops > LARGE_FLOPS else CALLS
    return [(what, {"flops": flops, "ms": in_turns(some, calls)}) for what, some in ways.items()]


def in_turns(ways: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    for run in ways.values():  # the first calls choose and load kernels
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(BUSY_CYCLES)
            before.record()
            for _ in range(calls):
                run()
            after.record()
            after.synchronize()
            times[name].append(before.elapsed_time(after) / calls)
    return {name: statistics.median(some) for name, some in times.items()}


if __name__ == "__main__":
    sys.exit(main())
