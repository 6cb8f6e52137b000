"""`redline estimate`: predict parameters, FLOPs, memory and speed of a training step without running it.

This file has the command and its options. estimate_subject.py chooses the device, the model and its sizes,
estimate_layout.py the layout of several GPUs, and estimate_rungs.py the rungs; predict/estimate.py computes the numbers
and report/estimate.py shows them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from redline.commands.common import add_common, check_sizes, command_line
from redline.commands.estimate_subject import AS_THE_PLAN, choose_machine, choose_subject, choose_traced
from redline.core.errors import EXIT_DONE, UserError

DEFAULT_WORKLOAD = "gpt2"
COUNTS = ("micro_batch", "sequence", "global_batch", "gpus", "nodes", "dp", "tensor", "pipeline", "replicas")


def add_estimate(commands: Any) -> None:
    estimate = commands.add_parser(
        "estimate",
        help="predict memory, FLOPs and speed without running anything",
        description="Parameters, FLOPs, memory by category, the largest micro batch and the roofline of a training "
        "step: arithmetic, no device needed.",
        epilog="Exit codes: 0 done; 2 a mistake in the command. What is not known is null, or a dash.",
    )
    estimate.add_argument(
        "workload",
        nargs="?",
        default=DEFAULT_WORKLOAD,
        metavar="WORKLOAD",
        help="a preset, a Hugging Face config.json, a model folder, a shape file, or FILE.py:FACTORY (default: gpt2)",
    )
    estimate.add_argument("--gpu", metavar="NAME", help="the device, such as A100-80 (default: this machine's, if any)")
    estimate.add_argument("--micro-batch", metavar="N", type=int, help="sequences, or samples, per GPU and pass")
    estimate.add_argument(
        "--sequence", metavar="N", type=int, help="tokens of context (default: the model's, 4096 at most)"
    )
    estimate.add_argument(
        "--rungs",
        metavar="A,B,...",
        help="the optimisations (default: all that apply on the device; 'none': the baseline)",
    )
    estimate.add_argument("--from", dest="recipe", metavar="RECIPE", help="rungs and micro batch of a recipe file")
    estimate.add_argument(
        "--optimizer", metavar="NAME", help="another optimizer, such as lion or adamw-8bit: short for its rung"
    )
    estimate.add_argument(
        "--gpus", metavar="N", type=int, help="GPUs in all (default: 1); a layout is recommended unless one is named"
    )
    estimate.add_argument("--nodes", metavar="N", type=int, help="machines that hold them (default: 8 GPUs in each)")
    estimate.add_argument(
        "--interconnect",
        metavar="NAME[,NAME]",
        help="what joins the GPUs of a node, and the nodes, such as nvlink,ib-400 (default: an SXM card's own NVLink; "
        "no network is assumed)",
    )
    add_layout(estimate)
    estimate.add_argument("--global-batch", metavar="N", type=int, help="sequences per step of all GPUs")
    estimate.add_argument(
        "--inference",
        nargs="?",
        const=AS_THE_PLAN,
        metavar="PRECISION",
        help="generate instead of train; weights in fp32, mixed, half or int8 (default: as the rungs say)",
    )
    estimate.add_argument(
        "--operations", action="store_true", help="show the most expensive operations too (--json has all of them)"
    )
    add_common(estimate)
    estimate.set_defaults(run=run_estimate)


def add_layout(estimate: argparse.ArgumentParser) -> None:
    """Add the layout options of `redline train`, and --dp and --zero, which it lacks. --tp and --pp are older names."""
    estimate.add_argument("--parallel", metavar="WAY", help="how GPUs share a step: ddp, fsdp, fsdp-keep or fsdp-whole")
    estimate.add_argument("--tensor", metavar="N", type=int, help="GPUs that hold each layer together: TP (default: 1)")
    estimate.add_argument(
        "--pipeline", metavar="N", type=int, help="stages that hold the layers in turn: PP (default: 1)"
    )
    estimate.add_argument(
        "--dp", metavar="N", type=int, help="copies with data of their own (default: what is left of the GPUs)"
    )
    estimate.add_argument(
        "--zero", metavar="STAGE", type=int, help="instead of --parallel: ZeRO 0 (ddp) to 3 (fsdp) (default: 0)"
    )
    estimate.add_argument(
        "--replicas", metavar="N", type=int, help="with fsdp: copies of the model, each cut among its GPUs (default: 1)"
    )
    for short, name in (("--tp", "tensor"), ("--pp", "pipeline")):
        estimate.add_argument(short, dest=name, type=int, help=argparse.SUPPRESS)


def run_estimate(options: argparse.Namespace) -> int:
    found = estimate(options)
    if options.json:
        print(json.dumps(found))
        return EXIT_DONE
    from rich.console import Console

    from redline.report.estimate import print_estimate

    print_estimate(found, Console(), operations=options.operations)
    return EXIT_DONE


def estimate(options: argparse.Namespace) -> dict[str, Any]:
    """Return the document that --json prints."""
    from redline.predict.estimate import document
    from redline.workloads.python_file import is_python_file

    check_options(options)
    options = with_zero(options)
    machine = choose_machine(options)
    if is_python_file(options.workload):
        from redline.predict.traced_estimate import traced_document

        return {"command": command_line(), **traced_document(choose_traced(options, machine), machine)}
    return {"command": command_line(), **document(choose_subject(options, machine), machine)}


def check_options(options: argparse.Namespace) -> None:
    from redline.predict.parallel import USUAL_NODE

    check_sizes(options, COUNTS)
    if options.nodes not in (None, 1) and options.gpus is None and options.dp is None:
        raise UserError(
            f"--nodes {options.nodes} without --gpus",
            "nodes hold GPUs, and how many there are in all was not said",
            f"say --gpus {options.nodes * USUAL_NODE} too, or as many as there are",
        )
    if options.recipe is not None and options.rungs is not None:
        raise UserError("--from and --rungs were given together", "a recipe has its own rungs", "drop one of them")
    if options.inference is not None:
        for name in ("optimizer", "global_batch", "parallel", "zero", "replicas", "interconnect"):
            if getattr(options, name) not in (None, 0):
                option = "--" + name.replace("_", "-")
                raise UserError(f"{option} with --inference", "only training has it", f"drop {option}")


def with_zero(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options with --parallel translated into the ZeRO stage that predictions use."""
    from redline.core.errors import unknown_name
    from redline.predict.fitting import ZERO
    from redline.rungs.parallel import WAYS

    if options.parallel is None and options.zero is None and options.inference is None:
        options = argparse.Namespace(**{**vars(options), "parallel": unsaid_way(options)})
    if options.parallel is None:
        return options
    if options.zero is not None:
        raise UserError("--parallel and --zero were given together", "each says how GPUs share a step", "drop one")
    if options.parallel not in WAYS:
        raise unknown_name("way to share a step", options.parallel, WAYS)
    return argparse.Namespace(**{**vars(options), "zero": ZERO[options.parallel]})


def unsaid_way(options: argparse.Namespace) -> str | None:
    """Return the default of --parallel, as in `redline train`: the recipe's where several GPUs have data of their own,
    else fsdp if --replicas is above 1, else None."""
    from redline.core.recipe import load_recipe
    from redline.rungs.parallel import FSDP, WAYS

    data = options.dp or (options.gpus or 1) // ((options.tensor or 1) * (options.pipeline or 1))
    rungs = load_recipe(Path(options.recipe)).rungs if options.recipe is not None and data > 1 else ()
    return next((name for name in rungs if name in WAYS), FSDP if (options.replicas or 1) > 1 else None)
