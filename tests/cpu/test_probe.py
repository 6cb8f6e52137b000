"""The probe describes the machine it runs on, and gives a reason for whatever is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from redline.core import host
from redline.core.hardware import Hardware
from redline.core.values import from_json, to_json
from redline.engine import probe as probe_module
from redline.engine.probe import FEATURES, probe, versions
from redline.search.launch import probe_machine, worker_path

HOPPERS = {"flash4", "quack"}
needs_proc = pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="reads /proc")


def run_probe(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "redline.engine.probe", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": worker_path()}
    )


def test_this_machine() -> None:
    found = probe("cpu")
    assert found.kind == "cpu"
    assert found.name
    assert found.name == found.cpu_name
    assert 1 <= found.cpu_cores <= (os.cpu_count() or 1)
    assert found.memory_bytes is None or found.memory_bytes > 1 << 28
    assert found.capability == ()
    assert found.driver is None
    assert found.peak_tflops is None


def test_without_a_wish_it_takes_the_gpu_if_there_is_one() -> None:
    assert probe().kind == ("cuda" if torch.cuda.is_available() else "cpu")


def test_json_and_back() -> None:
    found = probe("cpu")
    assert from_json(Hardware, json.loads(json.dumps(to_json(found)))) == found


def test_what_is_there_and_what_is_missing_make_up_every_feature() -> None:
    found = probe("cpu")
    assert set(found.features) | set(found.missing) == set(FEATURES)
    assert not set(found.features) & set(found.missing)
    assert all(found.missing.values())
    assert "flash" in found.features
    assert {"tf32", "fp16", "cudnn-attention"} <= set(found.missing)


def test_a_device_is_named_before_a_package_that_would_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "installed_version", lambda package: None)
    assert "pip install flash-attn-4" in probe_module._packages_missing()["flash4"]
    assert "NVIDIA" in probe("cpu").missing["flash4"]


@pytest.mark.parametrize(
    ("capability", "missing"),
    [
        (
            (6, 1),
            {"tf32", "bf16", "fp16", "compile", "triton", "flash", "cudnn-attention", "fp8", *HOPPERS},
        ),
        ((7, 5), {"tf32", "bf16", "flash", "cudnn-attention", "fp8", *HOPPERS}),
        ((8, 0), {"fp8", *HOPPERS}),
        ((8, 9), HOPPERS),
        ((9, 0), set()),
        ((10, 0), HOPPERS),
    ],
    ids=["Pascal", "Turing", "Ampere", "Ada", "Hopper", "Blackwell"],
)
def test_generations_of_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], missing: set[str]) -> None:
    """As a torch with everything in it would tell."""
    monkeypatch.setattr(probe_module, "installed_version", lambda package: "1.0")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    reasons = probe_module._cuda_missing(capability)
    assert set(reasons) == missing
    assert all(reasons.values())


def test_a_torch_without_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "installed_version", lambda package: None)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    reasons = probe_module._cuda_missing((9, 0))
    assert set(reasons) == {"compile", "triton", "cudnn-attention", "flash"}
    assert "Triton" in reasons["compile"]


# --- the compiler -----------------------------------------------------------------------------------------------------


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def program(path: Path) -> Path:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_without_a_compiler_there_is_no_compile(bare_path: Path) -> None:
    found = probe("cpu")
    assert "compile" not in found.features
    assert "install g++" in found.missing["compile"]
    assert set(found.features) | set(found.missing) == set(FEATURES)


@pytest.mark.parametrize("name", ["g++", "clang++", "c++"])
def test_any_compiler_will_do(bare_path: Path, name: str) -> None:
    program(bare_path / name)
    assert "compile" in probe("cpu").features


def test_the_users_own_compiler_counts(bare_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(program(bare_path / "my-compiler")))
    assert "compile" in probe("cpu").features
    monkeypatch.setenv("CXX", str(bare_path / "gone"))
    assert "compile" in probe("cpu").missing


# --- /proc ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "has_bf16"),
    [
        ("flags\t\t: fpu avx2 avx512_bf16 amx_tile", True),
        ("flags\t\t: fpu amx_bf16", True),
        ("Features\t: fp asimd bf16 sve", True),  # as an ARM kernel writes it
        ("flags\t\t: fpu avx2 avx512f", False),
        ("bugs\t\t: bf16", False),
    ],
)
def test_bf16_is_offered_where_the_cpu_has_it(monkeypatch: pytest.MonkeyPatch, line: str, has_bf16: bool) -> None:
    for module in (host, probe_module):
        monkeypatch.setattr(module, "cpuinfo", lambda: ["model name\t: A: CPU", line])
    found = probe("cpu")
    assert ("bf16" in found.features) == has_bf16
    assert found.name == "A: CPU"


def test_a_machine_without_cpuinfo_has_a_name_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cpuinfo", list)
    assert probe("cpu").name


def test_versions_are_those_that_run() -> None:
    found = versions()
    assert found["torch"] == torch.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(found) == {"redline", "python", "torch", "cuda", "cudnn", "triton", "numpy", "transformers"}


# --- as a process -----------------------------------------------------------------------------------------------------


def test_the_process_prints_one_json_document() -> None:
    done = run_probe("cpu")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert from_json(Hardware, answer["hardware"]) == probe("cpu")
    assert answer["versions"] == versions()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_asking_for_a_gpu_that_is_not_there() -> None:
    from redline.core.errors import UserError

    with pytest.raises(UserError, match="no cuda device") as caught:
        probe_machine("cuda")
    assert "torch sees no CUDA device" in caught.value.why
    assert "--device cpu" in caught.value.fix
