"""Several processes that train one model: how they find each other, agree, and notice that one of them is gone.

    with join(limit_seconds=600) as ranks:       # what torchrun's environment says; `alone()` where nobody started it
        ranks.say("order", {...});  ranks.hear("order")                   # over the store, before there are collectives
        device = ranks.connect("cuda")                                    # from here on collectives work
        ranks.arrange(Layout(ranks=8, tensor=2));  ranks.mesh["tp"]       # who holds a layer together with whom
        ranks.mean(losses);  ranks.gather({"asked": False})               # on the device; on the host
        ranks.take_leave()                                                # rank 0 is the last to go

Every rank tells the store once a second that it lives, and how far its training has come (`mark`). Rank 0 looks at the
others, rank 1 at rank 0, from the first moment to the last: one whose process is frozen for `limit_seconds`, or that
stands still for so long where steps are due (`marking`), ends the job with a message that names it. Starting processes
is torchrun's affair (`engine/agent.py`), cutting the model that of `engine/shard.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from redline.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_MISTAKE, FailedRunError, UserError
from redline.core.layout import Layout, Place
from redline.core.rank_processes import RANK_PID_FILE, inside, leave_inside, rank_pid_file
from redline.core.user_code import PACKAGE, STANDARD_LIBRARY

BEAT_SECONDS = 1.0
LIMIT_SECONDS = 600.0  # a first step that compiles for long is no rank that hangs
STANDING_SECONDS = 5.0  # without a mark: worth a word where a time limit ends the job anyway
RANK_0 = "rank 0: "
POLL_SECONDS = 0.05
MISTAKE_SECONDS = 10.0  # between ranks that find the same one
OUTLIVED_SECONDS = 5.0  # signs of life come once a second, and of two machines the clocks may differ
SHOWN = 4  # ranks in one message
SLOW_START = "a slow start counts too, of loaders and of what is compiled: a larger --rank-timeout leaves it the time"
GLOOS_LINE = re.compile(r"\[[^\]]*\.cc:\d+\] ?")  # of its own code, which its words begin with
BACKENDS_WORDS = re.compile(rf"{GLOOS_LINE.pattern}|\bNCCL\b")
PACKAGES = ("site-packages", "dist-packages")  # which may lie in the standard library's folder


class LostRankError(Exception):
    """A rank that no longer answers, in words."""


class MistakeOfRankError(Exception):
    """A mistake of the user's that a rank other than 0 alone has met: the problem and why, for one line."""


