"""What every test shares: machines built by hand, small workloads, and the rule that GPU tests skip themselves.

Folders say what a test needs: plain (nothing but Python), cpu (torch on a CPU), gpu. Nothing here imports torch
unless a test that needs a device was collected, so `pytest tests/plain` starts at once.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from redline.core.hardware import Hardware
from redline.core.workload import Shape, Workload

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that would download must fail here, not on a train
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that each use every core wait for one another, and Inductor's pool of compilers imports torch once more.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script's background jobs ignore Ctrl-C, and so would every process that a test starts in order to interrupt it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_cuda():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def tiny() -> Workload:
    """Small enough for arithmetic in a test, with the byte tokenizer's awkward vocabulary of 257."""
    shape = Shape(layers=2, heads=2, d_model=32, d_ff=128, vocab=257, sequence=16)
    return Workload(name="tiny", shape=shape, tokenizer="bytes", micro_batch=4, learning_rate=3e-3)


@pytest.fixture
def cpu() -> Hardware:
    missing = {"tf32": "TF32 is a format of CUDA tensor cores", "cudnn-attention": "cuDNN runs on CUDA devices only"}
    features = ("bf16", "flash", "compile")
    return Hardware(kind="cpu", name="a CPU", cpu_cores=2, features=features, missing=missing)


@pytest.fixture
def t4() -> Hardware:
    """Turing: fp16 tensor cores, but neither TF32 nor bf16, and older than the flash and cuDNN attention kernels."""
    return Hardware(
        kind="cuda", name="Tesla T4", capability=(7, 5), cpu_cores=4, features=("fp16", "compile", "triton")
    )


@pytest.fixture
def h200() -> Hardware:
    features = (
        "tf32",
        "bf16",
        "fp16",
        "flash",
        "cudnn-attention",
        "compile",
        "triton",
        "fp8",
        "cublaslt",
        "cudnn-frontend",
        "flash4",
        "quack",
    )
    return Hardware(kind="cuda", name="NVIDIA H200", capability=(9, 0), cpu_cores=16, features=features)


@pytest.fixture
def hasty_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers whose times are not read do not wait until their steps are steady: beside other tests they never are, and
    each worker would warm up for fifteen seconds."""
    planted = str(Path(__file__).resolve().parent / "cpu" / "planted")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (planted, os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("PLANTED_HASTE", "1")
