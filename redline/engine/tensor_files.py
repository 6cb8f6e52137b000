"""Named tensors to safetensors files and back, by way of host memory.

    image = HostImage(layout_of(tensors), pinned=True)     # made once, used for every checkpoint
    image.copy_from(tensors)                                # queued on the device; ready when an event after it is
    write_file(path, image.parts())                         # in another thread
    open_tensors([path]).on(device)["model.wte.weight"]     # memory-mapped: read when it is asked for

The image is the file's data section, byte for byte, so that nothing is copied again on its way to the disk, and it can
be hashed while it is written. safetensors' own writer can do neither; its reader is used as it is.
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
METADATA_FILE = ".metadata"  # of torch's distributed checkpoint: which part of which tensor lies where
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
ALIGNMENT = 8  # of the data section: readers map it and look at it as numbers


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
    """(another name, the name it is stored under): a tied head is the embedding, and is written once."""

    @property
    def data_bytes(self) -> int:
        return self.places[-1].end if self.places else 0

    def header(self) -> bytes:
        """Aliases go where safetensors' own `save_model` notes them; "pt" is what transformers looks for."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt", **dict(self.aliases)}}
        for place in self.places:
            offsets = [place.start, place.end]
            entries[place.name] = {"dtype": DTYPES[place.dtype], "shape": list(place.shape), "data_offsets": offsets}
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        return struct.pack("<Q", len(text)) + text


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Wide types first: then every tensor starts at a multiple of its own width."""
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
    """Equal for two tensors that are the same numbers at the same address; None where there is no address."""
    if tensor.numel() == 0:
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


class HostImage:
    """The data section of one file in host memory. Pinned, so that the device writes into it while the host goes on."""

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
    """The tensors of a checkpoint under the names they were saved by, each read when it is asked for."""

    def __init__(self, places: Mapping[str, tuple[Any, str]], device: torch.device | str = "cpu") -> None:
        self.places, self.device = places, torch.device(device)

    def on(self, device: torch.device | str) -> SavedTensors:
        return SavedTensors(self.places, device)

    def of(self, kind: str) -> SavedTensors:
        """Those of one file, under their names in it: of("model")["wte.weight"]."""
        start = f"{kind}."
        inside = {name.removeprefix(start): place for name, place in self.places.items() if name.startswith(start)}
        return SavedTensors(inside, self.device)

    def without(self, parameters: Collection[str]) -> SavedTensors:
        """Those that belong to other parameters: neither wte.weight nor wte.weight.exp_avg."""
        kept = {
            name: place for name, place in self.places.items() if not any(map(parameters.__contains__, heads(name)))
        }
        return SavedTensors(kept, self.device)

    def __getitem__(self, name: str) -> torch.Tensor:
        file, stored = self.places[name]
        tensor: torch.Tensor = file.get_tensor(stored)
        return tensor.to(self.device)

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """In place, into whole tensors or into those of which a rank holds a part."""
        parts = {name: target for name, target in targets.items() if isinstance(self.places[name][0], ShardedFiles)}
        if parts:  # of one folder: a checkpoint is written one way
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
    """DCP pickles where its parts lie, and a pickle can run anything: only what such a list is made of is let in, by
    its whole name. A module let in whole would be a way to what it imports: pickle resolves `os.system` in it."""

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
    """What `open_tensors` opens, of a checkpoint that several ranks wrote: one file to whoever reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, Any] = CheckedReader(folder).read_metadata().state_dict_metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        about = self.known[name]
        whole = torch.empty(about.size, dtype=about.properties.dtype)
        self.read_into({name: whole})
        return whole

    def read_into(self, targets: dict[str, torch.Tensor]) -> None:
        """Of tensors that are cut this rank's part alone is read; nobody waits for another rank."""
        targets = {name: part_of(target, None) for name, target in targets.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is told so by no_dist
            load(targets, storage_reader=CheckedReader(self.folder), no_dist=True)


def open_sharded(folder: Path) -> SavedTensors:
    try:
        files = ShardedFiles(folder)
    except Exception as error:  # a pickle that is not whole raises anything
        raise UnusableError(f"{METADATA_FILE}: cannot be read ({error})") from None
    return SavedTensors({name: (files, name) for name in files.known})


def open_tensors(files: Iterable[Path]) -> SavedTensors:
    """Reads the headers only. What is open stays readable when the checkpoint is removed meanwhile."""
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
    """'model.wte.weight' is 'wte.weight' in model.safetensors: what stands before the first dot is the file."""
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, dot, inner = name.partition(".")
        if not (kind and dot and inner):
            raise ValueError(f"the tensor {name!r} needs a name such as model.{name or 'weight'}: the kind comes first")
        files.setdefault(kind + TENSOR_SUFFIX, {})[inner] = tensor
    return files