class Ranks:
    """This process among those that train together. Rank 0 leads: it alone talks, makes folders and writes metrics."""

    def __init__(
        self,
        *,
        rank: int = 0,
        count: int = 1,
        local: int = 0,
        store: Any = None,
        limit_seconds: float = LIMIT_SECONDS,
        watches: bool = True,
    ) -> None:
        """`watches`: False where whoever started the ranks has a time limit of their own."""
        self.rank, self.count, self.local, self.limit_seconds = rank, count, local, limit_seconds
        self.layout = Layout(ranks=count)
        self.kind = "cpu"
        """Of the device that collectives work on."""
        self._meshes: dict[Layout, DeviceMesh] = {}
        self.host_group: dist.ProcessGroup | None = None
        """Collectives between hosts, on numbers that are in their memory anyway."""
        self._rendezvous = store
        self._store: Any = None
        self._lasting: Any = None
        self._attempt = 0
        if store is not None:
            own = own_store()
            self._lasting = lasting = PrefixStore("redline/job", own)
            self._attempt = next_attempt(lasting) if rank == 0 else told_attempt(lasting, rank, limit_seconds)
            self._store = PrefixStore(f"redline/{self._attempt}", own)
        self._mark: tuple[int, int, str] = (0, 0, "getting ready")
        self._beats = 0
        self._ended = threading.Event()
        self._telling, self._has_told_end = threading.Lock(), False
        self._meetings = 0
        self.asked = False
        """A signal has asked this rank to stop while it trained: the user's, or the agent's because of another rank."""
        self._watches = watches and rank < 2
        self._marks_since: float | None = None
        self._seen: dict[str, tuple[int, float]] = {}
        self.on_standing: Callable[[str], None] | None = None
        """Rank 0 is told by this, once a second, who stands still; '' while nobody does."""
        self._thread: threading.Thread | None = None
        self._welcome: threading.Thread | None = None
        if self._store is not None:
            self.say(f"process/{rank}", this_process())
            self._beat()
            self._thread = threading.Thread(target=self._live, name="rank-beat", daemon=True)
            self._thread.start()
        if self.leads:
            self.remember(f"count/{self.attempt}", count)
        if self.leads and self.joined and count > 1:
            words = (self._lasting, self._attempt, count, self._ended)
            self._welcome = threading.Thread(target=welcome, args=words, name="rank-welcome", daemon=True)
            self._welcome.start()

    @property
    def joined(self) -> bool:
        """There is a job of ranks, if only of one."""
        return self._store is not None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def place(self) -> Place:
        return self.layout.place(self.rank)

    @property
    def counts(self) -> bool:
        """The one of those that read the same data that tells how much there was."""
        return self.place.tensor == 0 and self.place.pipeline == 0

    @property
    def attempt(self) -> int:
        """How many times torchrun has started the job again. Its own number is a node's: torch counts a restart only
        where a rank of that node has failed, and ranks with other numbers would not find one another."""
        return self._attempt

    @property
    def mistake_seconds(self) -> float:
        """What a rank leaves rank 0 to tell of what may have happened to both. Much less than the time limit: in it
        the rank may give no sign of life, or make no mark."""
        return min(MISTAKE_SECONDS, self.limit_seconds / 4)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in filter(None, (self._thread, self._welcome)):
            thread.join()
        # After a failure the others may wait in a collective: to take leave of them would be to wait as well.
        if kind is None:
            self._close_collectives()

    def _close_collectives(self) -> None:
        if self.host_group is not None:
            dist.destroy_process_group()
            self.host_group = None

    def take_leave(self) -> None:
        """After the last word that anybody hears: from here on ranks end. Rank 0 stays until the others have, since
        torchrun would wait without a limit for one that does not."""
        self._watches = False  # whoever has gone gives no signs of life
        self._close_collectives()  # all at once: NCCL's may wait for one another
        self.say(f"left/{self.rank}", True)
        if self.leads:
            self._see_off()

    def _see_off(self) -> None:
        here = list(range(1, self.count))
        beats, until = {rank: self._beat_of(rank) for rank in here}, time.monotonic() + self.limit_seconds
        while here := [rank for rank in here if not self._is_gone(rank)]:
            if time.monotonic() > until:
                last = self._beat_of(here[0])
                mark, lives = Mark(*json.loads(last)[1:]), last != beats[here[0]]
                raise LostRankError(words_of_staying(here[0], mark, lives, self.limit_seconds))
            time.sleep(POLL_SECONDS)

    def _is_gone(self, rank: int) -> bool:
        """Of a rank on another machine its word is all that can be known."""
        assert self._store is not None
        machine, process = json.loads(self._store.get(f"process/{rank}"))
        return bool(self._store.check([f"left/{rank}"])) and (machine != this_process()[0] or has_ended(process))

    # --- over the store -----------------------------------------------------------------------------------------------

    def say(self, key: str, value: Any) -> None:
        if self._store is not None:
            self._store.set(key, json.dumps(value))

    def hear(self, key: str, speaker: int = 0) -> Any:
        """What that rank says, once it does. It may take as long as it likes, as long as it lives."""
        assert self._store is not None, "there is nobody to listen to"
        last, since = "", time.monotonic()
        while not self._store.check([key]):
            beat = self._beat_of(speaker)
            if beat != last:
                last, since = beat, time.monotonic()
            if time.monotonic() - since > self.limit_seconds:
                raise LostRankError(f"rank {speaker} gave no sign of life for {self.limit_seconds:.0f} s")
            time.sleep(POLL_SECONDS)
        return json.loads(self._store.get(key))

    def hears(self, key: str, seconds: float) -> bool:
        """Whether anybody says it within that time, or before this rank is asked to stop."""
        assert self._store is not None, "there is nobody to listen to"
        until = time.monotonic() + seconds
        while not (said := bool(self._store.check([key]))) and time.monotonic() < until and not self.asked:
            time.sleep(POLL_SECONDS)
        return said

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Around what each rank does by itself, such as building a user's model: at its end all wait for all. Here
        and not in a collective, which knows neither who is missing nor why."""
        if self._store is None or self.count == 1:
            yield
            return
        self._meetings += 1
        try:
            yield
        except UserError as error:  # rank 0 tells it, whoever has found it
            self.say(f"mistake/{self._meetings}", [f"rank {self.rank}: {error.problem}", error.why, error.fix])
            raise
        self.say(f"met/{self._meetings}/{self.rank}", True)
        self._wait_for_others(self._store)

    def _wait_for_others(self, store: Store) -> None:
        """As long as they live and the limit allows: whoever watches names the one that does not come."""
        until = time.monotonic() + self.limit_seconds
        for rank in range(self.count):  # one question at a time: every rank asks the same store
            while not store.check([f"met/{self._meetings}/{rank}"]):
                if self.leads and store.check([f"mistake/{self._meetings}"]):
                    raise UserError(*json.loads(store.get(f"mistake/{self._meetings}")))
                if self._watches and time.monotonic() > until:
                    mark = Mark(*json.loads(self._beat_of(rank))[1:])
                    raise LostRankError(words_of_missing(rank, mark, self.rank, self.limit_seconds))
                time.sleep(POLL_SECONDS)

    def named(self, error: UserError) -> UserError:
        """What ends a run under way may be one rank's alone; of rank 0 nobody else says it."""
        if not isinstance(error, FailedRunError) or self.count == 1 or error.problem.startswith(RANK_0):
            return error
        return FailedRunError(f"{RANK_0}{error.problem}", error.why, error.fix)

    def remember(self, key: str, value: Any) -> None:
        """For those that torchrun may start after these ranks have failed."""
        if self._lasting is not None:
            self._lasting.set(key, json.dumps(value))

    def remembered(self, key: str) -> Any:
        known = self._lasting is not None and self._lasting.check([key])
        return json.loads(self._lasting.get(key)) if known else None

    def tell_end(self, text: str, *, lost: bool = False) -> None:
        """And that this rank leaves: nothing is left to be done."""
        self.tell_failure(text, lost=lost)
        with suppress(dist.DistError):
            self.say(f"leaves/{self.rank}", True)

    def tell_failure(self, text: str, *, lost: bool = False) -> None:
        """To the others, and to those that torchrun may start next. The first words stand; '' where there are none to
        be said, and whoever is killed tells nothing. `lost`: they are of a rank that no longer answers."""
        with self._telling:  # two threads may have words for one end
            if self._has_told_end:
                return
            self._has_told_end = True
        with suppress(dist.DistError):  # the store may be gone, and the job with it
            number = 0 if self._lasting is None else int(self._lasting.add(f"ends/{self.attempt}", 1))
            self.remember(f"end/{self.attempt}/{self.rank}", End(number, first_sentence(text), lost, time.time()))

    def ask(self) -> None:
        """From the handler of a signal: a flag, since a lock may be held by what it interrupts."""
        self.asked = True

    def wait_for_rank_0(self) -> None:
        """It may have met the same, and tells it then; the agent ends this rank meanwhile. Whoever was asked to stop
        before, by a signal that the training has taken, waits for nothing: no second one comes."""
        if not self.asked:
            time.sleep(self.mistake_seconds)

    def follows(self) -> bool:
        """Whether rank 0 had told its failure before this rank told its own, which came of that then; or has said that
        all is over, and not because all is done."""
        if self.leads or self._store is None:
            return False
        with suppress(dist.DistError):
            if self._store.check(["over"]):
                return bool(json.loads(self._store.get("over")) != EXIT_DONE)
            own, first = self.end_of(self.rank, self.attempt), self.end_of(0, self.attempt)
            return own is not None and first is not None and first.text != "" and first.number < own.number
        return False

    def end_of(self, rank: int, attempt: int) -> End | None:
        """None: it has told none."""
        told = self.remembered(f"end/{attempt}/{rank}")
        return None if told is None else End(*told)

    def lost_before(self) -> str | None:
        """Why there was an attempt before this one that is over; None: there was none, or nobody knows."""
        before = self.attempt - 1
        count = self.remembered(f"count/{before}")
        if count is None:
            return None
        ends = {rank: self.end_of(rank, before) for rank in range(count)}
        return words_of_ends(ends, {rank: self.remembered(f"seen/{before}/{rank}") or 0.0 for rank in ends})

    # --- collectives --------------------------------------------------------------------------------------------------

    def connect(self, kind: str) -> torch.device:
        """This rank's device; collectives on it, and between the hosts."""
        if not self.joined:
            return torch.device(kind)
        device = torch.device(kind, self.local) if kind == "cuda" else torch.device(kind)
        self.kind = kind
        if kind == "cuda":
            torch.cuda.set_device(device)
        if self.host_group is not None:
            return device
        # The watch names a rank that hangs; a collective's own limit is for the case that nobody is left to watch.
        limit = timedelta(seconds=2 * self.limit_seconds)
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        store = PrefixStore(f"collectives/{self.attempt}", self._rendezvous)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.count, timeout=limit)
        self.host_group = dist.new_group(backend="gloo", timeout=limit)
        return device

    def arrange(self, layout: Layout) -> None:
        """All of them at once, with the same layout."""
        if layout.ranks != self.count:
            raise ValueError(f"there are {self.count} ranks, not {layout.ranks}")
        self.layout = layout

    @property
    def mesh(self) -> DeviceMesh:
        """The one mesh of the layout, made by all ranks when they first ask: (pp, dp, tp), and with replicas (pp,
        replicate, shard, tp). tp is innermost, so that it stays in a node."""
        layout = self.layout
        if layout not in self._meshes:
            data = (
                {"dp": layout.data} if layout.replicas == 1 else {"replicate": layout.replicas, "shard": layout.shards}
            )
            sizes = {"pp": layout.pipeline, **data, "tp": layout.tensor}
            self._meshes[layout] = init_device_mesh(self.kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return self._meshes[layout]

    @property
    def data_mesh(self) -> DeviceMesh:
        """Of the ranks that take different data: what gradients are averaged over."""
        return self.mesh["dp"] if self.layout.replicas == 1 else self.mesh["replicate", "shard"]

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over ranks that take different data, in place. gloo has no average."""
        if not self.joined or self.layout.data == 1:
            return tensor
        for group in [None] if self.layout.is_plain else self.data_mesh.get_all_groups():
            dist.all_reduce(tensor, group=group)
        tensor /= self.layout.data
        return tensor

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's, into everybody's."""
        if self.joined and self.count > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every rank's, in their order, on every rank."""
        if not self.joined or self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.host_group)
        return found

    # --- signs of life ------------------------------------------------------------------------------------------------

    def mark(self, step: int, doing: str) -> None:
        """How far this rank has come. Costs nothing: the store is told by another thread."""
        self._mark = (self._mark[0] + 1, step, doing)

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Around what makes marks in a row: whoever makes no more hangs. Reading and writing large files before and
        after it may take as long as it takes, in a process that lives."""
        self._marks_since = time.monotonic()
        try:
            yield
        finally:
            self._marks_since = None

    def _beat(self) -> None:
        assert self._store is not None
        self._beats += 1
        self._store.set(f"beat/{self.rank}", json.dumps([self._beats, *self._mark, main_frame()]))
        self.remember(f"seen/{self.attempt}/{self.rank}", time.time())

    def _beat_of(self, rank: int) -> str:
        assert self._store is not None
        key = f"beat/{rank}"
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else ""

    def _live(self) -> None:
        try:
            while not self._ended.wait(BEAT_SECONDS):
                self._beat()
                if self._outstays_rank_0():
                    leave_to_others()
                # Rank 0 looks at all; rank 1 at rank 0, whose process may be the one that is frozen.
                if self._watches and (found := self._standing_still(self.limit_seconds, self._marks_since)) is not None:
                    self._end_all(found if self._mark[1] else f"{found} ({SLOW_START})")
                if self.on_standing is not None:
                    self.on_standing(self._standing_still(STANDING_SECONDS, 0.0) or "")
        except dist.DistError:
            return  # the store is gone, and with it the job: whoever ended it says why

    def _outstays_rank_0(self) -> bool:
        """Rank 0 has left, and this rank's main thread does not come to its own end. A rank 0 that has told of a
        failure may still be writing its report."""
        if self.leads or self._store is None:
            return False
        now, has_left = time.monotonic(), bool(self._store.check(["leaves/0"]))
        return now - self._unchanged_since("end of 0", has_left, now) > self.mistake_seconds and has_left

    def _end_all(self, found: str) -> None:
        """Whoever has told its end stands still for a reason: its words, if it has any, are the cause then."""
        ends = [self.end_of(rank, self.attempt) for rank in range(self.count) if rank != self.rank]
        told = [end for end in ends if end is not None]
        if told and not any(end.text for end in told):
            leave_to_others()
        text = min(end for end in told if end.text).text if told else found
        self.tell_end(text, lost=True)
        end_with(LostRankError(text))

    def _standing_still(self, limit: float, marks_since: float | None) -> str | None:
        """Who is frozen; and on rank 0 who has made no mark, while there are any to be made: since then, None: not."""
        now = time.monotonic()
        watched = range(self.count) if self.leads else (0,)
        beats: dict[int, float] = {}
        seconds: dict[int, float] = {}
        marks: dict[int, Mark] = {}
        for rank in watched:
            text = self._beat_of(rank)
            said: list[Any] = json.loads(text) if text else [0, *NEVER_SEEN]
            marks[rank] = Mark(*said[1:])
            beats[rank] = now - self._unchanged_since(f"beat of {rank}", said[0], now)
            seen = self._unchanged_since(f"mark of {rank}", said[1], now)
            seconds[rank] = now - max(seen, marks_since or 0.0)
        frozen = {rank: passed for rank, passed in beats.items() if passed > limit}
        if not frozen and (marks_since is None or not self.leads):
            return None
        return words_of_standing(marks, {**seconds, **frozen}, list(frozen), limit)

    def _unchanged_since(self, key: str, value: int, now: float) -> float:
        if self._seen.get(key, (-1, now))[0] != value:
            self._seen[key] = (value, now)
        return self._seen[key][1]


class End(NamedTuple):
    """How a rank ended, in its own words."""

    number: int
    """Which of the job's ends it was, counted by the store: the clocks of two machines may differ."""
    text: str
    """'': by the user, by the agent because of another rank, or with all steps done."""
    lost: bool = False
    """The words are about a rank that no longer answers."""
    when: float = 0.0
    """By its machine's clock: good for seconds, to be held against another's last sign of life."""


