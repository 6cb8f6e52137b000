"""Where a benchmark's record comes from: its command and its date.

record = {**made(), "versions": versions, "rows": ...}
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from redline.core.host import timestamp


def made() -> dict[str, str]:
    """Return the date and the command, as it can be repeated from the repository's folder."""
    script = Path("benchmarks") / Path(sys.argv[0]).name
    return {
        "command": shlex.join(["python", str(script), *sys.argv[1:]]),
        "date": timestamp(),
    }
