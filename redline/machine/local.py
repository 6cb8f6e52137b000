"""This machine, read from the driver (NVML) and from Linux: no torch, no CUDA context, a tenth of a second.

    machine = this_machine();  machine.name -> "NVIDIA H200";  machine.known -> a Device, or None and machine.reason

NVML comes with nvidia-ml-py, a small package in pure Python. What cannot be read is None; `notes` says why.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.core.devices import Device, lookup, why_unknown
from redline.core.hardware import known_device
from redline.core.host import core_count, cpu_name, installed_version

PACKAGES = ("redline", "torch", "triton", "numpy")
# CUDA C++ Programming Guide, table of compute capabilities: fp32 cores per multiprocessor. NVML counts cores only.
CORES_PER_MULTIPROCESSOR: dict[tuple[int, ...], int] = {
    (7, 0): 64,
    (7, 5): 64,
    (8, 0): 64,
    (8, 6): 128,
    (8, 9): 128,
    (9, 0): 128,
    (10, 0): 128,
}
CORES_PER_MULTIPROCESSOR |= {(10, 3): 128, (12, 0): 128}
# nvml.h, nvmlClocksEventReason*: why the clocks are where they are.
THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "application clocks setting",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown (software)",
    0x40: "thermal slowdown (hardware)",
    0x80: "power brake (hardware)",
    0x100: "display clock setting",
}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device as NVML sees it, now."""

    name: str
    index: int
    uuid: str | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    capability: tuple[int, ...] = ()
    multiprocessors: int | None = None
    clock_mhz: int | None = None
    clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    """Empty: nothing holds the clocks down. None: not readable."""
    mig: bool = False
    """True if the card is split into MIG slices: programs then see those, not the card."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    kind: str
    """'cuda' where a program would find an NVIDIA device, else 'cpu'."""
    name: str
    """Name of the first visible GPU, or of the CPU."""
    count: int = 1
    memory_bytes: int | None = None
    driver: str | None = None
    cuda_driver: str | None = None
    """The newest CUDA the driver can run."""
    gpus: tuple[Gpu, ...] = ()
    """The visible GPUs, in the order programs see them."""
    cpu_name: str
    cpu_cores: int
    """Cores this process may use, which a container often limits."""
    ram_bytes: int | None
    versions: dict[str, str | None]
    notes: tuple[str, ...] = ()

    @property
    def known(self) -> Device | None:
        """The device table's row for the first visible GPU, if it is that card and all of it."""
        if self.kind != "cuda" or self.gpus[0].mig:
            return None
        return known_device(self.name, self.gpus[0].multiprocessors)

    @property
    def reason(self) -> str | None:
        """Why `known` is None."""
        if self.known is not None:
            return None
        if self.kind != "cuda":
            return "a CPU: its data sheet states no matrix rate (redline hardware --measure measures it)"
        if self.gpus[0].mig:
            return "MIG is switched on: programs see slices of the card, whose share no data sheet states"
        card = lookup(self.name)
        if card is not None:
            return (
                f"it has {self.gpus[0].multiprocessors} multiprocessors and the card of that name "
                f"{card.multiprocessors}: a partition, or another card"
            )
        return why_unknown(self.name)


def this_machine() -> Machine:
    """Ask the driver, then Linux. Takes milliseconds, changes nothing."""
    found, driver, cuda_driver, notes = _nvidia()
    gpus = visible_gpus(found, os.environ)
    if found and not gpus:
        notes = (*notes, f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r} hides every GPU")
    if not found and Path("/dev/kfd").exists():
        notes = (*notes, "an AMD device is here; without torch its name cannot be read (use --name, or --measure)")
    first = gpus[0] if gpus else None
    return Machine(
        kind="cuda" if first else "cpu",
        name=first.name if first else cpu_name(),
        count=len(gpus) or 1,
        memory_bytes=first.memory_bytes if first else _ram_bytes(),
        driver=driver,
        cuda_driver=cuda_driver,
        gpus=gpus,
        cpu_name=cpu_name(),
        cpu_cores=core_count(),
        ram_bytes=_ram_bytes(),
        versions={"python": platform.python_version(), **{package: installed_version(package) for package in PACKAGES}},
        notes=notes,
    )