class Mark(NamedTuple):
    """How far a rank has come."""

    number: int
    """Of this mark: all ranks make the same ones in the same order."""
    step: int
    doing: str
    frame: str
    """Where it is in Python."""


NEVER_SEEN = Mark(0, 0, "getting ready", "")


def words_of_standing(
    marks: Mapping[int, Mark], seconds: Mapping[int, float], frozen: Sequence[int], limit: float
) -> str | None:
    """Who holds the others up, or None. `seconds`: since a rank made its last mark; `frozen`: ranks whose process has
    given no sign at all, and since when."""
    behind = min(marks, key=lambda rank: (rank not in frozen, marks[rank].number, -seconds[rank]))
    mark = marks[behind]
    ago = f"{seconds[behind]:.0f} s"
    if behind in frozen and mark == NEVER_SEEN:
        return f"rank {behind} has not been seen in {ago}; its process gives no sign of life"
    if behind in frozen:
        return f"rank {behind} was last seen {ago} ago {words_of_last(mark)}; its process gives no sign of life"
    if seconds[behind] <= limit:
        return None
    if any(other.number > mark.number for other in marks.values()):
        when = f"{ago} ago at step {mark.step:,}, {mark.doing} ({mark.frame})"
        return f"rank {behind} was last seen {when}; the others are further"
    # Most of them wait in the same line for the one that does not come.
    lines = Counter(other.frame for other in marks.values())
    places = sorted(marks, key=lambda rank: (lines[marks[rank].frame], -rank))[:SHOWN]
    return f"no rank has got any further for {ago}, at step {mark.step:,}, {mark.doing}: " + ", ".join(
        f"rank {rank} is in {marks[rank].frame}" for rank in places
    )


