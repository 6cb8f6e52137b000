"""What a user points at, as something that can be trained: sequences, obstacles, dropout, names in the local cache."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import redline
from redline.cli import main
from redline.commands.profile import choose_workload
from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.job import Job
from redline.core.measurement import Failure, GradientCheck, Measurement
from redline.core.plan import Plan
from redline.core.recipe import Recipe
from redline.core.values import to_json
from redline.core.workload import SAMPLE_CORPUS, Workload
from redline.predict.fitting import Case
from redline.report.next_steps import train_command
from redline.report.table import notes_of
from redline.rungs import find_rung, plan_of, usual_rungs, why_not
from redline.search.climb import Climb, LadderSettings
from redline.search.ladder import prepare_ladder, resume_ladder
from redline.search.space import ROUGHLY, open_space
from redline.workloads import PRESETS, resolve_shape, resolve_workload
from redline.workloads.hub_cache import hub_cache, is_hub_name
from redline.workloads.huggingface import FAMILIES, dropouts, without_dropout

LLAMA = {
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
SMALL = {**LLAMA, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}
ALWAYS = {
    "selective-checkpointing",
    "fused-backward",
    "fp8-linears",
    "fp8-mlps",
    "tuned-matmuls",
    "fused-matmuls",
    "packed-attention",
    "flash4-backward",
    "adamw-bf16",
    "adamw-bf16-kahan",
}  # of every model of transformers

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(config: dict[str, Any], name: str = "model") -> str:
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return write


def mistake(words: str, **choices: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        resolve_workload(words, **choices)
    assert all(text.strip() for _, text in caught.value.lines())
    return caught.value


# what the config says beside its sizes


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config is left out"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "no code that comes with a model is run"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "the config names LlamaForSequenceClassification"),
        ({"transformers_version": "99.0.1"}, "written by transformers 99.0.1"),
        ({"architectures": ["LlamaForCausalLM"], "transformers_version": "4.30.0", "new_field": {"a": 1}}, None),
        ({"architectures": ["GPT2LMHeadModel"]}, None),
    ],
    ids=["quantised", "own-code", "classifier", "newer", "usual", "published-gpt2"],
)
def test_what_has_no_effect_is_said(more: dict[str, Any], note: str | None, write: Write) -> None:
    plain, found = resolve_workload(write(SMALL)), resolve_workload(write({**SMALL, **more}, "other"))
    assert found.shape == plain.shape
    new = set(found.notes) - set(plain.notes)
    assert len(new) == (note is not None)
    assert all(note in each for each in new if note)


# sequences


def test_a_preset_in_shorter_pieces_is_the_same_model() -> None:
    shape = resolve_workload("gpt2", sequence=256).shape
    assert shape == replace(PRESETS["gpt2"].shape, sequence=256, max_positions=1024)


def test_a_long_context_is_read_in_usual_pieces_and_that_is_said(write: Write) -> None:
    usual, chosen = resolve_workload(write(LLAMA)), resolve_workload(write(LLAMA), sequence=2048)
    assert (usual.shape.sequence, usual.shape.max_positions) == (1024, 4096)
    assert any("1,024 tokens; the context is 4,096 (--sequence)" in note for note in usual.notes)
    assert (chosen.shape.sequence, chosen.shape.max_positions) == (2048, 4096)
    assert not any("--sequence" in note for note in chosen.notes)
    short = resolve_workload(write({**LLAMA, "max_position_embeddings": 512}))
    assert (short.shape.sequence, short.shape.max_positions) == (512, None)


@pytest.mark.parametrize("words", ["gpt2", "config"])
def test_sequences_that_cannot_be(words: str, write: Write) -> None:
    words = words if words == "gpt2" else write({**LLAMA, "max_position_embeddings": 1024})
    assert mistake(words, sequence=1025).problem == "--sequence is 1,025 and the model's context 1,024"
    assert "--sequence is 0" in mistake(words, sequence=0).problem


@pytest.mark.parametrize("function", ["ladder", "tune", "profile"])
def test_the_api_takes_a_sequence(function: str) -> None:
    with pytest.raises(UserError, match="^sequence is 5,000"):
        getattr(redline, function)("gpt2", sequence=5000)


def test_a_ladder_keeps_its_sequence_and_tells_its_choices(
    write: Write, cpu: Hardware, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("redline.search.words.probe_machine", lambda _: (cpu, {"torch": "2.13"}))
    out = tmp_path / "run"
    run = prepare_ladder(workload=write(SMALL), sequence=16, rungs="none", micro_batch=2, out=out, command="")
    assert run.workload.shape.sequence == 16
    assert run.notes == run.workload.notes != ()
    assert resume_ladder(out, {}).workload == run.workload
    with pytest.raises(UserError, match="--resume does not go with --sequence"):
        resume_ladder(out, {"sequence": 16})


def test_a_profile_takes_the_sequence_and_tells_the_choices(
    write: Write, cpu: Hardware, capsys: pytest.CaptureFixture[str]
) -> None:
    options = argparse.Namespace(workload=write(GPT2), data=None, sequence=128)
    assert choose_workload(options, cpu).shape.sequence == 128
    assert "dropout is off" in capsys.readouterr().err


def test_the_winner_of_a_tune_is_trained_by_the_words_that_were_typed(write: Write) -> None:
    def command(workload: Workload) -> str:
        document = {"workload": to_json(workload), "best": {"global_batch": None}}
        assert document["workload"]["corpus"] == SAMPLE_CORPUS
        return train_command(document, "best.json")

    folder = write(LLAMA)
    assert command(resolve_workload(folder)) == f"redline train {folder} --recipe best.json --sequence 1024"
    assert command(resolve_workload("gpt2")) == "redline train gpt2 --recipe best.json"


def test_pages_and_tables_tell_the_choices(write: Write) -> None:
    workload = resolve_workload(write(LLAMA))
    told = [note.text for note in notes_of({"workload": to_json(workload), "rows": []}) if note.about == "model"]
    assert told == list(workload.notes)


# what is chosen


def test_tokens_rates_and_sizes_follow_the_model(write: Write) -> None:
    small, large = resolve_workload(write(LLAMA)), resolve_workload(write({**LLAMA, "vocab_size": 151936}))
    assert (small.tokenizer, large.tokenizer) == ("bytes", "gpt2")
    assert (small.learning_rate, small.micro_batch) == (6e-4, 16)  # GPT-3's row for 125 million
    assert (large.learning_rate, large.micro_batch) == (3e-4, 8)
    assert "vocabulary of 256" in mistake(write({**LLAMA, "vocab_size": 256})).problem


@pytest.mark.parametrize(
    ("key", "given", "said"),
    [
        ("rope_scaling", {"rope_type": "magic", "factor": 2.0}, 'rope_type in rope_scaling is "magic"'),
        ("rope_parameters", {"full_attention": {"type": 3}}, "type in rope_parameters is 3"),
    ],
)
def test_an_unknown_rotary_embedding_is_refused_by_its_field(
    key: str, given: dict[str, Any], said: str, write: Write
) -> None:
    found = mistake(write({**LLAMA, key: given}))
    assert found.problem == said
    assert "longrope" in found.fix
    for known in ({"rope_type": "llama3", "factor": 8.0}, {"type": "linear"}, {"rope_theta": 1e4}, None):
        resolve_workload(write({**LLAMA, key: known}))
    resolve_shape(write({**LLAMA, key: given}))  # its sizes are what they are


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**LLAMA, "pad_token_id": 32000}, "pad_token_id is 32000"),
        ({**LLAMA, "pad_token_id": -301}, "pad_token_id is -301"),
        ({**LLAMA, "model_type": "phi3"}, "pad_token_id is 32000, which a phi3 config has where it does not say"),
    ],
    ids=["beyond", "before", "phi3"],
)
def test_a_padding_token_that_is_not_there_is_refused_by_its_field(
    config: dict[str, Any], said: str, write: Write
) -> None:
    config = {**config, "vocab_size": 300}
    found = mistake(write(config))
    assert (found.problem, found.why) == (said, "vocab_size is 300, so there is no such token")
    for known in (None, 0, 299, -1):
        resolve_workload(write({**config, "pad_token_id": known}))
    resolve_shape(write(config))  # its sizes are what they are


def test_what_goes_on_in_a_job_is_the_config(write: Write) -> None:
    workload = resolve_workload(write(LLAMA, "mine"), corpus="novel.txt")
    assert (workload.name, workload.source.kind, workload.corpus) == ("mine", "huggingface", "novel.txt")
    assert workload.source.config == LLAMA
    assert "weights as the config initialises them" in workload.notes


def test_without_transformers_nothing_is_built_and_shapes_are_read(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redline.workloads.resolve.find_spec", lambda name: None)
    assert mistake(write(LLAMA)).fix == "pip install transformers"
    assert resolve_shape(write(LLAMA)).shape.d_model == 768


# obstacles


def config_of(model_type: str, **more: Any) -> dict[str, Any]:
    return {**(GPT2 if model_type == "gpt2" else LLAMA), "model_type": model_type, **more}


OBSTACLES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "gpt2": (config_of("gpt2"), set()),
    "gpt2, ReLU": (config_of("gpt2", activation_function="relu"), {"sigmoid-gelu"}),
    "llama": (config_of("llama"), {"tied-weights", "sigmoid-gelu"}),
    "llama, tied": (config_of("llama", tie_word_embeddings=True), {"sigmoid-gelu"}),
    "llama, tanh GELU": (config_of("llama", hidden_act="gelu_pytorch_tanh"), {"tied-weights"}),
    "mistral": (config_of("mistral"), {"tied-weights", "sigmoid-gelu"}),
    "mistral, window": (
        config_of("mistral", sliding_window=1023),
        {"tied-weights", "sigmoid-gelu", "flash", "cudnn-attention"},
    ),
    "mistral, window as long": (config_of("mistral", sliding_window=1024), {"tied-weights", "sigmoid-gelu"}),
    "qwen2": (config_of("qwen2", tie_word_embeddings=True, sliding_window=64), {"sigmoid-gelu"}),
    "qwen3": (config_of("qwen3"), {"tied-weights", "sigmoid-gelu"}),
    "gemma": (config_of("gemma"), set()),
    "gemma2, caps by default": (
        config_of("gemma2"),
        {"fused-loss", "chunked-loss", "fp8-head", "flash", "cudnn-attention", "padded-vocab"},
    ),
    "gemma2, no caps": (config_of("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None), set()),
    "gemma2, its logits' cap": (
        config_of("gemma2", attn_logit_softcapping=None),
        {"fused-loss", "chunked-loss", "fp8-head", "padded-vocab"},
    ),
    "gemma3_text": (config_of("gemma3_text", sliding_window=512), {"flash", "cudnn-attention"}),
    "gemma3, wrapped": (
        {"model_type": "gemma3", "text_config": config_of("gemma3_text", final_logit_softcapping=30.0)},
        {"fused-loss", "chunked-loss", "fp8-head", "padded-vocab"},
    ),
    "phi": (config_of("phi"), {"tied-weights", "fused-loss", "chunked-loss", "fp8-head", "padded-vocab"}),
    "phi3": (config_of("phi3", pad_token_id=None), {"tied-weights", "sigmoid-gelu"}),
    "gpt_neox": (config_of("gpt_neox"), {"tied-weights", "sigmoid-gelu"}),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_obstacles(name: str, write: Write) -> None:
    config, expected = OBSTACLES[name]
    cannot = resolve_workload(write(config)).cannot
    assert set(cannot) - ALWAYS == expected
    assert set(cannot) >= ALWAYS
    assert all(reason and find_rung(rung) for rung, reason in cannot.items())


def test_every_family_has_its_obstacles() -> None:
    assert {name.split(",")[0] for name in OBSTACLES} >= set(FAMILIES)


def test_a_window_is_an_obstacle_where_sequences_are_longer(write: Write) -> None:
    folder = write(config_of("mistral", sliding_window=512))
    assert "--sequence 512 needs none" in resolve_workload(folder).cannot["flash"]
    assert "flash" not in resolve_workload(folder, sequence=512).cannot


def test_an_obstacle_keeps_a_rung_out_of_the_usual_ones(write: Write, h200: Hardware) -> None:
    phi, llama = resolve_workload(write(config_of("phi"), "phi")), resolve_workload(write(LLAMA))
    reason = why_not(find_rung("fused-loss"), phi, h200, plan_of(("bf16", "compile")))
    assert reason == "the head has a bias"
    assert "fused-loss" in usual_rungs(llama, h200)
    assert not {"fused-loss", "padded-vocab"} & set(usual_rungs(phi, h200))


NO_CAUSAL_MODEL = {
    "cross-attention": (config_of("gpt2", add_cross_attention=True), "add_cross_attention is true"),
    "encoder-decoder": (config_of("llama", is_encoder_decoder=True), "is_encoder_decoder is true"),
    "not-causal": (config_of("qwen2", is_causal=False), "is_causal is false"),
    "bidirectional": (config_of("gemma", use_bidirectional_attention=True), "use_bidirectional_attention is true"),
    "two-names": (config_of("gpt2", num_hidden_layers=99), "num_hidden_layers is 99"),
}


@pytest.mark.parametrize("command", ["lint", "estimate", "ladder", "tune", "train", "profile"])
@pytest.mark.parametrize("name", NO_CAUSAL_MODEL)
def test_what_is_no_causal_model_is_refused_by_every_command(
    name: str,
    command: str,
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # a command that took it would begin a run here
    config, problem = NO_CAUSAL_MODEL[name]
    words = write(config)
    assert main([command, words, *(["--device", "cpu"] if command not in ("lint", "estimate") else [])]) == 2
    shown = capsys.readouterr().err
    assert problem in shown
    assert [line.split(":")[0] for line in shown.splitlines()] == ["problem", "why", "fix"]
    assert not (tmp_path / "runs").exists()


def test_keys_that_say_no_more_than_is_so_are_taken(write: Write) -> None:
    plain = {"add_cross_attention": False, "is_encoder_decoder": False, "is_decoder": False, "is_causal": True}
    same = {"hidden_size": GPT2["n_embd"], "use_bidirectional_attention": False}
    assert resolve_workload(write(config_of("gpt2", **plain, **same))).shape == resolve_workload(write(GPT2)).shape


# dropout


def test_measurements_are_without_dropout_and_training_with_it(write: Write) -> None:
    folder, shares = write(GPT2), "attn_pdrop 0.1, embd_pdrop 0.1, resid_pdrop 0.1"
    measured, trained = resolve_workload(folder), resolve_workload(folder, trained_on="cuda")
    assert measured.source.config == {**GPT2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    assert trained.source.config == GPT2
    assert any(f"dropout is off ({shares}" in note for note in measured.notes)
    assert any(f"dropout as in the config: {shares}" in note for note in trained.notes)
    assert not any("dropout" in note for note in resolve_workload(write(LLAMA, "llama")).notes)


def test_a_cpus_fused_attention_has_no_dropout(write: Write) -> None:
    folder = write(GPT2)
    assert "no dropout" in resolve_workload(folder, trained_on="cpu").cannot["flash"]
    assert "flash" not in resolve_workload(folder, trained_on="cuda").cannot
    assert "flash" not in resolve_workload(folder).cannot
    assert "flash" not in resolve_workload(write({**GPT2, "attn_pdrop": 0}), trained_on="cpu").cannot


def test_dropout_of_a_wrapped_config() -> None:
    config = {
        "model_type": "gemma3",
        "text_config": config_of("gemma3_text", attention_dropout=0.2),
        "vision": {"a": 1},
    }
    assert dropouts(config) == {"attention_dropout": 0.2}
    still = without_dropout(config)
    assert still["text_config"]["attention_dropout"] == 0.0
    assert {**still, "text_config": None} == {**config, "text_config": None}
    assert config["text_config"]["attention_dropout"] == 0.2  # a copy


def test_keys_that_the_code_of_a_family_does_not_read_drop_nothing() -> None:
    assert dropouts(config_of("llama", resid_pdrop=0.5, hidden_dropout=0.5, attention_dropout=None)) == {}
    assert dropouts(config_of("gpt_neox", hidden_dropout=0.5)) == {"hidden_dropout": 0.5}


@pytest.mark.parametrize("value", ["a lot", -0.1, 1, True, [0.1]], ids=str)
def test_a_dropout_is_a_share(value: object, write: Write) -> None:
    assert mistake(write(config_of("llama", attention_dropout=value))).problem.startswith("attention_dropout is ")


# memory that is predicted roughly


def test_a_rough_prediction_refuses_only_what_is_far_too_large(write: Write, h200: Hardware) -> None:
    def space(workload: Workload, limit: int) -> Any:
        return open_space(
            workload,
            h200,
            allow="rounding",
            rungs=None,
            without=(),
            memory_limit=limit,
            micro_batch=16,
            global_batch=None,
        )

    for workload, factor in ((resolve_workload("gpt2"), 1), (resolve_workload(write(LLAMA)), ROUGHLY)):
        recipe = space(workload, 2**60).baseline()
        needed = space(workload, 2**60).predicted_bytes(recipe)
        enough = -(-needed // factor)
        assert space(workload, enough).refuses(recipe) is None
        assert "predicted to take" in space(workload, enough - 1).refuses(recipe)


@pytest.mark.parametrize("share", [1 / 3, 1.0, 3.0])
def test_rebatch_goes_by_what_was_measured(share: float, write: Write, h200: Hardware) -> None:
    """A model that takes a third of what is predicted gets a batch of about three times the predicted size."""
    workload, curve = resolve_workload(write({**SMALL, "num_hidden_layers": 4})), (10.4, 10.3, 10.2)
    case = Case(shape=workload.decoder, plan=Plan())
    memory = case.memory(100).allocated
    start = GradientCheck(
        loss=workload.shape.ln_vocab,
        reference_loss=workload.shape.ln_vocab,
        error=0.0,
        yardstick=0.0,
        tensor_errors={},
        tensor_yardsticks={},
        update_errors={},
    )

    def ask(job: Job) -> Measurement | Failure:
        size = job.recipe.micro_batch
        peak = int(share * case.memory(size).allocated)
        if peak > memory:
            return Failure(kind="oom", reason="out of memory")
        seconds = (0.05 + 0.001 * size,) * 8
        return Measurement(
            loss_curve=curve, step_seconds=seconds, peak_bytes=peak, outside_bytes=0, alloc_retries=0, gradients=start
        )

    settings = LadderSettings(
        rungs=(), start=Recipe(micro_batch=16), device="cuda", check_steps=3, rebatch=True, memory_bytes=memory
    )
    climb = Climb(workload, h200, settings, ask)
    for _ in climb.rows():
        pass
    found = climb.finished[0].rebatched
    assert found is not None
    assert found.micro_batch is not None
    fits = max(size for size in range(1, 400) if share * case.memory(size).allocated <= 0.95 * memory)
    assert 0.8 * fits <= found.micro_batch <= fits
    assert share >= 1 or found.micro_batch > 150


# names in the local cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def download(cache: Path, name: str, config: dict[str, Any], version: str = "0123abcd") -> Path:
    """As huggingface_hub does: the file under its hash, a link to it in the version's folder."""
    folder = cache / ("models--" + name.replace("/", "--"))
    for part in ("blobs", "refs", f"snapshots/{version}"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "blobs" / version).write_text(json.dumps(config))
    (folder / "snapshots" / version / "config.json").symlink_to(folder / "blobs" / version)
    (folder / "refs" / "main").write_text(version)
    return folder


