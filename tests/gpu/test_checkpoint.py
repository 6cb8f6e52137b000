"""Checkpoints from a device: the host waits for nothing, and what the training changes next is not in them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from redline.engine.checkpoint import CheckpointStore
from redline.engine.snapshot import capture_rng, load_optimizer_tensors, optimizer_tensors, restore_rng

pytestmark = pytest.mark.gpu

BUSY_CYCLES = 4_000_000_000  # two seconds or so: other processes may hold the host up


def test_saving_waits_for_nothing_and_keeps_what_was_true_then(tmp_path):
    tensors = {
        "model.weight": torch.randn(4096, 1024, device="cuda"),
        "model.turned": torch.randn(64, 32, device="cuda", dtype=torch.bfloat16).t(),
        "optimizer.step": torch.tensor(3.0, device="cuda"),
        "optimizer.host": torch.arange(5),
    }
    with CheckpointStore(tmp_path) as store:
        # Takes the pinned memory. CUDA loads a kernel when it is first called, and may wait for the device to do so.
        store.save(step=1, tensors=tensors, state={}, identity={})
        store.wait()
        for tensor in tensors.values():
            tensor.clone().zero_()
        expected = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        done = torch.cuda.Event()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(BUSY_CYCLES)
            store.save(step=2, tensors=tensors, state={}, identity={})
            for tensor in tensors.values():
                tensor.zero_()
            done.record()
            assert not done.query()  # the device is still busy, and we are here
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(image.data.is_pinned() for image in store._images.values())
        loaded = store.latest()
    assert loaded.step == 2
    for device in ("cpu", "cuda"):
        found = loaded.tensors(device)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].device.type == device
            assert torch.equal(found[name].cpu(), tensor)


def test_a_fused_optimizer_goes_on_exactly_with_its_counter_on_the_device():
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(32, 32, device="cuda")
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            generator = torch.Generator("cuda").manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator, device="cuda")
            optimizer.step()

    straight, its = make()
    take_steps(straight, its, range(6))
    first, of_first = make()
    take_steps(first, of_first, range(3))
    tensors, values = optimizer_tensors(of_first, first)
    second, of_second = make()
    second.load_state_dict(first.state_dict())
    load_optimizer_tensors(of_second, second, {name: t.cpu() for name, t in tensors.items()}, values)
    assert of_second.state[second.weight]["step"].is_cuda
    take_steps(second, of_second, range(3, 6))
    for mine, theirs in zip(second.parameters(), straight.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_devices_generator_goes_on_exactly_where_it_was():
    device = torch.device("cuda")
    torch.rand(3, device=device)
    values = json.loads(json.dumps(capture_rng(device)))
    expected = torch.rand(1000, device=device)
    assert not torch.equal(torch.rand(1000, device=device), expected)
    restore_rng(values, device)
    assert torch.equal(torch.rand(1000, device=device), expected)