def words_of_missing(rank: int, mark: Mark, waiting: int, limit: float) -> str:
    """Of a rank that others wait for, all having started together."""
    return f"rank {rank} is {mark.doing} ({mark.frame}) {limit:.0f} s after rank {waiting} was done with that"


def words_of_last(mark: Mark) -> str:
    """Of a process that tells no more: what it did in the second after its last beat, nobody knows."""
    return f"at step {mark.step:,} or later, {mark.doing} ({mark.frame})"


def words_of_staying(rank: int, mark: Mark, lives: bool, seconds: float) -> str:
    sign = "its process is still there" if lives else "its process gives no sign of life"
    return f"rank {rank} has not ended {seconds:.0f} s after the training, last seen {words_of_last(mark)}; {sign}"


def this_process() -> tuple[str, int]:
    """Where its number means something: on its machine, and there in its container. Then the number."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return f"{socket.gethostname()} {numbers}", os.getpid()


def has_ended(process: int) -> bool:
    """Of this machine. One that nobody has asked for its exit code yet has ended too ('Z')."""
    try:
        state = (
            Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        )
    except OSError:
        return True
    return state in ("Z", "X")


def main_frame() -> str:
    """Where the thread that trains is, such as 'mean, distributed.py, which calls all_reduce'."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    codes = [one.f_code for one, _ in traceback.walk_stack(frame)] if frame is not None else []  # innermost first
    return words_of_place([(code.co_name, code.co_filename) for code in codes])