def visible_gpus(gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, in its order: by number or UUID prefix, up to the first word
    that does not match exactly one. Numbers follow NVML's order, which is CUDA's own if all cards are alike."""
    words = environment.get("CUDA_VISIBLE_DEVICES")
    if words is None:
        return gpus
    chosen = []
    for word in words.split(","):
        fits = [gpu for gpu in gpus if _is_meant(gpu, word.strip())]
        if len(fits) != 1:
            break
        chosen += fits
    return tuple(chosen)


def _is_meant(gpu: Gpu, word: str) -> bool:
    if word.isdigit():
        return gpu.index == int(word)
    return bool(word) and gpu.uuid is not None and gpu.uuid.startswith(word)


def _nvidia() -> tuple[tuple[Gpu, ...], str | None, str | None, tuple[str, ...]]:
    """Return GPUs, driver, the driver's CUDA version, and a note if there may be GPUs that cannot be read."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        here = Path("/proc/driver/nvidia/version").exists()
        note = "an NVIDIA driver is here, but nvidia-ml-py is not installed: pip install nvidia-ml-py"
        return (), None, None, ((note,) if here else ())
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return (), None, None, ()  # no driver, and so no NVIDIA device
    try:
        gpus = tuple(_gpu(nvml, index) for index in range(_ask(nvml, nvml.nvmlDeviceGetCount) or 0))
        return gpus, _text(_ask(nvml, nvml.nvmlSystemGetDriverVersion)), _cuda_driver(nvml), ()
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *arguments: int) -> Any:
        return _ask(nvml, getattr(nvml, function, None), handle, *arguments)

    memory = ask("nvmlDeviceGetMemoryInfo")
    capability = tuple(ask("nvmlDeviceGetCudaComputeCapability") or ())
    mig = ask("nvmlDeviceGetMigMode")
    return Gpu(
        name=_text(ask("nvmlDeviceGetName")) or "unknown",
        index=index,
        uuid=_text(ask("nvmlDeviceGetUUID")),
        memory_bytes=memory and int(memory.total),
        memory_used_bytes=memory and int(memory.used),
        capability=capability,
        multiprocessors=_multiprocessors(ask("nvmlDeviceGetNumGpuCores"), capability),
        clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        memory_clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
        power_watts=_watts(ask("nvmlDeviceGetPowerUsage")),
        power_limit_watts=_watts(ask("nvmlDeviceGetEnforcedPowerLimit")),
        temperature_celsius=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        throttle_reasons=throttle_reasons(ask("nvmlDeviceGetCurrentClocksThrottleReasons")),
        mig=bool(mig and mig[0]),
    )


def _ask(nvml: Any, function: Callable[..., Any] | None, *arguments: Any) -> Any:
    """Call an NVML function; return None if this driver or this card does not support it."""
    try:
        return None if function is None else function(*arguments)
    except nvml.NVMLError:
        return None


def throttle_reasons(bits: int | None) -> tuple[str, ...] | None:
    if bits is None:
        return None
    unknown = bits & ~sum(THROTTLE_REASONS)
    named = tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)
    return (*named, f"reason {unknown:#x}") if unknown else named


def _multiprocessors(cores: int | None, capability: tuple[int, ...]) -> int | None:
    per_multiprocessor = CORES_PER_MULTIPROCESSOR.get(capability)
    return cores // per_multiprocessor if cores and per_multiprocessor else None


def _cuda_driver(nvml: Any) -> str | None:
    number = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion)  # 12080 is 12.8
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _text(value: Any) -> str | None:
    """Decode text, which older versions of nvidia-ml-py return as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _ram_bytes() -> int | None:
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
