"""Floating-point operations and parameters, counted exactly. A multiply-add is two FLOPs, so MACs are half of them.

    flops_per_token(PRESETS["gpt2"].shape) -> 854.4e6                    # what MFU counts
    executed_flops_per_token(shape, Plan(attention="flash")) -> 807.3e6  # what HFU counts
    parameters(shape).total -> 124_439_808

Only matmuls count, as everywhere in this field: 2 FLOPs per weight and token in the forward, twice that in the
backward (gradients of input and weight), and the two products of attention, q·k and weights·v, of 2 FLOPs per number
of a head and pair of tokens each. Which pairs count is the convention, and it must stand beside every figure:

    full         the whole s x s square, window or not: nanoGPT, PaLM, Megatron's eq. 3, torch's FlopCounterMode
    causal       the pairs a causal model needs: s (s + 1) / 2; with a sliding window of w tokens (itself among
                 them) w s - w (w - 1) / 2
    as-executed  what the plan's kernel visits (naive: the square; a fused kernel: the causal pairs, and its backward
                 computes the scores again: 5 products after the forward's 2), padding and recomputation included

docs/flops.md has the derivations, the sources and the figures others print.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from redline.core.errors import unknown_name
from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.predict.gemms import linear_layers

CONVENTION = "full attention square, unpadded"  # of flops_per_token when nobody names another: printed beside MFU
CONVENTIONS = {
    "full": CONVENTION,
    "causal": "causal pairs of attention only, unpadded",
    "as-executed": "as executed: the plan's attention kernel, padding and recomputation",
}
FUSED_BACKWARD = 2.5  # products in the backward of a fused kernel per product of its forward: scores again, then four


@dataclass(frozen=True, kw_only=True)
class Passes:
    """FLOPs of one part of the model, for one token of training."""

    forward: float
    backward: float
    recomputed: float = 0.0
    """Forward work done again during the backward, instead of keeping its results."""

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recomputed


@dataclass(frozen=True, kw_only=True)
class TokenFlops:
    """One token of training, by part and pass."""

    linear: Passes
    """The products with the weights of all layers."""
    attention: Passes
    """q·k and weights·v of all layers."""
    head: Passes
    convention: str

    @property
    def forward(self) -> float:
        return self.linear.forward + self.attention.forward + self.head.forward

    @property
    def backward(self) -> float:
        return self.linear.backward + self.attention.backward + self.head.backward

    @property
    def recomputed(self) -> float:
        return self.linear.recomputed + self.attention.recomputed + self.head.recomputed

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recomputed


def model_flops(shape: Shape, convention: str = "full") -> TokenFlops:
    """What the model asks for, by the convention 'full' or 'causal', whatever a plan pads or computes twice."""
    known = [name for name in CONVENTIONS if name != "as-executed"]
    if convention not in known:
        raise unknown_name("FLOPs convention", convention, known)
    pairs = square_pairs if convention == "full" else causal_pairs
    linear, head = _weights_forward(shape, Plan())
    attention = _attention_forward(shape, pairs)
    return TokenFlops(
        linear=Passes(forward=linear, backward=2 * linear),
        attention=Passes(forward=attention, backward=2 * attention),
        head=Passes(forward=head, backward=2 * head),
        convention=CONVENTIONS[convention],
    )


def executed_flops(shape: Shape, plan: Plan) -> TokenFlops:
    """What this plan runs. 'full' checkpointing is counted as one more forward of all layers and 'selective' as one
    more of the attention core, as Megatron does; torch's own stops a little earlier (docs/flops.md)."""
    fused = plan.attention != "naive"
    linear, head = _weights_forward(shape, plan)
    attention = _attention_forward(shape, causal_pairs if fused else square_pairs)
    layers_again = plan.checkpointing == "full"
    attention_again = plan.checkpointing in ("full", "selective")
    return TokenFlops(
        linear=Passes(forward=linear, backward=2 * linear, recomputed=linear if layers_again else 0.0),
        attention=Passes(
            forward=attention,
            backward=(FUSED_BACKWARD if fused else 2) * attention,
            recomputed=attention if attention_again else 0.0,
        ),
        head=Passes(forward=head, backward=2 * head),  # in pieces or whole: no plan computes logits twice
        convention=CONVENTIONS["as-executed"],
    )


def flops_per_token(shape: Shape, convention: str = "full") -> float:
    """Model FLOPs of one token, forward and backward: what MFU counts."""
    return model_flops(shape, convention).total


def executed_flops_per_token(shape: Shape, plan: Plan) -> float:
    """Hardware FLOPs of one token under this plan: what HFU counts."""
    return executed_flops(shape, plan).total


def square_pairs(sequence: int, window: int | None = None) -> int:
    """Pairs of tokens in the whole square; a mask is a matter of values, not of work."""
    return sequence * sequence


def causal_pairs(sequence: int, window: int | None = None) -> int:
    """Pairs (query, key) with the key no later than the query and, with a window, among the last `window` tokens."""
    reach = sequence if window is None else min(window, sequence)
    return reach * sequence - reach * (reach - 1) // 2  # the first tokens have fewer behind them


