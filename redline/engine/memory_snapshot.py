"""The memory of one step, block by block: when each was allocated and freed, what for, and by which line.

    profile = watch_memory(step, batch, module=model, optimizer=optimizer, device=device)
    profile.categories["activations"], profile.lines[0].file

On a GPU the source is the allocator's own history, which includes compiled code. On a CPU it is the dispatcher, which
sees the storages that operators return: scratch memory inside an operator and compiled code are invisible to it.

Categories: weights, buffers and optimizer state are known by their tensors, gradients by the moment autograd stores
them; activations are what the forward pass left for the backward pass; the rest is temporary.
"""

from __future__ import annotations

import bisect
import gc
import math
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from redline.core.profile import MemoryLine, MemoryProfile
from redline.engine.fit import free_memory
from redline.engine.profiling_frames import Frame, here, users_frame

MARK = "run_watched"  # this function is on the stack of every allocation by the training thread, and of no other
TIMELINE_POINTS = 400
SHOWN_LINES = 20
MOST_ENTRIES = 1_000_000  # of the allocator's history


@dataclass(frozen=True, kw_only=True)
class Block:
    key: int
    """Identifies the storage: the same for a tensor and its views."""
    size: int
    start: float
    """Seconds since the step began; minus infinity for blocks that were allocated before it."""
    end: float = math.inf
    frame: Frame | None = None
    backward: bool = False
    """Allocated by the backward pass."""


@dataclass
class Known:
    """What is known about tensors by name, from before the step and while it runs."""

    held: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    """Key -> category and module."""
    gradients: list[tuple[int, float, str | None]] = field(default_factory=list)
    """Key, moment and module of every gradient that autograd stored."""
    began: float = 0.0
    """When the step began; moments are seconds since then."""
    modules: list[tuple[float, str | None]] = field(default_factory=list)
    """(moment, the module that runs from then on); None: outside the model."""

    def module_at(self, moment: float) -> str | None:
        index = bisect.bisect_right(self.modules, moment, key=lambda change: change[0])
        return self.modules[index - 1][1] if index else None


# the anatomy of a list of blocks


def anatomy(
    blocks: list[Block], known: Known, *, source: str, peak_bytes: int | None = None, reserved_bytes: int | None = None
) -> MemoryProfile:
    """Break the peak down by category, module and line. `peak_bytes`: the allocator's count, which rounds sizes up; the
    difference is a category of its own."""
    moments = timeline_of(blocks)
    peak_moment, peak = max(moments, key=lambda moment: moment[1])
    alive = [block for block in blocks if block.start <= peak_moment < block.end]
    kinds = kinds_of(alive, known, backward_start(blocks))
    categories: dict[str, int] = defaultdict(int)
    modules: dict[str | None, int] = defaultdict(int)
    for block, (category, module) in zip(alive, kinds, strict=True):
        categories[category] += block.size
        modules[module] += block.size
    if peak_bytes is not None and peak_bytes > peak:
        categories["rounding"] = peak_bytes - peak
        modules[None] += peak_bytes - peak
    return MemoryProfile(
        source=source,
        peak_bytes=max(peak, peak_bytes or 0),
        peak_seconds=max(peak_moment, 0.0),
        start_bytes=sum(block.size for block in blocks if block.start == -math.inf),
        reserved_bytes=reserved_bytes,
        categories=_largest_first(categories),
        modules=_largest_first({name: size for name, size in modules.items() if name is not None}),
        elsewhere_bytes=modules[None],
        lines=lines_of(alive),
        timeline_seconds=tuple(max(moment, 0.0) for moment, _ in thin(moments)),
        timeline_bytes=tuple(size for _, size in thin(moments)),
    )


def timeline_of(blocks: Iterable[Block]) -> list[tuple[float, int]]:
    """Return (moment, bytes alive from then on), beginning with what was allocated before the step."""
    changes = [(block.start, block.size) for block in blocks]
    changes += [(block.end, -block.size) for block in blocks if block.end != math.inf]
    changes.sort(key=lambda change: (change[0], change[1]))  # at the same moment, frees come before allocations
    moments: list[tuple[float, int]] = []
    alive = 0
    for moment, size in changes:
        alive += size
        if moments and moments[-1][0] == moment:
            moments[-1] = moment, alive
        else:
            moments.append((moment, alive))
    return moments or [(0.0, 0)]


