"""What costs speed in a user's own model: sizes that do not suit tensor cores, written-out attention, lines that wait.

    findings_of(traced, micro_batch=16, dtype="bf16", device=find_device("H200")) -> (TracedFinding(rule=...), ...)

The sizes are those of the products that were seen; each finding names the line where its layer is made. The rules for
shapes (`lint_rules.py`) know what a size is for and suggest whole shapes; these rules know lines. A finding needs a
worthwhile gain on a known device, and a worthwhile share of the work on an unknown one: lint is quiet.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redline.core.devices import VECTOR_BYTES, Device
from redline.core.profile import FINDINGS
from redline.core.traced import Product, Traced
from redline.core.values import to_json
from redline.predict.lint_rules import MEANINGFUL_GAIN
from redline.predict.sizes import round_up
from redline.predict.tiles import ELEMENT_BYTES, estimate
from redline.predict.traced import gemms_of

VOCABULARY = 128  # as the rung padded-vocab pads it, and as the ladder advises
GOOD_BYTES = 128  # of a row, on every tensor core since the A100
FEW = 8  # a size below this has a meaning of its own: colours, a value, two classes
CONVENTION = (
    "more useful work per second of the whole step's products, forward and backward, "
    "each finding on top of those above it"
)
RULES = ("layer-size", "written-out-attention", "synchronisation")


@dataclass(frozen=True, kw_only=True)
class TracedFinding:
    rule: str
    kind: str
    """'alignment' or 'rule-of-thumb', as in `lint_rules.py`."""
    where: tuple[str, ...]
    problem: str
    why: str
    fix: str
    gain: float | None = None
    no_gain: str | None = None

    def document(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "kind": self.kind,
            "where": list(self.where),
            "problem": self.problem,
            "why": self.why,
            "fix": self.fix,
            "change": None,
            "mild": False,
            "predicted_gain": self.gain,
            "no_predicted_gain": self.no_gain,
            "measured_gain": None,
        }


def findings_of(
    traced: Traced, *, micro_batch: int, dtype: str, device: Device | None, ignore: Sequence[str] = ()
) -> tuple[TracedFinding, ...]:
    found = [*_sizes(traced, micro_batch, dtype, device), *_attention(traced), *_waits(traced)]
    return tuple(finding for finding in found if finding.rule not in ignore)


# sizes


@dataclass(frozen=True)
class _Layer:
    """A product with weights, and the widths that are written where its layer is made."""

    product: Product
    gates: int
    """How many times its outputs are computed: 4 in an LSTM."""

    @property
    def out(self) -> int:
        return self.product.n // self.gates

    @property
    def into(self) -> int:
        return self.product.k // self.product.area

    def grown(self, better: Mapping[int, int]) -> Product:
        n, k = (better.get(size, size) for size in (self.out, self.into))
        return replace(self.product, n=n * self.gates, k=k * self.product.area)


@dataclass(frozen=True)
class _Size:
    """A width that is not a multiple of what a vector load reads."""

    size: int
    better: int
    least: int
    products: list[Product]
    gain: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(product.where or "model" for product in self.products))


@dataclass(frozen=True, kw_only=True)
class _Judged:
    findings: Sequence[_Size]
    """Each with its gain on top of those above it."""
    quiet: Sequence[_Size] = ()


def _judged(traced: Traced, micro_batch: int, dtype: str, device: Device | None) -> _Judged:
    """A product is fast only if both of its sizes are good, so fixing either alone may gain nothing. All are fixed at
    first; then the one that gains least on top of the others is dropped, until each gains enough."""
    kept, quiet = list(_odd(traced, dtype)), []
    if device is None or traced.uncounted:
        return _Judged(findings=kept)

    def gain(some: Sequence[_Size], more: Sequence[_Size]) -> float:
        """Return the gain in useful work per second if `more` sizes are fixed, not `some`: padding is not useful."""
        before, after = (_seconds(_mended(traced, each), micro_batch, dtype, device) for each in (some, more))
        return before / after - 1

    while kept:
        on_top = [gain([other for other in kept if other is not each], kept) for each in kept]
        least = min(on_top)
        if least >= MEANINGFUL_GAIN:
            break
        given_up = kept.pop(on_top.index(least))
        quiet.append(replace(given_up, gain=least))
    onto = [replace(each, gain=gain(kept[:number], kept[: number + 1])) for number, each in enumerate(kept)]
    return _Judged(findings=onto, quiet=quiet)


def _odd(traced: Traced, dtype: str) -> Iterator[_Size]:
    least, good = VECTOR_BYTES // ELEMENT_BYTES[dtype], GOOD_BYTES // ELEMENT_BYTES[dtype]
    for size, products in _widths(traced, good).items():
        if size % least and _matters(traced, products):
            yield _Size(size, _better(size, products, least, _multiple(size, traced, good)), least, products)


def _mended(traced: Traced, sizes: Sequence[_Size]) -> Traced:
    better = {each.size: each.better for each in sizes}
    layers = (_layer(product, traced) for product in traced.products)
    grown = (
        product if layer is None else layer.grown(better)
        for product, layer in zip(traced.products, layers, strict=True)
    )
    return replace(traced, products=tuple(grown))


def _seconds(traced: Traced, micro_batch: int, dtype: str, device: Device) -> float:
    return math.fsum(gemm.count * estimate(gemm, device, dtype).seconds for gemm in gemms_of(traced, micro_batch))


def _sizes(traced: Traced, micro_batch: int, dtype: str, device: Device | None) -> Iterator[TracedFinding]:
    for odd in _judged(traced, micro_batch, dtype, device).findings:
        size, least, names, lines = odd.size, odd.least, odd.names, _lines(odd, traced)
        together = odd.gain is not None and odd.gain < MEANINGFUL_GAIN
        yield TracedFinding(
            rule="layer-size",
            kind="alignment",
            where=names,
            problem=f"{size:,} is no multiple of {least}: rows of {', '.join(names[:3])} start at unaligned addresses",
            why=f"tensor cores load {VECTOR_BYTES} bytes at once, {least} numbers of {dtype}; rows that do not start "
            "at a multiple of that are loaded in pieces"
            + ("; by itself it brings little, it pays together with the sizes below" if together else ""),
            fix=f"{odd.better:,}" + (f" at {lines}" if lines else "") + "; what is added may stay unused",
            gain=odd.gain,
            no_gain="the device is unknown" if device is None else traced.why_no_flops,
        )


def quiet_sizes(traced: Traced, *, micro_batch: int, dtype: str, device: Device | None) -> tuple[str, ...]:
    """Describe sizes that are no finding because too little gain is predicted: silence should not look like praise."""
    return tuple(
        f"{odd.size:,} ({', '.join(odd.names[:3])}) is no multiple of {odd.least}, and no finding: {odd.better:,} is "
        f"predicted to give {100 * (odd.gain or 0.0):+.1f} %, and {100 * MEANINGFUL_GAIN:.0f} % are needed"
        for odd in _judged(traced, micro_batch, dtype, device).quiet
    )


def unjudged_products(traced: Traced, dtype: str) -> tuple[str, ...]:
    """Describe products that were not judged, and may be ugly."""
    bare = (_of_bare_weights(product, dtype) for product in traced.products if _matters(traced, [product]))
    return tuple(dict.fromkeys(note for note in (*bare, traced.left_out_text) if note is not None))


def _of_bare_weights(product: Product, dtype: str) -> str | None:
    weights, least = _bare_weights(product), VECTOR_BYTES // ELEMENT_BYTES[dtype]
    odd = [f"{size:,}" for size in weights if size % least]
    if not odd:
        return None
    where = product.place or product.where or "the model"
    return (
        f"{where} multiplies by {' x '.join(f'{size:,}' for size in weights)} weights that belong to no layer: "
        f"{' and '.join(odd)} {'are' if len(odd) > 1 else 'is'} no multiple of {least}, and no finding: where that is "
        "written is not known"
    )


def _bare_weights(product: Product) -> tuple[int, ...]:
    """Return the sizes of the operand of a batched product that does not grow with the samples: a parameter, as in
    einsum with a stack of experts. Two activations grow together, in their batch."""
    if product.kind != "product" or product.grows not in ("m", "n"):
        return ()
    return (product.k, product.n) if product.grows == "m" else (product.m, product.k)


def _lines(odd: _Size, traced: Traced) -> str:
    """Name the lines where the size is written: those of layers, and of embeddings with as many rows or that width."""
    made = [each.made for each in traced.embeddings if odd.size in (each.width, each.rows)]
    made += [each.made for each in odd.products]
    return ", ".join(dict.fromkeys(str(place) for place in made if place is not None))


def _multiple(size: int, traced: Traced, good: int) -> int:
    """Return the multiple to round up to; a vocabulary is padded the same way wherever that is advised."""
    return VOCABULARY if size in {each.rows for each in traced.embeddings} else good


def _widths(traced: Traced, good: int) -> dict[int, list[Product]]:
    """Return the sizes that a user can set, with the products that have them. Input features, flattened channels and
    outputs with a meaning of their own are given: about those it is better to be silent."""
    layers = [layer for product in traced.products if (layer := _layer(product, traced)) is not None]
    made = {each.out for each in layers if not _is_given(each, layers, traced, good)}
    made |= {each.width for each in traced.embeddings}
    users: dict[int, list[Product]] = defaultdict(list)
    for layer in layers:
        for size in dict.fromkeys((layer.into, layer.out)):
            if size in made:
                users[size].append(layer.product)
    return {size: products for size, products in users.items() if size >= FEW}


def _layer(product: Product, traced: Traced) -> _Layer | None:
    """Return the layer of a product; None if it has no weights, or is a grouped convolution: its groups share its
    channels, so that none of their sizes is written anywhere."""
    if product.kind == "product" or (product.kind == "convolution" and product.batch > 1):
        return None
    gates = (each.gates for each in traced.recurrent if (each.where, each.rows) == (product.where, product.n))
    return _Layer(product, next(gates, 1))


def _is_given(layer: _Layer, layers: Sequence[_Layer], traced: Traced, good: int) -> bool:
    """True for a few outputs that no product reads, such as ten classes or a value: those go into the loss. A
    vocabulary is recognised by its embedding: rows can be added to it."""
    if layer.product.n >= good or layer.out in {each.rows for each in traced.embeddings}:
        return False
    return layer is layers[-1] or not any(_takes_in(each, layer) for each in traced.products)


def _takes_in(later: Product, layer: _Layer) -> bool:
    """True if `later` may read the layer's outputs, judged by their sizes: as they are, or as flattened channels of a
    convolution."""
    product = layer.product
    flattened = product.kind == "convolution" and later.kind == "linear" and later.k % product.n == 0
    return later is not product and (later.k // later.area == layer.out or flattened)


def _better(size: int, products: Sequence[Product], least: int, good: int) -> int:
    """Return the next size with whole cache lines; for the few channels of a convolution, where twice as many would
    cost, the next that a vector load can read."""
    convolved = any(product.kind == "convolution" for product in products)
    return round_up(size, least if convolved and size < good else good)


def _matters(traced: Traced, products: Sequence[Product]) -> bool:
    """True if their share of the work is worth a finding: that of a classifier's ten outputs is not."""

    def work(some: Sequence[Product]) -> int:
        return sum(each.m * each.n * each.k * each.batch * each.count for each in some)

    return work(products) >= MEANINGFUL_GAIN * work(traced.products)


