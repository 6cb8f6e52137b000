"""Workers that end well, badly or not at all. The workers here are small scripts: no torch, no engine.

Whatever happens, `launch` brings back a result with its reason and leaves no process behind.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from redline.core.errors import UserError
from redline.core.job import Job, RunDirectory
from redline.core.measurement import Failure, Measurement
from redline.core.recipe import Recipe
from redline.core.values import from_json, to_json
from redline.search import launch as launch_module
from redline.search.ahead import compile_side_by_side, graphs_of
from redline.search.answers import graph_key
from redline.search.launch import cache_folder, launch, probe_machine, remove_caches, worker_environment, worker_path

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60  # a limit for tests that end long before it
MEASURED = Measurement(loss_curve=(5.6, 5.5), step_seconds=(0.1, 0.1))

PRELUDE = f"""
import json, os, signal, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[1])

def report(phase, done=None, total=None, seconds=None):
    print(json.dumps({{"phase": phase, "done": done, "total": total, "seconds": seconds}}), flush=True)

def measured():
    (folder / "measurement.json").write_text({json.dumps(json.dumps(to_json(MEASURED)))})

def start_child():
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(120)"])
    (folder / "pids").write_text(f"{{os.getpid()}} {{child.pid}}")
"""


@pytest.fixture
def job(tiny) -> Job:
    return Job(workload=tiny, recipe=Recipe(rungs=("compile",), micro_batch=4), device="cpu", tokens="tokens.npy")


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunDirectory:
    """A run directory named by a relative path, as users do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    return RunDirectory(Path("run"))


def write_module(root: Path, name: str, code: str) -> None:
    folder = root / "redline" / "engine"
    folder.mkdir(parents=True, exist_ok=True)
    (root / "redline" / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / f"{name}.py").write_text(PRELUDE * (name == "worker") + textwrap.dedent(code))


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """worker(code) makes that code the program behind `python -m redline.engine.worker`."""
    root = tmp_path / "fake"
    monkeypatch.setattr(launch_module, "worker_path", lambda: str(root))
    return lambda code: write_module(root, "worker", code)


def quietly(*_, **__):
    pass


