"""Names, configs and shape files as shapes: what is read, what is refused, and how a changed one is written back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from redline.core.errors import UserError
from redline.core.workload import Shape
from redline.predict.flops import parameters
from redline.workloads import PRESETS, changed_document, resolve_shape, resolve_workload
from redline.workloads.huggingface import FAMILIES, WRAPPED
from redline.workloads.shapes import LARGEST, shape_fields

LLAMA = {  # Llama-2 7B as published, without the keys that say nothing about sizes
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-05,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}


@pytest.fixture
def write(tmp_path):
    def write(data: object, name: str = "shape.json") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return str(path)

    return write


def mistake(words: str) -> UserError:
    with pytest.raises(UserError) as caught:
        resolve_shape(words)
    assert all(text.strip() for _, text in caught.value.lines())
    return caught.value


# presets and shape files


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset(name):
    resolved = resolve_shape(name)
    assert (resolved.name, resolved.shape, resolved.origin.kind) == (name, PRESETS[name].shape, "preset")


def test_a_shape_file_has_the_fields_of_shape(write):
    fields = {"layers": 2, "heads": 8, "d_model": 64, "d_ff": 96, "vocab": 257, "sequence": 16}
    more = {"kv_heads": 2, "head_dim": 16, "gated": True, "tied": False, "fused_qkv": False, "biases": False}
    more |= {"positions": "rope", "norm": "rmsnorm", "window": 8, "windowed_layers": 1}
    assert resolve_shape(write(fields)).shape == Shape(**fields)
    name, shape, origin = resolve_shape(write(fields | more, "mine.json"))
    assert (name, shape, origin.kind) == ("mine", Shape(**fields, **more), "shape")


@pytest.mark.parametrize("name", PRESETS)
def test_a_written_shape_is_read_back(write, name):
    shape = replace(PRESETS[name].shape, gated=True, kv_heads=1)
    assert resolve_shape(write(shape_fields(shape))).shape == shape


# Hugging Face configs; tests/cpu/test_huggingface_shapes.py holds every family against transformers itself


def test_gpt2_as_published(write):
    resolved = resolve_shape(write(GPT2, "somewhere/gpt2-hf/config.json"))
    assert resolved.shape == PRESETS["gpt2"].shape
    assert (resolved.name, resolved.origin.kind) == ("gpt2-hf", "huggingface")


def test_a_model_folder_is_its_config(write):
    path = Path(write(GPT2, "model/config.json"))
    assert resolve_shape(str(path.parent)) == resolve_shape(str(path))


def test_a_model_folder_named_as_a_preset_is_told_of(write, tmp_path, monkeypatch):
    write({**GPT2, "n_layer": 2}, "gpt2/config.json")
    assert resolve_shape("gpt2").origin.notes == resolve_workload("gpt2").notes == ()
    monkeypatch.chdir(tmp_path)
    for resolved in (resolve_shape("gpt2"), resolve_workload("gpt2")):
        assert resolved.shape == PRESETS["gpt2"].shape
    for notes in (resolve_shape("gpt2").origin.notes, resolve_workload("gpt2").notes):
        assert [note.endswith("is ./gpt2") for note in notes] == [True]
    assert resolve_shape("./gpt2").shape.layers == 2


def test_llama_as_published(write):
    expected = Shape(
        layers=32,
        heads=32,
        d_model=4096,
        d_ff=11008,
        vocab=32000,
        sequence=4096,
        gated=True,
        tied=False,
        fused_qkv=False,
        biases=False,
        positions="rope",
        norm="rmsnorm",
    )
    assert resolve_shape(write(LLAMA)).shape == expected
    grouped = resolve_shape(write({**LLAMA, "num_key_value_heads": 8, "head_dim": 64}))
    assert grouped.shape == replace(expected, kv_heads=8, head_dim=64)
    first = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}  # as the first Llama's files
    assert resolve_shape(write(first)).shape == expected


@pytest.mark.parametrize(
    ("more", "window", "layers"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 4096, None),
        ({"model_type": "mistral", "sliding_window": None}, None, None),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, None, None),
        (
            {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 20},
            4096,
            12,
        ),
        (
            {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 32},
            None,
            None,
        ),
        ({"model_type": "gemma2", "sliding_window": 4096}, 4096, 16),
        ({"model_type": "gemma2", "sliding_window": 4096, "num_hidden_layers": 31}, 4096, 16),
        ({"model_type": "gemma3_text", "sliding_window": 1024}, 1024, 27),  # 32 layers, every sixth sees everything
        ({"model_type": "gemma3_text", "sliding_window": 1024, "sliding_window_pattern": 4}, 1024, 24),
        ({"model_type": "gemma2", "sliding_window": 64, "layer_types": ["full_attention"] * 32}, None, None),
        (
            {
                "model_type": "gemma2",
                "sliding_window": 64,
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 29,
            },
            64,
            3,
        ),
        # Keys that the family's code does not read: files are made from other files.
        ({"model_type": "llama", "sliding_window": 64}, None, None),
        ({"model_type": "gemma", "sliding_window": 64}, None, None),
        ({"model_type": "mistral", "sliding_window": 64, "layer_types": ["full_attention"] * 32}, 64, None),
    ],
    ids=str,
)
def test_windows(write, more, window, layers):
    shape = resolve_shape(write({**LLAMA, **more})).shape
    assert (shape.window, shape.windowed_layers) == (window, layers)


def test_a_config_that_wraps_its_text_model(write):
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "model_type": "gemma3_text"}
    shape = resolve_shape(write({"model_type": "gemma3", "text_config": text, "vision_config": {}})).shape
    assert (shape.d_model, shape.heads, shape.kv_heads, shape.head_dim) == (2560, 8, 4, 256)  # Gemma 3 4B
    assert (shape.vocab, shape.layers_with_window) == (262208, 29)


def test_biases_of_some_layers_alone(write):
    plain = resolve_shape(write(LLAMA)).shape
    attention = resolve_shape(write({**LLAMA, "attention_bias": True})).shape
    full = resolve_shape(write({**LLAMA, "attention_bias": True, "mlp_bias": True})).shape
    qwen = resolve_shape(write({**LLAMA, "model_type": "qwen2"})).shape
    neox = resolve_shape(write({**LLAMA, "model_type": "gpt_neox", "attention_bias": False})).shape
    layers = ("q", "kv", "qkv", "proj", "up", "down", "head")
    biased = [[layer for layer in layers if shape.has_bias(layer)] for shape in (plain, attention, full, qwen, neox)]
    assert biased == [[], ["q", "kv", "qkv", "proj"], list(layers[:-1]), ["q", "kv", "qkv"], ["up", "down"]]


PUBLISHED = {  # from their config.json files, with the count that transformers' own model of it has
    "gemma2": (
        {
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
        },
        9_241_705_984,
    ),
    "qwen2": (
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_position_embeddings": 131072,
        },
        7_615_616_512,
    ),
    "phi": (
        {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 51200,
            "max_position_embeddings": 2048,
        },
        2_779_683_840,
    ),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_parameters_as_published(write, family):
    sizes, count = PUBLISHED[family]
    resolved = resolve_shape(write({"model_type": family, **sizes}))
    assert parameters(resolved.shape).total == count
    assert resolved.origin.notes == ()


def test_an_unsupported_family_lists_the_supported_ones(write):
    error = mistake(write({**LLAMA, "model_type": "mixtral"}))
    assert "'mixtral'" in error.problem
    assert all(name in error.fix for name in (*FAMILIES, *WRAPPED))
    assert "FILE.py:FACTORY" in error.fix  # a shape file would describe a dense decoder
    assert "shape file" not in error.fix


@pytest.mark.parametrize("key", [key for key in LLAMA if key.startswith(("hidden", "num_h", "num_a", "vocab", "max"))])
def test_a_missing_size_is_named_not_guessed(write, key):
    config = {name: value for name, value in LLAMA.items() if name != key}
    assert key in mistake(write(config)).problem
    assert key in mistake(write({**LLAMA, key: None})).problem


def test_all_missing_sizes_are_named_at_once(write):
    error = mistake(write({"model_type": "llama", "vocab_size": 32000, "hidden_size": 64}))
    assert error.problem == (
        "the config has no num_hidden_layers, num_attention_heads, intermediate_size, max_position_embeddings"
    )
    assert '"num_attention_heads", "intermediate_size"' in error.fix
    assert "has no d_model, d_ff, vocab, sequence" in mistake(write({"layers": 2, "heads": 4})).problem


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**LLAMA, "hidden_act": "banana"}, "hidden_act"),
        ({**LLAMA, "hidden_act": ["silu"]}, "hidden_act"),
        ({**GPT2, "activation_function": "geluu"}, "activation_function"),
        ({**LLAMA, "model_type": "gemma2", "hidden_activation": "x", "hidden_act": "silu"}, "hidden_activation"),
    ],
    ids=["llama", "list", "gpt2", "gemma2"],
)
def test_an_activation_that_transformers_has_not_is_named_with_its_key(write, config, key):
    error = mistake(write(config))
    assert error.problem == f"{key} is {json.dumps(config[key])}"
    assert "gelu_new" in error.fix
    assert resolve_shape(write({**config, key: "relu"})).shape.layers


@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, [64]])
@pytest.mark.parametrize("key", ["hidden_size", "num_key_value_heads", "vocab_size"])
def test_sizes_of_a_config_are_whole_numbers_from_1(write, key, value):
    assert key in mistake(write({**LLAMA, key: value})).problem


def test_the_inner_width_of_gpt2_may_be_given(write):
    assert resolve_shape(write({**GPT2, "n_inner": None})).shape.d_ff == 3072
    assert resolve_shape(write({**GPT2, "n_inner": 1000})).shape.d_ff == 1000
    assert "n_embd" in mistake(write({**GPT2, "n_embd": "768"})).problem


@pytest.mark.parametrize("value", ["no", "false", 0, None])
@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_flags_of_a_config_are_true_or_false(write, key, value):
    """Every text is true in Python, "no" among them."""
    error = mistake(write({**LLAMA, key: value}))
    assert error.problem == f"{key} is {json.dumps(value)}"


WINDOWED = {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096}
GEMMA_3 = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 1024}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**WINDOWED, "max_window_layers": "x"}, "max_window_layers"),
        ({**WINDOWED, "max_window_layers": None}, "max_window_layers"),
        ({**WINDOWED, "max_window_layers": -1}, "max_window_layers"),
        ({**WINDOWED, "use_sliding_window": "x"}, "use_sliding_window"),
        ({**WINDOWED, "sliding_window": 0}, "sliding_window"),
        ({**WINDOWED, "layer_types": "full_attention"}, "layer_types"),
        ({**WINDOWED, "layer_types": ["full_attention"]}, "layer_types"),
        ({**GEMMA_3, "sliding_window_pattern": "x"}, "sliding_window_pattern"),
        ({**GEMMA_3, "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({**LLAMA, "model_type": "mistral", "sliding_window": "4096"}, "sliding_window"),
        ({"model_type": "gemma3", "text_config": 5}, "text_config"),
        ({"model_type": "gemma3"}, "text_config"),
    ],
    ids=str,
)
def test_mistakes_name_the_key_of_the_config(write, config, key):
    assert mistake(write(config)).problem.startswith(f"{key} is ")


def test_windows_from_the_first_layer_and_by_the_usual_pattern(write):
    assert resolve_shape(write({**WINDOWED, "max_window_layers": 0})).shape.windowed_layers is None
    by_default = resolve_shape(write(GEMMA_3)).shape
    assert resolve_shape(write({**GEMMA_3, "sliding_window_pattern": None})).shape == by_default


# mistakes


def test_an_unknown_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = mistake("gpt2-medum")
    assert error.problem == "unknown workload 'gpt2-medum'"
    assert "did you mean 'gpt2-medium'?" in error.fix
    assert "config.json" in error.fix
    assert "FILE.py:FACTORY" in error.fix
    mistake("")


@pytest.mark.parametrize("words", ["absent.json", "meta-llama/Llama-3", "./gpt2"])
def test_a_missing_file(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert words in mistake(words).problem


def test_a_folder_without_a_config(tmp_path):
    assert "config.json" in mistake(str(tmp_path)).problem


@pytest.mark.parametrize("text", ["", "layers: 12", "{", "\x00", "[" * 100_000])
def test_what_is_not_json(write, text):
    assert "is not JSON" in mistake(write(text)).problem


def test_numbers_without_end_and_long_values(write):
    assert "is not JSON" in mistake(write('{"layers": ' + "1" * 5000 + "}")).problem
    assert len(mistake(write({**LLAMA, "hidden_size": "x" * 5000})).problem) < 100


@pytest.mark.parametrize("words", ["x" * 5000, "x" * 5000 + ".json", "~nobody-has-this-name/config.json"], ids=len)
def test_names_that_no_file_can_have(words):
    assert len(mistake(words).problem) < 300


def test_a_mark_in_front_of_the_text_is_no_mistake(tmp_path):
    """Editors on Windows write one."""
    (tmp_path / "shape.json").write_text(json.dumps(TINY), encoding="utf-8-sig")
    assert resolve_shape(str(tmp_path / "shape.json")).shape == Shape(**TINY)


def test_what_is_not_text(tmp_path):
    (tmp_path / "weights.json").write_bytes(b"\x80\x02\xff")
    assert "is not JSON" in mistake(str(tmp_path / "weights.json")).problem
    assert "regular file" in mistake("/dev/zero").why


def test_weights_given_by_mistake(tmp_path):
    for name, problem in (("model.safetensors", "holds weights"), ("model", "too large")):
        with open(tmp_path / name, "wb") as file:
            file.truncate(17 * 1024**2)
        assert problem in mistake(str(tmp_path / name)).problem
    assert mistake(str(tmp_path / "model.safetensors")).fix == f"point at the folder: {tmp_path}"


def test_layers_of_another_kind_are_refused(write):
    for family in ("gemma2", "qwen3"):
        error = mistake(write({**LLAMA, "model_type": family, "layer_types": ["linear_attention"] * 32}))
        assert error.problem == 'layer_types names "linear_attention"'


@pytest.mark.parametrize("data", [[], 3, "text", None])
def test_json_that_is_no_object(write, data):
    assert "no JSON object" in mistake(write(json.dumps(data))).problem


def test_an_object_that_is_no_shape(write):
    assert "neither a shape nor" in mistake(write({"a": 1})).problem


TINY = {"layers": 2, "heads": 4, "d_model": 128, "d_ff": 512, "vocab": 257, "sequence": 256}


@pytest.mark.parametrize("name", TINY)
def test_a_shape_needs_all_its_sizes(write, name):
    assert f"has no {name}" in mistake(write({key: value for key, value in TINY.items() if key != name})).problem


@pytest.mark.parametrize("name", [*TINY, "max_positions", "kv_heads", "head_dim", "window", "layer_norms"])
@pytest.mark.parametrize("value", [0, -12, 1.5, "12", True])
def test_sizes_of_a_shape_are_whole_numbers_from_1(write, name, value):
    assert name in mistake(write({**TINY, name: value})).problem


@pytest.mark.parametrize("name", LARGEST)
def test_absurd_sizes(write, name):
    fields = {**TINY, "head_dim": 64, name: LARGEST[name]}
    assert getattr(resolve_shape(write(fields)).shape, name) == LARGEST[name]
    error = mistake(write({**fields, name: 2 * LARGEST[name]}))
    assert name in error.problem
    assert "is probably a typo" in error.why


def test_other_fields_of_a_shape(write):
    assert "did you mean 'kv_heads'?" in mistake(write({**TINY, "kvheads": 4})).fix
    assert "gated" in mistake(write({**TINY, "gated": "yes"})).problem
    assert "positions" in mistake(write({**TINY, "positions": "alibi"})).problem
    assert "do not divide" in mistake(write({**TINY, "heads": 3})).problem
    assert 'qkv_biases is "no"' in mistake(write({**TINY, "qkv_biases": "no"})).problem
    assert resolve_shape(write({**TINY, "qkv_biases": None})).shape == Shape(**TINY)
    assert "there is no window" in mistake(write({**TINY, "windowed_layers": 1})).problem
    assert "layer_norms is 0" in mistake(write({**TINY, "layer_norms": 0})).problem


def test_learned_positions_are_as_many_as_the_longest_sequence(write):
    short = resolve_shape(write({**TINY, "sequence": 100, "max_positions": 256})).shape
    whole = resolve_shape(write(TINY)).shape
    assert (short.positions_count, whole.positions_count) == (256, 256)
    assert parameters(short) == parameters(whole)
    error = mistake(write({**TINY, "max_positions": 255}))
    assert error.problem == "256 tokens do not fit 255 learned positions"
    assert resolve_shape(write({**TINY, "max_positions": 255, "positions": "rope"})).shape.sequence == 256


# written back


def test_a_changed_config_differs_in_nothing_else(write):
    config = {**LLAMA, "head_dim": 128, "custom": {"keep": [1, 2]}}
    resolved = resolve_shape(write(config))
    after = replace(resolved.shape, vocab=32064, d_ff=11264)
    assert changed_document(resolved, after) == {**config, "vocab_size": 32064, "intermediate_size": 11264}
    wider = replace(resolved.shape, heads=64)
    assert changed_document(resolved, wider) == {
        **config,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "head_dim": 64,
    }
    assert resolve_shape(write(changed_document(resolved, wider))).shape.head_width == 64
    assert resolved.origin.config == config


@pytest.mark.parametrize(("model_type", "written"), [("llama", {}), ("qwen3", {"head_dim": 64})])
def test_a_width_of_heads_is_written_where_transformers_would_not_derive_it(write, model_type, written):
    """Without the key a Llama divides d_model by the heads, and a Qwen3 has 128."""
    config = {**LLAMA, "model_type": model_type}
    resolved = resolve_shape(write(config))
    changed = changed_document(resolved, replace(resolved.shape, heads=64))
    assert changed == {**config, "num_attention_heads": 64, "num_key_value_heads": 64, **written}
    assert changed_document(resolved, resolved.shape) == config


def test_key_value_heads_are_written_only_where_the_file_would_read_otherwise(write):
    """With null they follow the heads; a number stays until it is wrong."""
    null = resolve_shape(write({**LLAMA, "num_key_value_heads": None}))
    assert changed_document(null, replace(null.shape, heads=64))["num_key_value_heads"] is None
    grouped = changed_document(null, replace(null.shape, heads=64, kv_heads=32))
    assert grouped["num_key_value_heads"] == 32
    eight = resolve_shape(write({**LLAMA, "num_key_value_heads": 8}))
    assert changed_document(eight, replace(eight.shape, heads=64))["num_key_value_heads"] == 8


def test_gpt2s_inner_width_is_written_where_null_would_not_say_it(write):
    resolved = resolve_shape(write(GPT2 | {"n_inner": None}))
    wider = replace(resolved.shape, d_model=1536)
    assert changed_document(resolved, wider) == {**GPT2, "n_embd": 1536, "n_inner": 3072}
    four = replace(wider, d_ff=6144)
    assert changed_document(resolved, four) == {**GPT2, "n_embd": 1536, "n_inner": None}


def test_windows_that_begin_behind_the_last_layer_still_do(write):
    resolved = resolve_shape(write({**WINDOWED, "max_window_layers": 32}))
    after = replace(resolved.shape, layers=34)
    assert resolve_shape(write(changed_document(resolved, after))).shape == after


def test_a_config_with_a_layer_list_keeps_it_as_long_as_its_layers(write):
    config = {**LLAMA, "model_type": "qwen3", "head_dim": 128, "layer_types": ["full_attention"] * 32}
    resolved = resolve_shape(write(config))
    changed = changed_document(resolved, replace(resolved.shape, layers=34))
    assert changed["layer_types"] == ["full_attention"] * 34


def test_the_fix_of_a_wrapped_config_goes_inside(write):
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "model_type": "gemma3_text"}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1}}
    resolved = resolve_shape(write(config))
    changed = changed_document(resolved, replace(resolved.shape, vocab=262272))
    assert changed == {**config, "text_config": {**text, "vocab_size": 262272}}
