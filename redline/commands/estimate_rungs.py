"""Which rungs `redline estimate` predicts with: those that were named, or all that apply on the device.

    rungs, notes = choose_rungs("bf16,flash", asked_workload(shape, None), target)

A rung is asked as the ladder asks it; nothing is built. What is chosen for the user comes back as a note.
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
    """Rungs in the ladder's order, and notes. Named ones must apply; without a name it is all that do. An optimizer's
    rung takes the place of the one among them."""
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
    """The ladder unties GPT-2 to show what tying does. Another model is what its config says."""
    from redline.rungs.ladder import in_order

    if (TIED in rungs) == shape.tied:
        return rungs, ()
    if not shape.tied:
        kept = tuple(name for name in rungs if name != TIED)
        return kept, (f"{TIED} is left out: this model has a head of its own",)
    ordered = in_order((*rungs, TIED))
    return ordered, (f"{TIED} is taken: this model's head is its embedding",)


def asked_workload(shape: Shape, config: dict[str, Any] | None) -> Workload:
    """What a rung asks of a workload is its shape and what its code allows; the rest of it is filled in."""
    from redline.core.workload import Workload
    from redline.workloads.huggingface import obstacles

    cannot = {} if config is None else obstacles(config, shape)
    cannot.pop(TIED, None)  # `tied_as_published` sees to that, with a note
    return Workload(name="estimate", shape=shape, tokenizer="gpt2", micro_batch=1, learning_rate=1e-3, cannot=cannot)