def is_running(pid: int) -> bool:
    """A zombie that nobody has collected yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(pids: list[int]) -> None:
    """A kill is not instant: the kernel may take a moment."""
    limit = time.monotonic() + 10
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < limit:
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def pids_in(folder: Path) -> list[int]:
    return [int(word) for word in (folder / "pids").read_text().split()]


# a worker that answers


def test_a_measurement_comes_back(run, job, worker):
    worker("measured()")
    assert launch(run, job, PATIENCE_SECONDS, quietly) == MEASURED
    folder = run.job_folder(job)
    assert from_json(Job, json.loads((folder / "job.json").read_text())) == job
    assert (folder / "log.txt").exists()


def test_the_workers_own_reason_comes_back(run, job, worker):
    failure = Failure(kind="oom", reason="out of memory: tried to allocate 12 GiB")
    worker(f"(folder / 'failure.json').write_text({json.dumps(to_json(failure))!r}); sys.exit(1)")
    assert launch(run, job, PATIENCE_SECONDS, quietly) == failure


def test_what_the_worker_says_on_standard_error_is_its_log(run, job, worker):
    worker("print('about to measure', file=sys.stderr); measured()")
    launch(run, job, PATIENCE_SECONDS, quietly)
    assert (run.job_folder(job) / "log.txt").read_text() == "about to measure\n"


def test_progress_is_passed_on_in_order(run, job, worker):
    worker("""
        report("starting")
        for done in range(200):
            report("warming up", done=done, total=200)
        report("timing", total=10, seconds=4.0)
        measured()
    """)
    seen = []
    launch(run, job, PATIENCE_SECONDS, lambda name, **more: seen.append((name, more)))
    assert [name for name, _ in seen] == ["starting", *["warming up"] * 200, "timing"]
    assert [more["done"] for _, more in seen[1:-1]] == list(range(200))
    assert seen[-1] == ("timing", {"done": None, "total": 10, "seconds": 4.0})


@pytest.mark.parametrize(
    "garbage",
    [
        b"Downloading: 100%",
        b"\xff\xfe\x00",
        b"",
        b"3",
        b"null",
        b"true",
        b'"text"',
        b"[1, 2]",
        b"[]",
        b"{}",
        b'{"done": 3}',
        b'{"phase": "building", "colour": "red"}',
    ],
    ids=lambda garbage: garbage[:24].decode("latin1"),
)
def test_what_is_no_progress_is_passed_over(run, job, worker, garbage):
    """Libraries print before the worker has taken standard output. Progress goes on after that, and no pipe fills."""
    worker(f"""
        sys.stdout.buffer.write({garbage!r} + b"\\n")
        report("timing", total=10)
        sys.stdout.write("." * 200_000 + "\\n")
        report("proving")
        measured()
    """)
    seen = []

    def on_phase(name, done=None, total=None, seconds=None):
        seen.append(name)

    assert launch(run, job, 10.0, on_phase) == MEASURED
    assert seen[-2:] == ["timing", "proving"]


def test_answers_of_an_attempt_that_was_interrupted_do_not_count(run, job, worker):
    folder = run.job_folder(job)
    folder.mkdir(parents=True)
    for name in ("measurement.json", "failure.json"):
        (folder / name).write_text(json.dumps(to_json(MEASURED)))
    worker("sys.exit(4)")
    assert launch(run, job, PATIENCE_SECONDS, quietly).kind == "error"


def test_standard_input_stays_open_while_we_live(run, job, worker):
    """The worker takes the end of its input for the end of its parent."""
    worker("""
        import select
        report("open" if not select.select([0], [], [], 0.2)[0] else "closed")
        measured()
    """)
    seen = []
    launch(run, job, PATIENCE_SECONDS, lambda name, **_: seen.append(name))
    assert seen == ["open"]


# a worker that does not


def test_a_worker_that_is_killed(run, job, worker):
    worker("report('compiling'); os.kill(os.getpid(), signal.SIGKILL)")
    failure = launch(run, job, PATIENCE_SECONDS, quietly)
    assert failure.kind == "killed"
    assert "killed by SIGKILL (the system may be out of memory) while compiling" in failure.reason
    assert "log.txt" in failure.reason


def test_a_worker_that_crashes(run, job, worker):
    worker("report('timing'); os.kill(os.getpid(), signal.SIGSEGV)")
    failure = launch(run, job, PATIENCE_SECONDS, quietly)
    assert failure.kind == "killed"
    assert "killed by SIGSEGV while timing" in failure.reason
    assert "memory)" not in failure.reason


def test_a_worker_that_c_ends_says_why(run, job, worker):
    worker("report('timing'); print('  what():  CUDA error: lost', file=sys.stderr, flush=True); os.abort()")
    failure = launch(run, job, PATIENCE_SECONDS, quietly)
    assert "killed by SIGABRT (CUDA error: lost) while timing" in failure.reason


def test_a_signal_without_a_name(run, job, worker):
    worker("os.kill(os.getpid(), 40)")
    assert launch(run, job, PATIENCE_SECONDS, quietly).kind == "killed"


def test_a_worker_that_leaves_without_an_answer(run, job, worker):
    worker("report('building'); print('one\\n\\nno such file: x.npy\\n', file=sys.stderr); sys.exit(3)")
    failure = launch(run, job, PATIENCE_SECONDS, quietly)
    expected = "the worker left with exit code 3 while building: no such file: x.npy"
    assert failure == Failure(kind="error", reason=expected)


@pytest.mark.parametrize("code", ["sys.exit(0)", "sys.exit(3)"])
def test_a_worker_that_leaves_without_a_word(run, job, worker, code):
    worker(code)
    failure = launch(run, job, PATIENCE_SECONDS, quietly)
    assert failure.kind == "error"
    assert "nothing was written to" in failure.reason
    assert "while starting" in failure.reason


def test_a_log_that_is_no_text_or_endless_is_cut(run, job, worker):
    worker("sys.stderr.buffer.write(b'\\xff' + b'x' * 100_000); sys.exit(1)")
    assert len(launch(run, job, PATIENCE_SECONDS, quietly).reason) < 400


# nothing is left behind


def test_a_time_out_ends_the_worker_and_what_it_started(run, job, worker):
    worker("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        start_child()
        report("compiling")
        time.sleep(120)
    """)
    failure = launch(run, job, 1.5, quietly)
    assert failure == Failure(kind="timeout", reason="stopped after 1.5 s while compiling; --timeout allows more")
    assert_gone(pids_in(run.job_folder(job)))


