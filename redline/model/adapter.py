"""What the engine requires of a model, whoever wrote it. One adapter per kind of source; `adapter_of` returns it.

    adapter = adapter_of(workload)
    model = adapter.build(plan, device);  loss_of = adapter.loss_of(model, plan)

A plan acts on a model from outside: an adapter defines how each plan field is realised for its models. What cannot be
done from outside is listed in `Workload.cannot` with the reason, so that no plan requires it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from redline.core.plan import PIECES, Plan
from redline.core.workload import Workload
from redline.model.fp8 import narrow_layers
from redline.model.gpt import GPT, draw, fill_buffers, gelu_by_sigmoid, initialise, unpadded
from redline.model.loss import head_loss, next_token_loss
from redline.model.stage import Stage
from redline.model.tuned import tune_layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from redline.core.cut import Cut

# Where torchao is installed, transformers imports it, and it logs which kernels it did not find. None is used here.
CHATTY = ("torchao", "torch.utils._pytree")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

LossOf = Callable[..., torch.Tensor]
"""Returns the mean loss of a batch, whose parts are passed as the adapter's `arguments`."""


class Adapter(ABC):
    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    @abstractmethod
    def build(self, plan: Plan, device: torch.device) -> nn.Module:
        """Return the model at its final shape, on the device, with its initial weights."""

    def build_unplaced(self, plan: Plan) -> nn.Module:
        """Return the same model with nothing on the device yet, for callers that cut it first: whole on the host, or on
        'meta', where `fill_buffers` and `draw` fill in its values later."""
        return self.build(plan, torch.device("cpu"))

    def build_stage(self, plan: Plan, layers: range) -> nn.Module:
        """Return only these blocks, on 'meta', with what precedes the first block and what follows the last."""
        raise AssertionError(f"{type(self).__name__} cuts no model into stages")

    @abstractmethod
    def fill_buffers(self, model: nn.Module) -> None:
        """Reset the buffers in place: for a model that was built on 'meta', or one that returns to step 0."""

    @abstractmethod
    def draw(self, model: nn.Module, name: str, whole: torch.Tensor) -> None:
        """Write the initial weights of one parameter into a tensor of its full size."""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the equal parts that run in sequence, which are cut, gathered and compiled one by one."""
        return []

    def cut(self, model: nn.Module, mesh: DeviceMesh) -> dict[str, Cut]:
        """Reduce every layer to this rank's part, in place, before the model has its weights. Return a Cut for each
        parameter that was cut."""
        raise AssertionError(f"nobody knows how {type(self).__name__}'s layers are cut")

    @abstractmethod
    def restore(self, model: nn.Module) -> None:
        """Restore the initial weights, in place: compiled code and fused kernels keep their tensors."""

    @abstractmethod
    def loss_of(self, model: nn.Module, plan: Plan) -> LossOf:
        """Return forward pass and loss as one function, which is what gets compiled."""

    def unpadded(self, model: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of a parameter, or of its gradient, that the model has without padding."""
        return tensor

    def evaluating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context for a validation or a sample, with dropout switched off. The built-in model has no dropout."""
        return nullcontext()

    def arguments(self, batch: Any) -> tuple[Any, ...]:
        """Return a batch as the arguments of `loss_of`: inputs and targets of a [2, B, T] tensor."""
        return batch[0], batch[1]

    def pieces(self, batch: Any, size: int) -> list[tuple[Any, float]]:
        """Split a batch into pieces of `size` sequences, each with its share of the whole."""
        return [(piece, piece.size(1) / batch.size(1)) for piece in batch.split(size, dim=1)]

    def items(self, batch: Any) -> int:
        """Return the number of items that a rate counts: the tokens of a batch."""
        return int(batch[0].numel())

    def state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return what training changes besides the parameters, which a checkpoint must hold too."""
        return {}


