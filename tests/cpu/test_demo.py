"""`make demo`, from any folder and without make: the ladder it climbs ends with a table, a page and every result."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

# Two rows and few steps of the very same command: about ten seconds instead of minutes. So few steps time nothing, so
# speed must not decide what is kept.
LESS = ("--rungs", "padded-vocab", "--keep", "all", "--steps", "2", "--check-steps", "2", "--micro-batch", "1")


def demo_words(repository: Path) -> list[str]:
    """What the Makefile's target runs, without the environment's path."""
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)
    assert recipe, "there is no demo target"
    (line,) = recipe[1].splitlines()
    program, *words = shlex.split(line.strip())
    assert program == "$(BIN)/redline"
    return words


def test_the_demo_climbs_the_ladder_of_the_embedded_workload(repository: Path) -> None:
    assert demo_words(repository) == ["ladder", "tiny"]


@pytest.mark.slow
def test_the_demo_ends_with_a_table_a_page_and_every_result(repository: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "redline", *demo_words(repository), *LESS, "--device", "cpu", "--out", "run"]
    environment = {**os.environ, "PYTHONPATH": str(repository), "COLUMNS": "100"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    table = [line.split() for line in done.stdout.splitlines()]
    assert [words[0] for words in table if words[-1:] in (["same"], ["rounding"])] == ["baseline", "padded-vocab"]
    assert "best" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    run = tmp_path / "run"
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html")
    assert "padded-vocab" in page
    results = [json.loads(line) for line in (run / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["ok"], line["job"]["kind"], line["job"]["recipe"]["rungs"]) for line in results] == [
        (True, "reference", []),
        (True, "measure", []),
        (True, "measure", ["padded-vocab"]),
    ]
    assert json.loads((run / "best.json").read_text(encoding="utf-8"))["micro_batch"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"run"}, "everything is in the run directory"
