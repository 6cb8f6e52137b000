"""tools/generate_docs.py: the committed pages are what the code says, and staleness is seen."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import ModuleType

import pytest

from redline.rungs import LADDER, find_rung


@pytest.fixture(scope="module")
def tool(repository) -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", repository / "tools" / "generate_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_documents_are_up_to_date(repository):
    command = [sys.executable, "tools/generate_docs.py", "--check"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def copy(tool, tmp_path):
    """A repository of its own to write into, with a README that has markers and no record yet."""
    (tmp_path / "README.md").write_text(f"# redline\n\n{tool.BEGIN}\nold\n{tool.END}\n\nThe end.\n", encoding="utf-8")
    return tmp_path


def test_writing_then_checking_finds_nothing_stale(tool, copy, capsys):
    assert tool.main(["--check"], root=copy) == 1
    assert "make docs" in capsys.readouterr().out
    assert tool.main([], root=copy) == 0
    assert tool.main(["--check"], root=copy) == 0
    assert {path.stem for path in (copy / "docs" / "rungs").iterdir()} == {"README", *(rung.name for rung in LADDER)}


def test_an_edited_page_is_stale_and_named_with_its_difference(tool, copy, capsys):
    tool.main([], root=copy)
    page = copy / "docs" / "rungs" / "flash.md"
    page.write_text(page.read_text(encoding="utf-8").replace("tiles", "towels"), encoding="utf-8")
    assert tool.main(["--check"], root=copy) == 1
    shown = capsys.readouterr().out
    assert "docs/rungs/flash.md" in shown
    assert "towels" in shown
    assert "towels" in page.read_text(encoding="utf-8")  # --check writes nothing


def test_the_page_of_a_rung_that_is_gone_is_stale_and_then_removed(tool, copy):
    tool.main([], root=copy)
    gone = copy / "docs" / "rungs" / "warp-drive.md"
    gone.write_text("# warp-drive\n")
    assert tool.main(["--check"], root=copy) == 1
    assert tool.main([], root=copy) == 0
    assert not gone.exists()


def test_without_a_record_the_markers_are_left_empty(tool, copy):
    tool.main([], root=copy)
    text = (copy / "README.md").read_text(encoding="utf-8")
    assert text == f"# redline\n\n{tool.BEGIN}\n{tool.END}\n\nThe end.\n"


def test_the_table_of_a_record_lies_between_the_markers(tool, copy, monkeypatch):
    (copy / "records").mkdir()
    (copy / "records" / "a.json").write_text(
        '{"rows": [{"rung": "baseline"}], "workload": "gpt2", "date": "2026-11-14"}'
    )
    monkeypatch.setattr(tool, "markdown_table", lambda record: f"| {record['workload']} |\n")
    for _ in range(2):  # the second time finds the first one's table and changes nothing
        tool.main([], root=copy)
        text = (copy / "README.md").read_text(encoding="utf-8")
        assert text == f"# redline\n\n{tool.BEGIN}\n| gpt2 |\n{tool.END}\n\nThe end.\n"


def test_a_readme_without_markers_is_left_alone(tool, copy):
    (copy / "README.md").write_text("# redline\n")
    tool.main([], root=copy)
    assert (copy / "README.md").read_text() == "# redline\n"


def test_the_newest_record_is_chosen_by_its_date_and_others_are_passed_over(tool, copy):
    records = copy / "records"
    records.mkdir()
    (records / "z.json").write_text('{"rows": [{"rung": "baseline"}], "workload": "tiny", "date": "2026-11-01"}')
    (records / "a.json").write_text('{"rows": [{"rung": "baseline"}], "workload": "gpt2", "date": "2026-11-14"}')
    (records / "b64.json").write_text('{"rows": [{"rung": "recipe"}], "workload": "one recipe", "date": "2026-12-01"}')
    (records / "rungs.json").write_text('{"rows": {"recipe": {"rungs": []}}, "workload": "gpt2", "date": "2027-01-01"}')
    (records / "lint.json").write_text('{"findings": [], "date": "2027-01-01"}')
    llama = {"name": "llama", "source": {"kind": "huggingface"}}
    newer = {"rows": [{"rung": "baseline"}, {"rung": "recipe"}], "workload": llama, "date": "2027-01-02"}
    (records / "llama.json").write_text(json.dumps(newer))
    (records / "tiny.json").write_text('{"rows": [{"rung": "baseline"}], "workload": "tiny", "date": "2027-01-03"}')
    assert tool.newest_ladder(records)["workload"] == "gpt2"
    assert [record.path.stem for record in tool.ladders_of(records, "one recipe", "recipe")] == ["b64"]
    assert tool.newest_ladder(copy / "absent") is None


def test_results_are_of_the_newest_record_that_trains_right(tool, copy):
    records = copy / "records"
    records.mkdir()
    common = {"mfu": 0.5, "micro_batch": 64, "peak_bytes": 2**31}

    def write(name: str, date: str, rates: dict[float, str]) -> None:
        rows = [
            {"rung": "recipe", "tokens_per_second": rate, "equivalence": {"verdict": verdict}, **common}
            for rate, verdict in rates.items()
        ]
        (records / name).write_text(json.dumps({"rows": rows, "workload": "gpt2", "date": date}))

    write("old.json", "2026-11-14", {900.0: "rounding"})
    write("new.json", "2026-11-15", {200.0: "same", 300.0: "rounding", 400.0: "different", 500.0: "not-checked"})
    write("wrong.json", "2026-11-16", {1000.0: "different"})
    readme = copy / "README.md"
    readme.write_text(f"{tool.BEGIN_RESULTS}\nold\n{tool.END_RESULTS}\n", encoding="utf-8")

    def told() -> list[str]:
        tool.main([], root=copy)
        return [line for line in readme.read_text(encoding="utf-8").splitlines() if line.startswith("| GPT-2 124M")]

    row = {"rung": "recipe", "recipe": ["bf16", "fp8-head"], "tokens_per_second": 800.0, **common}
    narrow = {"rows": [{**row, "equivalence": {"verdict": "changed"}}], "workload": "gpt2", "date": "2026-11-17"}
    (records / "narrow.json").write_text(json.dumps(narrow))
    wide = "| GPT-2 124M, 16 bits | **300** | 50.0 % | 64 | 2.0 GiB | *rounding* | [2026-11-15](records/new.json) |"
    assert told() == [wide]

    # 8 bits: the fastest that was judged, and what was timed and not judged, while it is faster
    rates = {"base": {"tokens_per_second": 500.0}, "narrow": {"tokens_per_second": 700.0}}
    step = {"recipes": rates, "micro_batch": 64, "date": "2026-11-16"}
    (records / "2026-step-gpt2-b64-fp8.json").write_text(json.dumps(step))
    timed = (
        "| GPT-2 124M, 8-bit matmuls | **700** | — | 64 | — | speed only; 500 in 16 bits beside it "
        "| [2026-11-16](records/2026-step-gpt2-b64-fp8.json) |"
    )
    assert told()[1:] == [timed]
    right = {"equivalence": {"verdict": "changed"}, **common}

    def climb(name: str, date: str, **rates: float) -> None:
        rows = [{"rung": "recipe", "recipe": ["bf16"], "tokens_per_second": 300.0, **right}]
        for rung, rate in rates.items():
            rung = rung.replace("_", "-")
            rows.append({"rung": rung, "recipe": [*rows[-1]["recipe"], rung], "tokens_per_second": rate, **right})
        (records / name).write_text(json.dumps({"rows": rows, "workload": "gpt2", "date": date}))

    climb("climbed.json", "2026-11-14", fp8_head=650.0, fp8_mlps=690.0)
    climb("cut.json", "2026-11-14", fp8_head=640.0)
    line = (
        "| GPT-2 124M, fp8-mlps | **{}** | — | 64 | 2.0 GiB | *changed*; 300 in 16 bits beside it "
        "| [2026-11-14](records/climbed.json) |"
    )
    assert told()[1:] == [line.format(690), timed]
    climb("climbed.json", "2026-11-14", fp8_head=650.0, fp8_mlps=710.0)
    assert told()[1:] == [line.format(710)]
    climb("slower.json", "2026-11-15", fp8_head=600.0, fp8_mlps=680.0)  # the newest of those that got as far
    assert told()[1:] == [line.format(680).replace("11-14", "11-15").replace("climbed", "slower"), timed]


def test_a_page_says_what_the_class_says(tool):
    page = tool.rung_page(find_rung("fp16"))
    assert page.startswith("# fp16\n")
    assert "GradScaler" in page
    assert "rounding-only" in page
    assert "| `loss_scaling` | `False` | `True` |" in page
    assert "[bf16](bf16.md)" in page
    assert "skipped. Measured beside" in page  # the docstring, without its indentation
    assert "[fp16](fp16.md)" in tool.rung_page(find_rung("bf16"))
