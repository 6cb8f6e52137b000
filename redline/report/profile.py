"""A profile for the terminal: the first things to do, where the time goes, the kernels, findings and the memory.

    print_profile(document, Console())        the document is that of `redline profile --json`

At most 100 columns. Layers of one kind are shown together: h.0.attn and h.1.attn are h.*.attn.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from redline.core.places import short
from redline.core.profile import IDLE, RECIPE
from redline.core.units import UNKNOWN, batch_text, human_bytes, human_percent, human_rate, human_seconds, rate_unit
from redline.predict.advice import THINGS
from redline.report import Document, one_line
from redline.report.plain_table import plain_table
from redline.report.table import WIDTH_COLUMNS, Note, milliseconds, notes_grid, ranks_of, ranks_text, sharing_text

SHOWN_ADVICE = THINGS
SHOWN_KERNELS, SHOWN_MODULES, SHOWN_LINES, SHOWN_FINDINGS = 10, 8, 6, 12
BAR_COLUMNS = 30
TIMELINE_ROWS, LABEL_COLUMNS = 6, 10
NAME_COLUMNS, NAME_END_COLUMNS = 32, 9
IDLE_ON_CPU = "between operators"
OUTSIDE = "outside the model's modules"
NO_MODULE = "the loss, the batch, temporaries of the backward pass"
IN_COMPILED = "unknown: compiled code has no modules"


def print_profile(document: Document, console: Console) -> None:
    width = min(console.width, WIDTH_COLUMNS)
    for text in header_lines(document):
        console.print(Text(text, overflow="fold"), width=width)
    for title, part in parts_of(document, width):
        console.print()
        console.print(Text(title, style="bold"), width=width)
        console.print(part, width=width)
    console.print()
    console.print(notes_grid(list(notes_of(document))), width=width)
    if document["trace"]:  # a path stays in one piece, to be copied
        console.print(Text(f"trace  {one_line(document['trace'])}"), soft_wrap=True)


def parts_of(document: Document, width: int) -> Iterator[tuple[str, Table | Text]]:
    if document["advice"] is not None:  # a user's own step has no workload to advise on
        yield "to do first", advice_table(document)
    yield "where the time goes", groups_table(document)
    yield "by phase", phases_table(document)
    if document.get("modules_without_compile"):  # documents of older runs have none
        yield f"by module, {uncompiled_text(document)}", uncompiled_table(document)
    else:
        yield "by module", modules_table(document)
    yield "kernels" if document["device"] == "cuda" else "operators", kernels_table(document)
    if document["findings"]:
        yield "found in the code", findings_table(document)
    if document["memory"] is not None:
        yield "memory", memory_table(document["memory"])
        yield "memory over the step", Text(memory_plot(document["memory"], width))
        if document["memory"]["modules"]:
            yield "memory at the peak, by module", memory_modules_table(document["memory"])
        yield "memory at the peak, by line", lines_table(document["memory"])


def header_lines(document: Document) -> Iterator[str]:
    recipe, shape = document["recipe"], document["workload"]["shape"]
    sizes = "" if recipe is None else f", {batch_text(recipe['micro_batch'], shape)}"
    rungs = "" if recipe is None else f", {', '.join(recipe['rungs']) or 'no rungs'}"
    ranks = f" with {ranks_text(document)}" if ranks_of(document) > 1 else ""
    yield f"{one_line(document['workload']['name'])} on {one_line(document['hardware']['name'])}{ranks}{sizes}{rungs}"
    step = document["step_seconds"]
    unit = rate_unit((shape or {}).get("unit"), short=False)
    rate = "" if recipe is None else f" ({human_rate(document['tokens_per_second'])} {unit})"
    yield (
        f"{human_seconds(step['median'])} a step{rate}; "
        f"{human_seconds(document['profiled_step_seconds'])} under the profiler "
        f"({100 * document['profiler_overhead']:+.0f} %). Times below are of the step without it."
    )


# time


def advice_table(document: Document) -> Table | Text:
    advice = document["advice"][:SHOWN_ADVICE]
    if not advice:
        return Text("nothing that the rules know of would gain a hundredth of the step")
    table = plain_table("", "gain ", "what", "why")
    for number, each in enumerate(advice, start=1):
        gain = UNKNOWN if each["gain_seconds"] is None else f"{milliseconds(each['gain_seconds'])} ms"
        gain = f"≤ {gain}" if each.get("at_most") else gain  # documents of older runs have no bounds
        table.add_row(
            str(number), gain, Text(one_line(short(each["what"])), style="bold green"), one_line(short(each["why"]))
        )
    return table


def groups_table(document: Document) -> Table:
    table = plain_table("group", "ms ", "share ", "")
    groups = sorted((each for each in document["groups"] if each["seconds"] > 0), key=lambda each: -each["seconds"])
    for each in groups:
        name = IDLE_ON_CPU if each["group"] == IDLE and document["device"] == "cpu" else each["group"]
        table.add_row(name, milliseconds(each["seconds"]), human_percent(each["share"]), bar(each["share"]))
    return table


def phases_table(document: Document) -> Table:
    table = plain_table("phase", "ms ", "share ", "")
    for each in document["phases"]:
        table.add_row(each["phase"], milliseconds(each["seconds"]), human_percent(each["share"]), bar(each["share"]))
    return table


def bar(share: float) -> str:
    """Draw a share to an eighth of a cell; anything above zero is visible."""
    eighths = max(1, round(min(share, 1.0) * BAR_COLUMNS * 8)) if share > 0 else 0
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def modules_table(document: Document) -> Table:
    table = plain_table("module", "forward ms ", "backward ms ", "share ")
    step = document["step_seconds"]["median"]
    for name, (forward, backward) in folded_modules(document["modules"], unnamed_modules(document))[:SHOWN_MODULES]:
        share = human_percent((forward + backward) / step)
        table.add_row(name, milliseconds(forward), milliseconds(backward), share)
    return table


def uncompiled_table(document: Document) -> Table:
    """Tabulate shares only: the times are those of another step."""
    table = plain_table("module", "forward ", "backward ", "share ", "")
    for name, forward, backward in uncompiled_shares(document)[:SHOWN_MODULES]:
        shares = (forward, backward, forward + backward)
        table.add_row(name, *(human_percent(share) for share in shares), bar(forward + backward))
    return table


def uncompiled_text(document: Document) -> str:
    """Say which step was measured: 'of the same step without compile: 171 ms instead of 114 ms'."""
    found, recipe = document["modules_without_compile"], document["recipe"]
    took, micro_batch = human_seconds(found["step_seconds"]), found["micro_batch"]
    if micro_batch != recipe["micro_batch"]:
        return f"of the same step without compile, {took} with a micro batch of {micro_batch} (more does not fit)"
    step = human_seconds(document["step_seconds"]["median"])
    return f"of the same step without compile: {took} instead of {step}"


def uncompiled_shares(document: Document) -> list[tuple[str, float, float]]:
    """Return (modules of one kind, forward share, backward share) of the work of both passes; largest first."""
    rows = folded_modules(document["modules_without_compile"]["modules"], OUTSIDE)
    work = sum(forward + backward for _, (forward, backward) in rows)
    return [(name, forward / work, backward / work) for name, (forward, backward) in rows]


def unnamed_modules(document: Document) -> str:
    return IN_COMPILED if document["compiled"] else OUTSIDE


def folded_modules(modules: list[Document], unnamed: str) -> list[tuple[str, tuple[float, float]]]:
    """Return (name, (forward, backward)) seconds, summed over layers of one kind, most time first."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for each in modules:
        name = unnamed if each["module"] is None else folded(each["module"])
        spent[name][0] += each["forward"]
        spent[name][1] += each["backward"]
    ordered = sorted(spent.items(), key=lambda item: -sum(item[1]))
    return [(name, (forward, backward)) for name, (forward, backward) in ordered]


