"""Measures the speed of a user's own training loop, with three lines in it and without slowing it down.

    meter = redline.Meter(tokens_per_step=16 * 1024, model=model)
    for batch in meter.data(loader):
        ...                                      # the loop as it was
        meter.step()
    print(meter)

Nothing waits for the device until a summary is asked for: steps are marked with CUDA events, which `summary` reads.
FLOPs are counted once, when first needed, on tensors without contents; if the model reads values, on the tensors of the
first step, which are kept until then if they are small. One step of the warm-up runs under torch's sync debug mode, to
count the calls that made the host wait.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from redline.api.arguments import PLACE, checked
from redline.api.counting import CONVENTION, Blank, Count, count_flops
from redline.api.document import Document
from redline.api.prepare import Prepared
from redline.core.errors import UserError
from redline.core.measurement import spread_of
from redline.core.profile import Finding
from redline.core.user_code import PACKAGE, first_line
from redline.core.values import to_json
from redline.core.workload import check_positive
from redline.engine.clock import Clock
from redline.engine.findings import collecting_syncs, merge
from redline.engine.flop_counter import incomplete
from redline.engine.memory import peak_bytes
from redline.engine.probe import probe
from redline.engine.profiling_frames import is_users
from redline.engine.step import TrainStep
from redline.model.adapter import LossOf
from redline.predict.efficiency import share_of_peak

WARMUP_STEPS = 3  # the first ones compile and fill the allocator; waits are counted in the last
KEPT_STEPS = 1000  # an event per step: a long run is judged by its latest steps
KEPT_BYTES = 64 * 2**20  # of the first step's inputs: token ids are far smaller

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the model with its tensors, or with only their sizes if they are large."""

    arguments: Any
    named: Any
    autocast: torch.dtype | None
    gradients: bool


