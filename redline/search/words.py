"""The options that a ladder and a tune share, and the machine they run on: checked, resolved and resumed in one place.

    words = Words(workload="tiny", gpus=2, out=Path("runs/mine"))
    words.check()                          # every mistake that needs no machine
    found = words.meet_machine()           # Found(workload, hardware, versions, notes)

Options of only one of them are in `search/ladder.py` and `search/tune_run.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redline.core.errors import UserError, unknown_name
from redline.core.hardware import Hardware
from redline.core.job import RunDirectory, check_run_directory
from redline.core.layout import Layout
from redline.core.workload import Workload, check_positive
from redline.data.text import check_corpus
from redline.predict.parallel import Beside
from redline.search.inspect import check_unchanged_file, find_workload
from redline.search.launch import probe_machine
from redline.search.ranks import check_global_batch, check_ranks, check_shareable, check_tensor_needs, layout_for
from redline.workloads import default_workload

MOST_SEQUENCES = 2**20  # of one token each, their logits alone would be 196 GiB for GPT-2


@dataclass(frozen=True, kw_only=True)
class Found:
    workload: Workload
    hardware: Hardware
    versions: dict[str, str | None]
    notes: tuple[str, ...]
    """Choices made for the user, with their reasons."""


@dataclass(frozen=True, kw_only=True)
class Words:
    workload: str | None = None
    sequence: int | None = None
    data: str | None = None
    device: str | None = None
    gpus: int | None = None
    tensor: int | None = None
    replicas: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    steps: int | None = None
    check_steps: int | None = None
    out: Path | None = None

    @property
    def layout(self) -> Layout:
        """The layout of the ranks. Raises a UserError if they cannot be arranged that way."""
        return self.layout_with(None)

    def layout_with(self, workload: Workload | None) -> Layout:
        degrees = {"tensor": self.tensor, "replicas": self.replicas}
        return layout_for(self.gpus or 1, degrees, workload, beside=Beside(batch=self.global_batch, stages=False))

    def check(self, rungs: Sequence[str] = (), **more: int | None) -> None:
        """Raise a UserError for mistakes that need no machine. `rungs`: those that the run begins with; `more`: other
        options that are counts."""
        own = ("micro_batch", "gpus", "global_batch", "steps", "check_steps")
        for name, value in {**{name: getattr(self, name) for name in own}, **more}.items():
            if value is not None:
                check_positive(option_of(name), value)
        workload = None if self.workload is None else find_workload(self.workload, sequence=self.sequence)
        if workload is not None:
            check_tensor_needs(rungs, self.tensor, workload)
        check_global_batch(self.global_batch, self.layout_with(workload).data)
        check_choice("device", self.device, ("cuda", "cpu"))
        if self.micro_batch is not None:
            check_sensible("--micro-batch", self.micro_batch)
        if self.data is not None:
            check_corpus(self.data)
        if self.out is not None:
            check_run_directory(self.out)

    def meet_machine(self) -> Found:
        """Probe the machine, with torch in a process of its own, and resolve the workload for it."""
        hardware, versions = probe_machine(self.device)
        hardware = with_layout(check_ranks(hardware, self.layout.ranks, self.layout), self.layout)
        name, notes = named_or_default(self.workload, hardware)
        workload = find_workload(name, self.data, self.sequence)
        workload = replace(workload, notes=(*workload.notes, *self._refused_in_training(name, workload, hardware)))
        check_shareable(workload, hardware)
        return Found(workload=workload, hardware=hardware, versions=versions, notes=(*notes, *workload.notes))

    def _refused_in_training(self, name: str, workload: Workload, hardware: Hardware) -> Iterator[str]:
        """Yield notes about rungs that are measured without dropout and do not work with it: training will use a
        different recipe."""
        trained = find_workload(name, self.data, self.sequence, trained_on=hardware.kind)
        refused = {rung: reason for rung, reason in trained.cannot.items() if rung not in workload.cannot}
        for reason in dict.fromkeys(refused.values()):
            rungs = ", ".join(rung for rung in refused if refused[rung] == reason)
            yield f"`redline train` on this {hardware.kind.upper()} will leave {rungs} out of a recipe: {reason}"


def with_layout(hardware: Hardware, layout: Layout) -> Hardware:
    """Return the machine with this layout; with none for plain data parallelism, as before others existed."""
    return replace(hardware, layout=None if layout.is_plain else layout)


def option_of(name: str) -> str:
    """Return the option as it is typed: '--micro-batch'. A workload has no option, and a start is `--from`."""
    return {"workload": "workload", "start": "--from"}.get(name, "--" + name.replace("_", "-"))


def named_or_default(workload: str | None, hardware: Hardware) -> tuple[str, tuple[str, ...]]:
    """Return the workload's name, and a note if it is the default."""
    if workload is not None:
        return workload, ()
    name = default_workload(hardware.kind)
    return name, (f"workload {name}: the default on a {hardware.kind.upper()} machine ({hardware.name})",)


def check_sensible(name: str, micro_batch: int) -> None:
    """Refuse sizes far beyond any device: a row that runs out of memory would answer a question nobody asked."""
    if micro_batch > MOST_SEQUENCES:
        raise UserError(
            f"{name} is {micro_batch:,}",
            f"it counts the sequences of one step, and no device holds more than {MOST_SEQUENCES:,}",
            "set --micro-batch to what fits, such as 16",
        )


def check_choice(name: str, value: str | None, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise unknown_name(name, value, known)


# --- resuming ---------------------------------------------------------------------------------------------------------


DEGREES = {"gpus": "ranks", "tensor": "tensor", "replicas": "replicas"}  # options, and what a layout calls them


def check_nothing_given(command: str, path: Path, choices: dict[str, Any]) -> None:
    """Refuse other options with --resume. The ranks are known only once the run is open: see `check_same_ranks`."""
    said = {name: value for name, value in choices.items() if name not in DEGREES}
    given = [option_of(name) for name, value in said.items() if value is not None and value is not False]
    if given:  # 0 is an option that was given
        raise UserError(
            f"--resume does not go with {', '.join(given)}",
            "a resumed run asks what it asked before, or its rows could not be compared",
            f"leave them out: redline {command} --resume {path}",
        )


def check_same_ranks(command: str, path: Path, choices: dict[str, Any], hardware: Hardware) -> None:
    """Refuse to resume with other ranks, which would be another run. Its own options, such as `--gpus`, may be
    repeated."""
    own = {name: getattr(hardware.arranged, degree) for name, degree in DEGREES.items()}
    other = [name for name in DEGREES if choices.get(name) not in (None, own[name])]
    if other:
        raise UserError(
            f"--resume does not go with {_options(choices, other)}",
            f"{path} has {_options(own, other)}, and rows of other ranks could not be compared with its own",
            f"leave it out: redline {command} --resume {path}; or start a new run",
        )


def _options(values: dict[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{option_of(name)} {values[name]}" for name in names)


def check_same_machine(
    directory: RunDirectory, workload: Workload, hardware: Hardware, device: str, *, fix: str
) -> None:
    """Refuse to resume with another machine, other versions or a changed model: rows must stay comparable."""
    check_unchanged_file(workload)
    here, versions = probe_machine(device)
    check_ranks(here, hardware.ranks)
    before, now = directory.read_run()["versions"], {**versions, "device": here.name}
    changed = [
        f"{key} was {old}, is {now.get(key)}"
        for key, old in {**before, "device": hardware.name}.items()
        if old != now.get(key)
    ]
    if changed:
        raise UserError(f"{directory.path} was measured elsewhere", "; ".join(changed), fix)
