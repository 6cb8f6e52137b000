"""Batches straight from text, without preparation: read, tokenised and packed while the model trains.

    stream = TextStream(open_text(run / "text").source, seed=1337, micro_batch=16, sequence=1024, device=device)
    batch = next(stream)                                                    # [2, B, T] on the device
    state = stream.state();  stream.resume(state)                           # plain JSON; continues with the next batch

The parts of the text, in an order decided by seed and epoch, are dealt to the ranks, and a rank's parts to 16 lanes.
The tokens of a run are CHUNK_TOKENS of each lane in turn; a lane that has ended is skipped, and when all have ended,
the next epoch begins. It does not matter which process works for which lane: any number of workers yields the same
batches. In an epoch every part is read once, by one rank, and every token is an input once. A data set prepared with
`redline data prepare` is shuffled better (any window may come next) and costs no cores while training.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import traceback
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple, final

import numpy
import torch

from redline.core.errors import UserError, unknown_name
from redline.core.values import to_json
from redline.core.workload import check_positive
from redline.data.batches import copy_ahead, worker_context
from redline.data.loader import Permutation
from redline.data.sources import Part, Piece, read_part
from redline.data.survey import TextSource
from redline.data.tokenizer import tokenizer
from redline.data.tokens import token_dtype
from redline.data.workers import end_with_parent, how_it_ended, outlive_signals

LANES = 16  # texts that are open at a time; more workers than this have nothing to do
CHUNK_TOKENS = 2048  # of one lane before the next one's turn: a batch holds several texts, a window mostly one
LEAVE_SECONDS = 1.0
SPLITS = ("train", "val", "all")


class Place(NamedTuple):
    """Where a lane is: in which of its parts, in which piece of that, and how many tokens in. Past the last part, it
    has ended."""

    part: int = 0
    piece: int = 0
    token: int = 0


class Chunk(NamedTuple):
    lane: int
    tokens: numpy.ndarray
    after: Place
    """Where the lane is after these tokens."""
    passed: int
    """Bytes of the files that the lane has used up since its previous chunk."""
    ends: bool
    """True if the lane has nothing left in this epoch; such a chunk holds no tokens."""


@final
@dataclass(frozen=True, kw_only=True)
class Moment:
    """Where the whole stream is between two chunks."""

    epoch: int
    turn: int
    """The lane whose chunk is next."""
    places: tuple[Place, ...]
    ended: tuple[bool, ...]
    passed: int = 0
    """Bytes of the files used up in this epoch."""


START = Moment(epoch=0, turn=0, places=(Place(),) * LANES, ended=(False,) * LANES)


@final
@dataclass(frozen=True, kw_only=True)
class Text:
    """What a worker must know; the same for all workers of a rank."""

    source: TextSource
    seed: int
    rank: int
    ranks: int
    split: str

    def parts_of(self, epoch: int, lane: int) -> list[Part]:
        return [self.source.parts[number] for number in self.numbers_of(epoch)[lane::LANES]]

    def bytes_of(self, epoch: int) -> int:
        """Return the bytes of the files that this rank reads in an epoch; those on the hub count 0, being unknown."""
        return sum(span.size for number in self.numbers_of(epoch) for span in self.source.parts[number])

    def numbers_of(self, epoch: int) -> numpy.ndarray:
        count = len(self.source.parts)
        order = Permutation(size=count, seed=self.seed, epoch=epoch).at(numpy.arange(count))
        return order[self.rank :: self.ranks]

    def wants(self, piece: Piece) -> bool:
        return self.split == "all" or self.source.is_val(piece) == (self.split == "val")

    def fingerprint(self) -> str:
        """Hash everything that decides which tokens come when; a state is valid only with the same fingerprint."""
        choices = [self.seed, self.rank, self.ranks, self.split, LANES, CHUNK_TOKENS]
        return hashlib.sha256(json.dumps([self.source.fingerprint, *choices]).encode()).hexdigest()[:32]


# lanes


def rotate(moment: Moment, lanes: Sequence[int]) -> tuple[int, list[int]]:
    """Return whose turn it is among these lanes, and which of them have not ended."""
    alive = [lane for lane in lanes if not moment.ended[lane]]
    return next_lane(alive, moment.turn), alive


def next_lane(alive: Sequence[int], lane: int) -> int:
    """Return the first of these lanes from `lane` on, cyclically. Any choice of lanes keeps the order of them all."""
    return min(alive, key=lambda other: (other - lane) % LANES, default=0)


def read_lane(text: Text, lane: int, parts: list[Part], start: Place) -> Iterator[Chunk]:
    """Yield the chunks of one lane to the end of an epoch."""
    encoder = tokenizer(text.source.tokenizer.name)
    end = numpy.array([encoder.end_of_text], dtype=numpy.uint32)
    none = numpy.empty(0, token_dtype(encoder.vocab))
    gathered: list[numpy.ndarray] = []
    room, passed = CHUNK_TOKENS, 0
    for number, count, piece in pieces_from(text, parts, start):
        if not text.wants(piece):
            passed += piece.passed
            continue
        ids = encoder.encode(piece.text)
        ids = (numpy.append(ids, end) if piece.ends else ids).astype(none.dtype)
        taken = start.token if (number, count) == (start.part, start.piece) else 0
        while taken < len(ids):
            some = ids[taken : taken + room]
            passed += share(piece.passed, taken + len(some), len(ids)) - share(piece.passed, taken, len(ids))
            gathered.append(some)
            taken, room = taken + len(some), room - len(some)
            if room == 0:
                yield Chunk(lane, numpy.concatenate(gathered), Place(number, count, taken), passed, False)
                gathered, room, passed = [], CHUNK_TOKENS, 0
    if gathered:
        yield Chunk(lane, numpy.concatenate(gathered), Place(len(parts)), passed, False)
    yield Chunk(lane, none, Place(len(parts)), 0 if gathered else passed, True)


def pieces_from(text: Text, parts: list[Part], start: Place) -> Iterator[tuple[int, int, Piece]]:
    """Yield the pieces from `start` on, each with the number of its part and its own number there. Earlier pieces of
    the first part are read again, but not encoded."""
    for number in range(start.part, len(parts)):
        for count, piece in enumerate(read_part(parts[number], text.source.reading)):
            if (number, count) >= (start.part, start.piece):
                yield number, count, piece


def lane_chunks(text: Text, moment: Moment, lanes: Sequence[int]) -> Iterator[Chunk]:
    """Yield the chunks of these lanes in turn, epoch after epoch without end."""
    epoch = moment.epoch
    lane, alive = rotate(moment, lanes)
    places = moment.places
    while True:
        readers = {each: read_lane(text, each, text.parts_of(epoch, each), places[each]) for each in alive}
        while alive:
            chunk = next(readers[lane])
            yield chunk
            if chunk.ends:
                alive.remove(lane)
            lane = next_lane(alive, lane + 1)
        epoch, places, alive, lane = epoch + 1, START.places, list(lanes), min(lanes)


def share(size: int, done: int, total: int) -> int:
    """Return `done / total` of the size in whole bytes, so that the differences between shares add up to the size."""
    return size * done // total


# workers


def work(connection: Connection, text: Text, moment: Moment, lanes: Sequence[int]) -> None:
    """Send chunk after chunk into the pipe, whose buffer limits how far a worker runs ahead."""
    outlive_signals()
    end_with_parent()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the trainer has closed the pipe
        try:
            for chunk in lane_chunks(text, moment, lanes):
                connection.send(chunk)
        except UserError as error:
            connection.send((error.problem, error.why, error.fix))
        except Exception:
            connection.send(traceback.format_exc())


@final
class Crew:
    """Hands out chunks by lane, from worker processes, or from this process if there are no workers."""

    def __init__(self, text: Text, moment: Moment, workers: int) -> None:
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._here = lane_chunks(text, moment, range(LANES)) if workers == 0 else None
        context = worker_context() if workers else None
        for number in range(min(workers, LANES)):
            assert context is not None
            lanes = range(number, LANES, min(workers, LANES))
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, text, moment, lanes), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def take(self, lane: int) -> Chunk:
        if self._here is not None:
            return next(self._here)
        number = lane % len(self._connections)
        try:
            found = self._connections[number].recv()
        except (EOFError, OSError) as error:
            how = how_it_ended(self._processes[number])
            raise RuntimeError(f"a process that reads the text has ended ({how})") from error
        if isinstance(found, Chunk):
            return found
        if isinstance(found, str):
            raise RuntimeError(f"a process that reads the text has failed\n{found}")
        raise UserError(*found)

    def close(self) -> None:
        """End the workers. One whose pipe is closed leaves by itself and releases what its libraries hold; one that is
        still busy with its text after LEAVE_SECONDS is killed."""
        for connection in self._connections:
            connection.close()
        until = time.monotonic() + LEAVE_SECONDS
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()
        self._connections, self._processes = [], []


# batches


@final
class TextStream:
    """An endless iterator over this rank's batches on the device; waiting is timed. Close it to end the workers."""

    def __init__(
        self,
        source: TextSource,
        *,
        seed: int,
        micro_batch: int,
        sequence: int,
        device: torch.device,
        workers: int = 2,
        rank: int = 0,
        ranks: int = 1,
        split: str = "train",
    ) -> None:
        for name, value in (("micro_batch", micro_batch), ("sequence", sequence), ("ranks", ranks)):
            check_positive(name, value)
        if split not in SPLITS:
            raise unknown_name("split", split, SPLITS)
        self._text = Text(source=source, seed=seed, rank=rank, ranks=ranks, split=split)
        self._check_ranks()
        self._micro_batch, self._sequence, self._device, self._workers = micro_batch, sequence, device, workers
        self._fingerprint = self._text.fingerprint()
        self.waited_seconds = 0.0
        """Seconds that callers of next() have spent waiting, including the workers' start."""
        self.documents = 0
        """Documents that have ended in the batches since this object was made; resuming does not reset it."""
        self._epoch_bytes = (0, self._text.bytes_of(0))
        self._batches: Generator[torch.Tensor, None, None]
        self._begin(START, 0)

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> torch.Tensor:
        started = time.perf_counter()
        batch: torch.Tensor = next(self._batches)
        self.waited_seconds += time.perf_counter() - started
        self._now, documents = self._sent.popleft()
        self.documents += documents
        return batch

    def state(self) -> dict[str, Any]:
        """Return plain JSON with which `resume` continues with the batch that would have come next."""
        moment, taken = self._now
        return {"of": self._fingerprint, "moment": to_json(moment), "taken": taken}

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from a state of the same text, options and number of ranks; workers and batch may differ."""
        if state.get("of") != self._fingerprint:
            raise UserError(
                "this is the state of another stream",
                "the files, the options, the seed, the tokenizer or the ranks are not those it was taken with",
                "resume with what the run began with, or begin anew",
            )
        found = state["moment"]
        moment = Moment(
            epoch=found["epoch"],
            turn=found["turn"],
            places=tuple(Place(*place) for place in found["places"]),
            ended=tuple(found["ended"]),
            passed=found["passed"],
        )
        self.close()
        self._begin(moment, state["taken"])

    @property
    def epoch(self) -> float:
        """The position in epochs, by the bytes of this rank's files: 1.5 is half-way through the second. An int if no
        size is known."""
        moment = self._now[0]
        if self._epoch_bytes[0] != moment.epoch:
            self._epoch_bytes = moment.epoch, self._text.bytes_of(moment.epoch)
        total = self._epoch_bytes[1]
        return moment.epoch + min(1.0, moment.passed / total) if total else moment.epoch

    def close(self) -> None:
        self._batches.close()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, moment: Moment, taken: int) -> None:
        self._now = (moment, taken)
        # The states and document counts of batches that are made but not yet handed out: on a GPU one is always ahead.
        self._sent: deque[tuple[tuple[Moment, int], int]] = deque()
        self._batches = self._on_device(moment, taken)

    def _on_device(self, moment: Moment, taken: int) -> Generator[torch.Tensor, None, None]:
        crew = Crew(self._text, moment, self._workers)
        try:
            host_batches = self._host_batches(crew, moment, taken)
            if self._device.type == "cuda":
                yield from copy_ahead(map(torch.Tensor.pin_memory, host_batches), self._device)
            else:
                yield from (batch.to(self._device) for batch in host_batches)
        finally:
            crew.close()

    def _host_batches(self, crew: Crew, moment: Moment, taken: int) -> Iterator[torch.Tensor]:
        """Yield batches of overlapping rows of T + 1 tokens: a row's last target is the first input of the next."""
        # With several ranks, one may get nothing in one epoch and something in the next.
        chunks = chunks_in_turn(crew, moment, patience=1 if self._text.ranks == 1 else 8)
        waiting: deque[tuple[Moment, numpy.ndarray]] = deque()  # chunks, each with the moment before it
        B, T = self._micro_batch, self._sequence
        held = -taken
        while True:
            while held < B * T + 1:
                waiting.append(next(chunks))
                held += len(waiting[-1][1])
            row = numpy.concatenate([tokens for _, tokens in waiting])[taken : taken + B * T + 1].astype(numpy.int64)
            batch = torch.empty((2, B, T), dtype=torch.int64)
            into = batch.numpy()
            into[0], into[1] = row[:-1].reshape(B, T), row[1:].reshape(B, T)
            taken, held = taken + B * T, held - B * T
            while taken >= len(waiting[0][1]):
                taken -= len(waiting.popleft()[1])
            self._sent.append(
                ((waiting[0][0], taken), int((row[:-1] == self._text.source.tokenizer.end_of_text).sum()))
            )
            yield batch

    def _check_ranks(self) -> None:
        if not 0 <= self._text.rank < self._text.ranks:
            raise UserError(
                f"there is no rank {self._text.rank} of {self._text.ranks}",
                "ranks count from 0",
                "check rank and ranks",
            )
        if len(self._text.source.parts) < self._text.ranks:
            raise UserError(
                f"{len(self._text.source.parts)} parts of text cannot be dealt to {self._text.ranks} ranks",
                "each rank reads its own, and compressed files are never cut",
                "give more or uncompressed files, or prepare the data: redline data prepare",
            )


