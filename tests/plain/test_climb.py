"""The climb against a made-up machine: which questions are asked in which order, and what is kept of the answers.

test_document.py reads the machine below with runpy: tests are no package, so they cannot import each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.core.hardware import Hardware
from redline.core.job import Job
from redline.core.measurement import Compiled, Failure, GradientCheck, Measurement, Proof
from redline.core.plan import Plan
from redline.core.recipe import Recipe
from redline.core.workload import Shape, Workload
from redline.rungs import LADDER, find_rung, usual_rungs
from redline.search.climb import AGAIN, Climb, LadderSettings
from redline.search.document import best_rebatched, best_row, compile_note

TINY = Workload(
    name="tiny",
    shape=Shape(layers=2, heads=2, d_model=32, d_ff=128, vocab=257, sequence=16),
    tokenizer="bytes",
    micro_batch=4,
    learning_rate=3e-3,
)
H200 = Hardware(
    kind="cuda",
    name="NVIDIA H200",
    capability=(9, 0),
    cpu_cores=16,
    features=("tf32", "bf16", "fp16", "flash", "cudnn-attention", "compile", "triton"),
)
# Where every rung of the plain ladder applies.
WIDE_HEADS = replace(TINY, shape=replace(TINY.shape, heads=1))
WITH_PACKAGES = replace(H200, features=(*H200.features, "cublaslt", "quack", "flash4"))
ALL = tuple(rung.name for rung in LADDER[1:] if not rung.when_named)
START = 5.6  # near ln 257 = 5.549
CURVE = tuple(START - 0.1 * step for step in range(5))
TIED_CURVE = tuple(START - 0.11 * step for step in range(5))
OOM = Failure(kind="oom", reason="out of memory: tried to allocate 12 GiB")
TIMEOUT = Failure(kind="timeout", reason="stopped after 600 s while compiling; --timeout allows more")


@dataclass
class Machine:
    """Answers jobs. Each rung of a recipe multiplies the step by its factor, 0.9 unless told otherwise."""

    factors: dict[str, float] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    """By the last rung of a recipe ('baseline' for none), or 'reference'."""
    curves: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """By the last rung of a recipe."""
    drift: float = 0.0
    """Each measurement is slower than the last by this share."""
    jobs: list[Job] = field(default_factory=list)
    answers: dict[str, Measurement | Failure] = field(default_factory=dict)

    def ask(self, job: Job) -> Measurement | Failure:
        """As LadderRun.climb does it: a question is asked once."""
        if job.key not in self.answers:
            self.jobs.append(job)
            self.answers[job.key] = self.answer(job)
        return self.answers[job.key]

    def answer(self, job: Job) -> Measurement | Failure:
        last = job.recipe.rungs[-1] if job.recipe.rungs else "baseline"
        curve = TIED_CURVE if "tied-weights" in job.recipe.rungs else CURVE
        if job.kind == "reference":
            return self.failures.get("reference") or Measurement(loss_curve=curve)
        if job.kind == "yardstick":
            return Measurement(loss_curve=self.curves["yardstick"])
        if last in self.failures:
            return self.failures[last]
        seconds = math.prod(self.factors.get(name, 0.9) for name in job.recipe.rungs)
        seconds *= 1 + self.drift * len(self.jobs)
        curve = self.curves.get(last, tuple(loss + 1e-4 for loss in curve))
        return measurement(seconds, curve, pair_bitwise=True if job.bit_exact_rung else None)

    @property
    def asked(self) -> list[tuple[str, ...]]:
        """The recipes measured, in order, without second looks."""
        return [job.recipe.rungs for job in self.jobs if job.kind == "measure" and job.repeat >= 0]


@dataclass
class Refused(Machine):
    """Its compiler takes nothing, or a part only."""

    compiled: Compiled = Compiled(frames=2, graphs=0, left=2, places=("/home/me/net.py:8: no",))

    def answer(self, job: Job) -> Measurement | Failure:
        found = super().answer(job)
        if isinstance(found, Failure) or "compile" not in job.recipe.rungs:
            return found
        return replace(found, proof=Proof(compiled=self.compiled))


def measurement(seconds: float, curve=CURVE, **fields) -> Measurement:
    check = GradientCheck(
        loss=START,
        reference_loss=START,
        error=1e-6,
        yardstick=1e-6,
        tensor_errors={"wte": 1e-6},
        tensor_yardsticks={"wte": 1e-6},
    )
    return Measurement(loss_curve=curve, step_seconds=(seconds,) * 8, gradients=check, peak_bytes=10**9, **fields)


def climb_with(
    machine: Machine, hardware: Hardware = H200, rungs=ALL, start=(), micro_batch=4, workload=TINY, **choices
) -> Climb:
    chosen = LadderSettings(
        rungs=tuple(rungs),
        start=Recipe(rungs=tuple(start), micro_batch=micro_batch),
        device=hardware.kind,
        check_steps=5,
        **choices,
    )
    return Climb(workload, hardware, chosen, machine.ask)


def climbed(machine: Machine, *args, **choices) -> Climb:
    climb = climb_with(machine, *args, **choices)
    for _ in climb.rows():
        pass
    return climb


def measured_of(machine: Machine) -> list[Recipe]:
    return [job.recipe for job in machine.jobs if job.kind == "measure"]


def rows_of(climb: Climb) -> dict:
    return {row.name: row for row in climb.finished}


def kept(climb: Climb) -> list[str]:
    return [row.name for row in climb.finished if row.kept]


# the order of questions


@pytest.mark.parametrize(
    ("hardware", "choices"),
    [
        pytest.param(H200, {}, id="h200"),
        pytest.param(replace(H200, features=("fp16", "flash", "compile")), {}, id="without-bf16"),
        pytest.param(H200, {"start": ("bf16", "flash"), "rungs": ("compile", "cudnn-attention")}, id="from-a-recipe"),
    ],
)
def test_what_is_foreseen_is_what_is_asked_where_every_rung_pays(hardware, choices):
    machine = Machine(factors={"cudnn-attention": 0.8})
    climb = climb_with(machine, hardware, **choices)
    foreseen = climb.foreseen()
    list(climb.rows())
    assert [job.recipe for job in foreseen] == measured_of(machine)
    assert {job.kind for job in foreseen} == {"measure"}


def test_what_is_foreseen_is_only_the_beginning_where_a_rung_does_not_pay():
    machine = Machine(factors={"flash": 1.5, "cudnn-attention": 0.8})
    climb = climb_with(machine, rungs=("bf16", "compile", "flash", "cudnn-attention"))
    foreseen = [job.recipe for job in climb.foreseen()]
    list(climb.rows())
    assert foreseen == measured_of(machine), "an alternative takes flash's place whether it was kept or not"
    machine = Machine(factors={"padded-vocab": 1.5})
    climb = climb_with(machine, rungs=("compile", "padded-vocab", "fused-adamw"))
    foreseen = [job.recipe for job in climb.foreseen()]
    list(climb.rows())
    assert foreseen[:3] == measured_of(machine)[:3]
    assert foreseen[3] != measured_of(machine)[3]


def test_every_rung_is_put_onto_the_recipe_so_far():
    machine = Machine(factors={"flash": 1.0})
    climb = climbed(machine, WITH_PACKAGES, workload=WIDE_HEADS)
    fast = ("tf32", "no-sync", "bf16", "compile")
    late = (*fast, "cudnn-attention", "padded-vocab", "tied-weights")
    last = (*late, "fused-adamw", "loader-workers", "fused-loss", "bf16-residual", "sigmoid-gelu", "fused-backward")
    assert machine.asked == [
        (),
        ("tf32",),
        ("tf32", "no-sync"),
        ("tf32", "no-sync", "bf16"),
        ("tf32", "no-sync", "fp16"),
        fast,
        (*fast, "flash"),
        (*fast, "cudnn-attention"),
        (*fast, "cudnn-attention", "padded-vocab"),
        late,
        (*late, "fused-adamw"),
        (*late, "fused-adamw", "loader-workers"),
        (*late, "fused-adamw", "loader-workers", "fused-loss"),
        (*late, "fused-adamw", "loader-workers", "fused-loss", "bf16-residual"),
        (*late, "fused-adamw", "loader-workers", "fused-loss", "bf16-residual", "sigmoid-gelu"),
        last,
        (*last, "flash4-backward"),
        (*last, "flash4-backward", "tuned-matmuls"),
        (*last, "flash4-backward", "tuned-matmuls", "fused-matmuls"),
        (*last, "flash4-backward", "tuned-matmuls", "fused-matmuls", "cuda-graphs"),
    ]
    assert [row.name for row in climb.finished] == ["baseline", *ALL]


@pytest.mark.parametrize("rungs", [(), ("flash",), ("tf32", "compile"), ALL])
def test_the_baseline_is_always_first(rungs):
    climb = climbed(Machine(), rungs=rungs)
    first = climb.finished[0]
    assert (first.name, first.recipe.rungs, first.kept, first.base) == ("baseline", (), True, None)


def test_rows_come_one_by_one_as_they_are_known():
    machine = Machine()
    rows = climb_with(machine, rungs=("tf32", "compile")).rows()
    assert next(rows).name == "baseline"
    assert machine.asked == [()]
    assert next(rows).name == "tf32"
    assert machine.asked == [(), ("tf32",)]


def test_jobs_carry_what_the_user_chose():
    machine = Machine()
    climbed(machine, rungs=("no-sync", "compile"), micro_batch=3, timed_steps=7)
    for job in machine.jobs:
        assert (job.workload, job.device, job.check_steps, job.timed_steps) == (TINY, "cuda", 5, 7)
        assert job.recipe.micro_batch == 3
    assert {job.tokens for job in machine.jobs} == {"tokens.npy"}


def test_only_a_rung_that_promises_bits_is_asked_to_prove_them():
    machine = Machine()
    climbed(machine, again=True)
    proved = {job.recipe.rungs[-1]: job.bit_exact_rung for job in machine.jobs if job.bit_exact_rung}
    assert proved == {"no-sync": "no-sync", "loader-workers": "loader-workers"}


def test_who_watches_is_told_the_number_of_every_row():
    told = []
    for _ in climb_with(Machine(), rungs=("tf32", "compile"), again=True).rows(lambda *event: told.append(event)):
        pass
    assert [(name, number, total) for name, _, number, total in told] == [
        ("baseline", 1, 4),
        ("tf32", 2, 4),
        ("compile", 3, 4),
        (AGAIN, 4, 4),
    ]


# references


def test_one_reference_per_maths_asked_before_what_is_held_against_it():
    machine = Machine()
    climbed(machine)
    references = [job.recipe.rungs for job in machine.jobs if job.kind == "reference"]
    assert references == [(), ("tied-weights",)]
    assert machine.jobs[0].kind == "reference"
    kinds = [(job.kind, job.recipe.rungs[-1:]) for job in machine.jobs]
    assert kinds.index(("reference", ("tied-weights",))) == kinds.index(("measure", ("tied-weights",))) + 1


def test_rows_above_tied_weights_are_held_against_the_tied_reference():
    climb = climbed(Machine())
    verdicts = {name: row.equivalence.verdict for name, row in rows_of(climb).items() if row.equivalence}
    assert verdicts["tied-weights"] == "changed"
    assert verdicts["fused-adamw"] == "rounding"
    assert verdicts["no-sync"] == verdicts["loader-workers"] == "same"


def test_a_reference_that_cannot_be_run_leaves_rows_unchecked_and_the_climb_going():
    climb = climbed(Machine(failures={"reference": OOM}), rungs=("tf32", "compile"))
    assert [row.equivalence.verdict for row in climb.finished] == ["not-checked"] * 3
    assert climb.plain_curve is None


def test_a_wrong_gradient_is_found_and_left_out_of_the_recipe_though_the_reference_failed():
    class Doubling(Machine):
        def answer(self, job):
            result = super().answer(job)
            if job.recipe.rungs[-1:] != ("compile",):
                return result
            return replace(result, gradients=replace(result.gradients, tensor_errors={"wte": 1.0}))

    climb = climbed(Doubling(failures={"reference": OOM}), rungs=("compile", "padded-vocab"))
    assert [row.equivalence.verdict for row in climb.finished] == ["not-checked", "different", "not-checked"]
    assert climb.finished[2].recipe.rungs == ("padded-vocab",)


# what is kept

TWICE = ", by the quicker of two runs"  # a close decision is taken again


def test_a_slower_rung_stays_in_the_table_and_leaves_the_recipe():
    machine = Machine(factors={"tf32": 1.5})
    climb = climbed(machine, rungs=("tf32", "compile"))
    slow, after = climb.finished[1:]
    assert (slow.status, slow.kept, slow.reason) == ("ok", False, "0.67x the speed of baseline")
    assert after.recipe.rungs == ("compile",)
    assert after.base.name == "baseline"
    assert machine.asked == [(), ("tf32",), ("compile",)]


@pytest.mark.parametrize(("factor", "stays"), [(1.0, True), (1.019, True), (1.03, False), (0.99, True)])
def test_a_rung_may_cost_what_noise_could_explain(factor, stays):
    """One run each: 2 % is the least that means anything."""
    climb = climbed(Machine(factors={"compile": factor}), rungs=("compile",))
    assert climb.finished[1].kept is stays


@pytest.mark.parametrize(("quick", "stays"), [(1.0, True), (1.06, False)])
def test_a_rung_that_was_disturbed_is_judged_by_its_quick_steps(quick, stays):
    """The median is 10 % slower: the machine's doing if the quick steps are as quick as ever, the rung's if not."""

    class Disturbed(Machine):
        def answer(self, job):
            found = super().answer(job)
            steps = (quick, quick, *(1.1 + 0.01 * step for step in range(9)))
            return replace(found, step_seconds=steps) if job.recipe.rungs == ("tf32",) else found

    row = climbed(Disturbed(), rungs=("tf32",)).finished[1]
    assert row.kept is stays
    assert ("kept: its quickest steps are at 1.00x" in row.reason) is stays
    assert row.reason.startswith("0.88x the speed of baseline")


def test_losses_within_the_noise_do_not_add_up(cpu):
    """On a CPU a rung may cost 10 %. Each costs 6 to 7 here, but only the first is within that of the fastest row."""
    factors = {"bf16": 0.5, "compile": 1.07, "flash": 1.06, "padded-vocab": 1.06, "fused-adamw": 0.99}
    climb = climbed(Machine(factors=factors), cpu, rungs=tuple(factors))
    assert kept(climb) == ["baseline", "bf16", "compile", "fused-adamw"]
    assert rows_of(climb)["flash"].reason == f"0.88x the speed of bf16, the fastest so far{TWICE}"
    assert kept(climbed(Machine(factors=factors), cpu, rungs=tuple(factors), keep="all"))[-1] == "fused-adamw"


@dataclass
class Unlucky(Machine):
    """The first process of a row is slower by its factor, and the others are not."""

    unlucky: dict[str, float] = field(default_factory=dict)
    """By the last rung of a recipe."""
    second: dict[str, Measurement | Failure] = field(default_factory=dict)
    """What a second look at a row brings."""

    def answer(self, job: Job) -> Measurement | Failure:
        found, last = super().answer(job), last_of(job.recipe)
        if isinstance(found, Failure) or job.kind != "measure":
            return found
        if job.repeat < 0 and last in self.second:
            return self.second[last]
        factor = self.unlucky.get(last, 1.0) if job.repeat == 0 else 1.0
        return replace(found, step_seconds=tuple(factor * seconds for seconds in found.step_seconds))


def last_of(recipe: Recipe) -> str:
    return (recipe.rungs or ("baseline",))[-1]


def test_one_unlucky_process_does_not_drop_a_rung():
    """Both are measured again, one after the other, and the quicker runs decide."""
    machine = Unlucky(factors={"bf16": 0.5, "compile": 0.98}, unlucky={"compile": 1.1})
    climb = climbed(machine, rungs=("bf16", "compile"))
    assert kept(climb) == ["baseline", "bf16", "compile"], rows_of(climb)["compile"].reason
    looks = [last_of(job.recipe) for job in machine.jobs if job.repeat < 0]
    assert looks == ["bf16", "compile"]


@pytest.mark.parametrize(("busy_for_ever", "stays"), [(False, True), (True, False)])
def test_a_row_beside_which_others_were_busy_runs_again(busy_for_ever, stays):
    """Less than half as fast, which is decided at once where nothing else ran."""

    class Crowded(Machine):
        def answer(self, job):
            found, busy = super().answer(job), job.repeat == 0 or busy_for_ever
            if job.kind != "measure" or job.recipe.rungs != ("compile",) or not busy:
                return found
            return replace(found, step_seconds=tuple(2.5 * s for s in found.step_seconds), cores_missing=1.0)

    row = climbed(Crowded(), rungs=("compile",)).finished[1]
    assert row.kept is stays
    assert (row.reason or "").endswith("; other programs were busy meanwhile") is not stays


def test_a_row_that_ran_out_of_memory_on_the_way_says_so():
    """The allocator released its cache and tried again, which costs many steps: a smaller batch may be faster."""

    class Tight(Machine):
        def answer(self, job):
            found = super().answer(job)
            return replace(found, alloc_retries=3) if job.recipe.rungs == ("tf32",) else found

    climb = climbed(Tight(), rungs=("tf32", "bf16"))
    assert rows_of(climb)["tf32"].kept
    assert "out of memory 3 times" in rows_of(climb)["tf32"].reason
    assert rows_of(climb)["bf16"].reason is None


def test_a_rung_that_is_slow_twice_is_dropped_and_one_that_is_far_slower_at_once():
    for factor, looks, when in ((1.05, 2, TWICE), (1.2, 0, "")):
        machine = Unlucky(factors={"compile": factor})
        row = climbed(machine, rungs=("compile",)).finished[1]
        assert row.kept is False
        assert row.reason == f"{1 / factor:.2f}x the speed of baseline{when}"
        assert len([job for job in machine.jobs if job.repeat < 0]) == looks


def test_rungs_that_are_kept_are_not_measured_again_nor_with_keep_all():
    for factor, keep in ((1.0, "faster"), (1.05, "all")):
        machine = Unlucky(factors={"compile": factor})
        climbed(machine, rungs=("tf32", "compile"), keep=keep)
        assert all(job.repeat == 0 for job in machine.jobs)


@pytest.mark.parametrize(("factor", "again"), [(1.2, True), (1.26, False)])
def test_what_is_close_is_measured_by_the_noise_of_the_machine(cpu, factor, again):
    """On a CPU processes differ by 10 %: a tenth beyond that is 0.81 of the speed."""
    machine = Machine(factors={"bf16": factor})
    climbed(machine, cpu, rungs=("bf16",))
    assert any(job.repeat < 0 for job in machine.jobs) is again


def test_a_second_look_that_fails_or_is_wrong_decides_with_its_reason():
    oom = Failure(kind="oom", reason="out of memory: 3 GiB")
    machine = Unlucky(factors={"compile": 1.05}, second={"compile": oom})
    row = climbed(machine, rungs=("compile",)).finished[1]
    assert (row.kept, row.reason) == (False, "0.95x the speed of baseline; its second run failed: out of memory: 3 GiB")
    wrong = measurement(0.9, tuple(loss + 1 for loss in CURVE))
    climb = climbed(Unlucky(factors={"compile": 1.05}, second={"compile": wrong}), rungs=("compile",))
    assert climb.finished[1].equivalence.verdict == "different"
    assert climb.finished[1].kept is False
    climb = climbed(Unlucky(factors={"tf32": 0.9, "compile": 1.05}, second={"tf32": wrong}), rungs=("tf32", "compile"))
    assert kept(climb) == ["baseline"]
    assert climb.finished[2].reason == "contains tf32, which was different when it ran again"


class WrongLater(Machine):
    """bf16 alone is wrong when it runs again."""

    def answer(self, job):
        found = super().answer(job)
        wrong = job.recipe.rungs == ("bf16",) and job.repeat != 0
        return replace(found, loss_curve=tuple(loss + 1 for loss in CURVE)) if wrong else found


def test_what_contains_a_row_that_was_wrong_once_is_not_the_best():
    climb = climbed(WrongLater(), rungs=("tf32", "bf16", "compile"), repeats=2)
    assert rows_of(climb)["bf16"].equivalence.verdict == "rounding", "tf32 and bf16 together are another recipe"
    climb = climbed(WrongLater(), rungs=("bf16", "compile"), repeats=2, rebatch=True)
    assert kept(climb) == ["baseline"]
    wrong = rows_of(climb)["compile"]
    assert (wrong.reason, wrong.trusted) == ("contains bf16, which was different when it ran again", False)
    assert wrong.rebatched is None, "no time is spent on it"
    assert best_rebatched(climb.finished).name == "baseline"


def test_rows_do_not_fall_with_the_first_one_which_all_contain():
    climb = climbed(WrongLater(), start=("bf16",), rungs=("compile", "flash"), repeats=2)
    assert climb.finished[0].equivalence.verdict == "different"
    assert kept(climb) == ["compile", "flash"]


def test_a_rung_that_a_second_run_saves_can_win():
    machine = Unlucky(factors={"bf16": 0.5, "compile": 0.98}, unlucky={"compile": 1.1})
    climb = climbed(machine, rungs=("bf16", "compile"))
    assert best_row(climb.finished).name == "compile"
    assert rows_of(climb)["compile"].seconds == pytest.approx(0.49)
    assert all(len(row.measurements) == 1 for row in climb.finished), "the quicker run stands for both"


def test_a_row_is_there_while_its_decision_is_open():
    """A Ctrl-C during the second runs keeps it."""

    class Interrupted(Machine):
        def answer(self, job):
            if job.repeat < 0:
                raise KeyboardInterrupt
            return super().answer(job)

    climb = climb_with(Interrupted(factors={"compile": 1.05}), rungs=("compile",))
    with pytest.raises(KeyboardInterrupt):
        list(climb.rows())
    assert [row.name for row in climb.finished] == ["baseline", "compile"]
    assert climb.finished[1].kept is None


def test_a_rival_runs_again_once_only():
    machine = Machine(factors={"compile": 1.05, "tf32": 1.05, "bf16": 1.05})
    climbed(machine, rungs=("tf32", "bf16", "compile"))
    again = [last_of(job.recipe) for job in machine.jobs if job.repeat < 0]
    assert again == ["baseline", "tf32", "bf16", "compile"]


def test_an_a_a_row_that_is_wrong_condemns_the_recipe():
    class WrongAgain(Machine):
        def answer(self, job):
            found = super().answer(job)
            wrong = job.repeat == 1 and job.kind == "measure"
            return replace(found, loss_curve=tuple(loss + 1 for loss in CURVE)) if wrong else found

    climb = climbed(WrongAgain(), rungs=("bf16", "compile"), again=True)
    assert climb.finished[-1].equivalence.verdict == "different"
    assert kept(climb) == ["baseline", "bf16"]
    assert rows_of(climb)["compile"].reason == "was different when it ran again"


@dataclass
class Swaying(Machine):
    """Its steps drift up and down around what they should take."""

    sway: float = 0.0

    def answer(self, job: Job) -> Measurement | Failure:
        found = super().answer(job)
        if isinstance(found, Failure) or not found.step_seconds:
            return found
        factors = (1 - self.sway, 1 + self.sway) * 4
        return replace(found, step_seconds=tuple(found.step_seconds[0] * factors[step // 2] for step in range(8)))


# Four stretches at 1 - sway, 1 + sway, ... deviate by sway * sqrt(4 / 3), the error of their mean is half of that,
# and twice that of two rows is sway * 2 * sqrt(2 / 3) = 1.63 sway.
@pytest.mark.parametrize(
    ("sway", "ratio", "stays"),
    [
        (0.0, 0.985, True),  # a quiet machine: as every other rung
        (0.006, 0.985, True),
        (0.1, 0.99, False),
        (0.1, 1.0, False),
        (0.1, 1.15, False),
        (0.1, 1.18, True),
        (0.6, 1.9, False),  # a row of twice the speed, on a machine that knows nothing
        (0.6, 2.1, True),
    ],
)
def test_a_rung_that_gives_up_speed_is_not_kept_for_a_lucky_row(sway, ratio, stays):
    climb = climbed(Swaying(factors={"checkpointing": 1 / ratio}, sway=sway), rungs=("checkpointing",))
    row = climb.finished[1]
    assert row.kept is stays, row.reason
    if not stays:
        assert row.reason == f"{ratio:.2f}x the speed of baseline{TWICE}, within the noise of ±{1.633 * sway:.0%}"
    ordinary = climbed(Swaying(factors={"compile": 1 / ratio}, sway=sway), rungs=("compile",)).finished[1]
    assert ordinary.kept, "one that should pay may cost what noise could explain"


def test_amid_scatter_the_kept_alternative_stays():
    for sway, wins in ((0.0, True), (0.1, False)):
        machine = Swaying(factors={"cudnn-attention": 0.85}, sway=sway)  # flash's is 0.9
        row = rows_of(climbed(machine))["cudnn-attention"]
        assert row.kept is wins
    assert row.reason == f"1.06x the speed of flash{TWICE}, within the noise of ±16%"


def test_what_nobody_takes_unmeasured_must_win_amid_scatter():
    assert "cuda-graphs" not in usual_rungs(TINY, H200)
    for factor, wins in ((1.0, False), (0.5, True)):
        machine = Swaying(factors={"cuda-graphs": factor}, sway=0.2)
        row = climbed(machine, rungs=("compile", "cuda-graphs")).finished[-1]
        assert row.kept is wins, row.reason


def test_keep_all_keeps_a_named_rung_amid_scatter():
    machine = Swaying(factors={"checkpointing": 1.2}, sway=0.2)
    assert climbed(machine, rungs=("checkpointing",), keep="all").finished[1].kept


def test_keep_all_keeps_what_is_slower_but_right():
    machine = Machine(factors={"tf32": 1.5, "padded-vocab": 2.0, "cudnn-attention": 0.8})
    climb = climbed(machine, WITH_PACKAGES, workload=WIDE_HEADS, keep="all")
    alternatives = {"fp16", "flash"}
    assert set(kept(climb)) | alternatives == {"baseline", *ALL}
    assert "tf32" in climb.finished[-1].recipe.rungs


def test_keep_all_still_drops_what_is_wrong_or_failed():
    wrong = tuple(loss + 1 for loss in CURVE)
    climb = climbed(Machine(curves={"compile": wrong}, failures={"tf32": OOM}), keep="all", rungs=("tf32", "compile"))
    assert kept(climb) == ["baseline"]


def test_keep_all_does_not_stack_alternatives():
    climb = climbed(Machine(factors={"fp16": 0.5, "cudnn-attention": 1.2}), keep="all")
    final = climb.current.recipe.rungs
    assert "bf16" in final
    assert "fp16" not in final
    assert "flash" in final
    assert "cudnn-attention" not in final


def test_a_different_row_is_not_kept_however_fast():
    wrong = tuple(loss + 1 for loss in CURVE)
    machine = Machine(factors={"compile": 0.01}, curves={"compile": wrong})
    climb = climbed(machine, rungs=("tf32", "compile", "padded-vocab"))
    broken = rows_of(climb)["compile"]
    assert (broken.status, broken.kept, broken.equivalence.verdict) == ("ok", False, "different")
    assert broken.reason == broken.equivalence.detail
    assert not broken.trusted
    assert machine.asked[-1] == ("tf32", "padded-vocab")


def test_a_baseline_that_is_different_is_not_kept_and_the_climb_goes_on():
    climb = climbed(Machine(curves={"baseline": tuple(loss + 1 for loss in CURVE)}), rungs=("tf32",))
    assert [row.kept for row in climb.finished] == [False, True]
    assert not climb.finished[0].trusted


# rungs that do not apply


def test_on_a_cpu_what_does_not_apply_is_a_row_with_its_reason(cpu):
    machine = Machine()
    climb = climbed(machine, cpu)
    skipped = {row.name: row.reason for row in climb.finished if row.status == "skipped"}
    assert skipped == {
        "tf32": cpu.missing["tf32"],
        "no-sync": find_rung("no-sync").needs(TINY, cpu, None),
        "fp16": "a CPU has no fp16",
        "cudnn-attention": cpu.missing["cudnn-attention"],
        "fused-loss": find_rung("fused-loss").needs(TINY, cpu, Plan()),
        "sigmoid-gelu": find_rung("sigmoid-gelu").needs(TINY, cpu, Plan(compile=True)),
        "fused-backward": find_rung("fused-backward").needs(TINY, cpu, Plan(compile=True, autocast="bf16")),
        "flash4-backward": "a CPU has no flash4",
        "tuned-matmuls": "a CPU has no cublaslt",
        "fused-matmuls": "a CPU has no quack",
        "cuda-graphs": "Inductor does this on GPUs",
    }
    for name in skipped:
        assert rows_of(climb)[name].kept is None
        assert not rows_of(climb)[name].trusted
    assert not any(set(recipe) & set(skipped) for recipe in machine.asked)
    assert len(climb.finished) == 1 + len(ALL)


def test_attention_kernels_are_skipped_until_something_makes_16_bits():
    climb = climbed(Machine(factors={"bf16": 2.0, "fp16": 2.0}))
    for name in ("flash", "cudnn-attention"):
        assert rows_of(climb)[name].status == "skipped"
        assert "16-bit" in rows_of(climb)[name].reason


# alternatives


def test_fp16_is_measured_where_bf16_was_put_and_not_kept():
    machine = Machine(factors={"fp16": 0.1})  # much the fastest
    climb = climbed(machine)
    row = rows_of(climb)["fp16"]
    assert row.recipe.rungs == ("tf32", "no-sync", "fp16")
    assert row.base.name == "no-sync"
    assert (row.kept, row.reason) == (False, "stands in for bf16 where that does not apply")
    assert "bf16" in climb.current.recipe.rungs


def test_fp16_is_kept_where_bf16_does_not_apply(t4):
    climb = climbed(Machine(), t4)
    assert rows_of(climb)["bf16"].status == "skipped"
    assert rows_of(climb)["fp16"].kept is True
    assert "fp16" in climb.current.recipe.rungs


def test_fp16_takes_over_when_bf16_failed():
    climb = climbed(Machine(failures={"bf16": OOM}))
    assert rows_of(climb)["fp16"].kept is True


@pytest.mark.parametrize("keep", ["faster", "all"])
@pytest.mark.parametrize(("factor", "wins"), [(0.8, True), (0.899, True), (0.901, False), (1.2, False)])
def test_cudnn_attention_replaces_flash_only_when_it_is_faster(factor, wins, keep):
    """0.9 is flash's own factor: noise is no excuse for the one that comes second."""
    climb = climbed(Machine(factors={"cudnn-attention": factor}), keep=keep)
    row = rows_of(climb)["cudnn-attention"]
    assert row.recipe.rungs == ("tf32", "no-sync", "bf16", "compile", "cudnn-attention")
    assert row.base.name == "compile"
    assert row.kept is wins
    assert ("cudnn-attention" in climb.current.recipe.rungs, "flash" in climb.current.recipe.rungs) == (wins, not wins)
    if not wins:
        assert row.reason.removesuffix(TWICE).endswith("x the speed of flash")