def words_of_place(stack: Sequence[tuple[str, str]]) -> str:
    """The innermost function that is ours or the user's, and what it is in of a library: the inside of one, or the
    standard library's wait in a lock, says little to anybody. `stack`: functions and their files, innermost first."""
    if not stack:
        return "nowhere"
    own = next((depth for depth, (_, file) in enumerate(stack) if is_own(file)), 0)
    name, file = stack[own]
    if any(is_compiled(other) for _, other in stack[:own]):
        return f"{name}, {Path(file).name}, which calls compiled code"
    called = (one for one, other in stack[:own] if is_library(other) and not one.startswith(("_", "<")))
    return ", which calls ".join([f"{name}, {Path(file).name}", *itertools.islice(called, 1)])


def is_own(file: str) -> bool:
    """Ours, wherever redline is installed, or the user's; '<frozen ...>' and the like are nobody's."""
    nobodys = file.startswith((STANDARD_LIBRARY, "<")) or is_library(file) or is_compiled(file)
    return file.startswith(PACKAGE) or not nobodys


def is_compiled(file: str) -> bool:
    """What Inductor has written: a file in a folder of two letters, which its name begins with behind a c."""
    path = Path(file)
    return re.fullmatch(r"c[a-z2-7]{51}\.py", path.name) is not None and path.name[1:3] == path.parent.name


