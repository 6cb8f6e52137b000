"""Faults planted in models, each on a line of its own, and found there."""

from __future__ import annotations

import inspect
import itertools
import linecache
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from redline.core import profile as names
from redline.core.plan import Plan
from redline.core.profile import FINDINGS, Finding, Part
from redline.engine import profiling
from redline.engine.findings import Watch, compiler_finding, compiler_log, merge, starvation, watch_syncs
from redline.engine.profiling import profile_step
from redline.engine.step import TrainStep
from redline.optim.adafactor import Adafactor

CPU, META = torch.device("cpu"), torch.device("meta")


class Planted(nn.Module):
    """A layer, and after it whatever `fault` does with what the layer gave."""

    def __init__(self, fault: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.fault(y)
        return y.sum()


def train_on(model: nn.Module, *, autocast: bool = False) -> Callable[[torch.Tensor], None]:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)  # reads its step counters with .item()

    def step(batch: torch.Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def watched(step: Callable[[torch.Tensor], Any]) -> tuple[Finding, ...]:
    batch = torch.randn(4, 8)
    step(batch)
    with Watch(CPU) as watch:
        step(batch)
    return watch.findings(steps=1)


def text_at(finding: Finding) -> str:
    assert finding.file is not None
    assert finding.line is not None
    return linecache.getline(finding.file, finding.line).strip()


# synchronisations: each function's last line is the fault


def item(y: torch.Tensor) -> None:
    y.sum().item()


def branch(y: torch.Tensor) -> None:
    assert y.sum() == y.sum()


def printing(y: torch.Tensor) -> None:
    print(y)


def formatting(y: torch.Tensor) -> None:
    str(f"{y.sum().detach():.2f}")


def listing(y: torch.Tensor) -> None:
    y.tolist()


def numpy(y: torch.Tensor) -> None:
    y.detach().numpy()


def nonzero(y: torch.Tensor) -> None:
    y.nonzero()


def mask(y: torch.Tensor) -> None:
    y[y > 0]


def where(y: torch.Tensor) -> None:
    torch.where(y > 0)


def equal(y: torch.Tensor) -> None:
    torch.equal(y, y)


def unique(y: torch.Tensor) -> None:
    torch.unique(y)


SYNCHRONISATIONS = (item, branch, printing, formatting, listing, numpy, nonzero, mask, where, equal, unique)


@pytest.mark.parametrize("fault", SYNCHRONISATIONS, ids=lambda fault: fault.__name__)
def test_synchronisations_are_found_at_their_line(fault, capsys):
    (found,) = watched(train_on(Planted(fault)))
    assert found.kind == "synchronisation"
    assert found.function == fault.__name__
    assert text_at(found) == inspect.getsource(fault).splitlines()[-1].strip()
    assert found.per_step == 2 if fault is formatting else found.per_step >= 1


def test_a_clean_step_has_no_findings():
    def nothing(y: torch.Tensor) -> None:
        y * 2

    assert watched(train_on(Planted(nothing))) == ()
    assert watched(train_on(Planted(nothing), autocast=True)) == ()


def test_how_often_is_counted():
    def thrice(y: torch.Tensor) -> None:
        for _ in range(3):
            y.sum().item()

    (found,) = watched(train_on(Planted(thrice)))
    assert found.per_step == 3


# precision and attention


class HalfWatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.second(y.float()).sum()  # planted


def test_matmuls_in_fp32_though_autocast_is_on():
    (found,) = watched(train_on(HalfWatched(), autocast=True))
    assert found.kind == "fp32-matmul"
    assert "# planted" in text_at(found)
    assert watched(train_on(HalfWatched())) == ()  # without autocast fp32 is what was asked for


class Attention(nn.Module):
    def __init__(self, mask: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.zeros(4, 4)) if mask else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.layer(x)[None, None]  # [1, 1, T, d]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=self.bias, is_causal=self.bias is None).sum()


def test_attention_that_falls_back_to_plain_products():
    """A mask with a gradient is what no fused kernel of the CPU takes."""
    (found,) = watched(train_on(Attention(mask=True)))
    assert found.kind == "math-attention"
    assert "scaled_dot_product_attention(" in text_at(found)
    assert "with a mask of float32" in found.detail
    assert watched(train_on(Attention(mask=False))) == ()


# host and device: 'meta' plays the device


def look_at(run: Callable[[], Any]) -> tuple[Finding, ...]:
    with Watch(META) as watch:
        run()
    return watch.findings(steps=1)


def test_a_tensor_made_on_the_host():
    device_tensor = torch.ones(4, 4, device="meta")

    def forward() -> None:
        device_tensor.add(1)
        torch.arange(4)  # planted

    (found,) = look_at(forward)
    assert found.kind == "host-tensor"
    assert "# planted" in text_at(found)


def test_a_copy_between_host_and_device():
    host_tensor = torch.ones(4, 4)
    (found,) = look_at(lambda: host_tensor.to("meta"))
    assert found.kind == "host-copy"
    assert 'to("meta")' in text_at(found)


def test_a_copy_to_the_host_is_found_on_a_cpu_too():
    def copying(y: torch.Tensor) -> None:
        y.cpu()

    (found,) = watched(train_on(Planted(copying)))
    assert (found.kind, found.function) == ("host-copy", "copying")


# the compiler


def compiled_findings(function: Callable[..., Any], *batches: torch.Tensor) -> tuple[Finding, ...]:
    torch._dynamo.reset()
    with compiler_log() as log:
        compiled = torch.compile(function, backend="eager", dynamic=False)
        for batch in batches:
            compiled(batch)
    torch._dynamo.reset()
    return log.findings()


def test_graph_breaks_have_a_reason_and_a_line():
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()  # planted
        return y + 1

    (found,) = compiled_findings(broken, torch.randn(4))
    assert found.kind == "graph-break"
    assert "# planted" in text_at(found)
    assert found.detail == "Call to `torch._dynamo.graph_break()`"  # the reason, not the sentence that announces it


def refuse(x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        raise RuntimeError("not today")  # refused
    return x + 1


def break_once(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch._dynamo.graph_break()  # broken
    return y + 1


def break_and_refuse(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return refuse(y)


# frames it was asked for, those it gave up on, graphs; what is said, and of which line
COMPILED = {
    "whole": (lambda x: x * 2 + 1, (1, 0, 1), None, None),
    "broken": (break_once, (2, 0, 2), "compiled in 2 graphs: ", "# broken"),
    "refused": (refuse, (1, 1, 0), "nothing was compiled, every step runs in eager: ", "# refused"),
    "half": (break_and_refuse, (3, 2, 1), "2 of 3 frames run in eager, not compiled: ", None),
}


@pytest.mark.parametrize("case", COMPILED)
def test_what_the_compiler_leaves_to_python_is_counted(case: str, capfd: pytest.CaptureFixture[str]):
    function, counts, said, line = COMPILED[case]
    torch._dynamo.reset()
    with compiler_log() as log:
        torch.compile(function, backend="eager", dynamic=False)(torch.ones(4))
    found = log.compiled()
    torch._dynamo.reset()
    assert (found.frames, found.left, found.graphs) == counts
    trouble = found.trouble
    assert (trouble is None) == (said is None)
    assert "graph_breaks" not in capfd.readouterr().err  # torch prints what TORCH_LOGS asks for, and we did not
    if said is not None and trouble is not None:
        assert trouble.startswith(said)
        assert ("RuntimeError" in trouble) == ("refuse" in function.__name__)
        place = trouble.removeprefix(said).split(": ")[0]
        path, number = place.rsplit(":", 1)
        assert Path(path) == Path(__file__)
        assert line is None or line in Path(path).read_text().splitlines()[int(number) - 1]


def test_recompilations_name_the_guard():
    def changing(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    (found,) = compiled_findings(changing, torch.randn(4), torch.randn(5))
    assert (found.kind, found.function) == ("recompile", "changing")
    assert found.line == inspect.getsourcelines(changing)[1]
    assert found.detail.startswith("recompiled once: tensor 'x' size mismatch")


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        torch._dynamo.graph_break()
        return x * self.calls


def test_a_line_that_is_compiled_again_and_again_is_one_finding():
    """Where the guard is, and not where its function begins; the number of a graph and a path cut short say nothing."""
    torch._dynamo.reset()
    model = torch.compile(Counts(), backend="eager")
    with compiler_log() as log:
        for _ in range(5):
            model(torch.ones(3))
    found = [each for each in log.findings() if each.kind == "recompile"]
    first = inspect.getsourcelines(Counts.forward)[1]
    assert len({each.where for each in found}) == len(found)
    assert {each.function for each in found} == {"forward"}
    counted = next(each for each in found if each.line == first + 1)
    assert counted.detail == "recompiled 4 times: self.calls == 0, of `self.calls += 1`"
    assert counted.file == __file__
    assert not any("/" in each.detail for each in found)
    torch._dynamo.reset()


RECOMPILED = """Recompiling function {function} in /home/me/model.py:8
    triggered by the following guard failure(s):
    - 2/0: ___stack0 == 0.5                        # return self.b(x * s)  # {path}:12 in {function} (HINT: so)
    - User stack trace:"""


@pytest.mark.parametrize(("path", "line", "end"), [("e/me/model.py", 12, ""), ("e/me/other.py", 8, " at other.py:12")])
def test_the_line_of_a_guard_is_the_findings_where_it_is_in_that_file(path, line, end):
    message = RECOMPILED.format(function="torch_dynamo_resume_in_forward_at_11", path=path)
    wanted = f"___stack0 == 0.5, of `return self.b(x * s)`{end}"
    assert compiler_finding(message) == Finding(
        kind="recompile", detail=wanted, file="/home/me/model.py", line=line, function="forward"
    )


@pytest.mark.parametrize(
    "message",
    [
        "Graph break in user code at /home/me/model.py:12\nReason: Unsupported: print\nUser code traceback:",
        "Graph break in user code at /home/me/model.py:12\nGraph Break Reason: Unsupported: print\n",
        "Graph break (user stack suppressed due to duplicate graph break) in user code at /home/me/model.py:12\n"
        "Graph Break Reason: Unsupported: print",
    ],
)
def test_every_wording_of_a_graph_break_is_understood(message):
    wanted = Finding(kind="graph-break", detail="Unsupported: print", file="/home/me/model.py", line=12)
    assert compiler_finding(message) == wanted


def test_other_messages_are_no_findings():
    assert compiler_finding("step 1: torchdynamo start tracing") is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it after a graph break
def test_compiled_code_is_watched_as_python():
    """What would be a graph break to the compiler is still a line that waits."""
    model = Planted(item)
    step = train_on(model)
    model.compile(backend="eager")
    (found,) = watched(step)
    assert (found.kind, found.function) == ("synchronisation", "item")
    torch._dynamo.reset()


# data


def test_a_slow_loader_is_found_by_a_profile(monkeypatch):
    def slow_batches() -> Iterator[torch.Tensor]:
        while True:
            time.sleep(0.02)
            yield torch.randn(4, 8)

    monkeypatch.setattr(profiling, "TIMED_STEPS_BETWEEN", (2, 2))
    model = nn.Linear(8, 8)
    step = train_on(nn.Sequential(model, Total()))
    profile = profile_step(step, slow_batches(), module=model, device=CPU)
    assert "loader-starvation" in {found.kind for found in profile.findings}
    assert profile.by_group()[names.DATA_WAIT] > 0.5 * profile.step_seconds.median


class Total(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


def test_a_loader_that_keeps_up_is_no_finding():
    assert starvation([Part(phase=names.DATA, group=names.DATA_WAIT, seconds=0.004)], 0.1) == ()
    (found,) = starvation([Part(phase=names.DATA, group=names.DATA_WAIT, seconds=0.02)], 0.1)
    assert "20.00 ms (20%)" in found.detail


def test_a_step_that_fits_only_compiled_is_profiled_without_its_lines(monkeypatch):
    monkeypatch.setattr(profiling, "TIMED_STEPS_BETWEEN", (2, 2))

    def step(batch: torch.Tensor) -> None:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None and not remembered:
            remembered.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        model(batch).sum().backward()

    remembered: list[bool] = []
    model = nn.Linear(8, 8)
    profile = profile_step(step, itertools.repeat(torch.randn(4, 8)), module=model, device=CPU, steps=1)
    assert remembered
    assert profile.notes == ("source lines were not watched: uncompiled, the step does not fit in memory",)
    assert sum(part.seconds for part in profile.parts) == pytest.approx(profile.step_seconds.median)


# redline's own step


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, {("no-sync", names.RECIPE)}),
        ({"read_loss_every": 0}, set()),
        ({"read_loss_every": 0, "loss_scaling": True}, {("fused-adamw", names.RECIPE)}),
        ({"loss_scaling": True}, {("no-sync", names.RECIPE), ("fused-adamw", names.RECIPE)}),
    ],
    ids=["reads-the-loss", "waits-for-nothing", "scales-the-loss", "both"],
)
def test_waits_of_the_step_are_the_recipes_and_those_of_the_model_its_lines(settings, wanted):
    model = Planted(lambda y: y.sum().item())  # waits
    line = inspect.currentframe().f_lineno - 1
    step = TrainStep(
        adapter=None,
        model=model,
        loss_of=model,
        optimizer=torch.optim.AdamW(model.parameters(), foreach=False),
        plan=Plan(**settings),
        learning_rate=None,
        clip_norm=1.0,
    )
    found = [each for each in watched(step) if each.kind == "synchronisation"]
    assert {(each.rung, each.where) for each in found} == wanted | {(None, f"{__file__}:{line}")}


def test_the_counters_of_redlines_own_optimizers_are_no_synchronisation():
    model = Planted(lambda y: None)
    optimizer = Adafactor(model.parameters(), lr=1e-3)

    def step(batch: torch.Tensor) -> None:
        model(batch).backward()
        optimizer.step()

    assert not watched(step)


# lists


def test_findings_of_one_line_are_one():
    one = Finding(kind="synchronisation", detail="a", file="model.py", line=3, per_step=1)
    other = Finding(kind="synchronisation", detail="b", file="model.py", line=4, per_step=1)
    merged = merge([one, one, other], steps=2)
    assert [(found.line, found.per_step) for found in merged] == [(3, 1.0), (4, 0.5)]


def test_every_kind_has_a_fix():
    kinds = {"synchronisation", "fp32-matmul", "math-attention", "host-tensor", "host-copy"}
    assert set(FINDINGS) == kinds | {"graph-break", "recompile", "loader-starvation"}


def test_what_cuda_says_of_waiting_is_found_at_its_line(monkeypatch):
    """CUDA's debug mode warns from C++ at the Python line that runs; here the line itself warns with its words."""
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step():
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    line = step.__code__.co_firstlineno + 1
    (found,) = watch_syncs(lambda: [step(), step()], steps=2)
    assert (found.kind, found.line, found.per_step) == ("synchronisation", line, 1.0)
    assert Path(found.file).name == Path(__file__).name
    assert modes == ["warn", "default"]
