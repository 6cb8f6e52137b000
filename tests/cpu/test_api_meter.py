"""A meter in somebody's loop: times off a clock that the test holds, FLOPs against the formulas, and no traces left."""

from __future__ import annotations

import inspect
import itertools
import warnings

import pytest
import torch
from torch import nn

import redline
import redline.api.meter as meter_module
import redline.engine.clock as clock_module
from redline.api.counting import count_flops
from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.workload import Shape
from redline.engine.findings import collecting_syncs
from redline.model.gpt import GPT
from redline.model.loss import next_token_loss
from redline.predict.flops import flops_per_token

SHAPE = Shape(layers=2, heads=2, d_model=32, d_ff=128, vocab=257, sequence=16)
B = 2
FLOPS = flops_per_token(SHAPE) * B * SHAPE.sequence
IDS = torch.arange(B * SHAPE.sequence).view(B, SHAPE.sequence)


class Time:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Time:
    clock = Time()
    monkeypatch.setattr(meter_module, "time", clock)
    monkeypatch.setattr(clock_module, "time", clock)
    return clock


def slow_loader(clock: Time, waits: list[float]):
    for wait in waits:
        clock.now += wait
        yield wait


def run(meter, clock: Time, waits: list[float], works: list[float]) -> None:
    for _, work in zip(meter.data(slow_loader(clock, waits)), works, strict=True):
        clock.now += work
        meter.step()


# times


def test_rates_and_waits_are_those_of_the_steps_behind_the_warm_up(clock) -> None:
    meter = redline.Meter(tokens_per_step=120, flops_per_step=1.0, device="cpu")
    run(meter, clock, waits=[9, 9, 9, 1, 2, 3, 0, 4], works=[9, 9, 9, 3, 2, 1, 4, 6])
    found = meter.summary()  # steps of 4, 4, 4, 4 and 10 seconds
    assert found["steps"] == 8
    assert found["warmup_steps"] == 3
    assert found["step_seconds"]["median"] == 4
    assert found["step_seconds"]["n"] == 5
    assert found["step_seconds"]["p90"] == pytest.approx(7.6)  # 0.6 of the way from 4 to 10
    assert found["tokens_per_second"] == 30
    assert found["tokens_per_second_p10"] == pytest.approx(120 / 7.6)
    assert found["tokens_per_second_p90"] == 30
    assert found["data_wait_share"] == pytest.approx(10 / 26)
    assert found["syncs_per_step"] is None
    assert found["syncs"] is None


def test_several_batches_may_make_a_step(clock) -> None:
    meter = redline.Meter(tokens_per_step=10, flops_per_step=1.0, device="cpu")
    for number, _ in enumerate(meter.data(slow_loader(clock, [1.0] * 16))):
        clock.now += 1
        if number % 2:
            meter.step()
    found = meter.summary()
    assert found["steps"] == 8
    assert found["step_seconds"]["median"] == 4
    assert found["data_wait_share"] == 0.5


def test_a_loop_without_data_is_timed_from_its_first_step_on(clock) -> None:
    meter = redline.Meter(tokens_per_step=10, flops_per_step=1.0, device="cpu")
    for seconds in (50, 50, 50, 2, 2, 2):
        clock.now += seconds
        meter.step()
    found = meter.summary()
    assert found["step_seconds"] == {"median": 2, "p10": 2, "p90": 2, "n": 3, "mean": 2}
    assert found["data_wait_share"] is None
    assert "loop over meter.data(loader)" in str(meter)


def test_nothing_is_known_before_the_warm_up_is_over(clock) -> None:
    meter = redline.Meter(tokens_per_step=10, device="cpu")
    run(meter, clock, waits=[1, 1, 1], works=[1, 1, 1])
    found = meter.summary()
    assert (found["step_seconds"], found["tokens_per_second"], found["data_wait_share"], found["mfu"]) == (None,) * 4
    assert str(meter)
    assert redline.Meter(tokens_per_step=10, device="cpu").summary()["steps"] == 0


