"""What a traced model needs and costs, computed from FLOPs, bytes and products that were observed, not derived.

    traced_bytes(traced, plan, micro_batch=16).activations
    flops_per_item(traced)
    step_of(traced, plan, micro_batch=16, matmul_tflops=989.4, bandwidth=4.8e12).seconds   # products and update alone

The entry points for shapes (efficiency, predict_memory) pass a `Traced` on to this module. What a user's model does
besides products is unknown: bounds are named as such, and the rest is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from redline.core.errors import UserError
from redline.core.plan import Plan
from redline.core.traced import Product, Traced
from redline.core.workload import check_positive
from redline.predict.gemms import DIRECTIONS, Gemm
from redline.predict.optimizers import find_optimizer

WITHOUT_ATTENTION = "counted while the model ran: products and convolutions, forward and backward"
CONVENTION = f"{WITHOUT_ATTENTION}, of attention the whole square"
FP32, BF16 = 4, 2


# memory


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes by category, as if all were alive at once: an upper bound but for temporary tensors, which are left out."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What autograd keeps in eager mode; compiled code keeps less."""
    batch: int


def traced_bytes(traced: Traced, plan: Plan, *, micro_batch: int, optimizer: str | None = None) -> Bytes:
    check_positive("micro batch", micro_batch)
    row = find_optimizer(plan.optimizer if optimizer is None else optimizer)
    saved = traced.saved_bytes(
        "bf16" if plan.autocast else "fp32",  # fp16 takes as much
        "naive" if plan.attention == "naive" else "fused",
        "full" if plan.checkpointing == "full" else "none",
    )
    return Bytes(
        weights=row.weights * (traced.parameters - traced.other_numbers) + traced.other_bytes + traced.buffer_bytes,
        gradients=row.weights * traced.trainable,
        optimizer=sum(each.count * row.state_bytes(each.sizes, of_layer=each.of_layer) for each in traced.tensors),
        activations=round(plan.activation_budget * saved.at(micro_batch)),
        batch=traced.batch_bytes * micro_batch,
    )


# FLOPs


def flops_per_item(traced: Traced) -> float:
    """FLOPs of forward and backward per item that rates count: a token, or a sample."""
    return traced.flops.per_sample / traced.items_per_sample


# products


def gemms_of(traced: Traced, micro_batch: int) -> tuple[Gemm, ...]:
    """Return every product of a step: those seen in the forward, and the two of the backward that follow from each."""
    return tuple(gemm for product in traced.products for gemm in _three(product, micro_batch))


def _three(product: Product, micro_batch: int) -> Iterator[Gemm]:
    size = {name: getattr(product, name) for name in ("m", "n", "k", "batch")}
    if product.grows is not None:
        size[product.grows] *= micro_batch
    m, n, k, batch = size.values()
    # y = x w: the gradient of x is dy w', of w it is x' dy.
    for direction, (rows, columns, depth) in zip(DIRECTIONS, ((m, n, k), (m, k, n), (n, k, m)), strict=True):
        yield Gemm(
            where=product.where, direction=direction, m=rows, n=columns, k=depth, batch=batch, count=product.count
        )


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Bounds on a step's time at a device's peaks: nothing that does this work is faster, and much may be slower."""

    products_seconds: float
    """Seconds of the products, each the longer of the times of its FLOPs and of its bytes."""
    update_seconds: float
    floor_seconds: float
    """Seconds of the counted FLOPs alone."""

    @property
    def seconds(self) -> float:
        return self.products_seconds + self.update_seconds


def step_of(traced: Traced, plan: Plan, *, micro_batch: int, matmul_tflops: float, bandwidth: float) -> Bound:
    element = BF16 if plan.autocast else FP32
    row = find_optimizer(plan.optimizer)

    def seconds(gemm: Gemm) -> float:
        numbers = (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n) * gemm.batch
        compute = 2 * gemm.m * gemm.n * gemm.k * gemm.batch / (matmul_tflops * 1e12)
        return gemm.count * max(compute, element * numbers / bandwidth)

    moved = sum(each.count * row.update(each.sizes, of_layer=each.of_layer).bytes for each in traced.tensors)
    return Bound(
        products_seconds=math.fsum(map(seconds, gemms_of(traced, micro_batch))),
        update_seconds=moved / bandwidth,
        floor_seconds=traced.flops.at(micro_batch) / (matmul_tflops * 1e12),
    )


def one_gpu_only(what: str) -> UserError:
    by_hand = "; under DDP each GPU holds what one alone does, and redline train --gpus N trains it"
    return UserError(
        f"{what} with a Python file",
        "of a model that nobody described only training on one GPU is predicted",
        f"leave {what} out{'' if 'inference' in what else by_hand}",
    )
