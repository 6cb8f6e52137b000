"""A model that a user's own file makes, used without editing the file.

    model = PythonAdapter(workload).build(plan, device)

Everything that is changed from outside is changed here: the loss is appended to the model, dropout is off while
measuring, equal blocks are checkpointed, tanh GELUs are replaced. Batches may be any trees of tensors whose first
dimension is the batch size. What the file's code does not allow is listed in the workload, with the line to change
(`workloads/python_file.py`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from redline.core.errors import UserError
from redline.core.generators import seeded
from redline.core.known_fixes import known_fix
from redline.core.plan import Plan
from redline.core.traced import Blocks, Traced
from redline.core.user_code import (
    NO_LINE,
    Functions,
    assignment,
    blaming,
    check_neighbours,
    check_targets,
    definition,
    described,
    load_functions,
    own_file,
    ran_in,
)
from redline.core.workload import Workload
from redline.model.adapter import DTYPES, Adapter, LossOf, exchange_gelus
from redline.model.recompute import recomputed

Loss = Callable[[Any], torch.Tensor]
"""Takes a whole batch, as the file's make_batch returned it."""
FUNCTIONAL_DROPOUT = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
LONGEST_VALUE = 60  # characters of a user's expression that a fix repeats
TARGETS = ("target", "targets", "label", "labels", "y")


class PythonAdapter(Adapter):
    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        source, traced = workload.source, workload.shape
        assert isinstance(traced, Traced)
        self.traced = traced
        self.functions = load_functions(source)
        check_neighbours(self.functions.file, traced.imports)
        self._initial: dict[str, torch.Tensor] = {}

    def build(self, plan: Plan, device: torch.device) -> nn.Module:
        model = make_model(self.functions, self.workload.seed)
        if not self.workload.source.dropout:
            silence_dropout(model)
        if plan.gelu == "sigmoid":
            exchange_gelus(model, is_tanh_gelu)
        if plan.checkpointing == "full" and self.traced.blocks is not None:
            checkpoint_blocks(model, self.traced.blocks)
        for parameter in model.parameters():
            if parameter.dtype is torch.float32:  # frozen parameters of other types stay as they are
                parameter.data = parameter.data.to(DTYPES.get(plan.weights, parameter.dtype))
        self._initial = {name: tensor.detach().clone() for name, tensor in held(model)}
        return model.to(device)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        blocks = self.traced.blocks
        return [] if blocks is None else list(model.get_submodule(blocks.name).children())

    def draw(self, model: nn.Module, name: str, whole: torch.Tensor) -> None:
        whole.copy_(self._initial[name])

    def fill_buffers(self, model: nn.Module) -> None:
        for name, buffer in model.named_buffers():
            buffer.copy_(self._initial[name])

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Restore buffers too: batch norm's averages change with every step."""
        for name, tensor in held(model):
            tensor.copy_(self._initial[name])

    def loss_of(self, model: nn.Module, plan: Plan) -> LossOf:
        return loss_function(self.functions, model, self.traced.loss)

    def arguments(self, batch: Any) -> tuple[Any, ...]:
        return (batch,)

    def pieces(self, batch: Any, size: int) -> list[tuple[Any, float]]:
        whole = tensors_of(batch)[0].size(0)
        cut = [rows_of(batch, start, size) for start in range(0, whole, size)]
        return [(piece, tensors_of(piece)[0].size(0) / whole) for piece in cut]

    def items(self, batch: Any) -> int:
        return int(tensors_of(batch)[0].size(0)) * self.traced.items_per_sample

    def state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return dict(model.named_buffers())

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Switch off dropout and freeze batch norm's averages: a validation must not change the training."""
        model.eval()
        try:
            yield
        finally:
            model.train()