def is_library(file: str) -> bool:
    return not file.startswith(PACKAGE) and any(name in Path(file).parts for name in PACKAGES)


def alone() -> Ranks:
    return Ranks()


def join(limit_seconds: float | None = None, *, watches: bool = True) -> Ranks:
    """The job that the environment tells of (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: torchrun's)."""
    leave_with_parent(lambda: os._exit(1))
    limit = LIMIT_SECONDS if limit_seconds is None else limit_seconds
    try:
        store, rank, count = next(rendezvous("env://", timeout=timedelta(seconds=limit)))
    except dist.DistStoreError as error:
        raise FailedRunError(
            f"the {os.environ['WORLD_SIZE']} ranks have not found each other in {limit:.0f} s",
            " ".join(str(error).splitlines()[:1]),
            "start all of them with torchrun, or unset RANK and WORLD_SIZE where this is one process",
        ) from error
    if rank == 0 and (path := os.environ.get(RANK_PID_FILE)):
        with open(path, "w", encoding="utf-8") as file:
            file.write(str(os.getpid()))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    try:
        return Ranks(rank=rank, count=count, local=local, store=store, limit_seconds=limit, watches=watches)
    except LostRankError as error:
        end_with(error)
        raise


def own_store() -> Any:
    """A connection of our own: another's that waits in it would hold up the beat."""
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


