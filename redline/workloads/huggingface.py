"""A Hugging Face `config.json` as a Shape, read as plain JSON: transformers is not imported, nothing is downloaded.

    read_config({"model_type": "llama", "hidden_size": 4096, ...}) -> (Shape(...), ("note", ...))
    change_config(config, shape, fixed) -> the same JSON with only the changed fields changed
    obstacles(config, shape) -> {"fused-loss": "the head has a bias", ...}      # rungs that its code does not allow
    without_dropout(config) -> the same JSON with every dropout at 0

FAMILIES is the one table: what a `model_type` calls its sizes, and what its code does that its config does not say.
Not supported: mixtures of experts, encoders, and every family whose layers do not all have the same sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from redline.core.errors import UserError
from redline.core.plan import BF16_WEIGHTS, ON_FUSED_BACKWARD
from redline.core.workload import Shape

Config = dict[str, Any]

NAMES = {  # field of Shape -> its name in a config
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "vocab": "vocab_size",
    "sequence": "max_position_embeddings",
}
GPT2_NAMES = {
    "layers": "n_layer",
    "heads": "n_head",
    "d_model": "n_embd",
    "d_ff": "n_inner",
    "vocab": "vocab_size",
    "sequence": "n_positions",
}
# Aliases of these (`GPT2Config.attribute_map`): transformers accepts either, and the last one in the file wins.
GPT2_ALIASES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
}
MAY_BE_NULL = ("kv_heads", "head_dim")  # null means what it means in Shape: derived from the heads
SLIDING, EVERYTHING = "sliding_attention", "full_attention"
CAUSAL = ("ForCausalLM", "LMHeadModel")  # how the class of a causal language model ends; GPT-2's is the second
ACTIVATIONS = ("activation_function", "hidden_activation", "hidden_act")  # a family reads the one in its defaults
# What transformers 5 calls its activations (`transformers.activations.ACT2CLS`).
ACTIVATION_NAMES = (
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu"),
    *("relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
)
# Kinds of rotary embedding (`transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS`), the plain one, and the name that
# old files of Phi-3 have for longrope.
ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn", "su")
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
FUSED_LOSSES, FUSED_ATTENTION = ("fused-loss", "chunked-loss"), ("flash", "cudnn-attention")
SEES_NEXT = "the model sees what comes next, so predicting it teaches nothing"
NOT_CAUSAL: tuple[tuple[str, bool, str], ...] = (  # key, the value that is refused, why
    (
        "add_cross_attention",
        True,
        "a decoder that attends to an encoder has layers for it, and is no causal language model by itself",
    ),
    ("is_encoder_decoder", True, "the config describes an encoder and a decoder, and here there is a decoder alone"),
    ("is_causal", False, SEES_NEXT),
    ("use_bidirectional_attention", True, SEES_NEXT),  # Gemmas for text embeddings
)
QWEN = ("qwen2", "qwen3")  # a separate key switches their window on


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the modelling code of a `model_type` fixes. `defaults` are the values that transformers fills in for keys
    that published files leave out; a key that is neither in the file nor here is an error and is not guessed."""

    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    gated: bool = True
    fused_qkv: bool = False
    positions: str = "rope"
    norm: str = "rmsnorm"
    qkv_biases: bool | str = False
    """A bool, or the key that says so."""
    proj_biases: bool | str = False
    """Biases of the projection after attention."""
    mlp_biases: bool | str = False
    head_bias: bool = False
    layer_norms: int = 2
    qk_norms: bool | str = False
    windows: str = "none"
    """Which layers have a sliding window in its code: 'none', whatever the config says; 'all'; or 'listed', by the
    config's layer_types or by the family's own rule."""
    dropouts: tuple[str, ...] = ("attention_dropout",)
    """Keys of the dropouts in its code. The first is for attention weights."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    note: str | None = None


# Checked against transformers' own classes and tiny models of them in tests/cpu/test_huggingface_shapes.py.
FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        names=GPT2_NAMES,
        gated=False,
        fused_qkv=True,
        positions="learned",
        norm="layernorm",
        qkv_biases=True,
        proj_biases=True,
        mlp_biases=True,
        dropouts=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
        defaults={
            "tie_word_embeddings": True,
            "n_inner": None,
            "activation_function": "gelu_new",
            "attn_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "resid_pdrop": 0.1,
        },
    ),
    "llama": Family(
        qkv_biases="attention_bias",
        proj_biases="attention_bias",
        mlp_biases="mlp_bias",
        defaults={
            "tie_word_embeddings": False,
            "num_key_value_heads": None,
            "head_dim": None,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
        },
    ),
    "mistral": Family(
        windows="all",
        defaults={"tie_word_embeddings": False, "head_dim": None, "sliding_window": 4096, "hidden_act": "silu"},
    ),
    "qwen2": Family(
        windows="listed",
        qkv_biases=True,
        defaults={
            "tie_word_embeddings": False,
            "head_dim": None,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "hidden_act": "silu",
        },
    ),
    "qwen3": Family(
        windows="listed",
        qkv_biases="attention_bias",
        proj_biases="attention_bias",
        defaults={
            "tie_word_embeddings": False,
            "head_dim": 128,
            "attention_bias": False,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "hidden_act": "silu",
        },
        qk_norms=True,
    ),
    "gemma": Family(
        qkv_biases="attention_bias",
        proj_biases="attention_bias",
        defaults={
            "tie_word_embeddings": True,
            "head_dim": 256,
            "attention_bias": False,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "gemma2": Family(
        windows="listed",
        qkv_biases="attention_bias",
        proj_biases="attention_bias",
        defaults={
            "tie_word_embeddings": True,
            "head_dim": 256,
            "attention_bias": False,
            "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        layer_norms=4,
    ),
    "gemma3_text": Family(
        windows="listed",
        qkv_biases="attention_bias",
        proj_biases="attention_bias",
        defaults={  # the published files of Gemma 3 leave most sizes out
            "tie_word_embeddings": True,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "attention_bias": False,
            "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        layer_norms=4,
        qk_norms=True,
    ),
    "phi": Family(
        gated=False,
        norm="layernorm",
        qkv_biases=True,
        proj_biases=True,
        mlp_biases=True,
        head_bias=True,
        layer_norms=1,
        qk_norms="qk_layernorm",
        dropouts=("attention_dropout", "embd_pdrop", "resid_pdrop"),
        defaults={
            "tie_word_embeddings": False,
            "num_key_value_heads": None,
            "head_dim": None,
            "qk_layernorm": False,
            "hidden_act": "gelu_new",
        },
    ),
    "phi3": Family(
        windows="all",
        fused_qkv=True,
        defaults={
            "tie_word_embeddings": False,
            "num_key_value_heads": None,
            "head_dim": None,
            "sliding_window": None,
            "hidden_act": "silu",
            "pad_token_id": 32000,
        },
        dropouts=("attention_dropout", "resid_pdrop"),
        note="gate and up are one matmul there: the shape counts two of half the width",
    ),
    "gpt_neox": Family(
        names={name: key for name, key in NAMES.items() if name not in MAY_BE_NULL},
        gated=False,
        fused_qkv=True,
        norm="layernorm",
        qkv_biases="attention_bias",
        proj_biases="attention_bias",
        mlp_biases=True,
        dropouts=("attention_dropout", "hidden_dropout"),
        defaults={"tie_word_embeddings": False, "attention_bias": True, "hidden_act": "gelu"},
    ),
}
# Configs that wrap a text model: the key it is under, and the family it is read as.
WRAPPED = {"gemma3": ("text_config", "gemma3_text")}


def is_config(data: Mapping[str, Any]) -> bool:
    return "model_type" in data


def read_config(config: Config) -> tuple[Shape, tuple[str, ...]]:
    """Return the shape, and notes on what it cannot express about the model."""
    model_type, text = text_model(config)
    family = FAMILIES[model_type]
    values = {**family.defaults, **text}
    check_causal(config)
    _check_complete(values, family, model_type)
    _check_aliases(values, model_type)
    _check_activation(model_type, values)
    sizes = {name: _size(values, key) for name, key in family.names.items()}
    shape = Shape(
        **_canonical(sizes),
        gated=family.gated,
        tied=_flag("tie_word_embeddings", values),
        fused_qkv=family.fused_qkv,
        **_biases(family, values),
        positions=family.positions,
        norm=family.norm,
        layer_norms=family.layer_norms,
        qk_norms=_flag(family.qk_norms, values),
        **_window(model_type, values, sizes["layers"]),
    )
    return shape, tuple(_notes(config, family, text is not config))


def _notes(config: Config, family: Family, wrapped: bool) -> Iterator[str]:
    """Yield what the config says and the shape does not."""
    if family.note is not None:
        yield family.note
    if wrapped:
        yield "the text model alone, without what the config wraps around it"
    if config.get("quantization_config"):
        yield "quantization_config is left out: a model is trained from weights in whole precision"
    if config.get("auto_map"):
        own = f"transformers' own {config['model_type']}"
        yield f"auto_map is left out: no code that comes with a model is run, it is {own}"
    others = [str(name) for name in config.get("architectures") or () if not str(name).endswith(CAUSAL)]
    if others and not wrapped:
        yield f"read as a causal language model; the config names {', '.join(others)}"


def obstacles(config: Config, shape: Shape) -> dict[str, str]:
    """Return the rungs that cannot be applied to this model from outside, with the reason, for `Workload.cannot`."""
    model_type, text = text_model(config)
    values = {**FAMILIES[model_type].defaults, **text}
    found = {
        "selective-checkpointing": "transformers recomputes whole blocks: use checkpointing",
        "fused-backward": "it needs blocks that are written for it, and transformers' are not",
        **dict.fromkeys(
            ON_FUSED_BACKWARD,
            "its blocks are those of fused-backward, of the built-in models",
        ),
        "tuned-matmuls": "layers are exchanged in the built-in models only",
        "fp8-linears": "which of its layers may lose precision is known of the built-in models only",
        **dict.fromkeys(BF16_WEIGHTS, "it takes a model that adds up in fp32 what it stores in bf16"),
    }
    if not shape.tied:
        found["tied-weights"] = "the published model has a head of its own"
    if _activation(model_type, values)[1] not in TANH_GELUS:
        found["sigmoid-gelu"] = "the model has no tanh GELU"
    if reason := _head_obstacle(values, shape):
        found |= dict.fromkeys((*FUSED_LOSSES, "fp8-head"), reason)
    if reason := _mask_obstacle(values, shape):
        found |= dict.fromkeys(FUSED_ATTENTION, reason)
    if shape.head_bias:
        found["padded-vocab"] = "the head has a bias, which would give the padding a logit of its own"
    elif values.get("final_logit_softcapping") is not None:
        found["padded-vocab"] = "the cap on the logits would give the padding one above minus infinity"
    return found


def _head_obstacle(values: Config, shape: Shape) -> str:
    """Return why the loss cannot be computed from the head's inputs and weight alone; '' if it can."""
    if values.get("final_logit_softcapping") is not None:
        return "the model caps its logits after the head (final_logit_softcapping)"
    return "the head has a bias" if shape.head_bias else ""


