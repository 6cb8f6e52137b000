"""Lines of code that cost time, found by watching a step run: synchronisations, fp32 matmuls under autocast, attention
without a fused kernel, tensors on the host, graph breaks and recompilations. Where redline's own step waits, the
finding names no line of the user's but the rung that removes the wait.

    with Watch(device) as watch:
        step(batch)
    watch.findings(steps=1)  ->  (Finding(kind="synchronisation", file="model.py", line=57, ...), ...)

The dispatcher sees every operator, so a run on a CPU finds what would make a GPU wait. On a GPU, torch's own sync debug
mode is used as well (`watch_syncs`). Compiled functions run as plain Python while they are watched; what the compiler
reports about them comes from its log (`CompilerLog`).
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch._logging._internal import log_state
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from redline.core.measurement import Compiled
from redline.core.profile import DATA_WAIT, Finding, Part
from redline.engine.profiling_frames import Frame, here, in_optimizer

aten = torch.ops.aten
# Operators whose result the host needs before it can continue: a number, or a size that depends on the data.
WAITS = {
    aten._local_scalar_dense: "a tensor's value is read by Python (.item(), float(), if, assert)",
    aten.nonzero: "nonzero: how many there are is known only when the device is done",
    aten.masked_select: "masked_select: how many are selected is known only when the device is done",
    aten.equal: "torch.equal compares on the device and answers in Python",
    aten.unique_dim: "unique: how many there are is known only when the device is done",
    aten._unique2: "unique: how many there are is known only when the device is done",
    aten.unique_consecutive: "unique: how many there are is known only when the device is done",
    aten.bincount: "bincount: its length is known only when the device is done",
}
# Calls that torch hides from the dispatcher, or that run no operator for a tensor on the host.
WAITING_CALLS = {
    torch.Tensor.__repr__: "a tensor is printed",
    torch.Tensor.__format__: "a tensor is formatted",
    torch.Tensor.tolist: "tolist copies a tensor to the host",
    torch.Tensor.numpy: "numpy copies a tensor to the host",
}
MATMULS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
FUSED_ATTENTION = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_fused_attention_overrideable,
)
# Where the step itself waits because its recipe says so: function of engine/step.py -> reason, rung that removes it.
STEP_FILE = str(Path(__file__).with_name("step.py"))
RECIPE_WAITS = {
    "__call__": ("the recipe reads the loss of each step", "no-sync"),
    "apply_gradients": ("the recipe checks before each update that the gradients are finite", "fused-adamw"),
}
STARVING = 0.05  # share of a step spent waiting for its batch
SYNCHRONISING = "called a synchronizing"  # torch's wording in sync debug mode
LOGGERS = ("torch._dynamo.symbolic_convert.__graph_breaks", "torch._dynamo.guards.__recompiles")
GRAPH_BREAK = re.compile(
    r"Graph break .*?in user code at (?P<file>.+):(?P<line>\d+)\n(?:Graph Break )?Reason: (?P<why>.*)"
)
GAVE_UP = "falling back to eager"  # dynamo's wording where it leaves a whole frame to Python
EXCEPTION, CONTEXT = "Observed exception", "Developer debug context:"
RECOMPILE = re.compile(
    r"Recompiling function (?P<function>\S+) in (?P<file>.+):(?P<line>\d+)\n.*guard failure\(s\):\n\s*- (?P<why>.*)"
)
# How dynamo ends a reason: the guarded code, the end of its file's path, its line and function, a hint.
GUARD = re.compile(r"\s+# (?P<code>.*?)\s+# (?P<file>\S+):(?P<line>\d+) in .*")
GRAPH_NUMBER = re.compile(r"^\d+/\d+: ")
RESUMED = re.compile(r"^_*torch_dynamo_resume_in_(?P<function>.+)_at_\d+$")  # the rest of a function after a break


class Watch:
    """Watches both of torch's views of a step: the calls that Python makes and the operators that they run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.found: list[Finding] = []
        self.may_autocast = torch.amp.is_autocast_available(device.type)
        self.autocast_seen = False
        self.fp32: list[Finding] = []
        """Matmuls in fp32. They are findings only if autocast is on in some part of the step."""
        self.fused_calls = 0
        self._stack = ExitStack()

    def __enter__(self) -> Watch:
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._stack.enter_context(_Calls(self))
        self._stack.enter_context(_Operators(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def note(self, kind: str, detail: str) -> None:
        self.found.append(located(kind, detail, here()))

    def findings(self, steps: int) -> tuple[Finding, ...]:
        return merge([*self.found, *(self.fp32 if self.autocast_seen else ())], steps)


def located(kind: str, detail: str, frame: Frame | None) -> Finding:
    if frame is None:
        return Finding(kind=kind, detail=detail, per_step=1)
    if kind == "synchronisation" and frame.file == STEP_FILE and frame.function in RECIPE_WAITS:
        why, rung = RECIPE_WAITS[frame.function]
        return Finding(kind=kind, detail=why, per_step=1, rung=rung)
    return Finding(kind=kind, detail=detail, file=frame.file, line=frame.line, function=frame.function, per_step=1)


def merge(findings: Iterable[Finding], steps: int) -> tuple[Finding, ...]:
    """Merge findings of one kind and line, with their number per step; the most frequent first."""
    merged: dict[tuple[str, str | None, str | None], Finding] = {}
    for each in findings:
        key = each.kind, each.where, each.rung
        known = merged.get(key)
        count = (each.per_step or 0) / steps + (0 if known is None else known.per_step or 0)
        merged[key] = replace(known or each, per_step=count)
    return tuple(sorted(merged.values(), key=lambda each: -(each.per_step or 0)))


class _Calls(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch, kwargs = self.watch, kwargs or {}
        watch.autocast_seen |= watch.may_autocast and torch.is_autocast_enabled(watch.device.type)
        if func in WAITING_CALLS and args[0].device.type == watch.device.type:
            watch.note("synchronisation", WAITING_CALLS[func])
        elif func is torch.Tensor.cpu and watch.device.type == "cpu":
            watch.note("host-copy", ".cpu() copies a tensor to the host")  # no operator runs for a tensor on the host
        elif func is F.scaled_dot_product_attention:
            before = watch.fused_calls
            result = func(*args, **kwargs)
            if watch.fused_calls == before:
                watch.note("math-attention", f"no fused kernel takes {_describe(args, kwargs)}: plain matmuls ran")
            return result
        return func(*args, **kwargs)


def _describe(args: Any, kwargs: Any) -> str:
    query = args[0] if args else kwargs["query"]
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    masked = "" if mask is None else f" with a mask of {str(mask.dtype).removeprefix('torch.')}"
    return f"{str(query.dtype).removeprefix('torch.')} {list(query.shape)}{masked}"


class _Operators(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.look(func.overloadpacket, inputs, result)
        return result

    def look(self, operator: Any, inputs: list[torch.Tensor], result: Any) -> None:
        watch = self.watch
        watch.fused_calls += operator in FUSED_ATTENTION
        if operator in WAITS:
            self._waits(WAITS[operator], inputs)
        elif operator is aten.index and any(each.dtype == torch.bool for each in inputs[1:]):
            self._waits("indexing with a mask: how many it selects is known only when the device is done", inputs)
        elif operator in MATMULS and _in_fp32(inputs) and not _in_backward():
            shapes = " x ".join(str(list(each.shape)) for each in inputs[-2:])
            watch.fp32.append(
                located("fp32-matmul", f"a matmul of {shapes} runs in fp32 though autocast is on", here())
            )
        if watch.device.type != "cpu":
            self._on_host(operator, inputs, result)

    def _waits(self, detail: str, inputs: list[torch.Tensor]) -> None:
        if inputs and inputs[0].device.type == self.watch.device.type and not in_optimizer():
            self.watch.note("synchronisation", detail)

    def _on_host(self, operator: Any, inputs: list[torch.Tensor], result: Any) -> None:
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        places = {each.device.type for each in (*inputs, *outputs)}
        if operator in (aten._to_copy, aten.copy_) and len(places) > 1:
            if not in_optimizer():
                source = inputs[-1].device.type
                self.watch.note("host-copy", f"{list(inputs[-1].shape)} numbers leave the {source} inside the step")
        elif places == {"cpu"} and any(each.numel() > 1 for each in outputs) and not in_optimizer():
            self.watch.note("host-tensor", f"{operator} computes {list(outputs[0].shape)} on the host")


def _in_fp32(inputs: list[torch.Tensor]) -> bool:
    return all(each.dtype == torch.float32 for each in inputs[-2:])


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


# what CUDA and the compiler report


def watch_syncs(run: Callable[[], Any], steps: int) -> tuple[Finding, ...]:
    """Return the calls that made the host wait according to CUDA, each with the line that was running."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # any other warning of the step has been shown before
        with collecting_syncs() as found:
            run()
    return merge(found, steps)


@contextmanager
def collecting_syncs() -> Iterator[list[Finding]]:
    """Collect CUDA's sync warnings in the list while the context is open. Other warnings go where they went before."""
    found: list[Finding] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def collect(message: Warning | str, *others: Any, **named: Any) -> None:
            if SYNCHRONISING in str(message):
                found.append(located("synchronisation", str(message).splitlines()[0], here()))
            else:
                show(message, *others, **named)

        warnings.filterwarnings("always", message=f".*{SYNCHRONISING}")
        warnings.filterwarnings("ignore", message=".*Synchronization debug mode is a prototype")
        warnings.showwarning = collect
        before = torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else "default"
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


class CompilerLog(logging.Handler):
    """Graph breaks and recompilations with file, line and reason, from the log that TORCH_LOGS would print."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []
        self.before = _frames_and_graphs()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings. A line that caused several recompilations makes one, with the first reason."""
        found: dict[Finding, None] = {}
        again: dict[str | None, list[Finding]] = {}
        for each in filter(None, map(compiler_finding, self.messages)):
            if each.kind == "recompile":
                again.setdefault(each.where, []).append(each)
            else:
                found[each] = None
        return (
            *found,
            *(replace(first, detail=_times(first.detail, 1 + len(rest))) for first, *rest in again.values()),
        )

    def compiled(self) -> Compiled:
        """Return what was compiled since the log was opened."""
        frames, graphs = (now - then for now, then in zip(_frames_and_graphs(), self.before, strict=True))
        given_up = sum(GAVE_UP in message for message in self.messages)
        breaks = {each.where: each.detail for each in self.findings() if each.kind == "graph-break"}
        return Compiled(
            frames=frames,
            graphs=graphs,
            left=given_up if graphs else frames,
            places=tuple(f"{where}: {why}" for where, why in breaks.items()),
        )


@contextmanager
def compiler_log() -> Iterator[CompilerLog]:
    import torch._dynamo  # noqa: F401  registers the loggers

    log = CompilerLog()
    artifacts = set(log_state.artifact_names)
    log_state.enable_artifact("recompiles")  # dynamo works out the reason only if this is enabled
    loggers = {logger: (logger.level, logger.propagate) for logger in map(logging.getLogger, LOGGERS)}
    for logger in loggers:
        # What TORCH_LOGS requests is still printed, and nothing else is.
        logger.propagate = logger.propagate and logger.isEnabledFor(logging.DEBUG)
        logger.setLevel(logging.DEBUG)
        logger.addHandler(log)
    try:
        yield log
    finally:
        log_state.artifact_names &= artifacts
        for logger, (level, propagate) in loggers.items():
            logger.removeHandler(log)
            logger.setLevel(level)
            logger.propagate = propagate


def _frames_and_graphs() -> tuple[int, int]:
    """Return the numbers of frames and graphs that this process has compiled so far."""
    from torch._dynamo.utils import counters

    return counters["frames"]["total"], counters["stats"]["unique_graphs"]


def _times(reason: str, count: int) -> str:
    return f"recompiled {'once' if count == 1 else f'{count} times'}: {reason}"


def compiler_finding(message: str) -> Finding | None:
    for kind, pattern in (("graph-break", GRAPH_BREAK), ("recompile", RECOMPILE)):
        match = pattern.search(message)
        if match is not None:
            parts = match.groupdict()
            found = Finding(
                kind=kind,
                detail=whole_reason(parts["why"].strip(), message[match.end() :].splitlines()),
                file=parts["file"],
                line=int(parts["line"]),
                function=parts.get("function"),
            )
            return guarded(found) if kind == "recompile" else found
    return None


def guarded(found: Finding) -> Finding:
    """Move a finding to the guarded line, which dynamo writes after the reason, with the start of its path cut off."""
    reason = GRAPH_NUMBER.sub("", found.detail)
    found = replace(found, function=RESUMED.sub(r"\g<function>", found.function or "") or None)
    match = GUARD.search(reason)
    if match is None:
        return replace(found, detail=reason)
    cut, number, code = match["file"], int(match["line"]), match["code"].strip()
    line = number if found.file is not None and found.file.endswith(cut) else found.line
    elsewhere = "" if line == number else f" at {Path(cut).name}:{number}"
    return replace(found, detail=f"{reason[: match.start()].strip()}, of `{code}`{elsewhere}", line=line)


def whole_reason(why: str, more: list[str]) -> str:
    """Return the reason itself: after a sentence that ends with a colon it is on the next line; the context of an
    exception is further below."""
    lines = [line.strip() for line in more if line.strip()]
    if not why.endswith(":") or not lines:
        return why
    reason = lines[0].rstrip(".:")
    if reason == EXCEPTION:
        context = next((line.removeprefix(CONTEXT).strip() for line in lines if line.startswith(CONTEXT)), "")
        reason = context or reason
    return f"the compiler gives up on the function: {reason}" if GAVE_UP in why else reason


def starvation(parts: Iterable[Part], step_seconds: float) -> tuple[Finding, ...]:
    waited = sum(part.seconds for part in parts if part.group == DATA_WAIT)
    if waited <= STARVING * step_seconds:
        return ()
    share = waited / step_seconds
    return (
        Finding(
            kind="loader-starvation",
            detail=f"each step waits {1e3 * waited:.2f} ms ({share:.0%}) for its batch",
            per_step=1,
        ),
    )
