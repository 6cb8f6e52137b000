"""A Hugging Face `config.json` as a Shape, read as plain JSON: transformers is not imported, nothing is downloaded.

    read_config({"model_type": "llama", "hidden_size": 4096, ...}) -> (Shape(...), ("note", ...))
    change_config(config, shape, fixed) -> the same JSON with only the changed fields changed

FAMILIES is the one table: what a `model_type` calls its sizes, and what its code does that its config does not say.
Left out: mixtures of experts, encoders, and every family whose layers do not all have the same sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redline.core.errors import UserError
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
MAY_BE_NULL = ("kv_heads", "head_dim")  # null means what it means in Shape: derived from the heads
SLIDING = "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the modelling code of a `model_type` fixes. `defaults` are the values that transformers fills in for keys
    which published files leave out; a key that is neither in the file nor here is a mistake, not a guess."""

    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    gated: bool = True
    fused_qkv: bool = False
    positions: str = "rope"
    norm: str = "rmsnorm"
    attention_biases: bool | str = False
    """Of q, k, v and the output projection: a bool, or the key that says."""
    mlp_biases: bool | str = False
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
        attention_biases=True,
        mlp_biases=True,
        defaults={"tie_word_embeddings": True, "n_inner": None},
    ),
    "llama": Family(
        attention_biases="attention_bias",
        mlp_biases="mlp_bias",
        defaults={
            "tie_word_embeddings": False,
            "num_key_value_heads": None,
            "head_dim": None,
            "attention_bias": False,
            "mlp_bias": False,
        },
    ),
    "mistral": Family(defaults={"tie_word_embeddings": False, "head_dim": None, "sliding_window": 4096}),
    "qwen2": Family(
        defaults={"tie_word_embeddings": False, "head_dim": None, "use_sliding_window": False, "max_window_layers": 28},
        note="q, k and v have biases, the other layers have none: the shape counts none",
    ),
    "qwen3": Family(
        attention_biases="attention_bias",
        defaults={
            "tie_word_embeddings": False,
            "head_dim": 128,
            "attention_bias": False,
            "use_sliding_window": False,
            "max_window_layers": 28,
        },
        note="queries and keys are normalised per head: the shape counts no gains for that",
    ),
    "gemma": Family(
        attention_biases="attention_bias",
        defaults={"tie_word_embeddings": True, "head_dim": 256, "attention_bias": False},
    ),
    "gemma2": Family(
        attention_biases="attention_bias",
        defaults={"tie_word_embeddings": True, "head_dim": 256, "attention_bias": False, "sliding_window": 4096},
        note="each layer has four norms: the shape counts two",
    ),
    "gemma3_text": Family(
        attention_biases="attention_bias",
        defaults={  # the published files of Gemma 3 leave most sizes out
            "tie_word_embeddings": True,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "attention_bias": False,
            "sliding_window": 4096,
        },
        note="each layer has six norms: the shape counts two",
    ),
    "phi": Family(
        gated=False,
        norm="layernorm",
        attention_biases=True,
        mlp_biases=True,
        defaults={"tie_word_embeddings": False, "num_key_value_heads": None, "head_dim": None},
        note="a layer has one norm, and the head has a bias: the shape counts two norms, and no bias there",
    ),
    "phi3": Family(
        fused_qkv=True,
        defaults={
            "tie_word_embeddings": False,
            "num_key_value_heads": None,
            "head_dim": None,
            "sliding_window": None,
        },
        note="gate and up are one matmul there: the shape counts two of half the width",
    ),
    "gpt_neox": Family(
        names={name: key for name, key in NAMES.items() if name not in MAY_BE_NULL},
        gated=False,
        fused_qkv=True,
        norm="layernorm",
        attention_biases="attention_bias",
        mlp_biases=True,
        defaults={"tie_word_embeddings": False, "attention_bias": True},
    ),
}
# Files that wrap the text model: where it is, and what it is when it does not say.
WRAPPED = {"gemma3": ("text_config", "gemma3_text")}


def is_config(data: Mapping[str, Any]) -> bool:
    return "model_type" in data


def read_config(config: Config) -> tuple[Shape, tuple[str, ...]]:
    """The shape, and what of the model it cannot say."""
    model_type, text = text_model(config)
    family = FAMILIES[model_type]
    values = {**family.defaults, **text}
    sizes = {name: _size(values, name, key, model_type) for name, key in family.names.items()}
    biases, notes = _biases(family, values)
    shape = Shape(
        **_canonical(sizes),
        gated=family.gated,
        tied=bool(values["tie_word_embeddings"]),
        fused_qkv=family.fused_qkv,
        biases=biases,
        positions=family.positions,
        norm=family.norm,
        **_window(model_type, values, sizes["layers"]),
    )
    return shape, notes


