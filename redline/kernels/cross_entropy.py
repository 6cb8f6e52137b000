"""Cross-entropy that turns the logits into their own gradient: one kernel, no fp32 copy, no second tensor.

    losses = cross_entropy_(logits, targets, vocab)      # losses [N] in fp32; logits [N, rows] are now the gradient

A row of bf16 logits that fits in registers is read once: maximum, sum of exponentials, and softmax minus one-hot
written over it. Other rows (longer than 51,200, or of another dtype) are read a second time for the gradient. It is the
gradient of the row's own loss: a caller that takes a mean scales later results instead, whose rows are shorter.
Unscaled, it lies in [-1, 1], which fp16 holds without a loss scale.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("redline::cross_entropy_", mutates_args=("logits",))
def cross_entropy_(logits: torch.Tensor, targets: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return the losses, and overwrite the logits with their gradient. Columns from `vocab` on are padding: no
    probability, no gradient."""
    if logits.is_cuda:
        from redline.kernels.cross_entropy_triton import launch  # needs Triton, which a CPU build of torch lacks

        return launch(logits, targets, vocab)
    return plain_cross_entropy_(logits, targets, vocab)


@cross_entropy_.register_fake
def _(logits: torch.Tensor, targets: torch.Tensor, vocab: int) -> torch.Tensor:
    return logits.new_empty(logits.size(0), dtype=torch.float32)


def plain_cross_entropy_(logits: torch.Tensor, targets: torch.Tensor, vocab: int) -> torch.Tensor:
    """What the kernel computes, in torch."""
    log_probabilities = logits[:, :vocab].float().log_softmax(dim=-1)
    labels = targets.unsqueeze(1)
    losses = -log_probabilities.gather(1, labels).squeeze(1)
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(1, labels, gradient.new_full((), -1.0).expand_as(labels))
    logits[:, :vocab] = gradient
    logits[:, vocab:] = 0
    return losses


OCTAVES = 15
GRADIENT_FACTOR = 2.0**OCTAVES
"""Scale of the gradient in e5m2. The gradient lies in [-1, 1], and the largest e5m2 number is 1.75 x 2^15: nothing
overflows, and probabilities are kept down to 2^-31. Dividing by the mean's N before the cast would lose nearly all of
it (docs/fp8.md)."""


@torch.library.custom_op("redline::cross_entropy_narrow", mutates_args=())
def cross_entropy_narrow(logits: torch.Tensor, targets: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses, and GRADIENT_FACTOR times the gradient in e5m2 [N, rows]; the logits do not change."""
    if logits.is_cuda:
        from redline.kernels.cross_entropy_triton import launch  # needs Triton, which a CPU build of torch lacks

        narrow = torch.empty_like(logits, dtype=torch.float8_e5m2, memory_format=torch.contiguous_format)
        return launch(logits, targets, vocab, narrow, OCTAVES), narrow
    return plain_cross_entropy_narrow(logits, targets, vocab)


@cross_entropy_narrow.register_fake
def _(logits: torch.Tensor, targets: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.new_empty(logits.size(0), dtype=torch.float32), logits.new_empty(
        logits.shape, dtype=torch.float8_e5m2
    )


def plain_cross_entropy_narrow(
    logits: torch.Tensor, targets: torch.Tensor, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    gradient = logits.float()  # a copy, unless the logits are fp32 already
    gradient = gradient.clone() if gradient is logits else gradient
    losses = plain_cross_entropy_(gradient, targets, vocab)
    return losses, (gradient * GRADIENT_FACTOR).to(torch.float8_e5m2)
