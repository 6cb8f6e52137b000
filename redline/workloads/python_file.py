"""`file.py:factory`: a user's model as a workload. The file is read here and never run: parents have no torch.

    found = find_python_file("my_model.py:vit")        # None: the words mean something else
    python_workload(found, traced)                     # with what a worker saw of the model (search/inspect.py)

docs/your-model.md says what the file must contain. Each rung that its code does not allow from outside is listed with
the line to change.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from redline.core.errors import UserError, explained, unknown_name
from redline.core.plan import ON_FUSED_BACKWARD
from redline.core.traced import SAMPLE, Embedding, Place, Product, Traced, Unlisted
from redline.core.workload import NO_TOKENIZER, Shape, Source, Workload
from redline.predict.flops import parameters
from redline.predict.sizes import round_up
from redline.predict.traced_lint import VOCABULARY
from redline.workloads.resolve import BY_SIZE

WORDS = re.compile(r"(?P<path>.+\.py)(?::(?P<name>.*))?", re.DOTALL)
AUTOCAST_RUNGS = ("bf16", "fp16", "adamw-bf16", "adamw-bf16-kahan")
ATTENTION_RUNGS = ("flash", "cudnn-attention")
PAGE = "docs/your-model.md"
DROPOUT_OFF = "dropout is off"
PARTS = {"batch": "make_batch", "loss": "loss", "shape": "shape"}  # what a file may define besides a model's factory


@dataclass(frozen=True, kw_only=True)
class PythonFile:
    path: Path
    """Absolute path."""
    factory: str
    digest: str

    @property
    def words(self) -> str:
        return f"{self.path.name}:{self.factory}"

    @property
    def source(self) -> Source:
        return Source(kind="python", file=str(self.path), factory=self.factory, digest=self.digest)


def is_python_file(words: str) -> bool:
    return WORDS.fullmatch(words) is not None


def find_python_file(words: str) -> PythonFile | None:
    """Find the file and factory that the words name; None if they name something else. Raises a UserError if the file
    cannot be used."""
    match = WORDS.fullmatch(words)
    if match is None:
        return None
    path, name = Path(match["path"]).expanduser(), match["name"]
    data = _read(path)
    names = _top_level(path, data)
    if not name:
        raise UserError(
            f"{path.name} alone does not say which model",
            "a file may hold several functions that make one",
            _how_to_name(words.rstrip(":"), names.makers),
        )
    if not names.star and name not in names.bound:
        known = names.makers or ("none: the file defines no function without arguments",)
        raise unknown_name(f"function in {path.name}", name, known)
    if (line := names.later.get(name)) is not None:
        raise UserError(
            f"{path.name}:{name} is an async function",
            f"calling it returns a coroutine, not a model; it is defined at {path.name}:{line}",
            f"write `def {name}()` there",
        )
    if not names.star and not {f"{name}_batch", "make_batch"} & names.bound:
        raise UserError(
            f"{path.name} makes no batches",
            f"neither {name}_batch nor make_batch is in it, and a model is measured on batches of its own kind",
            f"write `def make_batch(size, seed)` that returns tensors whose first dimension is size ({PAGE})",
        )
    return PythonFile(path=path.resolve(), factory=name, digest=hashlib.sha256(data).hexdigest())


def _how_to_name(file: str, makers: list[str]) -> str:
    if not makers:
        return f"write `def build(): return MyModel()` into it, and name that behind a colon: {file}:build"
    others = f" (or {', '.join(makers[1:])})" if len(makers) > 1 else ""
    return f"name one behind a colon: {file}:{makers[0]}{others}"


def _read(path: Path) -> bytes:
    with explained(f"cannot read {path}", "check the path: FILE.py:FACTORY"):
        return path.read_bytes()


@dataclass(frozen=True)
class _Names:
    bound: set[str]
    makers: list[str]
    """What could make a model: functions that need no arguments, or such classes if there are none."""
    star: bool
    """True if there is a `from ... import *`, whose names are not known without running it."""
    later: dict[str, int]
    """Async functions, and their lines."""


def _top_level(path: Path, data: bytes) -> _Names:
    try:
        tree = ast.parse(data, filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = f"{path.name}:{error.lineno}: {(error.text or '').strip()}" if isinstance(error, SyntaxError) else ""
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UserError(f"{path.name} is not Python", f"{why} at {line}" if line else why, "fix that line") from error
    bound, star, later = set[str](), False, dict[str, int]()
    functions, classes = list[ast.FunctionDef](), list[ast.ClassDef]()
    for node in _statements(tree.body):
        if isinstance(node, ast.FunctionDef):
            bound.add(node.name)
            functions.append(node)
        elif isinstance(node, ast.AsyncFunctionDef):
            bound.add(node.name)
            later[node.name] = node.lineno
        elif isinstance(node, ast.ClassDef):
            bound.add(node.name)
            classes.append(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            star |= any(alias.name == "*" for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    makers = [node.name for node in functions if _is_free(node.name, bound) and _may_make(node.args)]
    makers = makers or [node.name for node in classes if _is_free(node.name, bound) and _makes(node)]
    return _Names(bound, makers, star, later)


def _is_free(name: str, bound: set[str]) -> bool:
    """True for names that are not private, not a part of a model (make_batch, or vit_loss beside vit) and not main."""
    model, _, part = name.rpartition("_")
    return not (name.startswith("_") or name in (*PARTS.values(), "main") or (part in PARTS and model in bound))


def _may_make(arguments: ast.arguments, given: int = 0) -> bool:
    """True if it can be called without arguments, besides the `given` that Python passes, and does not make batches,
    which is what a function of size and seed does."""
    placed = [*arguments.posonlyargs, *arguments.args][given:]
    needed = len(placed) > len(arguments.defaults) or None in arguments.kw_defaults
    return not needed and not {"size", "seed"} <= {each.arg for each in (*placed, *arguments.kwonlyargs)}


def _makes(kind: ast.ClassDef) -> bool:
    own = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return all(_may_make(node.args, given=1) for node in own)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of the file itself, including those below an `if`, a `try` or a `with`."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            parts = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            parts += [handler.body for handler in getattr(node, "handlers", [])]
            for part in parts:
                yield from _statements(part)


# a traced model as a workload


def python_workload(found: PythonFile, traced: Traced) -> Workload:
    rate, micro_batch = next((rate, size) for most, rate, size in BY_SIZE if traced.parameters <= most)
    return Workload(
        name=found.factory,
        shape=traced,
        tokenizer=NO_TOKENIZER,
        micro_batch=micro_batch,
        learning_rate=rate,
        source=found.source,
        cannot=obstacles(traced, found.path.name),
        notes=tuple(_notes(traced, rate, micro_batch)),
    )


def for_training(workload: Workload, device: str) -> Workload:
    """Return the workload with the model's dropout on."""
    traced, cannot = workload.shape, dict(workload.cannot)
    assert isinstance(traced, Traced)
    if device == "cpu" and traced.sdpa_drops:
        reason = "fused attention on a CPU has no dropout, and this model drops in its attention"
        cannot |= dict.fromkeys(ATTENTION_RUNGS, reason)
    notes = [note for note in workload.notes if not note.startswith(DROPOUT_OFF)]
    if traced.dropout:
        notes.append(f"dropout as the file has it ({_some(traced.dropout)}); measurements leave it out")
    return replace(workload, source=replace(workload.source, dropout=True), cannot=cannot, notes=tuple(notes))


