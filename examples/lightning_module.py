"""The model of own_loop.py as a LightningModule: its optimizer and its precision come from the recipe.

    python examples/lightning_module.py

Lightning runs the loop, the autocast and, for fp16, the loss scaling. The gradients are clipped in a hook, because
Lightning's own option refuses fused optimizers.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from own_loop import RUNGS, SEQUENCES, TOKENS, build_loader, build_model, next_token_loss

import redline

PRECISION: dict[str | None, Any] = {None: "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class LitLM(L.LightningModule):
    def __init__(self, recipe: str | tuple[str, ...]) -> None:
        super().__init__()
        device = "cuda" if torch.cuda.is_available() else "cpu"  # where Lightning will run it: the meter needs it now
        self.prepared = redline.prepare(build_model(), recipe, learning_rate=1e-3, device=device)
        self.model = self.prepared.model
        self.meter = redline.Meter(tokens_per_step=SEQUENCES * TOKENS, model=self.model)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = next_token_loss(self.model, batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.prepared.optimizer

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.meter.step()


def main(steps: int = 30, recipe: str | tuple[str, ...] = RUNGS) -> list[float]:
    module = LitLM(recipe)
    trainer = L.Trainer(
        max_epochs=1,
        precision=PRECISION[module.prepared.plan.autocast],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, build_loader(steps))
    print(module.meter)
    return [loss.item() for loss in module.losses]


if __name__ == "__main__":
    found = main()
    print(f"loss {found[0]:.3f} -> {found[-1]:.3f}")
