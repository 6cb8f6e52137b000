"""What a benchmark's record says of where it comes from.

record = {**made(), "versions": versions, "rows": ...}
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from redline.core.host import timestamp


def made() -> dict[str, str]:
    """The command as it is repeated from the repository's folder, and the date."""
    script = Path("benchmarks") / Path(sys.argv[0]).name
    return {
        "command": shlex.join(["python", str(script), *sys.argv[1:]]),
        "date": timestamp(),
    }
