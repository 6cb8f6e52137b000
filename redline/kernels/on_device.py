"""Launches kernels on the device that holds their operands.

@on_its_device
def launch(logits, targets, vocab): ...

torch's operators do so by themselves. Triton, cuDNN's frontend, cuBLASLt and CuTe launch on the current device, which
is another one in a process that trains on 'cuda:1' without torch.cuda.set_device. redline's own ranks set theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")


def on_its_device(run: Callable[Given, Result]) -> Callable[Given, Result]:
    """Run a function with the device of its first tensor as the current one. Most calls find it so, at the cost of a
    comparison: a step makes hundreds of them while the GPU waits for nobody."""

    @functools.wraps(run)
    def there(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        index = next(arg for arg in args if isinstance(arg, torch.Tensor)).get_device()
        if index < 0 or index == torch.cuda.current_device():
            return run(*args, **kwargs)
        with torch.cuda.device(index):
            return run(*args, **kwargs)

    return there
