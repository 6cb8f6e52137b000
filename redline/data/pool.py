"""The parts of a text, worked through by several processes, with a count of how far they are.

    for result in work_through(partial(make_task, order), parts, todo=[0, 1, 2], processes=4, meter=meter): ...

Every process calls `make_task()` once and then `task(number, part, tell)` for each part it is handed; what that returns
comes out here, in whatever order parts are finished. A mistake in the text comes out as the UserError it was. Used by
`prepare` and by `survey`. No torch here.
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
    """Where the work stands. Parts that an earlier run had finished are done, but nobody waited for them now."""

    bytes_total: int
    bytes_kept: int = 0
    bytes_done: int = 0
    """Of the files, since this run began."""
    text_bytes: int = 0
    """Of UTF-8, unpacked, since this run began."""
    documents: int = 0
    tokens: int = 0
    parts: int = 0
    parts_done: int = 0
    seconds: float = 0.0


OnProgress = Callable[[Progress], None]
Task = Callable[[int, Part, OnProgress], T]


def unheard(progress: Progress) -> None:
    """For whoever asks for no progress."""


@final
class Meter:
    """Adds up what the workers tell, and passes it on."""

    def __init__(self, parts: Sequence[Part], size: int, kept: Sequence[int], tell: OnProgress) -> None:
        """`kept` are the parts that were finished before."""
        self._tell, self._started = tell, time.monotonic()
        done = sum(span.size for number in kept for span in parts[number])
        self.now = Progress(bytes_total=size, bytes_kept=done, parts=len(parts), parts_done=len(kept))
        self._tell(self.now)

    def add(self, step: Progress) -> None:
        """A step holds only what is new."""
        names = ("bytes_done", "text_bytes", "documents", "tokens", "parts_done")
        sums = {name: getattr(self.now, name) + getattr(step, name) for name in names}
        self.now = replace(self.now, **sums, seconds=time.monotonic() - self._started)
        self._tell(self.now)


@final
class Pulse:
    """What a worker tells of its work, a few times a second."""

    def __init__(self, tell: OnProgress) -> None:
        self._tell, self._last = tell, time.monotonic()
        self._step = [0, 0, 0, 0]  # bytes done, text bytes, documents, tokens: a list, since this runs per document
        self.documents = self.text_bytes = 0

    def count(self, piece: Piece, text_bytes: int, tokens: int) -> None:
        """`tokens` without the end of text that may follow."""
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
        self._tell(Progress(bytes_total=0, **dict(zip(names, self._step, strict=True))))
        self._step, self._last = [0, 0, 0, 0], time.monotonic()


# the parent


@dataclass
class Worker:
    process: Any
    part: int = -1


def work_through(
    make_task: Callable[[], Task[T]], parts: Sequence[Part], *, todo: Sequence[int], processes: int, meter: Meter
) -> Generator[T, None, None]:
    """Results as they come. Every process is ended, however this ends; close the generator if you leave it early."""
    # Spawned, not forked: this process has threads (the progress bar), and a worker needs no more than its imports.
    context = multiprocessing.get_context("spawn")
    crew: dict[Connection, Worker] = {}
    try:
        for _ in range(min(processes, len(todo))):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, make_task), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
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
    """The next part, or the way home."""
    number = next(queue, None)
    try:
        connection.send(None if number is None else (number, parts[number]))
    except OSError as error:  # it died before it was asked anything
        raise died(crew[connection], parts, number) from error
    if number is None:
        crew.pop(connection).process.join()
        connection.close()
    else:
        crew[connection].part = number


def listen(connection: Connection, worker: Worker, parts: Sequence[Part]) -> tuple[str, Any]:
    """'step' and what is new, or 'done' and what a part came to."""
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
        f"a worker was ended from outside ({how_it_ended(worker.process)})",
        f"it was at {describe(parts[number])}" if number is not None else "it had nothing to do",
        "SIGKILL is mostly a lack of memory (fewer --processes need less), SIGBUS a file that shrank while it was "
        "read; start the same command again: `data prepare` goes on from the parts that are finished",
    )


def describe(part: Part) -> str:
    more = len(part) - 1
    return part[0].file.path + (f" and {more} more file{'s' if more > 1 else ''}" if more else "")


# a worker


def work(connection: Connection, make_task: Callable[[], Task[Any]]) -> None:
    """Part after part, until told to go. Ctrl-C is the parent's business: it reaches every process of the terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    task = make_task()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):  # the parent has gone: nobody to tell
        while (given := connection.recv()) is not None:
            number, part = given
            try:
                connection.send(("done", task(number, part, lambda step: connection.send(("step", step)))))
            except UserError as error:
                connection.send(("mistake", (error.problem, error.why, error.fix)))
            except Exception:
                connection.send(("crash", traceback.format_exc()))