def held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers; a tensor with several names comes once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Return the leaves of a batch, tensors or not, without None, which may stand for a mask that is absent."""
    return [leaf for leaf in tree_leaves(batch) if leaf is not None]


def rows_of(batch: Any, start: int, count: int) -> Any:
    return tree_map_only(torch.Tensor, lambda leaf: leaf[start : start + count], batch)


def make_model(functions: Functions, seed: int) -> nn.Module:
    """Build the model on the host, from the seed, so every process starts from the same weights on any device."""
    check_factory(functions)
    whose = functions.file, f"{functions.name}()", functions.factory
    with seeded(seed), blaming(*whose):
        torch.manual_seed(seed)  # seeds devices too: a factory may draw random numbers there
        model = functions.factory()
    if not isinstance(model, nn.Module):
        is_class = inspect.isclass(model)
        raise UserError(
            f"{functions.words} returned {f'the class {model.__name__}' if is_class else described(model)}",
            "a factory makes the model that is to be trained",
            f"return {model.__name__}()" if is_class else f"let {functions.name}() return a torch.nn.Module",
        )
    check_trainable(model, functions)
    check_sized(model, functions.words, f"in {functions.name}(), before it is returned")
    check_filled(model, functions.words, f"make it on the host in {functions.name}()")
    check_fp32(
        model, functions.words, f"let {functions.name}() return model.float(), and {functions.batch_name} float32"
    )
    return model.to("cpu").train()


def check_factory(functions: Functions) -> None:
    """Refuse a factory that needs arguments, since nobody could supply them, and one that is itself a module, which
    would be the same model whatever the seed."""
    if isinstance(functions.factory, nn.Module):
        raise module_for_factory(functions)
    try:
        parameters = inspect.signature(functions.factory).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in variable]
    if not needed:
        return
    line = definition(functions.factory, functions.file)
    given = ", ".join(f"{name}=..." for name in needed)
    raise UserError(
        f"{functions.words} needs arguments: {', '.join(needed)}",
        f"a factory is called without any{f'; it is defined at {line}' if line else ''}",
        f"give them defaults there, or name a function that does: `def build(): return {functions.name}({given})`",
    )


def module_for_factory(functions: Functions) -> UserError:
    name, found = functions.name, assignment(functions.name, functions.file)
    where, value = found or (None, "...")
    return UserError(
        f"{functions.words} is a module, a {type(functions.factory).__name__}, and not a function",
        "a factory is called for a new model, whose weights come from the seed"
        + (f"; it is made at {where}" if where else ""),
        f"write `def {name}(): return {value if len(value) <= LONGEST_VALUE else '...'}`",
    )


def check_trainable(model: nn.Module, functions: Functions) -> None:
    """Refuse a model without trainable parameters: they may be frozen, or hidden from torch in a plain list."""
    held_tensors = list(model.parameters())
    if any(parameter.requires_grad for parameter in held_tensors):
        return
    kind = type(model).__name__
    if held_tensors:
        why = f"{kind} has {len(held_tensors)}, none of which takes a gradient: it is frozen"
        fix = f"call requires_grad_(True) in {functions.name}() on the part that is to be trained"
    else:
        why = f"{kind} has none at all"
        fix = "assign layers as attributes, or in an nn.ModuleList: a plain list hides them from torch"
    raise UserError(f"{functions.words} has no parameters to train", why, fix)


def check_sized(model: nn.Module, what: str, where: str) -> None:
    """Refuse lazy layers: without sizes nothing can be counted, drawn or trained. `where`: where to run a batch."""
    name = next((name for name, tensor in held(model) if is_lazy(tensor)), None)
    if name is None:
        return
    owner = model.get_submodule(name.rpartition(".")[0])
    raise UserError(
        f"{what} has no size for {name}",
        f"it belongs to a {type(owner).__name__}, which takes its sizes from the first batch, and weights are counted "
        "and given to the optimizer before there is one",
        f"run one batch through the model {where}, or make the layer with its sizes",
    )


def check_filled(model: nn.Module, what: str, fix: str) -> None:
    """Refuse tensors on the meta device: they have sizes but no values."""
    name = next((name for name, tensor in held(model) if tensor.is_meta), None)
    if name is not None:
        raise UserError(
            f"{what} has no numbers in {name}",
            "it is on the meta device, which keeps sizes alone, and a step starts from weights that were drawn",
            f"{fix}, without torch.device('meta')",
        )


def check_fp32(model: nn.Module, what: str, fix: str) -> None:
    """Refuse trained parameters that are not float32. Frozen ones may have any type, as quantised layers do."""
    trained = [(name, each.dtype) for name, each in model.named_parameters() if each.requires_grad]
    wrong = [(name, dtype) for name, dtype in trained if dtype is not torch.float32]
    if not wrong:
        return
    name, dtype = wrong[0]
    if dtype.is_complex:
        fix = f"keep {name} as torch.view_as_real(...) of it, and take torch.view_as_complex(...) of that in forward"
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    raise UserError(
        f"{what} has parameters that are not float32: {name} ({str(dtype).removeprefix('torch.')}){more}",
        "weights are trained in float32, which every recipe is compared with; fewer bits are a recipe's choice (bf16)",
        fix,
    )


def check_dense(model: nn.Module, what: str) -> None:
    """Refuse layers that announce sparse gradients."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise sparse_gradient(what, f"{name}.weight".lstrip("."))


