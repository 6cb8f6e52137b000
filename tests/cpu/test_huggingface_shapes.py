"""Every family against transformers itself: configs made by its classes, and tiny models built from them.

The shape must imply the linear layers the model has, size by size, and every one of its parameters.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.activations import ACT2CLS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from redline.core.errors import UserError
from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.predict.flops import flops_per_token, parameters
from redline.predict.gemms import linear_layers
from redline.workloads import changed_document, resolve_shape
from redline.workloads.huggingface import ACTIVATION_NAMES, FAMILIES, GPT2_ALIASES, NOT_CAUSAL, ROPE_TYPES

CLASSES = {
    "gpt2": GPT2Config,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma": GemmaConfig,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
    "phi": PhiConfig,
    "phi3": Phi3Config,
    "gpt_neox": GPTNeoXConfig,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "vocab_size": 331,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    **TOKENS,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
CASES = {
    "gpt2": GPT2Config(vocab_size=331, n_embd=96, n_layer=3, n_head=6, n_positions=64, **TOKENS),
    "gpt2-inner": GPT2Config(vocab_size=331, n_embd=96, n_layer=3, n_head=6, n_positions=64, n_inner=200, **TOKENS),
    "gpt2-untied": GPT2Config(
        vocab_size=331, n_embd=96, n_layer=3, n_head=6, n_positions=64, tie_word_embeddings=False, **TOKENS
    ),
    "llama": LlamaConfig(**SIZES),
    "llama-grouped": LlamaConfig(**GROUPED, head_dim=32, tie_word_embeddings=True),
    "llama-rope-linear": LlamaConfig(**GROUPED, rope_parameters={**ROPE, "rope_type": "linear", "factor": 2.0}),
    "llama-rope-yarn": LlamaConfig(**GROUPED, rope_parameters={**ROPE, "rope_type": "yarn", "factor": 2.0}),
    "llama-biases": LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
    "llama-attention-bias": LlamaConfig(**GROUPED, attention_bias=True),
    "mistral": MistralConfig(**GROUPED, head_dim=None, sliding_window=16),
    "mistral-whole": MistralConfig(**GROUPED, head_dim=24, sliding_window=None),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen2-window": Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "qwen3": Qwen3Config(**GROUPED, head_dim=24),
    "gemma": GemmaConfig(**GROUPED, head_dim=24),
    "gemma2": Gemma2Config(**GROUPED, head_dim=24, sliding_window=16),
    "gemma3_text": Gemma3TextConfig(**{**GROUPED, "num_hidden_layers": 7}, head_dim=24, sliding_window=16),
    "phi": PhiConfig(**SIZES),
    "phi-grouped": PhiConfig(**GROUPED),
    "phi-qk-norms": PhiConfig(**SIZES, qk_layernorm=True),
    "phi3": Phi3Config(**GROUPED),
    "phi3-window": Phi3Config(**SIZES, sliding_window=16),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "gpt_neox-no-bias": GPTNeoXConfig(**SIZES, attention_bias=False),
}


def build(config):
    """Sizes only: no memory, no initialisation."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def linear_sizes(model) -> Counter[tuple[int, int]]:
    """(inputs, outputs) of every linear layer, with how often it is there."""
    sizes: Counter[tuple[int, int]] = Counter()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            sizes[module.in_features, module.out_features] += 1
        elif isinstance(module, Conv1D):
            sizes[module.nx, module.nf] += 1
    return sizes


def implied_sizes(shape: Shape, fused_gate: bool) -> Counter[tuple[int, int]]:
    sizes: Counter[tuple[int, int]] = Counter()
    for layer in linear_layers(shape, Plan()):
        if layer.where == "up" and fused_gate:
            sizes[layer.inputs, 2 * layer.outputs] += layer.count // 2
        else:
            sizes[layer.inputs, layer.outputs] += layer.count
    return sizes


@pytest.fixture
def resolve(tmp_path):
    def resolve(config):
        config.save_pretrained(tmp_path)
        return resolve_shape(str(tmp_path))

    return resolve