def test_cudnn_attention_without_flash_is_an_addition_of_its_own():
    climb = climbed(Machine(failures={"flash": OOM}))
    assert rows_of(climb)["cudnn-attention"].kept is True
    assert rows_of(climb)["padded-vocab"].recipe.rungs[-2:] == ("cudnn-attention", "padded-vocab")


# failures


@pytest.mark.parametrize("failure", [OOM, TIMEOUT], ids=["oom", "timeout"])
def test_a_failure_is_a_row_and_the_climb_goes_on_without_it(failure):
    machine = Machine(failures={"compile": failure})
    climb = climbed(machine)
    row = rows_of(climb)["compile"]
    assert (row.status, row.reason, row.kept, row.equivalence) == ("failed", failure.reason, False, None)
    assert not row.trusted
    assert not any("compile" in recipe for recipe in machine.asked if recipe[-1:] != ("compile",))
    assert len(climb.finished) == 1 + len(ALL)


def test_when_the_baseline_fails_the_next_row_that_works_is_climbed_on():
    machine = Machine(failures={"baseline": OOM, "tf32": OOM}, factors={"padded-vocab": 1.5})
    climb = climbed(machine, rungs=("tf32", "bf16", "compile", "padded-vocab"))
    assert machine.asked == [(), ("tf32",), ("bf16",), ("bf16", "compile"), ("bf16", "compile", "padded-vocab")]
    assert kept(climb) == ["bf16", "compile"]


