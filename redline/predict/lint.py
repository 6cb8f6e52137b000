"""Ugly numbers: walks every GEMM of a step and says which sizes cost speed, why, and what to take instead.

    report = lint(Subject(shape=PRESETS["gpt2"].shape, micro_batch=16, device=find_device("H200")))
    report.findings[0].fix -> "pad it to 50304: ..."

The rules are in `lint_rules.py`. A gain is of the GEMM time of the whole step: how much more useful work a second of
it does. Attention counts as its products unfused, so with a fused kernel the layers' share, and their gains, are larger
and those of attention smaller. Findings come in order and their gains compound: each is measured from the shape that
the findings above it left.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redline.core.values import to_json
from redline.predict.gemms import Gemm
from redline.predict.lint_rules import MEANINGFUL_GAIN, NOISE, RULES, Advice, Rule
from redline.predict.subject import Subject, gain, predicted_gain

Seconds = Mapping[Gemm, float | None]
"""One call of each GEMM, as `one_call` names it; None for one that could not be timed."""
GAIN_CONVENTION = (
    "more useful work per second of the whole step's GEMM time (layers, and attention's products unfused), each "
    "finding on top of those above it"
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    rule: Rule
    advice: Advice
    before: Subject
    after: Subject

    @property
    def predicted_gain(self) -> float | None:
        """None where nothing is predicted, or only noise: `no_gain` says why."""
        return None if self.no_gain is not None else predicted_gain(self.before, self.after)

    @property
    def no_gain(self) -> str | None:
        if self.advice.change is None:
            return "nothing better is proposed"
        found = predicted_gain(self.before, self.after)
        if found is not None and found < 0 and "tp" in self.advice.change:
            return "what it saves, exchanges between GPUs, is not counted"
        if found is not None:
            row = self.advice.row
            return row.no_figure if row is not None and (row.refused or abs(found) < NOISE) else None
        if self.before.device is None:
            return "the device is unknown"
        subject = self.before if self.before.undivided else self.after
        return f"{subject.tp} GPUs cannot share {' and '.join(subject.undivided)}, so there is no time to compare with"

    @property
    def counts(self) -> bool:
        """Enough to fail --strict: a mild one does where it is predicted to cost something all the same."""
        return not self.advice.mild or (self.predicted_gain or 0.0) >= MEANINGFUL_GAIN

    @property
    def fix(self) -> str:
        return self.advice.fix

    def where(self) -> list[Gemm]:
        """The GEMMs that change. A size that does not divide among the ranks may round to a good one's: then those of
        the whole layers."""
        whole = replace(self.before, tp=1), replace(self.after, tp=1)
        return _changed(self.before, self.after) or _changed(*whole)


def _changed(before: Subject, after: Subject) -> list[Gemm]:
    kept = set(after.gemms)
    return [gemm for gemm in before.gemms if gemm not in kept]


@dataclass(frozen=True, kw_only=True)
class Report:
    subject: Subject
    findings: tuple[Finding, ...]
    suggested: Subject
    """The subject with every fix in it."""

    @property
    def changes(self) -> bool:
        return any(finding.advice.change is not None for finding in self.findings)


def lint(subject: Subject, ignore: Collection[str] = ()) -> Report:
    """`ignore` names rules that are not asked."""
    findings: list[Finding] = []
    state = subject
    for rule in RULES:
        advice = None if rule.name in ignore else rule.check(state)
        if advice is not None:
            after = state.changed(advice.change or {})
            findings.append(Finding(rule=rule, advice=advice, before=state, after=after))
            state = after
    return Report(subject=subject, findings=tuple(findings), suggested=state)


def gemms_to_time(report: Report) -> list[Gemm]:
    """Every size of the shape as it is and of each fix, once; sizes that repeat are timed once."""
    states = [report.subject, *(finding.after for finding in report.findings)]
    return list(dict.fromkeys(one_call(gemm) for state in states for gemm in state.gemms))


def one_call(gemm: Gemm) -> Gemm:
    """What decides the time of a call: its sizes and how its matrices lie, which differs for attention's second
    product alone."""
    return replace(gemm, where="mix" if gemm.where == "mix" else "", count=1)


def measured_gain(before: Subject, after: Subject, seconds: Seconds) -> float | None:
    """The same figure as the predicted one, from seconds per call."""
    return gain(before, after, step_seconds(before, seconds), step_seconds(after, seconds))


def step_seconds(subject: Subject, seconds: Seconds) -> float | None:
    """Of all GEMMs of a step; None when one of them could not be timed."""
    calls = [(gemm.count, seconds.get(one_call(gemm))) for gemm in subject.gemms]
    known = [count * each for count, each in calls if each is not None]
    return math.fsum(known) if len(known) == len(calls) else None


def document(report: Report, hardware: dict[str, Any], seconds: Seconds | None = None) -> dict[str, Any]:
    """The JSON of `redline lint`; `seconds` are those of --measure."""
    return {
        "shape": to_json(report.subject.shape),
        "hardware": hardware,
        "settings": _settings(report.subject),
        "findings": [_finding_json(finding, seconds) for finding in report.findings],
        "suggested": to_json(report.suggested.shape) if report.changes else None,
        "suggested_settings": _settings(report.suggested) if report.changes else None,
        "gain_convention": GAIN_CONVENTION,
        "predicted_gain": predicted_gain(report.subject, report.suggested),
        "measured_gain": None if seconds is None else measured_gain(report.subject, report.suggested, seconds),
        "gemms": None if seconds is None else _gemm_rows(report, seconds),
    }


def _finding_json(finding: Finding, seconds: Seconds | None) -> dict[str, Any]:
    return {
        "rule": finding.rule.name,
        "kind": finding.rule.kind,
        "where": [f"{gemm.where} {gemm.direction} {_sizes(gemm)}" for gemm in finding.where()],
        "problem": finding.advice.problem,
        "why": finding.advice.why,
        "fix": finding.advice.fix,
        "change": finding.advice.change,
        "mild": not finding.counts,
        "predicted_gain": finding.predicted_gain,
        "no_predicted_gain": finding.no_gain,
        "measured_gain": None if seconds is None else measured_gain(finding.before, finding.after, seconds),
    }


def _sizes(gemm: Gemm) -> str:
    return f"{gemm.m}x{gemm.n}x{gemm.k}" + (f" x{gemm.batch}" if gemm.batch > 1 else "")


def _settings(subject: Subject) -> dict[str, Any]:
    return {"micro_batch": subject.micro_batch, "tp": subject.tp, "dtype": subject.dtype}


def _gemm_rows(report: Report, seconds: Seconds) -> list[dict[str, Any]]:
    """What was timed, as it was and with every fix: seconds of a single call, and calls per step."""
    states: Sequence[tuple[str, Subject]] = [("before", report.subject)]
    if report.changes:
        states = [*states, ("after", report.suggested)]
    return [
        {"state": name, **to_json(gemm), "seconds": seconds.get(one_call(gemm))}
        for name, state in states
        for gemm in state.gemms
    ]
