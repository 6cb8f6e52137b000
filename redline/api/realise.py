"""Applies a plan to a live module: what can be done to it from outside, and why the rest cannot.

    left_out = obstacles_of(("bf16", "padded-vocab"), model, hardware)   ->  {"padded-vocab": "which of its ..."}
    realise(plan, model)                                                 # in place: its weights stay where they are

engine/build.py builds a model to a plan's shape; here the model has a shape, weights and perhaps a history. For models
of transformers, their own switches are used. Every rung is applied, or left out with its reason.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.plan import BF16_WEIGHTS, ON_FUSED_BACKWARD, Plan
from redline.engine.build import switch_process
from redline.engine.inspect_walk import longest_list, shared
from redline.model.adapter import DTYPES, exchange_gelus
from redline.model.python_adapter import checkpoint_blocks, is_tanh_gelu
from redline.rungs import plan_of
from redline.rungs.parallel import RANK_RUNGS
from redline.rungs.rung import missing

SDPA = "scaled_dot_product_attention"
MULTIPLE = 128  # of the rung padded-vocab


@dataclass(frozen=True, kw_only=True)
class Live:
    model: nn.Module
    hardware: Hardware
    plan: Plan
    """The plan of the whole recipe."""


def obstacles_of(rungs: Iterable[str], model: nn.Module, hardware: Hardware) -> dict[str, str]:
    """Return the rungs that must be left out, with the reasons."""
    names = tuple(rungs)
    live = Live(model=model, hardware=hardware, plan=plan_of(names))
    reasons = {name: OBSTACLES[name](live) for name in names if name in OBSTACLES}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def realise(plan: Plan, model: nn.Module) -> tuple[str, ...]:
    """Apply the plan in place, before the optimizer holds the parameters. Return what the user should know about it."""
    switch_process(plan)
    if is_transformers(model):
        keep_own_config(model)
    if plan.attention != "naive" and is_transformers(model):
        attend_causally(model)
    notes = pad(model, plan) if plan.vocab_multiple > 1 else ()
    if plan.residual != "fp32":
        from redline.model.transformers_adapter import cast_stream

        cast_stream(model, DTYPES[plan.residual])  # type: ignore[arg-type]
    if plan.gelu == "sigmoid":
        exchange_gelus(model, gelu_test(model))
    if plan.checkpointing == "full":
        recompute_blocks(model)
    return notes


# --- reasons ----------------------------------------------------------------------------------------------------------


def _lacks(feature: str) -> Callable[[Live], str | None]:
    return lambda live: missing(live.hardware, feature)


def _always(reason: str) -> Callable[[Live], str]:
    return lambda _: reason


def _on_gpus(live: Live) -> str | None:
    return None if live.hardware.kind == "cuda" else "it is a setting for GPUs, and the model is on a CPU"


def _way_of_compiling(live: Live) -> str | None:
    return _on_gpus(live) or (None if live.plan.compile else "it needs compiled code: add compile")


def _attention(feature: str) -> Callable[[Live], str | None]:
    def reason(live: Live) -> str | None:
        lacks = missing(live.hardware, feature)
        if lacks is None and is_transformers(live.model):
            return _masked(live)
        if lacks is None and not calls_sdpa(live.model):
            return f"no call of F.{SDPA} was found in the model's code, and there is nothing else to pin: call it there"
        if lacks is None and live.hardware.kind == "cpu" and attention_drops(live.model):
            return "the kernel for CPUs drops nothing, and the model's attention does"
        return lacks

    return reason


def _masked(live: Live) -> str | None:
    """Return why a transformers model cannot have a fused attention kernel; None if it can."""
    from redline.model.transformers_adapter import drops
    from redline.workloads.huggingface import obstacles, read_config

    if live.hardware.kind == "cpu" and drops(live.model):
        return "the kernel for CPUs drops nothing, and the model has dropout"
    config = live.model.config.to_dict()  # type: ignore[operator, union-attr]
    try:
        return obstacles(config, read_config(config)[0]).get("flash")
    except UserError:  # a family that is not in the table has no known obstacle
        return None


def _tied(live: Live) -> str | None:
    if next(shared(live.model), None) is not None:
        return None
    return "it makes another model of it, with other weights: tie them where the model is built"


def _padding(live: Live) -> str | None:
    if not is_transformers(live.model):
        return (
            f"which of its matrices is the head is not known: give embedding and head a multiple of {MULTIPLE} rows "
            "where the model is built, and keep the padding out of the loss"
        )
    head = live.model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        return f"{type(live.model).__name__} has no linear head"
    return "the head has a bias, which would give the padding a logit of its own" if head.bias is not None else None


def _stream(live: Live) -> str | None:
    if live.plan.autocast != "bf16":
        return "the stream takes the matmuls' type, and that is not bf16 here"
    if is_transformers(live.model):
        from transformers.modeling_layers import GradientCheckpointingLayer

        found = any(isinstance(module, GradientCheckpointingLayer) for module in live.model.modules())
        return None if found else f"the blocks of {type(live.model).__name__} were not found"
    return (
        "where the stream between the blocks begins is not known: cast what the embedding gives, x.to(torch.bfloat16)"
    )


def _gelus(live: Live) -> str | None:
    found = any(map(gelu_test(live.model), live.model.modules()))
    return None if found else "no module of the model is a tanh GELU"


def _blocks(live: Live) -> str | None:
    if is_transformers(live.model):
        supported = live.model.supports_gradient_checkpointing
        return None if supported else f"{type(live.model).__name__} does not support it"
    if longest_list(live.model) is not None:
        return None
    return "the model has no list of equal blocks (an nn.ModuleList or nn.Sequential of one class)"


_OWN_LOSS = (
    "the loss is computed by code that is not ours; redline.model.loss.head_loss is the kernel, for targets of which "
    "none is ignored"
)
_WIDE_SUMS = "it takes a model that adds up in fp32 what it stores in bf16; fused-adamw takes its place"

# Rungs not listed can always be applied: precision, scaler, compiled loss, optimizer. The step is `no-sync` anyway.
OBSTACLES: dict[str, Callable[[Live], str | None]] = {
    "tf32": _lacks("tf32"),
    "compile": _lacks("compile"),
    "flash": _attention("flash"),
    "cudnn-attention": _attention("cudnn-attention"),
    "padded-vocab": _padding,
    "tied-weights": _tied,
    "adamw-8bit": lambda live: live.hardware.missing.get("torchao"),
    **dict.fromkeys(BF16_WEIGHTS, _always(_WIDE_SUMS)),
    "loader-workers": _always("the loader is yours: DataLoader(..., num_workers=2, pin_memory=True)"),
    **dict.fromkeys(("fused-loss", "chunked-loss", "fp8-head"), _always(_OWN_LOSS)),
    "bf16-residual": _stream,
    "sigmoid-gelu": _gelus,
    "fused-backward": _always("it needs blocks that are written for it: redline.model.fused has the parts"),
    **dict.fromkeys(
        ON_FUSED_BACKWARD,
        _always("its blocks are those of fused-backward, of the built-in models"),
    ),
    "tuned-matmuls": _always("the layers are yours: redline.model.tuned.TunedLinear is one to use for nn.Linear"),
    "fp8-linears": _always("which of its layers may lose precision is not known: redline.model.fp8 has one to use"),
    "selective-checkpointing": _always("which of its operations are the core of attention is not known: checkpointing"),
    "checkpointing": _blocks,
    "budget-checkpointing": lambda live: None if live.plan.compile else "the compiler does it: add compile",
    "max-autotune": _way_of_compiling,
    "cuda-graphs": _way_of_compiling,
    "expandable-segments": _on_gpus,
    **dict.fromkeys(
        RANK_RUNGS, _always("ranks are started and joined by your loop: wrap prepared.model in DDP or FSDP")
    ),
}


# --- looking at a module ----------------------------------------------------------------------------------------------


def is_transformers(model: nn.Module) -> bool:
    """True for a transformers model. transformers is not imported: whoever has such a model has imported it already."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def calls_sdpa(model: nn.Module) -> bool:
    """True if the code of the model's modules, or of functions that it names, mentions SDPA. Nothing is run."""
    functions = [function for module in model.modules() for function in _functions_of(module)]
    return any(SDPA in _names_in(code) for code in _read(functions))


