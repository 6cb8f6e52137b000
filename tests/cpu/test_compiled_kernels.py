"""The Triton kernels compiled for GPUs that are not here, as they are launched: no device is needed up to the machine
code, and that says what no interpreter does: how many registers a thread takes, and whether they were enough. What a
launch asks of the device is an H200's here: on an A100 the norm's backward would load one turn less ahead."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="this torch came without Triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from redline.kernels import (  # noqa: E402
    cross_entropy_triton,
    gelu_backward_triton,
    norm_backward_triton,
    side_by_side_triton,
    transpose_triton,
)
from redline.kernels.cross_entropy import OCTAVES  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton brings NVIDIA's assembler for Linux alone")

ARCHITECTURES = {"A100": 80, "H200": 90}
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64"}
POINTERS |= {torch.uint8: "*u8", torch.uint16: "*u16", torch.uint32: "*u32", torch.float8_e5m2: "*fp8e5"}


@dataclass
class Recorder:
    """Stands in for a kernel: keeps what it is launched with."""

    kernel: Any
    launched: tuple[tuple[Any, ...], dict[str, Any]] = field(default=((), {}))

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.launched = args, options

        return launch

    def compiled(self, architecture: int) -> Any:
        """As Triton would at the launch: sizes and addresses that 16 divides are known to it as such, and 1 as 1."""
        args, options = self.launched
        names = self.kernel.arg_names
        given = dict(zip(names, args, strict=False)) | {name: options[name] for name in names if name in options}
        constant = {name: value for name, value in given.items() if name in options or is_int(value) and value == 1}
        even = [name for name, value in given.items() if name not in constant and divides(value)]
        source = ASTSource(
            fn=self.kernel,
            signature={name: "constexpr" if name in constant else kind(value) for name, value in given.items()},
            constexprs={(names.index(name),): value for name, value in constant.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in even},
        )
        rest = {name: value for name, value in options.items() if name not in names}
        return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=rest)


def is_int(value: object) -> bool:
    return isinstance(value, int)


def divides(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or is_int(value) and value % 16 == 0


def kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "i32" if is_int(value) else "fp32"


def bf16(*size: int) -> torch.Tensor:
    return torch.zeros(*size, dtype=torch.bfloat16)


def loss(columns: int = 50_304, vocab: int = 50_257, dtype: torch.dtype = torch.bfloat16, narrow: bool = False) -> None:
    logits = torch.zeros(16, columns, dtype=dtype)
    out = torch.zeros(16, columns).to(torch.float8_e5m2) if narrow else None
    targets = torch.zeros(16, dtype=torch.int64)
    cross_entropy_triton.launch(logits, targets, vocab, out, OCTAVES if narrow else 0)


LAUNCHES: dict[str, tuple[Any, str, Callable[[], Any]]] = {
    "loss": (cross_entropy_triton, "_cross_entropy_whole_row", loss),
    "loss, longest row": (cross_entropy_triton, "_cross_entropy_whole_row", lambda: loss(51_200, 51_200)),
    "loss in 8 bits": (cross_entropy_triton, "_cross_entropy_whole_row", lambda: loss(narrow=True)),
    "loss, long rows": (cross_entropy_triton, "_cross_entropy_twice", lambda: loss(151_936, 151_936)),
    "loss in fp32": (cross_entropy_triton, "_cross_entropy_twice", lambda: loss(dtype=torch.float32)),
    "gelu": (
        gelu_backward_triton,
        "_gelu_backward",
        lambda: gelu_backward_triton.launch(bf16(16, 3072), bf16(16, 3072)),
    ),
    "norm": (
        norm_backward_triton,
        "_norm_backward",
        lambda: norm_backward_triton.launch(
            *(bf16(16, 768) for _ in range(3)), torch.ones(768), torch.zeros(16, 1), torch.ones(16, 1)
        ),
    ),
    "side by side": (
        side_by_side_triton,
        "_side_by_side",
        lambda: side_by_side_triton.launch(*(bf16(16, 768) for _ in range(3))),
    ),
    "transpose": (
        transpose_triton,
        "_transpose",
        lambda: transpose_triton.launch(torch.zeros(256, 3072).to(torch.float8_e5m2)),
    ),
}


@pytest.mark.parametrize("device", ARCHITECTURES)
@pytest.mark.parametrize("case", LAUNCHES)
def test_registers_suffice_at_gpt2s_sizes(
    case: str, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module, name, launch = LAUNCHES[case]
    recorder = Recorder(getattr(module, name))
    monkeypatch.setattr(module, name, recorder)
    launch()
    used = resources(recorder.compiled(ARCHITECTURES[device]).asm["cubin"], tmp_path)
    assert used["STACK"] <= (8 if case == "loss, longest row" else 0)  # two registers of 128, once for a whole row
    assert used["LOCAL"] == 0
    if name == "_cross_entropy_whole_row":  # so that two programs of 256 threads fit the 65,536 of a multiprocessor
        assert used["REG"] <= cross_entropy_triton.REGISTERS


def resources(machine_code: bytes, folder: Path) -> dict[str, int]:
    file = folder / "kernel.cubin"
    file.write_bytes(machine_code)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    said = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
