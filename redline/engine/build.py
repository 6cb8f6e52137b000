"""Turns a plan into something that trains. The order in which optimisations are applied is defined only here.

training = build(workload, plan, micro_batch=16, tokens=path, device=torch.device("cuda"))
loss = training.step(next(training.batches))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from redline.core.plan import Plan
from redline.core.traced import Traced
from redline.core.workload import Workload
from redline.data.batches import Batches, TokenBatches, stream_batches, worker_context
from redline.data.made import MadeBatches
from redline.engine.distributed import Ranks, alone
from redline.engine.pipeline import Pipelined, build_stage
from redline.engine.replaced import replaced
from redline.engine.shard import fill, is_cut, is_pipelined, share
from redline.engine.step import TrainStep
from redline.model.adapter import Adapter, LossOf, adapter_of
from redline.model.recompute import keep_policies_in_ddp
from redline.optim import build_optimizer, reset_optimizer, settings_for, warm_up


@dataclass
class Training:
    """A model in training: everything a loop needs, and `restore` to return to step 0."""

    workload: Workload
    adapter: Adapter
    model: nn.Module
    step: TrainStep
    batches: Generator[Any, None, None]

    def restore(self) -> None:
        """Reset weights and optimizer in place, so that compiled code and fused kernels keep their tensors."""
        if is_cut(self.step.plan):
            fill(self.adapter, self.model, self.step.shared.cuts)
        else:
            self.adapter.restore(self.model)
        reset_optimizer(self.step.optimizer)
        self.step.optimizer.zero_grad(set_to_none=True)
        self.step.reset()

    def close(self) -> None:
        self.batches.close()


def build(
    workload: Workload,
    plan: Plan,
    *,
    micro_batch: int,
    tokens: Path,
    device: torch.device,
    chunk: int | None = None,
    ranks: Ranks | None = None,
) -> Training:
    """Build what a measurement needs: model, step and an endless stream of batches. `ranks` share every batch, with
    `micro_batch` sequences each."""
    if plan.loader_workers:
        worker_context()  # its server imports torch while the model is built
    step = build_step(workload, plan, device=device, chunk=chunk, ranks=ranks)
    # The loader comes last: its workers start when the first batch is requested.
    batches = batches_of(workload, micro_batch, tokens, ranks or alone())
    return Training(workload, step.adapter, step.model, step, stream_batches(batches, device, plan.loader_workers))


def batches_of(workload: Workload, micro_batch: int, tokens: Path, ranks: Ranks) -> Batches:
    place, parts = ranks.place, ranks.layout.data
    own: dict[str, Any] = {"seed": workload.seed, "micro_batch": micro_batch, "rank": place.data, "ranks": parts}
    if isinstance(workload.shape, Traced):
        return MadeBatches(source=workload.source, classes=workload.shape.classes, **own)
    return TokenBatches(path=tokens, sequence=workload.shape.sequence, **own)


def build_step(
    workload: Workload,
    plan: Plan,
    *,
    device: torch.device,
    chunk: int | None = None,
    learning_rate: Callable[[int], float] | None = None,
    ranks: Ranks | None = None,
) -> TrainStep:
    """Build the step, the same for timing and for training. `learning_rate` maps the number of steps taken to a rate
    for the plan's own optimizer; without it, the rate warms up and then stays constant. `ranks` share the step in the
    way that `plan.parallel` names; with 'none' they share no data."""
    # 1. Process switches first: they decide which kernels everything after them picks.
    switch_process(plan, calls_sdpa=not workload.reads_text)
    # 2. The model at its final shape, on the device, before anything holds a reference to its parameters.
    adapter = adapter_of(workload)
    ranks = ranks or alone()
    with ranks.meeting():
        model = build_model(adapter, plan, device, ranks)
    cuts = adapter.cut(model, ranks.mesh["tp"]) if plan.tensor_parallel else {}
    # 3. Compile wraps forward and loss together, so that the loss is fused into the head's epilogue.
    loss_of = plain_loss(adapter, model, plan)
    if plan.compile and plan.runs_whole:
        loss_of = compile_loss(loss_of, plan)
    elif plan.compile:
        compile_blocks(adapter.blocks(model), plan)
    if plan.cuda_graphs:
        loss_of = outlive_replays(loss_of, model, accumulates=chunk is not None)
    # 4. Ranks share what was compiled: their hooks run between compiled parts. A cut model now has its weights.
    ways = Pipelined if is_pipelined(plan) else share
    shared = ways(adapter, model, loss_of, plan=plan, ranks=ranks, device=device, cuts=cuts)
    # 5. The optimizer gets the parameters as they are now; a rank may hold only a part of each.
    own = optimizer_settings(workload, plan)
    optimizer = build_optimizer(plan.optimizer, model, **own)
    # 6. The step takes precision, loss scaling and synchronisation from the plan.
    warming = partial(warm_up, peak=own["learning_rate"], warmup_steps=workload.warmup_steps)
    return TrainStep(
        adapter=adapter,
        model=model,
        loss_of=shared.loss_of,
        optimizer=optimizer,
        plan=plan,
        shared=shared,
        learning_rate=learning_rate or warming,
        clip_norm=workload.clip_norm,
        chunk=chunk,
    )


def build_model(adapter: Adapter, plan: Plan, device: torch.device, ranks: Ranks) -> nn.Module:
    """Build the model on `device`. One that is to be cut is built on 'meta' or on the host; the cut moves it."""
    if is_pipelined(plan):
        return build_stage(adapter, plan, ranks)
    return adapter.build_unplaced(plan) if is_cut(plan) else adapter.build(plan, device)


def optimizer_settings(workload: Workload, plan: Plan) -> dict[str, float]:
    """Return peak rate and decay for the plan's optimizer, converted from AdamW's, which a workload states."""
    return settings_for(plan.optimizer, learning_rate=workload.learning_rate, weight_decay=workload.weight_decay)


def switch_process(plan: Plan, calls_sdpa: bool = False) -> None:
    """Set the flags of this process. Each measurement has its own process, so nothing leaks into another row.
    `calls_sdpa`: the model may call SDPA whatever the plan says, so 'naive' is also a backend to pin."""
    if plan.expandable_segments:
        grow_segments()
    torch.set_float32_matmul_precision(plan.matmul_precision)
    if plan.attention != "naive" or calls_sdpa:
        pin_attention(plan.attention)
    if plan.activation_budget < 1:  # read when a graph is compiled
        from redline.engine.budget import keep_share  # it imports the compiler, which takes a second

        keep_share(plan.activation_budget)
    if plan.compile and plan.checkpointing == "full" and plan.parallel == "ddp":
        keep_policies_in_ddp()


def grow_segments() -> None:
    """Turn on expandable segments at run time, in addition to the user's settings. An environment variable would not
    do: torch has changed which one it reads (2.9.1 ignores the new one and warns about the old one), and a trainer's
    process has already imported torch."""
    chosen = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    settings = [chosen] if chosen else []
    torch._C._accelerator_setAllocatorSettings(",".join([*settings, "expandable_segments:True"]))


def pin_attention(backend: str) -> None:
    """Leave exactly one SDPA backend on: an unpinned call may pick another kernel than the row's name says."""
    torch.backends.cuda.enable_flash_sdp(backend == "flash")
    torch.backends.cuda.enable_cudnn_sdp(backend == "cudnn")
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(backend == "naive")


