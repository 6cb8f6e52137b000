"""An estimate for the terminal: FLOPs with their conventions, memory as a stacked bar and a table, the roofline.

    print_estimate(document, Console(), operations=True)     the document is that of `redline estimate --json`

Each part of the bar is drawn with its own letter, so that it can be read without colours.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from redline.core.units import UNKNOWN, batch_text, human_bytes, human_percent, human_rate, human_seconds, rate_unit
from redline.predict.fitting import MOST_SEQUENCES
from redline.report import Document, one_line
from redline.report.parallel import print_parallel, train_text
from redline.report.plain_table import plain_table
from redline.report.table import Note, notes_grid

BAR_COLUMNS = 96
SHOWN_OPERATIONS = 10
FREE, END = "·", "the card ends here ^"
# Letter, colour and meaning of each part, in the order of the bar.
PARTS = {
    "weights": ("W", "blue", "parameters, and the causal mask"),
    "gradients": ("G", "cyan", "alive at that moment"),
    "optimizer": ("O", "magenta", "state that stays"),
    "activations": ("A", "green", "kept for the backward pass"),
    "logits": ("L", "yellow", "with copies and gradient"),
    "autocast_cache": ("c", "bright_blue", "16-bit copies of weights"),
    "working": ("t", "white", "gradients on their way, workspaces of matmuls, the update"),
    "fragmentation": ("f", "bright_black", "reserved and not used: a typical share"),
    "context": ("x", "red", "outside the allocator: CUDA context, libraries, NCCL"),
}
WIDTHS = (("d_model", "d_model"), ("d_ff", "d_ff"), ("vocabulary", "vocab"))
LABELS = {"autocast_cache": "autocast cache", "working": "temporary"}
IN_INFERENCE = {
    "weights": "parameters",
    "activations": "keys and values of all layers, one layer at work",
    "logits": "of the last token of each sequence",
    "working": "workspaces of matmuls",
}
OF_ONES_OWN = {  # a user's own model, traced rather than described
    "weights": "parameters and buffers",
    "gradients": "of every parameter that is trained",
    "activations": "kept for the backward pass, of every kind",
    "working": "the batch, workspaces of matmuls",
    "context": "outside the allocator: CUDA context, libraries",
}


def print_estimate(document: Document, console: Console, *, operations: bool = False) -> None:
    console.print(Text(subject_text(document), overflow="fold"))
    console.print()
    console.print(flops_table(document))
    console.print()
    console.print(memory_bar(document, min(BAR_COLUMNS, console.width)))
    console.print(Text(memory_text(document), overflow="fold"))
    console.print()
    console.print(memory_table(document))
    if document["what_to_change"]:
        console.print()
        console.print(changes_table(document))
    if document["roofline"] is not None:
        console.print()
        console.print(roofline_table(document["roofline"]))
        if operations and document["roofline"]["expected"] is not None:
            console.print()
            console.print(operations_table(document["roofline"]))
    if document.get("parallel") is not None:
        console.print()
        print_parallel(document["parallel"], console)
    console.print()
    console.print(notes_grid(list(notes_of(document))))
    if document.get("parallel") is not None:
        console.print()
        console.print(Text(train_text(document["parallel"], console.width)), soft_wrap=True)


def subject_text(document: Document) -> str:
    shape, settings = document["shape"], document["settings"]
    parts = [
        f"{one_line(document['name'])}: {document['parameters']:,} parameters",
        *model_sizes(shape),
        batch_text(settings["micro_batch"], {"sequence": settings["sequence"], **shape}),
        settings["precision"],
        "inference" if settings["inference"] else settings["optimizer"],
        one_line(document["hardware"]["name"] or "no device"),
    ]
    return ", ".join(parts)


def model_sizes(shape: Document) -> Iterator[str]:
    """Yield a decoder's sizes, or the number and kind of blocks of a user's own model."""
    if "heads" not in shape:
        if (blocks := shape.get("blocks")) is not None:
            yield f"{blocks['count']} x {one_line(blocks['kind'])}"
        return
    kv = f" ({shape['kv_heads']} for keys and values)" if shape.get("kv_heads") else ""
    yield f"{shape['layers']} layers"
    yield f"{shape['heads']} heads{kv}"
    yield from (f"{words} {shape[name]}" for words, name in WIDTHS)


def flops_table(document: Document) -> Table:
    flops = document["flops_per_token"]
    factor, unit = flops_unit(flops["model"] or 0.0)
    table = plain_table(f"FLOPs per {flops.get('unit', 'token')}", f"{unit} ", f"convention ({flops['passes']})")
    for name, key, convention in (
        ("model (MFU counts it)", "model", flops["convention"]),
        ("model, causal", "causal", flops["causal_convention"]),
        ("hardware (HFU counts it)", "hardware", flops["hardware_convention"]),
        ("6N", "six_n", "six per parameter as published, no attention"),
        ("one more token", "decode", "with the keys and values of the tokens before it cached, window included"),
    ):
        if flops[key] is not None:
            table.add_row(name, f"{flops[key] / factor:,.{0 if factor == 1 else 1}f}", convention)
        elif key == "model":
            table.add_row(name, UNKNOWN, convention)
    return table


def flops_unit(flops: float) -> tuple[float, str]:
    """Return (factor, name): MFLOP for all but the smallest models, whose figure would have no digits left."""
    return next((each for each in ((1e6, "MFLOP"), (1e3, "kFLOP")) if flops >= each[0]), (1.0, "FLOP"))


# memory


def parts_of(document: Document) -> dict[str, int]:
    """Return bytes by part in the order of the bar. `memory_detail` splits what `memory` calls temporary; parts that
    are not known separately are left out."""
    everything = {**document["memory"], **{k: v for k, v in document["memory_detail"].items() if isinstance(v, int)}}
    return {name: everything[name] for name in PARTS if everything.get(name) is not None}


def is_own(document: Document) -> bool:
    """True for a user's own model, which has no decoder sizes."""
    return "heads" not in document["shape"]


