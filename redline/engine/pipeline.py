"""Pipeline parallelism: every rank holds a stage of the model, and the pieces of a batch pass through all stages.

    model = adapter.build_stage(plan, layers_of(stage, stages=2, layers=12))           # on 'meta'
    shared = Pipelined(adapter, model, loss_of, plan=plan, ranks=ranks, device=device, cuts={})
    loss = shared.gradients(pieces, backward);  loss = shared.share_figures(loss)  # the last stage knows the loss

torch.distributed.pipelining transfers activations and gradients between stages and runs the schedule; a piece of the
gradient accumulation is a micro batch of the pipeline. This module adds what torch leaves open. A tied head lies on the
last stage and its embedding on the first: their gradients are added up after every batch, so that both receive the same
updates, bit for bit. The gradient norm covers all stages and counts the tied weight once. Validation and sampling go
forward through the stages one batch at a time, without a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from redline.core.cut import Cut
from redline.core.plan import Plan
from redline.engine.distributed import Ranks
from redline.engine.parts import is_dtensor
from redline.engine.shard import Pieces, Shared, WithLoss, autocast_of, share
from redline.model.adapter import DTYPES, Adapter, LossOf
from redline.model.stage import Stage, layers_of

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle


def build_stage(adapter: Adapter, plan: Plan, ranks: Ranks) -> nn.Module:
    """Build this rank's stage, without memory."""
    layers = layers_of(ranks.place.pipeline, stages=ranks.layout.pipeline, layers=adapter.workload.decoder.layers)
    return adapter.build_stage(plan, layers)