def test_a_long_run_is_judged_by_its_latest_steps(clock, monkeypatch) -> None:
    monkeypatch.setattr(meter_module, "KEPT_STEPS", 5)
    meter = redline.Meter(tokens_per_step=10, flops_per_step=1.0, device="cpu")
    for number in range(1, 41):  # cut at 10, 15, ... 40
        run(meter, clock, waits=[0.25 * number], works=[0.75 * number])
        assert len(meter._clock.marks) <= 10
    found = meter.summary()
    assert found["steps"] == 40
    assert found["step_seconds"]["median"] == 38
    assert found["step_seconds"]["n"] == 5
    assert found["data_wait_share"] == pytest.approx(0.25)


# FLOPs


def train(model: nn.Module, meter, batches, loss=lambda model, batch: next_token_loss(model(batch), batch)) -> None:
    for batch in meter.data(batches):
        loss(model, batch).backward()
        meter.step()


VARIANTS = {"plain": {}, "flash": {"attention": "flash"}, "recomputed": {"checkpointing": "full"}}


@pytest.mark.parametrize("choices", VARIANTS.values(), ids=VARIANTS)
def test_flops_of_a_module_are_those_of_the_formulas(choices) -> None:
    """Fused attention counts as its square, what is computed again does not count."""
    model = GPT(SHAPE, **choices)
    weight = model.wte.weight
    meter = redline.Meter(tokens_per_step=32, model=model)
    train(model, meter, [IDS] * 2)
    model.zero_grad()
    assert meter.summary()["flops_per_step"] == FLOPS
    assert model.wte.weight is weight
    assert weight.grad is None
    assert not model._forward_pre_hooks


def test_every_call_of_the_first_step_counts_and_only_that() -> None:
    model = GPT(SHAPE)
    meter = redline.Meter(tokens_per_step=64, model=model)
    for number, batch in enumerate(meter.data([IDS] * 5)):
        next_token_loss(model(batch), batch).backward()
        if number % 2:
            with torch.no_grad():
                model(batch)  # a forward pass alone: a third
            meter.step()
    assert meter.summary()["flops_per_step"] == pytest.approx(FLOPS * (2 + 1 / 3))


def test_flops_of_what_was_prepared_are_counted_uncompiled() -> None:
    prepared = prepared_gpt()
    meter = redline.Meter(tokens_per_step=32, model=prepared)
    for batch in meter.data([IDS] * 2):
        prepared.step(batch)
        meter.step()
    assert meter.summary()["flops_per_step"] == FLOPS


def prepared_gpt() -> redline.Prepared:
    return redline.prepare(GPT(SHAPE), ["bf16"], loss=lambda model, batch: next_token_loss(model(batch), batch))


@pytest.mark.parametrize("fed", [True, False], ids=["data", "no-data"])
def test_flops_of_what_was_prepared_are_those_of_its_steps(fed: bool) -> None:
    """Two batches to an update, in a loop over `data` or over anything else; another meter beside it sees the same."""
    prepared = prepared_gpt()
    meter, other = (redline.Meter(tokens_per_step=64, model=prepared) for _ in range(2))
    for number, batch in enumerate(meter.data([IDS] * 6) if fed else [IDS] * 6):
        prepared.step.compute_gradients(batch)
        if number % 2:
            prepared.step.apply_gradients()
            meter.step()
            other.step()
    assert meter.summary()["flops_per_step"] == other.summary()["flops_per_step"] == 2 * FLOPS
    assert prepared.step(IDS).isfinite()


def test_a_meter_leaves_nothing_in_the_step() -> None:
    prepared = prepared_gpt()
    own = prepared.step.loss_of
    meter = redline.Meter(tokens_per_step=32, model=prepared)
    assert prepared.step.loss_of is not own
    prepared.step(IDS)
    meter.step()
    assert prepared.step.loss_of is own
    assert meter.summary()["flops_per_step"] == FLOPS