def memory_bar(document: Document, width: int = BAR_COLUMNS) -> Text:
    """Draw the parts to the scale of the card, or of the total if that is larger; then a second line marks where the
    card ends."""
    parts, total = parts_of(document), document["memory"]["total"]
    memory = document["hardware"]["memory_bytes"]
    scale = max(total, memory or 0) / width
    bar, filled, drawn = Text(), 0, 0
    for name, size in parts.items():
        letter, colour, _ = PARTS[name]
        filled += size
        columns = round(filled / scale) - drawn  # from a running sum, so that rounding does not change the bar's length
        bar.append(letter * columns, style=f"black on {colour}")
        drawn += columns
    bar.append(FREE * (width - drawn), style="dim")
    if memory is not None and total > memory:
        bar.append(f"\n{END:>{max(round(memory / scale), len(END))}}", style="bold red")
    return bar


def memory_text(document: Document) -> str:
    total, memory = document["memory"]["total"], document["hardware"]["memory_bytes"]
    moment = f"at the peak, in the {document['memory_detail']['moment']}"
    needs = f"{human_bytes(total)} {'with everything alive at once' if is_own(document) else moment}"
    if memory is None:
        return f"{needs}; no device to compare with"
    largest = document["max_micro_batch"]
    best = f"the largest micro batch that fits is {largest:,}" if largest else "no micro batch fits"
    if largest == MOST_SEQUENCES:
        best = f"a micro batch of {largest:,} fits, and larger ones were not tried"
    share = f"{human_percent(total / memory, 0)} of {human_bytes(memory)}"
    return f"{needs}: {share}{'' if document['fits'] else ', which does not fit'}; {best}"