@pytest.mark.parametrize("name", CASES)
def test_the_shape_implies_the_models_linear_layers(name, resolve):
    shape = resolve(CASES[name]).shape
    assert linear_sizes(build(CASES[name])) == implied_sizes(shape, fused_gate=name.startswith("phi3"))


@pytest.mark.parametrize("name", CASES)
def test_the_shape_implies_the_models_parameters(name, resolve):
    resolved = resolve(CASES[name])
    counted = sum(parameter.numel() for parameter in build(CASES[name]).parameters())
    assert counted == parameters(resolved.shape).total


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_parameters_with_and_without_a_head_of_its_own(name, tied, resolve):
    """What a run builds: the baseline unties what was published tied."""
    config = copy.deepcopy(CASES[name])
    config.tie_word_embeddings = tied
    counted = sum(parameter.numel() for parameter in build(config).parameters())
    assert counted == parameters(resolve(CASES[name]).shape, tied=tied).total


@pytest.mark.parametrize("name", CASES)
def test_the_shape_implies_the_flops_that_torch_counts(name, resolve):
    """Forward and backward with plain attention, which multiplies the whole square, windowed or not."""
    shape = resolve(CASES[name]).shape
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CASES[name]), attn_implementation="eager")
    tokens = torch.zeros(1, shape.sequence, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, use_cache=False).logits.sum().backward()
    assert counter.get_total_flops() == flops_per_token(shape) * tokens.numel()


@pytest.mark.parametrize("name", CASES)
def test_a_dict_of_the_config_gives_the_same_shape(name, resolve, tmp_path):
    """save_pretrained leaves some defaults out; to_dict writes them all."""
    saved = resolve(CASES[name]).shape
    (tmp_path / "all.json").write_text(json.dumps(CASES[name].to_dict(), default=str))
    assert resolve_shape(str(tmp_path / "all.json")).shape == saved


@pytest.mark.parametrize("name", CASES)
def test_windows_are_those_of_the_model(name, resolve):
    shape, config = resolve(CASES[name]).shape, CASES[name]
    kinds = (
        getattr(config, "layer_types", None)
        or ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"] * shape.layers
    )
    assert shape.layers_with_window == kinds.count("sliding_attention")
    assert shape.window == (config.sliding_window if shape.layers_with_window else None)


def test_every_activation_of_transformers_is_known():
    assert set(ACT2CLS) <= set(ACTIVATION_NAMES)