def test_a_prepared_model_that_nobody_saw_called_says_what_to_do() -> None:
    prepared = prepared_gpt()
    meter = redline.Meter(tokens_per_step=32, model=prepared)
    prepared.loss(IDS).backward()
    meter.step()
    found = meter.summary()
    assert found["flops_per_step"] is None
    assert "call prepared.step, loop over meter.data, or, where a trainer such as" in found["mfu_convention"]
    assert "pass model=prepared.model, or give flops_per_step" in found["mfu_convention"]
    meter = redline.Meter(tokens_per_step=32, model=prepared)
    for batch in meter.data([IDS] * 2):
        prepared.loss(batch).backward()
        meter.step()
    assert meter.summary()["flops_per_step"] == FLOPS


def counting_backend(calls: list[int]):
    """Compiles nothing, and counts how often it was asked to."""

    def backend(graph, inputs):
        calls.append(len(inputs))
        return graph.forward

    return backend


def test_flops_of_a_compiled_module_are_seen_from_outside() -> None:
    compiled = torch.compile(GPT(SHAPE), backend=counting_backend(calls := []))
    meter = redline.Meter(tokens_per_step=32, model=compiled)
    train(compiled, meter, [IDS] * 3)
    assert meter.summary()["flops_per_step"] == FLOPS
    assert len(calls) == 1
    torch._dynamo.reset()


def test_code_inside_compiled_code_cannot_be_seen_and_is_not_compiled_twice() -> None:
    model = GPT(SHAPE)
    step = torch.compile(lambda batch: next_token_loss(model(batch), batch), backend=counting_backend(calls := []))
    meter = redline.Meter(tokens_per_step=32, model=model)
    train(model, meter, [IDS] * 4, loss=lambda _, batch: step(batch))
    assert len(calls) == 1  # the meter's hook broke no graph, and taking it away made nobody compile again
    found = meter.summary()
    assert found["flops_per_step"] is None
    assert "no call of the model was seen" in found["mfu_convention"]
    torch._dynamo.reset()


def test_autocast_and_dtypes_are_those_of_the_call() -> None:
    """In bf16 weights with fp32 inputs this runs under autocast alone."""
    model = nn.Linear(8, 4).bfloat16()
    meter = redline.Meter(tokens_per_step=1, model=model)
    for batch in meter.data([torch.ones(3, 8)] * 2):
        with torch.autocast("cpu", torch.bfloat16):
            model(batch).sum().backward()
        meter.step()
    # forward, and the gradient of the weight: the input needs none
    assert meter.summary()["flops_per_step"] == 2 * (2 * 3 * 8 * 4)


class Reads(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if x.sum().item() > 0 else 1)


