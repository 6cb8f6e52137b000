"""Turns what a user names into a shape: a preset, a Hugging Face config, model folder or cached name, a shape file.

    name, shape, origin = resolve_shape("gpt2")
    name, shape, origin = resolve_shape("models/llama/config.json")
    name, shape, origin = resolve_shape("Qwen/Qwen2-0.5B")  # if it is in the local cache
    name, shape, origin = resolve_shape("shape.json")       # {"layers": 12, "heads": 12, ...}: the fields of Shape

Nothing is downloaded and no model code is run; a Python file of the user's own is not read here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from redline.core.errors import UserError, explained, unknown_name
from redline.core.user_code import described
from redline.core.values import to_json
from redline.core.workload import SIZES, Shape
from redline.workloads.hub_cache import find_cached, is_hub_name, not_cached
from redline.workloads.huggingface import change_config, is_config, read_config, shown
from redline.workloads.presets import PRESETS

CONFIG_FILE = "config.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
LONGEST_NAME = 255  # characters of a name that are worth showing
FILE_BYTES = 16 * 1024**2  # a config is kilobytes; weights given by mistake are gigabytes
# Far beyond every model ever trained: a larger number is a typo, and results computed from it would be meaningless. The
# longest context that anyone has claimed is sixteen million tokens.
LARGEST = {
    "layers": 10_000,
    "heads": 4_096,
    "head_dim": 16_384,
    "d_model": 2**20,
    "d_ff": 2**22,
    "vocab": 2**24,
    "sequence": 2**24,
    "max_positions": 2**24,
    "layer_norms": 64,
}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a shape came from, and so in which format a changed one is written back."""

    kind: str
    """'preset', 'huggingface' or 'shape'."""
    text: str
    """For people: 'preset', or the kind and the path."""
    path: Path | None = None
    config: dict[str, Any] | None = None
    """The Hugging Face config as it was read."""
    notes: tuple[str, ...] = ()
    """What the shape cannot express about the model."""


class Resolved(NamedTuple):
    name: str
    shape: Shape
    origin: Origin


def resolve_shape(words: str) -> Resolved:
    if words in PRESETS:
        return Resolved(words, PRESETS[words].decoder, Origin(kind="preset", text="preset", notes=shadowed(words)))
    path = _existing_path(words)
    data = read_json_object(path)
    name = _name_of(words, path)
    if is_config(data):
        shape, notes = read_config(data)
        origin = Origin(kind="huggingface", text=f"Hugging Face config {path}", path=path, config=data, notes=notes)
    else:
        shape, origin = read_shape(data, path), Origin(kind="shape", text=f"shape file {path}", path=path)
    check_sane(shape)
    return Resolved(name, shape, origin)


def shadowed(preset: str) -> tuple[str, ...]:
    """Return a note if a model folder here has the preset's name."""
    if not Path(preset, CONFIG_FILE).is_file():
        return ()
    return (f"{preset} is redline's preset; the model in the folder of that name is ./{preset}",)


def changed_document(resolved: Resolved, shape: Shape) -> dict[str, Any]:
    """Return what to write for a changed shape: a config stays a config, everything else becomes a shape file."""
    if resolved.origin.config is not None:
        return change_config(resolved.origin.config, resolved.shape, shape)
    return shape_fields(shape)


def shape_fields(shape: Shape) -> dict[str, Any]:
    """Return the contents of a shape file: always the sizes, and the other fields that are not the default."""
    defaults = {field.name: field.default for field in dataclasses.fields(Shape)}
    return {name: value for name, value in to_json(shape).items() if name in SIZES or value != defaults[name]}


def read_shape(data: dict[str, Any], path: Path) -> Shape:
    if not set(data) & set(SIZES):
        raise UserError(
            f"{path} is neither a shape nor a Hugging Face config",
            'a config has a "model_type"; a shape has the sizes of a model',
            f"write {', '.join(SIZES)} into it, or point at a config.json",
        )
    return shape_of(data, str(path))


