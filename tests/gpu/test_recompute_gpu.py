"""Blocks that are computed again, compiled: the gradients of those that are kept, and a peak without them."""

from __future__ import annotations

import pytest
import torch

from redline.core.workload import Shape
from redline.model.gpt import GPT, initialise
from redline.model.loss import next_token_loss
from redline.model.tuned import tune_layers

pytestmark = pytest.mark.gpu
SHAPE = Shape(layers=12, heads=4, d_model=256, d_ff=1024, vocab=512, sequence=512)
BATCH = 32
STREAM = BATCH * SHAPE.sequence * SHAPE.d_model * 2  # bytes


@pytest.mark.parametrize("products", ["torch", "tuned"])
@pytest.mark.parametrize("attention", ["cudnn", "packed-cudnn"])
def test_compiled_blocks_are_computed_again(attention: str, products: str) -> None:
    tokens = torch.randint(SHAPE.vocab, (BATCH, SHAPE.sequence), device="cuda")
    found, peaks = {}, {}
    for checkpointing in ("none", "full"):
        with torch.device("cuda"):
            model = GPT(
                SHAPE,
                attention=attention,
                residual=torch.bfloat16,
                fused=torch.bfloat16,
                checkpointing=checkpointing,
            )
        initialise(model, seed=3)
        if products == "tuned":
            tune_layers(model.h, torch.bfloat16, fused=False)
        torch.compiler.reset()
        run = torch.compile(lambda tokens, model=model: next_token_loss(model(tokens), tokens))
        for _ in range(2):  # the first one compiles and tunes, which takes memory too
            model.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(tokens)
            loss.backward()
        peaks[checkpointing] = torch.cuda.max_memory_allocated() - before
        found[checkpointing] = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        del model, run
    # A block keeps about 16 streams, of which one stays; one block at a time has them all.
    assert peaks["none"] - peaks["full"] > 10 * (SHAPE.layers - 2) * STREAM, peaks
    for name, wanted in found["none"].items():
        assert float((found["full"][name] - wanted).norm() / wanted.norm()) < 2e-2, name