def folded(module: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", one_line(module)) or "the model itself"


def kernels_table(document: Document) -> Table:
    table = plain_table("name", "group", "calls ", "ms ", "TFLOP/s ", "GB/s ", "roofline ")
    for each in document["kernels"][:SHOWN_KERNELS]:
        table.add_row(
            short_kernel(each["name"]),
            each["group"],
            f"{each['calls']:,.0f}",
            milliseconds(each["seconds"]),
            plain_rate(each["tflops"]),
            plain_rate(each["bytes_per_second"], 1e9),
            human_percent(each["roofline_share"], 0),
        )
    return table


def plain_kernel(name: str) -> str:
    """Strip return type, arguments and template; keep the whole name if nothing would be left."""
    whole = one_line(name)
    # The parentheses in "at::native::(anonymous namespace)::..." are not arguments.
    plain = whole.removeprefix("void ").replace("(anonymous namespace)::", "").split("(")[0].split("<")[0]
    return plain.removeprefix("autograd::engine::evaluate_function: ") or whole


def short_kernel(name: str) -> str:
    """The same, cut to the terminal's column. Beginning and end stay, since variants of a kernel differ in either."""
    plain = plain_kernel(name).removeprefix("cudnn_generated_fort_native_")
    if len(plain) <= NAME_COLUMNS:
        return plain
    return plain[: NAME_COLUMNS - NAME_END_COLUMNS - 1] + "…" + plain[-NAME_END_COLUMNS:]


def plain_rate(per_second: float | None, unit: float = 1.0) -> str:
    """Format with three digits, or as a whole number from 100 on: '4.31', '1,183'."""
    if per_second is None:
        return UNKNOWN
    value = per_second / unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# findings


def findings_table(document: Document) -> Table:
    table = plain_table("what", "where", "per step ", "detail")
    for each in document["findings"][:SHOWN_FINDINGS]:
        where = place_of(each)
        count = UNKNOWN if each["per_step"] is None else f"{each['per_step']:g}"
        table.add_row(each["kind"], one_line(where), count, one_line(each["detail"]))
    return table


def place_of(finding: Document) -> str:
    """Return the line of a finding, or the recipe; documents of older runs have no 'rung'."""
    if finding.get("rung") is not None:
        return RECIPE
    return UNKNOWN if finding["file"] is None else f"{short(finding['file'])}:{finding['line']}"


# memory


def memory_table(memory: Document) -> Table:
    """Tabulate measured beside predicted. Activations and temporaries share a row, since predictions split them
    differently."""
    measured, predicted = memory["categories"], memory["predicted"]
    known = {"weights": ("weights", "buffers"), "optimizer": ("optimizer",), "gradients": ("gradients",)}
    rest = sum(measured.values()) - sum(measured.get(name, 0) for names in known.values() for name in names)
    table = plain_table("at the peak", "measured ", "predicted ", "what")
    for row, names in known.items():
        size = sum(measured.get(name, 0) for name in names)
        table.add_row(row, human_bytes(size), human_bytes(predicted and predicted[row]), "")
    others = predicted and predicted["allocated"] - sum(predicted[row] for row in known)
    parts = ", ".join(
        f"{name} {human_bytes(size)}" for name, size in measured.items() if name not in sum(known.values(), ())
    )
    table.add_row("activations and others", human_bytes(rest), human_bytes(others), parts)
    total = f"{memory['peak_bytes'] / predicted['allocated']:.2f} of the prediction" if predicted else ""
    table.add_row("in all", human_bytes(memory["peak_bytes"]), human_bytes(predicted and predicted["allocated"]), total)
    if memory["reserved_bytes"] is not None:
        table.add_row("reserved", human_bytes(memory["reserved_bytes"]), UNKNOWN, _fragmentation(memory))
    return table


def _fragmentation(memory: Document) -> str:
    share = memory["fragmentation_bytes"] / memory["reserved_bytes"]
    return f"{human_bytes(memory['fragmentation_bytes'])} ({human_percent(share)}) of it not in use at the peak"


def memory_plot(memory: Document, width: int = WIDTH_COLUMNS) -> str:
    """Plot the bytes alive, left to right through the step: each column shows its fullest moment."""
    columns = fullest_moments(memory, width - LABEL_COLUMNS - 1)
    peak = max(columns) or 1
    lines = []
    for row in range(TIMELINE_ROWS, 0, -1):
        cells = "".join(_cell(size / peak * TIMELINE_ROWS - (row - 1)) for size in columns)
        label = human_bytes(peak) if row == TIMELINE_ROWS else ""
        lines.append(f"{label:>{LABEL_COLUMNS}} {cells}".rstrip())
    return "\n".join(lines)


def fullest_moments(memory: Document, columns: int) -> list[int]:
    """Return the largest size in each of `columns` equal stretches of the step."""
    sizes = [0] * columns
    moments = memory["timeline_seconds"]
    length = (moments[-1] if moments else 0) or 1.0
    for start, end, size in zip(moments, [*moments[1:], length], memory["timeline_bytes"], strict=True):
        first, last = (min(columns - 1, int(at / length * columns)) for at in (start, end))
        sizes[first : last + 1] = [max(size, before) for before in sizes[first : last + 1]]
    return sizes


def _cell(height: float) -> str:
    return " ▁▂▃▄▅▆▇█"[round(8 * max(0.0, min(1.0, height)))]


def lines_table(memory: Document) -> Table:
    table = plain_table("line", "function", "alive at the peak ")
    for each in memory["lines"][:SHOWN_LINES]:
        where = one_line(f"{short(each['file'])}:{each['line']}")
        table.add_row(where, one_line(each["function"]), human_bytes(each["bytes"]))
    return table


def memory_modules_table(memory: Document) -> Table:
    table = plain_table("module", "alive at the peak ")
    for name, size in memory_by_module(memory)[:SHOWN_MODULES]:
        table.add_row(name, human_bytes(size))
    return table


def memory_by_module(memory: Document) -> list[tuple[str, int]]:
    """Return bytes summed over layers of one kind, as for the times, and those of no module; largest first."""
    sizes: dict[str, int] = {}
    for module, size in memory["modules"].items():
        sizes[folded(module)] = sizes.get(folded(module), 0) + size
    if memory["elsewhere_bytes"]:  # documents of older runs give no reason
        sizes[f"of none: {one_line(memory.get('modules_reason') or NO_MODULE)}"] = memory["elsewhere_bytes"]
    return sorted(sizes.items(), key=lambda pair: -pair[1])


def notes_of(document: Document) -> Iterator[Note]:
    busy = "the device works" if document["device"] == "cuda" else "operators work"
    yield Note(
        about="busy",
        text=f"{busy} for {human_percent(document['busy_share'])} of the step; {document['launches']:,.0f} launches; "
        f"issuing them takes the host {human_seconds(document['host_seconds'])} under the profiler; "
        f"{human_seconds(document['cpu_seconds'])} of CPU time a step, all threads",
    )
    if sharing := document.get("sharing"):  # older documents have none
        yield Note(
            about=f"{ranks_of(document)} ranks",
            text=sharing_text(sharing) + "; the step is the slowest rank's, the rest rank 0's",
        )
    if document["attention"] is not None:
        yield Note(about="attention", text=one_line(document["attention"]))
    roofline = document["roofline"]
    if roofline is not None:
        text = (
            f"speed of light {human_seconds(roofline['light_seconds'])}, expected "
            f"{human_seconds(roofline['expected_seconds'])} ({one_line(roofline['source'])})"
        )
        yield Note(about="roofline", text=text)
    if document["advice"] and document["rates"] is not None:
        bound = any(each.get("at_most") for each in document["advice"])
        text = "estimates of one change alone" + "; ≤: a bound, which nothing here is known to reach" * bound
        yield Note(about="gains", text=f"{text}; rates: {one_line(document['rates']['source'])}")
    if document["memory"] is not None:
        yield Note(about="memory", text=f"as told by {one_line(document['memory']['source'])}")
    elif document["memory_reason"]:
        yield Note(about="memory", text=one_line(document["memory_reason"]))
    if uncompiled := document.get("modules_without_compile"):
        undone = ", ".join(uncompiled["undone"])
        text = f"of work in forward and backward, in another step: without {undone}. Compiled code has no modules left"
        yield Note(about="modules", text=text)
    if document["device"] == "cpu" and document["findings"]:
        text = "synchronisations cost a CPU nothing; on a GPU each makes the host wait"
        yield Note(about="findings", text=text)
    for kind, fix in dict.fromkeys((each["kind"], each["fix"]) for each in document["findings"]):
        yield Note(about=kind, text=fix)
    for note in document["notes"]:
        yield Note(about="note", text=one_line(note))
    if document["trace"]:
        yield Note(about="trace", text="open the file below in https://ui.perfetto.dev")