def test_when_everything_fails_there_is_still_a_row_for_each():
    wanting_others = ("flash", "cudnn-attention")  # 16 bit
    wanting_others += ("bf16-residual", "sigmoid-gelu", "fused-backward", "cuda-graphs")  # compiled code
    wanting_others += ("flash4-backward", "tuned-matmuls", "fused-matmuls")  # what those make
    climb = climbed(Machine(failures=dict.fromkeys(["baseline", *ALL], TIMEOUT)), again=True, repeats=3)
    assert {row.status for row in climb.finished if row.name not in wanting_others} == {"failed"}
    assert kept(climb) == []


# a climb from a recipe


def test_a_recipe_is_the_first_row_and_is_climbed_on():
    machine = Machine()
    climb = climbed(machine, start=("tf32", "bf16"), rungs=("compile",))
    assert machine.asked == [("tf32", "bf16"), ("tf32", "bf16", "compile")]
    assert (climb.finished[0].name, climb.finished[0].title) == ("recipe", "tf32 + bf16")
    assert climb.finished[0].equivalence.verdict == "rounding"


def test_a_recipe_that_changes_the_maths_has_both_references():
    machine = Machine()
    climb = climbed(machine, start=("loader-workers", "tied-weights", "bf16"), rungs=())
    assert climb.finished[0].equivalence.verdict == "changed"
    assert [job.recipe.rungs for job in machine.jobs if job.kind == "reference"] == [(), ("tied-weights",)]


