"""How to run a workload, as a user would say it: rung names and a micro batch, in a JSON file people can share.

Recipe(rungs=("tf32", "bf16"), micro_batch=16)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redline.core.errors import UserError, explained
from redline.core.values import from_json, to_json
from redline.core.workload import check_positive


@dataclass(frozen=True, kw_only=True)
class Recipe:
    rungs: tuple[str, ...] = ()
    micro_batch: int

    def __post_init__(self) -> None:
        check_positive("micro batch", self.micro_batch)

    def adding(self, rung: str, without: str | None = None) -> Recipe:
        kept = tuple(name for name in self.rungs if name != without)
        return replace(self, rungs=(*kept, rung))


def load_recipe(path: Path) -> Recipe:
    try:
        with explained(f"cannot read the recipe {path}", "give the path of a recipe file, such as best.json of a run"):
            data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise not_a_recipe(str(path), str(error)) from error
    return recipe_from(data, str(path))


def recipe_from(data: Any, name: str) -> Recipe:
    """Build a recipe from parsed JSON. `name`: where it came from, for error messages."""
    if isinstance(data, Mapping) and "micro_batch" not in data:
        raise not_a_recipe(name, "it has no micro_batch")
    try:
        return from_json(Recipe, data)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise not_a_recipe(name, str(error)) from error


def not_a_recipe(name: str, why: str) -> UserError:
    example = json.dumps(to_json(Recipe(rungs=("tf32", "bf16"), micro_batch=16)))
    return UserError(f"{name} is not a recipe", why, f"a recipe looks like {example}")
