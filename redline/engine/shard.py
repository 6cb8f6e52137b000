"""How ranks share a step: copies of the model whose gradients are averaged (DDP), or one model cut among them (FSDP2),
and either of them with layers that are cut among the ranks of a tensor group. Stages: `engine/pipeline.py`.

    shared = share(adapter, model, loss_of, plan=plan, ranks=ranks, device=device)     # outermost around the loss
    with shared.piece(last=False): shared.loss_of(*batch).backward()                   # `fsdp` reduces in every piece

Both wrap the loss and not the model, so that parameters keep their names and the model its class: `WithLoss.forward` is
forward and loss together, which is what the engine calls. Gradients are means over ranks with equal shares of a batch,
so they are the gradients of the mean loss of the whole batch. A tensor group has cut its layers earlier
(`model/tensor_parallel.py`); here the pieces get their weights, and their gradient norms are added up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from redline.core.cut import Cut
from redline.core.plan import Plan
from redline.engine.distributed import Ranks
from redline.engine.parts import Part, is_dtensor
from redline.model.adapter import DTYPES, Adapter, LossOf

Pieces = Sequence[tuple[Any, float]]
"""The pieces of a batch, each with its share of the whole."""


class WithLoss(nn.Module):
    """Forward and loss as a module, since DDP and FSDP hook into a module's forward."""

    def __init__(self, model: nn.Module, loss_of: LossOf) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self, *batch: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        return self.loss_of(*batch, **more)