def test_the_order_of_a_recipe_does_not_hide_its_alternative():
    machine = Machine(factors={"cudnn-attention": 0.5})
    climb = climbed(machine, start=("flash", "bf16", "compile"), rungs=("fp16", "cudnn-attention"))
    assert machine.asked[1:] == [("flash", "compile", "fp16"), ("bf16", "compile", "cudnn-attention")]
    assert kept(climb) == ["recipe", "cudnn-attention"]


# repeats and a/a


def test_repeats_go_round_in_the_order_of_the_rungs():
    machine = Machine(failures={"bf16": OOM})
    climb = climbed(machine, rungs=("tf32", "bf16", "compile"), repeats=3)
    measured = [(job.recipe.rungs[-1:], job.repeat) for job in machine.jobs if job.kind == "measure"]
    assert measured == [
        ((), 0),
        (("tf32",), 0),
        (("bf16",), 0),
        (("compile",), 0),
        ((), 1),
        (("tf32",), 1),
        (("compile",), 1),  # what failed is not tried again
        ((), 2),
        (("tf32",), 2),
        (("compile",), 2),
    ]
    assert [len(row.measurements) for row in climb.finished] == [3, 3, 0, 3]


def test_repeats_are_pooled_by_the_median_of_their_medians():
    machine = Machine(drift=0.1)
    climb = climbed(machine, rungs=("tf32",), repeats=3)
    # jobs: reference 1, baseline 2, tf32 3, baseline 4, tf32 5, baseline 6, tf32 7
    assert climb.finished[0].seconds == pytest.approx(1.4)
    assert climb.finished[1].seconds == pytest.approx(0.9 * 1.5)


