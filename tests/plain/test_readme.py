"""The README's promises: its commands exist, its options are real, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from redline.cli import build_parser


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


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/rungs/README.md"])
def test_links_lead_somewhere(repository: Path, document: str) -> None:
    path = repository / document
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{document} links to {target}"


def test_ci_calls_the_readme_s_test_command(repository: Path) -> None:
    assert "make test" in (repository / ".ci" / "run").read_text(encoding="utf-8")
