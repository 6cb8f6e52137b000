"""The Python API without torch: functions as workloads, documents as dicts, tables and pages, lazy names."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import sys
from html import escape, unescape
from types import ModuleType

import pytest

import redline
from redline.api.arguments import ARGUMENTS, COUNT, NUMBER, in_python
from redline.api.document import SHOWN, Document
from redline.api.factory import typed_workload
from redline.core.errors import UserError
from redline.report.hardware import known_lines, machine_lines
from redline.report.notebook import render_prepared_page

SUMMARY = {
    "device": "a CPU <b>",
    "steps": 8,
    "warmup_steps": 3,
    "tokens_per_step": 64,
    "step_seconds": {"median": 0.5, "p10": 0.25, "p90": 1.0, "n": 5},
    "tokens_per_second": 128.0,
    "tokens_per_second_p10": 64.0,
    "tokens_per_second_p90": 256.0,
    "flops_per_step": None,
    "mfu": None,
    "mfu_convention": "no MFU: <script>alert(1)</script>",
    "peak_bytes": 3 * 1024**3,
    "data_wait_share": 0.25,
    "syncs_per_step": 2.0,
    "syncs": [{"kind": "synchronisation", "detail": "x", "file": "loop.py", "line": 7, "per_step": 2.0}],
}


def build():
    """Stands for a function of a user's file."""


def page_in(html: str) -> str:
    """What the frame of a notebook shows."""
    start = html.index('srcdoc="') + len('srcdoc="')
    return unescape(html[start : html.index('"', start)])


# functions as workloads


def test_a_function_of_a_file_becomes_its_words():
    assert typed_workload(build, "redline.ladder") == f"{__file__}:build"


@pytest.mark.parametrize("words", [None, "gpt2", "model.py:build"])
def test_words_stay_as_they_are(words):
    assert typed_workload(words, "redline.ladder") == words


def defined_in_a_notebook():
    space: dict[str, object] = {"__name__": "__main__"}
    exec(compile("def build(): pass", "<ipython-input-1-abc>", "exec"), space)
    return space["build"]


def inside_another():
    def build():
        pass

    return build


REFUSED = {
    "lambda": (lambda: None, "a lambda", "it has no name"),
    "inside another": (inside_another(), "build, a function inside another", "cannot reach it"),
    "notebook": (defined_in_a_notebook(), "build, which is in no file", "<ipython-input-1-abc>"),
}