def test_what_the_first_run_decided_says_so_where_there_are_more():
    for repeats, when in ((1, ""), (2, " in the first run, which decides")):
        climb = climbed(Machine(factors={"tf32": 2.0}), rungs=("tf32",), repeats=repeats)
        assert climb.finished[1].reason == f"0.50x the speed of baseline{when}"


def test_a_repeat_that_fails_leaves_the_others():
    class Flaky(Machine):
        def answer(self, job):
            return OOM if job.repeat == 1 and job.recipe.rungs else super().answer(job)

    climb = climbed(Flaky(), rungs=("tf32",), repeats=3)
    assert [len(row.measurements) for row in climb.finished] == [3, 2]
    assert climb.finished[1].status == "ok"


def test_each_repeat_yields_its_row_again():
    names = [row.name for row in climb_with(Machine(), rungs=("tf32",), repeats=2).rows()]
    assert names == ["baseline", "tf32", "baseline", "tf32"]


def test_the_a_a_row_measures_the_finished_recipe_again():
    machine = Machine(factors={"compile": 2.0})
    climb = climbed(machine, rungs=("tf32", "compile"), again=True)
    row = climb.finished[-1]
    assert (row.name, row.title) == (AGAIN, "tf32 measured again")
    assert not row.kept
    assert row.base.name == "tf32"
    assert machine.asked[-1] == ("tf32",)
    assert climb.current.name == "tf32"


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_an_a_a_row_never_reads_the_answers_of_the_row_it_repeats(repeats):
    machine = Machine(drift=0.01)
    climb = climbed(machine, rungs=("tf32",), again=True, repeats=repeats)
    measures = [job for job in machine.jobs if job.kind == "measure"]
    assert len({job.key for job in measures}) == len(measures) == 3 * repeats
    assert climb.finished[1].measurements != climb.finished[2].measurements
    assert climb.finished[2].recipe == climb.finished[1].recipe