def test_a_name_in_the_cache_is_its_config(cache: Path) -> None:
    download(cache, "Someone/Llama-3.2_x", LLAMA)
    workload = resolve_workload("Someone/Llama-3.2_x")
    assert (workload.name, workload.words) == ("Llama-3.2_x", "Someone/Llama-3.2_x")
    assert workload.source.config == LLAMA
    resolved = resolve_shape("Someone/Llama-3.2_x")
    assert resolved.origin.path == cache / "models--Someone--Llama-3.2_x/snapshots/0123abcd/config.json"


def test_the_newest_version_is_the_one_that_main_names(cache: Path) -> None:
    download(cache, "a/b", LLAMA, "old")
    download(cache, "a/b", {**LLAMA, "num_hidden_layers": 5}, "new")
    assert resolve_workload("a/b").shape.layers == 5


def test_names_without_an_organisation(cache: Path) -> None:
    download(cache, "distilgpt2", {**GPT2, "n_layer": 6})
    assert resolve_workload("distilgpt2").shape.layers == 6
    download(cache, "gpt2", {**GPT2, "n_layer": 6})
    assert resolve_workload("gpt2").shape.layers == 12  # a preset is a preset
    assert "unknown workload 'distilgpt3'" in mistake("distilgpt3").problem


def test_a_file_comes_before_the_cache(cache: Path, write: Write) -> None:
    download(cache, "a/b", LLAMA)
    write({**LLAMA, "num_hidden_layers": 3}, "a/b")
    assert resolve_workload("a/b").shape.layers == 3


