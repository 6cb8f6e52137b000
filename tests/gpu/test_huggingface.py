"""transformers' models on a CUDA device: the whole recipe keeps its promise, with the kernels it names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from redline.core.job import Job, RunDirectory
from redline.core.measurement import Measurement
from redline.core.recipe import Recipe
from redline.core.workload import Workload
from redline.data.tokens import prepare_tokens
from redline.predict.verdict import judge
from redline.rungs import plan_of
from redline.search.launch import launch
from redline.workloads import resolve_workload

pytestmark = pytest.mark.gpu

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
def test_a_recipe_on_somebody_elses_model(config: dict[str, object], rungs: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    workload: Workload = replace(resolve_workload(str(tmp_path)), micro_batch=8)
    assert not set(rungs) & set(workload.cannot)
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    prepare_tokens(workload, run.path / "tokens.npy")
    job = Job(
        workload=workload,
        recipe=Recipe(rungs=rungs, micro_batch=8),
        device="cuda",
        tokens="tokens.npy",
        timed_steps=10,
        check_steps=10,
    )
    reference = replace(job, kind="reference", recipe=Recipe(rungs=("tied-weights",), micro_batch=8))
    expected, found = (launch(run, one, 300, lambda *_, **__: None) for one in (reference, job))
    assert isinstance(expected, Measurement), expected
    assert isinstance(found, Measurement), found
    verdict = judge(
        maths="rounding-only",
        precision=plan_of(rungs).precision,
        measurement=found,
        reference=expected.loss_curve,
        base=None,
        plain=expected.loss_curve,
        ln_vocab=workload.shape.ln_vocab,
    )
    assert verdict.verdict == "rounding", verdict.detail
    assert ("cudnn" if "cudnn-attention" in rungs else "flash_fwd") in (found.proof.attention or ""), found.proof