def test_every_rotary_embedding_of_transformers_is_known():
    assert set(ROPE_INIT_FUNCTIONS) <= set(ROPE_TYPES)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_transformers_own(model_type):
    """A value that we fill in is the one that transformers fills in when the key is missing."""
    config = CLASSES[model_type]()
    derived = {"num_key_value_heads": "num_attention_heads", "n_inner": None, "head_dim": None}
    for key, value in FAMILIES[model_type].defaults.items():
        theirs = getattr(config, key, None)
        if value is not None or key not in derived:
            assert theirs == value, key
        elif key == "head_dim":
            assert theirs in (None, config.hidden_size // config.num_attention_heads)
        else:
            assert theirs == (getattr(config, derived[key]) if derived[key] else None), key


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_tried(model_type):
    assert any(config.model_type == model_type for config in CASES.values())


@pytest.mark.parametrize("name", ["gpt2", "llama-grouped", "phi3", "gpt_neox", "gemma2"])
def test_a_fixed_config_builds_the_suggested_model(name, resolve, tmp_path):
    resolved = resolve(CASES[name])
    suggested = replace(resolved.shape, vocab=384, d_ff=256)
    (tmp_path / "fixed").mkdir()
    (tmp_path / "fixed" / "config.json").write_text(json.dumps(changed_document(resolved, suggested)))
    model = build(AutoConfig.from_pretrained(tmp_path / "fixed"))
    assert linear_sizes(model) == implied_sizes(suggested, fused_gate=name == "phi3")
    assert resolve_shape(str(tmp_path / "fixed")).shape == suggested


STRAY = {  # keys of other families, of other times and of other kinds of model, in a config that does not expect them
    **{"num_key_value_heads": 3, "head_dim": 32, "attention_bias": True, "mlp_bias": True, "qk_layernorm": True},
    **{"add_cross_attention": True, "is_decoder": True, "is_encoder_decoder": True, "tie_encoder_decoder": True},
    **{"is_causal": False, "use_bidirectional_attention": True, "cross_attention_hidden_size": 48},
    **{"num_experts": 4, "num_local_experts": 4, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    **{"pretraining_tp": 2, "use_parallel_residual": False, "partial_rotary_factor": 0.25, "rotary_pct": 0.5},
    **{"num_kv_shared_layers": 1, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "use_qk_norm": True},
    **{"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": 32},
    **{"n_layer": 2, "n_head": 3, "n_embd": 48, "n_positions": 32, "n_inner": 24, "pruned_heads": {"0": [0]}},
    **{"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True, "num_labels": 7},
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_that_changes_the_model_is_read_or_refused(model_type, tmp_path):
    """By the model that transformers builds from the file: no key may change its size behind redline's back."""
    told = {}
    own = {key: value for key, value in CASES[model_type].to_dict().items() if key != "layer_types"}  # of all layers
    for key, value in STRAY.items():
        (tmp_path / "config.json").write_text(json.dumps({**own, key: value}, default=str))
        try:
            predicted = parameters(resolve_shape(str(tmp_path)).shape).total
        except UserError as error:
            told[key] = error.problem
            continue
        model = build(AutoConfig.from_pretrained(tmp_path))
        assert sum(each.numel() for each in model.parameters()) == predicted, key
    assert {key for key, _, _ in NOT_CAUSAL} <= set(told)
    assert all(key in problem or "heads" in problem for key, problem in told.items()), told


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(("key", "value"), [("is_decoder", False), ("is_decoder", True), ("is_causal", False)])
def test_what_is_refused_looks_ahead_and_what_is_not_does_not(model_type, key, value):
    config = copy.deepcopy(CASES[model_type])
    setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    tokens[1, -1] = 7
    with torch.no_grad():
        first = model(tokens, use_cache=False).logits[:, 0]
    refused = (key, value) in [(name, wrong) for name, wrong, _ in NOT_CAUSAL]
    assert torch.equal(first[0], first[1]) != refused


def test_the_other_names_of_gpt2s_sizes_are_transformers_own():
    assert {key: alias for alias, key in GPT2Config.attribute_map.items()} == GPT2_ALIASES


SEEN = {**GROUPED, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LlamaConfig(**SEEN, sliding_window=16), id="llama-stray-window"),
        pytest.param(GemmaConfig(**SEEN, head_dim=24, sliding_window=16), id="gemma-stray-window"),
        pytest.param(MistralConfig(**SEEN, sliding_window=16), id="mistral"),
        pytest.param(MistralConfig(**SEEN, sliding_window=None), id="mistral-whole"),
        pytest.param(Phi3Config(**SEEN, sliding_window=16, layer_types=["full_attention"]), id="phi3-stray-list"),
        pytest.param(Gemma2Config(**SEEN, head_dim=24, sliding_window=16), id="gemma2"),
        pytest.param(Gemma2Config(**SEEN, head_dim=24, layer_types=["full_attention"]), id="gemma2-listed"),
        pytest.param(Qwen3Config(**SEEN, head_dim=24, sliding_window=16), id="qwen3-switched-off"),
    ],
)
def test_a_token_sees_as_far_back_as_the_shape_says(config, resolve):
    """By the model itself: whether the first token changes what comes out at the last."""
    shape = resolve(config).shape
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tokens = torch.zeros(2, shape.sequence, dtype=torch.int64)
    tokens[1, 0] = 7
    with torch.no_grad():
        last = model(tokens, use_cache=False).logits[:, -1]
    sees_it = not torch.equal(last[0], last[1])
    assert sees_it == (shape.window is None or shape.window >= shape.sequence)
