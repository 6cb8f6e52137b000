"""`redline report FILE`: the document of a run that is not here, such as the records."""

from __future__ import annotations

import json

import pytest

from redline.cli import main

RECORDS = {
    "2026-11-19-h200-recipe-gpt2-b64-fp8-head.json": ("fp8-head", "685,089", "The ladder"),
    "2026-11-15-h200-tune-gpt2.json": ("sigmoid-gelu", "594", "fused-backward"),
    "2026-11-15-h200-profile-gpt2-b64.json": ("to do first", "594,297", "Where the time goes"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_shown_and_its_page_written(name, repository, tmp_path, capsys):
    path, page = repository / "records" / name, tmp_path / "page.html"
    assert main(["report", str(path), "--html", str(page)]) == 0
    first, second, third = RECORDS[name]
    shown = capsys.readouterr().out
    assert first in shown
    assert second in shown
    assert third in page.read_text(encoding="utf-8")
    assert main(["report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text(encoding="utf-8"))
    assert list(tmp_path.iterdir()) == [page]


def test_a_row_that_is_different_is_told_by_the_exit_code(repository, tmp_path, capsys):
    document = json.loads((repository / "records" / next(iter(RECORDS))).read_text(encoding="utf-8"))
    document["rows"][-1]["equivalence"]["verdict"] = "different"
    (tmp_path / "x.json").write_text(json.dumps(document))
    assert main(["report", str(tmp_path / "x.json")]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize("name", RECORDS)
def test_a_document_with_a_part_missing_has_no_traceback(name, repository, tmp_path, capsys):
    document = json.loads((repository / "records" / name).read_text(encoding="utf-8"))
    for part in document:
        (tmp_path / "x.json").write_text(json.dumps({key: value for key, value in document.items() if key != part}))
        code = main(["report", str(tmp_path / "x.json")])
        said = capsys.readouterr().err
        assert code == 0 or (code == 2 and said.startswith("problem: ")), (part, said)


@pytest.mark.parametrize(
    ("text", "words", "problem"),
    [
        ("{}", (), "is no document of a ladder, a tune or a profile"),
        ("{", (), "is no results document"),
        ("[" * 100_000, (), "is no results document"),
        ("{}", ("--serve",), "--serve with a file"),
        ("{}", ("--rung", "bf16"), "--rung with one run"),
    ],
)
def test_what_cannot_be_shown_says_so(text, words, problem, tmp_path, capsys):
    path = tmp_path / "some.json"
    path.write_text(text)
    assert main(["report", str(path), *words]) == 2
    assert problem in capsys.readouterr().err
