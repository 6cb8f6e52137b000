"""The nouns and their JSON: values, recipes, jobs and run directories go out and come back, whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redline.core import job as job_module
from redline.core.devices import DEVICES, lookup
from redline.core.errors import UserError
from redline.core.hardware import Hardware
from redline.core.job import (
    Job,
    RunDirectory,
    begin_run_directory,
    create_run_directory,
    open_run_directory,
    write_atomically,
)
from redline.core.layout import Layout
from redline.core.measurement import Failure, GradientCheck, Measurement, Proof, spread_of
from redline.core.plan import Plan
from redline.core.recipe import Recipe, load_recipe
from redline.core.values import from_json, to_json
from redline.core.workload import Workload

GRADIENTS = GradientCheck(
    loss=5.5,
    reference_loss=5.5,
    error=0.01,
    yardstick=0.01,
    tensor_errors={"wte.weight": 0.02},
    tensor_yardsticks={"wte.weight": 0.015},
)
PROOF = Proof(attention="flash_fwd_kernel", matmul_dtypes=("bf16", "fp32"), graph_breaks=0, syncs_per_step=0.1)
MEASURED = Measurement(
    loss_curve=(5.55, 5.4), step_seconds=(0.1, 0.11), peak_bytes=123, gradients=GRADIENTS, proof=PROOF
)
FAILED = Failure(kind="oom", reason="CUDA out of memory: tried to allocate 12 GiB")


@pytest.fixture
def job(tiny: Workload) -> Job:
    return Job(workload=tiny, recipe=Recipe(rungs=("tf32", "bf16"), micro_batch=4), device="cpu", tokens="tokens.bin")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run_directory(tmp_path / "run")


def through_json(value):
    return from_json(type(value), json.loads(json.dumps(to_json(value))))


# values


def test_every_noun_comes_back_equal(tiny, cpu, h200, job):
    for value in (tiny, cpu, h200, job, job.recipe, Plan(), PROOF, GRADIENTS, MEASURED, FAILED):
        assert through_json(value) == value


def test_types_come_back_and_not_only_equal_contents(job):
    back = through_json(job)
    assert isinstance(back.recipe, Recipe)
    assert isinstance(back.recipe.rungs, tuple)
    assert through_json(MEASURED).gradients == GRADIENTS
    assert through_json(dataclasses.replace(MEASURED, gradients=None)).gradients is None


def test_a_missing_field_takes_its_default(tiny):
    data = to_json(tiny)
    del data["weight_decay"]
    assert from_json(Workload, data) == tiny


def test_an_unknown_field_is_refused_not_dropped(tiny):
    with pytest.raises(ValueError, match="Workload has no field colour"):
        from_json(Workload, {**to_json(tiny), "colour": "red"})
    nested = to_json(tiny)
    nested["shape"]["depth"] = 3
    with pytest.raises(ValueError, match="Shape has no field depth"):
        from_json(Workload, nested)


@given(st.dictionaries(st.text(max_size=5), st.text()), st.lists(st.text()), st.none() | st.integers())
def test_any_text_survives(missing, features, memory):
    hardware = Hardware(kind="cpu", name="x", features=tuple(features), missing=missing, memory_bytes=memory)
    assert through_json(hardware) == hardware


@pytest.mark.parametrize("kind", [Plan, Recipe, Job, Workload, Hardware, Measurement, Failure])
def test_nouns_are_frozen_and_keyword_only(kind):
    assert all(field.kw_only for field in dataclasses.fields(kind))
    assert kind.__dataclass_params__.frozen


# hardware


def test_a_device_matches_by_its_exact_name_only():
    assert lookup("NVIDIA H200").peak_tflops["bf16"] == 989.4
    for name in ("H200", "nvidia h200", "NVIDIA H200 MIG 1g.18gb", ""):
        assert lookup(name) is None


def test_device_names_are_unique():
    names = [name for device in DEVICES for name in device.names]
    assert len(names) == len(set(names))


def test_a_cpu_or_a_stranger_has_no_peak(cpu, h200):
    assert h200.peak_tflops == lookup("NVIDIA H200").peak_tflops
    assert cpu.peak_tflops is None
    assert dataclasses.replace(h200, name="NVIDIA B9000").peak_tflops is None
    assert dataclasses.replace(cpu, name="NVIDIA H200").peak_tflops is None


# measurement


def test_spread():
    spread = spread_of([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (spread.median, spread.n) == (3.0, 5)
    assert (spread.p10, spread.p90) == pytest.approx((1.4, 4.6))
    single = spread_of([2.0])
    assert single.median == single.p10 == single.p90 == 2.0


@given(st.lists(st.floats(min_value=1e-6, max_value=1e3), min_size=1))
def test_a_spread_lies_in_order_between_the_extremes(values):
    spread = spread_of(values)
    slack = 1e-9 * max(values)  # interpolation rounds
    assert min(values) - slack <= spread.p10 <= spread.median + slack
    assert spread.median - slack <= spread.p90 <= max(values) + slack


# recipe


def test_a_recipe_file_comes_back(tmp_path):
    recipe = Recipe(rungs=("tf32", "flash"), micro_batch=16)
    path = tmp_path / "best.json"
    path.write_text(json.dumps(to_json(recipe)))
    assert load_recipe(path) == recipe


def test_adding_a_rung_can_replace_its_alternative():
    recipe = Recipe(rungs=("tf32", "flash"), micro_batch=16)
    assert recipe.adding("compile").rungs == ("tf32", "flash", "compile")
    assert recipe.adding("cudnn-attention", without="flash").rungs == ("tf32", "cudnn-attention")
    assert recipe.rungs == ("tf32", "flash")


@pytest.mark.parametrize("micro_batch", [0, -1, 1.5, True, "8", None])
def test_a_micro_batch_counts_sequences(micro_batch):
    with pytest.raises(UserError, match="micro batch is"):
        Recipe(micro_batch=micro_batch)


@pytest.mark.parametrize(
    "text",
    ["", "not json", "[]", "3", "null", '"tf32"', "{}", '{"rungs": 5, "micro_batch": 1}', '{"micro_batch": 1, "x": 2}'],
)
def test_what_is_no_recipe_is_answered_with_an_example(tmp_path, text):
    path = tmp_path / "recipe.json"
    path.write_text(text)
    with pytest.raises(UserError, match="is not a recipe") as caught:
        load_recipe(path)
    assert '"micro_batch": 16' in caught.value.fix


@pytest.mark.parametrize("rungs", ["tf32", [1, 2], [["tf32"]], None])
def test_rungs_that_are_no_list_of_names_are_refused(tmp_path, rungs):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"rungs": rungs, "micro_batch": 16}))
    with pytest.raises(UserError, match="is not a recipe"):
        load_recipe(path)


def test_bytes_that_are_no_text_are_no_recipe(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not a recipe"):
        load_recipe(path)


def test_a_recipe_with_a_bad_micro_batch_says_so(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text('{"rungs": [], "micro_batch": 0}')
    with pytest.raises(UserError, match="micro batch is 0"):
        load_recipe(path)


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="cannot read the recipe .*No such file"):
        load_recipe(tmp_path / "absent.json")


# job


def test_equal_jobs_have_equal_keys_and_any_change_makes_another(job):
    assert through_json(job).key == job.key
    changes = (
        {"recipe": job.recipe.adding("flash")},
        {"recipe": dataclasses.replace(job.recipe, micro_batch=5)},
        {"workload": dataclasses.replace(job.workload, seed=1)},
        {"device": "cuda"},
        {"kind": "reference"},
        {"tokens": "other.bin"},
        {"check_steps": 3},
        {"timed_steps": 3},
        {"check_steps": 5},
        {"bit_exact_rung": "no-sync"},
        {"repeat": 1},
        {"ranks": 2},
        {"layout": Layout(ranks=2, tensor=2)},
    )
    unasked = {"give_up_seconds"}  # how long to stay is no part of the question
    assert dataclasses.replace(job, give_up_seconds=1.5).key == job.key
    named = {name for change in changes for name in change}
    assert named | unasked == {field.name for field in dataclasses.fields(Job)}
    keys = {dataclasses.replace(job, **change).key for change in changes} | {job.key}
    assert len(keys) == len(changes) + 1


def test_a_folder_is_named_after_the_last_rung(job):
    assert job.folder_name == f"measure-bf16-{job.key[:8]}"
    plain = dataclasses.replace(job, recipe=Recipe(micro_batch=1), kind="reference")
    assert plain.folder_name.startswith("reference-baseline-")


# run directory


def test_results_come_back_by_key(run, job):
    other = dataclasses.replace(job, repeat=1)
    assert run.results() == {}
    run.append(job, MEASURED)
    run.append(other, FAILED)
    assert run.results() == {job.key: MEASURED, other.key: FAILED}


def test_the_last_answer_to_a_question_counts(run, job):
    run.append(job, FAILED)
    run.append(job, MEASURED)
    assert run.results() == {job.key: MEASURED}


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_a_line_cut_anywhere_costs_only_that_line(data, tmp_path_factory, job):
    """The machine dies while the second result is written: a resume asks for it again, and nothing else is lost."""
    run = RunDirectory(tmp_path_factory.mktemp("run"))
    first, second, third = (dataclasses.replace(job, repeat=repeat) for repeat in range(3))
    results = run.path / "results.jsonl"
    run.append(first, MEASURED)
    whole = results.stat().st_size
    run.append(second, FAILED)
    full = results.stat().st_size
    cut = data.draw(st.integers(whole, full - 2))  # full - 1 loses the newline only, and the line is whole
    os.truncate(results, cut)
    assert run.results() == {first.key: MEASURED}
    run.append(third, FAILED)
    run.append(second, MEASURED)
    assert run.results() == {first.key: MEASURED, second.key: MEASURED, third.key: FAILED}


def test_a_line_that_lost_only_its_newline_still_counts(run, job):
    run.append(job, MEASURED)
    results = run.path / "results.jsonl"
    os.truncate(results, results.stat().st_size - 1)
    other = dataclasses.replace(job, repeat=1)
    run.append(other, FAILED)
    assert run.results() == {job.key: MEASURED, other.key: FAILED}


@pytest.mark.parametrize(
    "rubbish", [b"\xff\xfe\n", b"{}\n", b"[1]\n", b"null\n", b'{"key": "a"}\n', b"\n\n", b"\x00\x00\x00"]
)
def test_rubbish_between_results_is_passed_over(run, job, rubbish):
    results = run.path / "results.jsonl"
    results.write_bytes(rubbish)
    run.append(job, MEASURED)
    assert run.results() == {job.key: MEASURED}


def test_a_reason_may_hold_any_character(run, job):
    """U+2028 and the like are line ends to str.splitlines, but not to JSON lines."""
    failure = Failure(kind="error", reason="two\nlines, a separator \u2028, a form feed \x0c, \x85 and a snowman ☃")
    run.append(job, failure)
    assert run.results() == {job.key: failure}


def test_writing_is_all_or_nothing(run, monkeypatch):
    run.write("run.json", '{"old": 1}')

    def power_cut(*_):
        raise OSError("the power went")

    monkeypatch.setattr(job_module.os, "replace", power_cut)
    with pytest.raises(OSError, match="the power went"):
        run.write("run.json", '{"new": 1}')
    assert run.read_run() == {"old": 1}


def test_an_atomic_write_leaves_no_draft(tmp_path):
    path = write_atomically(tmp_path / "page.html", "<p>☃</p>")
    assert path.read_text(encoding="utf-8") == "<p>☃</p>"
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_new_run_directory_is_empty_and_nested_ones_are_made(tmp_path):
    run = create_run_directory(tmp_path / "a" / "b")
    assert list(run.path.iterdir()) == []
    assert create_run_directory(run.path).path == run.path  # an empty directory is free to use


def test_a_run_never_overwrites_another(tmp_path):
    (tmp_path / "something").touch()
    with pytest.raises(UserError, match="already in use") as caught:
        create_run_directory(tmp_path)
    assert caught.value.fix == "choose another --out"  # it is no run
    for kind, goes_on in (("tune", f", or go on with it: `redline tune --resume {tmp_path}`"), ("profile", "")):
        (tmp_path / "run.json").write_text(json.dumps({"kind": kind}))
        with pytest.raises(UserError, match="already in use") as caught:
            create_run_directory(tmp_path)
        assert caught.value.fix == f"choose another --out{goes_on}"
    (tmp_path / "run.json").unlink()
    with pytest.raises(UserError, match="already in use"):
        create_run_directory(tmp_path / "something")
    assert os.listdir(tmp_path) == ["something"]


def test_a_directory_that_cannot_be_made(tmp_path):
    """A file where a folder should be: refused even for root, whom permissions do not stop."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write the run directory") as caught:
        create_run_directory(tmp_path / "file" / "run")
    assert "--out" in caught.value.fix


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Permissions do not stop root, so tests run by root put their privileges down for a moment."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