Pairs = Callable[[int, int | None], int]


def _attention_forward(shape: Shape, pairs: Pairs) -> float:
    """Both products, 2 FLOPs each per number of a head and pair, of all layers, per token. Keys and values shared
    among heads (GQA) save memory, not FLOPs: every query head multiplies with them."""
    windowed = shape.layers_with_window
    of_all = windowed * pairs(shape.sequence, shape.window) + (shape.layers - windowed) * pairs(shape.sequence, None)
    return 4 * shape.query_width * of_all / shape.sequence


def _weights_forward(shape: Shape, plan: Plan) -> tuple[int, int]:
    """Forward FLOPs per token of the layers' weights and of the head's, from the one list of linear layers."""
    by_layer = [(layer.where, 2 * layer.inputs * layer.outputs * layer.count) for layer in linear_layers(shape, plan)]
    head = sum(flops for where, flops in by_layer if where == "head")
    return sum(flops for _, flops in by_layer) - head, head


# parameters


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How many numbers a model learns, by group; biases stand with the layer they belong to."""

    embedding: int
    positions: int
    attention: int
    mlp: int
    norms: int
    head: int
    """Its bias alone, if any, when it is the embedding."""

    @property
    def total(self) -> int:
        return self.embedding + self.positions + self.attention + self.mlp + self.norms + self.head


def parameters(shape: Shape, tied: bool | None = None, plan: Plan | None = None) -> Parameters:
    """`tied` None: as the shape was published. With a plan its padding is counted too."""
    tied = shape.tied if tied is None else tied
    layers = linear_layers(shape, Plan() if plan is None else plan)
    of = {
        layer.where: layer.count * layer.outputs * (layer.inputs + shape.has_bias(layer.where))
        for layer in layers
        if layer.where != "head"
    }
    rows = next(layer.outputs for layer in layers if layer.where == "head")
    return Parameters(
        embedding=rows * shape.d_model,  # as many rows as the head, whether or not they are shared
        positions=shape.positions_count * shape.d_model if shape.positions == "learned" else 0,
        attention=sum(of.get(where, 0) for where in ("qkv", "q", "kv", "proj")),
        mlp=of["up"] + of["down"],
        norms=norm_parameters(shape),
        head=rows * ((0 if tied else shape.d_model) + shape.head_bias),
    )


def norm_parameters(shape: Shape) -> int:
    """Of every layer's norms, those of queries and keys (a head wide, shared by all heads), and the last one."""
    vectors = 2 if shape.norm == "layernorm" else 1  # gain and bias, or gain alone
    layer = shape.layer_norms * shape.d_model + 2 * shape.qk_norms * shape.head_width
    return vectors * (shape.layers * layer + shape.d_model)


# what others print


def six_n(shape: Shape) -> float:
    """6 FLOPs per parameter and token (arXiv 2001.08361), embeddings and all: no attention, so it ages with length."""
    return 6.0 * parameters(shape).total


def megatron_flops(
    *, batch: int, sequence: int, layers: int, hidden: int, vocab: int, recompute: bool = False
) -> float:
    """FLOPs of one iteration by eq. 3 of arXiv 2104.04473, which is for GPT with d_ff = 4 h, by the full square. As
    printed there it has every layer's forward computed again: 96 and V/16; without that it is 72 and V/12."""
    factor, head = (96, 16) if recompute else (72, 12)
    return (
        factor
        * batch
        * sequence
        * layers
        * hidden**2
        * (1 + sequence / (6 * hidden) + vocab / (head * layers * hidden))
    )


def shortcut_tflops(
    *, billions: float, sequence: int, global_batch: int, seconds: float, gpus: int, recompute: bool
) -> float:
    """TFLOP/s and GPU from the model's size alone: 2 FLOPs per parameter and token, times 3 passes for model FLOPs, or
    4 when the forward is computed again (hardware FLOPs). Leaves attention out, so it reports a little too little."""
    passes = 4 if recompute else 3
    return billions * passes * 2 * sequence * global_batch / (seconds * gpus * 1e3)


# inference


def prefill_flops(shape: Shape, tokens: int, *, convention: str = "causal", all_logits: bool = False) -> float:
    """The forward of a prompt. The head runs for the last token only unless all logits are wanted."""
    count = model_flops(replace(shape, sequence=tokens, max_positions=None), convention)
    heads = tokens if all_logits else 1
    return tokens * (count.linear.forward + count.attention.forward) + heads * count.head.forward


def decode_flops(shape: Shape, context: int) -> float:
    """One generated token when the keys and values of `context` tokens before it are cached: it attends to them and
    to itself, or to as many of them as the window holds."""
    count = model_flops(shape)
    seen = context + 1
    windowed = shape.layers_with_window
    pairs = windowed * min(seen, shape.window or seen) + (shape.layers - windowed) * seen
    return count.linear.forward + count.head.forward + 4 * shape.query_width * pairs
