"""redline finds out how fast a machine can train a model, gets it there, and proves that nothing broke on the way.

The commands are also functions. Each returns the document that `--json` prints; `print` and notebooks show its table:

    redline.ladder("tiny")["best"]
    redline.tune("tiny", minutes=2)["best"]
    redline.estimate("gpt2", gpu="H200")["memory"]["total"]
    redline.lint("gpt2", gpu="A100-80")["findings"]
    redline.hardware("NVIDIA L40S")["known"]["peak_tflops"]
    redline.profile("tiny", rungs="none")["advice"]

For your own model and training loop (docs/api.md):

    prepared = redline.prepare(model, "best.json");  loss = prepared.step(batch)
    meter = redline.Meter(tokens_per_step=8192, model=model)

Importing redline imports nothing heavy. A mistake raises `redline.UserError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.api.arguments import ANYTHING, FLAG_OR_TEXT, OF_TORCH, PLACE, checked, joined

if TYPE_CHECKING:
    import torch
    from torch import nn

    from redline.api.document import Document
    from redline.api.meter import Meter
    from redline.api.prepare import Prepared
    from redline.core.errors import UserError
    from redline.core.recipe import Recipe

__version__ = "0.1.0"
__all__ = [
    "Document",
    "Meter",
    "Prepared",
    "UserError",
    "__version__",
    "estimate",
    "hardware",
    "ladder",
    "lint",
    "prepare",
    "profile",
    "tune",
]


@checked()
def ladder(
    workload: str | Callable[[], nn.Module] | None = None,
    *,
    rungs: str | Sequence[str] | None = None,
    also: str | Sequence[str] | None = None,
    without: str | Sequence[str] | None = None,
    start: Path | str | None = None,
    micro_batch: int | None = None,
    sequence: int | None = None,
    data: Path | str | None = None,
    device: str | None = None,
    gpus: int | None = None,
    tensor: int | None = None,
    replicas: int | None = None,
    keep: str | None = None,
    repeats: int | None = None,
    aa: bool = False,
    steps: int | None = None,
    check_steps: int | None = None,
    rebatch: bool = False,
    headroom: float | None = None,
    global_batch: int | None = None,
    compile_ahead: int | None = None,
    timeout: float | None = None,
    out: Path | str | None = None,
) -> Document:
    """Measure the ladder and return its document, the same one `redline ladder --json` prints.

    `workload` is what you would type on the command line, or a function, defined in a file, that builds the model. The
    other arguments are the command's options (`redline ladder --help`); `start` is `--from`. Progress goes to standard
    error, results to the run directory `out`. A mistake raises `redline.UserError`.
    """
    from redline.api.document import Document
    from redline.api.factory import typed_workload
    from redline.commands.common import leave_page, options_of
    from redline.commands.ladder import add_ladder
    from redline.commands.ladder import ladder as document_of
    from redline.report.page import render_page

    given = {
        "workload": typed_workload(workload, "redline.ladder"),
        "rungs": joined(rungs),
        "also": joined(also),
        "without": joined(without),
        "start": None if start is None else Path(start),
        "micro_batch": micro_batch,
        "sequence": sequence,
        "data": None if data is None else str(data),
        "device": device,
        "gpus": gpus,
        "tensor": tensor,
        "replicas": replicas,
        "keep": keep,
        "repeats": repeats,
        "aa": aa or None,
        "steps": steps,
        "check_steps": check_steps,
        "rebatch": rebatch or None,
        "headroom": headroom,
        "global_batch": global_batch,
        "compile_ahead": compile_ahead,
        "timeout": timeout,
        "out": None if out is None else Path(out),
    }
    document, directory = document_of(options_of(add_ladder, "ladder", given), _call("ladder", given))
    leave_page(document, directory, render_page)
    return Document(document, kind="ladder")


@checked()
def tune(
    workload: str | Callable[[], nn.Module] | None = None,
    *,
    minutes: float | None = None,
    allow: str | None = None,
    rungs: str | Sequence[str] | None = None,
    without: str | Sequence[str] | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    memory_limit: str | None = None,
    sequence: int | None = None,
    data: Path | str | None = None,
    device: str | None = None,
    gpus: int | None = None,
    tensor: int | None = None,
    replicas: int | None = None,
    steps: int | None = None,
    check_steps: int | None = None,
    timeout: float | None = None,
    fresh: bool = False,
    after: Path | str | None = None,
    out: Path | str | None = None,
) -> Document:
    """Search for the fastest recipe that still trains correctly; return the document of `redline tune --json`.

    `workload` is what you would type on the command line, or a function, defined in a file, that builds the model. The
    other arguments are the command's options (`redline tune --help`), with its defaults; the recipe is best.json in the
    run directory `out`. Progress goes to standard error.
    """
    from redline.api.document import Document
    from redline.api.factory import typed_workload
    from redline.commands.common import leave_page, options_of
    from redline.commands.tune import add_tune
    from redline.commands.tune import tune as document_of
    from redline.report.tune_page import render_tune_page

    given = {
        "workload": typed_workload(workload, "redline.tune"),
        "minutes": minutes,
        "allow": allow,
        "rungs": joined(rungs),
        "without": joined(without),
        "micro_batch": micro_batch,
        "global_batch": global_batch,
        "memory_limit": memory_limit,
        "sequence": sequence,
        "data": None if data is None else str(data),
        "device": device,
        "gpus": gpus,
        "tensor": tensor,
        "replicas": replicas,
        "steps": steps,
        "check_steps": check_steps,
        "timeout": timeout,
        "fresh": fresh or None,
        "after": None if after is None else Path(after),
        "out": None if out is None else Path(out),
    }
    document, directory = document_of(options_of(add_tune, "tune", given), _call("tune", given))
    leave_page(document, directory, render_tune_page)
    return Document(document, kind="tune")


@checked()
def estimate(
    workload: str | nn.Module | Callable[[], nn.Module] | None = None,
    *,
    gpu: str | None = None,
    micro_batch: int | None = None,
    sequence: int | None = None,
    rungs: str | Sequence[str] | None = None,
    recipe: Path | str | None = None,
    optimizer: str | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
    interconnect: str | None = None,
    parallel: str | None = None,
    tensor: int | None = None,
    pipeline: int | None = None,
    dp: int | None = None,
    zero: int | None = None,
    replicas: int | None = None,
    global_batch: int | None = None,
    inference: bool | str = False,
    batch: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
) -> Document:
    """Estimate the parameters, FLOPs, memory and speed of a step; return the document of `redline estimate --json`.

    The arguments are the command's options (`redline estimate --help`), with its defaults; `recipe` is `--from`, and
    `inference` is True or a precision. For your own module also pass `batch`, what it is called with, and `loss` if it
    needs one, as for `prepare`: a copy of the module is run on the host with a few of the samples.

    >>> import torch, redline
    >>> model = torch.nn.Linear(8, 4)
    >>> found = redline.estimate(model, batch=(torch.ones(16, 8), torch.zeros(16, dtype=torch.int64)), rungs="none")
    >>> found["parameters"], found["flops_per_token"]["model"]
    (36, 128.0)
    """
    from redline.api.document import Document
    from redline.api.factory import is_module, typed_workload
    from redline.commands.common import options_of
    from redline.commands.estimate import add_estimate
    from redline.commands.estimate import estimate as document_of
    from redline.commands.estimate_subject import AS_THE_PLAN

    given = {
        "workload": None if is_module(workload) else typed_workload(workload, "redline.estimate"),
        "gpu": gpu,
        "micro_batch": micro_batch,
        "sequence": sequence,
        "rungs": joined(rungs),
        "recipe": recipe,
        "optimizer": optimizer,
        "gpus": gpus,
        "nodes": nodes,
        "interconnect": interconnect,
        "parallel": parallel,
        "tensor": tensor,
        "pipeline": pipeline,
        "dp": dp,
        "zero": zero,
        "replicas": replicas,
        "global_batch": global_batch,
        "inference": AS_THE_PLAN if inference is True else inference or None,
    }
    options = options_of(add_estimate, "estimate", given)
    if is_module(workload):
        from redline.api.live import estimate_module

        _refuse({"sequence": sequence}, "estimate", "a batch has its own")
        found = estimate_module(workload, batch, loss, options)
    else:
        _refuse({"batch": batch, "loss": loss}, "estimate", "a workload brings its own")
        found = document_of(options)
    return Document({**found, "command": _call("estimate", given)}, kind="estimate")


@checked()
def lint(
    workload: str | nn.Module | Callable[[], nn.Module] | None = None,
    *,
    gpu: str | None = None,
    dtype: str | None = None,
    tp: int | None = None,
    micro_batch: int | None = None,
    sequence: int | None = None,
    ignore: str | Sequence[str] | None = None,
    measure: bool = False,
    seconds: float | None = None,
    fix: Path | str | None = None,
    overwrite: bool = False,
    batch: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
) -> Document:
    """Find a model's sizes that cost speed, and the nearest good ones; return the document of `redline lint --json`.

    The arguments are the command's options (`redline lint --help`), with its defaults. Nothing is timed without
    `measure`, and nothing is written unless `fix` names a file. For your own module the sizes of its layers are
    checked; given a `batch`, what it is called with, also its attention and lines that make the host wait. `loss` is as
    for `prepare`.

    >>> import torch, redline
    >>> found = redline.lint(torch.nn.Sequential(torch.nn.Linear(64, 1001), torch.nn.Linear(1001, 64)))
    >>> [(finding["rule"], finding["fix"].split(";")[0]) for finding in found["findings"]]
    [('layer-size', '1,024')]
    """
    from redline.api.document import Document
    from redline.api.factory import is_module, typed_workload
    from redline.commands.common import options_of
    from redline.commands.lint import add_lint
    from redline.commands.lint import lint as document_of

    given = {
        "workload": None if is_module(workload) else typed_workload(workload, "redline.lint"),
        "gpu": gpu,
        "dtype": dtype,
        "tp": tp,
        "micro_batch": micro_batch,
        "sequence": sequence,
        "ignore": joined(ignore),
        "measure": measure or None,
        "seconds": seconds,
        "fix": None if fix is None else str(fix),
        "overwrite": overwrite or None,
    }
    options = options_of(add_lint, "lint", given)
    if is_module(workload):
        from redline.api.live import lint_module

        _refuse({"sequence": sequence}, "lint", "a batch has its own")
        found = lint_module(workload, batch, loss, options)
    else:
        _refuse({"batch": batch, "loss": loss}, "lint", "a workload brings its own")
        found = document_of(options)
    return Document({**found, "command": _call("lint", given)}, kind="lint")


@checked(measure=FLAG_OR_TEXT)
def hardware(
    name: str | None = None,
    *,
    measure: bool | str = False,
    micro_batch: int | None = None,
    seconds: float | None = None,
    device: str | None = None,
) -> Document:
    """Compare this machine, or a device by name, with its data sheet; return the document of `redline hardware --json`.

    `measure`: True or a workload; time its matmuls on this machine and keep the result.
    """
    from redline.api.document import Document
    from redline.commands.common import options_of
    from redline.commands.hardware import DEFAULT_WORKLOAD, add_hardware
    from redline.commands.hardware import hardware as document_of

    given = {
        "name": name,
        "measure": DEFAULT_WORKLOAD if measure is True else measure or None,
        "micro_batch": micro_batch,
        "seconds": seconds,
        "device": device,
    }
    options = options_of(add_hardware, "hardware", {**given, "command": _call("hardware", given)})
    return Document(document_of(options), kind="hardware")


@checked(model=OF_TORCH, optimizer=OF_TORCH)
def profile(
    workload: str | Callable[..., Any] | None = None,
    *,
    recipe: Path | str | None = None,
    rungs: str | Sequence[str] | None = None,
    micro_batch: int | None = None,
    sequence: int | None = None,
    data: Path | str | None = None,
    device: str | None = None,
    gpus: int | None = None,
    tensor: int | None = None,
    replicas: int | None = None,
    steps: int | None = None,
    out: Path | str | None = None,
    timeout: float | None = None,
    batches: Iterable[Any] | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Document:
    """Show where a step's time and memory go and what to do first; return the document of `redline profile --json`.

    A workload, given by name or file, is profiled in its own process; the arguments are the command's options (`redline
    profile --help`), with its defaults. If the worker fails you still get a document: its "status" is "failed" and its
    "reason" says why.

    A function is taken as one step of your own and profiled in this process. It is called some dozens of times, with
    one of `batches` after the other if it takes any. `model` tells its modules apart; with `optimizer` both are put
    back as they were. The only other arguments allowed are `steps` and `out`, the folder for the trace.

    >>> import torch, redline
    >>> model = torch.nn.Linear(8, 8)
    >>> found = redline.profile(lambda: model(torch.ones(4, 8)).sum().backward(), model=model, steps=1)
    >>> found["device"], found["findings"]
    ('cpu', [])
    """
    from redline.api.document import Document
    from redline.commands.common import leave_page, options_of
    from redline.commands.profile import add_profile
    from redline.commands.profile import profile as document_of
    from redline.report.profile_page import render_profile_page

    given: dict[str, Any] = {
        "workload": workload,
        "recipe": None if recipe is None else Path(recipe),
        "rungs": joined(rungs),
        "micro_batch": micro_batch,
        "sequence": sequence,
        "data": None if data is None else str(data),
        "device": device,
        "gpus": gpus,
        "tensor": tensor,
        "replicas": replicas,
        "steps": steps,
        "out": None if out is None else Path(out),
        "timeout": timeout,
    }
    _check_workload(workload, "profile", "a function that makes one step")
    if callable(workload):
        from redline.api.profile import profile_callable

        _refuse(given, "profile", "a function is profiled as it is", but=("workload", "steps", "out"))
        return profile_callable(
            workload,
            batches=batches,
            model=model,
            optimizer=optimizer,
            steps=steps,
            out=given["out"],
            command="redline.profile(step)",
        )
    _refuse({"batches": batches, "model": model, "optimizer": optimizer}, "profile", "a workload brings its own")
    options = options_of(add_profile, "profile", {**given, "command": _call("profile", given)})
    document = document_of(options)
    leave_page(document, Path(document["directory"]), render_profile_page)
    return Document(document, kind="profile")


@checked(recipe=ANYTHING, device=PLACE)
def prepare(
    model: nn.Module,
    recipe: Path | str | Recipe | Mapping[str, Any] | Iterable[str],
    *,
    learning_rate: float | Callable[[int], float] | None = None,
    weight_decay: float = 0.1,
    clip_norm: float | None = 1.0,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    device: torch.device | str | None = None,
) -> Prepared:
    """Apply a recipe to your own module: model, optimizer, autocast, scaler and step for a plain training loop.

    `recipe` is a file such as a run's best.json, its contents, a Recipe, or names of rungs. What cannot be done to the
    module from outside is in `prepared.left_out`, with the reason. `loss(model, batch)` returns a scalar; without it
    the model is called with the batch and must return a loss, or logits if the batch is a pair of inputs and targets
    (docs/api.md). `learning_rate` is AdamW's, a number (torch's schedulers may change it) or a function of the steps
    taken; other optimizers multiply it by their own factor. AdamW's betas are 0.9 and 0.95, as is usual for GPTs;
    `clip_norm=None` leaves gradients as they are. The module is changed in place, and moved to `device` if given.

    >>> import torch, redline
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(32, 4))
    >>> prepared = redline.prepare(model, ["bf16", "fused-adamw", "loader-workers"], learning_rate=1e-2)
    >>> inputs, classes = torch.ones(16, 8), torch.zeros(16, dtype=torch.int64)
    >>> losses = [prepared.step((inputs, classes)).item() for _ in range(10)]
    >>> losses[-1] < losses[0]
    True
    >>> prepared.rungs, list(prepared.left_out)
    (('bf16', 'fused-adamw'), ['loader-workers'])
    """
    from redline.api.prepare import prepare as prepare_module

    return prepare_module(
        model,
        recipe,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        loss=loss,
        device=device,
    )


def __getattr__(name: str) -> Any:
    """Import classes that need torch, or are rarely used, only when they are accessed."""
    from importlib import import_module

    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_CLASSES[name]), name)


_CLASSES = {
    "Document": "redline.api.document",
    "Meter": "redline.api.meter",
    "Prepared": "redline.api.prepare",
    "UserError": "redline.core.errors",
}


def _check_workload(workload: object, function: str, otherwise: str) -> None:
    from redline.core.errors import UserError

    if not (workload is None or isinstance(workload, str) or callable(workload)):
        raise UserError(
            f"redline.{function} was given {workload!r:.60}",
            f"it takes a workload's name or file, or {otherwise}",
            f"such as redline.{function}({'prepared.step' if hasattr(workload, 'step') else repr('gpt2')})",
        )


def _refuse(given: dict[str, Any], function: str, why: str, but: tuple[str, ...] = ()) -> None:
    """Reject arguments that would be ignored."""
    from redline.core.errors import UserError

    for name, value in given.items():
        if value is not None and name not in but:
            raise UserError(f"redline.{function} was given {name}", why, f"drop {name}")


def _call(function: str, given: dict[str, Any]) -> str:
    """Return the call as Python source, for documents to record how they were made."""
    words = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    return f"redline.{function}({words})"
