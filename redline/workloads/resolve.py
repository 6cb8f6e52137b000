"""Turns what a user names into a workload to train: a preset, a shape file, a Hugging Face config or folder.

    resolve_workload("gpt2", corpus="novel.txt")
    resolve_workload("models/llama/config.json", sequence=2048)
    resolve_workload("Qwen/Qwen2-0.5B", trained_on="cuda")      # for `redline train`: with the config's own dropout

Whatever the files do not say is chosen here and recorded in the workload's notes. Nothing is downloaded, and no model
code is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec

from redline.core.errors import UserError
from redline.core.workload import Shape, Source, Workload, check_positive, other_than_gpt2
from redline.predict.flops import parameters
from redline.workloads.huggingface import (
    FUSED_ATTENTION,
    Config,
    attention_dropout,
    check_pad_token,
    check_rope,
    dropouts,
    obstacles,
    without_dropout,
)
from redline.workloads.presets import PRESETS
from redline.workloads.shapes import Resolved, resolve_shape, shadowed

RANDOM_WEIGHTS = "weights as the config initialises them"
USUAL_SEQUENCE = 1024  # tokens, if the context is longer: GPT-2's context, and enough for large matmuls
GPT2_TOKENS, BYTE_TOKENS = 50257, 257
# Up to this many parameters: the learning rate from GPT-3's table (arXiv 2005.14165, table 2.1), and the micro batch
# that an 80 GB card holds in plain fp32. The last row applies beyond the table.
BY_SIZE = ((200e6, 6e-4, 16), (500e6, 3e-4, 8), (1.0e9, 2.5e-4, 4), (2.0e9, 2e-4, 2), (float("inf"), 1.2e-4, 1))


def resolve_workload(
    words: str, corpus: str | None = None, sequence: int | None = None, *, trained_on: str | None = None
) -> Workload:
    """Resolve words to a workload. `trained_on`: 'cuda' or 'cpu' for a training run there, which keeps the dropout of a
    config; None for measurements, which do not."""
    if sequence is not None:
        check_positive("--sequence", sequence)
    if words in PRESETS:
        workload = replace(PRESETS[words], notes=(*PRESETS[words].notes, *shadowed(words)))
        workload = workload if sequence is None else replace(workload, shape=with_sequence(workload.decoder, sequence))
    else:
        workload = replace(_from_file(resolve_shape(words), sequence, trained_on), words=words)
    return workload if corpus is None else replace(workload, corpus=corpus)


def with_sequence(shape: Shape, sequence: int) -> Shape:
    """Return the same model with sequences of this many tokens."""
    if sequence > shape.positions_count:
        raise UserError(
            f"--sequence is {sequence:,} and the model's context {shape.positions_count:,}",
            "no position beyond it was described",
            f"choose {shape.positions_count:,} or less",
        )
    return replace(shape, sequence=sequence, max_positions=shape.positions_count)


def _from_file(resolved: Resolved, sequence: int | None, trained_on: str | None) -> Workload:
    shape, notes = _shape_to_run(resolved.shape, sequence)
    tokenizer = _tokenizer_for(shape.vocab)
    rate, micro_batch = usual_training(shape)
    workload = Workload(
        name=resolved.name,
        shape=shape,
        tokenizer=tokenizer,
        micro_batch=micro_batch,
        learning_rate=rate,
        notes=(*resolved.origin.notes, *notes, f"tokens by {tokenizer!r}: a model's own tokenizer is not needed here"),
    )
    if resolved.origin.config is None:
        check_built_in(shape)
        return workload
    return _from_config(workload, resolved.origin.config, trained_on)


def usual_training(shape: Shape) -> tuple[float, int]:
    """Return the learning rate and micro batch for a model of this size."""
    return next((rate, size) for most, rate, size in BY_SIZE if parameters(shape).total <= most)


def _shape_to_run(shape: Shape, sequence: int | None) -> tuple[Shape, tuple[str, ...]]:
    if sequence is not None:
        return with_sequence(shape, sequence), ()
    if shape.sequence <= USUAL_SEQUENCE:
        return shape, ()
    note = f"sequences of {USUAL_SEQUENCE:,} tokens; the context is {shape.sequence:,} (--sequence)"
    return with_sequence(shape, USUAL_SEQUENCE), (note,)


def _from_config(workload: Workload, config: Config, trained_on: str | None) -> Workload:
    """Make it a workload with transformers' own model. Its dropout is set in the config that goes with the workload, so
    that the code that builds the model need not know what it is for."""
    check_transformers()
    check_rope(config)
    check_pad_token(config)
    cannot = obstacles(config, workload.decoder)
    if trained_on == "cpu" and attention_dropout(config) is not None:
        key = attention_dropout(config)
        reason = f"fused attention on a CPU has no dropout: leave it out, or set {key} to 0 in the config"
        cannot |= dict.fromkeys(FUSED_ATTENTION, reason)
    return replace(
        workload,
        source=Source(kind="huggingface", config=without_dropout(config) if trained_on is None else config),
        cannot=cannot,
        notes=(*workload.notes, *_config_notes(config, workload.decoder.tied, trained_on)),
    )


def _config_notes(config: Config, tied: bool, trained_on: str | None) -> Iterator[str]:
    written, installed = str(config.get("transformers_version") or ""), metadata.version("transformers")
    if _numbers(written) > _numbers(installed):
        yield f"written by transformers {written}, and {installed} is installed: what is new to that has no effect"
    shares = ", ".join(f"{key} {share:g}" for key, share in dropouts(config).items())
    if tied:
        yield "the head is the embedding, as the config says: every recipe has tied-weights"
    if trained_on is None:
        yield RANDOM_WEIGHTS
        if shares:
            yield f"dropout is off ({shares} in the config): with it no two runs could be compared"
    elif shares:  # `redline train` itself says which weights it starts from
        yield f"dropout as in the config: {shares}; measurements leave it out"


def _numbers(version: str) -> tuple[int, ...]:
    """'5.22.2' -> (5, 22); patch and development versions do not count."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return () if match is None else tuple(map(int, match.groups()))


def check_transformers() -> None:
    if find_spec("transformers") is None:
        raise UserError(
            "transformers is not installed",
            "a Hugging Face model is its code, built from the config; without it redline can only lint and estimate",
            "pip install transformers",
        )


def _tokenizer_for(vocab: int) -> str:
    if vocab >= GPT2_TOKENS:
        return "gpt2"
    if vocab >= BYTE_TOKENS:
        return "bytes"
    raise UserError(
        f"a vocabulary of {vocab} is too small",
        f"the smallest tokenizer here reads bytes and needs {BYTE_TOKENS} ids",
        f"set the vocabulary to {BYTE_TOKENS} or more",
    )


def check_built_in(shape: Shape) -> None:
    """Check that a shape is GPT-2's. A shape file has sizes and no code, so it is trained with the built-in GPT-2."""
    if other := other_than_gpt2(shape):
        raise UserError(
            f"the built-in model has no {', '.join(other)} other than GPT-2's",
            "it is GPT-2 as published; a shape of another kind can be estimated and linted, not built",
            "leave these fields out, or point at a Hugging Face config",
        )
