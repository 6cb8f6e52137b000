"""Several processes that work through the parts of a text and report their progress.

    for result in work_through(partial(make_task, order), parts, todo=[0, 1, 2], processes=4, meter=meter): ...

Every process calls `make_task()` once and then `task(number, part, on_progress)` for each part it is handed. Results
are yielded in the order in which parts finish. A mistake in the text is raised as the UserError it was. `prepare` and
`survey` use this. No torch here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast, final

from redline.core.errors import UserError
from redline.data.sources import Part, Piece
from redline.data.workers import end_with_parent, how_it_ended

REPORT_SECONDS = 0.25

T = TypeVar("T")


@final
@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the work is. Parts finished by an earlier run count in `parts_done` and `bytes_kept` only."""

    bytes_total: int
    bytes_kept: int = 0
    bytes_done: int = 0
    """Bytes of the files, since this run began."""
    text_bytes: int = 0
    """Bytes of UTF-8, unpacked, since this run began."""
    documents: int = 0
    tokens: int = 0
    parts: int = 0
    parts_done: int = 0
    seconds: float = 0.0


OnProgress = Callable[[Progress], None]
Task = Callable[[int, Part, OnProgress], T]


def unheard(progress: Progress) -> None:
    """Ignore the progress."""


@final
class Meter:
    """Adds up what the workers report, and passes on the totals."""

    def __init__(self, parts: Sequence[Part], size: int, kept: Sequence[int], on_progress: OnProgress) -> None:
        """`kept` are the parts that an earlier run finished."""
        self._on_progress, self._started = on_progress, time.monotonic()
        done = sum(span.size for number in kept for span in parts[number])
        self.now = Progress(bytes_total=size, bytes_kept=done, parts=len(parts), parts_done=len(kept))
        self._on_progress(self.now)

    def add(self, step: Progress) -> None:
        """Add a step, which holds only what is new."""
        names = ("bytes_done", "text_bytes", "documents", "tokens", "parts_done")
        sums = {name: getattr(self.now, name) + getattr(step, name) for name in names}
        self.now = replace(self.now, **sums, seconds=time.monotonic() - self._started)
        self._on_progress(self.now)


@final
class Pulse:
    """A worker's progress, reported a few times a second."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress, self._last = on_progress, time.monotonic()
        self._step = [0, 0, 0, 0]  # bytes done, text bytes, documents, tokens: a list, since this runs per document
        self.documents = self.text_bytes = 0

    def count(self, piece: Piece, text_bytes: int, tokens: int) -> None:
        """Count a piece; `tokens` does not include the end of text that may follow it."""
        self._step[0] += piece.passed
        self._step[1] += text_bytes
        self._step[2] += piece.ends
        self._step[3] += tokens + piece.ends
        self.text_bytes += text_bytes
        self.documents += piece.ends
        if time.monotonic() - self._last > REPORT_SECONDS:
            self.send()

    def send(self) -> None:
        names = ("bytes_done", "text_bytes", "documents", "tokens")
        self._on_progress(Progress(bytes_total=0, **dict(zip(names, self._step, strict=True))))
        self._step, self._last = [0, 0, 0, 0], time.monotonic()


# the parent


@dataclass
class Worker:
    process: Any
    part: int = -1


def work_through(
    make_task: Callable[[], Task[T]], parts: Sequence[Part], *, todo: Sequence[int], processes: int, meter: Meter
) -> Generator[T, None, None]:
    """Yield results as they come. Every process is ended however this ends; close the generator if you leave early."""
    # Spawned, not forked: this process has threads (the progress bar), and a worker needs no more than its imports.
    context = multiprocessing.get_context("spawn")
    crew: dict[Connection, Worker] = {}
    try:
        for _ in range(min(processes, len(todo))):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, make_task), daemon=True)
            process.start()
            theirs.close()  # so that the pipe ends with the process
            crew[ours] = Worker(process=process)
        queue = iter(todo)
        for connection in list(crew):
            hand_out(connection, crew, queue, parts)
        while crew:
            for ready in wait(list(crew)):
                connection = cast(Connection, ready)
                kind, content = listen(connection, crew[connection], parts)
                if kind == "step":
                    meter.add(content)
                else:
                    yield content
                    meter.add(Progress(bytes_total=0, parts_done=1))
                    hand_out(connection, crew, queue, parts)
    finally:
        for connection, worker in crew.items():
            worker.process.terminate()
            worker.process.join()
            connection.close()


def hand_out(
    connection: Connection, crew: dict[Connection, Worker], queue: Iterator[int], parts: Sequence[Part]
) -> None:
    """Send a worker its next part, or end it if there is none."""
    number = next(queue, None)
    try:
        connection.send(None if number is None else (number, parts[number]))
    except OSError as error:  # it died before it was handed this part
        raise died(crew[connection], parts, number) from error
    if number is None:
        crew.pop(connection).process.join()
        connection.close()
    else:
        crew[connection].part = number


def listen(connection: Connection, worker: Worker, parts: Sequence[Part]) -> tuple[str, Any]:
    """Return ('step', what is new) or ('done', a part's result)."""
    try:
        kind, content = connection.recv()
    except (EOFError, OSError) as error:
        raise died(worker, parts, worker.part) from error
    if kind == "mistake":
        raise UserError(*content)
    if kind == "crash":
        raise RuntimeError(f"a worker failed at {describe(parts[worker.part])}\n{content}")
    return kind, content


def died(worker: Worker, parts: Sequence[Part], number: int | None) -> UserError:
    return UserError(
        f"a worker process ended early ({how_it_ended(worker.process)})",
        f"it was at {describe(parts[number])}" if number is not None else "it was idle",
        "SIGKILL is mostly a lack of memory (fewer --processes need less), SIGBUS a file that shrank while it was "
        "read; start the same command again: `data prepare` goes on from the parts that are finished",
    )


def describe(part: Part) -> str:
    more = len(part) - 1
    return part[0].file.path + (f" and {more} more file{'s' if more > 1 else ''}" if more else "")


# a worker


def work(connection: Connection, make_task: Callable[[], Task[Any]]) -> None:
    """Work on part after part until told to leave. Ctrl-C, which reaches every process, is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    task = make_task()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):  # the parent is gone
        while (given := connection.recv()) is not None:
            number, part = given
            try:
                connection.send(("done", task(number, part, lambda step: connection.send(("step", step)))))
            except UserError as error:
                connection.send(("mistake", (error.problem, error.why, error.fix)))
            except Exception:
                connection.send(("crash", traceback.format_exc()))