def attention_drops(model: nn.Module) -> bool:
    """True if attention has dropout, judging by its code: torch's own with a rate, or a module with a rate that passes
    SDPA a dropout_p. A rate kept elsewhere is not seen; raised.py explains what the kernel then raises."""
    return any(
        module.dropout > 0
        if isinstance(module, nn.MultiheadAttention)
        else any(rate > 0 for rate in _rates(module)) and _gives_a_rate(module)
        for module in model.modules()
    )


def _rates(module: nn.Module) -> Iterator[float]:
    """Yield the rates of the module's own dropout: self.dropout = 0.1, or self.drop = nn.Dropout(0.1)."""
    yield from (value for name, value in vars(module).items() if "drop" in name and isinstance(value, float))
    yield from (child.p for child in module.children() if isinstance(child, nn.Dropout))


def _gives_a_rate(module: nn.Module) -> bool:
    codes = _read(_functions_of(module))
    return any(SDPA in _names_in(code) and "dropout_p" in _keywords_in(code) for code in codes)


def _read(functions: Iterable[FunctionType]) -> Iterator[CodeType]:
    """Yield the code of functions, and of those that they call by known names."""
    waiting, seen = list(functions), set[CodeType]()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        yield function.__code__
        waiting += _called(set(_names_in(function.__code__)), function.__globals__)


