"""Every product of a model's blocks and head: torch's choice beside the fastest that cuBLASLt proposes.

    python benchmarks/products.py gpt2 --micro-batch 64

Forward, gradient of the input and gradient of the weight of each layer, in bf16, in turns, medians; what GELU and a
bias on the way out cost; and what the weight's gradient costs when it is written in fp32. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from redline.kernels import cublaslt
from redline.kernels.products import product, product_and_bias, product_and_gelu
from redline.workloads import resolve_workload

ROUNDS = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="?", default="gpt2")
    parser.add_argument("--micro-batch", type=int, default=64)
    options = parser.parse_args()
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
        found += [{"product": f"{name}, {what}", **times} for what, times in of_layer(tokens, into, out, name)]
        torch.cuda.empty_cache()
    for row in found:
        rate = row["flops"] / row["ms"]["torch"] / 1e9
        others = "  ".join(f"{way} {ms:6.3f}" for way, ms in row["ms"].items())
        print(f"{row['product']:24} {others}  torch {rate:4.0f} TFLOP/s", file=sys.stderr)
    print(json.dumps({"workload": options.workload, "micro_batch": options.micro_batch, "rows": found}, indent=1))
    return 0


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
    return [(what, {"flops": flops, "ms": in_turns(some)}) for what, some in ways.items()]


def in_turns(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    for run in ways.values():  # chooses, and loads kernels
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            run()
            after.record()
            after.synchronize()
            times[name].append(before.elapsed_time(after))
    lt = cublaslt.library()
    assert lt is not None, "cuBLASLt was not found"
    return {name: statistics.median(some) for name, some in times.items()}


if __name__ == "__main__":
    sys.exit(main())