# resuming


def replayed(machine: Machine, **choices) -> Climb:
    """The same climb from recorded answers alone."""

    class Replay(Machine):
        def answer(self, job):
            raise AssertionError(f"asked anew: {job.recipe.rungs}, repeat {job.repeat}")

    return climbed(Replay(answers=machine.answers), **choices)


FACTORS = st.dictionaries(st.sampled_from(ALL), st.floats(min_value=0.2, max_value=2.0))
FAILURES = st.dictionaries(
    st.sampled_from(["baseline", "reference", *ALL]), st.sampled_from([OOM, TIMEOUT]), max_size=4
)
CURVES = st.dictionaries(
    st.sampled_from(["baseline", *ALL]),
    st.tuples(*[st.floats(min_value=0, max_value=40) | st.just(math.nan)] * 5),
    max_size=3,
)


@settings(deadline=None, max_examples=30)
@given(FACTORS, FAILURES, CURVES, st.integers(1, 3), st.booleans(), st.sampled_from(["faster", "all"]))
def test_a_climb_from_recorded_answers_is_the_same_climb(factors, failures, curves, repeats, again, keep):
    choices = {"repeats": repeats, "again": again, "keep": keep}
    machine = Machine(factors=factors, failures=failures, curves=curves)
    first = climbed(machine, **choices)
    second = replayed(machine, **choices)
    shown = [
        [(r.name, r.recipe, r.status, r.reason, r.kept, r.equivalence) for r in c.finished] for c in (first, second)
    ]
    assert shown[0] == shown[1]


