"""GPT-2 as published: learned positions, pre-LayerNorm, tanh GELU, biases everywhere but in the head.

    model = GPT(PRESETS["gpt2"].shape)           # tied head, naive attention, 50257 rows
    initialise(model, seed=1337)
    logits = model(tokens)                       # [B, T, V]

Parameter names follow Hugging Face's, so weights can be exchanged both ways (`model/huggingface.py`). Left out: dropout
(GPT-2's successors dropped it, and equivalence checks need repeatable steps) and generation with a cache.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from redline.core.errors import UserError
from redline.core.workload import Shape, other_than_gpt2
from redline.model.attention import ATTENTION
from redline.model.fused import add, add_norm, attend_packed, mlp, output, project
from redline.model.recompute import recomputed

INIT_STD = 0.02


class Norm(nn.LayerNorm):
    """LayerNorm in fp32 whatever the types of the stream and of its weights; returns its weights' type. A GPU's
    autocast does this by itself; a CPU's does not, and would sum the gradient of a bf16 gain in bf16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = at_least_fp32(self.weight), at_least_fp32(self.bias)
        return F.layer_norm(x.to(weight.dtype), self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)


class Table(nn.Embedding):
    """Embedding look-up in fp32 whatever type it is stored in: many tokens add to one row of its gradient, and in bf16,
    which an eager CPU would use, most of those additions would be lost."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.embedding(rows, at_least_fp32(self.weight))


def at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class SelfAttention(nn.Module):
    def __init__(self, shape: Shape, attention: str, recompute: bool) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = nn.Linear(shape.d_model, 3 * shape.d_model)
        self.c_proj = nn.Linear(shape.d_model, shape.d_model)
        self.packed = attention.removeprefix("packed-") if attention.startswith("packed-") else None
        self.attend = recomputed(ATTENTION[attention], ours=True) if recompute else ATTENTION[attention]

    def forward(self, x: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.mix(self.c_attn(x).chunk(3, dim=2), future))

    def mix(self, qkv: tuple[torch.Tensor, ...], future: torch.Tensor) -> torch.Tensor:
        """Return the heads' outputs side by side: three times [B, T, C] -> [B, T, C], for all heads, or for a
        tensor-parallel rank's own."""
        B, T, C = qkv[0].shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in qkv)  # [B, heads, T, d]
        return self.attend(q, k, v, future).transpose(1, 2).reshape(B, T, C)

    def fused(self, x: torch.Tensor, future: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same as `forward`, but the last bias gets no gradient here (model/fused.py)."""
        if self.packed is not None:
            return output(attend_packed(x, self.c_attn, self.heads, dtype, self.packed), self.c_proj)
        return output(self.mix(project(x, self.c_attn, dtype), future), self.c_proj)


def gelu_by_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The same tanh GELU: (1 + tanh u) / 2 is sigmoid(2u). It takes one exponential where tanh needs a library call."""
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


GELU: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": partial(F.gelu, approximate="tanh"),
    "sigmoid": gelu_by_sigmoid,
}


