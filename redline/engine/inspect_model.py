"""The process that inspects a user's model: `python -m redline.engine.inspect_model ORDER ANSWER`.

ORDER is a JSON file with a workload's Source and a seed; ANSWER becomes {"traced": {...}} or {"mistake": [problem, why,
fix]}. The model is built on the host, walked, and run forward and backward. Real tensors, in batches of two and four,
show what depends on values (synchronisations, randomness, the loss). Fake tensors, which have sizes but no values, then
give FLOPs and the bytes that each mode of running keeps, at both batch sizes. If the code needs values, real tensors
are used for that too.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import linecache
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from redline.core.errors import UserError
from redline.core.generators import seeded
from redline.core.job import write_atomically
from redline.core.traced import TOKEN, Attention, Line, Place, Product, Saved, Sync, Traced
from redline.core.user_code import (
    PACKAGE,
    Functions,
    blamed,
    blaming,
    definition,
    first_line,
    is_own,
    load_functions,
    neighbours,
    users_line,
)
from redline.core.values import from_json, to_json
from redline.core.workload import ON_CPUS, Source
from redline.data.made import make_batch
from redline.engine.findings import Watch
from redline.engine.flop_counter import Counter as FlopCounter
from redline.engine.inspect_random import Randomness, randomness
from redline.engine.inspect_trace import FirstNan, Seen, Trace, has_nan, place, tracing
from redline.engine.inspect_walk import Made, noting_places, starred, walked
from redline.engine.replaced import replaced
from redline.engine.worker import leave_with_parent
from redline.model.python_adapter import (
    checkpoint_blocks,
    classes_of,
    dropout_rates,
    find_loss,
    functional_dropout_off,
    held,
    logits_of,
    loss_function,
    make_model,
    rows_of,
    silence_dropout,
    sparse_gradient,
    tensors_of,
)
from redline.workloads.shapes import shape_of

SMALL, LARGE = 2, 4  # samples; batch norm refuses a batch of one
PRECISIONS = ("fp32", "bf16")
BACKENDS = {"naive": SDPBackend.MATH, "fused": SDPBackend.FLASH_ATTENTION}
SAME_LOSS = 1e-4  # relative, between a batch and its halves: rounding of a mean is far below it, batch norm far above
WAITS = ("synchronisation", "host-copy")


def main(order: Path, answer: Path) -> int:
    asked = json.loads(order.read_text(encoding="utf-8"))
    try:
        found: dict[str, Any] = {"traced": to_json(inspect_model(from_json(Source, asked["source"]), asked["seed"]))}
    except UserError as error:
        found = {"mistake": [error.problem, error.why, error.fix]}
    except KeyboardInterrupt as error:  # raised by the user's code: after Ctrl-C nobody would read the answer
        file = asked["source"]["file"]
        mistake = blamed(error, users_line(error, file, anywhere=True), file, f"{Path(file).name}")
        found = {"mistake": [mistake.problem, mistake.why, mistake.fix]}
    write_atomically(answer, json.dumps(found))
    return 0


def inspect_model(source: Source, seed: int) -> Traced:
    with noting_dropout() as dropped, seeded(seed):
        functions = load_functions(source)
        first = digests(make_model(functions, seed))  # two at once would need twice the memory
        with noting_places() as made:
            model = make_model(functions, seed)
        check_weights(first, digests(model), functions)
        found = look_at(functions, model, made, seed)
    return replace(found, imports=neighbours(functions.file), dropout=(*found.dropout, *dict.fromkeys(dropped)))


def digests(model: nn.Module) -> dict[str, bytes]:
    """Return hashes of the trained parameters, which are float32. A buffer may be memory that nobody has filled yet."""
    trained = [(name, each.detach()) for name, each in model.named_parameters() if each.requires_grad]
    return {name: hashlib.sha256(each.contiguous().numpy().data).digest() for name, each in trained if _is_plain(each)}


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided


def check_weights(first: dict[str, bytes], second: dict[str, bytes], functions: Functions) -> None:
    """Refuse a factory whose weights differ from call to call: every row calls it again, in its own process."""
    other = [name for name in second if first.get(name) != second[name]]
    if not other:
        return
    more = f" and {len(other) - 1} more" if len(other) > 1 else ""
    line = definition(functions.factory, functions.file)
    raise UserError(
        f"{functions.words} gives other weights every time: {other[0]}{more}",
        "rows could not be compared. The generators of torch, Python and NumPy had the same seed both times, so the "
        f"numbers are from elsewhere, or memory that nobody filled{f'; it is made at {line}' if line else ''}",
        "draw with torch, or with numpy.random.default_rng(0); fill what torch.empty gives",
    )


@contextmanager
def noting_dropout() -> Iterator[list[str]]:
    """Like `functional_dropout_off`, and list the lines that would have dropped."""
    found: list[str] = []

    def instead(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def note(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            if given.arguments["training"] and given.arguments["p"] > 0:
                found.append(f"F.{function.__name__} at {place()}")
            return given.arguments["input"]

        return note

    with functional_dropout_off(instead):
        yield found


def look_at(functions: Functions, model: nn.Module, made: Made, seed: int) -> Traced:
    """Inspect a model on the host. Do not use it afterwards: its dropout is silenced, and its blocks are wrapped."""
    rates = silence_dropout(model)
    batches = {size: repeatable_batch(functions, size, seed) for size in (SMALL, LARGE)}
    kinds = [find_loss(functions, model, batch) for batch in batches.values()]  # of each: checks targets too
    subject = Subject(functions, model, kinds[0], batches)
    with blaming(functions.file, f"a step of {functions.words}"):
        check_number(subject)
        seen = look_once(subject, made)
        if rates and seen["sdpa"] and not seen["sdpa_drops"]:
            seen["sdpa_drops"] = attention_drops(subject, rates)
        counted = count(subject)
        drawn = look_for_draws(subject)
        splits = drawn.random or is_mean_of_parts(subject)
        fields = walked(model, made)
        called = seen.pop("embedded")
        fields["embeddings"] = tuple(replace(each, called=called.get(each.name)) for each in fields["embeddings"])
        no_autocast = why_no_autocast(subject)
        precisions = PRECISIONS if no_autocast is None else PRECISIONS[:1]
        saved = tuple(kept_bytes(subject, fields["blocks"], seen["sdpa"], precisions))
    return Traced(
        **fields,
        **seen,
        **counted,
        **described_by(functions),
        loss=subject.kind,
        classes=classes_in(subject),
        batch_bytes=sum(leaf.nbytes for leaf in tensors_of(batches[SMALL])) // SMALL,
        dropout=tuple(rates),
        random=drawn.random,
        draws=drawn.draws,
        generators=drawn.generators,
        splits=splits,
        no_autocast=no_autocast,
        saved=saved,
    )


@dataclass(frozen=True)
class Subject:
    functions: Functions
    model: nn.Module
    kind: str
    """Where the loss comes from: see `Traced.loss`."""
    batches: dict[int, Any]

    @property
    def loss(self) -> Callable[[Any], torch.Tensor]:
        return loss_function(self.functions, self.model, self.kind)


def classes_in(subject: Subject) -> int | None:
    """Return the number of classes of the targets; None unless the loss is redline's cross-entropy."""
    if subject.kind != "cross-entropy":
        return None
    inputs, targets = subject.batches[SMALL]
    with kept_buffers(subject.model), torch.no_grad():
        return classes_of(logits_of(subject.model(inputs)), targets)