def chunks_in_turn(crew: Crew, moment: Moment, patience: int) -> Iterator[tuple[Moment, numpy.ndarray]]:
    """Yield every chunk with the moment before it, in the workers' rotation but over all lanes. Raise a UserError after
    `patience` whole epochs in a row without a token."""
    places, ended = list(moment.places), list(moment.ended)
    epoch, passed = moment.epoch, moment.passed
    lane, alive = rotate(moment, range(LANES))
    tokens_in_epoch = empty_epochs = 0
    while True:
        now = Moment(epoch=epoch, turn=lane, places=tuple(places), ended=tuple(ended), passed=passed)
        chunk = crew.take(lane)
        assert chunk.lane == lane, (chunk.lane, lane)
        places[lane], passed = chunk.after, passed + chunk.passed
        if chunk.ends:
            ended[lane] = True
            alive.remove(lane)
        else:
            tokens_in_epoch += len(chunk.tokens)
            yield now, chunk.tokens
        if alive:
            lane = next_lane(alive, lane + 1)
            continue
        # An epoch that was resumed in the middle may well have nothing left.
        whole = epoch > moment.epoch or moment == START
        empty_epochs = empty_epochs + 1 if whole and not tokens_in_epoch else 0
        if empty_epochs == patience:
            raise UserError(
                "there is no text for this split",
                f"{empty_epochs} whole epochs gave this rank no token",
                "give more documents (a separator cuts a text file into some), or another share of validation",
            )
        epoch, lane, alive, tokens_in_epoch, passed = epoch + 1, 0, list(range(LANES)), 0, 0
        places, ended = list(START.places), list(START.ended)
