"""`redline hardware` in this process, with a driver that is made up: what is read, what is known, what is kept.

The fake NVML answers as nvidia-ml-py does on one H200; a question that a driver does not know raises NVMLError.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import types

import pytest
from rich.console import Console

from redline import cli
from redline.core.devices import DEVICES, DTYPES, lookup
from redline.core.errors import UserError
from redline.core.hardware import Hardware, MeasuredPeaks, MeasuredRate
from redline.core.values import to_json
from redline.machine import find_measured, local, measured, save_measured, this_machine
from redline.machine.local import Gpu, throttle_reasons, visible_gpus
from redline.report.hardware import MeasureBar, print_devices, print_hardware
from redline.search import matmuls
from redline.workloads import PRESETS

H200_MEMORY = 143771 * 1024**2


class NVMLError(Exception):
    pass


def fake_nvml(names=("NVIDIA H200",), **changes):
    """A module with the functions that redline asks; `changes` replaces answers, an exception is raised."""
    answers = {
        "DeviceGetName": None,
        "DeviceGetUUID": None,
        "DeviceGetMemoryInfo": types.SimpleNamespace(total=H200_MEMORY, used=1024**3),
        "DeviceGetCudaComputeCapability": (9, 0),
        "DeviceGetNumGpuCores": 16896,
        "DeviceGetMigMode": [0, 0],
        "DeviceGetClockInfo": 345,
        "DeviceGetMaxClockInfo": 1980,
        "DeviceGetPowerUsage": 76_400,
        "DeviceGetEnforcedPowerLimit": 700_000,
        "DeviceGetTemperature": 31,
        "DeviceGetCurrentClocksThrottleReasons": 0x1,
        "SystemGetDriverVersion": "580.159.04",
        "SystemGetCudaDriverVersion": 13000,
        **changes,
    }
    module = types.ModuleType("pynvml")
    module.NVMLError, module.NVML_CLOCK_SM, module.NVML_CLOCK_MEM, module.NVML_TEMPERATURE_GPU = NVMLError, 1, 2, 0
    module.open = 0

    def answer(name):
        def ask(*arguments):
            if isinstance(answers[name], Exception):
                raise answers[name]
            return answers[name]

        return ask

    for name in answers:
        setattr(module, f"nvml{name}", answer(name))

    def start():
        module.open += 1

    def stop():
        module.open -= 1

    module.nvmlInit, module.nvmlShutdown = start, stop
    module.nvmlDeviceGetCount = lambda: len(names)
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetName = lambda index: names[index]
    module.nvmlDeviceGetUUID = lambda index: f"GPU-{index}abc"
    return module


@pytest.fixture
def nvml(monkeypatch):
    """nvml(...) puts a made-up driver into this machine."""

    def install(*arguments, **changes):
        module = fake_nvml(*arguments, **changes)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return install


@pytest.fixture(autouse=True)
def machine_of_its_own(monkeypatch, tmp_path):
    """No NVML, no measurements, no choice of devices from outside."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it raises ImportError
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def redline_command(capsys):
    def call(*words):
        capsys.readouterr()
        code = cli.main(["hardware", *map(str, words)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.fixture
def answer(redline_command):
    """The JSON document, after checking that it is all there is."""

    def call(*words):
        code, out, err = redline_command(*words, "--json")
        assert code == 0, err
        document = json.loads(out)
        assert {"this", "known", "reason", "measured"} <= document.keys()
        return document

    return call


def peaks(**changes):
    rate = MeasuredRate(
        dtype="bf16", where="square", m=8192, n=8192, k=8192, median_seconds=1.4e-3, best_seconds=1.38e-3
    )
    fields = {
        "name": "NVIDIA H200",
        "driver": "580.159.04",
        "kind": "cuda",
        "matmul_tflops": {"bf16": rate.tflops},
        "bandwidth": 4.3e12,
        "bandwidths": {"copy": 4.2e12, "triad": 4.3e12},
        "rates": (rate,),
        "workload": "gpt2",
        "micro_batch": 16,
        "date": "2026-11-15T10:00:00+00:00",
        "versions": {"torch": "2.11.0"},
        "command": "redline hardware --measure",
    }
    return MeasuredPeaks(**{**fields, **changes})


# this machine


def test_an_h200_is_read_and_known(answer, nvml):
    module = nvml()
    document = answer()
    this = document["this"]
    assert (this["kind"], this["name"], this["count"]) == ("cuda", "NVIDIA H200", 1)
    assert (this["driver"], this["cuda_driver"], this["memory_bytes"]) == ("580.159.04", "13.0", H200_MEMORY)
    gpu = this["gpus"][0]
    assert (gpu["multiprocessors"], gpu["capability"]) == (132, [9, 0])
    assert (gpu["clock_mhz"], gpu["clock_max_mhz"], gpu["power_watts"], gpu["power_limit_watts"]) == (
        345,
        1980,
        76.4,
        700,
    )
    assert (gpu["temperature_celsius"], gpu["throttle_reasons"]) == (31, ["idle"])
    assert document["known"]["label"] == "H200"
    assert document["known"]["name"] == "NVIDIA H200"
    assert document["known"]["peak_tflops"]["bf16"] == 989.4
    assert (document["reason"], document["measured"]) == (None, None)
    assert module.open == 0  # what was opened is closed


def test_what_a_driver_does_not_answer_is_unknown(answer, nvml):
    nvml(
        DeviceGetPowerUsage=NVMLError(),
        DeviceGetCurrentClocksThrottleReasons=NVMLError(),
        DeviceGetNumGpuCores=NVMLError(),
        DeviceGetMigMode=NVMLError(),
        SystemGetCudaDriverVersion=NVMLError(),
    )
    document = answer()
    gpu = document["this"]["gpus"][0]
    assert (gpu["power_watts"], gpu["throttle_reasons"], gpu["multiprocessors"]) == (None, None, None)
    assert document["this"]["cuda_driver"] is None
    assert document["known"]["label"] == "H200"


def test_bytes_of_an_old_nvml_are_text(nvml):
    nvml(names=(b"NVIDIA H200",), SystemGetDriverVersion=b"450.80")
    assert (this_machine().name, this_machine().driver) == ("NVIDIA H200", "450.80")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"names": ("NVIDIA GeForce RTX 4090 Laptop GPU",)}, "laptops"),
        ({"names": ("NVIDIA B9000",)}, "no 'NVIDIA B9000'"),
        ({"DeviceGetMigMode": [1, 1]}, "MIG is switched on"),
        ({"DeviceGetNumGpuCores": 64 * 128}, "it has 64 multiprocessors and the card of that name 132"),
        ({"DeviceGetNumGpuCores": 144 * 128}, "it has 144 multiprocessors and the card of that name 132"),
    ],
)
def test_a_device_that_is_not_the_card_has_no_peaks(answer, nvml, changes, reason):
    nvml(**changes)
    document = answer()
    assert document["known"] is None
    assert reason in document["reason"]


