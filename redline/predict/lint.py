"""Ugly numbers: walks every GEMM of a step and says which sizes cost speed, why, and what to use instead.

    report = lint(Subject(shape=PRESETS["gpt2"].shape, micro_batch=16, device=find_device("H200")))
    report.findings[0].fix -> "pad it to 50304: ..."

The rules are in `lint_rules.py`. A gain is how much more useful work each second of the whole step's GEMM time does.
Attention counts as unfused matmuls, so with a fused kernel the layers' share and gains are larger, and attention's
smaller. Findings are ordered and their gains compound: each is measured from the shape that the findings above it left.
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
"""Seconds per call by GEMM, with `one_call` as the key; None if the GEMM could not be timed."""
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
        """None if nothing is predicted, or only noise: `no_gain` says why."""
        return None if self.no_gain is not None else predicted_gain(self.before, self.after)

    @property
    def no_gain(self) -> str | None:
        if self.advice.change is None:
            return "nothing better is proposed"
        found = predicted_gain(self.before, self.after)
        if found is not None and found < 0 and "tp" in self.advice.change:
            return "the exchanges between GPUs that it saves are not counted"
        if found is not None:
            row = self.advice.row
            return row.no_figure if row is not None and (row.refused or abs(found) < NOISE) else None
        if self.before.device is None:
            return "the device is unknown"
        subject = self.before if self.before.undivided else self.after
        return f"{subject.tp} GPUs cannot share {' and '.join(subject.undivided)}, so there is no time to compare with"

    @property
    def counts(self) -> bool:
        """True if it fails --strict. A mild finding does only if it is predicted to cost something after all."""
        return not self.advice.mild or (self.predicted_gain or 0.0) >= MEANINGFUL_GAIN

    @property
    def fix(self) -> str:
        return self.advice.fix

    def where(self) -> list[Gemm]:
        """Return the GEMMs that change. A size that does not divide among the ranks may round to the share of a good
        size, so that none changes: then return those of the whole layers."""
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
    """The subject with every fix applied."""

    @property
    def changes(self) -> bool:
        return any(finding.advice.change is not None for finding in self.findings)


def lint(subject: Subject, ignore: Collection[str] = ()) -> Report:
    """Apply the rules to a subject; `ignore` names rules to skip."""
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
    """Return the GEMMs of the shape as it is and after each fix; sizes that repeat are timed once."""
    states = [report.subject, *(finding.after for finding in report.findings)]
    return list(dict.fromkeys(one_call(gemm) for state in states for gemm in state.gemms))


def one_call(gemm: Gemm) -> Gemm:
    """Return what decides the time of a call: its sizes and the layout of its matrices, which differs only for
    attention's second matmul."""
    return replace(gemm, where="mix" if gemm.where == "mix" else "", count=1)


def measured_gain(before: Subject, after: Subject, seconds: Seconds) -> float | None:
    """Return the same figure as the predicted gain, from measured seconds per call."""
    return gain(before, after, step_seconds(before, seconds), step_seconds(after, seconds))


def step_seconds(subject: Subject, seconds: Seconds) -> float | None:
    """Return the seconds of all GEMMs of a step; None if one of them could not be timed."""
    calls = [(gemm.count, seconds.get(one_call(gemm))) for gemm in subject.gemms]
    known = [count * each for count, each in calls if each is not None]
    return math.fsum(known) if len(known) == len(calls) else None


def document(report: Report, hardware: dict[str, Any], seconds: Seconds | None = None) -> dict[str, Any]:
    """Return the JSON of `redline lint`; `seconds` come from --measure."""
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
    """Return a row per timed GEMM, before and after all fixes, with seconds per call and calls per step."""
    states: Sequence[tuple[str, Subject]] = [("before", report.subject)]
    if report.changes:
        states = [*states, ("after", report.suggested)]
    return [
        {"state": name, **to_json(gemm), "seconds": seconds.get(one_call(gemm))}
        for name, state in states
        for gemm in state.gemms
    ]
