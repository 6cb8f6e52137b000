"""The bytes of an eager step against what torch's operators take and give, watched one by one on the meta device.

A view moves nothing and is left out; everything else is taken to read its tensors once and to write its outputs once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.model.gpt import GPT
from redline.model.loss import next_token_loss
from redline.predict.operations import CONTRACTION, OPTIMIZER, operations

SHAPE = Shape(layers=6, heads=8, d_model=512, d_ff=2048, vocab=5003, sequence=512)
MATMULS = ("aten.mm", "aten.addmm", "aten.bmm")
B = 4


class Traffic(TorchDispatchMode):
    """Bytes that each operator's tensors hold, views and matmuls apart."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)
        if not func.is_view and name not in ("aten.detach", "aten._unsafe_view", "aten.empty", "aten.t"):
            self.moved[name] += size_of(tree_leaves((args, kwargs or {}))) + size_of(tree_leaves(out))
        return out


def size_of(values: Iterable[Any]) -> int:
    """Expanded dimensions are read from one place: the mask's rows for all heads, a gradient of ones."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return sum(tensor.untyped_storage().nbytes() if 0 in tensor.stride() else tensor.nbytes for tensor in tensors)


def traffic_of(plan: Plan) -> Counter[str]:
    with torch.device("meta"):
        model = GPT(SHAPE, attention=plan.attention, tied=plan.tied)
        tokens = torch.zeros(B, SHAPE.sequence, dtype=torch.int64)
    with Traffic() as seen:
        next_token_loss(model(tokens), tokens).backward()
    return seen.moved


# Ours -> theirs, and how often a kernel moves what the operator's arguments hold once.
SAME = {
    ("softmax",): (("aten._softmax", "aten._softmax_backward_data"), 1),
    ("scale",): (("aten.div",), 1),
    ("mask",): (("aten.masked_fill",), 2),  # it clones inside, then fills
    ("head copies",): (("aten.clone",), 1),
    ("activation",): (("aten.gelu", "aten.gelu_backward"), 1),
    ("q/k/v gradient stack",): (("aten.cat",), 1),
    ("residual",): (("aten.add",), 1),
    ("bias gradients",): (("aten.sum",), 1),
    ("loss",): (("aten._log_softmax", "aten._log_softmax_backward_data"), 1),
    ("loss fill",): (("aten.nll_loss_backward",), 0.5),  # it takes the logits for their shape alone
    ("scores", "scores dgrad", "scores wgrad", "mix", "mix dgrad", "mix wgrad"): (("aten.bmm",), 1),
}


@pytest.fixture(scope="module")
def traffic() -> Counter[str]:
    return traffic_of(Plan())


@pytest.mark.parametrize("ours", SAME, ids=lambda names: names[0])
def test_bytes_are_those_of_torchs_operators(traffic: Counter[str], ours: tuple[str, ...]) -> None:
    """Within 4 %: theirs also add the positions, sum their gradient up and read the mask."""
    theirs, times = SAME[ours]
    listed = sum(op.bytes for op in operations(SHAPE, Plan(), micro_batch=B) if op.name in ours)
    assert listed == pytest.approx(times * sum(traffic[name] for name in theirs), rel=0.04)


def test_matmuls_move_what_torchs_do(traffic: Counter[str]) -> None:
    listed = operations(SHAPE, Plan(), micro_batch=B)
    ours = sum(op.bytes for op in listed if op.group == CONTRACTION)
    assert ours == pytest.approx(sum(traffic[name] for name in MATMULS), rel=0.01)


@pytest.mark.parametrize("tied", [False, True])
def test_the_whole_step_is_what_torch_moves(tied: bool) -> None:
    """Beyond the operators' own tensors a kernel clones for the mask and reads twice for a norm's gains; the loss
    takes all logits twice and looks one of them up."""
    seen = traffic_of(Plan(tied=tied))
    theirs = sum(seen.values()) + seen["aten.masked_fill"] - seen["aten.nll_loss_forward"]
    theirs -= seen["aten.nll_loss_backward"] // 2
    theirs += seen["aten.native_layer_norm_backward"] * 2 // 3
    ours = sum(op.bytes for op in operations(SHAPE, Plan(tied=tied), micro_batch=B) if op.group != OPTIMIZER)
    assert ours == pytest.approx(theirs, rel=0.02)