def test_without_a_gpu_the_cpu_is_described_and_its_peak_unknown(answer, nvml):
    for install in (lambda: None, lambda: nvml(names=())):
        install()
        document = answer()
        this = document["this"]
        assert (this["kind"], this["gpus"], this["name"]) == ("cpu", [], this["cpu_name"])
        assert this["cpu_cores"] >= 1
        assert this["ram_bytes"] > 1e8
        assert this["versions"]["python"] == sys.version.split()[0]
        assert document["known"] is None
        assert "a CPU" in document["reason"]


def test_a_driver_without_nvidia_ml_py_is_said(monkeypatch, answer):
    monkeypatch.setattr(local.Path, "exists", lambda self: str(self) == "/proc/driver/nvidia/version")
    assert any("pip install nvidia-ml-py" in note for note in answer()["notes"])


def test_an_amd_device_is_said_to_be_unreadable(monkeypatch, answer):
    monkeypatch.setattr(local.Path, "exists", lambda self: str(self) == "/dev/kfd")
    assert any("AMD device" in note for note in answer()["notes"])


def test_cuda_visible_devices_chooses_and_hides(monkeypatch, nvml, answer):
    nvml(names=("NVIDIA H200", "Tesla T4"), DeviceGetNumGpuCores=NVMLError())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert answer()["known"]["label"] == "T4"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    document = answer()
    assert document["this"]["kind"] == "cpu"
    assert any("hides every GPU" in note for note in document["notes"])


@pytest.mark.parametrize(
    ("words", "chosen"),
    [(None, [0, 1]), ("1,0", [1, 0]), ("GPU-1", [1]), ("0,7,1", [0]), ("-1", []), ("GPU", []), ("", [])],
)
def test_visible_gpus_are_cudas(words, chosen):
    gpus = tuple(Gpu(name="NVIDIA H200", index=index, uuid=f"GPU-{index}abc") for index in range(2))
    environment = {} if words is None else {"CUDA_VISIBLE_DEVICES": words}
    assert [gpu.index for gpu in visible_gpus(gpus, environment)] == chosen


