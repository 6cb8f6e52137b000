"""Source locations with short paths, so that no document carries folders of the machine it was made on.

    short("/home/me/project/model.py:12", roots=("/home/me/project",))          -> "model.py:12"
    short("/opt/venv/lib/python3.12/site-packages/transformers/x.py", roots=()) -> "transformers/x.py"

A path under the working directory becomes relative to it, one in an installed package begins with the package, and
redline's own begin with redline. Others stay whole. A text may contain several.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from redline.core.profile import Profile

PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
# A path does not begin inside another: /mnt/home/me is not /home/me.
BEGINS = r"(?<![\w./~-])"
INSTALLED = re.compile(rf"{BEGINS}/[^\s'\"]*?/(?:site|dist)-packages/")


def short(text: str, roots: Sequence[str] | None = None) -> str:
    """Shorten the paths in a text. `roots`: folders to make them relative to; by default the working directory and the
    folder that redline is installed in."""
    text = INSTALLED.sub("", text)
    for root in (os.getcwd(), PACKAGE_PARENT) if roots is None else roots:
        text = re.sub(BEGINS + re.escape(root.rstrip(os.sep) + os.sep), "", text) if root != os.sep else text
    return text


def with_short_places(profile: Profile) -> Profile:
    """Return the profile for a document: findings and memory lines without folders of this machine."""
    findings = tuple(
        replace(each, file=None if each.file is None else short(each.file), detail=short(each.detail))
        for each in profile.findings
    )
    memory = profile.memory
    if memory is not None:
        memory = replace(memory, lines=tuple(replace(line, file=short(line.file)) for line in memory.lines))
    return replace(profile, findings=findings, memory=memory)