@settings(deadline=None, max_examples=30)
@given(FACTORS, FAILURES, CURVES, st.integers(0, 25), st.integers(1, 2))
def test_an_interrupted_climb_goes_on_with_the_very_next_question(factors, failures, curves, stop, repeats):
    class Stopped(Machine):
        def answer(self, job):
            if len(self.jobs) > stop:
                raise KeyboardInterrupt
            return super().answer(job)

    whole = Machine(factors=factors, failures=failures, curves=curves)
    climbed(whole, repeats=repeats)
    stopped = Stopped(factors=factors, failures=failures, curves=curves)
    if stop < len(whole.jobs):
        with pytest.raises(KeyboardInterrupt):
            climbed(stopped, repeats=repeats)
    resumed = Machine(factors=factors, failures=failures, curves=curves, answers=dict(stopped.answers))
    if stop < len(whole.jobs):
        climbed(resumed, repeats=repeats)
        assert [job.key for job in resumed.jobs] == [job.key for job in whole.jobs[stop:]]


@settings(deadline=None, max_examples=30)
@given(FACTORS, FAILURES, CURVES, st.sampled_from(["faster", "all"]))
def test_whatever_happens_the_recipe_holds_only_what_is_right(factors, failures, curves, keep):
    climb = climbed(Machine(factors=factors, failures=failures, curves=curves), keep=keep)
    assert [row.name for row in climb.finished] == ["baseline", *ALL]
    for row in climb.finished:
        assert row.status in ("ok", "skipped", "failed")
        assert row.reason or row.status == "ok"
        assert row.kept is not False or row.reason
        if row.kept:  # without a reference nothing can be judged: the climb goes on, but nothing of it is best
            assert row.trusted or row.equivalence.verdict == "not-checked"
        assert not {"bf16", "fp16"} <= set(row.recipe.rungs)
        assert not {"flash", "cudnn-attention"} <= set(row.recipe.rungs)
    names = {row.name for row in climb.finished if row.kept} | {"baseline"}
    assert set(climb.current.recipe.rungs) <= names