def test_throttle_reasons_are_named():
    assert throttle_reasons(None) is None
    assert throttle_reasons(0) == ()
    assert throttle_reasons(0x4 | 0x40) == ("power cap", "thermal slowdown (hardware)")
    assert throttle_reasons(0x1000) == ("reason 0x1000",)


# --name and --list


@pytest.mark.parametrize(
    ("name", "label"),
    [("NVIDIA L40S", "L40S"), ("A100-80", "A100-80-SXM"), ("h100 sxm", "H100-SXM"), ("NVIDIA GH200 480GB", "GH200-96")],
)
def test_a_name_is_looked_up_without_the_device(answer, name, label):
    document = answer("--name", name)
    assert document["this"] is None
    assert document["known"]["label"] == label
    assert document["reason"] is None


def test_every_dtype_is_there_and_null_where_the_device_lacks_it(answer):
    known = answer("--name", "Tesla T4")["known"]
    assert known["peak_tflops"] == {"fp32": 8.1, "tf32": None, "bf16": None, "fp16": 65.0, "fp8": None, "int8": 130.0}
    fields = {"name", "label", "memory_bytes", "bandwidth", "multiprocessors", "alignment_bytes", "source", "notes"}
    assert fields <= known.keys()


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "AMD X1"])
def test_a_card_we_do_not_know_is_an_answer(answer, redline_command, name):
    document = answer("--name", name)
    assert document["known"] is None
    assert document["reason"]
    code, out, _ = redline_command("--name", name)
    assert code == 0
    assert "unknown" in out
    assert "TFLOP/s" not in out


@pytest.mark.parametrize("name", ["A100", "H300", "nothing"])
def test_a_wrong_name_is_a_mistake_that_lists_the_right_ones(redline_command, name):
    code, out, err = redline_command("--name", name)
    assert (code, out) == (2, "")
    assert [line[:9] for line in err.splitlines()] == ["problem: ", "why:     ", "fix:     "]
    assert "A100-80-SXM" in err


def test_the_list_holds_every_device_in_100_columns(redline_command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = redline_command("--list")
    assert code == 0
    assert all(len(line) <= 100 for line in out.splitlines())
    assert all(any(line.startswith(device.label) for line in out.splitlines()) for device in DEVICES)
    code, out, _ = redline_command("--list", "--json")
    assert [row["label"] for row in json.loads(out)] == [device.label for device in DEVICES]


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40])
def test_labels_are_never_cut(redline_command, monkeypatch, width):
    """They are what --gpu takes. Other columns go, those that training asks for last."""
    monkeypatch.setenv("COLUMNS", str(width))
    lines = redline_command("--list")[1].splitlines()
    assert {line.split()[0] for line in lines if line} >= {device.label for device in DEVICES}
    table = [line for line in lines if line.startswith(("device", *(device.label for device in DEVICES)))]
    assert max(map(len, table)) <= width
    assert "…" not in "".join(table)
    assert {"bf16", "fp16", "GiB", "TB/s"} <= set(table[0].split())
    assert ("align" in table[0]) is (width >= 100)


@pytest.mark.parametrize(
    "words",
    [
        ("--list", "--name", "H200"),
        ("--name", "H200", "--measure"),
        ("--seconds", "5"),
        ("--micro-batch", "4"),
        ("--device", "cpu"),
        ("--measure", "--seconds", "0.1"),
        ("--measure", "--seconds", "nan"),
        ("--measure", "--seconds", "500"),
        ("--measure", "--micro-batch", "0"),
        ("--measure", "tiny", "--micro-batch", "100000000000"),
        ("--measure", "gpt9"),
    ],
)
def test_mistakes_stop_before_any_device_work(redline_command, monkeypatch, words):
    monkeypatch.setattr(matmuls.launch, "probe_machine", lambda device: pytest.fail("the device was asked"))
    code, out, err = redline_command(*words)
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 3


# what was measured is kept


