"""benchmarks/gpt2_records.sh: what it runs, what it keeps and what it goes on with; and the recipes beside it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from redline.core.hardware import Hardware
from redline.core.recipe import load_recipe
from redline.core.values import from_json
from redline.rungs import plan_of
from redline.search.ladder import check_recipe_applies
from redline.workloads import resolve_workload

PARTS = ["ladder", "batch", "memory", "switches", "overlap", "medium", "large", "xl"]
# Stands in for Python: notes its words, prints a document, and ends as it is told. A ladder makes its run directory.
FAKE = """#!/usr/bin/env bash
echo "$*" >> "$SEEN"
printf '%s' "$DOCUMENT"
[ -z "${ASKS:-}" ] || kill -INT "$PPID"
while [ $# -gt 0 ]; do [ "$1" = --out ] && mkdir -p "$2" && touch "$2/run.json"; shift; done
exit "${CODE:-0}"
"""
WHOLE = '{"finished": true}'


@pytest.fixture
def make(repository: Path, tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    out, seen = tmp_path / "out", tmp_path / "seen"

    def run(*parts: str, **environment: str) -> tuple[int, list[str], str]:
        seen.write_text("")
        fake = {"PYTHON": str(python), "SEEN": str(seen), "DOCUMENT": WHOLE}
        done = subprocess.run(
            ["bash", repository / "benchmarks" / "gpt2_records.sh", out, *parts],
            env={"PATH": os.environ["PATH"], **fake, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, seen.read_text().splitlines(), done.stderr

    run.out = out
    return run


def test_all_parts_and_then_none_again(make) -> None:
    code, seen, said = make()
    assert (code, len(seen)) == (0, len(PARTS)), said
    assert "NANOGPT names no checkout" in said
    assert said.count("SHARDS names no folder") == 2
    assert all((make.out / f"{name}.json").read_text() == WHOLE for name in PARTS)
    code, seen, _ = make()
    assert (code, seen) == (0, [])


def test_an_unfinished_part_is_tried_again_and_a_ladder_goes_on(make) -> None:
    code, seen, _ = make("ladder", "switches", CODE="124", DOCUMENT='{"finished": false}')  # as LIMIT ends them
    assert (code, len(seen)) == (124, 2)
    assert {path.name for path in make.out.glob("*.json")} == {"ladder.partial.json", "switches.partial.json"}
    _, seen, _ = make("ladder", "switches")
    assert seen[0].split() == ["-m", "redline", "ladder", "--resume", str(make.out / "ladder"), "--json"]
    assert "switches.py" in seen[1]
    assert {path.name for path in make.out.glob("*.json")} == {"ladder.json", "switches.json"}


def test_what_came_out_badly_is_a_result_and_what_broke_is_none(make) -> None:
    code, _, _ = make("large", CODE="1")
    assert (code, (make.out / "large.json").exists()) == (1, True)
    code, _, _ = make("medium", "memory", CODE="2", DOCUMENT="")
    assert (code, {path.name for path in make.out.glob("m*")}) == (2, {"medium"}), "a run directory is all that is left"


def test_ctrl_c_ends_all_parts(make) -> None:
    code, seen, _ = make("ladder", "switches", CODE="130", DOCUMENT='{"finished": false}', ASKS="yes")
    assert (code, len(seen)) == (130, 1)
    assert (make.out / "ladder.partial.json").exists()


def test_against_and_long_with_what_they_need(make) -> None:
    code, seen, _ = make("against", "long", "long-fp8", NANOGPT="nano", SHARDS="shards", SPEED_UP="1.17")
    assert code == 0
    assert "--nanogpt nano" in seen[0]
    assert "--changed" not in seen[1]
    assert "hopper-fp8.json --speed-up 1.17" in seen[2]
    assert all(f"--data shards --out {make.out / 'runs'}" in words for words in seen[1:]), "they share their runs"


def test_the_8_bit_rows_alone_are_the_end_of_the_ladder(make) -> None:
    _, seen, _ = make("ladder", "fp8")
    rungs = "fp8-head,fp8-linears,fp8-mlps"
    assert f"--also {rungs} " in seen[0]
    assert "--from" not in seen[0]
    assert f"hopper.json --rungs cuda-graphs,{rungs} " in seen[1]


def test_a_part_that_there_is_not(make) -> None:
    code, seen, said = make("memory", "speed")  # told before the first of them has taken its minutes
    assert (code, seen) == (2, [])
    assert "there is no part speed" in said


def test_the_recipes_apply_to_the_card_that_they_are_for(repository: Path) -> None:
    record = repository / "records" / "2026-11-18-h200-memory-rungs-gpt2-b64.json"
    card = from_json(Hardware, json.loads(record.read_text())["hardware"])
    gpt2, folder = resolve_workload("gpt2"), repository / "benchmarks" / "recipes"
    fast, fp8 = (load_recipe(folder / f"{name}.json") for name in ("hopper", "hopper-fp8"))
    for recipe in (fast, fp8):
        check_recipe_applies(recipe, gpt2, card)
    assert fp8.rungs[: len(fast.rungs)] == fast.rungs
    assert plan_of(fast.rungs).attention == "cudnn"


def test_without_words_it_says_what_it_takes(repository: Path) -> None:
    done = subprocess.run(["bash", repository / "benchmarks" / "gpt2_records.sh"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "a folder for the results, then the parts" in done.stderr
    assert "long-fp8" in done.stderr


def test_larger_models_are_those_of_gpt2(make) -> None:
    code, seen, said = make("medium", "xl", WORKLOAD="tiny")
    assert (code, seen) == (0, [])
    assert "xl: left out, WORKLOAD is tiny" in said
