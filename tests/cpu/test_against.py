"""benchmarks/against.py: whose step is timed, how turns are taken, and what is made of the times."""

from __future__ import annotations

import io
import json
import math
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.workload import Workload
from redline.engine import probe

MODEL = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.embedding = config, nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=config.bias)
        print("number of parameters: some")

    def forward(self, idx, targets):
        logits = self.head(self.embedding(idx))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        self.asked = (weight_decay, learning_rate, betas, device_type)
        return torch.optim.SGD(self.parameters(), lr=learning_rate, weight_decay=weight_decay)
"""
TRAIN = """
import os
learning_rate = 6e-1 # max learning rate
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
grad_clip = 0.25
dropout = 0.0
warmup_iters = 3
gradient_accumulation_steps = 5 * 8
device = 'cuda'
raise SystemExit("nobody runs me")
"""
QUICK = Namespace(at_once=2, block=10, rounds=4, seconds=60.0)


@pytest.fixture(scope="module")
def against(repository: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:  # for as long as it imports: a kernels.py lies there too
        patch.syspath_prepend(str(repository / "benchmarks"))
        import against
    return against


@pytest.fixture
def nanogpt(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.fixture
def order(against: Any, small: Workload, nanogpt: Path) -> Callable[..., Any]:
    def make(candidate: str = "redline", micro_batch: int = 2, rungs: tuple[str, ...] = ("tied-weights",)) -> Any:
        return against.Order(
            candidate=candidate,
            workload=small,
            rungs=rungs,
            micro_batch=micro_batch,
            device="cpu",
            compiled=False,
            nanogpt=str(nanogpt),
        )

    return make


# whose step it is


def test_nanogpts_step_is_its_own_loop(against: Any, order: Callable[..., Any], tokens: Path, nanogpt: Path) -> None:
    """Held against the loop of its train.py, written down once more: warm-up, autocast, clipping, its own optimizer."""
    asked = order("nanogpt")
    step, model = against.contestants.nanogpt_step(asked, torch.device("cpu"))
    torch.manual_seed(asked.workload.seed)
    twin = against.contestants.import_model(nanogpt).GPT(model.config)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.6, weight_decay=0.1)
    for taken, rate in enumerate((0.6 / 4, 0.6 / 2, 0.6 * 3 / 4, 0.6, 0.6)):
        batch = torch.randint(257, (2, 2, 64), generator=torch.Generator().manual_seed(taken))
        optimizer.param_groups[0]["lr"] = rate
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = twin(batch[0], batch[1])[1]
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(step(batch), loss.detach())
        assert all(parameter.grad is None for parameter in model.parameters())
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert model.asked == (0.1, 0.6, (0.9, 0.95), "cpu")
    assert model.config.vocab_size == 320  # 257 to the next multiple of 64
    assert (model.config.block_size, model.config.bias, model.config.n_layer) == (64, True, 2)
    assert against.contestants.nanogpt_step(order("nanogpt-no-bias"), torch.device("cpu"))[1].config.bias is False


@pytest.mark.parametrize("candidate", ["transformers", "redline"])
def test_a_runner_trains_in_blocks(against: Any, order: Callable[..., Any], tokens: Path, candidate: str) -> None:
    runner = against.contestants.Runner(order(candidate), tokens)
    found = [runner.block(3) for _ in range(2)]
    assert [len(block["seconds"]) for block in found] == [3, 3]
    assert runner.said["loss_first"] == pytest.approx(math.log(257), abs=0.4)
    assert found[1]["loss"] < found[0]["loss"] < runner.said["loss_first"]
    runner.close()


def test_all_gpt2s_have_the_same_model(against: Any, order: Callable[..., Any]) -> None:
    """Two independent models of one shape: as many parameters, but for the rows that the padding adds."""
    device = torch.device("cpu")
    theirs = against.contestants.transformers_step(order("transformers"), device)[1]
    ours = against.contestants.our_step(order("redline"), device)[1]
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (theirs, ours)]
    assert counts[0] - counts[1] == (320 - 257) * 64


def test_the_loss_is_never_read(against: Any, order: Callable[..., Any]) -> None:
    step, _ = against.contestants.our_step(order("redline", rungs=()), torch.device("cpu"))
    assert step.plan.read_loss_every == 0


# turns


class Fake:
    """Steps that take what the test says: seconds of the blocks to come."""

    def __init__(self, order: Any, blocks: list[float], log: list[str]) -> None:
        self.order, self.blocks, self.log, self.open = order, iter(blocks), log, True

    def block(self, steps: int) -> dict[str, Any]:
        assert self.open
        self.log.append(self.order.name)
        seconds = next(self.blocks)
        if seconds < 0:
            raise sys.modules["against"].OutError("lost its device")  # type: ignore[attr-defined]
        return {"seconds": [seconds] * steps, "peak_bytes": 5, "loss": 1.5}

    def close(self) -> None:
        self.open = False


def played(against: Any, orders: list[Any], times: dict[str, list[float]], **changes: Any) -> tuple[Any, list[str]]:
    log: list[str] = []
    found = against.Found(orders=orders)
    options = Namespace(**{**vars(QUICK), **changes})
    against.compare(found, lambda one: (Fake(one, times[one.name], log), {}), options)
    return found, log


def test_everybody_plays_at_their_best_and_is_first_in_turn(against: Any, order: Callable[..., Any]) -> None:
    orders = [order(name, size) for size in (4, 2) for name in ("nanogpt", "transformers", "redline")]
    times = {
        "nanogpt-4": [1.0, 1.0, 0.8, 0.8, 0.8, 0.8],
        "nanogpt-2": [0.6, 0.6],
        "transformers-4": [3.0, 3.0],
        "transformers-2": [1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        "redline-4": [0.5, 0.5, 0.4, 0.5, 0.4, 0.5],
        "redline-2": [0.3, 0.3],
    }
    found, log = played(against, orders, times)
    names = [one.name for one in orders]
    assert log[:12] == names + names[::-1]
    n, t, r = "nanogpt-4", "transformers-2", "redline-4"
    turns = {(n, r, t): 0, (r, t, n): 0, (t, n, r): 0}
    for start in range(12, 24, 3):
        turns[tuple(log[start : start + 3])] += 1  # type: ignore[index]
    assert sorted(turns.values()) == [1, 1, 2]
    record = against.results(found, probe.probe("cpu"))
    assert record["finished"]
    assert record["sides"]["redline"]["tokens_per_second"] == pytest.approx(4 * 64 / 0.45)  # the median of all steps
    assert record["sides"]["redline"]["step_seconds"]["n"] == 40
    assert record["sides"]["redline"]["rounds"] == [0.4, 0.5, 0.4, 0.5]
    assert record["ratios"]["nanogpt"]["median"] == pytest.approx((2.0 + 1.6) / 2)  # of the rounds: 2, 1.6, 2, 1.6
    # Sizes differ, so rates count and not times: 4 sequences in 0.4 or 0.5 s against 2 in 1.0 s.
    assert record["ratios"]["transformers"] == pytest.approx(
        {"median": 4.5, "p10": 4.0, "p90": 5.0, "n": 4, "mean": 4.5}
    )
    assert [size["tokens_per_second"] for size in record["sides"]["transformers"]["sizes"]] == [256 / 3.0, 128.0]


def test_whoever_had_no_memory_in_company_tries_again_alone(against: Any, order: Callable[..., Any]) -> None:
    orders, tries, log = [order("transformers"), order("nanogpt"), order()], [], []

    def open_player(one: Any) -> tuple[Any, dict[str, Any]]:
        tries.append(one.candidate)
        if one.candidate == "transformers" and tries.count("transformers") == 1:
            raise against.OutError(against.OUT_OF_MEMORY)
        if one.candidate == "nanogpt":
            raise against.OutError("no module named nanogpt")
        return Fake(one, [1.0] * 6, log), {}

    found = against.Found(orders=orders)
    against.compare(found, open_player, QUICK)
    assert sorted(tries) == ["nanogpt", "redline", "transformers", "transformers"]
    assert tries[-1] == "transformers"
    assert found.reasons == {"nanogpt-2": "no module named nanogpt"}
    record = against.results(found, probe.probe("cpu"))
    assert not record["finished"]
    assert record["ratios"]["nanogpt"] is None
    assert record["ratios"]["transformers"]["median"] == 1.0


def test_one_that_fails_in_its_turn_is_out_and_keeps_its_rows(against: Any, order: Callable[..., Any]) -> None:
    times = {"nanogpt-2": [1.0, 1.0, 1.0, -1.0], "redline-2": [0.5] * 6}
    found, log = played(against, [order("nanogpt"), order()], times)
    assert log.count("redline-2") == 6
    record = against.results(found, probe.probe("cpu"))
    assert record["ratios"]["nanogpt"] == {"median": 2.0, "p10": 2.0, "p90": 2.0, "n": 1, "mean": 2.0}
    assert record["sides"]["nanogpt"]["sizes"][0]["reason"] == "lost its device"
    assert not record["finished"]


def test_no_round_begins_when_the_time_is_used_up(against: Any, order: Callable[..., Any]) -> None:
    """And a comparison that has fewer than were asked for is not whole: no README takes it."""
    found, kept = against.Found(orders=[order("nanogpt"), order()]), []
    options = Namespace(**{**vars(QUICK), "seconds": -1.0})

    def keep() -> None:
        record = against.results(found, probe.probe("cpu"))
        ratio = record["ratios"]["nanogpt"]
        kept.append((None if ratio is None else ratio["n"], record["finished"]))

    def play(options: Namespace) -> None:
        against.compare(found, lambda one: (Fake(one, [1.0] * 6, []), {}), options, keep)

    play(options)
    assert len(found.rounds) == 1
    assert kept == [(None, False), (1, False), (1, False)], "sizes, a round, and how it ended"
    found, kept = against.Found(orders=[order("nanogpt"), order()]), []
    play(QUICK)
    assert kept[0] == (None, False)
    assert kept[-2:] == [(4, False), (4, True)]


def test_the_table_has_100_columns_and_llmc_as_published(against: Any, order: Callable[..., Any]) -> None:
    orders = [replace(one, workload=replace(one.workload, name="gpt2")) for one in (order("nanogpt-no-bias"), order())]
    found, _ = played(against, orders, {"nanogpt-no-bias-2": [1.234e-1] * 6, "redline-2": [1.11e-4] * 6})
    found.reasons["nanogpt-no-bias-2"] = "x" * 40
    hardware = Hardware(kind="cuda", name="NVIDIA H200", multiprocessors=132)
    record = {"workload": "gpt2", "sequence": 64, "hardware": {"name": hardware.name}, "versions": {"torch": "2.11"}}
    record |= json.loads(json.dumps(against.results(found, hardware)))
    console = Console(record=True, width=against.WIDTH, file=io.StringIO())
    against.show(record, console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 100
    assert not any("…" in line for line in lines)
    assert "redline / nanogpt-no-bias: 1111.712 (p10 1111.712, p90 1111.712, 4 rounds)" in lines
    assert record["published"]["llm.c"]["tokens_per_second"] == pytest.approx(468_114, abs=1)
    assert record["published"]["llm.c"]["measured_here"] is False
    assert record["sides"]["redline"]["mfu"] > 0


# mistakes


def test_mistakes_stop_before_anything_runs(
    against: Any, nanogpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(against, "probe_machine", lambda _: pytest.fail("too late"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (nanogpt / "train.py").write_text("learning_rate = 1e-3\n")
    cases = {
        (
            "gpt2",
            "--nanogpt",
            str(nanogpt),
        ): "does not set weight_decay, beta1, beta2, grad_clip, dropout, warmup_iters",
        ("gpt2", "--nanogpt", str(tmp_path / "none")): "cannot read",
        ("gpt2", "--candidates", "nanogpt,redline"): "nanogpt has no code",
        ("gpt2", "--candidates", "transformers"): "redline is not among the candidates",
        ("gpt2", "--candidates", "redlin"): "did you mean 'redline'",
        ("gpt2", "--rounds", "0"): "--rounds is 0",
    }
    for words, text in cases.items():
        assert against.main(list(words)) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(UserError, match="is no list of micro batches"):
        against.sizes_in("16,x")


def test_sizes_of_one_candidate(against: Any, order: Callable[..., Any]) -> None:
    found = against.orders_of(order(), ["nanogpt", "redline"], "16,64", ["redline=32"])
    assert [one.name for one in found] == ["nanogpt-64", "redline-32", "nanogpt-16"]
    with pytest.raises(UserError, match="unknown candidate 'nano'"):
        against.orders_of(order(), ["nanogpt", "redline"], "16", ["nano=32"])


def test_our_recipe_is_the_ladders_with_what_hopper_prefers(against: Any, small: Workload) -> None:
    features = ("tf32", "bf16", "fp16", "compile", "triton", "flash", "cudnn-attention")
    rungs = against.fastest_rungs(small, Hardware(kind="cuda", name="NVIDIA H200", features=features))
    assert {"cudnn-attention", "fused-backward", "fused-loss", "bf16-residual", "tied-weights"} <= set(rungs)
    assert "flash" not in rungs
    cpu = against.fastest_rungs(small, Hardware(kind="cpu", name="a CPU", features=("compile", "flash")))
    assert "flash" in cpu
    assert not {"cudnn-attention", "fused-backward"} & set(cpu)


@pytest.mark.long
def test_real_processes_take_turns(
    against: Any, nanogpt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (nanogpt / "recipe.json").write_text(json.dumps({"rungs": ["tied-weights"], "micro_batch": 2}))
    words = f"tiny --nanogpt {nanogpt} --recipe {nanogpt}/recipe.json --candidates nanogpt,redline --eager --device cpu"
    assert against.main([*words.split(), "--micro-batches", "1,2", "--rounds", "2", "--block", "2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["finished"]
    assert record["ratios"]["nanogpt"]["n"] == 2
    assert record["nanogpt"]["settings"]["grad_clip"] == 0.25
    assert record["sides"]["redline"]["sizes"][0]["loss_first"] == pytest.approx(math.log(257), abs=0.4)
