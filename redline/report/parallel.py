"""An estimate for many GPUs, for the terminal: the layout and why, what each GPU sends, and where the step's time goes.

print_parallel(document["parallel"], Console())     the document is that of `redline estimate --json`
"""

from __future__ import annotations

import shlex
import textwrap
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from redline.core.units import UNKNOWN, counted, human_bytes, human_percent, human_rate, human_seconds
from redline.report import Document, one_line
from redline.report.plain_table import plain_table

INDENT, GOES_ON = "  ", " \\"


def print_parallel(parallel: Document, console: Console) -> None:
    console.print(Text(layout_text(parallel), overflow="fold"))
    if parallel["shortage"] is not None:
        console.print(Text(shortage_text(parallel["shortage"]), style="red", overflow="fold"))
    console.print()
    console.print(traffic_table(parallel))
    if parallel["step"] is not None:
        console.print()
        console.print(step_table(parallel))
    if parallel["recommendation"] is not None:
        console.print()
        console.print(layouts_table(parallel["recommendation"]))
        console.print(Text("in redline train ZeRO 0 is ddp and ZeRO 3 is fsdp", style="dim"))
        console.print(Text(parallel["recommendation"]["reason"] + ".", overflow="fold"))


def shortage_text(shortage: Document) -> str:
    """Say which ranks need more memory than they have, and which layout fits."""
    first, last = shortage["ranks"]
    stage = "" if shortage["stage"] is None else f", the {shortage['stage']} stage of the pipeline,"
    ranks = f"ranks {first} {'and' if last == first + 1 else 'to'} {last}"
    who, each = (f"rank {first}{stage} needs", "") if first == last else (f"{ranks}{stage} need", " each")
    lacks = (
        f"{who} {human_bytes(shortage['needed_bytes'])}{each}, and a GPU has {human_bytes(shortage['memory_bytes'])}"
    )
    other = shortage["instead"]
    if other is None:
        return f"does not fit: {lacks}; no layout of these GPUs fits with these rungs and this global batch"
    size = f"micro batch {other['layout']['micro_batch']}"
    fits = f"{degrees_text(other['layout'])}, {size}, {human_bytes(other['memory_bytes'])}"
    return f"does not fit: {lacks}; what fits is {fits}"


def train_text(parallel: Document, width: int) -> str:
    """Return the command to type; if `redline train` refuses the layout, the reason and the command of one that
    fits."""
    train, shortage = parallel["train"], parallel["shortage"]
    if train["command"] is not None:
        return f"to train like that:\n{broken_line(train['command'], width)}"
    refused = textwrap.fill(f"redline train does not run this: {one_line(train['reason'])}", width)
    other = None if shortage is None or shortage["instead"] is None else shortage["instead"]["command"]
    return refused if other is None else f"{refused}; what fits:\n{broken_line(other, width)}"


def broken_line(command: str, width: int) -> str:
    """Break a command into lines that a shell joins again."""
    lines = [""]
    for word in _unbroken(one_line(command)):
        longer = f"{lines[-1]} {word}".strip()
        if len(lines[-1]) and len(longer) > width - len(INDENT) - len(GOES_ON):
            lines.append(word)
        else:
            lines[-1] = longer
    return f"{GOES_ON}\n".join(f"{INDENT}{line}" for line in lines)


def _unbroken(command: str) -> list[str]:
    """Return the words as a shell reads them, with their quotes; none of them may be broken."""
    return [shlex.quote(word) if word not in ("&&", ">") else word for word in shlex.split(command)]


def layout_text(parallel: Document) -> str:
    layout, links = parallel["layout"], parallel["interconnect"]
    names = {place: UNKNOWN if links[place] is None else links[place]["name"] for place in ("inside", "between")}
    joined = f"{names['inside']} inside" + (f" and {names['between']} between them" if layout["nodes"] > 1 else "")
    nodes = f"{counted(layout['nodes'], 'node')} of {counted(layout['gpus_per_node'], 'GPU')}, {joined}"
    return f"{degrees_text(layout)}: {nodes}"


def degrees_text(layout: dict[str, Any]) -> str:
    copies = f" in {layout['replicas']} copies" if layout["replicas"] > 1 else ""
    return f"DP {layout['dp']} x TP {layout['tp']} x PP {layout['pp']}, ZeRO {layout['zero']}{copies}"


def traffic_table(parallel: Document) -> Table:
    """Tabulate what one GPU sends, in the slowest pipeline stage if there are several."""
    table = plain_table("sent by one GPU in a step", "how", "calls ", "bytes ", "time ", "hides behind")
    for one in parallel["collectives"]:
        hides = f"the {one['during']}" if one["overlaps"] else "nothing"
        sent, time = human_bytes(one["sent_bytes"]), human_seconds(one["seconds"])
        table.add_row(one["what"], f"{one['kind']}, {one['axis']}", f"{one['calls']:,}", sent, time, hides)
    total = sum(parallel["sent_bytes"].values())
    seconds = None if parallel["step"] is None else parallel["step"]["communication_seconds"]
    table.add_row(Text("total", style="bold"), "", "", human_bytes(total), human_seconds(seconds), "")
    return table


def step_table(parallel: Document) -> Table:
    step = parallel["step"]
    fits = parallel["shortage"] is None
    title = "step on many GPUs" if fits else "a step, if it fitted"
    table = plain_table(title, "time ", "share ", "what")
    update = "shared among replicas by ZeRO" if parallel["layout"]["zero"] else "of what it holds"
    for name, key, what in (
        ("forward", "forward_seconds", "one GPU's part, all micro batches"),
        ("backward", "backward_seconds", "with what is computed again"),
        ("update", "update_seconds", update),
        ("communication", "exposed_seconds", f"{human_seconds(step['hidden_seconds'])} more hide behind the passes"),
        ("bubble", "bubble_seconds", f"{human_percent(parallel['bubble'])} of a pipeline's time: (p-1)/(m+p-1)"),
    ):
        if step[key] or key != "bubble_seconds":
            table.add_row(name, human_seconds(step[key]), human_percent(step[key] / step["seconds"]), what)
    per_gpu = human_rate(parallel["tokens_per_second_per_gpu"])
    rate = f"{human_rate(parallel['tokens_per_second'])} tokens/s, {per_gpu} per GPU"
    efficiency = f"{human_percent(parallel['scaling_efficiency'])} of one GPU with these micro batches"
    what = f"{rate}: {efficiency}" if fits else f"{UNKNOWN} tokens/s: it does not fit"
    table.add_row(Text("total", style="bold"), human_seconds(step["seconds"]), "", what)
    return table


def layouts_table(recommendation: Document) -> Table:
    # 'of one GPU' compares with one GPU at the row's own micro batch: a slower row with smaller ones may score higher.
    table = plain_table("layout", "micro batch ", "GAS ", "memory ", "tokens/s ", "of one GPU ")
    for number, row in enumerate([recommendation["best"], *recommendation["others"]]):
        layout = row["layout"]
        table.add_row(
            Text(degrees_text(layout), style="" if number else "bold"),
            f"{layout['micro_batch']}",
            f"{layout['accumulation']}",
            human_bytes(row["memory_bytes"]),
            human_rate(row["tokens_per_second"]),
            human_percent(row["scaling_efficiency"]),
        )
    return table
