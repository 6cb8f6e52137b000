"""transformers' models on a CUDA device: the whole recipe keeps its promise, with the kernels it names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from redline.core.measurement import Measurement
from redline.core.workload import Workload
from redline.data.tokens import prepare_tokens
from redline.workloads import resolve_workload

Rounds = Callable[[Workload, tuple[str, ...]], Measurement]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hasty_workers")]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 256,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "vocab_size": 1000,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}
FAST = ("tf32", "no-sync", "bf16", "compile", "cudnn-attention", "padded-vocab", "tied-weights", "fused-adamw")
FAST += ("loader-workers", "fused-loss", "bf16-residual")


@pytest.mark.parametrize(
    ("config", "rungs"),
    [(LLAMA, FAST), (LLAMA, ("bf16", "flash", "tied-weights")), (GPT2, (*FAST, "sigmoid-gelu"))],
    ids=["llama-all", "llama-eager", "gpt2-all"],
)
def test_a_recipe_on_somebody_elses_model(
    config: dict[str, object], rungs: tuple[str, ...], tmp_path: Path, only_rounds: Rounds
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    workload = replace(resolve_workload(str(tmp_path)), micro_batch=8)
    prepare_tokens(workload, tmp_path / "tokens.npy")
    only_rounds(workload, rungs)