def _notes(traced: Traced, rate: float, micro_batch: int) -> Iterator[str]:
    yield (
        f"a learning rate of {rate:g}, and micro batches of {micro_batch} where no other is given (--micro-batch), as "
        f"usual for {traced.parameters:,} parameters"
    )
    if traced.unit == SAMPLE and traced.items_per_sample == 1:
        yield "rates are samples per second; a file with items_per_sample and unit says what else to count"
    if traced.described is not None:
        said = parameters(Shape(**traced.described)).total
        if said != traced.parameters:
            yield f"shape() describes {said:,} parameters, and the model has {traced.parameters:,}"
    if traced.no_autocast is not None:
        yield without_autocast(traced.no_autocast)
    if traced.dropout:
        yield (
            f"{DROPOUT_OFF} while measuring ({_some(traced.dropout)}): no two runs could be compared with it; "
            "`redline train` keeps it"
        )
    if traced.why_random is not None:
        yield f"equivalence is not checked: {traced.why_random}"
    if not traced.splits:
        yield (
            'the loss of a batch is not the mean over its parts (batch norm, or a loss with reduction="sum"?), so the '
            "reference takes it whole"
        )
    if traced.sdpa and traced.attention:
        yield f"attention is also written out at {_places(traced)}, which no attention kernel reaches"