# lines


def _attention(traced: Traced) -> Iterator[TracedFinding]:
    for each in traced.attention:
        call = "F.scaled_dot_product_attention(q, k, v" + (", is_causal=True)" if each.causal else ")")
        fix = "pass need_weights=False there" if each.module else f"call {call} there"
        yield TracedFinding(
            rule="written-out-attention",
            kind="rule-of-thumb",
            where=(str(each.place),),
            problem=f"attention is written out at {each.place}" + (f", {each.count} times" if each.count > 1 else ""),
            why="scores of the length of a sequence, squared, are stored and read back several times; a fused kernel "
            "never stores them, and the rungs flash and cudnn-attention can then choose it",
            fix=fix,
            no_gain="it depends on the kernel: measure it with `redline ladder` after the change",
        )


def _waits(traced: Traced) -> Iterator[TracedFinding]:
    for sync in traced.syncs:
        yield TracedFinding(
            rule="synchronisation",
            kind="rule-of-thumb",
            where=(str(sync.place),),
            problem=f"{sync.place} makes the host wait for the device",
            why=sync.detail,
            fix=FINDINGS[sync.kind],
            no_gain="it depends on how long the host would otherwise be ahead: see `redline profile`",
        )


def traced_lint_document(
    traced: Traced, findings: Sequence[TracedFinding], *, hardware: dict[str, Any], micro_batch: int, dtype: str
) -> dict[str, Any]:
    """Return the JSON of `redline lint`, with the keys of `predict/lint.py`."""
    gains = [finding.gain for finding in findings if finding.gain is not None]
    return {
        "shape": to_json(traced),
        "hardware": hardware,
        "settings": {"micro_batch": micro_batch, "tp": 1, "dtype": dtype},
        "findings": [finding.document() for finding in findings],
        "suggested": None,
        "suggested_settings": None,
        "gain_convention": CONVENTION,
        "predicted_gain": math.prod(1 + gain for gain in gains) - 1 if gains else None,
        "measured_gain": None,
        "gemms": None,
    }
