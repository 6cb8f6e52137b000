"""The meter and a prepared module on a CUDA device: waits are counted and not caused, FLOPs agree with the formulas."""

from __future__ import annotations

import pytest

from redline.core.workload import Shape

pytestmark = pytest.mark.gpu

SHAPE = Shape(layers=2, heads=4, d_model=256, d_ff=1024, vocab=257, sequence=256)
B = 8


def prepared_gpt(*rungs: str):
    import torch

    import redline
    from redline.model.gpt import GPT
    from redline.model.loss import next_token_loss

    ids = torch.randint(0, SHAPE.vocab, (B, SHAPE.sequence), device="cuda")
    model = GPT(SHAPE, attention="flash")
    loss = lambda model, batch: next_token_loss(model(batch), batch)  # noqa: E731
    return redline.prepare(model, rungs, learning_rate=1e-3, loss=loss, device="cuda"), ids


@pytest.mark.parametrize("reads", [0, 3])
def test_waits_are_counted_and_the_meter_causes_none(reads) -> None:
    import redline

    prepared, ids = prepared_gpt("bf16", "flash", "fused-adamw")
    meter = redline.Meter(tokens_per_step=ids.numel(), model=prepared)
    for batch in meter.data([ids] * 8):
        loss = prepared.step(batch)
        for _ in range(reads):
            loss.item()
        meter.step()
    found = meter.summary()
    assert found["syncs_per_step"] == reads
    assert [(each["file"], each["per_step"]) for each in found["syncs"]] == ([(__file__, reads)] if reads else [])


def test_flops_and_mfu_are_those_of_the_formulas() -> None:
    import redline
    from redline.core.hardware import known_device
    from redline.engine.probe import probe
    from redline.predict.flops import flops_per_token

    prepared, ids = prepared_gpt("bf16", "flash", "fused-adamw")
    meter = redline.Meter(tokens_per_step=ids.numel(), model=prepared)
    for batch in meter.data([ids] * 8):
        prepared.step(batch)
        meter.step()
    found, hardware = meter.summary(), probe("cuda")
    assert found["flops_per_step"] == flops_per_token(SHAPE) * ids.numel()
    assert found["peak_bytes"] > 0
    if known_device(hardware.name, hardware.multiprocessors) is not None:
        rate = found["flops_per_step"] / found["step_seconds"]["median"]
        assert found["mfu"] == pytest.approx(rate / (hardware.peak_tflops["bf16"] * 1e12))


def test_compiled_and_recorded_steps_learn_as_plain_ones_do() -> None:
    plain, ids = prepared_gpt("bf16", "flash", "fused-adamw")
    fast, _ = prepared_gpt("bf16", "flash", "fused-adamw", "compile", "cuda-graphs", "sigmoid-gelu")
    assert list(fast.left_out) == ["sigmoid-gelu"]  # the GPT calls a function: there is no module to exchange
    fast.step.model.load_state_dict(plain.step.model.state_dict())
    ours, theirs = ([one.step(ids) for _ in range(5)] for one in (fast, plain))
    assert [loss.item() for loss in ours] == pytest.approx([loss.item() for loss in theirs], rel=1e-2)


def test_a_step_is_profiled_in_this_process_and_put_back() -> None:
    import torch

    import redline

    prepared, ids = prepared_gpt("bf16", "flash", "fused-adamw")
    before = prepared.step.model.wte.weight.detach().clone()
    found = redline.profile(prepared.step, batches=[ids], steps=2)
    assert torch.equal(prepared.step.model.wte.weight, before)
    assert found["device"] == "cuda"
    assert "flash" in found["attention"]
    assert [each for each in found["findings"] if each["kind"] == "synchronisation"] == []


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_cudnns_recurrent_layers_count(kind: str) -> None:
    """Its backward cannot tell sizes beforehand, so they are counted on values."""
    import torch
    from torch import nn

    import redline

    model = getattr(nn, kind)(24, 40, num_layers=2, bidirectional=True, batch_first=True, device="cuda")
    meter = redline.Meter(tokens_per_step=1, model=model)
    for rows in meter.data([torch.randn(3, 5, 24, device="cuda", requires_grad=True) for _ in range(2)]):
        model(rows)[0].sum().backward()
        meter.step()
    gradients = [parameter.grad for parameter in model.parameters()]
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    assert meter.summary()["flops_per_step"] == 3 * 2 * 15 * matrices
    assert all(one.grad is other for one, other in zip(model.parameters(), gradients, strict=True))
