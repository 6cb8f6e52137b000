"""Floating-point operations and parameters, counted exactly. A multiply-add is two FLOPs, so MACs are half of them.

    flops_per_token(PRESETS["gpt2"].shape) -> 854.4e6                    # what MFU counts
    executed_flops_per_token(shape, Plan(attention="flash")) -> 807.3e6  # what HFU counts
    parameters(shape).total -> 124_439_808

Only matmuls count, as is usual in this field: 2 FLOPs per weight and token in the forward, twice that in the backward
(gradients of input and weight), and the two matmuls of attention, q·k and weights·v, each with 2 FLOPs per element of a
head and pair of tokens. Which pairs count is a convention, which must be stated with every figure:

    full         the whole s x s square, window or not: nanoGPT, PaLM, Megatron's eq. 3, torch's FlopCounterMode
    causal       the pairs a causal model needs: s (s + 1) / 2; with a sliding window of w tokens (the token itself
                 included) w s - w (w - 1) / 2
    as-executed  what the plan's kernel visits (naive: the square; a fused kernel: the causal pairs, and its backward
                 recomputes the scores: 5 matmuls after the forward's 2), padding and recomputation included

docs/flops.md has the derivations, the sources and the figures that others print.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from redline.core.errors import unknown_name
from redline.core.plan import Plan
from redline.core.workload import Shape
from redline.predict.gemms import linear_layers

CONVENTION = "full attention square, unpadded"  # the default of flops_per_token, printed beside MFU
CONVENTIONS = {
    "full": CONVENTION,
    "causal": "causal pairs of attention only, unpadded",
    "as-executed": "as executed: the plan's attention kernel, padding and recomputation",
}
FUSED_BACKWARD = 2.5  # matmuls in a fused kernel's backward per matmul of its forward: scores again, then four more


@dataclass(frozen=True, kw_only=True)
class Passes:
    """FLOPs of one part of the model, for one token of training."""

    forward: float
    backward: float
    recomputed: float = 0.0
    """Forward work repeated during the backward instead of keeping its results."""

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recomputed


@dataclass(frozen=True, kw_only=True)
class TokenFlops:
    """FLOPs of one token of training, by part and pass."""

    linear: Passes
    """Matmuls with the weights of all layers."""
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
    """Return the FLOPs that the model requires by the convention 'full' or 'causal', whatever a plan pads or
    recomputes."""
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
    """Return the FLOPs that this plan executes. 'full' checkpointing counts as one more forward of all layers, and
    'selective' as one more of the attention core, as in Megatron; torch's stops a little earlier (docs/flops.md)."""
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
    """Pairs of tokens in the whole square; a mask changes values, not work."""
    return sequence * sequence


def causal_pairs(sequence: int, window: int | None = None) -> int:
    """Pairs (query, key) with the key no later than the query and, with a window, among the last `window` tokens."""
    reach = sequence if window is None else min(window, sequence)
    return reach * sequence - reach * (reach - 1) // 2  # the first tokens have fewer before them


Pairs = Callable[[int, int | None], int]


def _attention_forward(shape: Shape, pairs: Pairs) -> float:
    """FLOPs per token of both matmuls in all layers, each with 2 per element of a head and pair. Keys and values shared
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
    """How many parameters a model has, by group; biases count with the layer they belong to."""

    embedding: int
    positions: int
    attention: int
    mlp: int
    norms: int
    head: int
    """Only its bias, if any, when it is tied to the embedding."""

    @property
    def total(self) -> int:
        return self.embedding + self.positions + self.attention + self.mlp + self.norms + self.head


def parameters(shape: Shape, tied: bool | None = None, plan: Plan | None = None) -> Parameters:
    """Count the parameters. `tied` None means as the shape was published. With a plan, its padding counts too."""
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
    """Parameters of every layer's norms, of the query and key norms (a head wide, shared by all heads), and of the last
    norm."""
    vectors = 2 if shape.norm == "layernorm" else 1  # gain and bias, or gain alone
    layer = shape.layer_norms * shape.d_model + 2 * shape.qk_norms * shape.head_width
    return vectors * (shape.layers * layer + shape.d_model)


# what others print


def six_n(shape: Shape) -> float:
    """6 FLOPs per parameter and token (arXiv 2001.08361), embeddings included. It omits attention, so it gets worse as
    sequences get longer."""
    return 6.0 * parameters(shape).total


def megatron_flops(
    *, batch: int, sequence: int, layers: int, hidden: int, vocab: int, recompute: bool = False
) -> float:
    """FLOPs of one iteration by eq. 3 of arXiv 2104.04473, for GPT with d_ff = 4 h and the full square. The printed
    form recomputes every layer's forward: 96 and V/16; without recomputation it is 72 and V/12."""
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
    """TFLOP/s per GPU from the model's size alone: 2 FLOPs per parameter and token, times 3 passes for model FLOPs, or
    4 if the forward is recomputed (hardware FLOPs). It omits attention, so it is a little too low."""
    passes = 4 if recompute else 3
    return billions * passes * 2 * sequence * global_batch / (seconds * gpus * 1e3)


# inference


def prefill_flops(shape: Shape, tokens: int, *, convention: str = "causal", all_logits: bool = False) -> float:
    """FLOPs of a prompt's forward pass. The head runs only for the last token, unless `all_logits`."""
    count = model_flops(replace(shape, sequence=tokens, max_positions=None), convention)
    heads = tokens if all_logits else 1
    return tokens * (count.linear.forward + count.attention.forward) + heads * count.head.forward


def decode_flops(shape: Shape, context: int) -> float:
    """FLOPs of one generated token when the keys and values of the `context` tokens before it are cached: it attends to
    them and to itself, or to as many of them as the window holds."""
    count = model_flops(shape)
    seen = context + 1
    windowed = shape.layers_with_window
    pairs = windowed * min(seen, shape.window or seen) + (shape.layers - windowed) * seen
    return count.linear.forward + count.head.forward + 4 * shape.query_width * pairs