def in_fp32(model: nn.Module, loss_of: LossOf) -> LossOf:
    """Return a loss that computes in fp32 for a model whose weights are stored in bf16. fp32 copies replace the weights
    for one pass, and gradients are rounded on their way back to the stored weights. This is slow; recipes with bf16
    weights are compared with it."""

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.is_floating_point() else tensor

    def run(*batch: torch.Tensor) -> torch.Tensor:
        with replaced(model, wide):
            return loss_of(*batch)

    return run


def plain_loss(adapter: Adapter, model: nn.Module, plan: Plan) -> LossOf:
    loss_of = adapter.loss_of(model, plan)
    return in_fp32(model, loss_of) if plan.weights == "bf16" and plan.autocast is None else loss_of


def compile_loss(loss_of: LossOf, plan: Plan) -> LossOf:
    return torch.compile(loss_of, dynamic=False, options=compile_options(plan))


def compile_blocks(blocks: list[nn.Module], plan: Plan) -> None:
    """Compile blocks one by one and in place: a graph across them would have to contain the gathering of weights."""
    for block in blocks:
        block.compile(dynamic=False, options=compile_options(plan))


def compile_options(plan: Plan) -> dict[str, Any]:
    # One shape per process, so dynamic shapes would only cost speed. Inductor's one-pass softmax rescales its running
    # sum at every step; over a row that stays in the L2 cache two passes are faster (docs/speed-log.md).
    options: dict[str, Any] = {"online_softmax": False, "triton.cudagraphs": plan.cuda_graphs}
    if plan.max_autotune:
        options |= torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    return options


def outlive_replays(loss_of: LossOf, model: nn.Module, accumulates: bool) -> LossOf:
    """Copy what must survive the next replay of a CUDA graph, which overwrites all its outputs: losses, since they are
    read later, and gradients if they are accumulated; otherwise these are consumed before the next replay."""
    if accumulates:
        for parameter in model.parameters():
            parameter.register_hook(torch.clone)

    def loss(*batch: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return loss_of(*batch).clone()

    return loss