def without_autocast(reason: str) -> str:
    """Return the note for a failure under autocast. A GPU still tries these rungs, and the row shows the outcome."""
    return f"bf16 and fp16 are left out on a CPU, and may fail on a GPU: {reason}"


def _some(names: tuple[str, ...], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _places(traced: Traced) -> str:
    return ", ".join(dict.fromkeys(str(each.place) for each in traced.attention))


def obstacles(traced: Traced, file: str) -> dict[str, str]:
    """Return the rungs that need a change in the model's own code, each with what to change and where."""
    found = dict.fromkeys(ATTENTION_RUNGS, _attention(traced)) if not traced.sdpa else {}
    found["padded-vocab"] = _padding(traced, file)
    found["tied-weights"] = (
        f"the file ties its weights itself: {traced.shared[0]}" if traced.shared else _tying(traced, file)
    )
    found |= dict.fromkeys(("fused-loss", "chunked-loss", "fp8-head"), _loss(traced, file))
    found["bf16-residual"] = _stream(traced, file)
    found["fused-backward"] = f"it needs blocks that are written for it, and those in {file} are not"
    found |= dict.fromkeys(ON_FUSED_BACKWARD, found["fused-backward"])
    found["tuned-matmuls"] = f"redline.model.tuned.TunedLinear is a layer to use for nn.Linear in {file}"
    found["fp8-linears"] = f"which layers in {file} may lose precision is not known: redline.model.fp8 has one to use"
    found["selective-checkpointing"] = _recomputing(traced, file)
    if traced.blocks is None:
        found["checkpointing"] = _listing(traced.unlisted)
    if traced.no_autocast is not None:
        found |= dict.fromkeys(AUTOCAST_RUNGS, traced.no_autocast)
    if not traced.tanh_gelus:
        found["sigmoid-gelu"] = _gelu(traced.gelu_calls)
    return {name: reason for name, reason in found.items() if reason}


def _recomputing(traced: Traced, file: str) -> str:
    lines = listed(dict.fromkeys((*(each.place for each in traced.attention), *traced.sdpa_calls)))
    if not lines:
        return "no attention was seen that could be computed again"
    return (
        f"what is computed again is for {file} to say: put the attention at {lines} into a function, and call that "
        "through torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
    )


def _listing(unlisted: Unlisted | None) -> str:
    told = "no list of equal blocks was found to recompute"
    if unlisted is None:
        return told
    at = f" (made at {listed(unlisted.made)})" if unlisted.made else ""
    return f"{told}: hold the {unlisted.count} {unlisted.kind}{at} in one nn.ModuleList or nn.Sequential"


def _gelu(calls: tuple[Place, ...]) -> str:
    if not calls:
        return "the model has no tanh GELU that could be exchanged"
    return (
        f"F.gelu is a function at {listed(calls)}: make nn.GELU(approximate='tanh') in __init__ and call that there, "
        "since modules can be exchanged from outside"
    )


def listed(places: Iterable[Place], most: int = 3) -> str:
    """'vit.py:12, vit.py:30 and 4 more'."""
    return _some(tuple(map(str, places)), most)


def _attention(traced: Traced) -> str:
    if not traced.attention:
        return "no attention was seen: neither F.scaled_dot_product_attention nor a softmax between batched products"
    first = traced.attention[0]
    if first.module is not None:
        return (
            f"{first.module} writes attention out at {_places(traced)}, because its weights are asked for: pass "
            "need_weights=False there"
        )
    call = "F.scaled_dot_product_attention(q, k, v" + (", is_causal=True)" if first.causal else ")")
    return f"attention is written out at {_places(traced)}: call {call} there"


def head_of(traced: Traced) -> Product | None:
    """Return the last linear layer that ran."""
    return next((each for each in reversed(traced.products) if each.kind == "linear"), None)


def _table(traced: Traced) -> Embedding | None:
    """Return the largest embedding: the vocabulary's, as there may be others for positions."""
    return max(traced.embeddings, key=lambda each: each.rows, default=None)


def _no_vocabulary(traced: Traced) -> str | None:
    """Return why the head is not the vocabulary's; None if it is. A text classifier has an embedding, but its head is
    for its classes. A head and a table that are padded differently still belong to one vocabulary."""
    table, head = _table(traced), head_of(traced)
    if table is None or head is None or round_up(head.n, VOCABULARY) == round_up(table.rows, VOCABULARY):
        return None
    return (
        f"the head is not the vocabulary's: {head.where or 'it'}{_at('made', head.made)} gives {head.n:,} outputs, and "
        f"{table.name} has {table.rows:,} rows"
    )


def _at(verb: str, place: Place | None) -> str:
    return "" if place is None else f" ({verb} at {place})"


def _tying(traced: Traced, file: str) -> str:
    table, head = _table(traced), head_of(traced)
    if table is None:
        return f"no embedding was found in {file} that a head could share"
    if reason := _no_vocabulary(traced):
        return reason
    said = f"which weights to share is for {file} to say"
    if head is None:
        return f"{said}: `head.weight = embedding.weight` in its __init__"
    if (head.n, head.k) != (table.rows, table.width):
        return (
            f"one weight cannot be both: that of {table.name}{_at('made', table.made)} is {table.rows:,} x "
            f"{table.width:,}, that of the head{_at('made', head.made)} {head.n:,} x {head.k:,}"
        )
    if not all(part.isidentifier() for part in f"{head.where}.{table.name}".split(".")):  # '0' of a Sequential
        return f"{said}: the head's weight{_at('made', head.made)} and that of {table.name}{_at('made', table.made)}"
    return (
        f"{said}: `self.{head.where}.weight = self.{table.name}.weight` behind "
        f"both layers{_at(table.name, table.made)}{_at(head.where, head.made)}"
    )


def _stream(traced: Traced, file: str) -> str:
    table = _table(traced)
    if traced.blocks is None and traced.unlisted is None:
        return f"no list of equal blocks was found in {file}, so no stream runs between any"
    behind = "" if table is None else _at("called", table.called) or _at("made", table.made)
    where = f"there, behind {table.name}{behind}" if table is not None and behind else "there"
    return f"the stream between the blocks is made inside {file}: cast it {where}, x = x.bfloat16()"


def _padding(traced: Traced, file: str) -> str:
    table, head = _table(traced), head_of(traced)
    if table is None:
        return f"no embedding was found in {file}"
    if reason := _no_vocabulary(traced):
        return reason
    if table.rows % VOCABULARY == 0:
        return f"the {table.rows:,} rows of {table.name} are a multiple of {VOCABULARY} already"
    at = f" at {table.made}" if table.made is not None else ""
    heads = "" if head is None or head.made is None else f" at {head.made}"
    better = f"{round_up(table.rows, VOCABULARY):,}"
    return f"{table.name} has {table.rows:,} rows{at}: make them {better} there, and the head's{heads}"


def _loss(traced: Traced, file: str) -> str:
    """Return why the head's matmul and the loss cannot be fused."""
    head = head_of(traced)
    if head is None:
        return f"no linear layer was found in {file} that could be its head"
    at = _at("called", head.place) or _at("made", head.made)
    goes = {
        "own": f"loss() in {file} goes from inputs to loss",
        "cross-entropy": f"the model in {file} returns what comes behind it",
    }
    return f"it needs the features before the head{at}, and " + goes.get(
        traced.loss, f"the model in {file} goes from inputs to loss"
    )
