"""The built-in GPT with every layer cut among the ranks of a tensor group, as Megatron-LM cuts it (arXiv 1909.08053).

    cuts = cut_gpt(model, mesh)                    # in place, on 'meta'; {"wte.weight": Cut(...), ...}
    vocabulary_loss(model, inputs, targets)        # every rank has its own logits only
    model(tokens)                                  # whole logits, for whoever samples

Attention and MLP begin with a matrix that is cut by its outputs and end with one that is cut by its inputs: in between
a rank computes on its own, and one sum over the group puts the stream together. The sums and their gradients are
DTensor's. Weights are plain tensors of the piece's size, under the names that they always have: DDP and FSDP2 take them
as any others (DDP takes no DTensor), and no placement of DTensor's cuts inside each third of the fused queries, keys
and values without getting into the way of FSDP2's own. What a rank holds of each tensor is said by its `Cut`.
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
from redline.model.gpt import GPT, Block, Table, at_least_fp32

# Parameters and buffers by the end of their name: the dimension that is cut, and how many matrices lie in one.
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
    """Every rank of the mesh, which has one dimension, keeps its part. The model has no numbers yet."""
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
    """Embedding and head, both by the same rows; a stage of a pipeline has one of them, or none."""
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
    """Some of a layer's outputs, from all of its inputs."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh) -> None:
        outputs = whole.out_features // mesh.size()
        super().__init__(whole.in_features, outputs, device="meta", dtype=whole.weight.dtype)
        self.mesh = mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(read_by_all(x, self.mesh), self.weight, self.bias)


class ByInputs(nn.Linear):
    """All of a layer's outputs, from some of its inputs: what the ranks have is added up, and the bias once."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh) -> None:
        inputs = whole.in_features // mesh.size()
        super().__init__(inputs, whole.out_features, device="meta", dtype=whole.weight.dtype)
        self.mesh, self.leads = mesh, mesh.get_local_rank() == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # One rank's product has the bias in it before it is rounded: a sum in 16 bits would lose a small one. All ranks
        # hold the bias, and each has its gradient from the zeros that are added.
        bias = self.bias.detach()
        y = add_up(F.linear(x, self.weight, bias if self.leads else None), self.mesh)
        return y + (self.bias - bias).to(y.dtype)


class RowsOfTable(Table):
    """Some of the tokens' rows; a rank gives zeros for the tokens of the others."""

    def __init__(self, whole: Table, cut: Cut, mesh: DeviceMesh) -> None:
        super().__init__(cut.size, whole.embedding_dim, device="meta", dtype=whole.weight.dtype)
        self.first, self.mesh = cut.runs[0].there, mesh

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        own, mine = own_rows(rows, self.first, self.num_embeddings)
        x = F.embedding(own, at_least_fp32(self.weight))
        return add_up(x.masked_fill(~mine.unsqueeze(-1), 0.0), self.mesh)


class RowsOfHead(nn.Linear):
    """Some of the tokens' logits."""

    def __init__(self, whole: nn.Linear, cut: Cut, mesh: DeviceMesh) -> None:
        super().__init__(whole.in_features, cut.size, bias=False, device="meta", dtype=whole.weight.dtype)
        self.rows, self.first, self.mesh = whole.out_features, cut.runs[0].there, mesh
        if whole.bias is not None:  # that hides padding; `fill_buffers` says what is in it
            del self.bias
            self.register_buffer("bias", torch.empty(cut.size, device="meta"), persistent=False)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(read_by_all(x, self.mesh), self.weight, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.own(x)
        return add_up(F.pad(own, (self.first, self.rows - self.first - own.size(-1))), self.mesh)


def own_rows(rows: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of rows among the `count` from `first` on, and which of them are there at all; the others say 0."""
    mine = (rows >= first) & (rows < first + count)
    return torch.where(mine, rows - first, 0), mine


# --- sums over the group ----------------------------------------------------------------------------------------------


def read_by_all(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The same x on every rank, whose gradient is the sum of what each has made of it."""
    shared = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return shared.to_local(grad_placements=[Partial()])


def add_up(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of every rank's x, on every rank; each x has the sum's gradient."""
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()


# --- the loss ---------------------------------------------------------------------------------------------------------


def vocabulary_loss(model: GPT, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean of `next_token_loss`, and no rank ever has another's logits."""
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
    def backward(ctx: Any, above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probabilities, own, mine = ctx.saved_tensors
        scale = above / own.numel()
        gradient = probabilities * scale
        gradient.scatter_add_(1, own.unsqueeze(1), (-scale * mine).unsqueeze(1))
        return gradient.to(ctx.dtype), None, None, None
