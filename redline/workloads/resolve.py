"""What a user points at, as something that can be trained: a preset, a shape file, a Hugging Face config or folder.

    resolve_workload("gpt2", corpus="novel.txt")
    resolve_workload("models/llama/config.json", sequence=2048)

What the files do not say is chosen here, once, and said in the workload's notes. Nothing is downloaded, and no model
code is run.
"""

from __future__ import annotations

from dataclasses import replace

from redline.core.errors import UserError
from redline.core.workload import Shape, Source, Workload, check_positive, other_than_gpt2
from redline.predict.flops import parameters
from redline.workloads.huggingface import obstacles
from redline.workloads.presets import PRESETS
from redline.workloads.shapes import Resolved, resolve_shape

USUAL_SEQUENCE = 1024  # tokens, where a context is longer: GPT-2's, and enough for the matmuls to be large
GPT2_TOKENS, BYTE_TOKENS = 50257, 257
# Parameters up to which GPT-3's table (arXiv 2005.14165, table 2.1) gives a learning rate, and the micro batch that an
# 80 GB card holds in plain fp32. Beyond the table the last row stands.
BY_SIZE = ((200e6, 6e-4, 16), (500e6, 3e-4, 8), (1.0e9, 2.5e-4, 4), (2.0e9, 2e-4, 2), (float("inf"), 1.2e-4, 1))


def resolve_workload(words: str, corpus: str | None = None, sequence: int | None = None) -> Workload:
    if sequence is not None:
        check_positive("--sequence", sequence)
    workload = PRESETS[words] if words in PRESETS else _from_file(resolve_shape(words))
    if sequence is not None:
        workload = replace(workload, shape=with_sequence(workload.shape, sequence))
    return workload if corpus is None else replace(workload, corpus=corpus)


def with_sequence(shape: Shape, sequence: int) -> Shape:
    """The same model read in pieces of so many tokens."""
    if sequence > shape.positions_count:
        raise UserError(
            f"--sequence is {sequence:,} and the model's context {shape.positions_count:,}",
            "no position beyond it was described",
            f"choose {shape.positions_count:,} or less",
        )
    return replace(shape, sequence=sequence, max_positions=shape.positions_count)


def _from_file(resolved: Resolved) -> Workload:
    shape, notes = resolved.shape, list(resolved.origin.notes)
    if shape.sequence > USUAL_SEQUENCE:
        notes.append(f"sequences of {USUAL_SEQUENCE:,} tokens; the context is {shape.sequence:,} (--sequence)")
        shape = with_sequence(shape, USUAL_SEQUENCE)
    tokenizer = _tokenizer_for(shape.vocab)
    notes.append(f"tokens by {tokenizer!r}: the model's own tokenizer is not needed to measure it")
    rate, micro_batch = next((rate, size) for most, rate, size in BY_SIZE if parameters(shape).total <= most)
    config = resolved.origin.config
    if config is None:
        check_built_in(shape)
    return Workload(
        name=resolved.name,
        shape=shape,
        tokenizer=tokenizer,
        micro_batch=micro_batch,
        learning_rate=rate,
        source=Source() if config is None else Source(kind="huggingface", config=config),
        cannot={} if config is None else obstacles(config, shape),
        notes=tuple(notes),
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
    """A shape file says sizes and no code: what it describes is trained with the built-in GPT-2."""
    if other := other_than_gpt2(shape):
        raise UserError(
            f"the built-in model has no {', '.join(other)} other than GPT-2's",
            "it is GPT-2 as published; a shape of another kind can be estimated and linted, not built",
            "leave these fields out, or point at a Hugging Face config",
        )