def repeatable_batch(functions: Functions, size: int, seed: int) -> Any:
    batch, again = make_batch(functions, size, seed), make_batch(functions, size, seed)
    leaves, others = tensors_of(batch), tensors_of(again)
    if len(leaves) != len(others) or not all(map(same, leaves, others)):
        raise UserError(
            f"{functions.batch_name}({size}, {seed}) gave two different batches",
            "a batch is a function of its seed, or no two runs could be compared",
            "draw with torch.Generator().manual_seed(seed), and read no clock and no file that changes",
        )
    return batch


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True for equal sizes and equal values. NaN equals NaN here, since it may stand for a missing value."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def described_by(functions: Functions) -> dict[str, Any]:
    """Return what the file says about itself: items, unit, and what its shape() returns."""
    named: dict[str, Any] = {"items_per_sample": functions.items_per_sample, "unit": functions.unit}
    if functions.shape is None:
        return named
    with blaming(functions.file, f"{functions.shape_name}() for {functions.words}", functions.shape):
        fields = functions.shape()
    try:
        shape = shape_of(fields, "what it returned")
    except UserError as error:
        where = (definition(functions.shape, functions.file) or functions.words).partition(": ")[0]
        problem = f"{functions.shape_name}() at {where}: {error.problem}"
        raise UserError(problem, error.why, error.fix) from error
    if functions.items_per_sample == 1:
        named = {"items_per_sample": shape.sequence, "unit": TOKEN}
    return {**named, "described": dict(fields), "vocab": shape.vocab}


