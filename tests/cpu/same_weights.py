"""How far two checkpoints are apart: ranks against one process.

    differences(ours, theirs)        -> {"model.wte.weight": 2e-7, "optimizer.wte.weight.exp_avg": 3e-9, ...}

All but the biases of keys. What is added to every key adds the same to all scores of a query, and softmax does not see
it: their gradient is zero, and what is computed is its rounding. AdamW divides that by its own size, so that these
numbers may differ by a good part of the learning rate while nothing that the model computes does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

FUSED_BIAS = "attn.c_attn.bias"  # of queries, keys and values, a third each
ROUNDING = 1e-9  # of the squares of gradients: in fp32 they are below 1e-14 of the other thirds'


def differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Of every weight and every moment, the largest."""
    assert set(ours) == set(theirs)
    found = {}
    for name in ours:
        apart = (ours[name].float() - theirs[name].float()).abs()
        if name.startswith("model.") and name.endswith(FUSED_BIAS) and keys_are_rounding(name, ours, theirs):
            queries, _, values = apart.chunk(3)
            apart = torch.cat([queries, values])
        found[name] = apart.max().item()
    return found


def keys_are_rounding(name: str, *runs: Mapping[str, torch.Tensor]) -> bool:
    (squares,) = (key for key in runs[0] if name.removeprefix("model.") in key and key.endswith("exp_avg_sq"))
    for run in runs:
        queries, keys, values = run[squares].float().chunk(3)
        if keys.max() > ROUNDING * max(queries.max(), values.max()):
            return False
    return True