def shape_of(data: Any, where: str) -> Shape:
    """Build a shape from the fields in a file or in what a function returned. `where` names it in error messages."""
    if not isinstance(data, dict):
        raise UserError(
            f"{where} is {described(data)}",
            "a shape is a dict with the sizes of a decoder",
            f"return a dict with {', '.join(SIZES)}",
        )
    names = [field.name for field in dataclasses.fields(Shape)]
    for name in data:
        if name not in names:
            raise unknown_name("field of a shape", name, names)
    missing = [name for name in SIZES if name not in data]
    if missing:
        raise UserError(
            f"{where} has no {', '.join(missing)}",
            "a shape needs all of its sizes, and none is guessed",
            f"add {', '.join(map(shown, missing))} to it",
        )
    _check_flags(data)
    return Shape(**data)


def _check_flags(data: dict[str, Any]) -> None:
    """Check that flags are bools: a "no" in JSON is a string, which Python would take as true."""
    for name, kind in typing.get_type_hints(Shape).items():
        allowed = {bool: (bool,), bool | None: (bool, type(None))}.get(kind)
        if allowed is not None and name in data and not isinstance(data[name], allowed):
            raise UserError(f"{name} is {shown(data[name])}", f"{name} is true or false", "write true or false")


def check_sane(shape: Shape) -> None:
    for name, most in LARGEST.items():
        value = getattr(shape, name)
        if value is not None and value > most:
            raise UserError(
                f"{name} is {value:,}",
                f"no model comes near it, so this is probably a typo (the most is {most:,})",
                f"check {name}",
            )


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        with explained(f"cannot read {path}", "check the path"):
            if path.exists() and not path.is_file():
                raise UserError(f"cannot read {path}", "it is not a regular file", "point at a config.json or a shape")
            if path.suffix in WEIGHTS:
                raise UserError(
                    f"{path} holds weights",
                    f"the model is described by the {CONFIG_FILE} beside them",
                    f"point at the folder: {path.parent}",
                )
            if path.stat().st_size > FILE_BYTES:
                raise UserError(
                    f"{path} is too large for a config", "it has more than 16 MiB", f"point at a {CONFIG_FILE} instead"
                )
            data = json.loads(path.read_text(encoding="utf-8-sig"))  # editors on Windows write a byte order mark
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, or a number too long to parse
        raise UserError(f"{path} is not JSON", str(error) or "too deep", "point at a config.json or a shape") from error
    if not isinstance(data, dict):
        raise UserError(
            f"{path} holds no JSON object", f"it holds a {type(data).__name__}", 'write {"layers": ..., ...} into it'
        )
    return data


def _existing_path(words: str) -> Path:
    path = Path(os.path.expanduser(words))  # os.path: a name too long, or `~nobody`, is simply a missing file
    if words and os.path.isdir(path):
        if not (path / CONFIG_FILE).is_file():
            raise UserError(
                f"{path} has no {CONFIG_FILE}",
                "a model folder holds its config under that name",
                "point at the folder that save_pretrained wrote, or at the file itself",
            )
        return path / CONFIG_FILE
    if words and os.path.exists(path):
        return path
    if is_hub_name(words):
        return _cached_path(words)
    words = words if len(words) <= LONGEST_NAME else f"{words[:LONGEST_NAME]}..."
    if path.suffix == ".json" or len(path.parts) > 1:
        raise UserError(
            f"there is no file {words}",
            "a name with a folder or with .json is taken for a file, and nothing is downloaded",
            f"check the path, or use a preset: {', '.join(PRESETS)}",
        )
    raise _unknown(words)


def weights_beside(words: str) -> Path | None:
    """Return the folder of a config if trained weights are in it too."""
    folder = _existing_path(words).parent
    return folder if any(folder.glob("*.safetensors")) else None


def _cached_path(words: str) -> Path:
    folder = find_cached(words)
    if folder is not None:
        return folder / CONFIG_FILE
    raise not_cached(words) if "/" in words else _unknown(words)


def _unknown(words: str) -> UserError:
    error = unknown_name("workload", words, PRESETS)
    return UserError(
        error.problem, error.why, f"{error.fix}; or a config.json, a model folder, a shape file, FILE.py:FACTORY"
    )


def _name_of(words: str, path: Path) -> str:
    """Return the name of the file, or of the folder around a config. A cached model's folder is named after its
    version, so its hub name is used."""
    if not os.path.exists(os.path.expanduser(words)):
        return words.split("/")[-1]
    return path.parent.resolve().name if path.name == CONFIG_FILE else path.stem
