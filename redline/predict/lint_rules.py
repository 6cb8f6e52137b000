"""The rules of `redline lint`: what an ugly number is, why, and the nearest good one.

    vocabulary(Subject(shape=PRESETS["gpt2"].shape, micro_batch=16)).change -> {"vocab": 50304}

RULES at the end is the whole list: a rule is a function from a Subject to an Advice or None, and its docstring is its
reason. Rules run in order, each on the subject as the earlier ones left it, so that one cause gives one finding. A rule
proposes only what somebody training a model can choose, nothing if the size is good, and never what is predicted to be
slower: it picks the nearest good size that is not.
Sources: arXiv 2401.14489 and its summary in Bekman's ML Engineering book; NVIDIA's guide to matrix multiplication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from redline.core.devices import VECTOR_BYTES, Device
from redline.core.units import counted
from redline.core.workload import Shape
from redline.predict.flops import parameters
from redline.predict.parallel import heads_divide
from redline.predict.sizes import Change, kv_heads_nearby, most_ranks, round_up, widths_nearby
from redline.predict.subject import Subject, gain, predicted_gain
from redline.predict.tiles import (
    ELEMENT_BYTES,
    Estimate,
    cost_is_known,
    estimate,
    power_of_two,
)

VOCABULARY_MULTIPLE = 64  # arXiv 2401.14489: good on every device, V100 to B200
# Share of the step's GEMM time. Runs differ by 1 to 3 %, and cuBLAS may choose better tiles than predicted, so a
# smaller predicted gain is not worth a finding. Advice that costs memory or another layout must gain more.
MEANINGFUL_GAIN = 0.05
LARGE_GAIN = 0.10
NOISE = 0.005  # predictions closer to zero than this mean nothing
NODE_GPUS = 8  # joined by NVLink in nearly every machine
NEARBY = 1 / 16  # how far from the user's d_ff a better one may lie
CANDIDATES = 16  # of d_ff on either side, of d_model and heads in all


@dataclass(frozen=True, kw_only=True)
class Advice:
    problem: str
    why: str
    fix: str
    change: Change | None
    """None if no possible proposal is predicted to pay."""
    row: Row | None = None
    """The row whose alignment the advice is about."""

    @property
    def mild(self) -> bool:
        """True if nothing shows that it costs anything: no reason to fail a check."""
        return self.change is None or (self.row is not None and self.row.mild)


@dataclass(frozen=True, kw_only=True)
class Rule:
    name: str
    kind: str
    """'alignment', 'tile', 'wave' or 'rule-of-thumb'."""
    check: Callable[[Subject], Advice | None]


# alignment


@dataclass(frozen=True, kw_only=True)
class Row:
    """A size along which matrices are stored, divided among `ranks`."""

    size: int
    dtype: str
    alignment_bytes: int
    device: Device | None
    ranks: int = 1

    @property
    def multiple(self) -> int:
        """What the whole size must be a multiple of for each rank's share to be aligned."""
        return max(1, self.alignment_bytes // ELEMENT_BYTES[self.dtype]) * self.ranks

    @property
    def aligned(self) -> bool:
        return self.size % self.multiple == 0

    @property
    def start_bytes(self) -> int:
        """The largest power of two, in bytes, that divides the rows' starts; 0 if the ranks' shares are not equal."""
        return 0 if self.size % self.ranks else power_of_two(self.size // self.ranks * ELEMENT_BYTES[self.dtype])

    @property
    def mild(self) -> bool:
        return self.start_bytes >= VECTOR_BYTES

    @property
    def refused(self) -> bool:
        """True if a matmul of such rows is not slow but an error."""
        return self.dtype == "fp8"

    @property
    def no_figure(self) -> str | None:
        """Why no gain can be predicted from the alignment; None if a figure is known, or no device is."""
        if self.device is None:
            return None
        if self.refused:
            return "fp8 matmuls refuse such rows, so there is no time to compare with"
        if self.mild:
            return f"no published figure says what rows of {self.start_bytes} bytes cost"
        if not cost_is_known(self.device, self.dtype):
            return f"no published figure says what such rows of {self.dtype} cost on {self.device.vendor}"
        return None

    def how(self) -> str:
        """'not a multiple of 64 (128 bytes of bf16), nor of 8 (16 bytes)'"""
        text = f"not a multiple of {self.multiple} ({self.alignment_bytes} bytes of {self.dtype}"
        text += f" on each of {self.ranks} ranks)" if self.ranks > 1 else ")"
        vector = max(1, VECTOR_BYTES // ELEMENT_BYTES[self.dtype]) * self.ranks
        if self.alignment_bytes > VECTOR_BYTES and self.size % vector:
            text += f", nor of {vector} ({VECTOR_BYTES} bytes)"
        return text

    def why(self) -> str:
        if self.mild:
            return (
                f"tensor cores run at full speed on rows of whole {self.alignment_bytes} bytes; with "
                f"{self.start_bytes} the loss is small, and no published figure says how small"
            )
        if self.refused:
            return f"fp8 matmuls refuse rows that are not whole {VECTOR_BYTES} bytes"
        text = f"wide loads take {VECTOR_BYTES} bytes at a time; without them the library falls back on narrow ones"
        if self.device is None or not cost_is_known(self.device, self.dtype):
            return text
        rate = self.device.narrow_rates.get(self.start_bytes)
        return text if rate is None else f"{text}, at about {rate:.2f} of the rate"


def vocabulary(subject: Subject) -> Advice | None:
    """In the head's GEMMs the vocabulary is the row length of the logits and of their gradient. Unused tokens can be
    added, so this is the cheapest number to fix; 50257 is a tokenizer's count, and nobody chose it for a GPU."""
    vocab, tp = subject.shape.vocab, subject.tp
    row = _row(subject, vocab, shared=True)
    good = round_up(vocab, max(VOCABULARY_MULTIPLE, subject.multiple) * tp)
    change = _mended(subject, row, [{"vocab": good}])
    if change is None:
        return None
    return Advice(
        problem=f"vocabulary {vocab}{_of_ranks(tp)} is {row.how()}",
        why=row.why(),
        fix=f"pad it to {good}: {good - vocab} rows that no token uses and that the loss must not see"
        f" ({_parameter_change(subject.shape, change)})",
        change=change,
        row=row,
    )


def model_width(subject: Subject) -> Advice | None:
    """d_model is the row length of every activation and of most weights: ugly here is ugly everywhere."""
    shape = subject.shape
    row, heads = _row(subject, shape.d_model), _row(subject, shape.head_width, attention=True)
    if row.aligned:
        return None
    worst = heads if shape.head_dim is None and heads.start_bytes < row.start_bytes else row
    change = _mended(subject, worst, _widths(subject, keep_width=False, keep_tp=False))
    if change is None:
        return None
    return Advice(
        problem=f"d_model {shape.d_model}{_with_it(subject)} is {row.how()}",
        why=worst.why(),
        fix=f"{_words(change)} ({_parameter_change(shape, change)}): another model, so choose it before training",
        change=change,
        row=worst,
    )


def head_width(subject: Subject) -> Advice | None:
    """h/a is the row length of every query, key and value. Fused attention kernels pad it internally, which hides part
    of the loss. Wider heads are fewer and have fewer scores."""
    shape = subject.shape
    row = _row(subject, shape.head_width, attention=True)
    near = _head_dims(subject) if shape.head_dim is not None else _widths(subject, keep_width=True)
    change = _mended(subject, row, near)
    if change is None and shape.head_dim is None:
        change = _mended(subject, row, _widths(subject, keep_width=False, keep_tp=False))
    if change is None:
        return None
    return Advice(
        problem=f"heads {shape.head_width} wide (h/a): {row.how()}",
        why=f"{row.why()}; fused attention kernels hide a part of it",
        fix=f"{_words(change)} ({_parameter_change(shape, change)}){_others(subject, near, change)}: another model, so "
        "choose it before training",
        change=change,
        row=row,
    )


def mlp_width(subject: Subject) -> Advice | None:
    """d_ff is the row length of the MLP's hidden layer. With SwiGLU it is often 8/3 of d_model, not rounded to any
    multiple: 10922 at 4096 costs a third of the rate that 10944 has."""
    d_ff, tp = subject.shape.d_ff, subject.tp
    row = _row(subject, d_ff, shared=True)
    near = _multiples_nearby(d_ff, row.multiple)
    change = _mended(subject, row, [{"d_ff": size} for size in near])
    if change is None:
        return None
    whole = round_up(d_ff, math.lcm(2 * row.multiple, 128 * tp))
    others = [f"{size} ({_parameter_change(subject.shape, {'d_ff': size})})" for size in sorted(near, reverse=True)]
    others += [f"{whole} (whole tiles of 128)"] if whole not in near else []
    two_thirds = subject.shape.gated and abs(d_ff - 8 * subject.shape.d_model / 3) < 1
    return Advice(
        problem=f"d_ff {d_ff}{' = 8/3 d_model' if two_thirds else ''}{_of_ranks(tp)} is {row.how()}",
        why=row.why(),
        fix=f"{_words(change)}; good sizes near it: {', '.join(others)}",
        change=change,
        row=row,
    )


def sequence_length(subject: Subject) -> Advice | None:
    """s is the row length of the attention scores, and through b*s the height of every other GEMM. The micro batch
    itself needs no alignment: with a good s every b*s is good, so 7 is as good as 8."""
    shape = subject.shape
    row = _row(subject, shape.sequence, attention=True)
    fixed = shape.positions == "learned" and shape.max_positions is not None
    near = [s for s in _multiples_nearby(shape.sequence, row.multiple) if not (fixed and s > shape.positions_count)]
    change = _mended(subject, row, [{"sequence": size} for size in near])
    if change is None:
        return None
    other = [size for size in near if size != change["sequence"]]
    return Advice(
        problem=f"sequence length {shape.sequence} is {row.how()}",
        why=f"{row.why()}; fused attention hides a part of it",
        fix=f"sequences of {change['sequence']} tokens" + (f" (or {other[0]})" if other else ""),
        change=change,
        row=row,
    )


# rules of thumb


def head_count(subject: Subject) -> Advice | None:
    """An odd number of heads, or of key-value heads, cannot be divided among 2, 4 or 8 GPUs, and with heads of 64 makes
    d_model end in half a tile of 128. GPT-2 XL's 25 heads are the classic case."""
    shape = subject.shape
    heads, kv = shape.heads, shape.key_value_heads
    odd = [f"{heads} heads"] if heads % 2 and heads > 1 else []
    odd += [f"{kv} key-value heads"] if kv % 2 and kv > 1 and kv != heads else []
    if not odd:
        return None
    if heads % 2 and heads > 1:
        near = _widths(subject, keep_width=shape.head_dim is not None)
    else:
        near = [{"kv_heads": number} for number in kv_heads_nearby(heads, kv, subject.tp)]
    if not near:
        return None
    change = _nearest_that_pays(subject, near)
    tiles = heads % 2 and shape.head_dim is None and shape.d_model % 128
    half = f", and d_model {shape.d_model} is {shape.d_model / 128:g} tiles of 128" if tiles else ""
    return Advice(
        problem=f"{' and '.join(odd)}: an odd number",
        why=f"no tensor parallelism over 2, 4 or 8 GPUs divides it{half}",
        fix="an even number, if tensor parallelism is wanted: none near it is predicted to be as fast as this one"
        if change is None
        else f"{_words(change)} ({_parameter_change(shape, change)}): another model, whose published weights do not "
        "fit; for choosing a shape, not for fine-tuning one",
        change=change,
    )


def tensor_parallel_division(subject: Subject) -> Advice | None:
    """h/t and (b a)/t must be whole: each GPU takes whole heads, of queries and of keys and values."""
    shape, tp = subject.shape, subject.tp
    if heads_divide(shape, tp):
        return None
    good = most_ranks(shape, tp)
    fits = [size for size in range(1, 2 * tp + 1) if heads_divide(shape, size)]
    kv = "" if shape.key_value_heads == shape.heads else f" and {counted(shape.key_value_heads, 'key-value head')}"
    return Advice(
        problem=f"{counted(shape.heads, 'head')}{kv} do not divide among {tp} GPUs",
        why="each GPU of a tensor-parallel group computes whole heads; copied ones would be computed more than once",
        fix=f"--tp {good} (these divide: {', '.join(map(str, fits))})",
        change={"tp": good},
    )


def tensor_parallel_size(subject: Subject) -> Advice | None:
    """t should be as small as memory allows: it cuts every GEMM thinner and adds two exchanges per layer and pass,
    which beyond 8 GPUs leave a machine's fast links. The gain does not count the exchanges."""
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
    """The micro batch should be as large as memory allows, while that pays: few tokens make few tiles, and half of the
    GPU waits."""
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
    """A d_ff slightly above a multiple of the tile width wastes work in the last column of tiles. Fires only if a
    nearby width is predicted to gain 5 % or more, both from tiles alone and in total."""
    found = _best_nearby(subject, _nearby_widths(subject), share=_tile_share)
    if found is None:
        return None
    good = found["d_ff"]
    return Advice(
        problem=f"d_ff {subject.shape.d_ff}{_of_ranks(subject.tp)} leaves the last tiles of its GEMMs partly empty",
        why="a tile that sticks out over the edge takes as long as a full one; "
        + _least_used(subject, "tiles", lambda found: found.tile_efficiency),
        fix=f"d_ff {good} ({_parameter_change(subject.shape, found)})",
        change=found,
    )


def wave_quantization(subject: Subject) -> Advice | None:
    """The last round of tiles takes as long as a full one, however few tiles it has. Fires only if a nearby d_ff is
    predicted to gain 5 % or more, or a micro batch one or two away 10 %, both from waves alone and in total. Weight
    gradients with few tiles do not count, since cuBLAS splits them along their sum."""
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
    why = f"a round is {subject.device.multiprocessors} tiles, and takes as long with one of them as with all; "
    why += _least_used(subject, "rounds", lambda found: found.wave_efficiency)
    return Advice(problem=problem, why=why, fix=fix, change=found)


RULES = (
    Rule(name="model-width", kind="alignment", check=model_width),
    Rule(name="head-count", kind="rule-of-thumb", check=head_count),  # before the ranks, which even heads may allow
    Rule(name="tensor-parallel-division", kind="rule-of-thumb", check=tensor_parallel_division),
    Rule(name="vocabulary", kind="alignment", check=vocabulary),
    Rule(name="head-width", kind="alignment", check=head_width),
    Rule(name="mlp-width", kind="alignment", check=mlp_width),
    Rule(name="sequence-length", kind="alignment", check=sequence_length),
    Rule(name="tensor-parallel-size", kind="rule-of-thumb", check=tensor_parallel_size),
    Rule(name="micro-batch", kind="rule-of-thumb", check=micro_batch_size),
    Rule(name="tile-quantization", kind="tile", check=tile_quantization),
    Rule(name="wave-quantization", kind="wave", check=wave_quantization),
)


# words


def _with_it(subject: Subject) -> str:
    """Name the sizes that are ugly because d_model is, and that its fix also fixes."""
    shape = subject.shape
    narrow = shape.head_dim is None and shape.head_width % subject.attention_multiple
    sizes = [f"heads of {shape.head_width}"] if narrow else []
    sizes += [f"d_ff {shape.d_ff}"] if shape.d_ff % subject.multiple else []
    return f" (and with it {' and '.join(sizes)})" if sizes else ""


def _of_ranks(tp: int) -> str:
    return f" over {tp} ranks" if tp > 1 else ""


def _words(change: Change) -> str:
    things, options = {"heads": "head", "kv_heads": "key-value head", "layers": "layer"}, {"tp": "--tp"}
    return ", ".join(
        counted(value, things[name]) if name in things else f"{options.get(name, name)} {value}"
        for name, value in change.items()
    )


def _parameter_change(shape: Shape, change: Change) -> str:
    sizes = {name: value for name, value in change.items() if name != "tp"}
    before, after = parameters(shape).total, parameters(replace(shape, **sizes)).total
    return f"{100 * (after / before - 1):+.2f} % parameters"


def _least_used(subject: Subject, what: str, share: Callable[[Estimate], float]) -> str:
    """'of the rounds of qkv forward 73 % are used': the GEMM that uses the least of them."""
    assert subject.device is not None
    shares = [(share(estimate(gemm, subject.device, subject.dtype_of(gemm))), gemm) for gemm in subject.gemms]
    least, gemm = min(shares, key=lambda pair: pair[0])
    return f"of the {what} of {gemm.where} {gemm.direction} {100 * least:.0f} % are used"


# sizes nearby


def _row(subject: Subject, size: int, *, shared: bool = False, attention: bool = False) -> Row:
    """Return the row of a size. `shared` sizes are divided among the ranks; `attention` sizes have that dtype."""
    dtype = subject.attention_dtype if attention else subject.dtype
    return Row(
        size=size,
        dtype=dtype,
        alignment_bytes=subject.alignment_bytes(dtype),
        device=subject.device,
        ranks=subject.tp if shared else 1,
    )


def _mended(subject: Subject, row: Row, changes: Sequence[Change]) -> Change | None:
    """Return the change that fixes a row; None if the row is good or nothing nearby is predicted to be as fast. If no
    figure says what the alignment gains, the prediction lacks it and may be slightly negative; rows that matmuls refuse
    are fixed at any price. If the size itself is good and only its share per rank is not, the change must pay."""
    if row.aligned:
        return None
    allowed = 0.0 if row.no_figure is None else NOISE
    change = _nearest_that_pays(subject, changes, math.inf if row.refused else allowed)
    whole_is_good = row.ranks > 1 and row.mild and replace(row, ranks=1).aligned
    if change is not None and whole_is_good and (subject.device is None or not _pays(subject, change, MEANINGFUL_GAIN)):
        return None
    return change


def _nearest_that_pays(subject: Subject, changes: Sequence[Change], allowed_loss: float = 0.0) -> Change | None:
    """Return the nearest change that is not predicted to be slower. The fastest would be the widest heads of all, whose
    few scores a fused kernel makes cheap anyway, and a model further from the one requested."""
    gains = ((gain_of(subject, change), change) for change in changes)
    return next((change for gain, change in gains if gain is None or gain >= -allowed_loss), None)


def gain_of(subject: Subject, change: Change) -> float | None:
    """Return the predicted gain; if the sizes do not divide among the ranks, that of the whole layers on one rank."""
    after = subject.changed(change)
    found = predicted_gain(subject, after)
    return predicted_gain(replace(subject, tp=1), replace(after, tp=1)) if found is None else found


def _widths(subject: Subject, *, keep_width: bool, keep_tp: bool = True) -> list[Change]:
    return list(
        islice(
            widths_nearby(
                subject.shape,
                multiple=subject.multiple,
                head_multiple=subject.attention_multiple,
                tp=subject.tp,
                keep_width=keep_width,
                keep_tp=keep_tp,
            ),
            CANDIDATES,
        )
    )


def _head_dims(subject: Subject) -> list[Change]:
    """Return the good widths below and above, for heads whose width is independent of d_model."""
    return [{"head_dim": size} for size in _multiples_nearby(subject.shape.head_width, subject.attention_multiple)]


def _multiples_nearby(size: int, multiple: int) -> list[int]:
    """Return the multiples below and above, the nearer first."""
    below, above = size // multiple * multiple, round_up(size, multiple)
    return sorted((one for one in (below, above) if one), key=lambda one: (abs(one - size), -one))


def _others(subject: Subject, changes: Sequence[Change], taken: Change) -> str:
    """', or 40 heads (predicted -3.1 %)': the nearest good size that was not chosen."""
    other = next((change for change in changes if change != taken), None)
    if other is None:
        return ""
    gain = gain_of(subject, other)
    return f", or {_words(other)}" + ("" if gain is None else f" (predicted {100 * gain:+.1f} %)")


def _smaller_group(subject: Subject, tp: int) -> int | None:
    """Return half as many GPUs, if that is worth it."""
    half = tp // 2
    if tp < 2 or tp % 2 or not heads_divide(subject.shape, half):
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
    """Return the gain if a last round cost only the multiprocessors it uses."""
    return gain(before, after, before.seconds_of_tiles, after.seconds_of_tiles) or 0.0


def _wave_share(before: Subject, after: Subject) -> float:
    """Return the part of the gain that tiles do not explain."""
    return (1 + (predicted_gain(before, after) or 0.0)) / (1 + _tile_share(before, after)) - 1


def _best_nearby(
    subject: Subject,
    changes: Iterator[Change],
    share: Callable[[Subject, Subject], float],
    least: float = MEANINGFUL_GAIN,
) -> Change | None:
    """Return the nearest change with nine tenths of the largest gain, among those that gain enough both in total and by
    `share`."""
    gains = []
    for change in changes:
        after = subject.changed(change)
        whole = predicted_gain(subject, after)
        if whole is not None and min(whole, share(subject, after)) >= least:
            gains.append((whole, change))
    most = max((whole for whole, _ in gains), default=0.0)
    return next((change for whole, change in gains if whole >= 0.9 * most), None)
