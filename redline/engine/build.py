"""From a plan to something that trains. The order in which optimisations are applied is written here and nowhere else.

training = build(workload, plan, micro_batch=16, tokens=path, device=torch.device("cuda"))
loss = training.step(next(training.batches))
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from redline.core.plan import Plan
from redline.core.workload import Workload
from redline.data.batches import TokenBatches, stream_batches
from redline.engine.step import DTYPES, LossOf, TrainStep
from redline.model.gpt import GPT, initialise
from redline.model.loss import PIECES, head_loss, next_token_loss
from redline.optim import build_optimizer, reset_optimizer, warm_up


@dataclass
class Training:
    """A model on its way: everything a loop needs, and the way back to step 0."""

    workload: Workload
    model: GPT
    step: TrainStep
    batches: Generator[torch.Tensor, None, None]

    def restore(self) -> None:
        """Initial weights and an empty optimizer, in place: compiled code and fused kernels keep their tensors."""
        initialise(self.model, self.workload.seed)
        reset_optimizer(self.step.optimizer)
        self.step.optimizer.zero_grad(set_to_none=True)
        self.step.reset()

    def close(self) -> None:
        self.batches.close()


def build(
    workload: Workload, plan: Plan, *, micro_batch: int, tokens: Path, device: torch.device, chunk: int | None = None
) -> Training:
    """Model, step and an endless stream of batches: what a measurement needs."""
    step = build_step(workload, plan, device=device, chunk=chunk)
    # The loader comes last: its workers start when the first batch is asked for.
    batches = TokenBatches(path=tokens, micro_batch=micro_batch, sequence=workload.shape.sequence, seed=workload.seed)
    return Training(workload, step.model, step, stream_batches(batches, device, plan.loader_workers))


def build_step(
    workload: Workload,
    plan: Plan,
    *,
    device: torch.device,
    chunk: int | None = None,
    learning_rate: Callable[[int], float] | None = None,
) -> TrainStep:
    """The step that is timed and the step that trains. `learning_rate` is a function of the steps taken; without one
    it warms up and stays."""
    # 1. Process switches first: they decide which kernels everything after them picks.
    switch_process(plan)
    # 2. The model at its final shape, on the device, before anything holds on to its parameters.
    model = build_model(workload, plan, device)
    # 3. Compile wraps forward and loss together, so that the loss is fused into the head's epilogue.
    loss_of = compile_loss(plain_loss(model, plan)) if plan.compile else plain_loss(model, plan)
    # 4. The optimizer gets the parameters themselves, not the compiled wrapper.
    optimizer = build_optimizer(
        plan.optimizer, model, learning_rate=workload.learning_rate, weight_decay=workload.weight_decay
    )
    # 5. The step reads precision, scaling and synchronisation off the plan.
    warming = partial(warm_up, peak=workload.learning_rate, warmup_steps=workload.warmup_steps)
    return TrainStep(
        model=model,
        loss_of=loss_of,
        optimizer=optimizer,
        plan=plan,
        learning_rate=learning_rate or warming,
        clip_norm=workload.clip_norm,
        chunk=chunk,
    )


def switch_process(plan: Plan) -> None:
    """Flags that belong to the process. One measurement, one process: nothing leaks into another row."""
    torch.set_float32_matmul_precision(plan.matmul_precision)
    if plan.attention != "naive":
        pin_attention(plan.attention)


def pin_attention(backend: str) -> None:
    """Exactly one SDPA backend stays on: an unpinned call may pick another kernel than the row is named after."""
    torch.backends.cuda.enable_flash_sdp(backend == "flash")
    torch.backends.cuda.enable_cudnn_sdp(backend == "cudnn")
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)


def build_model(workload: Workload, plan: Plan, device: torch.device) -> GPT:
    with device:
        model = GPT(
            workload.shape,
            attention=plan.attention,
            tied=plan.tied,
            vocab_rows=plan.vocab_rows(workload.shape.vocab),
            checkpointing=plan.checkpointing,
        )
    initialise(model, workload.seed)
    return model


def plain_loss(model: GPT, plan: Plan) -> LossOf:
    if plan.loss == "full":
        return lambda inputs, targets: next_token_loss(model(inputs), targets)
    loss_of_head = partial(
        head_loss, vocab=model.shape.vocab, pieces=PIECES[plan.loss], dtype=DTYPES.get(plan.autocast or "")
    )
    return lambda inputs, targets: loss_of_head(model.features(inputs), model.lm_head.weight, targets)


def compile_loss(loss_of: LossOf) -> LossOf:
    # One shape per process, so dynamic shapes would only cost speed. Inductor's one-pass softmax rescales its running
    # sum at every step; over a row that stays in the L2 cache two passes are faster (docs/speed-log.md).
    return torch.compile(loss_of, dynamic=False, options={"online_softmax": False})
