"""Paths in documents: told from the user's folder or from a package, and never cut in the middle."""

from __future__ import annotations

import pytest

from redline.core.places import PACKAGE_PARENT, short

ROOTS = ("/home/me/project", "/home/me")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/home/me/project/model.py:12", "model.py:12"),
        ("/home/me/other/model.py", "other/model.py"),
        ("mend /home/me/project/a.py:1, /home/me/project/b.py:2", "mend a.py:1, b.py:2"),
        ("in '/home/me/project/a.py'", "in 'a.py'"),
        ("/mnt/home/me/project/model.py", "/mnt/home/me/project/model.py"),
        ("/home/me/project-2/model.py", "project-2/model.py"),
        ("/home/me/project/.venv/lib/python3.12/site-packages/torch/x.py", "torch/x.py"),
        ("/usr/lib/python3/dist-packages/numpy/x.py", "numpy/x.py"),
        ("/srv/code/model.py", "/srv/code/model.py"),
        ("no path", "no path"),
    ],
    ids=["inside", "beside", "several", "quoted", "mounted", "longer", "installed", "debian", "elsewhere", "none"],
)
def test_a_path_is_told_from_where_it_is_known(text, words):
    assert short(text, ROOTS) == words


def test_the_working_directory_and_redline_are_the_roots(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert short(f"{tmp_path}/model.py") == "model.py"
    assert short(f"{PACKAGE_PARENT}/redline/model/gpt.py") == "redline/model/gpt.py"


def test_the_root_of_all_folders_is_none():
    assert short("/etc/x.py", ("/",)) == "/etc/x.py"
