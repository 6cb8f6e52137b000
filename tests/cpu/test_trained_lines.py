"""The line that an estimate ends with is one that `redline train` takes, and it makes of it what was estimated."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from redline import cli
from redline.cli import build_parser
from redline.commands.estimate_subject import hardware_of
from redline.commands.train_order import chosen_order
from redline.core.devices import find_device
from redline.core.errors import UserError
from redline.core.plan import Plan
from redline.engine.session import training_plan
from redline.predict.fitting import ZERO
from redline.predict.memory import predict_memory
from redline.predict.parallel import Layout
from redline.report.parallel import train_text

H100 = replace(hardware_of(find_device("H100-SXM")), count=8)


@pytest.fixture
def estimated(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shape = {"layers": 32, "heads": 32, "d_model": 4096, "d_ff": 16384, "vocab": 50257, "sequence": 2048}
    Path("wide.json").write_text(json.dumps(shape))
    Path("gated.json").write_text(json.dumps({**shape, "gated": True}))
    llama = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
    llama |= {"num_attention_heads": 32, "max_position_embeddings": 2048, "vocab_size": 32000}
    Path("config.json").write_text(json.dumps(llama))

    def call(words: str) -> dict[str, Any]:
        capsys.readouterr()
        assert cli.main(["estimate", *words.split(), "--gpu", "H100-SXM", "--json"]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    return call


def run_by(line: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What train makes of the line: the file is written and the ranks are counted as a shell and torchrun would."""
    words = shlex.split(line)
    if words[0] == "echo":
        Path(words[3]).write_text(words[1])
        words = words[5:]
    ranks, here = 1, 8
    if words[0] == "torchrun":
        ranks, here = int(words[2]) * int(words[4]), int(words[4])
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
        words = words[words.index("-m") + 1 :]
    assert words[:2] == ["redline", "train"]
    options = build_parser(["train"]).parse_args(words[1:])
    monkeypatch.setattr("redline.search.launch.probe_machine", lambda _: (H100, {}))
    order, _, _ = chosen_order(options, Console(quiet=True), options.gpus or ranks)
    return order


@pytest.mark.parametrize(
    "words",
    [
        "gpt2 --gpus 8",
        "gpt2 --gpus 8 --replicas 2",
        "gpt2-large --gpus 8 --rungs bf16,flash,fused-loss,tied-weights --tp 4 --global-batch 64",
        "gpt2-xl --gpus 64 --interconnect ib-400",
        "gpt2-xl --gpus 16 --interconnect ib-400 --pp 4 --micro-batch 2 --global-batch 128 --sequence 512",
        "wide.json --gpus 8",
        "wide.json --gpus 8 --tp 2 --zero 3 --optimizer adamw-foreach",
        "config.json --gpus 4 --global-batch 64",
        "gpt2 --gpus 4 --parallel fsdp-keep",
    ],
    ids=["ddp", "copies", "tensor", "nodes", "stages", "large", "both", "llama", "keep"],
)
def test_train_takes_the_line_and_makes_of_it_what_was_estimated(
    estimated: Any, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    found = estimated(words)
    assert found["parallel"]["train"]["reason"] is None
    order = run_by(found["parallel"]["train"]["command"], monkeypatch)
    layout, own = found["parallel"]["layout"], order.layout
    degrees = tuple(layout[key] for key in ("gpus", "tp", "pp", "replicas"))
    assert (own.ranks, own.tensor, own.pipeline, own.replicas) == degrees
    assert order.settings.micro_batch == layout["micro_batch"]
    assert order.settings.global_batch == layout["global_batch"]
    assert order.workload.decoder.sequence == found["settings"]["sequence"]
    plan = training_plan(order.recipe, own)
    assert replace(plan, read_loss_every=0) == replace(Plan(**found["settings"]["plan"]), read_loss_every=0)
    sizes = {key: layout[key] for key in ("gpus", "tp", "pp", "micro_batch", "accumulation", "replicas")}
    memory = predict_memory(
        order.workload.decoder, plan, micro_batch=layout["micro_batch"], layout=Layout(**sizes), zero=layout["zero"]
    )
    assert memory.total == found["memory"]["total"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("gpt2 --gpus 4 --zero 1", "train has no ZeRO 1"),
        ("config.json --gpus 4 --tp 2", "known of the built-in GPT only"),
        ("gpt2 --gpus 4 --zero 3 --optimizer muon", "muon was tried with whole ones only"),
        ("gpt2 --gpus 4 --rungs bf16,compile,cuda-graphs", "cannot wait for other ranks"),
        ("gated.json --gpus 4", "point at a Hugging Face config"),
        ("wide.json --gpus 2 --dp 2", "it does not fit"),
    ],
    ids=["zero-1", "llama", "muon", "graphs", "gated", "memory"],
)
def test_what_train_does_not_run_is_said(estimated: Any, words: str, reason: str) -> None:
    parallel = estimated(words)["parallel"]
    train = parallel["train"]
    assert train["command"] is None
    assert reason in train["reason"]
    text = train_text(parallel, 100)
    assert reason in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100


