"""Writes named tensors to safetensors files and reads them back, through host memory.

    image = HostImage(layout_of(tensors), pinned=True)     # made once, used for every checkpoint
    image.copy_from(tensors)                                # queued on the device; complete when a later event is
    write_file(path, image.parts())                         # in another thread
    open_tensors([path]).on(device)["model.wte.weight"]     # memory-mapped: read on access

The image is the file's data section, byte for byte, so it is written without another copy and can be hashed on the way.
safetensors' own writer can do neither; its reader is used as it is.
"""

from __future__ import annotations

import json
import pickle
import struct
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from redline.core.checkpoints import TENSOR_SUFFIX, UnusableError
from redline.engine.parts import part_of
from redline.engine.shard import put

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
METADATA_FILE = ".metadata"  # of torch's distributed checkpoint: where each part of each tensor is stored
LISTED = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}
ALIGNMENT = 8  # of the data section, in bytes: readers map it and view it as numbers


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tensor lies in the data section."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    places: tuple[Place, ...]
    aliases: tuple[tuple[str, str], ...]
    """(alias, name it is stored under): a tied head is the embedding, and is written once."""

    @property
    def data_bytes(self) -> int:
        return self.places[-1].end if self.places else 0

    def header(self) -> bytes:
        """Return the file's header. Aliases go where safetensors' `save_model` puts them; "pt" is for transformers."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt", **dict(self.aliases)}}
        for place in self.places:
            offsets = [place.start, place.end]
            entries[place.name] = {"dtype": DTYPES[place.dtype], "shape": list(place.shape), "data_offsets": offsets}
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        return struct.pack("<Q", len(text)) + text


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Lay out the widest dtypes first, so that every tensor starts at a multiple of its element's width."""
    places: list[Place] = []
    aliases: list[tuple[str, str]] = []
    stored: dict[Any, str] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, which a checkpoint cannot hold")
        first = stored.setdefault(_memory_of(tensor) or name, name)
        if first != name:
            aliases.append((name, first))
            continue
        start, end = end, end + tensor.numel() * tensor.itemsize
        places.append(Place(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), start=start, end=end))
    return Layout(places=tuple(places), aliases=tuple(aliases))


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return a key shared by tensors that are the same elements at the same address; None for an empty one."""
    if tensor.numel() == 0:
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


class HostImage:
    """The data section of a file in host memory. If pinned, the device copies into it while the host continues."""

    def __init__(self, layout: Layout, *, pinned: bool) -> None:
        self.layout, self.pinned = layout, pinned
        self.data = torch.empty(layout.data_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.views = {
            place.name: self.data[place.start : place.end].view(place.dtype).view(place.shape)
            for place in layout.places
        }

    def copy_from(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, view in self.views.items():
            view.copy_(tensors[name].detach(), non_blocking=self.pinned)

    def parts(self) -> list[bytes | memoryview]:
        return [self.layout.header(), self.data.numpy().data]


class SavedTensors(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint under the names they were saved by, each read on access."""

    def __init__(self, places: Mapping[str, tuple[Any, str]], device: torch.device | str = "cpu") -> None:
        self.places, self.device = places, torch.device(device)

    def on(self, device: torch.device | str) -> SavedTensors:
        return SavedTensors(self.places, device)

    def of(self, kind: str) -> SavedTensors:
        """The tensors of one file, under their names in it: of("model")["wte.weight"]."""
        start = f"{kind}."
        inside = {name.removeprefix(start): place for name, place in self.places.items() if name.startswith(start)}
        return SavedTensors(inside, self.device)

    def without(self, parameters: Collection[str]) -> SavedTensors:
        """Leave out the tensors of these parameters: for wte.weight, also wte.weight.exp_avg."""
        kept = {
            name: place for name, place in self.places.items() if not any(map(parameters.__contains__, heads(name)))
        }
        return SavedTensors(kept, self.device)

    def __getitem__(self, name: str) -> torch.Tensor:
        file, stored = self.places[name]
        tensor: torch.Tensor = file.get_tensor(stored)
        return tensor.to(self.device)

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Read in place, into whole tensors or into those of which a rank holds a part."""
        parts = {name: target for name, target in targets.items() if isinstance(self.places[name][0], ShardedFiles)}
        if parts:  # all in one folder: a checkpoint has one format
            files = self.places[next(iter(parts))][0]
            files.read_into({self.places[name][1]: target for name, target in parts.items()})
        for name, target in targets.items():
            if name not in parts:
                put(target, self[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def heads(name: str) -> Iterator[str]:
    """'h.1.bias' -> 'h', 'h.1' and 'h.1.bias'."""
    return accumulate(name.split("."), "{}.{}".format)


class MetadataUnpickler(pickle.Unpickler):
    """DCP pickles the list of its parts, and a pickle can run anything: only the names in such a list are allowed, each
    in full. Allowing a whole module would also allow what it imports: pickle would resolve `os.system` in it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in LISTED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a list of tensors")


class CheckedReader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with open(Path(self.path) / METADATA_FILE, "rb") as file:
            found = MetadataUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds {type(found).__name__}")
        others = [name for name, kind in found.state_dict_metadata.items() if type(kind) is not TensorStorageMetadata]
        if others:
            raise pickle.UnpicklingError(f"{others[0]} is no tensor")
        return found


class ShardedFiles:
    """A checkpoint that several ranks wrote, read like a file that `open_tensors` opens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, Any] = CheckedReader(folder).read_metadata().state_dict_metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        about = self.known[name]
        whole = torch.empty(about.size, dtype=about.properties.dtype)
        self.read_into({name: whole})
        return whole

    def read_into(self, targets: dict[str, torch.Tensor]) -> None:
        """Read this rank's part of tensors that are cut, and whole tensors otherwise. No rank waits for another."""
        targets = {name: part_of(target, None) for name, target in targets.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as requested by no_dist
            load(targets, storage_reader=CheckedReader(self.folder), no_dist=True)


def open_sharded(folder: Path) -> SavedTensors:
    try:
        files = ShardedFiles(folder)
    except Exception as error:  # a damaged pickle can raise anything
        raise UnusableError(f"{METADATA_FILE}: cannot be read ({error})") from None
    return SavedTensors({name: (files, name) for name in files.known})


def open_tensors(files: Iterable[Path]) -> SavedTensors:
    """Open files and read their headers only. They stay readable if the checkpoint is removed meanwhile."""
    places: dict[str, tuple[Any, str]] = {}  # name -> (open file, name in it)
    for path in files:
        file, kind = _open(path), path.name.removesuffix(TENSOR_SUFFIX)
        aliases = {alias: name for alias, name in file.metadata().items() if alias != "format"}
        stored = {name: name for name in file.keys()}  # noqa: SIM118  (an open file is no dict)
        places |= {f"{kind}.{name}": (file, place) for name, place in {**stored, **aliases}.items()}
    return SavedTensors(places)


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise UnusableError(f"{path.name}: cannot be opened ({error})") from None


def by_file(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Group tensors by file: 'model.wte.weight' is 'wte.weight' in model.safetensors."""
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, dot, inner = name.partition(".")
        if not (kind and dot and inner):
            raise ValueError(f"the tensor {name!r} needs a name such as model.{name or 'weight'}: the kind comes first")
        files.setdefault(kind + TENSOR_SUFFIX, {})[inner] = tensor
    return files