def test_what_was_measured_is_found_again(answer, nvml):
    nvml()
    assert find_measured(["NVIDIA H200"])[0] is None
    save_measured(peaks())
    assert find_measured(["NVIDIA H200"])[0] == peaks()
    found = answer()["measured"]
    assert found["share"]["matmul"]["bf16"] == pytest.approx(2 * 8192**3 / 1.4e-3 / 989.4e12)
    assert found["share"]["bandwidth"] == pytest.approx(4.3 / 4.8)
    assert found["rates"][0]["best_tflops"] > found["rates"][0]["tflops"]
    assert answer("--name", "H200")["measured"]["date"] == peaks().date
    assert find_measured(["NVIDIA H100 80GB HBM3"])[0] is None


def test_the_newest_is_taken_unless_the_driver_is_named():
    old = peaks(driver="570.1", date="2026-01-01T00:00:00+00:00")
    new = peaks(driver="590.1", date="2026-12-01T00:00:00+00:00")
    for one in (new, old):
        save_measured(one)
    assert find_measured(["NVIDIA H200"])[0] == new
    assert find_measured(["NVIDIA H200"], "570.1")[0] == old
    assert find_measured(["NVIDIA H200"], "600.1")[0] == new


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"name": "NVIDIA H200"}',
        json.dumps({**to_json(peaks()), "future": 1}),
        json.dumps({**to_json(peaks()), "bandwidth": "fast"}),
        json.dumps({**to_json(peaks()), "matmul_tflops": {"bf16": -1}}),
        json.dumps({**to_json(peaks()), "matmul_tflops": None}),
        json.dumps({**to_json(peaks()), "rates": [{"dtype": "bf16"}]}),
        "\udcff",
    ],
)
def test_a_damaged_file_is_passed_over_with_a_note(answer, nvml, text):
    nvml()
    path = save_measured(peaks(driver="570.1"))
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    document = answer()
    assert document["measured"] is None
    assert any(str(path) in note for note in document["notes"])
    save_measured(peaks())
    found, notes = find_measured(["NVIDIA H200"])
    assert found == peaks()
    assert len(notes) == 1


def test_peaks_are_found_under_every_name_of_the_driver(answer):
    """Older drivers say 'A100-SXM4-80GB' for the same card."""
    save_measured(peaks(name="A100-SXM4-80GB", matmul_tflops={"bf16": 250.0}, bandwidth=1.8e12))
    assert answer("--name", "A100-80")["measured"]["matmul_tflops"] == {"bf16": 250.0}


@pytest.mark.parametrize("changes", [{"matmul_tflops": {"bf16": 1494.0}}, {"bandwidth": 5.4e12}])
def test_a_file_beyond_the_data_sheet_is_passed_over(answer, nvml, changes):
    """151 % of 989.4 TFLOP/s, 112 % of 4.8 TB/s: a small boost explains neither."""
    nvml()
    path = save_measured(peaks(**changes))
    document = answer()
    assert document["measured"] is None
    (note,) = document["notes"]
    assert str(path) in note
    assert "data sheet" in note


def test_a_file_of_another_device_is_not_taken():
    path = save_measured(peaks())
    path.write_text(json.dumps(to_json(peaks(name="nvidia h200"))))  # the same file name, another device
    assert find_measured(["NVIDIA H200"]) == (None, ())


def test_the_folder_follows_xdg(monkeypatch, tmp_path):
    assert measured.peaks_folder() == tmp_path / "redline" / "peaks"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert measured.peaks_folder() == tmp_path / "home" / ".cache" / "redline" / "peaks"


# --measure, with a worker that is made up


@pytest.fixture
def worker(monkeypatch, h200):
    """Every product runs at half of 1000 TFLOP/s in bf16 and 1/16 of it in fp32; the largest fails."""
    tasks = []

    def run_worker(folder, timeout_seconds, on_progress):
        task = json.loads((folder / "task.json").read_text())
        tasks.append(task)
        on_progress("timing", done=100, total=100)
        rate = {"bf16": 500e12, "fp16": 500e12, "tf32": 125e12, "fp32": 31.25e12}
        products = [
            {"median_seconds": seconds, "best_seconds": 0.9 * seconds, "samples": 3}
            for one in task["products"]
            for seconds in [2 * one["m"] * one["n"] * one["k"] / rate[one["dtype"]]]
        ]
        products[-1] = {"error": "out of memory"}
        traffic = {"copy": 4.0e12, "triad": 4.2e12, "read": 4.1e12} if task["traffic"] else None
        (folder / "answer.json").write_text(json.dumps({"products": products, "traffic": traffic}))
        return "timing", True, 0

    machine = dataclasses.replace(h200, memory_bytes=H200_MEMORY, driver="580.159.04", multiprocessors=132)
    monkeypatch.setattr(matmuls.launch, "probe_machine", lambda device: (machine, {"torch": "2.11.0"}))
    monkeypatch.setattr(matmuls, "_run_worker", run_worker)
    return tasks


