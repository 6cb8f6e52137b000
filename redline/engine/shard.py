"""How ranks share a step: copies of the model whose gradients are averaged (DDP), or one model cut among them (FSDP2).

    shared = share(adapter, model, loss_of, plan=plan, ranks=ranks, device=device)     # last of what wraps the loss
    with shared.piece(last=False): shared.loss_of(*batch).backward()                   # reduced on the last piece only

Both wrap the loss and not the model, so that parameters keep their names and the model its class: `WithLoss.forward` is
forward and loss together, which is what the engine calls. Gradients are means over ranks, whose shares of a batch are
equal, so they are the gradients of the mean loss of the whole batch. Tensor and pipeline parallel are not here yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from redline.core.plan import Plan
from redline.engine.distributed import Ranks
from redline.model.adapter import Adapter, LossOf


class WithLoss(nn.Module):
    """Forward and loss as a module, since DDP and FSDP hook themselves into a module's forward."""

    def __init__(self, model: nn.Module, loss_of: LossOf) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return self.loss_of(*batch)


class Shared:
    """A step that nobody shares; the other ways are made of it."""

    def __init__(self, loss_of: LossOf) -> None:
        self.loss_of = loss_of

    def piece(self, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a piece of the batch."""
        return nullcontext()

    def whole(self) -> AbstractContextManager[object]:
        """Around whatever calls the model beside the step: a validation, a sample."""
        return nullcontext()


class Replicated(Shared):
    """Every rank holds the model. Gradients are averaged in buckets, while the backward pass goes on."""

    def __init__(self, adapter: Adapter, model: nn.Module, loss_of: LossOf, device: torch.device) -> None:
        # Batch norm's averages are rank 0's at every step; a causal mask never changes. The option was renamed.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {buffers: bool(adapter.state(model))}
        self.ddp = DistributedDataParallel(
            WithLoss(model, loss_of),
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # gradients lie in the buckets: no second copy of them
            **options,
        )
        super().__init__(self.ddp)

    def piece(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self.ddp.no_sync()


class Sharded(Shared):
    """Every rank holds its rows of each tensor, of its gradient and of its optimizer state. A block's weights are
    gathered before it runs and given back after it."""

    def __init__(
        self, adapter: Adapter, model: nn.Module, loss_of: LossOf, plan: Plan, ranks: Ranks, device: torch.device
    ) -> None:
        mesh = init_device_mesh(device.type, (ranks.count,), mesh_dim_names=("dp",))
        policy = MixedPrecisionPolicy()
        if plan.autocast == "bf16":
            # Weights are gathered in 16 bits and autocast finds nothing to cast in them; it stays for what it keeps in
            # fp32, norms and softmax. Inputs keep their type: what flows between blocks is what the plan says.
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        for block in adapter.blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=plan.parallel == "fsdp")
        # The root holds embedding, last norm and head. The backward pass begins with them: they stay gathered.
        root = WithLoss(model, loss_of)
        fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        if any(parameter.is_meta for parameter in root.parameters()):
            root.to_empty(device=device)
            fill(adapter, model)
        assert isinstance(root, FSDPModule)  # it has become one, in place
        self.root = root
        super().__init__(root)

    def piece(self, last: bool) -> AbstractContextManager[object]:
        self.root.set_requires_gradient_sync(last)
        return nullcontext()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The root's weights are there for whoever calls the model itself; blocks see to theirs. A forward without a
        backward leaves weights gathered, and whoever lists the parameters afterwards would find those."""
        self.root.unshard()
        try:
            yield
        finally:
            for module in self.root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def share(
    adapter: Adapter, model: nn.Module, loss_of: LossOf, *, plan: Plan, ranks: Ranks, device: torch.device
) -> Shared:
    if plan.parallel == "none":
        return Shared(loss_of)
    if plan.parallel == "ddp":
        return Replicated(adapter, model, loss_of, device)
    return Sharded(adapter, model, loss_of, plan, ranks, device)


def is_sharded(plan: Plan) -> bool:
    return plan.parallel.startswith("fsdp")


# --- tensors that are cut ---------------------------------------------------------------------------------------------


@torch.no_grad()
def put(target: torch.Tensor, whole: torch.Tensor) -> None:
    """A whole tensor into one of which this rank may hold a part only."""
    if isinstance(target, DTensor):
        there = whole.to(target.device, target.dtype)
        whole = distribute_tensor(there, target.device_mesh, target.placements, src_data_rank=None)  # no traffic
    target.copy_(whole)


@torch.no_grad()
def fill(adapter: Adapter, model: nn.Module) -> None:
    """The initial weights, as one process draws them, a tensor at a time: no rank ever holds the whole model."""
    adapter.fill_buffers(model)
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        adapter.draw(model, name, whole)
        put(parameter, whole)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is cut, put together again on every rank: all of them must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip(parameters: Iterable[torch.Tensor], most: float) -> torch.Tensor:
    """Scales gradients down to a norm of `most` over all ranks; returns the norm they had."""
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    norm = whole(norm)
    nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return norm
