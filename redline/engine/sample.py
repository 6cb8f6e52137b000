"""Samples text from a model, a token at a time. Plain and slow: every token takes the whole context through the model.

sample(model, ids, shape=shape, count=100, temperature=0.8, top_k=50, seed=0) -> ids of the continuation
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.core.errors import UserError
from redline.core.workload import Shape

# Used whatever backend a step has pinned: cuDNN's kernel rejects a context of one token, and would be planned again for
# each length.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@torch.no_grad()
@sdpa_kernel(KERNELS)
def sample(
    model: nn.Module,
    prompt: list[int],
    *,
    shape: Shape,
    count: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    end_of_text: int | None = None,
    known: int | None = None,
) -> list[int]:
    """Return up to `count` tokens after the prompt; `end_of_text` stops early. Temperature 0 always picks the
    likeliest. `known`: the size of the tokenizer's vocabulary, where the model's may be larger; no text has trained the
    other tokens."""
    check_choices(count, temperature, top_k)
    device, choices = next(model.parameters()).device, min(shape.vocab, shape.vocab if known is None else known)
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([prompt], device=device)
    for _ in range(count):
        output = model(tokens[:, -shape.sequence :])
        logits = getattr(output, "logits", output)  # transformers wraps its logits
        chosen = choose(logits[0, -1, :choices].float(), temperature, top_k, generator)
        if chosen.item() == end_of_text:
            break
        tokens = torch.cat((tokens, chosen.view(1, 1)), dim=1)
    return tokens[0, len(prompt) :].tolist()


def choose(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax()
    if top_k is not None:
        least = logits.topk(min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)


def check_choices(count: int, temperature: float, top_k: int | None) -> None:
    if count < 1 or (top_k is not None and top_k < 1):
        raise UserError("nothing to sample", "counts of tokens start at 1", "set --tokens and --top-k to 1 or more")
    if not 0 <= temperature < float("inf"):
        raise UserError(f"--temperature is {temperature:g}", "it divides the logits", "set it to 0 (greedy) or more")
