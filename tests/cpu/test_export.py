"""Trained weights as transformers reads them, and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GPT2LMHeadModel

from redline.core.errors import UserError
from redline.core.workload import Shape, Workload
from redline.engine.export import CONFIG_FILE, WEIGHTS_FILE, export_huggingface, load_weights
from redline.engine.sample import sample
from redline.model.adapter import adapter_of
from redline.model.gpt import GPT, initialise
from redline.workloads.huggingface import read_config

SHAPE = Shape(layers=2, heads=4, d_model=48, d_ff=144, vocab=257, sequence=32)
ADAPTER = adapter_of(Workload(name="test", shape=SHAPE, tokenizer="bytes", micro_batch=1, learning_rate=1e-3))
every_kind = pytest.mark.parametrize("options", [{}, {"tied": False}, {"vocab_rows": 384}], ids=str)


def some_model(**options: object) -> GPT:
    model = GPT(SHAPE, **options)  # type: ignore[arg-type]
    initialise(model, seed=7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
    return model


@every_kind
def test_transformers_loads_it_and_gives_the_same_logits(options: dict[str, object], tmp_path: Path) -> None:
    model = some_model(**options)
    export_huggingface(model, tmp_path / "out")
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = torch.randint(SHAPE.vocab, (3, 32), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = model(tokens)[..., : SHAPE.vocab]
        torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    assert theirs.config.vocab_size == SHAPE.vocab


@every_kind
def test_there_and_back_loses_no_bit(options: dict[str, object], tmp_path: Path) -> None:
    model, other = some_model(**options), GPT(SHAPE, **options)  # type: ignore[arg-type]
    export_huggingface(model, tmp_path / "out")
    load_weights(ADAPTER, other, tmp_path / "out")
    tokens = torch.randint(SHAPE.vocab, (2, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(model(tokens), other(tokens))


def test_its_config_is_the_shape_it_came_from(tmp_path: Path) -> None:
    export_huggingface(some_model(), tmp_path / "out")
    shape, _ = read_config(json.loads((tmp_path / "out" / CONFIG_FILE).read_text()))
    assert shape == SHAPE


def test_an_export_never_overwrites_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already"):
        export_huggingface(some_model(), tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        export_huggingface(some_model(), tmp_path / "file" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_pickles_and_broken_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="pickle"):
        load_weights(ADAPTER, some_model(), tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"not safetensors at all")
    with pytest.raises(UserError, match="cannot be read"):
        load_weights(ADAPTER, some_model(), tmp_path)


def test_greedy_samples_are_the_likeliest_tokens_and_never_padding() -> None:
    model = some_model(vocab_rows=384)
    tokens = [1, 2, 3]
    for token in sample(model, tokens, shape=SHAPE, count=5, temperature=0):
        with torch.no_grad():
            assert token == int(model(torch.tensor([tokens]))[0, -1, : SHAPE.vocab].argmax())
        tokens.append(token)
    drawn = sample(model, [5], shape=SHAPE, count=200, temperature=5.0, seed=3)
    assert max(drawn) < SHAPE.vocab
    assert drawn == sample(model, [5], shape=SHAPE, count=200, temperature=5.0, seed=3)
    assert len(set(sample(model, [5], shape=SHAPE, count=60, temperature=5.0, top_k=1))) <= len(set(drawn))


def test_a_sample_has_no_token_that_the_tokenizer_has_not() -> None:
    """A model may have more: 261 of a config where the tokenizer's bytes are 257."""
    drawn = sample(some_model(), [5], shape=SHAPE, count=200, temperature=9.0, seed=3, known=40)
    assert 30 < max(drawn) < 40


def test_a_sample_takes_any_attention_and_leaves_the_pinned_one_on() -> None:
    """A step pins one kernel, and cuDNN's takes no context of a single token. Here there is no cuDNN at all."""
    plain, pinned = some_model(), some_model(attention="cudnn")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        with pytest.raises(RuntimeError):
            pinned(torch.tensor([[5]]))
        found = sample(pinned, [5], shape=SHAPE, count=9, temperature=0)
        assert torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.math_sdp_enabled()
    assert found == sample(plain, [5], shape=SHAPE, count=9, temperature=0)


def test_top_k_leaves_k_and_end_of_text_ends() -> None:
    model = some_model()
    likeliest = sample(model, [5], shape=SHAPE, count=1, temperature=0)[0]
    assert sample(model, [5], shape=SHAPE, count=1, temperature=9.0, top_k=1) == [likeliest]
    assert sample(model, [5], shape=SHAPE, count=9, temperature=0, end_of_text=likeliest) == []
    with pytest.raises(UserError):
        sample(model, [5], shape=SHAPE, count=0)