def _mask_obstacle(values: Config, shape: Shape) -> str:
    """Return why attention is more than the causal softmax that fused kernels compute; '' if it is not."""
    if values.get("attn_logit_softcapping") is not None:
        return "the model caps its attention scores (attn_logit_softcapping)"
    if shape.window is not None and shape.window < shape.sequence:
        return (
            f"a window of {shape.window} in sequences of {shape.sequence} needs a mask, which no fused kernel takes "
            f"(--sequence {shape.window} needs none)"
        )
    return ""


def _activation(model_type: str, values: Config) -> tuple[str, Any]:
    """Return the activation's key, and its value in the config."""
    return next((key, values[key]) for key in ACTIVATIONS if key in FAMILIES[model_type].defaults)


def check_causal(config: Config) -> None:
    """Refuse configs from which the family's code would build something other, or more, than a causal language model.
    `is_decoder` is not checked: GPT-NeoX files say false, and no family here reads it."""
    text = text_model(config)[1]
    for key, refused, why in NOT_CAUSAL:
        if text.get(key) is refused or config.get(key) is refused:
            raise UserError(
                f"{key} is {shown(refused)}",
                why,
                f"point at the config of a causal language model, or take {key} out if the model is one",
            )


def dropouts(config: Config) -> dict[str, float]:
    """Return the dropout rates of the model's code by their keys, without those that are 0."""
    model_type, text = text_model(config)
    values = {**FAMILIES[model_type].defaults, **text}
    shares = {key: values.get(key) or 0.0 for key in FAMILIES[model_type].dropouts}
    for key, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
            raise UserError(f"{key} is {shown(share)}", f"{key} is a share of what is dropped", "write 0 for none")
    return {key: share for key, share in shares.items() if share}