class Meter:
    """Tokens/s, MFU, memory, waiting for data and synchronisations of a loop; see the module for the three lines.

    >>> import redline
    >>> meter = redline.Meter(tokens_per_step=4 * 16, flops_per_step=1e6)
    >>> for batch in meter.data(range(8)):
    ...     meter.step()
    >>> meter.summary()["steps"], meter.summary()["step_seconds"]["n"]
    (8, 5)
    """

    @checked(device=PLACE)
    def __init__(
        self,
        *,
        tokens_per_step: int,
        model: nn.Module | Prepared | None = None,
        flops_per_step: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """`model` is what the FLOPs are counted for unless they are given: a module, or what `redline.prepare`
        returned. `device` is where the loop runs (default: where the model is, else CUDA if there is any)."""
        check_positive("tokens_per_step", tokens_per_step)
        self.tokens_per_step, self.device = tokens_per_step, _place(device, model)
        self.steps = 0
        # For each kept step: a device mark and a host mark at its end, and its wait for data.
        self._clock = Clock(self.device)
        self._host_marks: list[float] = []
        self._waits: list[float] = []
        self._warming = WARMUP_STEPS  # how many of the kept steps are left out
        self._waited = 0.0
        self._fed = False
        self._flops = _Flops(model, flops_per_step, self.device)
        self._peaks_of_counting: tuple[int | None, int | None] | None = None
        self._syncs: tuple[Finding, ...] | None = None
        self._watching: tuple[ExitStack, list[Finding]] | None = None

    def data(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of the loader, and record how long the loop waited for each."""
        self._fed = True
        if not self._host_marks:
            self._mark()
        batches = iter(loader)
        try:
            while True:
                started = time.perf_counter()
                batch = next(batches)
                self._waited += time.perf_counter() - started
                self._flops.see_batch(batch)
                self._watch_syncs()
                yield batch
        except StopIteration:
            return
        finally:
            self._stop_watching()  # the loop may be left in the middle of a step

    def step(self) -> None:
        """Mark the end of an update, whatever it was made of. Call this once per update."""
        self._count_syncs()
        self._flops.end_step()
        if self._host_marks:
            self._waits.append(self._waited)
        else:
            self._warming -= 1  # the start of the first step was not seen
        self._mark()
        self.steps, self._waited = self.steps + 1, 0.0
        if not self._fed:
            self._watch_syncs()  # without `data` a step begins where the last one ended
        if len(self._waits) >= 2 * KEPT_STEPS:  # cut once in a while, not at every step
            self._forget()

    def _mark(self) -> None:
        self._clock.mark()
        self._host_marks.append(time.perf_counter())

    def _forget(self) -> None:
        self._warming = 0
        del self._waits[:-KEPT_STEPS]
        del self._host_marks[: -KEPT_STEPS - 1]
        del self._clock.marks[: -KEPT_STEPS - 1]

    # synchronisations

    def _watch_syncs(self) -> None:
        if self.device.type == "cuda" and self.steps == WARMUP_STEPS - 1 and self._watching is None:
            stack = ExitStack()
            self._watching = stack, stack.enter_context(collecting_syncs())

    def _count_syncs(self) -> None:
        if self._watching is not None:
            found = self._watching[1]
            self._stop_watching()
            self._syncs = merge(found, steps=1)

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching[0].close()
            self._watching = None

    # results

    def summary(self) -> Document:
        """Return the figures so far, None where unknown. On a GPU this waits for the steps that are queued."""
        seconds = self._clock.seconds()[self._warming :]
        step = spread_of(seconds) if seconds else None
        flops, counted = self._count_flops()
        hardware = probe(self.device)
        mfu, convention = None, counted
        if flops is not None and step is not None:
            mfu, peak = share_of_peak(flops / step.median, hardware)
            convention = f"no MFU: {peak}" if mfu is None else f"{counted}; {peak}"
        return Document(
            {
                "device": hardware.name,
                "steps": self.steps,
                "warmup_steps": min(self.steps, WARMUP_STEPS),
                "tokens_per_step": self.tokens_per_step,
                "step_seconds": None if step is None else to_json(step),
                "tokens_per_second": None if step is None else self.tokens_per_step / step.median,
                "tokens_per_second_p10": None if step is None else self.tokens_per_step / step.p90,
                "tokens_per_second_p90": None if step is None else self.tokens_per_step / step.p10,
                "flops_per_step": flops,
                "mfu": mfu,
                "mfu_convention": convention,
                "peak_bytes": self._peak_bytes(),
                "data_wait_share": self._data_wait_share(),
                "syncs_per_step": None if self._syncs is None else sum(each.per_step or 0 for each in self._syncs),
                "syncs": None if self._syncs is None else to_json(self._syncs),
            },
            kind="meter",
        )

    def _count_flops(self) -> tuple[float | None, str]:
        before = peak_bytes(self.device)
        found = self._flops.count()
        if self._peaks_of_counting is None and self._flops.counted is not None:
            self._peaks_of_counting = before, peak_bytes(self.device)
        return found

    def _peak_bytes(self) -> int | None:
        """Return the peak of the loop, without one that counting FLOPs on real values left behind."""
        found = peak_bytes(self.device)
        before, after = self._peaks_of_counting or (None, None)
        return before if found is not None and found == after else found

    def _data_wait_share(self) -> float | None:
        """Return the share of the host's time. A GPU may have had work queued, so that a wait need not starve it."""
        waits, marks = self._waits[self._warming :], self._host_marks[self._warming :]
        return sum(waits) / (marks[-1] - marks[0]) if waits and self._fed else None

    def __str__(self) -> str:
        return str(self.summary())

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()


class _Flops:
    """FLOPs of a step: given, or counted for the calls that were seen in the first step."""

    def __init__(self, model: nn.Module | Prepared | None, given: float | None, device: torch.device) -> None:
        if model is not None and not isinstance(model, (nn.Module, Prepared)):
            raise UserError(
                f"model is a {type(model).__name__}",
                "FLOPs are counted of a torch.nn.Module or of what redline.prepare returned",
                "pass one of these, or flops_per_step",
            )
        self.given, self.device = given, device
        self.prepared = model if isinstance(model, Prepared) else None
        self.module = model if isinstance(model, nn.Module) else None
        self.calls: list[Call] = []
        self.batches: list[Call] = []
        """What `data` handed out, recorded as calls for a loop that calls the prepared model by itself."""
        self.kept_bytes = 0
        self.counted: tuple[float | None, str] | None = None
        self.hook: RemovableHandle | None = None
        self.open = given is None
        self.own_loss: LossOf | None = None
        self.seen_loss: LossOf | None = None
        if self.module is not None and self.open:
            self.hook = self.module.register_forward_pre_hook(self._see_call, with_kwargs=True)
        if self.prepared is not None and self.open:
            self._see_steps(self.prepared.step)

    def _see_steps(self, step: TrainStep) -> None:
        """Wrap the loss of the prepared step, outside the compiled code, to record its calls in the first step."""
        self.own_loss = own = step.loss_of

        def seen(*batch: Any) -> torch.Tensor:
            if self.open:
                self.calls.append(self._call(batch, {}))
            return own(*batch)

        self.seen_loss = step.loss_of = seen

    def _see_call(self, _: nn.Module, arguments: Any, named: Any) -> None:
        if not torch.compiler.is_compiling() and self.open:  # compiled code cannot be observed from inside
            self.calls.append(self._call(arguments, named))

    def see_batch(self, batch: Any) -> None:
        if self.prepared is not None and self.open:
            self.batches.append(self._call((batch,), {}))

    def _call(self, arguments: Any, named: Any) -> Call:
        kind = self.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        given = (arguments, named)
        self.kept_bytes += sum(leaf.nbytes for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
        held, words = tree_map(self._blank if self.kept_bytes > KEPT_BYTES else _detached, given)
        return Call(arguments=held, named=words, autocast=cast, gradients=torch.is_grad_enabled())

    def _blank(self, leaf: Any) -> Any:
        return Blank(leaf.shape, leaf.dtype, self.device) if isinstance(leaf, torch.Tensor) else leaf

    def _placed(self, leaf: Any) -> Any:
        return leaf.to(self.device) if isinstance(leaf, torch.Tensor) else leaf

    def end_step(self) -> None:
        self.open = False
        if self.hook is not None and self.calls:  # else it is inside compiled code, which must not change
            self.hook.remove()
            self.hook = None
        step = None if self.prepared is None else self.prepared.step
        if step is not None and self.own_loss is not None and step.loss_of is self.seen_loss:  # else another watches
            step.loss_of = self.own_loss

    def count(self) -> tuple[float | None, str]:
        """Return the FLOPs of a step, and what was counted or why nothing could be."""
        if self.given is not None:
            return self.given, "FLOPs as given"
        if self.open:
            return None, "no MFU: no step has ended yet"
        if self.counted is None:
            self.counted = self._count()
            self.calls, self.batches = [], []  # frees the tensors they hold
        return self.counted

    def _count(self) -> tuple[float | None, str]:
        if self.prepared is None and self.module is None:
            return None, "no MFU: give model or flops_per_step"
        calls = self.calls or self.batches
        if not calls:
            instead = (
                "pass what redline.prepare returned"
                if self.prepared is None
                else "call prepared.step, loop over meter.data, or, where a trainer such as Lightning has the loop and "
                "calls prepared.model, pass model=prepared.model"
            )
            return None, f"no MFU: no call of the model was seen in the first step; {instead}, or give flops_per_step"
        try:
            counts = [self._count_call(call) for call in calls]
        except Exception as error:  # a user's model, on tensors without values: whatever it raises is the reason
            reason = f"{type(error).__name__}: {first_line(error, '')}".removesuffix(": ") + line_of(error)
            return None, f"no MFU: FLOPs could not be counted, {reason}; give flops_per_step"
        if uncounted := tuple(dict.fromkeys(name for count in counts for name in count.uncounted)):
            return None, f"no MFU: {incomplete(uncounted)}; give flops_per_step"
        return float(sum(count.flops for count in counts)), CONVENTION

    def _count_call(self, call: Call) -> Count:
        arguments, named = tree_map(self._placed, (call.arguments, call.named))
        if self.prepared is not None:
            with self.prepared.autocast():
                return count_flops(self.prepared.loss, self.prepared.step.model, arguments)
        assert self.module is not None
        module: nn.Module = getattr(self.module, "_orig_mod", self.module)  # the module inside a compiled one
        cast = torch.autocast(self.device.type, dtype=call.autocast, enabled=call.autocast is not None)
        with cast, torch.set_grad_enabled(call.gradients):
            return count_flops(module, module, arguments, named)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def line_of(error: Exception) -> str:
    """Return ' at mine.py:12', the innermost line of the user's code that led to the error."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [each for each in frames if is_users(each.filename) and not each.filename.startswith(PACKAGE)]
    return f" at {Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else ""


def _place(device: torch.device | str | None, model: nn.Module | Prepared | None) -> torch.device:
    if device is not None:
        try:
            return torch.device(device)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise UserError(f"device is {device!r}", why, "write it as device='cuda' or 'cpu'") from error
    if isinstance(model, Prepared):
        return model.step.device
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    if parameter is not None:
        return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