# The store outlives the ranks. Each rank 0 begins an attempt, and every other rank asks which one is its own, under a
# name that no process before it had: an old answer cannot be taken for a new one, nor an old rank for a new one.


def next_attempt(lasting: Any) -> int:
    """No number twice, and none below torch's own: a store that is new (TORCH_DISABLE_SHARE_RDZV_TCP_STORE) knows of no
    attempt before, and of one whose rank 0 died before it came here nobody else does."""
    counted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    attempt = int(lasting.add("attempts", 1)) - 1
    return attempt if attempt >= counted else int(lasting.add("attempts", counted - attempt)) - 1


def welcome(lasting: Any, attempt: int, count: int, ended: threading.Event) -> None:
    """In a thread of rank 0, until all have come: each is told the attempt."""
    asked = dict.fromkeys(range(1, count), "")
    try:
        while asked and not ended.wait(POLL_SECONDS):
            for rank in [rank for rank in asked if lasting.check([f"hello/{rank}"])]:
                name = bytes(lasting.get(f"hello/{rank}")).decode()
                if name != asked[rank]:
                    lasting.set(f"welcome/{name}", str(attempt))
                    asked[rank] = name
                elif lasting.check([f"thanks/{name}/{attempt}"]):
                    del asked[rank]
    except dist.DistError:
        return  # the store is gone, and with it the job


def told_attempt(lasting: Any, rank: int, limit_seconds: float) -> int:
    """Rank 0's."""
    name, until = uuid.uuid4().hex, time.monotonic() + limit_seconds
    lasting.set(f"hello/{rank}", name)
    while not lasting.check([f"welcome/{name}"]):
        if time.monotonic() > until:
            raise LostRankError(f"rank 0 gave no sign of life for {limit_seconds:.0f} s")
        time.sleep(POLL_SECONDS)
    attempt = int(lasting.get(f"welcome/{name}"))
    lasting.set(f"thanks/{name}/{attempt}", "")
    return attempt


