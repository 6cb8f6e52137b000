"""Finds out whether a user's forward pass is random, and which of its lines draw.

    found = randomness(lambda: loss(batch))
    found.random, found.draws, found.generators

Two losses may agree by chance: stochastic depth at a small rate drops nothing in most passes. So the draws themselves
are watched, in two passes whose generators start from different seeds. A draw that starts from the same state in both
always gives the same numbers, as from a generator that forward seeds. A draw that happens in only one pass is not part
of a step, such as filling a table once. Some draws have no effect: OPT draws for every layer, even if its rate is zero.
If the losses agree, two more passes with the lowest and the highest numbers that could have been drawn decide that.
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
OF_HOST: dict[str, Callable[[], bytes]] = {  # and how to read the state of each
    "Python's random": lambda: pickle.dumps(random.getstate()),
    "NumPy's generator": lambda: pickle.dumps(numpy.random.get_state(legacy=False)),
}
Run = Callable[[], torch.Tensor]
"""A forward pass that returns its loss."""
Drawn = dict[Place | None, list[tuple[Any, bytes]]]
"""Line -> each of its draws from a torch generator: the operator, and the state before it."""


@dataclass(frozen=True)
class Randomness:
    random: bool
    draws: tuple[Place, ...] = ()
    generators: tuple[str, ...] = ()
    """Generators other than torch's; torch's too if the line is unknown."""


@dataclass
class Pass:
    loss: float = 0.0
    drawn: Drawn = field(default_factory=lambda: defaultdict(list))
    moved: dict[str, bytes] = field(default_factory=dict)
    """Generators of OF_HOST that were drawn from, with their final states."""


def randomness(run: Run) -> Randomness:
    """Look for randomness in `run`. The model must have run a pass before."""
    with seeded(0), sdpa_kernel(SDPBackend.MATH):  # other backends hide their dropout
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
    """An operator draws if it changes the state of a generator. Its tags say little: attention without dropout is
    marked as drawing, and Tensor.random_ is not."""

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
    """True if other random numbers would give another loss. Assumed for draws other than uniform and Bernoulli ones."""
    if any(operator not in (*UNIFORM, *COINS) for draws in drawn.values() for operator, _ in draws):
        return True
    return bool(drawn) and any(loss_with(run, drawn, highest) != loss for highest in (False, True))


def loss_with(run: Run, drawn: Drawn, highest: bool) -> float | None:
    try:
        with _Bounds(drawn, highest):
            return run().item()
    except Exception:  # whatever it is, the original numbers did not raise it
        return None


class _Bounds(_Draws):
    """Makes draws of the given lines return the lowest numbers that they can return, or the highest."""

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
    """Set the coins that can fall either way."""
    plain = func is aten.bernoulli.default or func is aten.bernoulli.out
    chance = args[0] if plain else args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    chance = torch.as_tensor(chance).expand_as(result)
    return result.masked_fill((chance > 0) & (chance < 1), float(highest))


def lines_that_move(stand: Callable[[], bytes], run: Run) -> list[Place]:
    """Return the lines that change a generator's state. Python traces each line before running it, so the one traced
    last is to blame."""
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
    """True for files of the standard library: above all random.py, which draws on behalf of its callers."""
    return file.startswith(STANDARD_LIBRARY) and "site-packages" not in file


@contextmanager
def tracing_lines(follow: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    before = sys.gettrace()  # of a debugger or a coverage tool
    sys.settrace(follow)
    try:
        yield
    finally:
        sys.settrace(before)


BEGINNINGS = {function.__code__ for function in (watched, loss_with, lines_that_move)}
"""Functions that begin a pass: frames outside them are not the user's."""
