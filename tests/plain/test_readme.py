"""The README's promises: its commands exist, its options are real, its links lead somewhere."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from redline.cli import build_parser
from redline.commands.estimate import estimate
from redline.commands.ranks import batch_beside, check_shares, layout_of
from redline.commands.train_order import global_sequences
from redline.commands.train_recipe import check_parallel, shared_recipe
from redline.core.hardware import Hardware
from redline.core.recipe import Recipe
from redline.rungs import usual_rungs
from redline.search.ranks import check_layout, check_measured, ranked_rungs
from redline.search.words import Words
from redline.workloads import resolve_workload


def readme(repository: Path) -> str:
    return (repository / "README.md").read_text(encoding="utf-8")


def code_lines(text: str) -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_the_two_commands_of_the_first_screen_are_makefile_targets(repository: Path) -> None:
    commands = [line for line in code_lines(readme(repository)) if line.startswith("make ")]
    assert commands == ["make demo", "make test"]
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    for command in commands:
        assert re.search(rf"^{command.split()[1]}:", makefile, flags=re.MULTILINE)
    assert "redline ladder tiny" in makefile


def test_every_redline_command_is_understood(repository: Path) -> None:
    commands = [line for line in code_lines(readme(repository)) if line.startswith("redline ")]
    assert len(commands) >= 9
    for command in commands:
        assert build_parser().parse_args(shlex.split(command)[1:]).run, command


# --- layouts ----------------------------------------------------------------------------------------------------------

OF_LAYOUTS = re.compile(
    r"redline (?:train|ladder|tune|profile|estimate) [^#;`\n]*?--(?:gpus|tensor|pipeline|replicas) \d[^#;`\n]*"
)
MACHINE = Hardware(kind="cuda", name="a GPU", count=8, cpu_cores=8, features=("bf16",), capability=(9, 0))


def layout_lines(repository: Path) -> list[str]:
    """Those of the pages, and of the file that their rungs' pages are made of. One that goes on with a run has its
    layout from there; a file of the user's is not here."""
    pages = [
        repository / "README.md",
        *sorted((repository / "docs").glob("*.md")),
        repository / "redline/rungs/parallel.py",
    ]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    lines = {line.strip() for line in OF_LAYOUTS.findall(re.sub(" {2,}", "\n", text))}  # two may stand side by side
    return sorted(line for line in lines if "--resume" not in line and "config.json" not in line)


def check_train(options: argparse.Namespace) -> None:
    """As `commands/train_order.py` does before anything starts."""
    workload = resolve_workload(options.workload)
    layout = layout_of(options, options.gpus, workload, batch_beside(options, workload, None))
    hardware = replace(MACHINE, ranks=layout.ranks)
    recipe = Recipe(rungs=usual_rungs(workload, hardware), micro_batch=options.micro_batch or workload.micro_batch)
    recipe = shared_recipe(recipe, options.parallel, layout)
    check_parallel(recipe, workload, hardware, layout)
    check_layout(layout, recipe)
    sequences = global_sequences(options, workload.shape.sequence, recipe.micro_batch, layout.data)
    check_shares(recipe.micro_batch, sequences, layout)


def check_measurement(options: argparse.Namespace) -> None:
    words = Words(workload=options.workload, gpus=options.gpus, tensor=options.tensor, replicas=options.replicas)
    words.check()
    hardware = replace(MACHINE, ranks=words.layout.ranks)
    check_measured(ranked_rungs((), words.layout), words.layout, resolve_workload(options.workload), hardware)


def test_layouts_that_are_documented_are_not_refused(repository: Path) -> None:
    checks = {"train": check_train, "estimate": estimate}
    lines = layout_lines(repository)
    assert len(lines) >= 12
    for line in lines:
        words = shlex.split(line)[1:]
        checks.get(words[0], check_measurement)(build_parser(words[:1]).parse_args(words))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/rungs/README.md"])
def test_links_lead_somewhere(repository: Path, document: str) -> None:
    path = repository / document
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{document} links to {target}"


def test_ci_calls_the_readme_s_test_command(repository: Path) -> None:
    assert "make test" in (repository / ".ci" / "run").read_text(encoding="utf-8")