def leave_with_parent(leave: Callable[[], None]) -> None:
    """Nothing is left behind when whoever started this process is gone, even if it was killed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(BEAT_SECONDS)
        leave()

    threading.Thread(target=watch, name="leave-with-parent", daemon=True).start()


@contextmanager
def recorded(ranks: Ranks) -> Iterator[None]:
    """What ends a rank goes into the file that torchrun's agent reads, so that it is told once and by name. A mistake
    of the user's that rank 0 finds is told by the command line, as ever: the others leave it the time to."""
    folder = rank_pid_file()
    with inside(None if folder is None else folder.parent, ranks.rank):
        try:
            yield
        except UserError as error:
            words = " ".join(f"{error.problem.removeprefix(RANK_0)}: {error.why}".splitlines())
            ranks.tell_end(f"rank {ranks.rank} failed: {words}")
            if ranks.leads and (named := ranks.named(error)) is not error:
                raise named from error
            if ranks.leads:
                raise
            ranks.wait_for_rank_0()
            if ranks.follows():
                raise SystemExit(EXIT_INTERRUPTED) from error
            record_failure(error, MistakeOfRankError(words))
            raise SystemExit(EXIT_FAILED if isinstance(error, FailedRunError) else EXIT_MISTAKE) from error
        except Exception as error:
            is_lost = isinstance(error, LostRankError)
            words = str(error) if is_lost else f"rank {ranks.rank} failed: {type(error).__name__}: {error}"
            ranks.tell_end(words, lost=is_lost)
            if not is_lost and ranks.follows():
                traceback.print_exception(error, file=sys.__stderr__)  # a rank's log
                ranks.wait_for_rank_0()  # the agent would end one that still tells what happened
                raise SystemExit(EXIT_INTERRUPTED) from error
            record_failure(error)
            raise SystemExit(1) from error
        finally:
            ranks.tell_end("")  # where nothing was said: by the user, by the agent, or all is done


def words_of_ends(ends: Mapping[int, End | None], seen: Mapping[int, float]) -> str | None:
    """Of the ranks of an attempt; None: that rank has told nothing. A rank that was lost may tell nothing either, and
    the agent may have killed others since: the words of whoever watched are the cause. `seen`: when each rank last gave
    a sign of life. One that lived on after another had failed, or was gone, waited for that one where no signal reaches
    it, in the driver, for a collective of NCCL's: the agent has killed it after its grace."""
    told = sorted(end for end in ends.values() if end is not None and end.text)
    lost = [end for end in told if end.lost]
    first = told[0].when if told else min((seen[rank] for rank, end in ends.items() if end is None), default=0.0)
    outlived = first + OUTLIVED_SECONDS
    silent = [f"rank {rank}" for rank, end in ends.items() if end is None and not lost and seen[rank] < outlived]
    words = [f"{', '.join(silent)} ended without a word (killed, or its machine is gone)"] if silent else []
    words += [f"then {end.text}" if silent else end.text for end in (lost or told)[:1]]
    return f"torchrun has started all ranks again: {'; '.join(words)}" if words else None


def first_sentence(text: str) -> str:
    """Of gloo's or NCCL's first line, which goes on with causes that they know nothing of; any other line is a user's,
    and stays whole. The log has it all."""
    line = next(iter(text.strip().splitlines()), "")
    return GLOOS_LINE.sub("", line.split(". ")[0]) if BACKENDS_WORDS.search(line) else line


def record_failure(error: Exception, told: Exception | None = None) -> None:
    """`told`: what the agent shows in its place."""
    traceback.print_exception(error, file=sys.__stderr__)  # a rank's log
    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(told or error)


def leave_to_others() -> NoReturn:
    """From another thread than the one that hangs, where another rank tells why."""
    leave_inside()
    os._exit(EXIT_INTERRUPTED)


def end_with(error: Exception) -> None:
    """From another thread than the one that hangs."""
    try:
        raise error  # torch's handler writes down what is being handled, and torchrun shows that
    except Exception:
        record_failure(error)
    os._exit(1)
