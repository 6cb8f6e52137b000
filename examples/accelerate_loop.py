"""The loop of own_loop.py inside Hugging Face's accelerate: model, optimizer and precision come from the recipe.

    python examples/accelerate_loop.py          # or: accelerate launch examples/accelerate_loop.py

The recipe is applied to the model first; accelerate then gets the prepared model and optimizer, and does the autocast
and, for fp16, the loss scaling itself.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from own_loop import RUNGS, SEQUENCES, TOKENS, build_loader, build_model, next_token_loss

import redline


def main(steps: int = 30, recipe: str | tuple[str, ...] = RUNGS) -> list[float]:
    on_gpu = torch.cuda.is_available()
    prepared = redline.prepare(build_model(), recipe, learning_rate=1e-3, device="cuda" if on_gpu else "cpu")
    accelerator = Accelerator(mixed_precision=prepared.plan.autocast or "no", cpu=not on_gpu)
    model, optimizer, loader = accelerator.prepare(prepared.model, prepared.optimizer, build_loader(steps))
    meter = redline.Meter(tokens_per_step=SEQUENCES * TOKENS, model=prepared.model)
    losses = []
    for batch in meter.data(loader):
        loss = next_token_loss(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        meter.step()
    accelerator.print(meter)
    return [loss.item() for loss in losses]


if __name__ == "__main__":
    found = main()
    print(f"loss {found[0]:.3f} -> {found[-1]:.3f}")
