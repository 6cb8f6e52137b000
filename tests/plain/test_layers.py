"""Imports point one way, and what needs no torch starts without it.

LAYERS is the picture in docs/architecture.md as a table: a folder may import itself and the folders named in its row.
Imports inside functions count too, since a cycle is a cycle whenever it closes.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LAYERS = {
    "core": set(),
    "predict": {"core"},
    "kernels": {"core"},
    "model": {"core", "kernels"},
    "optim": {"core"},
    "data": {"core"},
    "workloads": {"core", "predict"},
    "rungs": {"core", "model", "kernels", "optim"},
    "engine": {"core", "model", "kernels", "optim", "data", "workloads", "rungs"},
    "search": {"core", "predict", "data", "workloads", "rungs"},  # starts engine.worker as a process, imports it never
    "report": {"core", "predict"},
    "machine": {"core"},
    "commands": {"core", "predict", "data", "workloads", "rungs", "machine", "search", "engine", "report"},
    "api": {  # what redline/__init__.py calls in a user's own process: it has torch, where torch is asked for
        *("core", "predict", "model", "optim", "workloads", "rungs", "engine", "report", "machine", "commands"),
    },
    "cli": {"core", "commands"},
}
TORCH_FREE = (
    "core",
    "predict",
    "report",
    "rungs",
    "search",
    "workloads",
    "machine",
    "commands",
    "cli",
)  # not even inside a function
PACKAGE = Path(__file__).resolve().parents[2] / "redline"
FILES = sorted(PACKAGE.rglob("*.py"))


def imported_modules(tree: ast.AST, package: str) -> Iterator[str]:
    """Absolute dotted names of everything a file imports; `from redline import core` counts as redline.core."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]).rstrip(".")
            yield from (f"{base}.{alias.name}" if base == "redline" else base for alias in node.names)


def layer_of(path: Path) -> str:
    """'core' for redline/core/plan.py, 'cli' for redline/cli.py, '' for redline/__init__.py."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first.startswith("__") else first


def imports_of(path: Path) -> set[str]:
    package = ".".join(["redline", *path.relative_to(PACKAGE).parts[:-1]])
    return set(imported_modules(ast.parse(path.read_text(encoding="utf-8")), package))


def faults_of(path: Path) -> list[str]:
    layer = layer_of(path)
    if layer == "":
        return []  # redline/__init__.py and __main__.py: what they may load is tested below, by loading them
    faults = []
    for name in imports_of(path):
        root, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if root == "redline":
            if target in LAYERS and target != layer and target not in LAYERS[layer]:
                faults.append(f"{layer} may not import {target} ({name})")
        elif layer == "core" and root not in sys.stdlib_module_names:
            faults.append(f"core is standard library only ({name})")
        if root == "torch" and layer in TORCH_FREE:
            faults.append(f"{layer} works without torch ({name})")
    return sorted(faults)


def test_every_folder_has_its_place():
    folders = {layer_of(path) for path in FILES} - {""}
    assert folders <= LAYERS.keys(), "a new folder needs a row in LAYERS and a line in docs/architecture.md"


def test_the_table_itself_has_no_cycle():
    settled: set[str] = set()
    while len(settled) < len(LAYERS):
        ready = {name for name, below in LAYERS.items() if below <= settled} - settled
        assert ready, f"a cycle among {sorted(LAYERS.keys() - settled)}"
        settled |= ready


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    assert faults_of(path) == []


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("import torch.nn as nn", "torch.nn"),
        ("from redline.engine import worker", "redline.engine"),
        ("from redline import engine", "redline.engine"),
        ("from ..engine.worker import work", "redline.engine.worker"),
        ("from .. import engine", "redline.engine"),
        ("def f():\n    from redline.search.climb import climb", "redline.search.climb"),
    ],
)
def test_no_spelling_of_an_import_slips_through(line, module):
    assert list(imported_modules(ast.parse(line), "redline.core")) == [module]


# Runs in a process of its own: what this one has imported already must not help.
WITHOUT_TORCH = """
import importlib, pkgutil, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ImportError(f"{name} is blocked by test_layers")

sys.meta_path.insert(0, NoTorch())
import redline
for folder in sys.argv[1:]:
    package = importlib.import_module(f"redline.{folder}")
    for module in pkgutil.iter_modules(getattr(package, "__path__", [])):
        importlib.import_module(f"redline.{folder}.{module.name}")
"""

HELP = """
import sys
from redline.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
heavy = {"torch", "numpy", "jinja2", "tiktoken", "transformers", "safetensors"} & sys.modules.keys()
assert not heavy, f"--help loads {sorted(heavy)}"
sys.exit(code)
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "folder", ["core", "predict", "report", "rungs", "search", "workloads", "machine", "commands", "cli"]
)
def test_imports_without_torch(folder):
    done = python(WITHOUT_TORCH, folder)
    assert done.returncode == 0, done.stderr


COMMANDS = (
    "ladder",
    "tune",
    "train",
    "sample",
    "export",
    "data",
    "profile",
    "lint",
    "estimate",
    "hardware",
    "report",
    "watch",
)  # all there are
help_calls = pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)


@help_calls
def test_help_works_without_torch(arguments):
    done = python(WITHOUT_TORCH.replace("sys.argv[1:]", "()") + HELP, *arguments)
    assert done.returncode == 0, done.stderr
    assert arguments[0].removeprefix("--help") in done.stdout
    assert "usage: redline" in done.stdout


@help_calls
def test_help_loads_nothing_heavy(arguments):
    done = python(HELP, *arguments)
    assert done.returncode == 0, done.stderr


def test_importing_redline_does_nothing():
    code = "import sys, redline; print(sorted({'torch', 'numpy', 'rich', 'redline.cli'} & sys.modules.keys()))"
    assert python(code).stdout == "[]\n"