def _functions_of(module: nn.Module) -> Iterator[FunctionType]:
    own = [vars(kind).values() for kind in type(module).__mro__ if kind not in (nn.Module, object)]
    for value in (each for values in (*own, vars(module).values()) for each in values):
        if isinstance(value, FunctionType):
            yield value


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _keywords_in(code: CodeType) -> Iterator[str]:
    """Yield the names of keyword arguments in the code's calls, which Python keeps as tuples of constants."""
    for constant in code.co_consts:
        if isinstance(constant, tuple):
            yield from (name for name in constant if isinstance(name, str))
        elif isinstance(constant, CodeType):
            yield from _keywords_in(constant)


def _called(names: set[str], known: dict[str, Any]) -> Iterator[FunctionType]:
    """Yield functions with these names: global ones, and those of modules named beside them, as in F.softmax."""
    modules = [known[name] for name in names if isinstance(known.get(name), ModuleType)]
    for name in names:
        for found in (known.get(name), *(vars(module).get(name) for module in modules)):
            if isinstance(found, FunctionType) and _worth_reading(found):
                yield found


def _worth_reading(function: FunctionType) -> bool:
    """True except for torch's own code outside torch.nn.functional: it is large, and mentions everything."""
    return not function.__module__.startswith("torch.") or function.__module__ == "torch.nn.functional"


def gelu_test(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Return a test for tanh GELU modules; transformers has classes of its own."""
    if not is_transformers(model):
        return is_tanh_gelu
    from transformers.activations import ACT2FN

    from redline.model.transformers_adapter import TANH_GELUS

    kinds = tuple(type(ACT2FN[name]) for name in TANH_GELUS)
    return lambda module: is_tanh_gelu(module) or isinstance(module, kinds)


# --- changing a module ------------------------------------------------------------------------------------------------


def keep_own_config(model: nn.Module) -> None:
    """Give the model its own copy of its config. transformers switches through the config, which all models built from
    it share: a teacher beside the student would attend as the student does, and take its padded size for its own."""
    from transformers import PretrainedConfig

    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)  # and of each part of it, such as a text model's config
    for module in model.modules():
        held = {name: value for name, value in vars(module).items() if isinstance(value, PretrainedConfig)}
        for name, config in held.items():
            setattr(module, name, copies.get(id(config), config))


def attend_causally(model: nn.Module) -> None:
    """Switch to transformers' SDPA without a mask, which is all that a fused kernel takes (transformers_adapter.py says
    why). A mask in a batch would be overlooked, so it is refused."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from redline.model.transformers_adapter import CAUSAL

    AttentionInterface.register(CAUSAL, sdpa_attention_forward)
    model.set_attn_implementation(CAUSAL)  # type: ignore[operator]
    model.register_forward_pre_hook(refuse_mask, with_kwargs=True)


def refuse_mask(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    if named.get("attention_mask") is not None or len(positional) > 1:
        raise UserError(
            "the batch has an attention_mask",
            "the recipe's attention kernel takes none and would look at padding",
            "drop the mask where nothing is padded, or leave flash and cudnn-attention out of the recipe",
        )


def recompute_blocks(model: nn.Module) -> None:
    if is_transformers(model):
        model.config.use_cache = False  # type: ignore[union-attr]  # it would be switched off with a warning
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        return
    blocks = longest_list(model)
    assert blocks is not None, "OBSTACLES has looked for them"
    checkpoint_blocks(model, blocks)


def pad(model: nn.Module, plan: Plan) -> tuple[str, ...]:
    from redline.model.transformers_adapter import pad_vocabulary

    vocab = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    rows = plan.vocab_rows(vocab)
    if rows == vocab:
        return ()
    pad_vocabulary(model, vocab, plan.vocab_multiple)  # type: ignore[arg-type]
    return (f"padded-vocab: embedding and head have {rows} rows; model.resize_token_embeddings({vocab}) before saving",)