def sparse_gradient(what: str, name: str, made: str | None = None) -> UserError:
    return UserError(
        f"{what} has a sparse gradient: that of {name}",
        f"AdamW and clipping take dense gradients{f'; the layer is made at {made}' if made else ''}",
        "take sparse=True out",
    )


def silence_dropout(model: nn.Module) -> dict[str, float]:
    """Set every dropout rate to zero; return the previous rates, by module."""
    rates = {}
    for name, module in model.named_modules():
        drops = isinstance(module, (_DropoutNd, nn.MultiheadAttention, nn.RNNBase))
        if drops and getattr(module, _rate_of(module)) > 0:
            rates[name] = getattr(module, _rate_of(module))
    _set_rates(model, dict.fromkeys(rates, 0.0))
    return rates


@contextlib.contextmanager
def dropout_rates(model: nn.Module, rates: dict[str, float]) -> Iterator[None]:
    """Context with the rates from before `silence_dropout`."""
    _set_rates(model, rates)
    try:
        yield
    finally:
        _set_rates(model, dict.fromkeys(rates, 0.0))


def _set_rates(model: nn.Module, rates: dict[str, float]) -> None:
    for name, rate in rates.items():
        module = model.get_submodule(name)
        setattr(module, _rate_of(module), rate)


def _rate_of(module: nn.Module) -> str:
    return "p" if isinstance(module, _DropoutNd) else "dropout"


