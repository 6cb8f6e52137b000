"""docs/optimizers.md shows the newest record of benchmarks/optimizers.py, what is not known as a dash."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import pytest

PAGE = "# Optimizers\n\n{begin}\nold\n{end}\n\nThe end.\n"


@pytest.fixture(scope="module")
def tool(repository) -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", repository / "tools" / "generate_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def timed(median):
    seconds = {"median": median, "p10": 0.9 * median, "p90": 1.2 * median, "n": 30}
    return {"seconds": seconds, "adamw-fused": seconds, "ratio": 1.5}


def record_of(date, name="lion", **changes):
    row = {
        "optimizer": name,
        "reason": None,
        "state_bytes": 497_800_000,
        "predicted_state_bytes": 497_759_232,
        "update_bytes": None,
        "predicted_update_bytes": 154_000_000,
        "predicted_seconds": 0.0019,
        "alone": timed(0.004),
        "queued": timed(0.002),
    }
    return {
        "workload": "gpt2",
        "parameters": 124_439_808,
        "hardware": {"name": "NVIDIA H200"},
        "versions": {"torch": "2.11.0"},
        "date": date,
        "optimizers": [{**row, **changes}],
    }


def test_the_newest_record_lies_between_the_markers(tool, tmp_path):
    page = PAGE.format(begin=tool.BEGIN_MEASURED, end=tool.END_MEASURED)
    assert tool.with_measured(page, tmp_path) == page  # no record: nothing is claimed
    for name, date in (("b-optimizers.json", "2026-11-01"), ("a-optimizers-gpt2.json", "2026-11-20")):
        (tmp_path / name).write_text(json.dumps(record_of(date)))
    (tmp_path / "ladder.json").write_text('{"date": "2027-01-01"}')
    found = tool.with_measured(page, tmp_path)
    assert "old" not in found
    assert "gpt2, 124,439,808 parameters, NVIDIA H200, torch 2.11.0, 2026-11-20" in found
    cells = "4.00 (3.60 to 4.80) | 2.00 (1.80 to 2.40) | 1.50 | 1.90 | 497.8 | 497.8 | — | 154.0 |"
    assert f"| `lion` | {cells}\n" in found
    assert found.startswith("# Optimizers")
    assert found.endswith("The end.\n")
    assert tool.with_measured(found, tmp_path) == found


def test_what_could_not_run_is_a_row_with_its_reason(tool):
    without = {"alone": None, "queued": None, "state_bytes": None, "reason": "adamw-8bit needs the package torchao"}
    table = tool.optimizers_table(record_of("2026-11-20", "adamw-8bit", **without))
    assert "| `adamw-8bit` | — | — | — | 1.90 | — | 497.8 | — | 154.0 |" in table
    assert table.endswith("- `adamw-8bit`: adamw-8bit needs the package torchao\n")


def test_the_page_has_the_markers(tool, repository):
    page = (repository / "docs" / "optimizers.md").read_text(encoding="utf-8")
    assert page.count(tool.BEGIN_MEASURED) == page.count(tool.END_MEASURED) == 1