def test_measuring_keeps_what_it_shows(redline_command, nvml, worker, monkeypatch):
    nvml()
    monkeypatch.setattr(sys, "argv", ["redline", "hardware", "--measure", "gpt2"])
    code, out, err = redline_command("--measure", "gpt2", "--micro-batch", "4", "--seconds", "3", "--json")
    assert code == 0
    document = json.loads(out)
    assert "kept in" in err
    assert document["measured"]["matmul_tflops"]["bf16"] == pytest.approx(500)
    assert document["measured"]["share"]["matmul"]["bf16"] == pytest.approx(500 / 989.4)
    assert document["measured"]["share"]["bandwidth"] == pytest.approx(4.2 / 4.8)
    kept = find_measured(["NVIDIA H200"])[0]
    assert (kept.workload, kept.micro_batch, kept.command) == ("gpt2", 4, "redline hardware --measure gpt2")
    assert kept.matmul_tflops == document["measured"]["matmul_tflops"]
    assert {"fp32", "tf32", "bf16", "fp16"} == kept.matmul_tflops.keys()


def test_what_could_not_be_timed_is_said(answer, worker):
    """The worker fails the last and largest, a square in fp16."""
    document = answer("--measure", "gpt2", "--micro-batch", "4")
    assert document["notes"] == ["not timed: square 16384 x 16384 x 16384 (fp16): out of memory"]
    assert find_measured(["NVIDIA H200"])[0].failed == tuple(document["notes"])


def test_square_products_alone_are_no_measurement(redline_command, worker, monkeypatch):
    """The good peaks that were kept before stay."""
    save_measured(peaks())
    ask = matmuls.ask

    def own_products_fail(device, products, *more, **options):
        found = ask(device, products, *more, **options)
        squares = [one["m"] == one["n"] == one["k"] for one in products]
        answers = zip(found["products"], squares, strict=True)
        return {**found, "products": [one if square else {"error": "out of memory"} for one, square in answers]}

    monkeypatch.setattr(matmuls, "ask", own_products_fail)
    code, out, err = redline_command("--measure", "tiny", "--micro-batch", "1000000")
    assert (code, out) == (2, "")
    assert "problem: none of tiny's own products could be timed" in err
    assert "out of memory" in err
    assert "smaller --micro-batch" in err
    assert find_measured(["NVIDIA H200"])[0] == peaks()


def test_a_measurement_beyond_the_data_sheet_is_shown_without_shares_and_not_kept(answer, nvml, worker, monkeypatch):
    nvml()
    monkeypatch.setitem(lookup("NVIDIA H200").peak_tflops, "bf16", 300.0)  # a row that is wrong: 500 was measured
    document = answer("--measure", "gpt2")
    assert document["measured"]["share"] == {
        "matmul": dict.fromkeys(("fp32", "tf32", "bf16", "fp16")),
        "bandwidth": None,
    }
    assert any(note.startswith("not kept: bf16 at 167% of what the data sheet") for note in document["notes"])
    assert "167" not in shown(print_hardware, {**document, "notes": []})


def test_the_workloads_own_products_are_asked_with_trainings_layouts(worker):
    matmuls.measure_peaks("gpt2", micro_batch=4, seconds=3)
    (task,) = worker
    asked = [(one["layout"], one["m"], one["n"], one["k"]) for one in task["products"] if one["dtype"] == "bf16"]
    for wanted in (
        ("TN", 4096, 2304, 768),  # qkv forward
        ("NN", 4096, 768, 2304),  # the gradient of its input
        ("NT", 2304, 768, 4096),  # the gradient of its weight
        ("TN", 4096, 50257, 768),  # the head, unpadded
        ("TN", 16384, 16384, 16384),
    ):
        assert wanted in asked
    sizes = [one["m"] * one["n"] * one["k"] for one in task["products"]]
    assert sizes == sorted(sizes)  # when time is short, the largest are missing
    assert task["traffic"] is True


def test_a_shape_of_ones_own_can_be_measured(worker, tmp_path):
    shape = {"layers": 1, "heads": 4, "d_model": 320, "d_ff": 1000, "vocab": 999, "sequence": 128}
    (tmp_path / "mine.json").write_text(json.dumps(shape))
    found = matmuls.measure_peaks(str(tmp_path / "mine.json"), seconds=3)
    assert (found.workload, found.micro_batch) == ("mine", matmuls.MICRO_BATCH)
    assert any((rate.where, rate.m, rate.n, rate.k) == ("head forward", 1024, 999, 320) for rate in found.rates)


