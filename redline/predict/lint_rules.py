"""The rules of `redline lint`: what an ugly number is, why, and the nearest good one.

    vocabulary(Subject(shape=PRESETS["gpt2"].shape, micro_batch=16)).change -> {"vocab": 50304}

RULES at the end is the whole list: a rule is a function from a Subject to an Advice or None, and its docstring is its
reason. Rules are asked in order, each about the subject as the earlier ones left it, so that one cause gives one
finding. A rule proposes only what somebody training a model can choose, and nothing at all when the size is good.
Sources: arXiv 2401.14489 and its summary in Bekman's ML Engineering book; NVIDIA's guide to matrix multiplication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from redline.core.workload import Shape
from redline.predict.flops import parameters
from redline.predict.sizes import Change, most_ranks, nearest_width, ranks_fit, round_up
from redline.predict.subject import Subject, gain, predicted_gain
from redline.predict.tiles import ELEMENT_BYTES, UNALIGNED_RATE, VECTOR_BYTES, power_of_two

VOCABULARY_MULTIPLE = 64  # sources/003: good on every device, V100 to B200
# Of the step's GEMM time. Runs differ by 1 to 3 %, and cuBLAS may choose better tiles than the prediction does: what is
# predicted to give less is not worth a finding. More is asked of advice that costs memory or another layout.
MEANINGFUL_GAIN = 0.05
LARGE_GAIN = 0.10
NODE_GPUS = 8  # joined by NVLink in nearly every machine
NEARBY = 1 / 16  # how far from the user's d_ff a better one may lie
CANDIDATES = 16  # on either side


@dataclass(frozen=True, kw_only=True)
class Advice:
    problem: str
    why: str
    fix: str
    change: Change


@dataclass(frozen=True, kw_only=True)
class Rule:
    name: str
    kind: str
    """'alignment', 'tile', 'wave' or 'rule-of-thumb'."""
    check: Callable[[Subject], Advice | None]


# alignment


def vocabulary(subject: Subject) -> Advice | None:
    """The head's GEMMs have the vocabulary as a row of logits and of their gradient. Tokens can be added and never
    used, so this is the cheapest number to mend; 50257 is a tokenizer's count, and nobody chose it for a GPU."""
    vocab, tp = subject.shape.vocab, subject.tp
    if vocab % (subject.multiple * tp) == 0:
        return None
    good = round_up(vocab, max(VOCABULARY_MULTIPLE, subject.multiple) * tp)
    return Advice(
        problem=f"vocabulary {vocab}{_of_ranks(tp)} is {_how_aligned(vocab, subject)}",
        why=_alignment_reason(vocab, subject),
        fix=f"pad it to {good}: {good - vocab} rows that no token uses and that the loss must not see"
        f" ({_parameter_change(subject.shape, {'vocab': good})})",
        change={"vocab": good},
    )


def model_width(subject: Subject) -> Advice | None:
    """d_model is a row of every activation and of most weights: ugly here is ugly everywhere."""
    shape = subject.shape
    if shape.d_model % subject.multiple == 0:
        return None
    change = _width(subject, keep_width=False, keep_tp=False)
    if change is None:
        return None
    worst = math.gcd(shape.d_model, shape.head_width) if shape.head_dim is None else shape.d_model
    return Advice(
        problem=f"d_model {shape.d_model}{_with_it(subject)} is {_how_aligned(shape.d_model, subject, shared=False)}",
        why=_alignment_reason(worst, subject, shared=False),
        fix=f"{_words(change)} ({_parameter_change(shape, change)}): another model, so choose it before training",
        change=change,
    )


def head_width(subject: Subject) -> Advice | None:
    """h/a is a row of every query, key and value. Fused attention kernels pad it inside, and so hide a part of the
    loss. Of the good widths the wider one is proposed: fewer heads have fewer scores."""
    shape = subject.shape
    if shape.head_width % subject.multiple == 0:
        return None
    if shape.head_dim is not None:
        change: Change | None = {"head_dim": round_up(shape.head_dim, subject.multiple)}
    else:
        change = _width(subject, keep_width=True)
        change = change or _width(subject, keep_width=False, keep_tp=False)
    if change is None:
        return None
    return Advice(
        problem=f"heads {shape.head_width} wide (h/a): {_how_aligned(shape.head_width, subject, shared=False)}",
        why=_alignment_reason(shape.head_width, subject, shared=False) + "; fused attention kernels hide a part of it",
        fix=f"{_words(change)} ({_parameter_change(shape, change)}): another model, so choose it before training",
        change=change,
    )