def test_a_row_put_onto_a_wrong_base_is_impossible():
    """The recipe of every row is the recipe of a kept row, less an alternative, plus its own rung."""
    climb = climbed(Machine(factors={"tf32": 3.0, "compile": 3.0}))
    so_far = ()
    for row in climb.finished:
        if row.name != "baseline":
            without = find_rung(row.name).instead_of
            assert row.recipe.rungs == (*(name for name in so_far if name != without), row.name)
        if row.kept:
            so_far = row.recipe.rungs
    assert replace(climb.current.recipe, rungs=so_far) == climb.current.recipe


def test_a_reference_that_fails_is_named_in_every_row_it_leaves_unchecked():
    failed = Failure(kind="oom", reason="out of memory: tried to allocate 12 GiB")
    climb = climbed(Machine(failures={"reference": failed}))
    measured = [row for row in climb.finished if row.measurements]
    assert measured
    for row in measured:
        assert row.equivalence.verdict == "not-checked"
        assert "tried to allocate 12 GiB" in row.equivalence.detail


def test_a_recipe_has_one_optimizer_and_speed_does_not_choose_it():
    """Each is measured in the place of the one that the recipe has; only the other AdamW may win there."""
    machine = Machine(factors={"lion": 0.1, "sgd-momentum": 0.01, "foreach-adamw": 0.95})
    climb = climbed(machine, rungs=("fused-adamw", "foreach-adamw", "lion", "sgd-momentum"))
    assert machine.asked == [(), ("fused-adamw",), ("foreach-adamw",), ("lion",), ("sgd-momentum",)]
    assert kept(climb) == ["baseline", "fused-adamw"]
    assert rows_of(climb)["lion"].reason == "stands in for fused-adamw where that does not apply"
    faster = climbed(Machine(factors={"foreach-adamw": 0.5}), rungs=("fused-adamw", "foreach-adamw"))
    assert faster.current.recipe.rungs == ("foreach-adamw",)
    alone = climbed(Machine(), rungs=("lion", "muon"))
    assert alone.current.recipe.rungs == ("lion",)
    assert rows_of(alone)["muon"].reason == "stands in for lion where that does not apply"


@pytest.mark.parametrize(("rung", "share"), [("tied-weights", 0.8), ("adafactor", 0.5), ("lion", 0.25)])
def test_another_rule_may_learn_at_another_pace(rung, share):
    def verdict(learned):
        curve = tuple(START - learned * 0.1 * step for step in range(5))
        machine = Machine(curves={rung: curve})
        machine.answer = lambda job, own=machine.answer: (
            Measurement(loss_curve=curve) if job.kind == "reference" and job.recipe.rungs else own(job)
        )
        return rows_of(climbed(machine, rungs=(rung,)))[rung].equivalence.verdict

    assert verdict(share + 0.02) == "changed"
    assert verdict(share - 0.02) == "different"


def test_a_step_of_which_nothing_was_compiled_is_not_climbed_on():
    """However fast it looks: what goes with compiled code would be put onto eager code."""
    climb = climbed(Refused(factors={"compile": 0.1}), rungs=("bf16", "compile", "bf16-residual"), keep="all")
    rows = {row.name: row for row in climb.finished}
    assert rows["compile"].kept is False
    assert rows["compile"].reason == "nothing was compiled, every step runs in eager: /home/me/net.py:8: no"
    assert rows["bf16-residual"].status == "skipped"


def test_a_step_that_was_compiled_in_part_is_a_rung_like_any_other():
    part = Compiled(frames=3, graphs=1, left=2, places=("a.py:1: x", "a.py:2: y", "a.py:3: z"))
    climb = climbed(Refused(compiled=part), rungs=("compile",))
    assert climb.finished[1].kept
    assert compile_note(climb.finished[1].measurements[0]) == (
        "2 of 3 frames run in eager, not compiled: a.py:1: x; a.py:2: y; and 1 more"
    )
    assert compile_note(climb.finished[0].measurements[0]) is None


@pytest.mark.parametrize(("plain_by", "verdict"), [(0.03, "rounding"), (0.01, "different")])
def test_a_curve_in_doubt_is_held_against_plain_code_at_its_precision(plain_by: float, verdict: str) -> None:
    """Once for all rows of a precision; rows that are not in doubt ask nothing."""

    def away(by: float) -> tuple[float, ...]:
        return (CURVE[0], *(loss + by for loss in CURVE[1:]))

    machine = Machine(curves={"bf16": away(0.04), "compile": away(0.041), "yardstick": away(plain_by)})
    climb = climbed(machine, rungs=("tf32", "bf16", "compile", "fused-adamw"), keep="all")
    found = {row.name: row.equivalence.verdict for row in climb.finished if row.equivalence}
    assert (found["tf32"], found["bf16"], found["compile"]) == ("rounding", verdict, verdict)
    assert [job.recipe.rungs for job in machine.jobs if job.kind == "yardstick"] == [("tf32", "bf16")]