def memory_table(document: Document) -> Table:
    table = plain_table("", "memory", "bytes ", "share ", "what")
    total = document["memory"]["total"]
    for name, size in parts_of(document).items():
        letter, colour, meaning = PARTS[name]
        if document["settings"]["inference"]:
            meaning = IN_INFERENCE.get(name, meaning)
        if is_own(document):
            meaning = OF_ONES_OWN.get(name, meaning)
        key = Text(letter, style=f"black on {colour}")
        table.add_row(key, LABELS.get(name, name), human_bytes(size), human_percent(size / total), meaning)
        if name == "activations" and not is_own(document):
            for kind, part in document["memory_detail"]["activations"].items():
                table.add_row("", Text(f"  {kind}", style="dim"), human_bytes(part), human_percent(part / total), "")
    table.add_row("", Text("total", style="bold"), human_bytes(total), "", "")
    return table


def changes_table(document: Document) -> Table:
    table = plain_table("to make it fit, one on top of the other", "peak ", "fits", "costs")
    for change in document["what_to_change"]:
        fits = Text("yes", style="bold green") if change["fits"] else Text("no", style="red")
        table.add_row(change["what"], human_bytes(change["total"]), fits, change["cost"])
    return table


# speed


def roofline_table(roofline: Document) -> Table:
    """Tabulate three answers and where the realistic one spends its time; bounds alone for a user's own model."""
    expected, unit = roofline["expected"], rate_unit(roofline.get("unit"), short=False)
    table = plain_table("roofline", "step ", f"{unit} ", "what")
    light = "every operation at the data sheet's peaks, one after the other"
    rows = [("floor", "floor", "the FLOPs alone, at the data sheet's matmul rate")]
    if expected is None:
        rows.append(("bound", "light", "its products and its update alone, at the data sheet's peaks"))
    else:
        rows += [("speed of light", "light", light), ("expected", "expected", expected["peaks"]["source"])]
    for name, key, what in rows:
        side = roofline[key]
        style = "bold" if key == "expected" else ""
        table.add_row(
            Text(name, style=style), human_seconds(side["seconds"]), human_rate(side["tokens_per_second"]), what
        )
    for group, seconds in (expected or {"groups": {}})["groups"].items():
        share = human_percent(seconds / expected["seconds"])
        table.add_row(Text(f"  {group}", style="dim"), human_seconds(seconds), "", f"{share} of the expected step")
    return table


def operations_table(roofline: Document) -> Table:
    """Tabulate the operations with the longest expected time; a row sums up all layers and micro batches."""
    expected = roofline["expected"]
    pairs = sorted(
        zip(expected["operations"], roofline["light"]["operations"], strict=True),
        key=lambda pair: pair[0]["seconds"],
        reverse=True,
    )
    table = plain_table("operation", "pass", "GFLOP ", "GB ", "bound", "ideal ", "expected ", "share ")
    table.columns[0].min_width = 12
    for real, ideal in pairs[:SHOWN_OPERATIONS]:
        table.add_row(
            real["name"],
            real["direction"],
            f"{real['flops'] / 1e9:,.0f}" if real["flops"] else UNKNOWN,
            f"{real['bytes'] / 1e9:,.2f}",
            real["bound"],
            human_seconds(ideal["seconds"]),
            human_seconds(real["seconds"]),
            human_percent(real["seconds"] / expected["seconds"]),
        )
    return table


def notes_of(document: Document) -> Iterator[Note]:
    yield Note(about=rate_unit(document["shape"].get("unit"), short=False), text=speed_text(document))
    yield Note(about="batch", text=document["batch"]["sentence"])
    if document["hardware"]["reason"]:
        yield Note(about="device", text=one_line(document["hardware"]["reason"]))
    for note in document["notes"]:
        yield Note(about="note", text=one_line(note))


def speed_text(document: Document) -> str:
    if document["tokens_per_second"] is None:
        return f"{UNKNOWN} ({one_line(document['tokens_per_second_reason'])})"
    measure = f"; measure it with redline ladder {one_line(document['words'])}" if document.get("words") else ""
    return f"{human_rate(document['tokens_per_second'])} expected{measure}"