# a real pass


def check_number(subject: Subject) -> None:
    """Refuse a loss that is NaN or infinite, before anything is compared: NaN is not even equal to itself."""
    small = subject.batches[SMALL]
    with kept_buffers(subject.model), torch.no_grad():
        loss = subject.loss(small).item()
    if math.isfinite(loss):
        return
    raise UserError(
        f"the loss of {subject.functions.words} is no number: {loss} on the first batch",
        why_nan(subject) if math.isnan(loss) else "a logarithm of zero, a division by zero or an overflow gives that",
        "fix that first: look for log(0), 0 / 0, the root of a negative number, and rows that a mask hides whole",
    )


def why_nan(subject: Subject) -> str:
    if any(map(has_nan, tree_leaves(subject.batches[SMALL]))):
        return "the batch itself holds NaN"
    name = next((name for name, tensor in held(subject.model) if has_nan(tensor)), None)
    if name is not None:
        return f"{name} holds NaN before the first step: is it initialised?"
    with kept_buffers(subject.model), torch.no_grad(), FirstNan() as first:
        subject.loss(subject.batches[SMALL])
    if first.place is None:
        return "no line of the file was running when the first NaN came about"
    return f"the first NaN comes about at {with_text(first.place)}"


def look_once(subject: Subject, made: Made) -> dict[str, Any]:
    """Run forward and backward with real values, and note lines that wait, attention and matmuls."""
    small, large = subject.batches[SMALL], subject.batches[LARGE]
    # The watch is the innermost context, so that it blames the user's lines and not ours.
    with (
        blaming_forward(subject),
        sdpa_kernel(SDPBackend.MATH),
        tracing(subject.model) as trace,
        Watch(torch.device("cpu")) as watch,
    ):
        subject.loss(small).backward()
    check_gradients(subject, made)
    with sdpa_kernel(SDPBackend.MATH), tracing(subject.model) as larger, torch.no_grad():
        subject.loss(large)
    subject.model.zero_grad(set_to_none=True)
    products, left_out = merged(trace.products, larger.products, subject.model, made)
    waits = [
        Sync(place=Place(file=each.file, line=each.line), detail=each.detail, kind=each.kind)
        for each in watch.findings(steps=1)
        if each.kind in WAITS and each.file and each.line and not each.file.startswith(PACKAGE)
    ]
    return {
        "embedded": trace.embedded,
        "sdpa": trace.sdpa,
        "sdpa_drops": trace.sdpa_drops,
        "attention": counted_attention(trace),
        "sdpa_calls": tuple(dict.fromkeys(trace.sdpa_calls)),
        "gelu_calls": tuple(dict.fromkeys(trace.gelu_calls)),
        "syncs": tuple(waits),
        "products": products,
        "products_left_out": left_out,
    }


@contextmanager
def blaming_forward(subject: Subject) -> Iterator[None]:
    """Name the user's line if the backward pass raises. It runs no line of the file, but in a second pass torch can say
    which line of the forward pass the operation came from."""
    try:
        yield
    except Exception as error:
        if users_line(error, subject.functions.file, anywhere=True) is not None:
            raise
        line = failing_line(subject)
        if line is None:
            raise
        mistake = blamed(error, line, subject.functions.file, f"the backward pass of {subject.functions.words}")
        raise UserError(mistake.problem, f"it fails at what came from {line}", mistake.fix) from error


def failing_line(subject: Subject) -> str | None:
    with (
        kept_buffers(subject.model),
        warnings.catch_warnings(record=True) as told,
        suppress(Exception),
        torch.autograd.set_detect_anomaly(True, check_nan=False),
    ):
        warnings.simplefilter("always")
        subject.loss(subject.batches[SMALL]).backward()
    frames = [found for each in told for found in re.findall(r'File "(.+)", line (\d+)', str(each.message))]
    for file, number in reversed(frames):
        if file.startswith(PACKAGE):  # the frames beyond are our own callers
            return None
        if is_own(Path(file)):
            return with_text(Place(file=file, line=int(number)))
    return None


