"""The built-in workloads: GPT-2 as published, and `tiny`, which trains visibly on two CPU cores in seconds."""

from __future__ import annotations

from redline.core.workload import Shape, Workload


def _gpt2(name: str, *, layers: int, heads: int, d_model: int, micro_batch: int, learning_rate: float) -> Workload:
    shape = Shape(layers=layers, heads=heads, d_model=d_model, d_ff=4 * d_model, vocab=50257, sequence=1024)
    return Workload(name=name, shape=shape, tokenizer="gpt2", micro_batch=micro_batch, learning_rate=learning_rate)


# Learning rates: GPT-3's table for the nearest size (arXiv 2005.14165, table 2.1). Micro batches: what an 80 GB card
# holds in plain fp32. `tiny` reads bytes: 256 of them and end of text make 257, a prime, as ugly as 50257.
PRESETS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            name="tiny",
            shape=Shape(layers=2, heads=4, d_model=128, d_ff=512, vocab=257, sequence=256),
            tokenizer="bytes",
            micro_batch=4,
            learning_rate=3e-3,
        ),
        _gpt2("gpt2", layers=12, heads=12, d_model=768, micro_batch=16, learning_rate=6e-4),
        _gpt2("gpt2-medium", layers=24, heads=16, d_model=1024, micro_batch=8, learning_rate=3e-4),
        _gpt2("gpt2-large", layers=36, heads=20, d_model=1280, micro_batch=4, learning_rate=2.5e-4),
        _gpt2("gpt2-xl", layers=48, heads=25, d_model=1600, micro_batch=2, learning_rate=2e-4),
    )
}


def default_workload(kind: str) -> str:
    """Return the workload to use on a 'cuda' or a 'cpu' machine if none is named."""
    return "gpt2" if kind == "cuda" else "tiny"