def test_squares_fit_into_memory():
    small = Hardware(kind="cuda", name="a GPU", memory_bytes=8 * 1024**3)
    assert matmuls.fitting_squares(small) == [1024, 2048, 4096, 8192]
    assert matmuls.fitting_squares(Hardware(kind="cpu", name="a CPU")) == [256, 512, 1024, 2048]


def test_only_dtypes_of_the_machine_are_measured(t4, cpu, h200):
    assert matmuls.measured_dtypes(t4) == ["fp32", "fp16"]
    assert matmuls.measured_dtypes(cpu) == ["fp32", "bf16"]
    assert matmuls.measured_dtypes(h200) == ["fp32", "tf32", "bf16", "fp16"]


def test_time_gemms_gives_none_for_what_failed(worker, h200):
    gemms = matmuls.peak_gemms(PRESETS["tiny"].shape, 4, h200)
    seconds = matmuls.time_gemms(gemms, dtype="bf16", device="cuda", seconds=2)
    assert len(seconds) == len(gemms)
    assert seconds[-1] is None
    assert seconds[0] == pytest.approx(2 * gemms[0].m * gemms[0].n * gemms[0].k / 500e12)
    with pytest.raises(UserError) as error:
        matmuls.time_gemms(gemms, dtype="int4", device="cuda", seconds=2)
    assert "bf16" in error.value.fix


def test_a_measurement_that_cannot_be_kept_is_shown_with_a_note(redline_command, nvml, worker, monkeypatch, tmp_path):
    nvml()
    (tmp_path / "redline").write_text("a file where the folder should be")
    code, out, _ = redline_command("--measure", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["measured"]["matmul_tflops"]["bf16"] == pytest.approx(500)
    assert any(note.startswith("not kept: ") for note in document["notes"])


def test_torch_sees_a_device_that_nvml_does_not(answer, worker):
    """An AMD card, or a machine without nvidia-ml-py: the name comes from torch, and so the row."""
    document = answer("--measure")
    assert document["known"]["label"] == "H200"
    assert document["reason"] is None


# for people


def shown(function, *arguments):
    console = Console(width=100, record=True, force_terminal=False, file=open(os.devnull, "w"))  # noqa: SIM115
    function(*arguments, console)
    text = console.export_text()
    console.file.close()
    assert all(len(line) <= 100 for line in text.splitlines())
    return text


def test_data_sheet_and_measurement_stand_side_by_side(redline_command, nvml, answer):
    nvml()
    save_measured(peaks())
    text = shown(print_hardware, answer())
    line = next(line for line in text.splitlines() if line.startswith("bf16 TFLOP/s"))
    assert line.split()[2:] == ["989.4", "785.4", "796.7", "79.4", "%"]
    assert any(line.startswith("memory GB/s") and "4,800" in line and "4,300" in line for line in text.splitlines())
    for words in ("345 of 1980 MHz", "76 of 700 W, 31 °C", "held by: idle", "driver", "580.159.04", "CUDA up to 13.0"):
        assert words in text
    assert "over 100 %" not in text


def test_over_the_data_sheet_is_explained(nvml, answer):
    nvml()
    save_measured(peaks(matmul_tflops={"bf16": 1000.0}))
    assert "over 100 %" in shown(print_hardware, answer())


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.label)
def test_every_device_prints(answer, device):
    text = shown(print_hardware, answer("--name", device.label))
    assert device.label in text
    assert len([line for line in text.splitlines() if line.startswith(DTYPES)]) == len(DTYPES)


def test_the_list_prints(redline_command):
    rows = json.loads(redline_command("--list", "--json")[1])
    assert "A10G" in shown(print_devices, rows)


def test_the_bar_prints_each_phase_once_without_a_terminal(capsys):
    with MeasureBar(Console(stderr=True)) as bar:
        for done in range(3):
            bar.phase("timing", done=done, total=3)
    assert capsys.readouterr().err == "timing\n"


BLOCKED = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "triton", "jinja2"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, NoTorch())
from redline.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", [("--json",), ("--list",), ("--name", "NVIDIA L40S"), ()])
def test_no_answer_needs_torch(words):
    command = [sys.executable, "-c", BLOCKED, "hardware", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
