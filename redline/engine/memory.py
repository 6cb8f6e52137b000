"""Peak memory of a stretch of work: the allocator's on a GPU, the resident set on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def is_out_of_memory(error: BaseException) -> bool:
    """torch signals it by an exception class on a GPU and by a message on a CPU; cuBLAS and cuDNN, which allocate
    memory themselves, by a status."""
    words = ("out of memory", "can't allocate memory", "status_alloc_failed")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error).lower() for word in words)


def reset_peak(device: torch.device) -> None:
    """Also resets the count of retries."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)
    elif _CLEAR.exists():
        _CLEAR.write_text("5")  # Linux: 5 resets the high-water mark of the resident set


def peak_bytes(device: torch.device, recorded: bool = False) -> int | None:
    """`recorded`: the step replays CUDA graphs. Between replays the allocator counts their memory pool as free, so only
    the reserved bytes show what the step needs."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) if recorded else torch.cuda.max_memory_allocated(device)
    if not _STATUS.exists():
        return None  # not Linux: the peak since the start would include compiling, so it is left unknown
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def alloc_retries(device: torch.device) -> int | None:
    """Return how often, since the last reset, the allocator found no memory, released its cache and tried again. One
    retry costs as much as many steps."""
    return torch.cuda.memory_stats(device)["num_alloc_retries"] if device.type == "cuda" else None


def outside_bytes(device: torch.device) -> int | None:
    """Device memory in use that torch's allocator did not reserve: context, libraries, other processes."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