@pytest.mark.parametrize(("function", "what", "why"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("command", ["ladder", "tune"])
def test_a_function_that_no_other_process_can_find_is_refused(command, function, what, why):
    with pytest.raises(UserError) as caught:
        getattr(redline, command)(function)
    assert caught.value.problem == f"the model is built by {what}"
    assert why in caught.value.why
    assert "def build(): return MyModel()" in caught.value.fix


def test_a_function_whose_name_means_something_else_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "build", typed_workload)
    with pytest.raises(UserError, match="calls something else"):
        typed_workload(REAL_BUILD, "redline.ladder")


REAL_BUILD = build


def test_a_class_is_refused():
    with pytest.raises(UserError, match=r"redline.tune was given a type.*takes a workload's name"):
        redline.tune(UserError)


@pytest.mark.parametrize("function", [redline.lint, redline.estimate], ids=["lint", "estimate"])
def test_lint_and_estimate_take_a_module_above_all(function):
    with pytest.raises(UserError) as caught:
        function(3)
    assert caught.value.problem == f"redline.{function.__name__} was given an int"
    assert caught.value.why.startswith("it takes a module, a workload's name")
    assert caught.value.fix == f"pass the model itself: redline.{function.__name__}(model)"


# documents


@pytest.fixture
def found() -> Document:
    return redline.lint("gpt2", gpu="H200")


def test_a_document_is_its_dict(found):
    assert isinstance(found, dict)
    plain = json.loads(json.dumps(found))
    assert type(plain) is dict
    assert found == plain
    assert {**found} == found


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_keep_content_and_kind(found, way):
    again = way(found)
    assert again == found
    assert type(again) is Document
    assert again.kind == "lint"


def documents() -> dict[str, Document]:
    return {
        "lint": redline.lint("gpt2", gpu="H200"),
        "estimate": redline.estimate("gpt2", gpu="H200", rungs="none"),
        "estimate without a device": redline.estimate("tiny", rungs="none"),
        "hardware": redline.hardware("NVIDIA L40S"),
        "this machine": redline.hardware(),
        "meter": Document(SUMMARY, kind="meter"),
    }


@pytest.fixture(scope="module")
def shown() -> dict[str, Document]:
    return documents()


NAMES = ("lint", "estimate", "estimate without a device", "hardware", "this machine", "meter")
# A figure that both the table and the page must show, worked out or taken from the document's own fields.
FIGURES = {
    "lint": lambda one: one["findings"][0]["fix"].split(":")[0],
    "estimate": lambda one: f"{one['parameters']:,}",
    "estimate without a device": lambda one: f"{one['parameters']:,}",
    "hardware": lambda one: "362.1",  # bf16 of the L40S
    "this machine": lambda one: one["this"]["name"].split("(")[0],
    "meter": lambda one: "128",
}


@pytest.mark.parametrize("name", NAMES)
def test_print_shows_the_table_of_the_terminal(shown, name):
    text = str(shown[name])
    assert " ".join(FIGURES[name](shown[name]).split()) in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_shows_a_page_that_loads_nothing(shown, name):
    bundle = shown[name]._repr_mimebundle_()
    assert bundle["text/plain"] == str(shown[name])
    html = bundle["text/html"]
    assert html == shown[name]._repr_html_()
    assert html.startswith("<iframe sandbox srcdoc=")
    assert html.count("<") == 2  # the frame and its end: all of the page is escaped
    page = page_in(html)
    assert FIGURES[name](shown[name]) in page
    assert "src=" not in page
    assert "<link" not in page


@pytest.mark.parametrize("name", ["lint", "estimate", "hardware", "meter"])
def test_a_page_has_charts(shown, name):
    assert "<svg" in page_in(shown[name]._repr_html_())


@pytest.mark.parametrize("name", ["hardware", "this machine"])
def test_a_device_is_a_table(shown, name):
    """Also one that nothing was measured of."""
    page = page_in(shown[name]._repr_html_())
    table = page[page.index("The device</h2>") :].partition("</table>")[0]
    lines = dict((*machine_lines(shown[name]["this"]), *known_lines(shown[name]["known"])))
    assert lines
    assert all(
        f'<th scope="row">{escape(about)}</th>' in table and escape(text) in table for about, text in lines.items()
    )


def test_what_prepare_did_is_a_table():
    done, left_out = [("bf16", "16 bits")], [("flash", "no <call> of it")]
    page = render_prepared_page(name="Net", device="cpu", done=done, left_out=left_out, said=["a rate of 1"])
    rows = [row.partition("</tr>")[0] for row in page.split("<tbody><tr>")[1:]]
    assert [row.count("<td") for row in rows] == [2, 2]
    assert all(word in rows[0] for word in ("bf16", ">done<", "16 bits"))
    assert all(word in rows[1] for word in ("flash", ">left out<", "no &lt;call&gt; of it"))
    assert "a rate of 1" in page
    assert "nothing, the recipe is the baseline" in render_prepared_page(
        name="Net", device="cpu", done=[], left_out=[], said=[]
    )


def test_text_from_outside_stays_text(shown):
    page = page_in(shown["meter"]._repr_html_())
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script>alert(1)" not in page
    assert "a CPU &lt;b&gt;" in page


def test_what_is_not_known_is_a_dash():
    blank = {name: None if name in ("step_seconds", "tokens_per_second") else value for name, value in SUMMARY.items()}
    blank |= dict.fromkeys(("tokens_per_second_p10", "tokens_per_second_p90", "data_wait_share", "syncs"))
    blank["syncs_per_step"] = None
    text = str(Document(blank, kind="meter"))
    rates = next(line for line in text.splitlines() if line.startswith("tokens/s"))
    assert rates.split() == ["tokens/s", "—", "—", "—"]
    assert page_in(Document(blank, kind="meter")._repr_html_())


def test_the_memory_of_an_estimate_adds_up_in_its_page(shown):
    """The page's table is the terminal's: the same figures."""
    page = page_in(shown["estimate"]._repr_html_())
    from redline.report.estimate import memory_table

    for cell in memory_table(shown["estimate"]).columns[2].cells:
        assert f">{cell}</td>" in page


RECORDS = {"ladder": "2026-11-15-h200-ladder-gpt2-b16.json", "tune": "2026-11-15-h200-tune-gpt2.json"}


@pytest.mark.parametrize("kind", RECORDS)
def test_records_of_runs_are_shown_as_their_pages(repository, kind):
    recorded = json.loads((repository / "records" / RECORDS[kind]).read_text())
    found = Document(recorded, kind=kind)
    assert found == recorded
    rate = f"{recorded['best']['tokens_per_second']:,.0f}"
    assert rate in str(found)
    assert rate in page_in(found._repr_html_())
    assert "<svg" in page_in(found._repr_html_())


def test_a_failed_profile_says_why():
    failed = Document({"status": "failed", "reason": "out of memory"}, kind="profile")
    assert str(failed) == "nothing to show, profile failed: out of memory"
    assert "out of memory" in page_in(failed._repr_html_())


def test_every_kind_has_what_shows_it():
    for table, page in SHOWN.values():
        for name in (table, page):
            module, function = name.split(".")
            __import__(f"redline.report.{module}")
            found = sys.modules[f"redline.report.{module}"]
            assert isinstance(found, ModuleType)
            assert callable(getattr(found, function))


# names


def test_every_public_name_is_there_and_nothing_else():
    for name in redline.__all__:
        if name not in ("Meter", "Prepared"):  # these import torch: tests/cpu has them
            assert getattr(redline, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Metre'"):
        redline.Metre  # noqa: B018


def test_arguments_that_would_be_ignored_are_mistakes():
    with pytest.raises(UserError, match="redline.profile was given batches: a workload brings its own. drop batches"):
        redline.profile("tiny", batches=[1])
    with pytest.raises(UserError, match=r"redline.profile was given rungs.*drop rungs"):
        redline.profile(lambda: None, rungs="none")


# arguments

FUNCTIONS = {name: getattr(redline, name) for name in ("ladder", "tune", "estimate", "lint", "hardware", "profile")}
NUMBERS = {name for name, kind in ARGUMENTS.items() if kind in (COUNT, NUMBER)}
WRONG = [
    pytest.param(function, name, value, id=f"{function}-{name}-{type(value).__name__}")
    for function, called in FUNCTIONS.items()
    for name in inspect.signature(called).parameters
    for value in (object(), *(["8"] if name in NUMBERS else []))
]


@pytest.mark.parametrize(("function", "name", "value"), WRONG)
def test_an_argument_of_another_type_is_a_mistake_in_words(function, name, value):
    with pytest.raises(UserError) as caught:
        FUNCTIONS[function](**({"workload": "tiny"} if function != "hardware" else {}) | {name: value})
    assert name in caught.value.problem or "object" in caught.value.problem
    assert "--" not in str(caught.value)


def test_every_argument_has_a_kind_or_is_looked_at_where_it_is_taken():
    names = {name for called in FUNCTIONS.values() for name in inspect.signature(called).parameters}
    assert names - set(ARGUMENTS) == {"workload", "batch", "model"}


@pytest.mark.parametrize("names", [["bf16", "flash"], ("bf16", "flash"), "bf16,flash"], ids=["list", "tuple", "text"])
def test_names_come_in_a_list_or_with_commas(names):
    found = redline.estimate("gpt2", gpu="H200", rungs=names)
    assert found["settings"]["rungs"] == ["bf16", "flash"]
    assert redline.estimate("gpt2", gpu="H200", rungs=[])["settings"]["rungs"] == []
    with pytest.raises(UserError, match="unknown rung 'flsh'"):
        redline.ladder("tiny", rungs=["flsh"])


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("--minutes is 0", "minutes is 0"),
        ("set --micro-batch to 1", "set micro_batch to 1"),
        ("climb without --from", "climb without start"),
        ("see `redline tune --minutes 8`, or --minutes", "see `redline tune --minutes 8`, or minutes"),
        ("--unknown-word stays, and so does a--minutes", "--unknown-word stays, and so does a--minutes"),
    ],
    ids=["alone", "dashes", "from", "command", "others"],
)
def test_options_go_by_the_arguments_name(text, spoken):
    assert in_python(text, {"minutes", "micro_batch", "start"}) == spoken


def test_a_value_that_is_refused_is_refused_in_python_s_words():
    with pytest.raises(UserError) as caught:
        redline.tune("tiny", minutes=0)
    assert caught.value.problem == "minutes is 0"
    with pytest.raises(UserError) as caught:
        redline.ladder("tiny", micro_batch=0)
    assert caught.value.fix == "set micro_batch to 1 or more"
