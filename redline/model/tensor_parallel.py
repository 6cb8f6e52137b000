"""The built-in GPT with every layer cut among the ranks of a tensor group, as Megatron-LM cuts it (arXiv 1909.08053).

    cuts = cut_gpt(model, mesh)                    # in place, on 'meta'; {"wte.weight": Cut(...), ...}
    vocabulary_loss(model, inputs, targets)        # every rank has its own logits only
    model(tokens)                                  # whole logits, for whoever samples

Attention and MLP begin with a matrix that is cut by its outputs and end with one that is cut by its inputs: in between
a rank computes on its own, and one all-reduce over the group assembles the stream. The all-reduces and their gradients
are DTensor's. Weights are plain tensors of the part's size, under their usual names, so DDP and FSDP2 treat them like
any others. DDP accepts no DTensor, and no DTensor placement cuts inside each third of the fused queries, keys and
values without getting in the way of FSDP2's own. A `Cut` says what a rank holds of each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from redline.core.cut import Cut
from redline.model.first_order import first_order
from redline.model.gpt import GPT, Block, Table, at_least_fp32

# By the end of a parameter's name: the dimension that is cut, and how many matrices are stacked in it.
CUTS = {
    "attn.c_attn.weight": (0, 3),
    "attn.c_attn.bias": (0, 3),
    "attn.c_proj.weight": (1, 1),
    "mlp.c_fc.weight": (0, 1),
    "mlp.c_fc.bias": (0, 1),
    "mlp.c_proj.weight": (1, 1),
    "wte.weight": (0, 1),
    "lm_head.weight": (0, 1),
}


def cut_gpt(model: GPT, mesh: DeviceMesh) -> dict[str, Cut]:
    """Keep this rank's part of every layer; the mesh has one dimension. The model has no weights yet."""
    cuts = {}
    for name, parameter in model.named_parameters():
        for end, (dim, parts) in CUTS.items():
            if name.endswith(end):
                rank, ranks = mesh.get_local_rank(), mesh.size()
                cuts[name] = Cut(shape=tuple(parameter.shape), dim=dim, parts=parts, rank=rank, ranks=ranks)
    for block in model.h:
        assert isinstance(block, Block)
        block.attn.heads //= mesh.size()
        block.attn.c_attn = ByOutputs(block.attn.c_attn, mesh)
        block.attn.c_proj = ByInputs(block.attn.c_proj, mesh)
        block.mlp.c_fc = ByOutputs(block.mlp.c_fc, mesh)
        block.mlp.c_proj = ByInputs(block.mlp.c_proj, mesh)
    cut_vocabulary(model, cuts, mesh)
    return cuts


def cut_vocabulary(model: GPT, cuts: Mapping[str, Cut], mesh: DeviceMesh) -> None:
    """Cut embedding and head by the same rows; a pipeline stage has one of them, or neither."""
    cut = cuts.get("wte.weight") or cuts.get("lm_head.weight")
    if cut is None:
        return
    table, head = getattr(model, "wte", None), getattr(model, "lm_head", None)
    model.first_row = cut.runs[0].there
    if table is not None:
        model.wte = RowsOfTable(table, cut, mesh)
    if head is not None:
        model.lm_head = RowsOfHead(head, cut, mesh)
        if table is not None and head.weight is table.weight:
            model.lm_head.weight = model.wte.weight


class ByOutputs(nn.Linear):
    """Computes some of a layer's outputs from all of its inputs."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh) -> None:
        outputs = whole.out_features // mesh.size()
        super().__init__(whole.in_features, outputs, device="meta", dtype=whole.weight.dtype)
        self.mesh = mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(read_by_all(x, self.mesh), self.weight, self.bias)


class ByInputs(nn.Linear):
    """Computes all of a layer's outputs from some of its inputs: ranks sum their results and add the bias once."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh) -> None:
        inputs = whole.in_features // mesh.size()
        super().__init__(inputs, whole.out_features, device="meta", dtype=whole.weight.dtype)
        self.mesh, self.leads = mesh, mesh.get_local_rank() == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # One rank adds the bias inside its matmul, before rounding: a sum in 16 bits would lose a small bias. All ranks
        # hold the bias, and each gets its gradient through the zeros that are added.
        bias = self.bias.detach()
        y = add_up(F.linear(x, self.weight, bias if self.leads else None), self.mesh)
        return y + (self.bias - bias).to(y.dtype)


