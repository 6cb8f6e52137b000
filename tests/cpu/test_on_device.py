"""Kernels run on the device of their operands, and clocks and peaks are those of the device that is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from redline.engine import memory
from redline.engine.clock import Clock
from redline.engine.probe import probe
from redline.kernels.on_device import on_its_device

SECOND = torch.device("cuda:1")


class OnAnother(torch.Tensor):
    """A tensor that says it lies on the second GPU."""

    def get_device(self) -> int:
        return 1


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device, as a list of one."""
    now = [0]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, now[0] = now[0], index
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    return now


def test_a_kernel_is_launched_where_its_operands_are(current: list[int]) -> None:
    @on_its_device
    def launch(count: int, rows: torch.Tensor) -> tuple[int, int]:
        return count, current[0]

    away = torch.zeros(2).as_subclass(OnAnother)
    assert launch(3, away) == (3, 1)
    assert current == [0]
    current[0] = 1
    assert launch(3, away) == (3, 1)


def test_on_a_cpu_no_device_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("there is none"))
    assert on_its_device(lambda rows: rows + 1)(torch.zeros(1)).item() == 1


def test_the_clock_marks_the_stream_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event on an idle stream of another device would time the host's launches alone."""
    event, synchronised = MagicMock(), []
    event.return_value.elapsed_time.return_value = 5.0
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", synchronised.append)
    clock = Clock(SECOND)
    clock.mark()
    clock.mark()
    assert clock.seconds() == [0.005]
    assert [call.args for call in event.return_value.record.call_args_list] == [("stream of cuda:1",)] * 2
    assert synchronised == [SECOND]


def test_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_second(value: Any) -> Any:
        return lambda device=None: value if device == SECOND else pytest.fail(f"asked about {device}")

    for name, value in {
        "reset_peak_memory_stats": None,
        "reset_accumulated_memory_stats": None,
        "max_memory_allocated": 7,
        "max_memory_reserved": 9,
        "memory_reserved": 9,
        "memory_stats": {"num_alloc_retries": 2},
        "mem_get_info": (60, 100),
    }.items():
        monkeypatch.setattr(torch.cuda, name, of_second(value))
    memory.reset_peak(SECOND)
    assert (memory.peak_bytes(SECOND), memory.peak_bytes(SECOND, recorded=True)) == (7, 9)
    assert (memory.alloc_retries(SECOND), memory.outside_bytes(SECOND)) == (2, 31)


@pytest.mark.parametrize(("wanted", "name"), [("cuda", "GPU 0"), (SECOND, "GPU 1"), ("cpu", None)])
def test_hardware_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch, wanted: Any, name: str | None) -> None:
    found = MagicMock(major=9, minor=0, total_memory=100, multi_processor_count=132)

    def properties(index: int) -> Any:
        found.name = f"GPU {index}"
        return found

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    hardware = probe(wanted)
    assert (hardware.name == name) is (name is not None)
    assert hardware.kind == torch.device(wanted).type