def test_train_takes_the_line_of_what_fits_instead(estimated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to share and the cuts that were named are part of what does not fit: nothing of them is left."""
    for words in ("wide.json --gpus 8 --parallel ddp", "wide.json --gpus 8 --pipeline 2"):
        other = estimated(words)["parallel"]["shortage"]["instead"]
        order = run_by(other["command"], monkeypatch)
        layout, plan = other["layout"], training_plan(order.recipe, order.layout)
        sizes = {key: layout[key] for key in ("gpus", "tp", "pp", "micro_batch", "accumulation")}
        zero = ZERO[plan.parallel]
        memory = predict_memory(
            order.workload.decoder, plan, micro_batch=layout["micro_batch"], layout=Layout(**sizes), zero=zero
        )
        assert memory.total == other["memory_bytes"] <= 80 * 1024**3


def test_only_what_train_runs_is_recommended(estimated: Any) -> None:
    for words in ("gpt2-medium --gpus 8", "wide.json --gpus 16 --interconnect ib-400", "config.json --gpus 8"):
        found = estimated(words)
        advice = found["parallel"]["recommendation"]
        layouts = [row["layout"] for row in (advice["best"], *advice["others"])]
        assert {layout["zero"] for layout in layouts} <= {0, 3}
        assert not any(layout["zero"] and layout["pp"] > 1 for layout in layouts)
        if words.startswith("config"):
            assert {(layout["tp"], layout["pp"]) for layout in layouts} == {(1, 1)}
        assert any("only what redline train runs" in note for note in found["notes"])


def test_the_line_is_broken_where_a_shell_lets_it_be(estimated: Any) -> None:
    command = estimated("gpt2-xl --gpus 64 --interconnect ib-400 --rungs bf16,flash")["parallel"]["train"]["command"]
    text = train_text({"train": {"command": command, "reason": None}, "shortage": None}, 100)
    first, *lines = text.splitlines()
    assert first == "to train like that:"
    assert len(lines) > 1
    assert all(len(line) <= 100 for line in lines)
    assert shlex.split("\n".join(lines).replace("\\\n", " ")) == shlex.split(command)


def test_what_one_process_is_told_of_copies_is_a_whole_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proposal goes through every check that train has, not only through the one that made it."""
    with pytest.raises(UserError) as refused:
        run_by("redline train gpt2 --replicas 2", monkeypatch)
    (gpus,) = re.findall(r"say --gpus (\d+) too", refused.value.fix)
    order = run_by(f"redline train gpt2 --replicas 2 --gpus {gpus}", monkeypatch)
    assert (order.recipe.rungs[-1], order.layout.replicas, order.layout.ranks) == ("fsdp", 2, 4)


def test_a_recipes_own_way_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.json").write_text('{"rungs": ["tf32", "fsdp-keep"], "micro_batch": 4}')
    order = run_by("redline train gpt2 --gpus 4 --recipe own.json", monkeypatch)
    assert order.recipe.rungs == ("tf32", "fsdp-keep")
    Path("own.json").write_text('{"rungs": ["tf32"], "micro_batch": 4}')
    assert run_by("redline train gpt2 --gpus 4 --recipe own.json", monkeypatch).recipe.rungs == ("tf32", "ddp")


def test_a_recipe_that_ranks_have_measured_is_estimated_as_it_trains(
    estimated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its way to share counts where there are GPUs to share, unless --parallel says another; on one it says nothing."""
    Path("best.json").write_text('{"rungs": ["tf32", "bf16", "flash", "fsdp"], "micro_batch": 4}')
    for more, zero, way in (("", 3, "fsdp"), (" --parallel ddp", 0, "ddp"), (" --tensor 2", 3, "fsdp")):
        found = estimated(f"gpt2 --gpus 4 --from best.json{more}")
        assert found["parallel"]["layout"]["zero"] == zero
        order = run_by(found["parallel"]["train"]["command"], monkeypatch)
        assert order.recipe.rungs[-1] == way
    assert estimated("gpt2 --from best.json")["parallel"] is None
    for cut in ("--gpus 4 --tensor 4", "--gpus 2 --pipeline 2"):  # nobody has data of their own
        found = estimated(f"gpt2 {cut} --from best.json")
        order = run_by(found["parallel"]["train"]["command"], monkeypatch)
        plan = training_plan(order.recipe, order.layout)
        assert (found["parallel"]["layout"]["zero"], plan.parallel) == (0, "none")