class MLP(nn.Module):
    def __init__(self, shape: Shape, gelu: str) -> None:
        super().__init__()
        self.gelu = GELU[gelu]
        self.c_fc = nn.Linear(shape.d_model, shape.d_ff)
        self.c_proj = nn.Linear(shape.d_ff, shape.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, shape: Shape, attention: str, recompute_attention: bool, gelu: str) -> None:
        super().__init__()
        self.ln_1 = Norm(shape.d_model)
        self.attn = SelfAttention(shape, attention, recompute_attention)
        self.ln_2 = Norm(shape.d_model)
        self.mlp = MLP(shape, gelu)

    def forward(self, x: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x), future)
        return x + self.mlp(self.ln_2(x))

    def fused(
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None,
        bias: torch.Tensor | None,
        future: torch.Tensor,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with a hand-written backward pass (model/fused.py). `branch` is the output of the previous block's
        MLP, still to be added to x, and so is the second tensor returned; None: x includes it already. `bias` is the
        one inside that branch, whose gradient is computed here."""
        if bias is None:
            normal = self.ln_1(x)
        else:
            x, normal = add_norm(x, branch, bias, self.ln_1, dtype)
        x, normal = add_norm(x, self.attn.fused(normal, future, dtype), self.attn.c_proj.bias, self.ln_2, dtype)
        return x, mlp(normal, self.mlp.c_fc, self.mlp.gelu, self.mlp.c_proj, dtype)

    def fused_whole(
        self, x: torch.Tensor, bias: torch.Tensor | None, future: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The same from one residual sum to the next."""
        return add(*self.fused(x, None, bias, future, dtype))


class GPT(nn.Module):
    def __init__(
        self,
        shape: Shape,
        *,
        attention: str = "naive",
        tied: bool = True,
        vocab_rows: int | None = None,
        checkpointing: str = "none",
        residual: torch.dtype = torch.float32,
        gelu: str = "tanh",
        fused: torch.dtype | None = None,
    ) -> None:
        """`vocab_rows` above `shape.vocab` pads embedding and head; logits of the padding are -inf. `residual` is the
        type of the stream between the blocks; a narrow one requires autocast, whose norms compute in fp32. `fused`: the
        backward pass between matmuls is hand-written, and the matmuls take this type."""
        super().__init__()
        check_is_gpt2(shape)
        self.shape, self.residual, self.fused = shape, residual, fused
        self.recompute_blocks = checkpointing == "full"
        rows = vocab_rows or shape.vocab
        self.first_row = 0
        """The vocabulary row at which embedding and head begin: a tensor-parallel rank has only some of the rows."""
        self.wte = Table(rows, shape.d_model)
        self.wpe = Table(shape.positions_count, shape.d_model)
        self.h = nn.ModuleList(
            Block(shape, attention, recompute_attention=checkpointing == "selective", gelu=gelu)
            for _ in range(shape.layers)
        )
        self.ln_f = Norm(shape.d_model)
        self.lm_head = nn.Linear(shape.d_model, rows, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight
        if rows > shape.vocab:
            hide_padding(self.lm_head, shape.vocab)
        self.register_buffer("future", future_of(shape.sequence), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.features(tokens))  # [B, T, rows]
        return logits

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the head's input: tokens [B, T] -> [B, T, C]. Without gradients there is no backward pass to fuse. A
        text that grows token by token would also have kernels planned for every length, and the packed kernels take
        no pinned backend (engine/sample.py)."""
        x = self.embedded(tokens)
        if self.fused is not None and torch.is_grad_enabled():
            return self.fused_blocks(x)
        normed: torch.Tensor = self.ln_f(self.through_blocks(x))
        return normed

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the stream that enters the first block: tokens [B, T] -> [B, T, C]."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x: torch.Tensor = self.wte(tokens) + self.wpe(positions)  # [B, T, C]
        return x if self.residual == torch.float32 else x.to(self.residual)

    def future_at(self, x: torch.Tensor) -> torch.Tensor:
        T = x.size(1)
        future: torch.Tensor = self.future[:T, :T]  # type: ignore[index]
        return future

    def through_blocks(self, x: torch.Tensor) -> torch.Tensor:
        future = self.future_at(x)
        for block in self.h:
            x = recomputed(block, ours=True)(x, future) if self.recompute_blocks else block(x, future)
        return x

    def fused_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """Run blocks and last norm, where each norm adds the output of the branch before it. Recomputed blocks are the
        exception: they return the finished sum, so that only one tensor is kept as their input."""
        assert self.fused is not None
        future, dtype = self.future_at(x), self.fused
        branch: torch.Tensor | None = None
        bias: torch.Tensor | None = None
        for block in self.h:
            assert isinstance(block, Block)
            if self.recompute_blocks:
                x = recomputed(block.fused_whole, ours=True)(x, bias, future, dtype)
            else:
                x, branch = block.fused(x, branch, bias, future, dtype)
            bias = block.mlp.c_proj.bias
        assert bias is not None
        return add_norm(x, branch, bias, self.ln_f, dtype)[1]


def check_is_gpt2(shape: Shape) -> None:
    if other := other_than_gpt2(shape):
        raise UserError(
            f"the built-in model has no {', '.join(other)} other than GPT-2's",
            "it is GPT-2 as published; other shapes can be estimated and linted, not built",
            "use a preset, or leave these fields out",
        )


def hide_padding(head: nn.Linear, vocab: int) -> None:
    """Give the padded rows probability zero, exactly, by a constant bias of -inf: the loss is the unpadded model's, and
    no sampler can draw them. The matmul adds a bias at no cost; masking or slicing logits is another pass over them."""
    del head.bias  # the parameter slot, which holds None
    head.register_buffer("bias", padding_bias(head.out_features, vocab), persistent=False)


def padding_bias(rows: int, vocab: int) -> torch.Tensor:
    return torch.where(torch.arange(rows) < vocab, 0.0, -torch.inf)


def future_of(sequence: int) -> torch.Tensor:
    """Return the mask of what a token may not see, [T, T]."""
    return torch.ones(sequence, sequence, dtype=torch.bool).triu(1)


def fill_buffers(model: GPT) -> None:
    """Compute the buffers of a model that was built on 'meta', or of a part of one."""
    for name, buffer in model.named_buffers():
        if name == "future":
            buffer.copy_(future_of(model.shape.sequence))
        else:  # the head's bias
            end = model.first_row + len(buffer)
            buffer.copy_(padding_bias(end, model.shape.vocab)[model.first_row :])


@torch.no_grad()
def initialise(model: GPT, seed: int) -> None:
    """GPT-2's initialisation, in place. Every tensor has its own random stream, so padded, tied and plain variants of
    one model start from the same weights."""
    for name, parameter in model.named_parameters():
        draw(model, name, parameter, seed)


@torch.no_grad()
def draw(model: GPT, name: str, parameter: torch.Tensor, seed: int) -> None:
    """Write the initial weights of one parameter, into it or into a tensor in its place."""
    generator = torch.Generator(parameter.device).manual_seed(seed + zlib.crc32(name.encode()))
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.dim() == 1:  # LayerNorm gains
        parameter.fill_(1.0)
    else:
        real = unpadded(model, name, parameter)
        parameter.zero_()
        std = INIT_STD / math.sqrt(2 * model.shape.layers) if name.endswith("c_proj.weight") else INIT_STD
        if real.dtype == torch.float32:
            real.normal_(0.0, std, generator=generator)
        else:  # rounded from the fp32 draw: in bf16, torch 2.11 draws other numbers
            real.copy_(torch.normal(0.0, std, real.shape, generator=generator, device=real.device))


def unpadded(model: GPT, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a parameter (or of its gradient) that the published model has."""
    return tensor[: model.shape.vocab] if name in ("wte.weight", "lm_head.weight") else tensor