def kept(input: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return the input, as F.dropout does at rate zero. A compiler can trace it like the model."""
    return input


@contextlib.contextmanager
def functional_dropout_off(
    instead: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda _: kept,
) -> Iterator[None]:
    """Context in which F.dropout and its variants drop nothing, like modules whose rate is zero. Enter it before a
    user's file is loaded, which may import them by name."""
    own = {name: getattr(F, name) for name in FUNCTIONAL_DROPOUT}
    for name, function in own.items():
        setattr(F, name, instead(function))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(F, name, function)


def is_tanh_gelu(module: nn.Module) -> bool:
    return isinstance(module, nn.GELU) and module.approximate == "tanh"


def checkpoint_blocks(model: nn.Module, blocks: Blocks) -> None:
    """Make each block keep only its input. Its forward is wrapped, not the module, so parameters keep their names."""
    for block in model.get_submodule(blocks.name).children():
        block.forward = recomputed(block.forward)


# the loss


def loss_function(functions: Functions, model: nn.Module, kind: str) -> Loss:
    """Return a function from a batch to its loss. `kind`: `Traced.loss`, as `find_loss` determined it."""
    own = functions.loss
    if own is not None:
        return lambda batch: own(model, batch)
    if kind == "cross-entropy":
        return lambda batch: cross_entropy(logits_of(model(batch[0])), batch[1])
    if kind == "attribute":
        return lambda batch: part(called(model, batch), "loss")
    return lambda batch: called(model, batch)


def find_loss(functions: Functions, model: nn.Module, batch: Any) -> str:
    """Find out where the file's loss comes from, by running it once."""
    if functions.loss is not None:
        return find_own_loss(functions, functions.loss, model, batch)
    given = "model(batch[0])" if is_pair(batch) and takes_inputs_only(model) else call_of(batch)
    with (
        explaining_call(functions, batch, given),
        blaming(functions.file, f"the forward pass of {functions.words}", type(model).forward, given),
    ):
        if is_pair(batch) and takes_inputs_only(model):
            logits = logits_of(model(batch[0]))
            kind = check_logits(logits, batch[1], functions)
            check_gradient(logits, model, functions)
            return kind
        found = called(model, batch)
    if has_part(found, "loss"):
        check_loss(part(found, "loss"), f"the loss in what {functions.words} returns", f"{call_of(batch)}.loss")
        return "attribute"
    check_loss(found, functions.words, call_of(batch))
    return "model"


@contextlib.contextmanager
def explaining_call(functions: Functions, batch: Any, call: str) -> Iterator[None]:
    """Explain an error raised inside a torch layer that was called with the batch: how the model was called, and where
    the batch is made."""
    try:
        yield
    except UserError as error:
        if error.why != NO_LINE or error.__cause__ is None:
            raise
        line = definition(functions.make_batch, functions.file)
        why = f"the model was called as {call}, and the batch is {outlined(batch)}"
        fix = (
            f"let {functions.batch_name} return what the model is called with, or write `def loss(model, batch)` "
            f"into {Path(functions.file).name}"
        )
        raise UserError(
            error.problem, f"{why}; it is made at {line}" if line else why, known_fix(error.__cause__) or fix
        ) from error.__cause__


def outlined(batch: Any) -> str:
    """Describe a batch and its parts: 'a list of 1 (a tuple)'."""
    if isinstance(batch, dict):
        parts = [f"{name}: {described(each)}" for name, each in batch.items()]
    elif isinstance(batch, (tuple, list)):
        parts = [described(each) for each in batch]
    else:
        return described(batch)
    return f"{described(batch)} of {len(parts)} ({', '.join(parts)})"


def find_own_loss(functions: Functions, own: Callable[[Any, Any], Any], model: nn.Module, batch: Any) -> str:
    call, what = f"{functions.loss_name}(model, batch)", functions.loss_label

    def whose(error: BaseException) -> str:
        return f"the forward pass of {functions.words}" if ran_in(error, model) else what

    try:
        with blaming(functions.file, whose, own, call):
            found = own(model, batch)
    except UserError as error:
        if (names := foreign_arguments(own)) is None:
            raise
        fix = f"write `def {call}` and call the model in it: it is given the model and the whole batch, not {names}"
        raise UserError(error.problem, error.why, fix) from error
    check_loss(found, what, f"{functions.loss_name}()")
    return "own"


def foreign_arguments(own: Callable[..., Any]) -> str | None:
    """Return the arguments of a loss with another signature, such as 'logits and targets', or None if it seems to take
    model and batch."""
    try:
        parameters = inspect.signature(own).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    names = [each.name for each in parameters if each.default is each.empty]
    if len(names) == 2 and not set(names) & {*TARGETS, "logits", "outputs", "output", "pred", "preds", "predictions"}:
        return None
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:]))) or "nothing"


def call_of(batch: Any) -> str:
    """Return the call that `called` makes, as a user would write it."""
    if isinstance(batch, dict):
        return "model(**batch)"
    return "model(*batch)" if isinstance(batch, (tuple, list)) else "model(batch)"


def called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def is_pair(batch: Any) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], torch.Tensor)


def takes_inputs_only(model: nn.Module) -> bool:
    """True if the model takes one argument and its second is not for targets: forward(x), forward(x, mask=None)."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [each for each in inspect.signature(model.forward).parameters.values() if each.kind in kinds]
    required = [each for each in named if each.default is inspect.Parameter.empty]
    return len(required) <= 1 and not (len(named) > 1 and named[1].name in TARGETS)


def has_part(found: Any, name: str) -> bool:
    """True if the model returned a part of this name, as an attribute, as transformers does, or in a dict."""
    return name in found if isinstance(found, Mapping) else hasattr(found, name)


def part(found: Any, name: str) -> Any:
    return found[name] if isinstance(found, Mapping) else getattr(found, name)


def logits_of(found: Any) -> Any:
    return part(found, "logits") if has_part(found, "logits") else found


def are_logits(logits: Any, targets: torch.Tensor) -> bool:
    """True if these get cross-entropy: classes last, as linear layers return them, or second, as convolutions do. Files
    and modules of the API share this rule."""
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point() or targets.dtype != torch.int64:
        return False
    last = logits.dim() > 0 and logits.shape[:-1] == targets.shape
    second = logits.dim() > 1 and (logits.shape[0], *logits.shape[2:]) == tuple(targets.shape)
    return last or second


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over all targets, for logits that `are_logits` accepts; a sum over many classes needs fp32."""
    logits = logits.float()
    if logits.shape[:-1] == targets.shape:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
    return F.cross_entropy(logits, targets)