def text_model(config: Config) -> tuple[str, Config]:
    """The model type that FAMILIES knows and the part of the file that describes it."""
    model_type, text = str(config.get("model_type")), config
    if model_type in WRAPPED:
        key, model_type = WRAPPED[model_type]
        text = config.get(key) or {}
    if model_type not in FAMILIES or not isinstance(text, dict):
        known = (*FAMILIES, *WRAPPED)
        raise UserError(
            f"model_type {model_type!r} is not supported",
            "each family names its sizes in its own way, and reading another's by guess would give wrong numbers",
            f"supported: {', '.join(known)}; or write a shape file (layers, heads, d_model, d_ff, vocab, sequence)",
        )
    return model_type, text


def change_config(config: Config, before: Shape, after: Shape) -> Config:
    """A copy in which the fields that differ between the shapes have their new value, and nothing else is touched."""
    model_type, text = text_model(config)
    family = FAMILIES[model_type]
    changed = dict(text)
    for name, key in family.names.items():
        if name == "head_dim":  # derived in most shapes, written out (or a fixed default) in most files
            written = after.head_dim is not None or {**family.defaults, **text}.get(key) is not None
            if written and before.head_width != after.head_width:
                changed[key] = after.head_width
        elif getattr(before, name) != getattr(after, name):
            changed[key] = getattr(after, name)
    if before.layers != after.layers and isinstance(text.get("layer_types"), list):
        kinds = text["layer_types"]
        changed["layer_types"] = [kinds[layer % len(kinds)] for layer in range(after.layers)]
    return changed if text is config else {**config, WRAPPED[config["model_type"]][0]: changed}


def _size(values: Config, name: str, key: str, model_type: str) -> int | None:
    if name == "d_ff" and key == "n_inner" and values[key] is None:
        return 4 * int(values["n_embd"])  # GPT2Config's meaning of null; n_embd was checked before it
    if key not in values or (values[key] is None and name not in MAY_BE_NULL):
        raise UserError(
            f"the config has no {key}",
            f"a {model_type} config gives its {name.replace('_', ' ')} there, and no size is guessed",
            f'add "{key}" to the file, or save it again with config.save_pretrained',
        )
    value = values[key]
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UserError(f"{key} is {value!r}", f"{key} counts things, so it is a whole number from 1", f"mend {key}")
    return None if value is None else int(value)


def _canonical(sizes: dict[str, int | None]) -> dict[str, Any]:
    """Values that say no more than the heads do become None, so that equal models have equal shapes."""
    heads, d_model, head_dim = sizes["heads"], sizes["d_model"], sizes.get("head_dim")
    assert heads is not None
    assert d_model is not None
    if head_dim is not None and head_dim * heads == d_model:
        sizes = {**sizes, "head_dim": None}
    if sizes.get("kv_heads") == heads:
        sizes = {**sizes, "kv_heads": None}
    return sizes


def _biases(family: Family, values: Config) -> tuple[bool, tuple[str, ...]]:
    """Shape knows all or none; a model between the two counts as none, and a note says so."""
    parts = {
        "attention": _flag(family.attention_biases, values),
        "the MLP": _flag(family.mlp_biases, values),
    }
    notes = () if family.note is None else (family.note,)
    if len(set(parts.values())) == 2:
        biased = next(name for name, has in parts.items() if has)
        notes = (*notes, f"only {biased} has biases: the shape counts none")
    return all(parts.values()), notes


def _flag(said: bool | str, values: Config) -> bool:
    return bool(values[said]) if isinstance(said, str) else said


def _window(model_type: str, values: Config, layers: int | None) -> dict[str, Any]:
    """`layer_types` says it where it is given; older files follow the rule of their family's code."""
    assert layers is not None
    window = values.get("sliding_window")
    if model_type in ("qwen2", "qwen3") and not values["use_sliding_window"]:
        window = None
    if window is None:
        return {}
    kinds = values.get("layer_types")
    if isinstance(kinds, list):
        windowed = kinds.count(SLIDING)
    elif model_type in ("qwen2", "qwen3"):
        windowed = layers - min(layers, int(values["max_window_layers"]))
    elif model_type == "gemma2":
        windowed = (layers + 1) // 2  # every other layer, the first among them
    elif model_type == "gemma3_text":
        windowed = layers - layers // int(values.get("sliding_window_pattern") or 6)
    else:
        windowed = layers
    if windowed == 0:
        return {}
    return {"window": window, "windowed_layers": None if windowed == layers else windowed}
