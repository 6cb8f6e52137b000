"""Watches one pass of a user's model: its matmuls and its attention, with their lines.

    with tracing(model) as trace:
        loss(batch)
    trace.products, trace.attention, trace.sdpa, trace.embedded

The dispatcher sees every operator, Python calls show where scaled_dot_product_attention begins and ends, and the stack
gives the line. Only the forward pass is listed: what the backward pass computes follows from it.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from redline.core.traced import Attention, Place
from redline.core.user_code import PACKAGE
from redline.engine.memory_snapshot import module_hooks
from redline.engine.profiling_frames import is_users

aten = torch.ops.aten
WEIGHTED, BATCHED = {aten.mm: 0, aten.addmm: 1}, {aten.bmm: 0, aten.baddbmm: 1}  # position of the left matrix
SDPA = F.scaled_dot_product_attention
SOFTMAXES = (aten._softmax, aten._safe_softmax)


@dataclass(frozen=True)
class Seen:
    """A matmul, or a convolution as a matmul, as it was called."""

    module: str
    kind: str
    m: int
    n: int
    k: int
    batch: int
    area: int
    place: Place | None


@dataclass
class Trace:
    model: nn.Module
    products: list[Seen] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)
    embedded: dict[str, Place] = field(default_factory=dict)
    """Modules that looked up embedding rows, and the line that called them first."""
    sdpa: bool = False
    sdpa_calls: list[Place] = field(default_factory=list)
    sdpa_drops: bool = False
    """True if a call had a dropout_p above zero."""
    gelu_calls: list[Place] = field(default_factory=list)
    """Calls of F.gelu with approximate='tanh', outside nn.GELU."""
    inside_sdpa: int = 0
    modules: list[str] = field(default_factory=list)
    """Names of the modules that are running, the innermost last."""
    scores: tuple[int, Place | None] | None = None
    """Number of elements in the result of the last batched matmul, and its line."""
    weights: tuple[int, Place | None, bool] | None = None
    """Elements in a softmax over such scores, the scores' line, and whether the softmax is zero above the diagonal."""


@contextmanager
def tracing(model: nn.Module) -> Iterator[Trace]:
    trace = Trace(model)

    def leave() -> None:  # returns None: a hook's result would replace the module's output
        trace.modules.pop()

    with module_hooks(model, trace.modules.append, leave), _calls_of_torch(trace), _Calls(trace), _Operators(trace):
        yield trace


def place() -> Place | None:
    """Return the innermost line outside torch and redline: the user's, or that of a package the model comes from."""
    return place_in(sys._getframe(1))


def place_in(frame: FrameType | None, beyond: Container[CodeType] = ()) -> Place | None:
    """Like `place`, from a frame outwards. `beyond`: code of redline's functions that call the user's code, where the
    search ends, since their callers do not matter."""
    while frame is not None and frame.f_code not in beyond:
        file = frame.f_code.co_filename
        if is_users(file) and not file.startswith(PACKAGE):
            return Place(file=file, line=frame.f_lineno)
        frame = frame.f_back
    return None