class Shared:
    """A step that is not shared, and the base class for steps that are."""

    elsewhere: Collection[str] = ()
    """Names of the parameters that other ranks hold and of which this rank has no part."""
    cuts: Mapping[str, Cut] = MappingProxyType({})
    """Cuts by name, of the parameters that a tensor group has cut."""
    cut: frozenset[torch.Tensor] = frozenset()
    """The parameters named in `cuts`."""
    tensor_group: ProcessGroup | None = None

    def __init__(self, loss_of: LossOf) -> None:
        self.loss_of = loss_of

    def among(self, group: ProcessGroup, model: nn.Module, cuts: Mapping[str, Cut]) -> Shared:
        """Record that this group has cut the model, and return self."""
        self.cuts, self.tensor_group = cuts, group
        self.cut = frozenset(parameter for name, parameter in model.named_parameters() if name in cuts)
        return self

    def gradients(self, pieces: Pieces, backward: Callable[[Any, float], torch.Tensor]) -> torch.Tensor:
        """Add up the gradients of a batch's pieces; `backward` adds those of one piece and returns its share of the
        loss. Returns the loss; on a rank that does not compute it, the value means nothing before `told`."""
        losses = []
        for number, (piece, share) in enumerate(pieces, 1):
            with self.piece(last=number == len(pieces)):
                losses.append(backward(piece, share))
        self.finish()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def finish(self) -> None:
        """Average the gradients that are not averaged yet, after the last backward pass of an update."""

    def share_figures(self, figures: torch.Tensor) -> torch.Tensor:
        """Return losses and norms as known to the ranks that computed them; once per cycle, as it may be collective."""
        return figures

    def clip(self, parameters: Iterable[torch.Tensor], most: float) -> torch.Tensor:
        """Scale gradients down to a norm of at most `most` over all ranks; return the norm they had."""
        moved = [parameter for parameter in parameters if parameter.grad is not None]
        norm = self.norm(moved)
        for alike in kinds_of(moved):
            nn.utils.clip_grads_with_norm_(alike, most, norm)
        return norm

    def norm(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of the gradients of the whole model."""
        norm = norm_of(parameter for parameter in parameters if parameter not in self.cut)
        if self.tensor_group is not None:  # its ranks have equal gradients of what is not cut: these count once
            square = norm_of(parameter for parameter in parameters if parameter in self.cut).square()
            dist.all_reduce(square, group=self.tensor_group)
            norm = (norm.square() + square).sqrt()
        return norm

    def whole_model(self, model: nn.Module) -> nn.Module:
        """Return a module from tokens to logits, for calls outside the step. All ranks must call it together."""
        return model

    def piece(self, last: bool) -> AbstractContextManager[object]:
        """Context for the forward and backward pass of one piece of the batch."""
        return nullcontext()

    def whole(self) -> AbstractContextManager[object]:
        """Context for calling the model outside the step, to validate or to sample."""
        return nullcontext()


class Replicated(Shared):
    """Every rank holds the whole model (DDP). Gradients are averaged in buckets during the backward pass."""

    def __init__(self, adapter: Adapter, model: nn.Module, loss_of: LossOf, ranks: Ranks, device: torch.device) -> None:
        # Batch norm's averages are broadcast from rank 0 at every step; other buffers, such as a causal mask, never
        # change. torch has renamed the option.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {buffers: bool(adapter.state(model))}
        self.ddp = DistributedDataParallel(
            WithLoss(model, loss_of),
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=None if ranks.layout.is_plain else ranks.data_mesh.get_group(),
            gradient_as_bucket_view=True,  # gradients live in the buckets: no second copy of them
            **options,
        )
        super().__init__(self.ddp)

    def piece(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self.ddp.no_sync()


class Sharded(Shared):
    """Every rank holds its rows of each tensor, of its gradient and of its optimizer state (FSDP2). `fsdp` gathers a
    block's weights before the block runs, frees them after it, and reduce-scatters its gradients in every backward
    pass. `fsdp-keep` trades memory for traffic: weights stay gathered until the backward pass, and whole gradients are
    added up until the last piece, where they are reduce-scattered once. `fsdp-whole` does not go by blocks: all weights
    are gathered before the first piece and stay gathered until the last piece's backward pass. It leaves vectors and
    scalars whole on every rank: they are most of a model's tensors and next to none of its elements, and FSDP2's
    overhead is per tensor."""

    def __init__(
        self,
        adapter: Adapter,
        model: nn.Module,
        loss_of: LossOf,
        plan: Plan,
        ranks: Ranks,
        device: torch.device,
        cuts: Mapping[str, Cut],
    ) -> None:
        from torch.distributed.fsdp import (
            FSDPModule,
            MixedPrecisionPolicy,
            fully_shard,
        )  # slow to import, and needed by ranks only

        mesh, self.way, self.ranks = ranks.data_mesh, plan.parallel, ranks
        policy = MixedPrecisionPolicy()
        if plan.autocast == "bf16":
            # Weights are gathered in 16 bits, so autocast has nothing to cast in them. It stays on for what it keeps in
            # fp32, norms and softmax. Inputs keep their dtype: the plan decides what flows between blocks.
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        for block in adapter.blocks(model) if self.way != "fsdp-whole" else ():
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self.way == "fsdp")
        # The root holds embedding, last norm and head, or all. The backward pass begins with it, so it stays gathered.
        root = WithLoss(model, loss_of)
        left_out = {one for one in root.parameters() if one.dim() < 2} if self.way == "fsdp-whole" else set()
        for tensor in (*left_out, *root.buffers()):
            if not tensor.is_meta:  # FSDP2 moves only what it cuts and its modules' buffers
                tensor.data = tensor.to(device)
        fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=left_out)
        if any(parameter.is_meta for parameter in root.parameters()):
            root.to_empty(device=device)
            fill(adapter, model, cuts)
        assert isinstance(root, FSDPModule)  # `fully_shard` has changed its class
        self.root = root
        self.uncut = [parameter for parameter in root.parameters() if not is_dtensor(parameter)]
        super().__init__(root)

    def piece(self, last: bool) -> AbstractContextManager[object]:
        if self.way == "fsdp":  # replicas average their accumulated gradients once, between nodes
            self.root.set_requires_all_reduce(last)
        else:
            self.root.set_requires_gradient_sync(last)
        if self.way == "fsdp-whole":
            self.root.set_reshard_after_backward(last)  # the next piece uses the same weights
            self.root.unshard()  # in the forward pass FSDP2 would keep what it sent until the pass is over
        return nullcontext()

    def finish(self) -> None:
        moved = [parameter for parameter in self.uncut if parameter.grad is not None]
        if not moved or self.ranks.layout.data == 1:
            return
        means = self.ranks.mean(torch.cat([one.grad.flatten() for one in moved if one.grad is not None]))
        for parameter, mean in zip(moved, means.split([one.numel() for one in moved]), strict=True):
            parameter.grad = mean.view_as(parameter)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather the root's weights for code that calls the model itself; blocks gather their own. A forward without a
        backward leaves weights gathered, so all are freed at the end: otherwise listing parameters would return
        gathered ones."""
        from torch.distributed.fsdp import FSDPModule

        self.root.unshard()
        try:
            yield
        finally:
            for module in self.root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def share(
    adapter: Adapter,
    model: nn.Module,
    loss_of: LossOf,
    *,
    plan: Plan,
    ranks: Ranks,
    device: torch.device,
    cuts: Mapping[str, Cut],
) -> Shared:
    """Wrap the loss as the plan shares the step; a model on 'meta' gets its memory and weights. `cuts`: how a tensor
    group has cut each parameter of such a model."""
    if not plan.parallel.startswith("fsdp") and any(parameter.is_meta for parameter in model.parameters()):
        give_memory(model, device)
        fill(adapter, model, cuts)
    if plan.parallel == "none":
        shared = Shared(loss_of)
    elif plan.parallel == "ddp":
        shared = Replicated(adapter, model, loss_of, ranks, device)
    else:
        shared = Sharded(adapter, model, loss_of, plan, ranks, device, cuts)
    return shared.among(ranks.mesh.get_group("tp"), model, cuts) if cuts else shared


def autocast_of(plan: Plan, device: torch.device) -> torch.autocast:
    """Return the plan's autocast context, which does nothing if the plan has none."""
    dtype = DTYPES.get(plan.autocast or "")
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def is_cut(plan: Plan) -> bool:
    """True if no rank stores a whole model: it is built before it has device memory, saved in parts and, except for
    `fsdp-whole`, compiled block by block."""
    return plan.tensor_parallel or is_pipelined(plan) or plan.parallel.startswith("fsdp")


def is_pipelined(plan: Plan) -> bool:
    return plan.pipeline != "none"


# --- tensors that are cut ---------------------------------------------------------------------------------------------


@torch.no_grad()
def put(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor into one of which this rank may hold only a part."""
    if isinstance(target, Part):
        target.fill_from(whole)
        return
    if is_dtensor(target):
        from torch.distributed.tensor import distribute_tensor

        there = whole.to(target.device, target.dtype)
        whole = distribute_tensor(there, target.device_mesh, target.placements, src_data_rank=None)  # no communication
    target.copy_(whole)


@torch.no_grad()
def fill(adapter: Adapter, model: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Draw the initial weights as one process does, one tensor at a time: no rank ever holds the whole model."""
    adapter.fill_buffers(model)
    for name, parameter in model.named_parameters():
        cut = cuts.get(name)
        whole = torch.empty(
            parameter.shape if cut is None else cut.shape, dtype=parameter.dtype, device=parameter.device
        )
        adapter.draw(model, name, whole)
        put(parameter, whole if cut is None else piece_of(whole, cut))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor that FSDP has cut, on every rank; all ranks must call this together."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Allocate the model's memory. torch's `to_empty` alone would allocate a tied weight once for each name."""
    first: dict[torch.Tensor, str] = {}
    again = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            again[name] = first[parameter]
    model.to_empty(device=device)
    for name, other in again.items():
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, model.get_parameter(other))


def piece_of(whole: torch.Tensor, cut: Cut) -> torch.Tensor:
    return torch.cat([whole.narrow(cut.dim, run.there, run.length) for run in cut.runs], dim=cut.dim)


def norm_of(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients together, over the ranks among which FSDP has cut them."""
    moved = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [whole(nn.utils.get_total_norm(alike)) for alike in kinds_of(moved) or [[]]]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def kinds_of(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Separate tensors that FSDP has cut from the others: torch's multi-tensor functions accept one kind only."""
    kinds: dict[bool, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(is_dtensor(tensor), []).append(tensor)
    return list(kinds.values())