class RowsOfTable(Table):
    """Holds some of the vocabulary's rows; a rank returns zeros for tokens of other ranks."""

    def __init__(self, whole: Table, cut: Cut, mesh: DeviceMesh) -> None:
        super().__init__(cut.size, whole.embedding_dim, device="meta", dtype=whole.weight.dtype)
        self.first, self.mesh = cut.runs[0].there, mesh

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        own, mine = own_rows(rows, self.first, self.num_embeddings)
        x = F.embedding(own, at_least_fp32(self.weight))
        return add_up(x.masked_fill(~mine.unsqueeze(-1), 0.0), self.mesh)


class RowsOfHead(nn.Linear):
    """Computes the logits of some of the vocabulary's rows."""

    def __init__(self, whole: nn.Linear, cut: Cut, mesh: DeviceMesh) -> None:
        super().__init__(whole.in_features, cut.size, bias=False, device="meta", dtype=whole.weight.dtype)
        self.rows, self.first, self.mesh = whole.out_features, cut.runs[0].there, mesh
        if whole.bias is not None:  # hides the padding; `fill_buffers` fills it
            del self.bias
            self.register_buffer("bias", torch.empty(cut.size, device="meta"), persistent=False)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(read_by_all(x, self.mesh), self.weight, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.own(x)
        return add_up(F.pad(own, (self.first, self.rows - self.first - own.size(-1))), self.mesh)


def own_rows(rows: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row numbers relative to `first`, and which are among the `count` from there on; others map to 0."""
    mine = (rows >= first) & (rows < first + count)
    return torch.where(mine, rows - first, 0), mine


# --- sums over the group ----------------------------------------------------------------------------------------------


def read_by_all(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return x, equal on every rank, with a gradient that is the sum of the ranks' gradients."""
    shared = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return shared.to_local(grad_placements=[Partial()])


def add_up(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the sum of every rank's x, on every rank; each x gets the sum's gradient."""
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()


# --- the loss ---------------------------------------------------------------------------------------------------------


def vocabulary_loss(model: GPT, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss, as `next_token_loss` does, while each rank has only its own logits."""
    head = model.lm_head
    assert isinstance(head, RowsOfHead)
    logits = head.own(model.features(inputs)).flatten(0, 1)  # [B T, rows of this rank]
    loss: torch.Tensor = VocabularyLoss.apply(  # type: ignore[no-untyped-call]
        logits, targets.flatten(), head.first, head.mesh.get_group()
    )
    return loss


class VocabularyLoss(torch.autograd.Function):
    """Two reductions of a number or two per token: the largest logit, then the sum of exponentials and the target's."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, first: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        wide = logits.float()
        own, mine = own_rows(targets, first, logits.size(1))
        largest = wide.amax(dim=1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        chosen = torch.where(mine, wide.gather(1, own.unsqueeze(1)).squeeze(1), 0.0)
        probabilities = (wide - largest.unsqueeze(1)).exp_()
        sums = torch.stack((probabilities.sum(dim=1), chosen))
        dist.all_reduce(sums, group=group)
        total, chosen = sums
        ctx.save_for_backward(probabilities.div_(total.unsqueeze(1)), own, mine)
        ctx.dtype = logits.dtype
        return (total.log() + largest - chosen).mean()

    @staticmethod
    @first_order
    def backward(ctx: Any, above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probabilities, own, mine = ctx.saved_tensors
        scale = above / own.numel()
        gradient = probabilities * scale
        gradient.scatter_add_(1, own.unsqueeze(1), (-scale * mine).unsqueeze(1))
        return gradient.to(ctx.dtype), None, None, None