def check_gradients(subject: Subject, made: Made) -> None:
    """Refuse sparse gradients, found after a backward pass: a user's layer may call F.embedding(..., sparse=True)."""
    for name, parameter in subject.model.named_parameters():
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            place = made.get(subject.model.get_submodule(name.rpartition(".")[0]))
            raise sparse_gradient(subject.functions.words, name, None if place is None else with_text(place))


def with_text(place: Place) -> str:
    return f"{place}: {linecache.getline(place.file, place.line).strip()}".rstrip(": ")


def attention_drops(subject: Subject, rates: dict[str, float]) -> bool:
    """True if SDPA is called with the dropout rate of a module, as by nn.MultiheadAttention or `dropout_p=self.drop.p`.
    Silenced modules hide that, so their rates are restored for one pass."""
    with (
        kept_buffers(subject.model),
        torch.random.fork_rng(devices=[]),
        functional_dropout_off(),
        dropout_rates(subject.model, rates),
        sdpa_kernel(SDPBackend.MATH),
        tracing(subject.model) as trace,
    ):
        subject.loss(subject.batches[SMALL])
    return trace.sdpa_drops


def counted_attention(trace: Trace) -> tuple[Attention, ...]:
    return tuple(replace(each, count=count) for each, count in Counter(trace.attention).items())


def merged(small: list[Seen], large: list[Seen], model: nn.Module, made: Made) -> tuple[tuple[Product, ...], int]:
    """Merge equal calls, with sizes for one sample. Also return how many calls do not simply grow with the batch."""
    if [each.module for each in small] != [each.module for each in large]:
        return (), len(small)
    found: Counter[Product] = Counter()
    names, left_out = starred(model), 0
    for one, other in zip(small, large, strict=True):
        sizes = sizes_of_one(one, other)
        if sizes is None:
            left_out += 1
            continue
        layer = made.get(model.get_submodule(one.module)) if one.kind != "product" else None
        fields = {**sizes, "area": one.area, "place": one.place, "made": layer}
        found[Product(where=names[one.module], kind=one.kind, **fields)] += 1
    return tuple(replace(product, count=count) for product, count in found.items()), left_out


