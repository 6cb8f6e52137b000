"""Describes this machine as torch sees it: `python -m redline.engine.probe [cuda|cpu]` prints one JSON object.

It runs in its own process: the parent must not hold a CUDA context, which would take memory from what it measures.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from pathlib import Path

import torch

from redline import __version__
from redline.core.hardware import Hardware
from redline.core.host import core_count, cpu_name, cpuinfo, installed_version
from redline.core.values import to_json


def probe(wanted: str | torch.device | None = None) -> Hardware:
    """Describe a device: 'cuda' is the first one, 'cuda:1' the second; None: a GPU if torch sees one."""
    device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
    return _cuda(device.index or 0) if device.type == "cuda" else _cpu()


def versions() -> dict[str, str | None]:
    return {
        "redline": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": _cudnn_version(),
        "triton": installed_version("triton"),
        "numpy": installed_version("numpy"),
        "transformers": installed_version("transformers"),  # Hugging Face models run its code
    }


def _cuda(index: int) -> Hardware:
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device")
    device = torch.cuda.get_device_properties(index)
    missing = {**_packages_missing(), **_cuda_missing((device.major, device.minor))}  # no package can fix a device
    return Hardware(
        kind="cuda",
        name=device.name,
        count=torch.cuda.device_count(),
        memory_bytes=device.total_memory,
        capability=(device.major, device.minor),
        multiprocessors=device.multi_processor_count,
        driver=_driver_version(),
        cpu_name=cpu_name(),
        cpu_cores=core_count(),
        features=_features(missing),
        missing=missing,
    )


def _cpu() -> Hardware:
    missing = {**_packages_missing(), **_cpu_missing()}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return Hardware(
        kind="cpu",
        name=cpu_name(),
        memory_bytes=memory,
        cpu_name=cpu_name(),
        cpu_cores=core_count(),
        features=_features(missing),
        missing=missing,
    )


FEATURES = (
    "tf32",
    "bf16",
    "fp16",
    "compile",
    "triton",
    "flash",
    "cudnn-attention",
    "fp8",
    "cublaslt",
    "cudnn-frontend",
    "flash4",
    "quack",
)


def _features(missing: dict[str, str]) -> tuple[str, ...]:
    return tuple(feature for feature in FEATURES if feature not in missing)


def _packages_missing() -> dict[str, str]:
    """Return the optional packages of rungs that are not installed, with the reason to show."""
    extras = {
        "torchao": "torchao",
        "cudnn-frontend": "nvidia-cudnn-frontend",
        "flash4": "flash-attn-4",
        "quack": "quack-kernels",
    }
    return {
        feature: f"the package {package} is not installed (pip install {package})"
        for feature, package in extras.items()
        if not installed_version(package)
    }


def _cuda_missing(capability: tuple[int, int]) -> dict[str, str]:
    missing, generation = {}, f"compute capability {capability[0]}.{capability[1]}"
    if torch.version.hip:
        missing["tf32"] = "TF32 is NVIDIA's"
        missing["cudnn-attention"] = "cuDNN is NVIDIA's"
        missing["cublaslt"] = "cuBLASLt is NVIDIA's"
        missing["fp8"] = "AMD's first fp8 formats differ, and the later ones are untested here"
        missing["flash4"] = "flash-attn-4's kernel is for NVIDIA's GPUs"
    elif capability < (8, 0):
        missing["tf32"] = f"TF32 needs compute capability 8.0 or later, this device has {generation}"
        missing["bf16"] = f"bf16 tensor cores need compute capability 8.0 or later, this device has {generation}"
        missing["flash"] = f"the flash kernel needs compute capability 8.0 or later, this device has {generation}"
        missing["cudnn-attention"] = (
            f"cuDNN attention needs compute capability 8.0 or later, this device has {generation}"
        )
    if capability[0] != 9 and not torch.version.hip:
        missing["flash4"] = f"flash-attn-4's backward was tested on Hopper (9.0) only, this device has {generation}"
    if capability < (8, 9) and not torch.version.hip:
        missing["fp8"] = f"fp8 tensor cores need compute capability 8.9 or later, this device has {generation}"
    if capability < (7, 0) and not torch.version.hip:
        missing["fp16"] = f"fp16 tensor cores need compute capability 7.0 or later, this device has {generation}"
        missing["triton"] = f"Triton needs compute capability 7.0 or later, this device has {generation}"
    if capability != (9, 0) or torch.version.hip:
        missing["quack"] = (
            f"its matmuls with GELU were tested on Hopper (compute capability 9.0) only, this device has {generation}"
        )
    if not installed_version("triton"):
        missing["triton"] = "Triton is not installed"
    if "triton" in missing:
        missing["compile"] = f"torch.compile on a GPU needs Triton: {missing['triton']}"
    if not torch.backends.cudnn.is_available():
        missing.setdefault("cudnn-attention", "this torch was built without cuDNN")
    if not torch.backends.cuda.is_flash_attention_available():
        missing.setdefault("flash", "this torch was built without the flash kernel")
    return missing


def _cpu_missing() -> dict[str, str]:
    missing = {
        "tf32": "TF32 is a tensor-core format of NVIDIA GPUs",
        "fp16": "CPUs have no fp16 matmul units to gain from",
        "cudnn-attention": "cuDNN runs on NVIDIA GPUs only",
        "cublaslt": "cuBLASLt's algorithms are for CUDA devices",
        "flash4": "flash-attn-4's kernel is for NVIDIA's GPUs",
        "quack": "QuACK's matmuls are for GPUs",
        "fp8": "8-bit matmuls need tensor cores: a CPU would widen their operands again",
        "triton": "the kernel is written in Triton, which runs on GPUs",
    }
    if not _cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"}:
        missing["bf16"] = "this CPU has no bf16 instructions: autocast would convert and run slower"
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if compiler):
        missing["compile"] = "torch.compile on a CPU needs a C++ compiler, and none was found (install g++ or set CXX)"
    return missing


def _cpu_flags() -> set[str]:
    return {flag for line in cpuinfo() if line.lower().startswith(("flags", "features")) for flag in line.split()}


def _cudnn_version() -> str | None:
    number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return None if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _driver_version() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text().split() if path.exists() else []
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), None)


if __name__ == "__main__":
    found = probe(sys.argv[1] if len(sys.argv) > 1 else None)
    print(json.dumps({"hardware": to_json(found), "versions": versions()}))