def thin(moments: list[tuple[float, int]], points: int = TIMELINE_POINTS) -> list[tuple[float, int]]:
    """Thin to few enough points to draw, keeping the fullest moment of each stretch, so that the peak survives."""
    if len(moments) <= points:
        return moments
    width = -(-len(moments) // points)
    return [max(moments[at : at + width], key=lambda moment: moment[1]) for at in range(0, len(moments), width)]


def backward_start(blocks: Iterable[Block]) -> float:
    return min((block.start for block in blocks if block.backward), default=math.inf)


def kinds_of(alive: Iterable[Block], known: Known, backward: float) -> Iterator[tuple[str, str | None]]:
    """Yield the category and module of each block."""
    stored: dict[int, list[tuple[float, str | None]]] = defaultdict(list)
    for key, moment, module in known.gradients:
        stored[key].append((moment, module))
    for block in alive:
        gradient = next((module for at, module in stored[block.key] if block.start <= at < block.end), ...)
        if block.start == -math.inf:
            yield known.held.get(block.key, ("other", None))
        elif gradient is not ...:
            yield "gradients", gradient
        elif not block.backward and block.start < backward <= block.end and backward != math.inf:
            yield "activations", known.module_at(block.start)
        else:
            yield "temporary", None if block.backward else known.module_at(block.start)


def lines_of(alive: Iterable[Block]) -> tuple[MemoryLine, ...]:
    sizes: dict[Frame, int] = defaultdict(int)
    for block in alive:
        if block.frame is not None:
            sizes[block.frame] += block.size
    ordered = sorted(sizes.items(), key=lambda item: -item[1])[:SHOWN_LINES]
    return tuple(
        MemoryLine(file=frame.file, line=frame.line, function=frame.function, bytes=size) for frame, size in ordered
    )


def _largest_first(sizes: dict[Any, int]) -> dict[Any, int]:
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


# watching a step


def watch_memory(
    step: Callable[[Any], Any],
    batch: Any,
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    named_modules: bool = True,
) -> MemoryProfile:
    """Profile the memory of one step. The optimizer's state must already exist. `named_modules`: False for compiled
    code, which gets no hooks."""
    key_of = _pointer if device.type == "cuda" else _storage
    if device.type == "cuda":
        settle(step, batch, device)
    known = Known(held=held_tensors(module, optimizer, batch, key_of))
    with noted_gradients(module, known, key_of), noted_modules(module if named_modules else None, known):
        if device.type == "cuda":
            return _watch_allocator(step, batch, known)
        return _watch_dispatcher(step, batch, module, optimizer, known)


def settle(step: Callable[[Any], Any], batch: Any, device: torch.device) -> None:
    """Release what earlier steps, uncompiled ones among them, have left in the allocator's cache. One more step then
    reserves what a step needs by itself."""
    free_memory(device)
    step(batch)
    torch.cuda.synchronize()


def run_watched(step: Callable[[Any], Any], batch: Any) -> None:
    """Run the step. This function's name is in every stack of this thread (see MARK)."""
    step(batch)


def held_tensors(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any, key_of: Callable[[torch.Tensor], int]
) -> dict[int, tuple[str, str | None]]:
    held: dict[int, tuple[str, str | None]] = {}
    owners = {id(parameter): name.rpartition(".")[0] for name, parameter in module.named_parameters()}
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            held[key_of(leaf)] = "batch", None
    for name, buffer in module.named_buffers():
        held[key_of(buffer)] = "buffers", name.rpartition(".")[0]
    for parameter in module.parameters():
        held[key_of(parameter)] = "weights", owners[id(parameter)]
    for owner, state in (optimizer.state if optimizer is not None else {}).items():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                held[key_of(value)] = "optimizer", owners.get(id(owner))
    return held


@contextmanager
def noted_gradients(module: nn.Module, known: Known, key_of: Callable[[torch.Tensor], int]) -> Iterator[None]:
    def note(parameter: torch.Tensor, name: str) -> None:
        if parameter.grad is not None:
            known.gradients.append((key_of(parameter.grad), time.time() - known.began, name.rpartition(".")[0]))

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(note, name=name))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def module_hooks(module: nn.Module | None, enter: Callable[[str], None], leave: Callable[[], None]) -> Iterator[None]:
    """Call enter(name) before the forward pass of every module in `module`, itself included, and leave() after it, even
    if it raises."""
    hooks: list[RemovableHandle] = []
    for name, each in () if module is None else module.named_modules():
        hooks.append(each.register_forward_pre_hook(lambda *_, name=name: enter(name)))
        hooks.append(each.register_forward_hook(lambda *_: leave(), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def noted_modules(module: nn.Module | None, known: Known) -> Iterator[None]:
    """Record which module runs from which moment on."""
    running: list[str] = []

    def change() -> None:
        known.modules.append((time.time() - known.began, running[-1] if running else None))

    def enter(name: str) -> None:
        running.append(name)
        change()

    def leave() -> None:
        running.pop()
        change()

    with module_hooks(module, enter, leave):
        yield


# on a CPU


class _Storages(TorchDispatchMode):
    """Keeps a block for every storage that an operator returns, until the storage is freed."""

    def __init__(self, began: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.began = began
        self.alive: dict[int, Block] = {}
        self.ended: list[Block] = []

    def hold(self, tensor: torch.Tensor) -> None:
        self._note(tensor, Block(key=_storage(tensor), size=tensor.untyped_storage().nbytes(), start=-math.inf))

    def _note(self, tensor: torch.Tensor, block: Block) -> None:
        if block.key not in self.alive:
            self.alive[block.key] = block
            weakref.finalize(tensor.untyped_storage(), self._end, block.key).atexit = False

    def _end(self, key: int) -> None:
        self.ended.append(replace(self.alive.pop(key), end=time.time() - self.began))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in self.alive:
                block = Block(
                    key=_storage(leaf),
                    size=leaf.untyped_storage().nbytes(),
                    start=time.time() - self.began,
                    frame=here(),
                    backward=torch._C._current_graph_task_id() != -1,
                )
                self._note(leaf, block)
        return result


def _watch_dispatcher(
    step: Callable[[Any], Any],
    batch: Any,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    known: Known,
) -> MemoryProfile:
    known.began = time.time()
    watcher = _Storages(known.began)
    state = (
        value for values in (optimizer.state if optimizer is not None else {}).values() for value in values.values()
    )
    for leaf in tree_leaves((list(module.parameters()), list(module.buffers()), list(state), batch)):
        if isinstance(leaf, torch.Tensor):
            watcher.hold(leaf)
    with watcher:
        run_watched(step, batch)
    blocks = [*watcher.ended, *watcher.alive.values()]
    return anatomy(blocks, known, source="storages that operators returned, as the dispatcher saw them")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


# on a GPU


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _watch_allocator(step: Callable[[Any], Any], batch: Any, known: Known) -> MemoryProfile:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(
        enabled="all", context="all", stacks="python", max_entries=MOST_ENTRIES, clear_history=True
    )
    try:
        held = held_blocks(torch.cuda.memory._snapshot())
        torch.cuda.reset_peak_memory_stats()
        known.began = time.time()  # only now: the preparation above takes longer than a step
        run_watched(step, batch)
        torch.cuda.synchronize()
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    blocks = blocks_of_history(history, held, known.began)
    return anatomy(blocks, known, source="the CUDA allocator's history", peak_bytes=peak, reserved_bytes=reserved)


def held_blocks(snapshot: dict[str, Any]) -> list[Block]:
    """Return the blocks that are allocated at the moment of a snapshot."""
    return [
        Block(key=block["address"], size=block["size"], start=-math.inf)
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]


def blocks_of_history(history: Iterable[dict[str, Any]], held: Iterable[Block], began: float) -> list[Block]:
    """Turn the allocator's entries, in order, into blocks with a start and an end."""
    alive = {block.key: block for block in held}
    ended: list[Block] = []
    moment = -math.inf
    for entry in history:
        # Entries within one microsecond keep their order.
        moment = max(entry["time_us"] / 1e6 - began, moment + 1e-9)
        if entry["action"] == "alloc":
            frames = [Frame(each["filename"], each["line"], each["name"]) for each in entry.get("frames", ())]
            alive[entry["addr"]] = Block(
                key=entry["addr"],
                size=entry["size"],
                start=moment,
                frame=users_frame(frames),
                # Stacks of autograd's thread do not contain our function.
                backward=not any(frame.function == MARK for frame in frames),
            )
        elif entry["action"] == "free_completed" and entry["addr"] in alive:
            ended.append(replace(alive.pop(entry["addr"]), end=moment))
    return [*ended, *alive.values()]