@pytest.mark.parametrize("mode", [0o000, 0o555], ids=["closed", "read-only"])
@pytest.mark.parametrize("name", [".", "run", "deep/er/run"])
def test_a_directory_without_permission(mode, name):
    folder = Path(tempfile.mkdtemp())  # not tmp_path: only its owner may pass its parents
    folder.chmod(mode)
    try:
        with unprivileged(), pytest.raises(UserError, match="cannot write the run directory .*Permission denied"):
            create_run_directory(folder / name)
    finally:
        folder.chmod(0o700)
        folder.rmdir()  # fails if anything was left in it


def test_opening_what_is_no_run(tmp_path):
    with pytest.raises(UserError, match="is not a run directory"):
        open_run_directory(tmp_path)
    with pytest.raises(UserError, match="is not a run directory"):
        open_run_directory(tmp_path / "absent")
    (tmp_path / "run.json").write_text('{"half')
    with pytest.raises(UserError, match="is damaged"):
        open_run_directory(tmp_path)


def test_opening_a_run(run):
    run.write("run.json", '{"workload": "tiny"}')
    assert open_run_directory(run.path).read_run() == {"workload": "tiny"}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_run_that_could_not_begin_leaves_nothing(tmp_path, error):
    told = (
        pytest.raises(UserError, match=f"cannot begin the run in {tmp_path / 'run'}")
        if isinstance(error, OSError)
        else None
    )
    with told or pytest.raises(KeyboardInterrupt), begin_run_directory(tmp_path / "run") as directory:
        directory.write("half.json", "{")
        raise error
    assert not (tmp_path / "run").exists()


# errors


def test_a_user_error_has_three_lines():
    error = UserError("no such thing", "it was never made", "make it")
    assert error.lines() == (("problem", "no such thing"), ("why", "it was never made"), ("fix", "make it"))
    assert str(error) == "no such thing: it was never made. make it"
