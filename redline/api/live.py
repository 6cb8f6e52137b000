"""Lint and estimate of a live module: a copy of it is walked and run once on the host.

    lint_module(model, batch=None, options=...)     estimate_module(model, batch=batch, options=...)

It is inspected like the model of a user's file (`engine/inspect_model.py`), with the batch in place of make_batch.
Without a batch nothing is run, and lint sees only the sizes of the layers.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from redline.api.loss import Loss, loss_of_call, name_of
from redline.api.prepare import HOST, TO_FP32, check_module, check_unfrozen
from redline.api.raised import file_of
from redline.commands import lint as lint_command
from redline.commands.estimate import check_options
from redline.commands.estimate_subject import check_one_gpu, choose_machine, traced_subject
from redline.core.errors import UserError
from redline.core.generators import seeded
from redline.core.host import timestamp
from redline.core.traced import SAMPLE, TOKEN, Line, Product, Traced
from redline.core.user_code import Functions, described
from redline.core.workload import Workload
from redline.engine.inspect_model import look_at
from redline.engine.inspect_walk import starred, walked
from redline.model.python_adapter import (
    check_filled,
    check_fp32,
    functional_dropout_off,
    takes_inputs_only,
    tensors_of,
)
from redline.predict.traced_estimate import traced_document
from redline.predict.traced_lint import findings_of, traced_lint_document
from redline.workloads.python_file import PythonFile, python_workload, without_autocast

ORIGIN = "a module of yours"
SIZES_ONLY = (
    "without a batch only the sizes of layers were looked at: give batch=..., what the model is called with, for "
    "attention, lines that wait and gains"
)


def estimate_module(model: nn.Module, batch: Any, loss: Loss | None, options: argparse.Namespace) -> dict[str, Any]:
    check_module(model)
    if batch is None:
        raise UserError(
            "an estimate of a module takes a batch",
            "FLOPs and memory are counted while the model runs, and what it is called with is not known",
            "give one: redline.estimate(model, batch=next(iter(loader)))",
        )
    batch = plain(batch)
    check_options(options)
    check_one_gpu(options)
    machine = choose_machine(options)
    workload = live_workload(model, trace_module(model, batch, loss))
    if options.micro_batch is None and options.recipe is None:
        options.micro_batch = samples_of(batch)
    return traced_document(traced_subject(options, machine, workload, ORIGIN), machine)


def lint_module(model: nn.Module, batch: Any, loss: Loss | None, options: argparse.Namespace) -> dict[str, Any]:
    check_module(model)
    lint_command.check_options(options)
    lint_command.refuse_for_python(options)
    ignored = lint_command.ignored_rules(options.ignore)
    if batch is None:
        return lint_sizes(model, ignored, options)
    batch = plain(batch)
    workload = live_workload(model, trace_module(model, batch, loss))
    if options.micro_batch is None:
        options.micro_batch = samples_of(batch)
    return lint_command.lint_traced(options, ignored, workload, ORIGIN)


def lint_sizes(model: nn.Module, ignored: tuple[str, ...], options: argparse.Namespace) -> dict[str, Any]:
    """Lint the sizes of layers. How many rows their matmuls have is unknown, so nothing is predicted for any device."""
    device, hardware = lint_command.known_device(options)
    dtype = lint_command.choose_dtype(options.dtype, device)
    traced = sizes_of(model)
    found = findings_of(traced, micro_batch=1, dtype=dtype, device=None, ignore=ignored)
    found = tuple(replace(each, no_gain="without a batch the rows of a product are not known") for each in found)
    document = traced_lint_document(traced, found, hardware=hardware, micro_batch=1, dtype=dtype)
    document["settings"]["micro_batch"] = None
    document["shape"] |= dict.fromkeys(("flops_forward", "flops_backward", "loss", "batch_bytes", "saved"))
    return {
        "name": type(model).__name__,
        "origin": ORIGIN,
        "date": timestamp(),
        **document,
        "notes": [SIZES_ONLY],
    }


# --- what is seen of a module -----------------------------------------------------------------------------------------


def live_workload(model: nn.Module, traced: Traced) -> Workload:
    """Return the workload that a file which builds this model would have."""
    kind = type(model)
    workload = python_workload(PythonFile(path=Path(file_of(kind)), factory=kind.__name__, digest=""), traced)
    notes = [f"dropout was off while the model was looked at ({traced.dropout[0]}, ...)"] if traced.dropout else []
    if traced.no_autocast is not None:
        notes.append(without_autocast(traced.no_autocast))
    return replace(workload, notes=tuple(notes))


def trace_module(model: nn.Module, batch: Any, loss: Loss | None) -> Traced:
    """Trace a copy of the module on the host; the module itself is left alone."""
    check_unfrozen(model)
    check_filled(model, type(model).__name__, HOST)
    check_fp32(model, type(model).__name__, TO_FP32)
    functions = Functions(
        file=file_of(type(model)),
        name=type(model).__name__,
        factory=lambda: model,
        make_batch=lambda size, _: samples(batch, size),
        loss=loss or loss_by_calling(samples_of(batch)),
        loss_name=name_of(loss),
        live=True,
        **items_of(batch),
    )
    twin = copy.deepcopy(getattr(model, "_orig_mod", model)).to("cpu").train()
    # The passes may draw random numbers, which must not change what the user's process draws afterwards.
    with functional_dropout_off(), seeded(Workload.seed):
        return look_at(functions, twin, {}, Workload.seed)


def loss_by_calling(given: int) -> Loss:
    """Return a loss that calls the model. `given` is the number of samples in the user's batch; if a pass has another
    number, messages say so, since sizes in them depend on it."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        try:
            return loss_of_call(model, batch, takes_inputs_only(model))
        except UserError as error:
            cut = samples_of(batch)
            more = "" if cut == given else f" ({cut} samples were taken of the batch's {given})"
            raise UserError(error.problem, error.why + more, error.fix) from error

    return loss


