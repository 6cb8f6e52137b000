"""Chooses the rungs that `redline estimate` predicts with: those that are named, or all that apply on the device.

    rungs, notes = choose_rungs("bf16,flash", asked_workload(shape, None), target)

Whether a rung applies is decided as in the ladder, without building anything. A choice made for the user is returned as
a note.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from redline.core.errors import UserError

if TYPE_CHECKING:
    from redline.core.workload import Shape, Workload
    from redline.predict.estimate import Target

TIED = "tied-weights"


def choose_rungs(
    words: str | None, workload: Workload, machine: Target, optimizer: str | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the rungs in the ladder's order, and notes. Named rungs must apply; without names, all usual ones that
    apply are taken. The rung of `optimizer` replaces theirs."""
    from redline.rungs import find_rung, usual_rungs
    from redline.rungs.ladder import LADDER, check_alternatives, with_optimizer

    if words is None:
        named: Iterable[str] = usual_rungs(workload, machine.hardware)
    else:
        named = [] if words.strip() == "none" else [find_rung(word.strip()).name for word in words.split(",")]
    chosen = tuple(rung.name for rung in LADDER[1:] if rung.name in named)
    check_alternatives(chosen)
    if optimizer is not None:
        chosen = with_optimizer(chosen, optimizer)
    check_rungs_apply(chosen, workload, machine)
    return chosen, () if words is not None else (f"rungs assumed: {', '.join(chosen)} (--rungs)",)


def check_rungs_apply(names: Iterable[str], workload: Workload, machine: Target) -> None:
    from redline.core.plan import Plan
    from redline.rungs import find_rung, why_not
    from redline.rungs.parallel import WAYS

    plan = Plan()
    if ways := [name for name in names if name in WAYS]:
        raise UserError(
            f"{ways[0]} among the rungs",
            "how GPUs share a step is an option here, since it says nothing without their number",
            f"say --gpus N --parallel {ways[0]} instead",
        )
    for rung in map(find_rung, names):
        reason = why_not(rung, workload, machine.hardware, plan)
        if reason is not None:
            other = "" if workload.refusal(rung.name, machine.hardware.kind) else ", or choose another --gpu"
            raise UserError(f"{rung.name} does not apply", reason, f"leave {rung.name} out of the rungs{other}")
        plan = rung.apply(plan)


def tied_as_published(rungs: tuple[str, ...], shape: Shape) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the rungs with tying as the model's config has it, and a note if that changes them. The ladder unties only
    the built-in GPT-2, to show what tying does."""
    from redline.rungs.ladder import in_order

    if (TIED in rungs) == shape.tied:
        return rungs, ()
    if not shape.tied:
        kept = tuple(name for name in rungs if name != TIED)
        return kept, (f"{TIED} is left out: this model has a head of its own",)
    ordered = in_order((*rungs, TIED))
    return ordered, (f"{TIED} is taken: this model's head is its embedding",)


def asked_workload(shape: Shape, config: dict[str, Any] | None) -> Workload:
    """Return a workload to ask rungs about. They need its shape and what its code cannot do; the rest is filled in."""
    from redline.core.workload import Workload
    from redline.workloads.huggingface import obstacles

    cannot = {} if config is None else obstacles(config, shape)
    cannot.pop(TIED, None)  # `tied_as_published` handles it, with a note
    return Workload(name="estimate", shape=shape, tokenizer="gpt2", micro_batch=1, learning_rate=1e-3, cannot=cannot)