class Repeats(nn.Linear):
    """As often as its input says: only the values of the first step tell."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x.sum().item())):
            x = super().forward(x)
        return x


def test_a_model_that_reads_values_is_counted_on_those_of_the_first_step() -> None:
    model, batches = Repeats(8, 8), [torch.full((3, 8), times / 24) for times in (4.5, 1.5)]
    meter = redline.Meter(tokens_per_step=1, model=model)
    train(model, meter, batches, loss=lambda model, batch: model(batch).sum())
    # four products forward, and backward two of each but the first, whose input needs no gradient
    assert meter.summary()["flops_per_step"] == (4 + 2 * 4 - 1) * (2 * 3 * 8 * 8)


def test_counting_on_values_leaves_no_trace() -> None:
    model = nn.Sequential(Reads(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    meter = redline.Meter(tokens_per_step=1, model=model)
    train(model, meter, [torch.ones(3, 8)] * 2, loss=lambda model, batch: model(batch).sum())
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    random = torch.get_rng_state()
    assert meter.summary()["flops_per_step"] == 2 * (2 * 3 * 8 * 8)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    assert all(one.grad is other for one, other in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_the_peak_is_the_loops_and_not_that_of_counting(monkeypatch) -> None:
    peaks = iter([100, 250, 250, 250, 250, 300, 300])  # before counting, after it, ...; then the loop needs more
    monkeypatch.setattr(meter_module, "peak_bytes", lambda device: next(peaks))
    model = nn.Linear(8, 4)
    meter = redline.Meter(tokens_per_step=1, model=model)
    train(model, meter, [torch.ones(3, 8)] * 2, loss=lambda model, batch: model(batch).sum())
    assert [meter.summary()["peak_bytes"] for _ in range(3)] == [100, 100, 300]


def test_a_model_that_reads_values_of_large_inputs_has_a_reason_instead_of_a_number(monkeypatch) -> None:
    monkeypatch.setattr(meter_module, "KEPT_BYTES", 3 * 8 * 4 - 1)
    model = Reads(8, 4)
    meter = redline.Meter(tokens_per_step=1, model=model)
    train(model, meter, [torch.ones(3, 8)] * 2, loss=lambda model, batch: model(batch).sum())
    found = meter.summary()
    assert found["flops_per_step"] is None
    assert "FLOPs could not be counted, DataDependentOutputException" in found["mfu_convention"]
    line = inspect.getsourcelines(Reads.forward)[1] + 1
    assert f"at test_api_meter.py:{line}; give flops_per_step" in found["mfu_convention"]


class ReadsRecurrent(nn.LSTM):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        return super().forward(x if x.sum().item() else x + 1)


@pytest.mark.parametrize("kind", [nn.LSTM, ReadsRecurrent])
def test_recurrent_layers_are_counted_and_left_alone(kind: type[nn.LSTM]) -> None:
    """They hold their weights twice, and counting must leave no gradient in either."""
    model = kind(8, 16, num_layers=2, batch_first=True)
    weights = model._flat_weights
    meter = redline.Meter(tokens_per_step=1, model=model)
    train(model, meter, [torch.ones(3, 5, 8)] * 2, loss=lambda model, batch: model(batch)[0].sum())
    model.zero_grad()
    forward = 2 * 3 * 5 * (4 * 16 * (8 + 16) + 4 * 16 * (16 + 16))
    assert meter.summary()["flops_per_step"] == 3 * forward
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model._flat_weights is weights
    assert all(mine is own for mine, own in zip(weights, model.parameters(), strict=True))
    assert not model._weights_have_changed()


class Transforms(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.fft.fft(x).real)


def test_operators_without_a_formula_make_flops_unknown() -> None:
    model = Transforms(8, 4)
    meter = redline.Meter(tokens_per_step=1, model=model)
    train(model, meter, [torch.ones(3, 8)] * 2, loss=lambda model, batch: model(batch).sum())
    found = meter.summary()
    assert found["flops_per_step"] is None
    assert found["mfu"] is None
    assert "FLOPs are incomplete, operators without a formula: aten._fft_r2c" in found["mfu_convention"]
    assert found["mfu_convention"].endswith("; give flops_per_step")


def test_randomness_and_averages_stay_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before, state = model.state_dict()["1.running_mean"].clone(), torch.get_rng_state()
    assert count_flops(model, model, (torch.ones(4, 8),)).flops == 2 * (2 * 4 * 8 * 8)
    assert torch.equal(model.state_dict()["1.running_mean"], before)
    assert torch.equal(torch.get_rng_state(), state)


# MFU


def test_mfu_is_against_the_16_bit_peak(clock, monkeypatch) -> None:
    monkeypatch.setattr(meter_module, "probe", lambda kind: Hardware(kind="cuda", name="NVIDIA H200"))
    meter = redline.Meter(tokens_per_step=1, flops_per_step=1e14, device="cpu")
    run(meter, clock, waits=[0.0] * 5, works=[0.2] * 5)
    found = meter.summary()  # 5e14 a second of 989.4e12
    assert found["mfu"] == pytest.approx(5e14 / 989.4e12)
    assert found["mfu_convention"] == "FLOPs as given; bf16 dense peak 989.4 TFLOP/s"
    assert "50.5 %" in str(meter)


def test_a_device_without_a_peak_has_none(clock) -> None:
    meter = redline.Meter(tokens_per_step=1, flops_per_step=1e14, device="cpu")
    run(meter, clock, waits=[0.0] * 5, works=[0.2] * 5)
    found = meter.summary()
    assert found["mfu"] is None
    assert found["mfu_convention"] == "no MFU: a CPU is not in the table of device peaks"


def test_more_than_the_peak_is_no_number(clock, monkeypatch) -> None:
    monkeypatch.setattr(meter_module, "probe", lambda kind: Hardware(kind="cuda", name="NVIDIA H200"))
    meter = redline.Meter(tokens_per_step=1, flops_per_step=1e15, device="cpu")
    run(meter, clock, waits=[0.0] * 5, works=[0.2] * 5)
    assert meter.summary()["mfu"] is None
    assert "cannot be right" in meter.summary()["mfu_convention"]


# synchronisations: the bookkeeping, without a GPU


def test_the_last_step_of_the_warm_up_is_the_one_that_is_watched(clock, monkeypatch) -> None:
    """tests/gpu/test_api.py asks CUDA itself."""
    watched = []
    meter = redline.Meter(tokens_per_step=1, flops_per_step=1.0, device="cpu")

    class Watching:
        def __enter__(self):
            watched.append(["open", meter.steps])
            return []

        def __exit__(self, *_):
            watched[-1] += ["closed", meter.steps]

    monkeypatch.setattr(meter_module, "collecting_syncs", Watching)
    monkeypatch.setattr(meter, "device", torch.device("cuda"))
    run(meter, clock, waits=[0.0] * 6, works=[0.2] * 6)
    assert watched == [["open", 2, "closed", 2]]
    assert meter._syncs == ()


def test_other_warnings_of_a_watched_step_reach_the_user(monkeypatch) -> None:
    """As they would without a meter, and what CUDA says is not shown."""
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with warnings.catch_warnings(record=True) as shown, collecting_syncs() as found:
        warnings.simplefilter("always")
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("mine", stacklevel=1)
    assert [str(each.message) for each in shown] == ["mine"]
    assert [each.kind for each in found] == ["synchronisation"]
    assert modes == ["warn", "default"]


def test_a_loop_that_is_left_in_a_watched_step_does_not_stay_watched(clock, monkeypatch) -> None:
    closed = []

    class Watching:
        def __enter__(self):
            return []

        def __exit__(self, *_):
            closed.append(meter.steps)

    monkeypatch.setattr(meter_module, "collecting_syncs", Watching)
    meter = redline.Meter(tokens_per_step=1, flops_per_step=1.0, device="cpu")
    monkeypatch.setattr(meter, "device", torch.device("cuda"))
    for number in meter.data(range(9)):
        if number == 2:
            break
        meter.step()
    assert closed == [2]
    assert meter._syncs is None  # half a step is no count


# mistakes


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True])
def test_tokens_are_counted(tokens) -> None:
    with pytest.raises(UserError, match="tokens_per_step is"):
        redline.Meter(tokens_per_step=tokens)


def test_flops_are_counted_of_modules() -> None:
    with pytest.raises(UserError, match="model is a str.*flops_per_step"):
        redline.Meter(tokens_per_step=1, model="gpt2")


def test_a_loop_may_end_early() -> None:
    meter = redline.Meter(tokens_per_step=1, model=nn.Linear(2, 2))
    for _ in itertools.islice(meter.data(itertools.count()), 3):
        meter.step()
    assert meter.summary()["steps"] == 3
