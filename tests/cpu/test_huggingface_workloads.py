"""Every family as transformers builds it, held against transformers' own model with the same weights.

What a rung does to such a model from outside must leave its loss and its gradients as they were; what it cannot do is
in `cannot`, and the reasons are shown to be real. Then the way of a user: each family through lint, estimate, a ladder
and ten steps of training, interrupted, resumed, sampled and exported.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM

from redline.cli import main
from redline.core.errors import ModelError, UserError
from redline.core.plan import Plan
from redline.core.recipe import Recipe
from redline.core.values import from_json, to_json
from redline.core.workload import Workload
from redline.data.prepare import Preparation, prepare
from redline.engine import probe, worker
from redline.engine.checkpoint import latest_checkpoint
from redline.engine.equivalence import relative_errors
from redline.engine.session import TrainOrder, load_model, open_data, validation_batches
from redline.model.adapter import muted
from redline.model.transformers_adapter import TransformersAdapter, drops, head_of
from redline.predict.verdict import gradient_bound
from redline.rungs import find_rung, plan_of, usual_rungs
from redline.workloads import resolve_workload
from redline.workloads.hub_cache import find_cached, hub_cache
from redline.workloads.huggingface import FAMILIES

CPU = torch.device("cpu")
VOCAB, SEQUENCE = 331, 32
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQUENCE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": SEQUENCE,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALL_HEADS = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **GPT2},
    "llama": {"model_type": "llama", **COMMON},
    "mistral": {"model_type": "mistral", **COMMON},
    "qwen2": {"model_type": "qwen2", **COMMON, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **COMMON, "head_dim": 16},
    "gemma": {"model_type": "gemma", **COMMON, "head_dim": 16},
    "gemma2": {"model_type": "gemma2", **COMMON, "head_dim": 16},
    "gemma3_text": {"model_type": "gemma3_text", **COMMON, "head_dim": 16},
    "phi": {"model_type": "phi", **COMMON},
    "phi3": {"model_type": "phi3", **COMMON},
    "gpt_neox": {"model_type": "gpt_neox", **ALL_HEADS},
}
RUNGS = ("padded-vocab", "fused-loss", "chunked-loss", "flash", "sigmoid-gelu", "checkpointing")
REFUSED = {  # of RUNGS; everything else is tried below
    "llama": {"sigmoid-gelu"},
    "mistral": {"sigmoid-gelu"},
    "qwen2": {"sigmoid-gelu"},
    "qwen3": {"sigmoid-gelu"},
    "gemma2": {"fused-loss", "chunked-loss", "flash", "padded-vocab"},
    "phi": {"fused-loss", "chunked-loss", "padded-vocab"},
    "phi3": {"sigmoid-gelu"},
    "gpt_neox": {"sigmoid-gelu"},
}
every_family = pytest.mark.parametrize("family", CONFIGS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small spend their time waiting for the second."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def workload(tmp_path: Path) -> Any:
    def resolve(family: str, *, sequence: int | None = None, trained_on: str | None = None, **more: Any) -> Workload:
        folder = written(tmp_path, {**CONFIGS[family], **more})
        return replace(resolve_workload(str(folder), sequence=sequence, trained_on=trained_on), learning_rate=3e-3)

    return resolve


def written(folder: Path, config: dict[str, Any]) -> Path:
    """A model folder, as save_pretrained makes them, without the weights."""
    folder = folder / config["model_type"]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def some_tokens(count: int = SEQUENCE + 1) -> torch.Tensor:
    """Id 0 is the padding of most configs: its embedding learns nothing, in their model and in ours."""
    return torch.randint(VOCAB, (3, count), generator=torch.Generator().manual_seed(5))


def theirs(config: dict[str, Any], attention: str = "eager", **changes: Any) -> Any:
    """transformers' own model, without anything of ours."""
    settings = {**copy.deepcopy(config), **changes}
    made = AutoConfig.for_model(settings.pop("model_type"), **settings)
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        if hasattr(made, name):
            setattr(made, name, 0.0)
    return AutoModelForCausalLM.from_config(made, attn_implementation=attention).train()