@contextmanager
def _calls_of_torch(trace: Trace) -> Iterator[None]:
    """Catch SDPA calls from torch's own functions, above all multi_head_attention_forward, which no mode sees."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _in_sdpa(trace, SDPA, args, kwargs)

    F.scaled_dot_product_attention = call
    try:
        yield
    finally:
        F.scaled_dot_product_attention = SDPA


def _in_sdpa(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    trace.sdpa = True
    trace.sdpa_drops |= kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0  # after q, k, v and the mask
    if not trace.inside_sdpa and (where := place()) is not None:
        trace.sdpa_calls.append(where)
    trace.inside_sdpa += 1
    try:
        return func(*args, **kwargs)
    finally:
        trace.inside_sdpa -= 1


class _Calls(TorchFunctionMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not SDPA:
            return func(*args, **(kwargs or {}))
        return _in_sdpa(self.trace, func, args, kwargs or {})


class _Operators(TorchDispatchMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() == -1:  # not in a backward pass
            look(self.trace, func, args, kwargs or {}, result)
        return result


def look(trace: Trace, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    operator = func.overloadpacket
    if operator in WEIGHTED:
        _product(trace, "linear", *args[WEIGHTED[operator] :][:2])
    elif operator in BATCHED:
        left, right = args[BATCHED[operator] :][:2]
        _product(trace, "product", left, right)
        _attention(trace, left, result)
    elif operator is aten.mkldnn_rnn_layer:
        _recurrent(trace, *args[:3])
    elif operator is aten.convolution:
        _convolution(trace, args, result)
    elif operator is aten.embedding and trace.modules and (where := place()) is not None:
        trace.embedded.setdefault(trace.modules[-1], where)
    elif operator in SOFTMAXES:
        _softmax(trace, args[0], result)
    elif operator is aten.gelu and kwargs.get("approximate") == "tanh":
        _gelu(trace)


def _product(trace: Trace, kind: str, left: torch.Tensor, right: torch.Tensor) -> None:
    (m, k), n = left.shape[-2:], right.size(-1)
    batch = left.size(0) if left.dim() == 3 else 1
    _note(trace, kind, m, n, k, batch)


def _recurrent(trace: Trace, rows: torch.Tensor, of_input: torch.Tensor, of_state: torch.Tensor) -> None:
    """Note a layer in one direction as torch's own loop runs it: the inputs at once, the state at each step."""
    steps, samples, width = rows.shape
    _note(trace, "linear", steps * samples, of_input.size(0), width, 1)
    for _ in range(steps):
        _note(trace, "linear", samples, of_state.size(0), of_state.size(1), 1)


def _convolution(trace: Trace, args: Any, result: torch.Tensor) -> None:
    """Note a convolution as the matmul that it is: every place of the output with every weight of its group."""
    weight, groups = args[1], args[8]
    if args[6]:
        return  # transposed: another matmul, and a rare one
    places = result.numel() // result.size(1)
    area = weight[0, 0].numel()
    _note(trace, "convolution", places, result.size(1) // groups, weight[0].numel(), groups, area)


def _note(trace: Trace, kind: str, m: int, n: int, k: int, batch: int, area: int = 1) -> None:
    module = trace.modules[-1] if trace.modules else ""
    trace.products.append(Seen(module, kind, m, n, k, batch, area, place()))


def _attention(trace: Trace, left: torch.Tensor, result: torch.Tensor) -> None:
    """Note attention if the left matrix of a batched matmul is as large as a softmax of an earlier one's result."""
    weights = trace.weights
    if weights is not None and left.numel() == weights[0]:
        trace.attention.append(
            Attention(place=_between(weights[1], place()), causal=weights[2], module=_library_module(trace))
        )
    trace.weights, trace.scores = None, (result.numel(), place())


def _softmax(trace: Trace, scores: torch.Tensor, weights: torch.Tensor) -> None:
    if trace.scores is None or scores.numel() != trace.scores[0] or trace.inside_sdpa:
        return
    rows, columns = weights.shape[-2:]
    causal = rows == columns and rows > 1 and not bool(weights.triu(1).any())
    trace.weights = (weights.numel(), trace.scores[1], causal)


def _gelu(trace: Trace) -> None:
    of_module = trace.modules and isinstance(trace.model.get_submodule(trace.modules[-1]), nn.GELU)
    if not of_module and (where := place()) is not None:
        trace.gelu_calls.append(where)


def _between(first: Place | None, last: Place | None) -> Place:
    if first is None or last is None:
        return first or last or Place(file="?", line=0)
    if first.file != last.file or last.line < first.line:
        return last
    return Place(file=first.file, line=first.line, last=last.line)


class FirstNan(TorchDispatchMode):
    """Finds the line of the first operator in a pass that makes a NaN: `.place`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place: Place | None = None
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # What uninitialised memory holds means nothing.
        if not self.found and "empty" not in str(func.overloadpacket) and any(map(has_nan, tree_leaves(result))):
            self.found, self.place = True, place()
        return result


def has_nan(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isnan().any())


def _library_module(trace: Trace) -> str | None:
    """Name torch's own attention module if it is running: it does not call SDPA when its weights are requested."""
    names = [name for name in trace.modules if isinstance(trace.model.get_submodule(name), nn.MultiheadAttention)]
    return "MultiheadAttention" if names else None