def attention_dropout(config: Config) -> str | None:
    """Return the key of the dropout on attention weights, which exist only inside a fused kernel; None if it is 0."""
    key = FAMILIES[text_model(config)[0]].dropouts[0]
    return key if key in dropouts(config) else None


def without_dropout(config: Config) -> Config:
    """Return a copy without dropout: with it no two runs give the same loss, and nothing could be compared."""
    _, text = text_model(config)
    return _with_text(config, {**text, **dict.fromkeys(dropouts(config), 0.0)})


def _with_text(config: Config, text: Config) -> Config:
    """Return a copy of the config with another text model."""
    wrapped = config.get("model_type") in WRAPPED
    return {**config, WRAPPED[config["model_type"]][0]: text} if wrapped else text


def text_model(config: Config) -> tuple[str, Config]:
    """Return the model type, a key of FAMILIES, and the part of the config that describes it."""
    model_type, text = str(config.get("model_type")), config
    if model_type in WRAPPED:
        key, model_type = WRAPPED[model_type]
        text = config.get(key, {})
        if not isinstance(text, dict) or not text:
            raise UserError(
                f"{key} is {shown(text) if key in config else 'missing'}",
                f"a {config['model_type']} config describes its text model there",
                f'write an object into "{key}", or save the config again with config.save_pretrained',
            )
    if model_type not in FAMILIES:
        known = (*FAMILIES, *WRAPPED)
        raise UserError(
            f"model_type {model_type!r} is not supported",
            "each family names its sizes in its own way, and reading another's by guess would give wrong numbers",
            f"supported: {', '.join(known)}; any other as FILE.py:FACTORY, a Python file that builds it "
            "(docs/your-model.md)",
        )
    return model_type, text