class Pipelined(Shared):
    """Ranks that take different data share a stage as they would a whole model, as `plan.parallel` says."""

    def __init__(
        self,
        adapter: Adapter,
        model: nn.Module,
        loss_of: LossOf,
        *,
        plan: Plan,
        ranks: Ranks,
        device: torch.device,
        cuts: Mapping[str, Cut],
    ) -> None:
        assert isinstance(model, Stage), f"{type(model).__name__} is no stage"
        self.adapter, self.model, self.plan, self.device = adapter, model, plan, device
        self.elsewhere = model.elsewhere
        self.group = ranks.mesh["pp"].get_group()
        self.number, self.count = ranks.place.pipeline, ranks.layout.pipeline
        self.ends = ends_of_pipelines(ranks) if plan.tied else None
        self._schedules: dict[tuple[int, torch.Size], PipelineScheduleSingle] = {}

        def part(x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
            with autocast_of(plan, device):
                return model.features(x) if targets is None else loss_of(x, targets)

        self.inner = share(adapter, model, part, plan=plan, ranks=ranks, device=device, cuts=cuts)
        self.cuts = self.inner.cuts
        wrapped = self.inner.loss_of
        self.module = wrapped if isinstance(wrapped, nn.Module) else WithLoss(model, part)
        super().__init__(self._loss)

    # --- the step -----------------------------------------------------------------------------------------------------

    def gradients(self, pieces: Pieces, backward: Callable[[Any, float], torch.Tensor]) -> torch.Tensor:
        """Hand all pieces to the schedule, which runs the passes in its own order; `backward` is not used."""
        inputs, targets = self._batch(pieces)
        losses: list[torch.Tensor] = []
        schedule = self._schedule(len(pieces), inputs.shape)
        shares = torch.full((len(pieces),), 1 / len(pieces), device=self.device)  # all pieces have the same size
        # The last stage outputs the loss of a piece; torch's "target" is the piece's share of the batch.
        given: dict[str, Any] = {"target": shares, "targets": targets} if self.model.last else {}
        try:
            schedule.step(*((inputs,) if self.model.first else ()), losses=losses, return_outputs=False, **given)
        except RuntimeError as error:
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None  # torch wraps it in an error about shapes
            raise
        self.inner.finish()
        if self.ends is not None:
            assert self.model.wte.weight.grad is not None
            dist.all_reduce(local(self.model.wte.weight.grad), group=self.ends)
        return torch.cat(losses).detach().sum() if self.model.last else torch.zeros((), device=self.device)

    def _batch(self, pieces: Pieces) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = zip(*(self.adapter.arguments(piece) for piece, _ in pieces), strict=True)
        if len({piece.shape for piece in inputs}) > 1:
            raise ValueError("all pieces of a pipeline's batch have the same size")
        return torch.cat(inputs), torch.cat(targets)

    def _schedule(self, pieces: int, size: torch.Size) -> PipelineScheduleSingle:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # a two-second import

        key = (pieces, size)
        if key not in self._schedules:
            tokens = torch.empty((size[0] // pieces, size[1]), dtype=torch.int64, device="meta")
            stream = self._stream(tokens.shape, "meta").requires_grad_()
            stage = PipelineStage(
                self.module,
                self.number,
                self.count,
                self.device,
                # Shapes are known in advance, so no trial run has to infer them.
                input_args=tokens if self.model.first else stream,
                output_args=torch.empty((), device="meta", requires_grad=True) if self.model.last else stream,
                group=self.group,
            )
            # With fewer pieces than stages no forward waits for a backward: 1F1B would be GPipe, and torch rejects it.
            make = Schedule1F1B if self.plan.pipeline == "1f1b" and pieces >= self.count else ScheduleGPipe
            self._schedules[key] = make(stage, pieces, loss_fn=torch.mul, scale_grads=False)
        return self._schedules[key]

    def _stream(self, size: torch.Size, device: torch.device | str) -> torch.Tensor:
        """Allocate a tensor for what passes between blocks."""
        kind = DTYPES.get(self.plan.residual, torch.float32)
        return torch.empty((*size, self.model.shape.d_model), dtype=kind, device=device)

    def share_figures(self, figures: torch.Tensor) -> torch.Tensor:
        dist.broadcast(figures, group=self.group, group_src=self.count - 1)
        return figures

    def norm(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        copy = self.model.wte.weight if self.model.is_copy else None
        square = self.inner.norm([parameter for parameter in parameters if parameter is not copy]).square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    # --- outside the step ---------------------------------------------------------------------------------------------

    def whole(self) -> Any:
        return self.inner.whole()

    def whole_model(self, model: nn.Module) -> nn.Module:
        return Relay(self)

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the validation loss, without a graph: the last stage computes it, and `told` broadcasts it. A stage
        continues with the next batch once it has passed this one on."""
        with self.inner.piece(last=False):
            x = self.receive(inputs)
            if self.model.last:
                return self.module(x, targets).detach()
            self.send(self.module(x))
        return torch.zeros((), device=self.device)

    def receive(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this stage's input: the tokens, or what the previous stage sends."""
        if self.model.first:
            return tokens
        x = self._stream(tokens.shape, self.device)
        dist.recv(x, group=self.group, group_src=self.number - 1)
        return x.requires_grad_(torch.is_grad_enabled())  # as in the step: a compiled block is not recompiled

    def send(self, x: torch.Tensor) -> None:
        dist.send(x.detach(), group=self.group, group_dst=self.number + 1)


class Relay(nn.Module):
    """The model with the interface of a single process, run on all stages at once: tokens [B, T] -> logits of the last
    token, [B, 1, rows]."""

    def __init__(self, pipelined: Pipelined) -> None:
        super().__init__()
        self.pipelined, self.model = pipelined, pipelined.model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y = self.model(self.pipelined.receive(tokens))
        if not self.model.last:
            self.pipelined.send(y)
            y = torch.empty((len(tokens), 1, self.rows), device=tokens.device)
        return self.pipelined.share_figures(y[:, -1:].float().contiguous())

    @property
    def rows(self) -> int:
        return self.pipelined.plan.vocab_rows(self.model.shape.vocab)


def ends_of_pipelines(ranks: Ranks) -> dist.ProcessGroup | None:
    """Return the process group of this rank's pipeline's first and last stage; None on stages in between. All ranks
    must call this together."""
    pipelines = ranks.mesh.mesh.flatten(1).t().tolist()
    group, _ = dist.new_subgroups_by_enumeration([[stages[0], stages[-1]] for stages in pipelines])
    return group


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor
