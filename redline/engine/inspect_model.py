"""The process that looks at a user's model: `python -m redline.engine.inspect_model ORDER ANSWER`.

ORDER is a JSON file with a workload's Source and a seed; ANSWER becomes {"traced": {...}} or {"mistake": [problem, why,
fix]}. The model is built on the host, walked, and run forward and backward on a batch of two: once for real, for what
depends on values (synchronisations, randomness, the loss), and then with tensors that have sizes only, at two sizes of
the batch, for FLOPs and for the bytes that each way of running keeps. Where the code needs values, real ones are used
for all of it.
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

SMALL, LARGE = 2, 4  # samples: batch norm refuses one
PRECISIONS = ("fp32", "bf16")
BACKENDS = {"naive": SDPBackend.MATH, "fused": SDPBackend.FLASH_ATTENTION}
SAME_LOSS = 1e-4  # of a whole batch and of its halves, relative: rounding of a mean is far less, batch norm far more
WAITS = ("synchronisation", "host-copy")


def main(order: Path, answer: Path) -> int:
    asked = json.loads(order.read_text(encoding="utf-8"))
    try:
        found: dict[str, Any] = {"traced": to_json(inspect_model(from_json(Source, asked["source"]), asked["seed"]))}
    except UserError as error:
        found = {"mistake": [error.problem, error.why, error.fix]}
    except KeyboardInterrupt as error:  # of the user's code: after Ctrl-C nobody is there to read the answer
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
    """Of parameters that are trained, which are plain float32. A buffer may be room that nobody has written to yet."""
    trained = [(name, each.detach()) for name, each in model.named_parameters() if each.requires_grad]
    return {name: hashlib.sha256(each.contiguous().numpy().data).digest() for name, each in trained if _is_plain(each)}


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided


def check_weights(first: dict[str, bytes], second: dict[str, bytes], functions: Functions) -> None:
    """Every row starts from the factory's weights, in a process of its own."""
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
    """As `functional_dropout_off`, with the lines that would have dropped."""
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
    """A model on the host, which is not to be used afterwards: its dropout is gone, its blocks are wrapped."""
    rates = silence_dropout(model)
    batches = {size: repeatable_batch(functions, size, seed) for size in (SMALL, LARGE)}
    kinds = [find_loss(functions, model, batch) for batch in batches.values()]  # of each: its targets are looked at
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
    """Of its loss."""
    batches: dict[int, Any]

    @property
    def loss(self) -> Callable[[Any], torch.Tensor]:
        return loss_function(self.functions, self.model, self.kind)


def classes_in(subject: Subject) -> int | None:
    """That its targets are of; None where no cross-entropy of ours is taken."""
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
    """Of one size and alike number by number; a NaN, which may stand for a value that is missing, is like a NaN."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def described_by(functions: Functions) -> dict[str, Any]:
    """What the file says of itself."""
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
    """Before anything is compared: a NaN is not even equal to itself."""
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
    """Forward and backward with values: lines that wait, attention, products."""
    small, large = subject.batches[SMALL], subject.batches[LARGE]
    # The watch comes last, so that the lines it blames are the user's and not ours.
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
    """A backward pass runs no line of the file. Where it raises, torch can tell in a second one from which line of the
    forward pass the operation came."""
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
        if file.startswith(PACKAGE):  # what lies beyond is whoever called us
            return None
        if is_own(Path(file)):
            return with_text(Place(file=file, line=int(number)))
    return None


def check_gradients(subject: Subject, made: Made) -> None:
    """As they are after a backward pass: a layer of the user's own may call F.embedding(..., sparse=True)."""
    for name, parameter in subject.model.named_parameters():
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            place = made.get(subject.model.get_submodule(name.rpartition(".")[0]))
            raise sparse_gradient(subject.functions.words, name, None if place is None else with_text(place))


def with_text(place: Place) -> str:
    return f"{place}: {linecache.getline(place.file, place.line).strip()}".rstrip(": ")


def attention_drops(subject: Subject, rates: dict[str, float]) -> bool:
    """Whether a call of SDPA is given the rate of a module: nn.MultiheadAttention does that, and so does
    `dropout_p=self.drop.p`. Silenced modules do not tell, so a pass has their rates again."""
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
    """Calls alike as one, with their sizes for one sample; and how many do not simply grow with the batch."""
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
    """In the forward pass as it is trained, with gradients. Buffers may move."""
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
    """Batch norm's averages move with every pass; comparisons start from the same ones."""

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


# passes with sizes only


def count(subject: Subject) -> dict[str, Any]:
    """FLOPs of forward and backward: of every product and convolution, and of attention the whole square."""
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
    """What the forward pass raises in bf16, with the user's line; it ran in fp32 before. Not all is seen: sizes alone
    show few faults of this kind, and on a GPU autocast casts more functions. A row that still fails says so itself."""
    try:
        for size in (SMALL, LARGE):
            with_sizes_only(subject, size, partial(kept_under, "bf16", "naive"))
    except Exception as error:
        line = users_line(error, subject.functions.file, anywhere=True)
        raised = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        return f"{ON_CPUS}a step under bf16 autocast raises {raised}" + (f" (at {line})" if line else "")
    return None


def kept_bytes(subject: Subject, blocks: Any, sdpa: bool, precisions: Sequence[str]) -> Iterator[Saved]:
    """For each way of running; the blocks' forward is wrapped last, as that changes the model."""
    for checkpointing in ("none", *(("full",) if blocks is not None else ())):
        if checkpointing == "full":
            checkpoint_blocks(subject.model, blocks)
        for attention in ("naive", "fused") if sdpa else ("naive",):
            for precision in precisions:
                found = kept_line(subject, precision, attention)
                if found is not None:
                    yield Saved(precision=precision, attention=attention, checkpointing=checkpointing, bytes=found)


def kept_line(subject: Subject, precision: str, attention: str) -> Line | None:
    """None where the fused kernel does not take what it is given."""
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
    """As torch's own loop over the steps, which keeps the gates. oneDNN keeps them in a workspace of its own, which has
    no size on tensors without numbers."""
    if not any(isinstance(module, nn.LSTM) for module in model.modules()):
        yield
        return
    before, *_ = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)


def kept(run: Callable[[], torch.Tensor], known: set[int]) -> int:
    """Bytes of the storages that autograd keeps, those of parameters, buffers and the batch left out."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            storages[storage._cdata] = storage  # held, so that no other gets its number
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
    del loss
    return sum(storage.nbytes() for storage in storages.values())


def with_sizes_only(subject: Subject, size: int, measure: Callable[[Callable[[], torch.Tensor], set[int]], Any]) -> Any:
    """`measure(run, known storages)` with tensors that hold no numbers: a large model costs nothing. Code that looks at
    a value cannot run so; then the numbers are real."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            return _measured(subject, subject.batches[size], measure, fake.from_tensor)
    except Exception:  # whatever stands in the way, the real pass tells whether it is the user's mistake
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
    # Here and not in main, which tests call in their own process: that one should stay whatever its stdin is.
    leave_with_parent()
    raise SystemExit(main(Path(sys.argv[1]), Path(sys.argv[2])))