def plain(batch: Any) -> Any:
    """Return the batch with a mapping as a plain dict: torch does not know the parts of transformers' batches."""
    found = dict(batch) if isinstance(batch, Mapping) else batch
    samples_of(found)
    return found


def samples_of(batch: Any) -> int:
    """Return the number of samples: the first dimension of every tensor."""
    sizes = {leaf.size(0) if isinstance(leaf, torch.Tensor) and leaf.dim() else 0 for leaf in tensors_of(batch)}
    if len(sizes) != 1 or 0 in sizes:
        raise UserError(
            f"the batch is {described(batch)} whose parts do not agree on how many samples it has",
            "a batch is a tensor, or tuples and dicts of tensors, with the samples in the first dimension of each",
            "pass what the model is called with, such as (inputs, targets) of [samples, ...] each",
        )
    return sizes.pop()


def samples(batch: Any, size: int) -> Any:
    """Return this many samples on the host, from the start again if the batch has fewer."""

    def first(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach().to("cpu")[torch.arange(size) % leaf.size(0)]

    return tree_map_only(torch.Tensor, first, batch)


def items_of(batch: Any) -> dict[str, Any]:
    """Return what rates count: tokens if the batch has transformers' `input_ids`, samples otherwise."""
    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    if isinstance(ids, torch.Tensor) and ids.dim() == 2:
        return {"items_per_sample": ids.size(1), "unit": TOKEN}
    return {"items_per_sample": 1, "unit": SAMPLE}


def sizes_of(model: nn.Module) -> Traced:
    """Return the matrices of layers as matmuls of one row; nothing else is known without a batch."""
    found: Counter[Product] = Counter()
    names = starred(model)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 2 and not isinstance(module, nn.Embedding):
                found[Product(where=names[name], kind="linear", m=1, n=parameter.size(0), k=parameter.size(1))] += 1
    nothing = Line(constant=0, per_sample=0)
    return Traced(
        **walked(model, {}),
        loss="",
        batch_bytes=0,
        flops_forward=nothing,
        flops_backward=nothing,
        saved=(),
        products=tuple(replace(product, count=count) for product, count in found.items()),
    )