def sizes_of_one(small: Seen, large: Seen) -> dict[str, Any] | None:
    names = ("m", "n", "k", "batch")
    sizes = {name: getattr(small, name) for name in names}
    grown = [name for name in names if getattr(large, name) != sizes[name]]
    if not grown:
        return {**sizes, "grows": None}
    name = grown[0]
    if len(grown) > 1 or getattr(large, name) * SMALL != sizes[name] * LARGE or sizes[name] % SMALL:
        return None
    return {**sizes, name: sizes[name] // SMALL, "grows": name}


def look_for_draws(subject: Subject) -> Randomness:
    """Look for random draws in the forward pass of a training step, with autograd on. Buffers are reset after it."""
    with kept_buffers(subject.model) as reset:

        def run() -> torch.Tensor:
            loss = subject.loss(subject.batches[SMALL]).detach()
            reset()
            return loss

        return randomness(run)


def is_mean_of_parts(subject: Subject) -> bool:
    batch = subject.batches[LARGE]
    halves = [rows_of(batch, start, LARGE // 2) for start in (0, LARGE // 2)]
    with kept_buffers(subject.model) as reset, torch.no_grad():
        whole, *parts = (_with(reset, subject.loss, each) for each in (batch, *halves))
    return math.isclose(whole, sum(parts) / 2, rel_tol=SAME_LOSS, abs_tol=1e-7)


def _with(reset: Callable[[], None], loss: Callable[[Any], torch.Tensor], batch: Any) -> float:
    found = loss(batch).item()
    reset()
    return found


class kept_buffers:  # noqa: N801  used as a function
    """Restores buffers: batch norm's averages move with every pass, and comparisons must start from the same ones."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def __enter__(self) -> Callable[[], None]:
        return self.reset

    def __exit__(self, *_: object) -> None:
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self.before[name])


# passes with fake tensors


def count(subject: Subject) -> dict[str, Any]:
    """Count the FLOPs of forward and backward: matmuls, convolutions, and attention with its whole square."""
    found = {size: with_sizes_only(subject, size, _flops) for size in (SMALL, LARGE)}
    lines = {
        name: line(found[SMALL][index], found[LARGE][index])
        for index, name in enumerate(("flops_forward", "flops_backward"))
    }
    return {**lines, "uncounted": found[SMALL][2]}


def _flops(run: Callable[[], torch.Tensor], known: set[int]) -> tuple[int, int, tuple[str, ...]]:
    with sdpa_kernel(SDPBackend.MATH), FlopCounter() as counter:
        loss = run()
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward, counter.uncounted


def line(small: float, large: float) -> Line:
    per_sample = (large - small) / (LARGE - SMALL)
    return Line(constant=small - SMALL * per_sample, per_sample=per_sample)


def why_no_autocast(subject: Subject) -> str | None:
    """Return what the forward pass raises in bf16, with the user's line; None if it runs. It has already run in fp32.
    Not every fault shows: fake tensors reveal few of this kind, and on a GPU autocast casts more functions. A row that
    still fails reports that itself."""
    try:
        for size in (SMALL, LARGE):
            with_sizes_only(subject, size, partial(kept_under, "bf16", "naive"))
    except Exception as error:
        line = users_line(error, subject.functions.file, anywhere=True)
        raised = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        return f"{ON_CPUS}a step under bf16 autocast raises {raised}" + (f" (at {line})" if line else "")
    return None


def kept_bytes(subject: Subject, blocks: Any, sdpa: bool, precisions: Sequence[str]) -> Iterator[Saved]:
    """Yield the bytes kept by each mode of running. The blocks are wrapped last, since that changes the model."""
    for checkpointing in ("none", *(("full",) if blocks is not None else ())):
        if checkpointing == "full":
            checkpoint_blocks(subject.model, blocks)
        for attention in ("naive", "fused") if sdpa else ("naive",):
            for precision in precisions:
                found = kept_line(subject, precision, attention)
                if found is not None:
                    yield Saved(precision=precision, attention=attention, checkpointing=checkpointing, bytes=found)


def kept_line(subject: Subject, precision: str, attention: str) -> Line | None:
    """Return None if the fused kernel does not accept its inputs."""
    measure = partial(kept_under, precision, attention)
    try:
        with unrolled_lstms(subject.model):
            small, large = (with_sizes_only(subject, size, measure) for size in (SMALL, LARGE))
    except RuntimeError:
        if attention == "naive":
            raise
        return None
    return line(small, large)


def kept_under(precision: str, attention: str, run: Callable[[], torch.Tensor], known: set[int]) -> int:
    with sdpa_kernel(BACKENDS[attention]), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        return kept(run, known)


@contextmanager
def unrolled_lstms(model: nn.Module) -> Iterator[None]:
    """Run LSTMs as torch's own loop over the steps, which keeps the gates. oneDNN keeps them in its own workspace,
    which has no size with fake tensors."""
    if not any(isinstance(module, nn.LSTM) for module in model.modules()):
        yield
        return
    before, *_ = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)


def kept(run: Callable[[], torch.Tensor], known: set[int]) -> int:
    """Return the bytes of the storages that autograd keeps, except those of parameters, buffers and the batch."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            storages[storage._cdata] = storage  # kept alive, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
    del loss
    return sum(storage.nbytes() for storage in storages.values())


def with_sizes_only(subject: Subject, size: int, measure: Callable[[Callable[[], torch.Tensor], set[int]], Any]) -> Any:
    """Return `measure(run, known storages)` with fake tensors, so that a large model costs nothing. Code that looks at
    a value cannot run like that, and gets real tensors instead."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            return _measured(subject, subject.batches[size], measure, fake.from_tensor)
    except Exception:  # whatever the reason, the pass with real tensors shows whether it is the user's mistake
        with kept_buffers(subject.model):
            found = _measured(subject, subject.batches[size], measure, lambda tensor: tensor)
        subject.model.zero_grad(set_to_none=True)
        return found


def _measured(subject: Subject, batch: Any, measure: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    inputs = tree_map_only(torch.Tensor, convert, batch)
    with replaced(subject.model, convert) as tensors:
        known = {tensor.untyped_storage()._cdata for tensor in (*tensors, *tensors_of(inputs))}
        return measure(lambda: subject.loss(inputs), known)


if __name__ == "__main__":
    # Not in main, which tests call in their own process: that must survive whatever its stdin is.
    leave_with_parent()
    raise SystemExit(main(Path(sys.argv[1]), Path(sys.argv[2])))