def step_of(workload: Workload, plan: Plan, weights: dict[str, torch.Tensor] | None = None) -> tuple[Any, Any, float]:
    """The model, the adapter and the loss of one batch, with the gradients left in the model."""
    adapter = TransformersAdapter(workload)
    model = adapter.build(plan, CPU)
    if weights is not None:
        model.load_state_dict(weights)
    tokens = some_tokens()
    loss = adapter.loss_of(model, plan)(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return model, adapter, loss.item()


def gradients(adapter: TransformersAdapter, model: Any) -> dict[str, torch.Tensor]:
    return {name: adapter.unpadded(model, name, parameter.grad) for name, parameter in model.named_parameters()}


def shaken(model: Any) -> dict[str, torch.Tensor]:
    """Its weights, none of them left at the 0 or 1 that they start from: a bias of 0 can be dropped unseen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)), alpha=0.05)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# the model is theirs


def test_every_family_is_here() -> None:
    assert set(CONFIGS) == set(FAMILIES)


@every_family
def test_loss_and_gradients_are_transformers_own(family: str, workload: Any) -> None:
    """Their loss shifts the labels by itself: the whole sequence as labels is our inputs and targets."""
    asked, other = workload(family), theirs(CONFIGS[family])
    weights = shaken(other)
    model, adapter, loss = step_of(asked, Plan(tied=asked.shape.tied), weights)
    tokens = some_tokens()
    # One token more than the context: positions beyond it do not exist for learned ones, so the last is not read.
    if family == "gpt2":
        logits = other(input_ids=tokens[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    else:
        expected = other(input_ids=tokens, labels=tokens).loss
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    own = {name: parameter.grad for name, parameter in other.named_parameters()}
    assert gradients(adapter, model).keys() == own.keys()
    for name, gradient in gradients(adapter, model).items():
        torch.testing.assert_close(gradient, own[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens[:, :-1]).logits, other(tokens[:, :-1]).logits, rtol=1e-5, atol=1e-5)


@every_family
@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_from_outside_changes_no_gradient(family: str, rung: str, workload: Any) -> None:
    asked = workload(family)
    if rung in REFUSED.get(family, ()):
        assert asked.cannot[rung]
        return
    assert rung not in asked.cannot
    plain_plan = Plan(tied=asked.shape.tied)
    plain, adapter, expected = step_of(asked, plain_plan)
    model, other, loss = step_of(asked, find_rung(rung).apply(plain_plan))
    assert loss == pytest.approx(expected, rel=1e-6)
    wanted = gradients(adapter, plain)
    for name, gradient in gradients(other, model).items():
        torch.testing.assert_close(
            gradient, wanted[name], rtol=1e-3, atol=2e-6, msg=lambda text, name=name: name + text
        )
    if rung == "padded-vocab":
        for table in (model.get_input_embeddings().weight, head_of(model).weight):
            assert table.shape[0] == 384
            assert not table[VOCAB:].any()
            assert not table.grad[VOCAB:].any()
        assert model(some_tokens(8)).logits[..., VOCAB:].isneginf().all()
    if rung == "checkpointing":
        assert model.is_gradient_checkpointing
    if rung == "sigmoid-gelu":
        assert sum(type(module).__name__ == "SigmoidGelu" for module in model.modules()) == 2  # one a layer


@every_family
def test_the_stream_in_bf16_costs_little_more_than_bf16_itself(family: str, workload: Any) -> None:
    """The verdict's band for all gradients as one. A single tensor of a model this small has few numbers to average
    over, and is given half as much again."""
    asked, found = workload(family), {}
    plans = {"fp32": Plan(), "bf16": Plan(autocast="bf16"), "stream": Plan(autocast="bf16", residual="bf16")}
    for name, plan in plans.items():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=plan.autocast is not None):
            model, adapter, loss = step_of(asked, plan)
        found[name] = gradients(adapter, model)
        assert loss == pytest.approx(asked.shape.ln_vocab, abs=0.1)
    yardsticks, yardstick = relative_errors(found["bf16"], found["fp32"])
    errors, error = relative_errors(found["stream"], found["fp32"])
    assert yardstick < error <= gradient_bound("bf16", yardstick)
    for name in errors:
        assert errors[name] <= 1.5 * gradient_bound("bf16", yardsticks[name]), name


@pytest.mark.parametrize("family", ["gpt2", "gemma", "phi"])
def test_the_stream_between_the_blocks_is_bf16(family: str, workload: Any) -> None:
    model = TransformersAdapter(workload(family)).build(Plan(residual="bf16", autocast="bf16"), CPU)
    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    seen = []
    blocks[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(some_tokens(8))
    assert seen == [torch.bfloat16]


def test_a_wrapped_text_model_is_the_text_model(tmp_path: Path) -> None:
    """Gemma 3 as published: images are read by a part that the text model does without."""
    inner = {**CONFIGS["gemma3_text"], "attention_dropout": 0.1}
    wrapped = written(tmp_path, {"model_type": "gemma3", "text_config": inner, "vision_config": {}})
    asked, plain = resolve_workload(str(wrapped)), resolve_workload(str(written(tmp_path, inner)))
    assert asked.shape == plain.shape
    assert "the text model alone, without what the config wraps around it" in asked.notes
    one, other = (TransformersAdapter(each).build(Plan(), CPU) for each in (asked, plain))
    assert not drops(one)
    assert torch.equal(one(some_tokens(8)).logits, other(some_tokens(8)).logits)


# what is refused is refused for a reason


@every_family
def test_logits_are_the_heads_product_where_a_fused_loss_is_allowed(family: str, workload: Any) -> None:
    """Caps, scales and biases behind the features would be lost with it, and none of them shows at the start: the
    weights are larger here."""
    asked = workload(family)
    model = TransformersAdapter(asked).build(Plan(tied=asked.shape.tied), CPU)
    shaken(model)
    with torch.no_grad():
        features = model.base_model(input_ids=some_tokens(8)).last_hidden_state
        product, logits = 10 * features @ head_of(model).weight.t(), 10 * model(some_tokens(8)).logits
    assert torch.allclose(product, logits, rtol=1e-4, atol=1e-4) == ("fused-loss" not in asked.cannot)


@pytest.mark.parametrize(("sequence", "allowed"), [(8, True), (16, True), (17, False), (32, False)])
def test_a_window_forbids_fused_attention_where_it_is_felt(sequence: int, allowed: bool, workload: Any) -> None:
    asked = workload("mistral", sequence=sequence, sliding_window=16)
    assert ("flash" not in asked.cannot) == allowed
    assert allowed or "a window of 16" in asked.cannot["flash"]
    plain, fused = (TransformersAdapter(asked).build(Plan(attention=kind), CPU) for kind in ("naive", "flash"))
    with torch.no_grad():
        same = torch.allclose(
            plain(some_tokens(sequence)).logits, fused(some_tokens(sequence)).logits, rtol=1e-4, atol=1e-5
        )
    assert same == allowed


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gemma3_text", "phi", "gpt_neox"])
def test_compiled_attention_has_no_mask(family: str, workload: Any) -> None:
    """The kernels that are pinned take none. One graph, so nothing of the model falls back to Python either."""
    model = TransformersAdapter(workload(family)).build(Plan(attention="flash"), CPU)
    calls = []

    def look(graph: torch.fx.GraphModule, _: object) -> Any:
        calls.extend(node.kwargs for node in graph.graph.nodes if "scaled_dot" in str(node.target))
        return graph.forward

    torch.compiler.reset()
    torch.compile(lambda tokens: model(input_ids=tokens).logits, backend=look, fullgraph=True, dynamic=False)(
        some_tokens(8)
    )
    assert [(call["attn_mask"], call["is_causal"]) for call in calls] == [(None, True)] * 2


# the way back to step 0, and where variants begin


@every_family
def test_variants_start_from_the_same_weights_and_come_back_to_them(family: str, workload: Any) -> None:
    asked = workload(family)
    plans = [Plan(), Plan(tied=True)]
    plans += [] if "flash" in asked.cannot else [Plan(attention="flash")]
    plans += [] if "padded-vocab" in asked.cannot else [Plan(vocab_multiple=128), Plan(vocab_multiple=128, tied=True)]
    built = [(adapter := TransformersAdapter(asked), adapter.build(plan, CPU)) for plan in plans]
    first = {name: parameter.detach().clone() for name, parameter in built[0][1].named_parameters()}
    for plan, (adapter, model) in zip(plans, built, strict=True):
        assert (head_of(model).weight is model.get_input_embeddings().weight) == plan.tied
        start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for name, tensor in start.items():
            assert torch.equal(adapter.unpadded(model, name, tensor), first[name]), name
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            model(some_tokens(8)).logits[..., :VOCAB].logsumexp(-1).mean().backward()
            optimizer.step()
        assert not torch.equal(model.get_input_embeddings().weight, start[next(iter(start))])
        adapter.restore(model)
        assert all(torch.equal(parameter, start[name]) for name, parameter in model.named_parameters())


def test_another_seed_is_another_model(workload: Any) -> None:
    one, other = (
        TransformersAdapter(replace(workload("llama"), seed=seed)).build(Plan(), CPU).state_dict() for seed in (1, 2)
    )
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_building_leaves_the_random_numbers_of_the_process_alone(workload: Any) -> None:
    before = torch.get_rng_state()
    TransformersAdapter(workload("gpt2")).build(Plan(vocab_multiple=128), CPU)
    assert torch.equal(torch.get_rng_state(), before)


# dropout


@every_family
def test_measurements_drop_nothing_and_training_what_the_config_says(family: str, workload: Any) -> None:
    shares = dict.fromkeys(FAMILIES[family].dropouts, 0.3)
    measured, trained = workload(family, **shares), workload(family, trained_on="cuda", **shares)
    still = TransformersAdapter(measured).build(Plan(), CPU)
    assert not drops(still)
    assert torch.equal(still(some_tokens(8)).logits, still(some_tokens(8)).logits)
    adapter = TransformersAdapter(trained)
    model = adapter.build(Plan(), CPU)
    assert drops(model)
    assert not torch.equal(model(some_tokens(8)).logits, model(some_tokens(8)).logits)
    with adapter.evaluating(model):
        assert torch.equal(model(some_tokens(8)).logits, model(some_tokens(8)).logits)
    assert model.training
    for key in shares:
        one = TransformersAdapter(workload(family, trained_on="cuda", **{**dict.fromkeys(shares, 0.0), key: 0.3}))
        assert drops(one.build(Plan(), CPU)), key


# mistakes


def test_what_transformers_refuses_is_told_in_three_lines(workload: Any) -> None:
    """Of what is not refused before: an unknown activation, or a padding token that is not there."""
    with pytest.raises(UserError, match="transformers cannot build the config") as caught:
        TransformersAdapter(workload("llama", rms_norm_eps="small")).build(Plan(), CPU)
    assert all(text.strip() for _, text in caught.value.lines())
    with pytest.raises(UserError, match="pad_token_id is 5000"):
        workload("llama", pad_token_id=5000)


# as a user goes


@pytest.fixture(scope="module")
def shards(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our licence, paragraph by paragraph, a fifth of them held out."""
    folder = tmp_path_factory.mktemp("shards")
    paragraphs = (repository / "LICENSE").read_text().split("\n\n")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
    source = str(folder / "text.jsonl")
    prepare(Preparation(sources=(source,), out=folder / "data", tokenizer="bytes", val_fraction=0.2, processes=1))
    return folder / "data"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verdict_only: None) -> Path:
    """Workers are this process, or eleven models would take minutes; tests/cpu/test_ladder.py starts real ones."""
    machine = probe.probe("cpu"), probe.versions()
    for module in ("search.words", "search.launch"):
        monkeypatch.setattr(f"redline.{module}.probe_machine", lambda _: machine)
    monkeypatch.setattr(
        "redline.search.ladder.launch", lambda run, job, *_, **__: worker.run(job, run.path, lambda *_, **__: None)
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[dict[str, Any], str]:
    assert main([*map(str, words), "--json"]) == 0
    shown = capsys.readouterr()
    document: dict[str, Any] = json.loads(shown.out)
    return document, shown.err


QUICK = ("--steps", 2, "--check-steps", 2, "--micro-batch", 2, "--device", "cpu")
TRAIN = ("--micro-batch", 2, "--device", "cpu", "--cycle", 5, "--eval-every", 5)


@every_family
def test_a_config_goes_through_every_command(
    family: str, here: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(here, CONFIGS[family])
    lint, _ = command(capsys, "lint", folder, "--gpu", "H200")
    assert "vocabulary" in {finding["rule"] for finding in lint["findings"]}  # 331 rows
    estimate, _ = command(capsys, "estimate", folder, "--gpu", "H200")
    built = theirs(CONFIGS[family])
    assert estimate["parameters"] == sum(parameter.numel() for parameter in built.parameters())

    rungs = "flash,padded-vocab,checkpointing"
    ladder, told = command(capsys, "ladder", folder, "--rungs", rungs, *QUICK, "--keep", "all", "--out", "ladder")
    rows = {row["rung"]: row for row in ladder["rows"]}
    for rung in rungs.split(","):
        refused = rung in REFUSED.get(family, ())
        assert rows[rung]["status"] == ("skipped" if refused else "ok")
        allowed = {"not-checked"} if refused else {"rounding", "same"}
        assert rows[rung]["equivalence"]["verdict"] in allowed
    assert "weights as the config initialises them" in told
    refuses = [note for note in ladder["workload"]["notes"] if "`redline train` on this CPU will leave" in note]
    assert len(refuses) == (family == "gpt2")  # whose config drops attention's weights
    assert ladder["workload"]["source"]["config"]["model_type"] == family

    # Not best.json, which is a matter of time. GPT-2's config drops, and a CPU's flash attention cannot.
    refused = REFUSED.get(family, set()) | ({"flash"} if family == "gpt2" else set())
    recipe = [rung for rung in rungs.split(",") if rung not in refused]
    Path("recipe.json").write_text(json.dumps({"rungs": recipe, "micro_batch": 2}))
    words = ("--steps", 10, "--recipe", "recipe.json", "--data", shards, *TRAIN, "--out", "run")
    summary, told = command(capsys, "train", folder, *words)
    assert (summary["ended"], summary["updates"]) == ("steps", 10)
    assert summary["loss"] < rows["baseline"]["loss_first"]
    assert ("dropout as in the config" in told) == (family == "gpt2")


TIES = {"tied": {**CONFIGS["qwen2"]}, "untied": {**CONFIGS["qwen2"], "tie_word_embeddings": False}}


def size_of(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("ties", TIES)
def test_every_row_of_a_ladder_is_the_model_of_the_config(
    ties: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tied where it says so, the plain first row too; of recipes of a version that untied it as well."""
    folder, own = written(here, TIES[ties]), ["tied-weights"] if ties == "tied" else []
    words = ("--rungs", "tied-weights,flash", *QUICK, "--keep", "all")
    ladder, told = command(capsys, "ladder", folder, *words, "--out", "ladder")
    rows = {row["rung"]: row for row in ladder["rows"]}
    assert list(rows) == ["baseline", "flash", *([] if own else ["tied-weights"])]
    assert rows["baseline"]["recipe"] == own
    assert rows["baseline"]["equivalence"]["verdict"] == "same"
    assert ("every recipe has tied-weights" in told) == bool(own)
    assert own == [name for name in json.loads(Path("ladder/best.json").read_text())["rungs"] if name != "flash"]
    if not own:
        assert rows["tied-weights"]["reason"] == "the published model has a head of its own"

    Path("old.json").write_text(json.dumps({"rungs": ["flash"], "micro_batch": 2}))
    again, _ = command(capsys, "ladder", folder, "--from", "old.json", "--rungs", "none", *QUICK, "--out", "again")
    assert [row["recipe"] for row in again["rows"]] == [[*own, "flash"]]
    assert again["rows"][0]["equivalence"]["verdict"] in ("same", "rounding")  # than the config's: nothing is changed
    adapter, expected = TransformersAdapter(from_json(Workload, ladder["workload"])), size_of(theirs(TIES[ties]))
    for row in (*(row for row in rows.values() if row["status"] == "ok"), *again["rows"]):
        assert size_of(adapter.build(plan_of(row["recipe"]), CPU)) == expected


@pytest.mark.parametrize("ties", TIES)
def test_a_recipe_trains_and_exports_the_model_of_the_config(
    ties: str, here: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(here, TIES[ties])
    Path("old.json").write_text(json.dumps({"rungs": ["flash"], "micro_batch": 2}))
    words = ("--recipe", "old.json", "--data", shards, "--steps", 2, *TRAIN, "--out", "run")
    summary, told = command(capsys, "train", folder, *words)
    assert ("tied-weights added to the recipe: without it, qwen2 would be a different model" in told) == (
        ties == "tied"
    )
    assert summary["rungs"] == [*(["tied-weights"] if ties == "tied" else []), "flash"]
    command(capsys, "train", "--resume", "run", "--steps", 3, "--recipe", "old.json")
    command(capsys, "export", "run", "--out", "exported")
    loaded = AutoModelForCausalLM.from_pretrained("exported")
    assert size_of(loaded) == size_of(theirs(TIES[ties]))
    assert loaded.config.tie_word_embeddings == (ties == "tied")


@pytest.mark.parametrize("words", ["ladder --rungs none", "tune --minutes 0.01"])
def test_the_tie_of_a_config_cannot_be_left_out(words: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(here, TIES["tied"])
    assert main([*words.split(), str(folder), "--without", "tied-weights", "--device", "cpu", "--out", "run"]) == 2
    assert "qwen2 without tied-weights" in capsys.readouterr().err
    assert not Path("run").exists()


def checkpoints(folder: Path) -> dict[str, torch.Tensor]:
    loaded, notes = latest_checkpoint(folder / "checkpoints")
    assert loaded is not None, notes
    return dict(loaded.tensors().items())


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma"])
def test_trained_interrupted_resumed_sampled_and_exported(
    family: str, here: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the dropout of GPT-2's config, whose random numbers go on where they had got to, and padded."""
    folder = written(here, CONFIGS[family])
    rungs = ["padded-vocab", "fused-adamw", *(["tied-weights"] if family != "llama" else [])]
    Path("recipe.json").write_text(json.dumps({"rungs": rungs, "micro_batch": 2}))
    words = ("train", folder, "--recipe", "recipe.json", "--data", shards, *TRAIN)
    whole, _ = command(capsys, *words, "--steps", 8, "--sequence", 24, "--out", "whole")
    command(capsys, *words, "--steps", 8, "--sequence", 24, "--out", "again")
    assert_same(checkpoints(Path("whole")), checkpoints(Path("again")))
    assert json.loads(Path("whole/run.json").read_text())["order"]["workload"]["shape"]["sequence"] == 24

    cut = json.loads(Path("again/run.json").read_text())
    cut["order"]["settings"]["budget"]["steps"], cut["order"]["out"] = 3, "parts"
    Path("parts").mkdir()
    Path("parts/run.json").write_text(json.dumps(cut))
    for steps in (3, 8):
        resumed, _ = command(capsys, "train", "--resume", "parts", "--steps", steps)
    assert resumed["loss"] == whole["loss"]
    assert_same(checkpoints(Path("parts")), checkpoints(Path("whole")))

    said, _ = command(capsys, "sample", "parts", "--tokens", 5, "--temperature", 0)
    assert all(token < VOCAB for token in said["tokens"])
    _, told = command(capsys, "export", "parts", "--out", "exported")
    assert "Writing" not in told  # a bar of transformers
    loaded = AutoModelForCausalLM.from_pretrained("exported", attn_implementation="eager").eval()
    assert loaded.config.vocab_size == loaded.get_input_embeddings().weight.shape[0] == VOCAB
    saved, padded = checkpoints(Path("parts")), 0
    for name, parameter in loaded.named_parameters():
        assert torch.equal(saved["model." + name][: parameter.size(0)], parameter), name
        padded += saved["model." + name].size(0) == 384
    assert padded == (2 if family == "llama" else 1)  # embedding and head, or both in one
    _, model = load_model(Path("parts"))
    with torch.no_grad():
        assert torch.equal(model(some_tokens(24)).logits, loaded(some_tokens(24)).logits)
    assert resolve_workload("exported", trained_on="cuda").source.config["model_type"] == family


def test_weights_that_are_not_read_are_told(here: Path, shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(written(here, CONFIGS["llama"]))
    Path("recipe.json").write_text(json.dumps({"rungs": [], "micro_batch": 2}))
    words = ("--recipe", "recipe.json", "--data", shards, "--steps", 2, *TRAIN)
    _, told = command(capsys, "train", folder, *words, "--out", "plain")
    assert "are not read" not in told
    theirs(CONFIGS["llama"]).save_pretrained(folder)
    capsys.readouterr()
    _, told = command(capsys, "train", folder, *words, "--out", "random")
    assert f"the weights in {folder} are not read, this run begins with random ones: --init {folder}" in told
    assert "weights as the config initialises them" in told
    _, told = command(capsys, "train", folder, *words, "--init", folder, "--out", "read")
    assert "are not read" not in told
    assert f"weights from {folder}" in told
    assert "weights as the config initialises them" not in told


def test_a_muted_logger_says_errors_and_speaks_again() -> None:
    logger = logging.getLogger("a.library.of.others")
    with contextlib.suppress(KeyError), muted(logger.name):
        assert not logger.isEnabledFor(logging.WARNING)
        assert logger.isEnabledFor(logging.ERROR)
        raise KeyError
    assert logger.isEnabledFor(logging.WARNING)


def test_a_validation_drops_nothing(here: Path, shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `train` reports is the loss of the model that it saved."""
    folder = written(here, {**CONFIGS["gpt2"], "resid_pdrop": 0.5, "embd_pdrop": 0.5})
    Path("recipe.json").write_text(json.dumps({"rungs": [], "micro_batch": 2}))
    words = ("--recipe", "recipe.json", "--data", shards, "--steps", 5, *TRAIN, "--out", "run")
    summary, _ = command(capsys, "train", folder, *words)
    order = from_json(TrainOrder, json.loads(Path("run/run.json").read_text())["order"])
    adapter, model = load_model(Path("run"))
    loss_of = adapter.loss_of(model, Plan())
    with torch.no_grad():
        batches = validation_batches(order, open_data(order, lambda *_, **__: None), CPU)
        losses = [loss_of(batch[0], batch[1]).item() for batch in batches]
    assert summary["validation_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_recipe_that_makes_another_model_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(here, CONFIGS["phi"])
    Path("recipe.json").write_text(json.dumps({"rungs": ["tied-weights"], "micro_batch": 2}))
    assert main(["train", str(folder), "--recipe", "recipe.json", "--steps", "1", "--device", "cpu"]) == 2
    shown = capsys.readouterr().err
    assert "the recipe's tied-weights does not go with phi" in shown
    assert not Path("runs").exists()


def test_what_this_model_does_not_take_of_a_recipe_is_left_out(
    here: Path, workload: Any, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was measured without dropout, by a ladder or a tune, which have said so."""
    folder = written(here, {**CONFIGS["gpt2"], "attn_pdrop": 0.1})
    Path("recipe.json").write_text(json.dumps({"rungs": ["flash", "fused-adamw"], "micro_batch": 2}))
    words = ("--recipe", "recipe.json", "--data", shards, "--steps", 2, *TRAIN, "--out", "run")
    _, shown = command(capsys, "train", folder, *words)
    assert "the recipe's flash is left out" in " ".join(shown.split())
    assert "set attn_pdrop to 0 in the config" in " ".join(shown.split())
    order = from_json(TrainOrder, json.loads(Path("run/run.json").read_text())["order"])
    assert set(order.recipe.rungs) == {"tied-weights", "fused-adamw"}  # the tie is the config's own
    assert "flash" not in usual_rungs(workload("gpt2", trained_on="cpu"), probe.probe("cpu"))
    assert "flash" not in workload("gpt2", trained_on="cpu", attn_pdrop=0.0).cannot


@pytest.mark.long
def test_a_ladder_with_workers_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the tests above do in this process: a job takes the config along, and a worker builds it."""
    folder = written(tmp_path, CONFIGS["gemma"])
    words = ("ladder", folder, "--rungs", "flash", "--sequence", 16, *QUICK, "--out", tmp_path / "run")
    document, told = command(capsys, *words)
    assert [(row["rung"], row["status"]) for row in document["rows"]] == [("baseline", "ok"), ("flash", "ok")]
    assert document["workload"]["shape"]["sequence"] == 16
    assert document["versions"]["transformers"] is not None
    assert "weights as the config initialises them" in told


# the cache as huggingface_hub lays it out


def test_the_cache_is_huggingface_hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    answer = "import huggingface_hub.constants as c; print(c.HF_HUB_CACHE)"
    theirs = subprocess.run([sys.executable, "-c", answer], capture_output=True, text=True, check=True).stdout.strip()
    assert str(hub_cache()) == theirs
    folder = tmp_path / "hub" / "models--some--model"
    for name, content in {"refs/main": "abc", "snapshots/abc/config.json": "{}"}.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(content)
    found = try_to_load_from_cache("some/model", "config.json", cache_dir=hub_cache())
    assert find_cached("some/model") == Path(found).parent
    assert find_cached("some/other") is None


# the comparison that is recorded


def test_what_transformers_cannot_build_is_a_mistake_in_the_model(workload: Any) -> None:
    """A worker says so, and whoever asked it stops (tests/plain/test_cli.py)."""
    known, rope = workload("llama"), {"rope_type": "magic", "rope_theta": 10000.0, "factor": 2.0}
    asked = replace(known, source=replace(known.source, config={**known.source.config, "rope_parameters": rope}))
    with pytest.raises(ModelError) as raised:
        TransformersAdapter(asked).build(Plan(), CPU)
    failure = worker.describe(raised.value)
    assert failure.mistake == (raised.value.problem, raised.value.why, raised.value.fix)
    assert "rope_type in rope_parameters is 'magic'" in failure.reason
    assert "UserError" not in failure.reason
    assert worker.describe(UserError("a", "b", "c")).mistake is None


@pytest.fixture
def benchmark(repository: Path, monkeypatch: pytest.MonkeyPatch, here: Path) -> Any:
    spec = importlib.util.spec_from_file_location("huggingface_benchmark", repository / "benchmarks" / "huggingface.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "probe_machine", lambda _: (probe.probe("cpu"), probe.versions()))
    monkeypatch.setattr(module, "WARM_SECONDS", {"cpu": 0.0})
    return module


def test_the_benchmark_compares_both_at_their_best(
    benchmark: Any, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides for real, in this process; the rates are replaced, since nothing here may depend on them."""
    folder = written(here, CONFIGS["gpt2"])
    Path("recipe.json").write_text(json.dumps({"rungs": ["padded-vocab", "fused-adamw"], "micro_batch": 4}))
    rates = {("transformers", 2): 100.0, ("transformers", 3): 90.0, ("redline", 4): 130.0}
    asked: list[tuple[str, int]] = []
    closed: list[tuple[str, int]] = []

    class Contestant(benchmark.Here):  # type: ignore[name-defined, misc]
        def __init__(self, order: Any, folder: Path) -> None:
            super().__init__(from_json(benchmark.Order, json.loads(json.dumps(to_json(order)))), folder)
            self.key = (self.order.side, self.order.recipe.micro_batch)

        def measure(self) -> dict[str, Any]:
            found: dict[str, Any] = super().measure()
            asked.append(self.key)
            assert found["tokens_per_second"] == pytest.approx(self.key[1] * SEQUENCE / found["step_seconds"])
            assert found["loss_first"] == pytest.approx(resolve_workload(str(here / "gpt2")).shape.ln_vocab, abs=0.2)
            assert found["loss_last"] < found["loss_first"]
            return {**found, "tokens_per_second": rates[self.key]}

        def close(self) -> None:
            closed.append(self.key)
            super().close()

    words = [str(folder), "--recipe", "recipe.json", "--micro-batches", "3,2", "--rounds", "2", "--steps", "3"]
    words += ["--fixed", "--eager", "--out", "record.json"]
    assert benchmark.main(words, Contestant) == 0
    record = json.loads(capsys.readouterr().out)
    theirs, ours = ("transformers", 2), ("redline", 4)  # the recipe's own size
    assert asked == [theirs, ours, ("transformers", 3), theirs, ours, ours, theirs]
    assert closed == [("transformers", 3), theirs, ours]  # the loser at once
    assert record["ratio"] == pytest.approx(1.3)
    assert {side: record["sides"][side]["micro_batch"] for side in record["sides"]} == dict((theirs, ours))
    assert [one["micro_batch"] for one in record["sides"]["transformers"]["sizes"]] == [2, 3]
    assert record["versions"]["transformers"]
    assert "5e-5" in record["how"]
    assert "not to be compared" in record["how"]
    assert record["config"]["attn_pdrop"] == 0.0  # both without dropout
    assert json.loads(Path("record.json").read_text()) == record
    assert benchmark.main(words, lambda *_: pytest.fail("what is finished is not run again")) == 0
    assert json.loads(capsys.readouterr().out) == record


def test_a_benchmark_that_is_interrupted_leaves_its_rounds(benchmark: Any, here: Path) -> None:
    folder = written(here, CONFIGS["gpt2"])
    closed = []

    class Contestant:
        def __init__(self, order: Any, folder: Path) -> None:
            self.order, self.left = order, 3

        def prepare(self) -> None:
            return None

        def measure(self) -> dict[str, Any]:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            size = self.order.recipe.micro_batch
            rate = 200.0 if self.order.side == "redline" else 100.0
            return {**benchmark.failed(self.order, None), "tokens_per_second": rate, "step_seconds": size / rate}

        def close(self) -> None:
            closed.append(self.order.name)

    with pytest.raises(KeyboardInterrupt):
        benchmark.main(
            [str(folder), "--micro-batches", "2", "--fixed", "--rounds", "5", "--out", "record.json"], Contestant
        )
    record = json.loads(Path("record.json").read_text())
    assert (record["finished"], record["ratios"]) == (False, [2.0])
    assert sorted(closed) == ["redline-2", "transformers-2"]


def test_both_sides_of_the_benchmark_begin_with_the_same_weights(benchmark: Any, workload: Any) -> None:
    own = workload("gpt2")
    ours = dict(TransformersAdapter(own).build(Plan(tied=True), CPU).named_parameters())
    torch.manual_seed(3)  # whatever was drawn before
    theirs = dict(benchmark.their_model(own, CPU).named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("rates", "tried"),
    [
        ({2: 1.0, 4: 2.0, 8: 3.0, 16: 2.5}, [2, 4, 8, 16]),
        ({2: 1.0, 4: 2.0}, [2, 4, 8]),  # 8 does not fit
        ({2: 3.0, 4: 2.0, 1: 2.0}, [2, 4, 1]),
        ({2: 3.0, 4: 2.0, 1: 4.0}, [2, 4, 1]),  # no half of one
        ({1: 5.0}, [2, 4, 1]),
        ({}, [2, 4, 1]),
    ],
    ids=["slower-above", "full-above", "slower-below", "best-is-one", "only-one-fits", "nothing-fits"],
)
def test_a_side_goes_on_until_its_best_is_bracketed(
    rates: dict[int, float], tried: list[int], benchmark: Any, workload: Any
) -> None:
    """And what rests is ended for what finds no room beside it: here everything needs the device for itself."""
    order = benchmark.Order(
        side="redline",
        workload=workload("llama"),
        recipe=Recipe(rungs=(), micro_batch=2),
        device="cpu",
        steps=1,
        compiled=False,
    )
    orders = {
        side: [replace(order, side=side, recipe=replace(order.recipe, micro_batch=size)) for size in (2, 4)]
        for side in benchmark.SIDES
    }
    running: set[str] = set()
    together: list[set[str]] = []

    class Contestant:
        def __init__(self, order: Any) -> None:
            self.order = order

        def prepare(self) -> None:
            running.add(self.order.name)
            together.append(set(running))

        def measure(self) -> dict[str, Any]:
            assert self.order.name in running
            rate = rates.get(self.order.recipe.micro_batch)
            if rate is None or len(running) > 1:
                return dict(benchmark.failed(self.order, benchmark.OUT_OF_MEMORY))
            return {**benchmark.failed(self.order, None), "tokens_per_second": rate, "step_seconds": 1.0}

        def close(self) -> None:
            running.discard(self.order.name)

    contest = benchmark.Contest(orders, Contestant, lambda _: None)
    result = contest.run(2, 2, grow=True)
    assert not running
    best = max(rates, key=lambda size: rates[size], default=None)
    for side in result["sides"].values():
        assert [one["micro_batch"] for one in side["sizes"]] == tried
        assert [one["tokens_per_second"] for one in side["sizes"]] == [rates.get(size) for size in tried]
        assert (side["micro_batch"], side["bracketed"]) == (best, bool(rates))
    assert result["ratio"] == (1.0 if rates else None)
    assert {"transformers-2", "transformers-4", "redline-2", "redline-4"} in together, "they compile side by side"


@pytest.mark.parametrize(
    ("sizes", "following"),
    [
        ({2: "exit code 1", 4: 9.0}, 8),
        ({2: "exit code 1", 4: 9.0, 8: "out of memory"}, None),  # 2 is what is missing, and it broke
        ({2: "exit code 1"}, None),
    ],
)
def test_a_size_that_broke_brackets_nothing(sizes: dict[int, Any], following: int | None, benchmark: Any) -> None:
    measured = [
        {"micro_batch": size, "tokens_per_second": None, "reason": found}
        if isinstance(found, str)
        else {"micro_batch": size, "tokens_per_second": found, "reason": None}
        for size, found in sizes.items()
    ]
    assert benchmark.next_size(measured) == following
    assert not benchmark.is_bracketed(measured)


def test_the_benchmark_says_what_did_not_fit(benchmark: Any, monkeypatch: pytest.MonkeyPatch, workload: Any) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(benchmark, "our_step", full)
    order = benchmark.Order(
        side="redline",
        workload=workload("llama"),
        recipe=Recipe(rungs=(), micro_batch=2),
        device="cpu",
        steps=1,
        compiled=False,
    )
    orders = {"transformers": [replace(order, side="transformers")], "redline": [order]}
    fitting = {"tokens_per_second": 1.0, "step_seconds": 1.0}

    prepared = []

    class Contestant(benchmark.Here):  # type: ignore[name-defined, misc]
        def prepare(self) -> str | None:
            prepared.append(self.order.side)
            reason: str | None = super().prepare()
            return reason

        def measure(self) -> dict[str, Any]:
            return (
                super().measure() if self.order.side == "redline" else {**benchmark.failed(self.order, None), **fitting}
            )

    monkeypatch.setattr(benchmark, "their_step", lambda *_: (lambda _: torch.zeros(()), (None for _ in "x")))
    kept: list[Any] = []
    result = benchmark.Contest(orders, lambda order: Contestant(order, Path()), kept.append).run(2, 1)
    assert (result["ratio"], result["ratios"]) == (None, [])
    assert prepared == ["transformers", "redline", "redline"], "once more, when there may be room"
    ours = result["sides"]["redline"]
    assert (ours["sizes"][0]["reason"], ours["tokens_per_second"]) == ("out of memory", None)


def test_a_contestant_in_a_process_answers_until_it_ends(
    benchmark: Any, here: Path, workload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = benchmark.Order(
        side="transformers",
        workload=workload("llama"),
        recipe=Recipe(rungs=(), micro_batch=2),
        device="cpu",
        steps=1,
        compiled=False,
    )
    answer = {**benchmark.failed(order, None), "tokens_per_second": 5.0}
    lines = ["import sys", 'print(\'{"reason": "out of memory"}\', flush=True)']
    lines += ["assert sys.stdin.readline() == 'prepare\\n'", "print('{\"reason\": null}', flush=True)"]
    lines += ["assert sys.stdin.readline() == 'measure\\n'"]
    (here / "child.py").write_text("\n".join([*lines, f"print({json.dumps(answer)!r}, flush=True)", "sys.exit(3)"]))
    monkeypatch.setattr(benchmark, "__file__", str(here / "child.py"))
    child = benchmark.Child(order, here)
    assert child.prepare() == "out of memory"
    assert child.prepare() is None
    assert child.measure() == answer
    assert child.measure() == benchmark.failed(order, "exit code 3")
    child.close()
    assert from_json(benchmark.Order, json.loads((here / "transformers-2.json").read_text())) == order