def test_a_time_out_leaves_no_semaphore(run, job, worker):
    """multiprocessing's tracker removes them, in a process of its own that must outlive whoever made them."""
    worker("""
        import multiprocessing
        from multiprocessing import resource_tracker, synchronize
        made = multiprocessing.get_context("spawn").Semaphore()
        (folder / "pids").write_text(f"{os.getpid()} {resource_tracker._resource_tracker._pid}")
        (folder / "name").write_text(made._semlock.name)
        time.sleep(120)
    """)
    assert launch(run, job, 1.5, quietly).kind == "timeout"
    folder = run.job_folder(job)
    assert_gone(pids_in(folder))
    assert not Path(f"/dev/shm/sem.{(folder / 'name').read_text().lstrip('/')}").exists()


@pytest.mark.parametrize("end", ["measured()", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_a_worker_started_ends_with_it(run, job, worker, end):
    worker(f"start_child(); {end}")
    launch(run, job, PATIENCE_SECONDS, quietly)
    assert_gone(pids_in(run.job_folder(job)))


def test_no_pipe_is_left_open(run, job, worker):
    worker("report('timing'); measured()")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        launch(run, job, PATIENCE_SECONDS, quietly)
    assert len(os.listdir("/proc/self/fd")) <= before


# several that compile


def compiling(job: Job, *rungs: str) -> list[Job]:
    return [dataclasses.replace(job, recipe=Recipe(rungs=tuple(rung.split("+")), micro_batch=4)) for rung in rungs]


def test_code_is_compiled_side_by_side_and_once(run, job, worker):
    """Each of the two waits until the other has begun; what has nothing new to compile is no process."""
    worker("""
        others = folder.parent.parent
        (others / f"began-{os.getpid()}").touch()
        while len(list(others.glob("began-*"))) < 2:
            time.sleep(0.01)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] and os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
        job = json.loads((folder / "job.json").read_text())
        assert job["kind"] == "compile"
        answer = {"loss_curve": [], "compile_seconds": float(len(job["recipe"]["rungs"]))}
        (folder / "measurement.json").write_text(json.dumps(answer))
    """)
    jobs = compiling(job, "compile", "compile+fused-adamw", "bf16", "bf16+compile")
    told = []
    took = compile_side_by_side(
        run, jobs, at_once=2, timeout_seconds=PATIENCE_SECONDS, on_progress=lambda *counts: told.append(counts)
    )
    assert took == {graph_key(jobs[0]): 1.0, graph_key(jobs[3]): 2.0}
    assert graph_key(jobs[0]) == graph_key(jobs[1])
    assert len(list(run.path.glob("began-*"))) == 2
    assert told[0] == (0, 2)


def test_code_that_does_not_compile_is_left_to_its_row(run, job, worker):
    worker("""
        start_child()
        if json.loads((folder / "job.json").read_text())["recipe"]["rungs"] == ["compile"]:
            time.sleep(120)
        sys.exit(3)
    """)
    jobs = compiling(job, "compile", "bf16+compile")
    assert compile_side_by_side(run, jobs, at_once=2, timeout_seconds=1.5, on_progress=quietly) == {}
    for ahead in graphs_of(jobs).values():
        assert_gone(pids_in(run.job_folder(ahead)))


def test_an_interrupt_ends_what_compiles(run, job, worker):
    worker("start_child(); time.sleep(120)")
    jobs = compiling(job, "compile", "bf16+compile", "tf32+compile")
    started = list(graphs_of(jobs).values())[:2]

    def interrupt(*_):
        if all((run.job_folder(ahead) / "pids").exists() for ahead in started):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_side_by_side(run, jobs, at_once=2, timeout_seconds=PATIENCE_SECONDS, on_progress=interrupt)
    for ahead in started:
        assert_gone(pids_in(run.job_folder(ahead)))


def interrupted(tmp_path: Path, name: int, code: str) -> subprocess.Popen:
    """A parent that runs `code` with the fake engine gets a signal once its worker runs; none of them stays."""
    preamble = f"""
        import sys
        sys.path.insert(0, {str(REPOSITORY)!r})
        from redline.search import launch as launch_module
        launch_module.worker_path = lambda: {str(tmp_path / "fake")!r}
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(preamble) + textwrap.dedent(code)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with parent:
        limit = time.monotonic() + PATIENCE_SECONDS
        while not (found := list(tmp_path.glob("run/jobs/*/ready"))) and parent.poll() is None:
            if time.monotonic() > limit:
                break
            time.sleep(0.01)
        if found:
            parent.send_signal(name)
        try:
            parent.output, parent.errors = parent.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            parent.kill()
            raise
    assert found, parent.errors
    assert_gone(pids_in(found[0].parent))  # first of all, so that a failing test leaves none behind either
    return parent


HANGING = """
    start_child()
    report("compiling")
    (folder / "ready").touch()
    time.sleep(120)
"""


def test_ctrl_c_ends_the_worker_and_what_it_started(tmp_path, run, job, worker):
    worker(HANGING)
    (tmp_path / "job.json").write_text(json.dumps(to_json(job)))
    code = """
        import json
        from pathlib import Path
        from redline.core.job import Job, RunDirectory
        from redline.core.values import from_json
        job = from_json(Job, json.loads(Path("job.json").read_text()))
        try:
            launch_module.launch(RunDirectory(Path("run")), job, 60, lambda *_, **__: None)
        except KeyboardInterrupt:
            print("interrupted")
    """
    parent = interrupted(tmp_path, signal.SIGINT, code)
    assert (parent.output, parent.errors) == ("interrupted\n", "")


PROBE = """
    import json, sys
    hardware = {"kind": "cpu", "name": "a CPU", "cpu_cores": 2}
    print(json.dumps({"hardware": hardware, "versions": {"torch": "2.13.0"}}))
"""


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM], ids=lambda name: name.name)
def test_an_interrupted_ladder_keeps_its_answers_and_leaves_no_process(tmp_path, worker, name):
    """The whole command: the reference is answered, the baseline hangs, a signal comes."""
    worker(f"if folder.name.startswith('reference'):\n    measured()\nelse:{HANGING}")
    write_module(tmp_path / "fake", "probe", PROBE)
    code = """
        from redline.search import ladder
        from redline.cli import main
        sys.exit(main(["ladder", "tiny", "--rungs", "none", "--out", "run", "--json"]))
    """
    parent = interrupted(tmp_path, name, code)
    assert parent.returncode == 130
    document = json.loads(parent.output)
    assert (document["finished"], document["rows"]) == (False, [])
    assert "continue with: redline ladder --resume run" in parent.errors
    assert "Traceback" not in parent.errors
    assert list(RunDirectory(tmp_path / "run").results().values()) == [MEASURED]
    assert not (tmp_path / "run" / "cache").exists()


# which code runs, and where it caches


def test_the_current_folder_shadows_nothing(tmp_path, run, job, worker):
    """`python -m` looks into the current folder first, where another checkout or a user's random.py may lie."""
    worker("import random; report(random.__file__); measured()")
    write_module(tmp_path, "worker", "sys.exit(9)")
    (tmp_path / "random.py").write_text("raise SystemExit(8)")
    seen = []
    assert launch(run, job, PATIENCE_SECONDS, lambda name, **_: seen.append(name)) == MEASURED
    assert seen != [str(tmp_path / "random.py")]


def test_the_current_folder_does_not_shadow_the_probe(tmp_path, run, worker):
    write_module(tmp_path / "fake", "probe", PROBE)
    write_module(tmp_path, "probe", "raise SystemExit('the wrong probe')")
    assert probe_machine(None)[0].name == "a CPU"


def test_a_child_finds_this_very_package(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert worker_path() == str(REPOSITORY)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert worker_path() == f"{REPOSITORY}{os.pathsep}/somewhere"


def test_only_repeats_of_the_same_job_share_a_compile_cache(run, job):
    def cache_of(other):
        environment = worker_environment(run, other)
        return environment["TORCHINDUCTOR_CACHE_DIR"], environment["TRITON_CACHE_DIR"]

    assert cache_of(job) == cache_of(dataclasses.replace(job, repeat=2))
    assert cache_of(job) != cache_of(dataclasses.replace(job, recipe=job.recipe.adding("flash")))
    assert cache_of(job) != cache_of(dataclasses.replace(job, kind="reference"))
    assert len(set(cache_of(job))) == 2
    for folder in cache_of(job):
        assert Path(folder).is_absolute()  # a worker may change its current folder
        assert cache_folder(run) in Path(folder).parents


def test_the_users_environment_reaches_the_worker_and_wins(run, job, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
    environment = worker_environment(run, job)
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment["TORCHINDUCTOR_VEC_ISA_OK"] == "0"
    monkeypatch.delenv("TORCHINDUCTOR_VEC_ISA_OK")
    assert worker_environment(run, job)["TORCHINDUCTOR_VEC_ISA_OK"] == "1"


def test_a_shared_cache_of_the_users_is_not_used(run, job, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/shared")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/shared")
    environment = worker_environment(run, job)
    assert "/shared" not in (environment["TORCHINDUCTOR_CACHE_DIR"], environment["TRITON_CACHE_DIR"])


def test_caches_are_removed_and_nothing_else(run, job):
    (cache_folder(run) / job.key / "inductor").mkdir(parents=True)
    (run.path / "run.json").touch()
    remove_caches(run)
    remove_caches(run)  # none left: no matter
    assert os.listdir(run.path) == ["run.json"]


# results


def test_an_answer_is_appended_whole_after_half_a_line(run, job):
    """The machine died while it wrote; the next run's first line must not grow onto the stump."""
    run.append(job, MEASURED)
    with open(run.path / "results.jsonl", "ab") as file:
        file.write(b'{"key": "0123", "ok": tr')
    other = dataclasses.replace(job, repeat=1)
    failure = Failure(kind="timeout", reason="stopped")
    run.append(other, failure)
    assert run.results() == {job.key: MEASURED, other.key: failure}
    lines = (run.path / "results.jsonl").read_bytes().split(b"\n")
    assert lines[1] == b'{"key": "0123", "ok": tr'
    assert lines[3] == b""


# the probe


def test_the_probe_answers_in_its_last_line(tmp_path, run, worker):
    write_module(tmp_path / "fake", "probe", "print('a driver says hello')" + PROBE.replace("\n    ", "\n"))
    hardware, versions = probe_machine(None)
    assert (hardware.kind, hardware.name, hardware.cpu_cores) == ("cpu", "a CPU", 2)
    assert versions == {"torch": "2.13.0"}


def test_the_probe_is_told_the_device(tmp_path, run, worker):
    code = PROBE.replace('"kind": "cpu"', '"kind": sys.argv[1] if len(sys.argv) > 1 else "none"')
    write_module(tmp_path / "fake", "probe", code)
    assert probe_machine("cuda")[0].kind == "cuda"
    assert probe_machine(None)[0].kind == "none"


@pytest.mark.parametrize(
    ("device", "problem"), [("cuda", "no cuda device on this machine"), (None, "torch could not describe this machine")]
)
def test_a_probe_that_fails_is_the_users_to_mend(tmp_path, run, worker, device, problem):
    write_module(tmp_path / "fake", "probe", "raise SystemExit('torch sees no CUDA device')")
    with pytest.raises(UserError) as caught:
        probe_machine(device)
    assert (caught.value.problem, caught.value.why) == (problem, "torch sees no CUDA device")
    assert "--device cpu" in caught.value.fix


def test_a_probe_that_says_nothing(tmp_path, run, worker):
    write_module(tmp_path / "fake", "probe", "raise SystemExit(1)")
    with pytest.raises(UserError, match="no message"):
        probe_machine(None)


def test_threads_that_wait_do_not_spin_for_whole_time_slices(run, job, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert worker_environment(run, job)["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")  # which a count would override
    assert "GOMP_SPINCOUNT" not in worker_environment(run, job)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert worker_environment(run, job)["GOMP_SPINCOUNT"] == "7"