class BuiltIn(Adapter):
    """GPT-2 as model/gpt.py writes it."""

    def build(self, plan: Plan, device: torch.device) -> GPT:
        model = self._uninitialised(plan, device)
        initialise(model, self.workload.seed)
        return model

    def build_unplaced(self, plan: Plan) -> GPT:
        return self._uninitialised(plan, torch.device("meta"))

    def build_stage(self, plan: Plan, layers: range) -> Stage:
        stage = self._uninitialised(plan, torch.device("meta"), partial(Stage, layers=layers))
        assert isinstance(stage, Stage)
        return stage

    def fill_buffers(self, model: nn.Module) -> None:
        assert isinstance(model, GPT)
        fill_buffers(model)

    def draw(self, model: nn.Module, name: str, whole: torch.Tensor) -> None:
        assert isinstance(model, GPT)
        draw(model, name, whole, self.workload.seed)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, GPT)
        return list(model.h)

    def cut(self, model: nn.Module, mesh: DeviceMesh) -> dict[str, Cut]:
        from redline.model.tensor_parallel import cut_gpt  # for ranks only

        assert isinstance(model, GPT)
        return cut_gpt(model, mesh)

    def _uninitialised(self, plan: Plan, device: torch.device, make: Callable[..., GPT] = GPT) -> GPT:
        shape = self.workload.decoder
        with device:
            model = make(
                shape,
                attention=plan.attention if plan.packed_attention == "none" else f"packed-{plan.packed_attention}",
                tied=plan.tied,
                vocab_rows=plan.vocab_rows(shape.vocab),
                checkpointing=plan.checkpointing,
                residual=DTYPES.get(plan.residual, torch.float32),
                gelu=plan.gelu,
                fused=DTYPES.get(plan.autocast or "", torch.float32) if plan.backward == "fused" else None,
            )
        if plan.narrow_linears and not plan.narrows_what_pays:
            narrow_layers(model.h, DTYPES[plan.autocast or ""])
        elif plan.tuned_matmuls and plan.autocast is not None:
            narrow, mlp = plan.narrows_what_pays, plan.narrows_mlps
            tune_layers(model.h, DTYPES[plan.autocast], fused=plan.fused_matmuls, narrow=narrow, narrow_mlp=mlp)
        return model.to(
            DTYPES.get(plan.weights, torch.float32)
        )  # before the weights are drawn, as `restore` draws them

    def restore(self, model: nn.Module) -> None:
        assert isinstance(model, GPT)
        initialise(model, self.workload.seed)

    def loss_of(self, model: nn.Module, plan: Plan) -> LossOf:
        assert isinstance(model, GPT)
        if plan.tensor_parallel:
            from redline.model.tensor_parallel import vocabulary_loss

            return partial(vocabulary_loss, model)
        if plan.loss == "full":
            return lambda inputs, targets: next_token_loss(model(inputs), targets)
        loss_of_head = fused_head(plan, model.shape.vocab)
        return lambda inputs, targets: loss_of_head(model.features(inputs), model.lm_head.weight, targets)

    def unpadded(self, model: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
        assert isinstance(model, GPT)
        return unpadded(model, name, tensor)


def fused_head(plan: Plan, vocab: int) -> LossOf:
    """Return the loss as a function of features, the head's weight and targets, for a plan whose loss is not 'full'."""
    dtype = DTYPES.get(plan.autocast or "")
    tuned = plan.tuned_matmuls and plan.autocast is not None
    pieces = PIECES[plan.loss]
    return partial(head_loss, vocab=vocab, pieces=pieces, dtype=dtype, fp8=plan.narrow_head, tuned=tuned)


class SigmoidGelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu_by_sigmoid(x)


def exchange_gelus(model: nn.Module, is_gelu: Callable[[nn.Module], bool]) -> None:
    """Replace every module that `is_gelu` accepts (a tanh GELU) by a SigmoidGelu."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_gelu(child):
                setattr(parent, name, SigmoidGelu())


@contextmanager
def muted(*loggers: str) -> Iterator[None]:
    """Let these loggers log only errors, and restore their levels afterwards."""
    levels = {name: logging.getLogger(name).level for name in loggers}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def adapter_of(workload: Workload) -> Adapter:
    if workload.source.kind == "python":
        from redline.model.python_adapter import PythonAdapter  # only this kind needs it

        return PythonAdapter(workload)
    if workload.source.kind == "huggingface":
        with muted(*CHATTY):
            from redline.model.transformers_adapter import TransformersAdapter  # transformers takes a second to import

        return TransformersAdapter(workload)
    return BuiltIn(workload)
