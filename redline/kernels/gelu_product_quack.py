"""The kernel of `kernels.gelu_product`, by QuACK. Imported only where that package and a Hopper GPU are.

QuACK compiles the function below into the end of its matmul, at the first call, which takes some seconds; it keeps the
code in a folder of its own (QUACK_CACHE_DIR).
"""

from __future__ import annotations

from typing import Any

import torch
from quack.activation import sigmoid
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.ops import RowVecReduce
from quack.gemm_config import GemmConfig

from redline.kernels.gelu_backward import CUBE, SLOPE

# Two groups of warps in turns: while one multiplies, the other does GELU and writes.
CONFIG = GemmConfig(
    tile_m=128,
    tile_n=192,
    cluster_m=2,
    cluster_n=1,
    pingpong=True,
    is_dynamic_persistent=False,
    device_capacity=9,
)


@gemm_epilogue(reduces={"sums": RowVecReduce("sums")})  # type: ignore[untyped-decorator]
def gelu_gradient(acc: Any, c: Any) -> dict[str, Any]:
    """Of one element: `acc` is the product's in fp32, `c` what GELU was given. `D` is written, `sums` added up."""
    square = c * c
    share = sigmoid(c * (SLOPE + SLOPE * CUBE * square))
    slope = share + c * (share - share * share) * (SLOPE + 3 * SLOPE * CUBE * square)
    return {"D": acc * slope, "sums": acc * slope}


PLANS: dict[tuple[Any, ...], Any] = {}
"""By sizes, type and device: asked for with its operands alone, QuACK needs 28 us of the host for a call, so 2."""


def launch(above: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = {"D": torch.empty_like(hidden)}
    blocks = -(-hidden.size(0) // CONFIG.tile_m)
    sums = {"sums": hidden.new_empty(blocks, hidden.size(1), dtype=torch.float32)}
    key = above.shape, weight.shape, hidden.dtype, hidden.device
    plan = PLANS.get(key)
    if plan is None:
        plan = PLANS[key] = gelu_gradient.plan(above, weight, hidden, out=out, config=CONFIG, **sums)
        plan.scratch = {}  # it would keep these sums
    plan.run(above, weight, hidden, out=out, scratch=sums)
    return out["D"], sums["sums"].sum(dim=0)