def test_what_is_not_in_the_cache(cache: Path) -> None:
    error = mistake("Qwen/Qwen2-0.5B")
    assert error.problem == "Qwen/Qwen2-0.5B is neither a file nor a model in the local cache"
    assert "nothing is downloaded" in error.why
    assert str(cache) in error.why
    assert "hf download Qwen/Qwen2-0.5B config.json" in error.fix


@pytest.mark.parametrize("gone", ["refs/main", "snapshots/0123abcd/config.json", "blobs/0123abcd"])
def test_a_download_that_stopped_half_way(cache: Path, gone: str) -> None:
    (download(cache, "a/b", LLAMA) / gone).unlink()
    error = mistake("a/b")
    assert error.problem == "the local cache holds a/b in part only"
    assert "hf download a/b" in error.fix


def test_an_empty_reference_is_no_version(cache: Path) -> None:
    folder = download(cache, "a/b", LLAMA)
    (folder / "refs/main").write_text("\n")
    (folder / "snapshots/config.json").write_text("{}")
    assert "in part only" in mistake("a/b").problem


@pytest.mark.parametrize("words", ["../cache", "./a", "a/b/c", "~/a", "a/../b", "x.json", "a/x.json", "a b", "", "a/é"])
def test_what_is_no_name_of_the_hub(words: str) -> None:
    assert not is_hub_name(words)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/c", "HF_HOME": "/b"}, "/c"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/d"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({"HOME": "/e"}, "/e/.cache/huggingface/hub"),
        ({"HF_HOME": "~/x", "HOME": "/e"}, "/e/x/hub"),
        ({"HF_HUB_CACHE": "$HOME/y", "HOME": "/e"}, "/e/y"),
    ],
    ids=str,
)
def test_where_the_cache_is(
    variables: dict[str, str], expected: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_cache() == Path(expected)
