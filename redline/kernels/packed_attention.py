"""Causal attention over q, k and v that lie side by side, with gradients that do too.

    out, stats = packed_attention(qkv, heads)                        # qkv [B, T, 3C] -> [B, T, C]
    of_qkv = packed_attention_backward(above, qkv, out, stats, heads)

torch's attention returns three gradients, which must be copied into one for the projection's matmuls. cuDNN's kernels
accept any strides, so here they write where the projection reads. They are called through NVIDIA's package for that
(nvidia-cudnn-frontend), which drives the cuDNN that torch has loaded. On a CPU, or without the package, plain formulas
are used.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any

import torch

PACKAGE = "cudnn"  # the import name of nvidia-cudnn-frontend


@torch.library.custom_op("redline::packed_attention", mutates_args=())
def packed_attention(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the heads' outputs side by side, and the log-sum-exp of the scores, [B, heads, T, 1] in fp32."""
    if not (qkv.is_cuda and is_there()):
        return plain_packed_attention(qkv, heads)
    (batch, sequence, width), dtype = qkv.shape, qkv.dtype
    out = qkv.new_empty(batch, sequence, width // 3)
    stats = qkv.new_empty(batch, heads, sequence, 1, dtype=torch.float32)
    made = _graph("forward", batch, sequence, heads, width // 3 // heads, dtype, qkv.device)
    made.run({**_thirds("qkv", qkv), "o": out.data_ptr(), "stats": stats.data_ptr()})
    return out, stats


@packed_attention.register_fake
def _(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, sequence, width = qkv.shape
    stats = qkv.new_empty(batch, heads, sequence, 1, dtype=torch.promote_types(qkv.dtype, torch.float32))
    return qkv.new_empty(batch, sequence, width // 3), stats


@torch.library.custom_op("redline::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    above: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, stats: torch.Tensor, heads: int
) -> torch.Tensor:
    """Return the gradient of qkv, [B, T, 3C]. `above` [B, T, C] must be contiguous, as `out` is."""
    if not (qkv.is_cuda and is_there()):
        return plain_packed_attention_backward(above, qkv, out, stats, heads)
    batch, sequence, width = qkv.shape
    gradient = torch.empty_like(qkv)
    repeatable = torch.are_deterministic_algorithms_enabled()  # otherwise the order of dq's sums is random
    made = _graph("backward", batch, sequence, heads, width // 3 // heads, qkv.dtype, qkv.device, repeatable)
    pointers = {"o": out.data_ptr(), "dO": above.data_ptr(), "stats": stats.data_ptr()}
    made.run({**_thirds("qkv", qkv), **_thirds("dqkv", gradient), **pointers})
    return gradient


@packed_attention_backward.register_fake
def _(above: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, stats: torch.Tensor, heads: int) -> torch.Tensor:
    return torch.empty_like(qkv)


# --- by cuDNN ---------------------------------------------------------------------------------------------------------


@functools.cache
def is_there() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def _thirds(name: str, packed: torch.Tensor) -> dict[str, int]:
    """Return the addresses of q, k and v, by their names in a graph."""
    prefix, start = name.removesuffix("qkv"), packed.data_ptr()
    third = packed.size(2) // 3 * packed.element_size()
    return {f"{prefix}{part}": start + number * third for number, part in enumerate("qkv")}


class Graph:
    """A cuDNN graph with its plan and its tensors by name."""

    def __init__(self, cudnn: Any, graph: Any, tensors: dict[str, Any], device: torch.device) -> None:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        self.cudnn, self.graph, self.tensors, self.device = cudnn, graph, tensors, device
        self.workspace_bytes = graph.get_workspace_size()

    def run(self, pointers: dict[str, int]) -> None:
        """The workspace is made for each call: one that outlived its call would belong to the memory of the CUDA graph
        that is recorded during the first, and torch does not allow that."""
        handle = _handle(self.device)
        named = {self.tensors[name]: pointer for name, pointer in pointers.items()}
        with torch.cuda.device(self.device):
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device)
            self.cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            self.graph.execute(named, workspace.data_ptr(), handle=handle)


@functools.cache
def _handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@functools.cache
def _graph(
    direction: str,
    batch: int,
    sequence: int,
    heads: int,
    head: int,
    dtype: torch.dtype,
    device: torch.device,
    repeatable: bool = False,
) -> Graph:
    import cudnn

    narrow = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[dtype]
    wide = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=narrow, intermediate_data_type=wide, compute_data_type=wide, handle=_handle(device)
    )
    dim, width = [batch, heads, sequence, head], heads * head
    packed = [3 * width * sequence, head, 3 * width, 1]
    whole = [width * sequence, head, width, 1]
    sums, apart = [batch, heads, sequence, 1], [heads * sequence, sequence, 1, 1]
    tensors = {name: graph.tensor(name=name, dim=dim, stride=packed, data_type=narrow) for name in "qkv"}
    choices = {"attn_scale": 1 / math.sqrt(head), "use_causal_mask": True}
    if direction == "forward":
        out, stats = graph.sdpa(name="attention", **tensors, generate_stats=True, **choices)
        out.set_output(True).set_dim(dim).set_stride(whole)
        stats.set_output(True).set_dim(sums).set_stride(apart).set_data_type(wide)
        return Graph(cudnn, graph, {**tensors, "o": out, "stats": stats}, device)
    given = {name: graph.tensor(name=name, dim=dim, stride=whole, data_type=narrow) for name in ("o", "dO")}
    given["stats"] = graph.tensor(name="stats", dim=sums, stride=apart, data_type=wide)
    choices["use_deterministic_algorithm"] = repeatable
    gradients = graph.sdpa_backward(name="attention_backward", **tensors, **given, **choices)
    for gradient in gradients:
        gradient.set_output(True).set_dim(dim).set_stride(packed)
    return Graph(cudnn, graph, {**tensors, **given, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}, device)


# --- by formulas ------------------------------------------------------------------------------------------------------


def _heads(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, T, C] -> [B, heads, T, d]."""
    return rows.unflatten(2, (heads, -1)).transpose(1, 2)


def _scores(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """Return the scaled scores, causally masked, and q, k and v."""
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = (_heads(part.to(wide), heads) for part in qkv.chunk(3, dim=2))
    future = torch.ones(qkv.size(1), qkv.size(1), dtype=torch.bool, device=qkv.device).triu(1)
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.size(3))).masked_fill(future, -torch.inf)
    return scores, q, k, v


def plain_packed_attention(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores, _, _, v = _scores(qkv, heads)
    stats = scores.logsumexp(dim=3, keepdim=True)
    out = (scores - stats).exp() @ v
    return out.transpose(1, 2).flatten(2).to(qkv.dtype), stats


def plain_packed_attention_backward(
    above: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, stats: torch.Tensor, heads: int
) -> torch.Tensor:
    scores, q, k, v = _scores(qkv, heads)
    weights = (scores - stats).exp()
    above, out = (_heads(one.to(v.dtype), heads) for one in (above, out))
    of_weights = above @ v.transpose(2, 3)
    of_scores = weights * (of_weights - (above * out).sum(dim=3, keepdim=True)) / math.sqrt(q.size(3))
    parts = (of_scores @ k, of_scores.transpose(2, 3) @ q, weights.transpose(2, 3) @ above)
    return torch.cat([part.transpose(1, 2).flatten(2) for part in parts], dim=2).to(qkv.dtype)