def change_config(config: Config, before: Shape, after: Shape) -> Config:
    """Return a copy that reads as `after`. Fields that already say so, explicitly or by default, stay as they are, and
    nothing else is touched."""
    model_type, text = text_model(config)
    family = FAMILIES[model_type]
    changed, values = dict(text), {**family.defaults, **text}
    wanted = {"kv_heads": after.key_value_heads, "head_dim": after.head_width}
    when_null = {"kv_heads": after.heads, "head_dim": after.d_model // after.heads, "d_ff": 4 * after.d_model}
    for name, key in family.names.items():
        value = wanted.get(name, getattr(after, name))
        if value != (when_null[name] if values[key] is None else values[key]):
            changed[key] = value
    if before.layers != after.layers:
        changed |= _layer_list(text, after)
    return _with_text(config, changed)


def _layer_list(text: Config, after: Shape) -> Config:
    """Return the fields that say which layers have a window, for another number of layers."""
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        return {"layer_types": [kinds[layer % len(kinds)] for layer in range(after.layers)]}
    if text.get("use_sliding_window") and after.window is None:
        return {"max_window_layers": after.layers}  # the first layer to have one: still none
    return {}


def _check_complete(values: Config, family: Family, model_type: str) -> None:
    may_be_null = {"n_inner", *(family.names.get(name) for name in MAY_BE_NULL)}
    missing = [
        key for key in family.names.values() if key not in values or (values[key] is None and key not in may_be_null)
    ]
    if missing:
        raise UserError(
            f"the config has no {', '.join(missing)}",
            f"a {model_type} config gives its sizes there, and none is guessed",
            f"add {', '.join(map(shown, missing))} to the file, or save it again with config.save_pretrained",
        )


def _check_aliases(values: Config, model_type: str) -> None:
    """Refuse contradictory aliases: transformers takes whichever comes last, which no reader would expect."""
    for key, alias in GPT2_ALIASES.items() if model_type == "gpt2" else ():
        if alias in values and values[alias] != values[key]:
            raise UserError(
                f"{key} is {shown(values[key])} and {alias} is {shown(values[alias])}",
                "both name the same size of a gpt2 config",
                f"take {alias} out, or write the same into both",
            )


def _check_activation(model_type: str, values: Config) -> None:
    key, name = _activation(model_type, values)
    if name is not None and name not in ACTIVATION_NAMES:
        raise UserError(
            f"{key} is {shown(name)}",
            "transformers has no activation of that name",
            f"known: {', '.join(ACTIVATION_NAMES)}",
        )


def check_rope(config: Config) -> None:
    """Check the rotary embedding of a model that is to be built; its sizes do not depend on it. Some families have one
    for each kind of layer."""
    model_type, text = text_model(config)
    if FAMILIES[model_type].positions != "rope":
        return
    for key in ("rope_scaling", "rope_parameters"):
        given = text.get(key)
        values = (given, *given.values()) if isinstance(given, dict) else ()
        for each in filter(lambda value: isinstance(value, dict), values):
            field = "rope_type" if "rope_type" in each else "type"
            if field in each and each[field] not in ROPE_TYPES:
                raise UserError(
                    f"{field} in {key} is {shown(each[field])}",
                    "transformers has no rotary embedding of that name",
                    f"known: {', '.join(ROPE_TYPES)}; `redline estimate` reads the sizes alone",
                )


def check_pad_token(config: Config) -> None:
    """Check the padding token of a model that is to be built: torch would refuse it without naming the field."""
    model_type, text = text_model(config)
    values = {**FAMILIES[model_type].defaults, **text}
    pad, vocab = values.get("pad_token_id"), _count(values, "vocab_size")
    if isinstance(pad, int) and not -vocab <= pad < vocab:
        whose = "" if "pad_token_id" in text else f", which a {model_type} config has where it does not say"
        raise UserError(
            f"pad_token_id is {pad}{whose}",
            f"vocab_size is {vocab}, so there is no such token",
            'write "pad_token_id": null into the config, or a token that it has; `redline estimate` reads the sizes '
            "alone",
        )


def _size(values: Config, key: str) -> int | None:
    if key == "n_inner" and values[key] is None:
        return 4 * _count(values, "n_embd")  # GPT2Config's meaning of null
    return None if values[key] is None else _count(values, key)


def _count(values: Config, key: str, least: int = 1) -> int:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(
            f"{key} is {shown(value)}", f"{key} counts things, so it is a whole number from {least}", f"correct {key}"
        )
    return value


def shown(value: Any) -> str:
    """Format a value as JSON, cut off after 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _canonical(sizes: dict[str, int | None]) -> dict[str, Any]:
    """Set values that follow from the heads to None, so that equal models have equal shapes."""
    heads, d_model, head_dim = sizes["heads"], sizes["d_model"], sizes.get("head_dim")
    assert heads is not None
    assert d_model is not None
    if head_dim is not None and head_dim * heads == d_model:
        sizes = {**sizes, "head_dim": None}
    if sizes.get("kv_heads") == heads:
        sizes = {**sizes, "kv_heads": None}
    return sizes


def _biases(family: Family, values: Config) -> dict[str, Any]:
    """Return the shape's bias fields. `biases` is the projection's; others that equal it are None, so that equal models
    have equal shapes."""
    proj, qkv, mlp = (_flag(said, values) for said in (family.proj_biases, family.qkv_biases, family.mlp_biases))
    return {
        "biases": proj,
        "qkv_biases": None if qkv == proj else qkv,
        "mlp_biases": None if mlp == proj else mlp,
        "head_bias": family.head_bias,
    }


def _flag(said: bool | str, values: Config) -> bool:
    if isinstance(said, bool):
        return said
    value = values[said]
    if not isinstance(value, bool):
        raise UserError(f"{said} is {shown(value)}", f"{said} is true or false", f"write true or false into {said}")
    return value


def _window(model_type: str, values: Config, layers: int | None) -> dict[str, Any]:
    """Return the shape's window fields, from `layer_types` if given; older files follow the family code's own rule."""
    assert layers is not None
    if FAMILIES[model_type].windows == "none":  # files derived from another family's keep such keys
        return {}
    _check_kinds(values.get("layer_types"))
    if model_type in QWEN and not _flag("use_sliding_window", values):
        return {}
    if values.get("sliding_window") is None:
        return {}
    window, windowed = _count(values, "sliding_window"), _windowed(model_type, values, layers)
    if windowed == 0:
        return {}
    return {"window": window, "windowed_layers": None if windowed == layers else windowed}


def _windowed(model_type: str, values: Config, layers: int) -> int:
    kinds = values.get("layer_types")
    if FAMILIES[model_type].windows == "all":
        return layers
    if kinds is not None:
        return _listed(kinds, layers)
    if model_type in QWEN:  # that many layers at the beginning see everything, which may be none
        return layers - min(layers, _count(values, "max_window_layers", least=0))
    if model_type == "gemma2":
        return (layers + 1) // 2  # every other layer, beginning with the first
    given = values.get("sliding_window_pattern") is not None  # Gemma 3
    return layers - layers // (_count(values, "sliding_window_pattern") if given else 6)


def _listed(kinds: Any, layers: int) -> int:
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise UserError(
            f"layer_types is {shown(kinds)}",
            f"it names the kind of attention of each of {layers} layers",
            "write as many kinds as there are layers, or leave layer_types out",
        )
    return kinds.count(SLIDING)


def _check_kinds(kinds: Any) -> None:
    """Refuse other kinds of layers, which have other sizes too."""
    others = [kind for kind in kinds if kind not in (SLIDING, EVERYTHING)] if isinstance(kinds, list) else []
    if others:
        raise UserError(
            f"layer_types names {shown(others[0])}",
            f"the layers that are known here are {SLIDING} and {EVERYTHING}",
            "point at a model without such layers, or bring it as a Python file: docs/your-model.md",
        )
