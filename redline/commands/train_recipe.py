"""The recipe that `redline train` trains with: fitted to the model and to the ranks, or refused with a way out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.core.errors import UserError
from redline.rungs.parallel import DDP, RANK_RUNGS, WAYS

if TYPE_CHECKING:
    from redline.core.hardware import Hardware
    from redline.core.layout import Layout
    from redline.core.recipe import Recipe
    from redline.core.workload import Workload


def shared_recipe(recipe: Recipe, way: str | None, layout: Layout) -> Recipe:
    """Return the recipe with a way for the ranks to share a step: `way`, the recipe's own, or the usual one. For one
    rank without `way`, the recipe stays as it is: its ways have no effect there."""
    from redline.rungs.ladder import cuts_of, with_parallel
    from redline.search.ranks import is_way, usual_way

    if layout.ranks == 1 and way is None:
        return recipe
    cuts, own = cuts_of(recipe.rungs, layout), [name for name in recipe.rungs if is_way(name)]
    others = [name for name in recipe.rungs if name not in cuts]
    return replace(recipe, rungs=with_parallel([*others, *cuts], way or (*own, usual_way(layout))[0]))


def check_parallel(recipe: Recipe, workload: Workload, hardware: Hardware, layout: Layout) -> None:
    """Refuse ways to share a step that do not go with the rest of the recipe. The fix names all their options."""
    from redline.rungs.ladder import cuts_of
    from redline.search.ranks import OF_LAYOUTS

    way = recipe.rungs[-1]  # `with_parallel` puts it last
    refused = {
        name: reason
        for name in (*cuts_of(recipe.rungs, layout), way)
        if (reason := why_not_shared(name, recipe, workload, hardware)) is not None
    }
    if not refused:
        return
    first = next(iter(refused))
    said = {name: f"{option} {getattr(layout, option[2:])}" for name, option in OF_LAYOUTS.items()}
    fixes = [f"leave {said[name]} out" for name in refused if name in said]
    others = [other for other in WAYS if not why_not_shared(other, recipe, workload, hardware)]
    if way in refused:
        copies = " without --replicas" if layout.replicas > 1 else ""
        fixes = [*fixes, f"say --parallel {others[0]}{copies}"] if others else []
    elif fixes and layout.replicas > 1 and others == [DDP]:  # which would be refused next, with fsdp as its fix
        fixes.append(f"leave --replicas {layout.replicas} out")
    raise UserError(
        f"{said.get(first, first)} does not apply here",
        refused[first],
        ", or ".join(filter(None, (" and ".join(fixes), "choose another recipe"))),
    )


def check_needs(options: argparse.Namespace, ranks: int, recipe: Recipe, workload: Workload) -> None:
    """Do the same before the degrees are known to divide: otherwise a degree proposed there would be refused in turn.
    Skipped if it is unknown how to cut the model and fsdp goes with the recipe: a later check proposes fsdp."""
    from redline.commands.ranks import asked_layout
    from redline.rungs.ladder import cuts_of
    from redline.rungs.parallel import FSDP, where_to_cut
    from redline.search.ranks import some_machine

    asked = asked_layout(options, ranks)
    if asked.ranks == 1:
        return
    shared, machine = shared_recipe(recipe, options.parallel, asked), some_machine(asked.ranks)
    unknown = any(where_to_cut(name, workload) for name in cuts_of(shared.rungs, asked))
    if not unknown or why_not_shared(FSDP, shared, workload, machine) is not None:
        check_parallel(shared, workload, machine, asked)


def why_not_shared(name: str, recipe: Recipe, workload: Workload, hardware: Hardware) -> str | None:
    from redline.rungs import find_rung, plan_of, why_not

    others = [other for other in recipe.rungs if other != name and (name not in WAYS or other not in WAYS)]
    return why_not(find_rung(name), workload, hardware, plan_of(others))


def without_refused(recipe: Recipe, workload: Workload, hardware: Hardware, say: Callable[[str], None]) -> Recipe:
    """Leave out, and report, the rungs that do not apply here and change no maths. A recipe may have been measured
    without dropout, on another model or on another machine. How ranks share a step is checked later."""
    from redline.rungs import Maths, find_rung

    kept = recipe.rungs
    while reasons := why_not_here(kept, workload, hardware):
        # One at a time: what a rung asks for may be there once another is gone.
        name = next((name for name in reasons if find_rung(name).maths is not Maths.CHANGES), None)
        if name is None:
            check_maths(reasons, workload, hardware)
            break
        say(f"the recipe's {name} is left out: {reasons[name]}")
        kept = tuple(other for other in kept if other != name)
    return replace(recipe, rungs=kept)


def why_not_here(rungs: tuple[str, ...], workload: Workload, hardware: Hardware) -> dict[str, str]:
    """Return the rungs that do not apply beside the others, with the reasons."""
    from redline.rungs.ladder import why_not_among

    own = tuple(name for name in rungs if name not in RANK_RUNGS)
    reasons = {name: why_not_among(name, own, workload, hardware) for name in own}
    return {name: why for name, why in reasons.items() if why}


def check_maths(reasons: dict[str, str], workload: Workload, hardware: Hardware) -> None:
    """Refuse a change of the maths that does not apply here; `check_allowed` refuses those the model excludes."""
    for name, why in reasons.items():
        if workload.refusal(name, hardware.kind) is None:
            fix = f"take {name} out of the recipe, or leave --recipe out: what applies here is taken then"
            raise UserError(f"the recipe's {name} does not apply here", why, fix)


def check_allowed(recipe: Recipe, workload: Workload, kind: str) -> None:
    """Refuse rungs that this model does not allow. One that changes the maths is never left out: the user decides."""
    for name in recipe.rungs:
        if why := workload.refusal(name, kind):
            raise UserError(
                f"the recipe's {name} does not go with {workload.name}",
                why,
                f"take {name} out of the recipe, or leave --recipe out: what applies here is taken then",
            )


def other_optimizer(name: str, rungs: tuple[str, ...], workload: Any, hardware: Any) -> tuple[str, ...]:
    """Return the rungs with this optimizer's in place of their own."""
    from redline.rungs.ladder import why_not_among, with_optimizer

    chosen = with_optimizer(rungs, name)
    for rung in set(chosen) - set(rungs):
        reason = why_not_among(rung, chosen, workload, hardware)
        if reason is not None:
            raise UserError(f"--optimizer {name} does not apply here", reason, "choose another, or another recipe")
    return chosen


def check_init(recipe: Recipe, init: Path | None, layout: Layout) -> None:
    from redline.rungs.ladder import cuts_of

    cut = [*cuts_of(recipe.rungs, layout), *(name for name in recipe.rungs[-1:] if name != DDP)]
    if init is not None and cut:
        raise UserError(
            f"--init with {' and '.join(cut)}",
            "the weights of a folder are put into whole tensors, and no rank has one",
            "begin with --parallel ddp alone and few --steps, then --resume with what you want",
        )