def mlp_width(subject: Subject) -> Advice | None:
    """d_ff is a row of the MLP's hidden layer. With SwiGLU it is often 8/3 of d_model, rounded to nothing: 10922 at
    4096 costs a third of the rate that 10944 has."""
    d_ff, tp = subject.shape.d_ff, subject.tp
    step = subject.multiple * tp
    if d_ff % step == 0:
        return None
    below, above, whole = d_ff // step * step, round_up(d_ff, step), round_up(d_ff, math.lcm(2 * step, 128 * tp))
    good = below if below and d_ff - below < above - d_ff else above
    others = [f"{size} ({_parameter_change(subject.shape, {'d_ff': size})})" for size in (above, below) if size]
    others += [f"{whole} (whole tiles of 128)"] if whole != above else []
    two_thirds = subject.shape.gated and abs(d_ff - 8 * subject.shape.d_model / 3) < 1
    return Advice(
        problem=f"d_ff {d_ff}{' = 8/3 d_model' if two_thirds else ''}{_of_ranks(tp)} is {_how_aligned(d_ff, subject)}",
        why=_alignment_reason(d_ff, subject),
        fix=f"d_ff {good}; good sizes near it: {', '.join(others)}",
        change={"d_ff": good},
    )


def sequence_length(subject: Subject) -> Advice | None:
    """s is a row of the attention scores, and through b*s the height of every other GEMM. The micro batch itself needs
    no alignment: with a good s every b*s is good, so 7 is as good as 8."""
    s = subject.shape.sequence
    if s % subject.multiple == 0:
        return None
    below, above = s // subject.multiple * subject.multiple, round_up(s, subject.multiple)
    good = below if below and s - below < above - s else above
    return Advice(
        problem=f"sequence length {s} is {_how_aligned(s, subject, shared=False)}",
        why=_alignment_reason(s, subject, shared=False) + "; fused attention hides a part of it",
        fix=f"sequences of {good} tokens" + (f" (or {below})" if below and below != good else ""),
        change={"sequence": good},
    )


# rules of thumb


def head_count(subject: Subject) -> Advice | None:
    """An odd number of heads divides among no 2, 4 or 8 GPUs, and with heads of 64 makes d_model end in half a tile of
    128. GPT-2 XL's 25 are the classic."""
    shape = subject.shape
    if shape.heads % 2 == 0 or shape.heads == 1:
        return None
    change = _width(subject, keep_width=shape.head_dim is not None)
    if change is None:
        return None
    half = "" if shape.d_model % 128 == 0 else f", and d_model {shape.d_model} is {shape.d_model / 128:g} tiles of 128"
    return Advice(
        problem=f"{shape.heads} heads: an odd number",
        why=f"no tensor parallelism over 2, 4 or 8 GPUs divides it{half}",
        fix=f"{_words(change)} ({_parameter_change(shape, change)}): another model, whose published weights do not fit;"
        " for choosing a shape, not for fine-tuning one",
        change=change,
    )


def tensor_parallel_division(subject: Subject) -> Advice | None:
    """h/t and (b a)/t must be whole: each GPU takes whole heads. Key-value heads may be fewer than GPUs, if they are
    then copied evenly."""
    shape, tp = subject.shape, subject.tp
    if ranks_fit(shape, tp):
        return None
    good = most_ranks(shape, tp)
    fits = [size for size in range(1, 2 * tp + 1) if ranks_fit(shape, size)]
    kv = "" if shape.key_value_heads == shape.heads else f" and {shape.key_value_heads} key-value heads"
    return Advice(
        problem=f"{shape.heads} heads{kv} and d_model {shape.d_model} do not divide among {tp} GPUs",
        why="each GPU of a tensor-parallel group computes whole heads and an equal share of the width",
        fix=f"--tp {good} (these divide: {', '.join(map(str, fits))})",
        change={"tp": good},
    )


def tensor_parallel_size(subject: Subject) -> Advice | None:
    """t as small as memory allows: it cuts every GEMM thinner and adds two exchanges per layer and pass, which leave
    the fast links of a machine beyond 8. The exchanges are not counted in the gain."""
    tp, good = subject.tp, subject.tp
    while (half := _smaller_group(subject, good)) is not None:
        good = half
    if good == tp:
        return None
    reason = "GEMMs cut this thin run slower on every GPU"
    if tp > NODE_GPUS:
        reason = f"beyond {NODE_GPUS} GPUs the exchanges of every layer leave the fast links of most machines"
    return Advice(
        problem=f"tensor parallelism over {tp} GPUs",
        why=reason,
        fix=f"--tp {good} if the model fits in memory that way; the other GPUs are better used for data",
        change={"tp": good},
    )


