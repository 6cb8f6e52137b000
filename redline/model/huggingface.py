"""GPT-2 weights to and from Hugging Face's layout, as plain dicts of tensors.

    transformers_model.load_state_dict(to_huggingface(model))
    from_huggingface(model, transformers_model.state_dict())

Hugging Face stores the linear weights of the blocks transposed (Conv1D) and under a `transformer.` prefix; otherwise
the names agree. Exported weights have the published number of vocabulary rows, whatever the model was padded to.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from redline.core.errors import UserError
from redline.model.gpt import GPT, unpadded

_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def to_huggingface(model: GPT) -> dict[str, torch.Tensor]:
    state = {
        _their_name(name): _turn(name, unpadded(model, name, tensor.detach()))
        for name, tensor in model.named_parameters()
    }
    state.setdefault("lm_head.weight", state["transformer.wte.weight"])  # tied: named_parameters lists it once
    return state


@torch.no_grad()
def from_huggingface(model: GPT, state: Mapping[str, torch.Tensor]) -> None:
    """Copy Hugging Face weights into our model, in place; padded rows become zero."""
    for name, parameter in model.named_parameters():
        theirs = _turn(name, _find(state, _their_name(name)))
        ours = unpadded(model, name, parameter)
        if theirs.shape != ours.shape:
            raise UserError(
                f"{name} is {tuple(theirs.shape)} in the file and {tuple(ours.shape)} in the model",
                "the weights belong to another shape",
                "choose the preset the weights were made for",
            )
        parameter.zero_()
        ours.copy_(theirs)


def _find(state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    # Weights saved without the wrapper lack the prefix; weights saved tied may lack the head.
    names = (name, "transformer.wte.weight") if name == "lm_head.weight" else (name,)
    for key in (key for full in names for key in (full, full.removeprefix("transformer."))):
        if key in state:
            return state[key]
    raise UserError(
        f"the weights have no {name}", "every tensor of GPT-2 must be there", "export the whole model's state_dict"
    )


def _their_name(name: str) -> str:
    return name if name.startswith("lm_head") else f"transformer.{name}"


def _turn(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t() if name.endswith(_TRANSPOSED) else tensor
