"""Whether a user's forward pass is random, and which lines draw.

    found = randomness(lambda: loss(batch))
    found.random, found.draws, found.generators

Two losses may agree by chance: stochastic depth at a small rate drops nothing in most passes. So the draws themselves
are watched, in two passes whose generators start elsewhere. One that begins from the same state in both gives the same
numbers for ever, as from a generator that forward seeds; one that is made in one pass only belongs to no step, as a
table that is filled once. Some draws decide nothing: OPT draws for every layer, also where its rate is zero. Whether
one does is seen with the lowest and the highest numbers that it could have given.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from redline.core.generators import seed_generators, seeded
from redline.core.traced import Place
from redline.core.user_code import STANDARD_LIBRARY
from redline.engine.inspect_trace import place_in
from redline.engine.profiling_frames import is_users

aten = torch.ops.aten
UNIFORM = (aten.rand, aten.rand_like, aten.uniform, aten.uniform_)
COINS = (aten.bernoulli, aten.bernoulli_)
TORCH = "torch's generator"
OF_HOST: dict[str, Callable[[], bytes]] = {  # and where each stands
    "Python's random": lambda: pickle.dumps(random.getstate()),
    "NumPy's generator": lambda: pickle.dumps(numpy.random.get_state(legacy=False)),
}
Run = Callable[[], torch.Tensor]
"""A forward pass, which gives its loss."""
Drawn = dict[Place | None, list[tuple[Any, bytes]]]
"""Lines, and each time that they drew from a generator of torch's: with which operator, and where it stood."""


@dataclass(frozen=True)
class Randomness:
    random: bool
    draws: tuple[Place, ...] = ()
    generators: tuple[str, ...] = ()
    """That are not torch's, or torch's where no line is known."""


@dataclass
class Pass:
    loss: float = 0.0
    drawn: Drawn = field(default_factory=lambda: defaultdict(list))
    moved: dict[str, bytes] = field(default_factory=dict)
    """Generators of OF_HOST that were drawn from, and where they stood in the end."""


def randomness(run: Run) -> Randomness:
    """Of a model that went through a pass before."""
    with seeded(0), sdpa_kernel(SDPBackend.MATH):  # others hide what they drop
        first, second = watched(run, seed=0), watched(run, seed=1)
        drawn = {place: draws for place, draws in first.drawn.items() if second.drawn.get(place, draws) != draws}
        others = [name for name, state in first.moved.items() if second.moved.get(name, state) != state]
        if first.loss == second.loss and not others and not decide(run, drawn, first.loss):
            return Randomness(random=False)
        lines = [*drawn, *(line for name in others for line in lines_that_move(OF_HOST[name], run))]
    nowhere = [TORCH] if None in drawn else []
    return Randomness(True, tuple(dict.fromkeys(filter(None, lines))), (*nowhere, *others))


def watched(run: Run, seed: int) -> Pass:
    seed_generators(seed)
    before = {name: stand() for name, stand in OF_HOST.items()}
    found = Pass()
    with _Draws(found):
        found.loss = run().item()
    after = {name: stand() for name, stand in OF_HOST.items()}
    found.moved = {name: state for name, state in after.items() if state != before[name]}
    return found


class _Draws(TorchDispatchMode):
    """An operator draws when a generator stands elsewhere after it: its name says little, as attention without dropout
    is marked as drawing and Tensor.random_ is not."""

    def __init__(self, found: Pass) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        generator = next((each for each in given if isinstance(each, torch.Generator)), torch.default_generator)
        before = generator.get_state()
        result = func(*args, **(kwargs or {}))
        if not torch.equal(before, generator.get_state()):
            self.drew(func, args, kwargs or {}, before, result)
        return result

    def drew(self, func: Any, args: Any, kwargs: Any, before: torch.Tensor, result: torch.Tensor) -> None:
        self.found.drawn[drawing_line()].append((func.overloadpacket, before.numpy().tobytes()))


def drawing_line() -> Place | None:
    return place_in(sys._getframe(1), BEGINNINGS)


def decide(run: Run, drawn: Drawn, loss: float) -> bool:
    """Whether other numbers would have given another loss. Of noise that is taken for granted."""
    if any(operator not in (*UNIFORM, *COINS) for draws in drawn.values() for operator, _ in draws):
        return True
    return bool(drawn) and any(loss_with(run, drawn, highest) != loss for highest in (False, True))


def loss_with(run: Run, drawn: Drawn, highest: bool) -> float | None:
    try:
        with _Bounds(drawn, highest):
            return run().item()
    except Exception:  # whatever it was: with the numbers of before there was none
        return None


class _Bounds(_Draws):
    """Draws of these lines give the lowest numbers that they can give, or the highest."""

    def __init__(self, drawn: Drawn, highest: bool) -> None:
        super().__init__(Pass())
        self.drawn, self.highest = drawn, highest

    def drew(self, func: Any, args: Any, kwargs: Any, before: torch.Tensor, result: torch.Tensor) -> None:
        if drawing_line() in self.drawn:
            bound = coins if func.overloadpacket in COINS else uniform
            result.copy_(bound(func, args, kwargs, result, self.highest))


def uniform(func: Any, args: Any, kwargs: Any, result: torch.Tensor, highest: bool) -> torch.Tensor:
    of_range = func.overloadpacket in (aten.uniform, aten.uniform_)
    start, end = (*args[1:3], *(0.0, 1.0)[len(args) - 1 :]) if of_range else (0.0, 1.0)
    below = torch.full_like(result, end).nextafter(torch.full_like(result, start))
    return below if highest else torch.full_like(result, start)


def coins(func: Any, args: Any, kwargs: Any, result: torch.Tensor, highest: bool) -> torch.Tensor:
    """Those that can fall either way."""
    plain = func is aten.bernoulli.default or func is aten.bernoulli.out
    chance = args[0] if plain else args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    chance = torch.as_tensor(chance).expand_as(result)
    return result.masked_fill((chance > 0) & (chance < 1), float(highest))


def lines_that_move(stand: Callable[[], bytes], run: Run) -> list[Place]:
    """Lines after which a generator stands elsewhere. Python tells of every line before it runs it, so the one that was
    told of last is to blame."""
    found: list[Place] = []
    state, running = stand(), None

    def follow(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal state, running
        if not is_users(file := frame.f_code.co_filename) or is_standard(file):
            return None
        if (now := stand()) != state:
            found.extend([running] if running is not None else [])
            state = now
        if event != "call":
            running = place_in(frame if event == "line" else frame.f_back, BEGINNINGS)
        return follow

    with tracing_lines(follow):
        run()
    return found


def is_standard(file: str) -> bool:
    """random.py above all, whose lines draw for others."""
    return file.startswith(STANDARD_LIBRARY) and "site-packages" not in file


@contextmanager
def tracing_lines(follow: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    before = sys.gettrace()  # a debugger's, or that of whoever measures coverage
    sys.settrace(follow)
    try:
        yield
    finally:
        sys.settrace(before)


BEGINNINGS = {function.__code__ for function in (watched, loss_with, lines_that_move)}
"""Of a pass."""