def micro_batch_size(subject: Subject) -> Advice | None:
    """As large as memory allows, while it pays: few tokens make few tiles, and half of the GPU waits."""
    if not subject.batch_is_chosen or subject.device is None or "micro_batch" in subject.settled:
        return None
    good = subject.micro_batch
    while _pays(subject.changed({"micro_batch": good}), {"micro_batch": 2 * good}, LARGE_GAIN):
        good *= 2
    if good == subject.micro_batch:
        return None
    tokens = subject.micro_batch * subject.shape.sequence
    return Advice(
        problem=f"micro batch {subject.micro_batch}: {tokens:,} tokens are too few for {subject.device.label}",
        why=f"their GEMMs have too few tiles for its {subject.device.multiprocessors} multiprocessors",
        fix=f"--micro-batch {good}, or the most that memory holds (7 is as good as 8); fewer accumulation steps then",
        change={"micro_batch": good},
    )


# tiles and waves


def tile_quantization(subject: Subject) -> Advice | None:
    """A d_ff a little over whole tiles makes the last column of tiles do work for nothing. Fires only where a width
    nearby is predicted to give 5 % or more, tiles alone and all in all."""
    found = _best_nearby(subject, _nearby_widths(subject), share=_tile_share)
    if found is None:
        return None
    good = found["d_ff"]
    return Advice(
        problem=f"d_ff {subject.shape.d_ff}{_of_ranks(subject.tp)} leaves the last tiles of its GEMMs partly empty",
        why="a tile that sticks out over the edge takes as long as a full one",
        fix=f"d_ff {good} ({_parameter_change(subject.shape, found)})",
        change=found,
    )


def wave_quantization(subject: Subject) -> Advice | None:
    """The last round of tiles takes as long as a full one, however few they are. Fires only where a d_ff nearby is
    predicted to give 5 % or more, or a micro batch one or two away 10 %, waves alone and all in all. Weight gradients
    with few tiles are split along their sum by cuBLAS and do not count."""
    found = _best_nearby(subject, _nearby_batches(subject), share=_wave_share, least=LARGE_GAIN)
    found = found or _best_nearby(subject, _nearby_widths(subject), share=_wave_share)
    if found is None or subject.device is None:
        return None
    tail = f"the last round of tiles leaves multiprocessors of {subject.device.label} idle"
    if "micro_batch" in found:
        problem = f"micro batch {subject.micro_batch}: {tail}"
        fix = f"--micro-batch {found['micro_batch']}, if memory holds it"
    else:
        problem = f"d_ff {subject.shape.d_ff}: {tail}"
        fix = f"d_ff {found['d_ff']} ({_parameter_change(subject.shape, found)})"
    why = f"a round is {subject.device.multiprocessors} tiles, and takes as long with one of them as with all"
    return Advice(problem=problem, why=why, fix=fix, change=found)


RULES = (
    Rule(name="tensor-parallel-division", kind="rule-of-thumb", check=tensor_parallel_division),
    Rule(name="vocabulary", kind="alignment", check=vocabulary),
    Rule(name="model-width", kind="alignment", check=model_width),
    Rule(name="head-count", kind="rule-of-thumb", check=head_count),
    Rule(name="head-width", kind="alignment", check=head_width),
    Rule(name="mlp-width", kind="alignment", check=mlp_width),
    Rule(name="sequence-length", kind="alignment", check=sequence_length),
    Rule(name="tensor-parallel-size", kind="rule-of-thumb", check=tensor_parallel_size),
    Rule(name="micro-batch", kind="rule-of-thumb", check=micro_batch_size),
    Rule(name="tile-quantization", kind="tile", check=tile_quantization),
    Rule(name="wave-quantization", kind="wave", check=wave_quantization),
)


# words


