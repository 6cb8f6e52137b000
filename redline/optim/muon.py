"""Muon for the layers' matrices, AdamW for embedding, head and vectors, as one optimizer.

    build_muon(model, learning_rate=6e-4, weight_decay=0.1)

Both are torch's. Muon makes the momentum's singular values nearly equal before it is applied (Keller Jordan, 2024), so
every direction of a matrix learns at one speed. Its update is scaled to the size of AdamW's (arXiv 2502.16982): one
learning rate and one schedule serve both. Queries, keys and values are one matrix here and are treated as one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from redline.core.errors import UserError
from redline.optim.adamw import BETAS
from redline.optim.groups import Groups, decay_groups, layer_matrices
from redline.optim.per_tensor import Closure, loss_of


class MuonAndAdamW(torch.optim.Optimizer):
    """The first group is Muon's, the others are AdamW's."""

    def __init__(self, groups: Groups, *, lr: float) -> None:
        self.muon = torch.optim.Muon(groups[:1], lr=lr, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(groups[1:], lr=lr, betas=BETAS, fused=True)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = loss_of(closure)
        # Passed on at every step, since loading a state dict replaces groups and state.
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self.muon.state = self.adamw.state = self.state
        self.muon.step()
        self.adamw.step()
        return loss


def build_muon(model: nn.Module, *, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    inside = layer_matrices(model)
    if not inside:
        raise UserError(
            "muon found no matrix of a layer",
            "it looks for matrices inside an nn.ModuleList, and leaves embedding and head to AdamW",
            "keep the model's layers in an nn.ModuleList, or use adamw-fused",
        )
    of_muon = set(inside)
    rest = decay_groups(model, weight_decay)
    for group in rest:
        group["params"] = [parameter for parameter in group["params"] if parameter not in of_muon]
    groups = [{"params": inside, "weight_decay": weight_decay}, *rest]
    return MuonAndAdamW([group for group in groups if group["params"]], lr=learning_rate)
