"""A trained GPT as a Hugging Face folder and back: config.json and model.safetensors, with an unpadded vocabulary.

    export_huggingface(model, Path("out"));  transformers.GPT2LMHeadModel.from_pretrained("out")
    load_weights(adapter, model, Path("gpt2-folder"))

The folder appears whole or not at all. Only safetensors are read: a pickle from the network can run anything.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from redline.core.errors import UserError
from redline.model.adapter import Adapter
from redline.model.gpt import GPT, INIT_STD
from redline.model.huggingface import from_huggingface, to_huggingface

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"


def export_huggingface(model: nn.Module, folder: Path, *, end_of_text: int | None = None) -> None:
    """Export the built-in GPT, or a model that already is transformers' own."""
    if folder.exists():
        raise UserError(f"{folder} exists already", "an export never overwrites", "choose another folder")
    draft = folder.with_name(folder.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        if isinstance(model, GPT):
            write_gpt2(model, draft, end_of_text)
        else:
            with no_bar():
                model.save_pretrained(draft)  # type: ignore[operator]
        os.replace(draft, folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise UserError(
            f"cannot write {folder}", error.strerror or str(error), "choose a folder with room that you may write to"
        ) from error


@contextmanager
def no_bar() -> Iterator[None]:
    """Hide transformers' progress bar, which would appear among redline's output."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def write_gpt2(model: GPT, folder: Path, end_of_text: int | None) -> None:
    save_file(exported_weights(model), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config_of(model, end_of_text), indent=2) + "\n", encoding="utf-8")


def exported_weights(model: GPT) -> dict[str, torch.Tensor]:
    """Return contiguous weights on the host. As in transformers, a tied head is left out: the config says so."""
    weights = {name: tensor.cpu().contiguous() for name, tensor in to_huggingface(model).items()}
    if is_tied(model):
        del weights["lm_head.weight"]
    return weights


def is_tied(model: GPT) -> bool:
    return model.lm_head.weight is model.wte.weight


def config_of(model: GPT, end_of_text: int | None) -> dict[str, Any]:
    shape = model.shape
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": shape.vocab,
        "n_positions": shape.positions_count,
        "n_embd": shape.d_model,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": shape.d_ff,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": INIT_STD,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": is_tied(model),
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }


def load_weights(adapter: Adapter, model: nn.Module, folder: Path) -> None:
    """Load the weights of a Hugging Face folder into a model of the same shape, in place. Padded rows stay zero."""
    weights = read_weights(folder)
    if isinstance(model, GPT):
        from_huggingface(model, weights)
        return
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            ours, theirs = adapter.unpadded(model, name, parameter), weights.get(name)
            if theirs is None or theirs.shape != ours.shape:
                found = "is missing" if theirs is None else f"is {tuple(theirs.shape)}, not {tuple(ours.shape)}"
                raise UserError(
                    f"{folder} does not fit the model",
                    f"its {name} {found}",
                    "point at the folder that belongs to this config",
                )
            ours.copy_(theirs)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read the weights from the folder's one file, or from all the files of a large model."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        why = "its weights are pickled, and a pickle can run anything" if pickled else f"it has no {WEIGHTS_FILE}"
        raise UserError(f"cannot import {folder}", why, "save it with safetensors: model.save_pretrained(folder)")
    weights: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            weights |= load_file(path)
        except Exception as error:  # the library's own class is not public; any error means a damaged file
            raise UserError(f"{path} cannot be read", str(error), "download or export it again") from error
    return weights
