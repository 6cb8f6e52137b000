"""The one exception a user is meant to see: what is wrong, why, and what to write instead.

raise UserError("unknown rung 'flsh'", "the ladder has no rung of that name", "use one of: tf32, bf16, ...")
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

EXIT_DONE, EXIT_FAILED, EXIT_MISTAKE, EXIT_INTERRUPTED = 0, 1, 2, 130


class UserError(Exception):
    """A mistake the user can fix. The CLI prints three lines and exits with code 2."""

    def __init__(self, problem: str, why: str, fix: str) -> None:
        super().__init__(f"{problem}: {why}. {fix}")
        self.problem, self.why, self.fix = problem, why, fix

    def lines(self) -> tuple[tuple[str, str], ...]:
        return (("problem", self.problem), ("why", self.why), ("fix", self.fix))

    def text(self) -> str:
        """Format the error for a terminal."""
        return "".join(f"{label + ':':9}{' '.join(text.splitlines())}\n" for label, text in self.lines())


class ModelError(UserError):
    """A mistake in the model itself, so that no recipe can be measured."""


class FailedRunError(UserError):
    """A mistake, such as one in a user's file, that ended a running job. The exit code is 1, as for any failed run."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Return the error for an unknown name, with the nearest known one and the whole list."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return UserError(
        f"unknown {kind} {name!r}",
        f"there is no {kind} of that name",
        f"{meant}known: {', '.join(known)}",
    )


@contextmanager
def explained(problem: str, fix: str) -> Iterator[None]:
    """Turn an OSError in the block into a UserError with the system's reason: no such file, no space left."""
    try:
        yield
    except OSError as error:
        raise UserError(problem, error.strerror or str(error), fix) from error