def _how_aligned(size: int, subject: Subject, *, shared: bool = True) -> str:
    """'not a multiple of 64 (128 bytes of bf16), nor of 8 (16 bytes)'; `shared` sizes are divided among the ranks."""
    ranks = subject.tp if shared else 1
    width = ELEMENT_BYTES[subject.dtype]
    text = f"not a multiple of {subject.multiple * ranks} ({subject.alignment_bytes} bytes of {subject.dtype}"
    text += f" on each of {ranks} ranks)" if ranks > 1 else ")"
    vector = max(1, VECTOR_BYTES // width) * ranks
    if subject.alignment_bytes > VECTOR_BYTES and size % vector:
        text += f", nor of {vector} ({VECTOR_BYTES} bytes)"
    return text


def _alignment_reason(size: int, subject: Subject, *, shared: bool = True) -> str:
    ranks = subject.tp if shared else 1
    row_bytes = size * ELEMENT_BYTES[subject.dtype] / ranks
    if row_bytes % VECTOR_BYTES == 0:
        return (
            f"tensor cores run at full speed on rows of whole {subject.alignment_bytes} bytes; with "
            f"{power_of_two(int(row_bytes))} the loss is small, and no published figure says how small"
        )
    if subject.dtype == "fp8":
        return f"fp8 matmuls refuse rows that are not whole {VECTOR_BYTES} bytes"
    return (
        f"wide loads take {VECTOR_BYTES} bytes at a time; without them the library falls back on narrow ones, at about "
        f"{UNALIGNED_RATE:.2f} of the rate (SwiGLU on an H100)"
    )


def _with_it(subject: Subject) -> str:
    """The sizes that are ugly because d_model is, and that its fix mends."""
    shape = subject.shape
    sizes = [f"heads of {shape.head_width}"] if shape.head_dim is None and shape.head_width % subject.multiple else []
    sizes += [f"d_ff {shape.d_ff}"] if shape.d_ff % subject.multiple else []
    return f" (and with it {' and '.join(sizes)})" if sizes else ""


def _of_ranks(tp: int) -> str:
    return f" over {tp} ranks" if tp > 1 else ""


def _words(change: Change) -> str:
    names = {"heads": "{} heads", "kv_heads": "{} key-value heads", "layers": "{} layers", "tp": "--tp {}"}
    return ", ".join(names.get(name, f"{name} {{}}").format(value) for name, value in change.items())


def _parameter_change(shape: Shape, change: Change) -> str:
    sizes = {name: value for name, value in change.items() if name != "tp"}
    before, after = parameters(shape).total, parameters(replace(shape, **sizes)).total
    return f"{100 * (after / before - 1):+.2f} % parameters"


# sizes nearby


def _width(subject: Subject, *, keep_width: bool, keep_tp: bool = True) -> Change | None:
    sizes = {"multiple": subject.multiple, "tp": subject.tp}
    return nearest_width(subject.shape, **sizes, keep_width=keep_width, keep_tp=keep_tp)


def _smaller_group(subject: Subject, tp: int) -> int | None:
    """Half as many GPUs, where that is worth it."""
    half = tp // 2
    if tp < 2 or tp % 2 or not ranks_fit(subject.shape, half):
        return None
    if tp > NODE_GPUS or _pays(subject.changed({"tp": tp}), {"tp": half}, LARGE_GAIN):
        return half
    return None


def _pays(subject: Subject, change: Change, least: float) -> bool:
    return (predicted_gain(subject, subject.changed(change)) or 0.0) >= least


def _nearby_widths(subject: Subject) -> Iterator[Change]:
    d_ff, step = subject.shape.d_ff, subject.multiple * subject.tp
    if "d_ff" in subject.settled:
        return
    for distance in range(1, min(CANDIDATES, int(d_ff * NEARBY / step)) + 1):
        yield from ({"d_ff": size} for size in (d_ff + distance * step, d_ff - distance * step) if size > 0)


def _nearby_batches(subject: Subject) -> Iterator[Change]:
    if subject.batch_is_chosen and "micro_batch" not in subject.settled:
        sizes = (subject.micro_batch + change for change in (-1, 1, -2, 2))
        yield from ({"micro_batch": size} for size in sizes if size > 0)


def _tile_share(before: Subject, after: Subject) -> float:
    """The gain if a last round cost only what it uses."""
    return gain(before, after, before.seconds_of_tiles, after.seconds_of_tiles) or 0.0


def _wave_share(before: Subject, after: Subject) -> float:
    """What of the gain is not the tiles'."""
    return (1 + (predicted_gain(before, after) or 0.0)) / (1 + _tile_share(before, after)) - 1


def _best_nearby(
    subject: Subject,
    changes: Iterator[Change],
    share: Callable[[Subject, Subject], float],
    least: float = MEANINGFUL_GAIN,
) -> Change | None:
    """The nearest change that gives nine tenths of the most, of those that give enough as a whole and of this kind."""
    gains = []
    for change in changes:
        after = subject.changed(change)
        whole = predicted_gain(subject, after)
        if whole is not None and min(whole, share(subject, after)) >= least:
            gains.append((whole, change))
    most = max((whole for whole, _ in gains), default=0.0)
    return next((change for whole, change in gains if whole >= 0.9 * most), None)