def check_logits(logits: Any, targets: torch.Tensor, functions: Functions) -> str:
    if are_logits(logits, targets):
        check_targets(targets, classes_of(logits, targets), functions)
        return "cross-entropy"
    raise UserError(
        f"{functions.words} returned {described(logits)} for targets of {described(targets)}",
        "without a loss in the file, inputs and targets get cross-entropy: logits with one more dimension than the "
        "int64 targets",
        how_to_take_logits(logits, targets, functions.words.partition(":")[0]),
    )


def check_gradient(logits: torch.Tensor, model: nn.Module, functions: Functions) -> None:
    if logits.requires_grad:
        return
    line = definition(type(model).forward, own_file(type(model).forward) or functions.file)
    raise UserError(
        f"the logits of {functions.words} carry no gradient",
        "they do not depend on the parameters, or were cut off from them by no_grad(), inference_mode() or detach()"
        + (f"; they come from {line}" if line else ""),
        "let forward return them as the layers gave them",
    )


def classes_of(logits: torch.Tensor, targets: torch.Tensor) -> int:
    """Return the number of classes of logits that `are_logits` accepts."""
    return logits.size(-1) if logits.shape[:-1] == targets.shape else logits.size(1)


def how_to_take_logits(found: Any, targets: torch.Tensor, file: str) -> str:
    write = f"write `def loss(model, batch)` into {file}"
    line = cross_entropy_line(found, targets, "model(batch[0])")
    return f"{write}: it returns the mean loss of a batch" if line is None else f"{write}: `return {line}`"


def cross_entropy_line(found: Any, targets: torch.Tensor, call: str) -> str | None:
    """Return the line that computes the loss if one element of a tuple is logits, as for a model that also returns its
    cache; else None. `call`: what returned the tuple, as a user writes it."""
    several = enumerate(found) if isinstance(found, (tuple, list)) else ()
    key = next((key for key, each in several if are_logits(each, targets)), None)
    if key is None:
        return None
    flat = found[key].shape[:-1] == targets.shape
    logits, classes = (".flatten(0, -2)", ".flatten()") if flat else ("", "")  # else classes are second, as F expects
    return f"F.cross_entropy({call}[{key}].float(){logits}, batch[1]{classes})"


def check_loss(found: Any, what: str, call: str) -> None:
    """Refuse a loss that is not a scalar with a gradient. `call`: what returned it, as a user writes it."""
    if is_scalar(found):
        if found.requires_grad:
            return
        raise UserError(
            f"{what} has no gradient",
            "it does not depend on the parameters, or was cut off from them by detach() or no_grad()",
            "let the loss be a function of the model's parameters",
        )
    raise UserError(
        f"{what} returned {described(found)}",
        "training lowers one number: a tensor without dimensions, the mean loss of the batch",
        how_to_return(found, call),
    )


def is_scalar(found: Any) -> bool:
    return isinstance(found, torch.Tensor) and found.dim() == 0 and found.is_floating_point()


def key_of_loss(found: Any) -> Any:
    """Return the key of the first loss among the parts of what a model returned, or None if there is none."""
    parts: list[tuple[Any, Any]] = []
    if isinstance(found, (tuple, list)):
        parts = list(enumerate(found))
    elif isinstance(found, dict):
        parts = list(found.items())
    return next((key for key, part in parts if is_scalar(part) and part.requires_grad), None)


def how_to_return(found: Any, call: str) -> str:
    """Suggest how to return the loss, naming the part of the result that is one, if any."""
    key = key_of_loss(found)
    if not call.startswith("model"):  # there is a loss() already
        if key is not None:
            return f"let {call} return element [{key!r}] of that alone"
        if isinstance(found, (int, float)):
            return f"let {call} return the tensor itself, not its .item()"
        several = isinstance(found, torch.Tensor) and found.is_floating_point()
        return f"let {call} return the mean loss of the batch, one number{': .mean() of that' if several else ''}"
    if key is None:
        return "write `def loss(model, batch)` into the file: it returns the mean loss of a batch"
    return f"write `def loss(model, batch)` into the file: `return {call}[{key!r}]`"
