"""Several processes that train one model: how they find each other, agree, and notice that one is gone.

    with join(limit_seconds=600) as ranks:       # from torchrun's environment; `alone()` without torchrun
        ranks.say("order", {...});  ranks.hear("order")                   # over the store, before collectives exist
        device = ranks.connect("cuda")                                    # collectives work from here on
        ranks.arrange(Layout(ranks=8, tensor=2));  ranks.mesh["tp"]       # the ranks that hold a layer together
        ranks.mean(losses);  ranks.gather({"asked": False})               # on the device; on the host
        ranks.take_leave()                                                # rank 0 leaves last

Once a second every rank writes a heartbeat to the store, with how far its training has come (`mark`). From start to end
rank 0 watches the others and rank 1 watches rank 0. A rank whose process is frozen for `limit_seconds`, or that makes
no progress for that long while steps are due (`marking`), ends the job with a message that names it. Processes are
started by torchrun (`engine/agent.py`), and the model is cut in `engine/shard.py`.
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
LIMIT_SECONDS = 600.0  # a first step may compile for long without being a hang
STANDING_SECONDS = 5.0  # without a mark, until `on_standing` gets the rank; there another time limit ends the job
RANK_0 = "rank 0: "
POLL_SECONDS = 0.05
MISTAKE_SECONDS = 10.0  # between ranks that find the same mistake
OUTLIVED_SECONDS = 5.0  # heartbeats come once a second, and the clocks of two machines may differ
SHOWN = 4  # maximum number of ranks in one message
SLOW_START = "slow loaders and compilation count too: raise --rank-timeout if the start is slow"
GLOOS_LINE = re.compile(r"\[[^\]]*\.cc:\d+\] ?")  # gloo's messages start with a place in its own source
BACKENDS_WORDS = re.compile(rf"{GLOOS_LINE.pattern}|\bNCCL\b")
PACKAGES = ("site-packages", "dist-packages")  # these may lie in the standard library's folder


class LostRankError(Exception):
    """A rank no longer answers; the message says which."""


class MistakeOfRankError(Exception):
    """A user's mistake that only a rank other than 0 has met; the message is the problem and its reason in one line."""


class Ranks:
    """This process among those that train together. Rank 0 leads: it alone prints, makes folders and writes metrics."""

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
        """`watches`: False if whoever started the ranks enforces a time limit of its own."""
        self.rank, self.count, self.local, self.limit_seconds = rank, count, local, limit_seconds
        self.layout = Layout(ranks=count)
        self.kind = "cpu"
        """Kind of the device that collectives work on."""
        self._meshes: dict[Layout, DeviceMesh] = {}
        self.host_group: dist.ProcessGroup | None = None
        """For collectives on values that are in host memory anyway."""
        self._rendezvous = store
        self._store: Any = None
        self._lasting: Any = None
        self._attempt = 0
        if store is not None:
            own = own_store()
            self._lasting = lasting = PrefixStore("redline/job", own)
            self._attempt = next_attempt(lasting) if rank == 0 else ask_attempt(lasting, rank, limit_seconds)
            self._store = PrefixStore(f"redline/{self._attempt}", own)
        self._mark: tuple[int, int, str] = (0, 0, "getting ready")
        self._beats = 0
        self._ended = threading.Event()
        self._telling, self._has_told_end = threading.Lock(), False
        self._meetings = 0
        self.asked = False
        """True if a signal during training asked this rank to stop: the user's, or the agent's because of another."""
        self._watches = watches and rank < 2
        self._marks_since: float | None = None
        self._seen: dict[str, tuple[int, float]] = {}
        self.on_standing: Callable[[str], None] | None = None
        """Called once a second on rank 0 with words about a rank that makes no progress, or '' if there is none."""
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
        """True in a job of ranks, even of a single one."""
        return self._store is not None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def place(self) -> Place:
        return self.layout.place(self.rank)

    @property
    def counts(self) -> bool:
        """True on the rank that reports how much data was read, one of those that read the same data."""
        return self.place.tensor == 0 and self.place.pipeline == 0

    @property
    def attempt(self) -> int:
        """How many times torchrun has restarted the job. torch's own count is per node: it counts a restart only where
        a rank of that node has failed, and ranks with different counts would not find each other."""
        return self._attempt

    @property
    def mistake_seconds(self) -> float:
        """How long a rank lets rank 0 report first what may have happened to both. At most a quarter of the time limit,
        since the rank may make no mark and write no heartbeat meanwhile."""
        return min(MISTAKE_SECONDS, self.limit_seconds / 4)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in filter(None, (self._thread, self._welcome)):
            thread.join()
        # After a failure the others may be waiting in a collective; destroying the group would wait too.
        if kind is None:
            self._close_collectives()

    def _close_collectives(self) -> None:
        if self.host_group is not None:
            dist.destroy_process_group()
            self.host_group = None

    def take_leave(self) -> None:
        """Leave the job; call this after the last message that another rank waits for. Rank 0 stays until the others
        have ended, since torchrun would wait without limit for one that does not."""
        self._watches = False  # a rank that has left writes no heartbeats
        self._close_collectives()  # on all ranks at the same time: NCCL may wait for the others
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
                raise LostRankError(describe_staying(here[0], mark, lives, self.limit_seconds))
            time.sleep(POLL_SECONDS)

    def _is_gone(self, rank: int) -> bool:
        """True if the rank has said that it leaves and, where it is on this machine, its process has ended."""
        assert self._store is not None
        machine, process = json.loads(self._store.get(f"process/{rank}"))
        return bool(self._store.check([f"left/{rank}"])) and (machine != this_process()[0] or has_ended(process))

    # --- over the store -----------------------------------------------------------------------------------------------

    def say(self, key: str, value: Any) -> None:
        if self._store is not None:
            self._store.set(key, json.dumps(value))

    def hear(self, key: str, speaker: int = 0) -> Any:
        """Wait until `speaker` says `key`, and return the value. There is no time limit while that rank is alive."""
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
        """True if anybody says `key` within `seconds`. Stops waiting early if this rank is asked to stop."""
        assert self._store is not None, "there is nobody to listen to"
        until = time.monotonic() + seconds
        while not (said := bool(self._store.check([key]))) and time.monotonic() < until and not self.asked:
            time.sleep(POLL_SECONDS)
        return said

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Context for work that each rank does by itself, such as building a user's model; at its end all ranks wait
        for each other. They wait over the store, since a collective would know neither who is missing nor why."""
        if self._store is None or self.count == 1:
            yield
            return
        self._meetings += 1
        try:
            yield
        except UserError as error:  # rank 0 reports it, whichever rank found it
            self.say(f"mistake/{self._meetings}", [f"rank {self.rank}: {error.problem}", error.why, error.fix])
            raise
        self.say(f"met/{self._meetings}/{self.rank}", True)
        self._wait_for_others(self._store)

    def _wait_for_others(self, store: Store) -> None:
        """Wait for every rank to finish the meeting. A watching rank names one that is not done within the limit, and
        rank 0 raises a mistake that another rank has found."""
        until = time.monotonic() + self.limit_seconds
        for rank in range(self.count):  # one at a time: all ranks query the same store
            while not store.check([f"met/{self._meetings}/{rank}"]):
                if self.leads and store.check([f"mistake/{self._meetings}"]):
                    raise UserError(*json.loads(store.get(f"mistake/{self._meetings}")))
                if self._watches and time.monotonic() > until:
                    mark = Mark(*json.loads(self._beat_of(rank))[1:])
                    raise LostRankError(describe_missing(rank, mark, self.rank, self.limit_seconds))
                time.sleep(POLL_SECONDS)

    def named(self, error: UserError) -> UserError:
        """Prefix a failed run's error with 'rank 0': it may concern one rank alone, and nobody else names rank 0."""
        if not isinstance(error, FailedRunError) or self.count == 1 or error.problem.startswith(RANK_0):
            return error
        return FailedRunError(f"{RANK_0}{error.problem}", error.why, error.fix)

    def remember(self, key: str, value: Any) -> None:
        """Store a value for ranks that torchrun may start after these have failed."""
        if self._lasting is not None:
            self._lasting.set(key, json.dumps(value))

    def remembered(self, key: str) -> Any:
        known = self._lasting is not None and self._lasting.check([key])
        return json.loads(self._lasting.get(key)) if known else None

    def report_end(self, text: str, *, lost: bool = False) -> None:
        """Report the failure, and that this rank is leaving with nothing left to do."""
        self.report_failure(text, lost=lost)
        with suppress(dist.DistError):
            self.say(f"leaves/{self.rank}", True)

    def report_failure(self, text: str, *, lost: bool = False) -> None:
        """Report how this rank ends to the others and to those that torchrun may start next. Only the first call
        counts. '' means that there is nothing to report; a killed rank reports nothing at all. `lost`: the text is
        about a rank that no longer answers."""
        with self._telling:  # two threads may report the same end
            if self._has_told_end:
                return
            self._has_told_end = True
        with suppress(dist.DistError):  # the store may be gone, and the job with it
            number = 0 if self._lasting is None else int(self._lasting.add(f"ends/{self.attempt}", 1))
            self.remember(f"end/{self.attempt}/{self.rank}", End(number, first_sentence(text), lost, time.time()))

    def ask(self) -> None:
        """Ask this rank to stop, from a signal handler. Only sets a flag: the interrupted code may hold a lock."""
        self.asked = True

    def wait_for_rank_0(self) -> None:
        """Give rank 0, which may have met the same problem, time to report it; the agent then ends this rank. Returns
        at once if a signal during training has already asked this rank to stop: no second signal comes."""
        if not self.asked:
            time.sleep(self.mistake_seconds)

    def follows(self) -> bool:
        """True if this rank's failure follows from rank 0's: rank 0 reported a failure first, or has said that the
        training is over with an exit code other than success."""
        if self.leads or self._store is None:
            return False
        with suppress(dist.DistError):
            if self._store.check(["over"]):
                return bool(json.loads(self._store.get("over")) != EXIT_DONE)
            own, first = self.end_of(self.rank, self.attempt), self.end_of(0, self.attempt)
            return own is not None and first is not None and first.text != "" and first.number < own.number
        return False

    def end_of(self, rank: int, attempt: int) -> End | None:
        """Return how the rank ended; None if it has not reported that."""
        told = self.remembered(f"end/{attempt}/{rank}")
        return None if told is None else End(*told)

    def lost_before(self) -> str | None:
        """Return why the previous attempt ended; None if there was none, or if nobody knows."""
        before = self.attempt - 1
        count = self.remembered(f"count/{before}")
        if count is None:
            return None
        ends = {rank: self.end_of(rank, before) for rank in range(count)}
        return describe_ends(ends, {rank: self.remembered(f"seen/{before}/{rank}") or 0.0 for rank in ends})

    # --- collectives --------------------------------------------------------------------------------------------------

    def connect(self, kind: str) -> torch.device:
        """Set up collectives on this rank's device and between hosts. Return the device."""
        if not self.joined:
            return torch.device(kind)
        device = torch.device(kind, self.local) if kind == "cuda" else torch.device(kind)
        self.kind = kind
        if kind == "cuda":
            torch.cuda.set_device(device)
        if self.host_group is not None:
            return device
        # A watching rank names one that hangs; a collective's own limit is for when nobody is left to watch.
        limit = timedelta(seconds=2 * self.limit_seconds)
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        store = PrefixStore(f"collectives/{self.attempt}", self._rendezvous)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.count, timeout=limit)
        self.host_group = dist.new_group(backend="gloo", timeout=limit)
        return device

    def arrange(self, layout: Layout) -> None:
        """Set the layout; all ranks must call this with the same one."""
        if layout.ranks != self.count:
            raise ValueError(f"there are {self.count} ranks, not {layout.ranks}")
        self.layout = layout

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the layout: (pp, dp, tp), or with replicas (pp, replicate, shard, tp). tp is innermost, so that
        it stays within a node. The first access creates the mesh, and all ranks must make it together."""
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
        """The mesh of ranks with different data, over which gradients are averaged."""
        return self.mesh["dp"] if self.layout.replicas == 1 else self.mesh["replicate", "shard"]

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Average in place over ranks with different data. gloo has no average, hence sum and division."""
        if not self.joined or self.layout.data == 1:
            return tensor
        for group in [None] if self.layout.is_plain else self.data_mesh.get_all_groups():
            dist.all_reduce(tensor, group=group)
        tensor /= self.layout.data
        return tensor

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast rank 0's tensor into every rank's, in place."""
        if self.joined and self.count > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank."""
        if not self.joined or self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.host_group)
        return found

    # --- signs of life ------------------------------------------------------------------------------------------------

    def mark(self, step: int, doing: str) -> None:
        """Record how far this rank has come. Costs nothing: another thread writes it to the store."""
        self._mark = (self._mark[0] + 1, step, doing)

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Context in which marks are due: a rank that stops making them hangs. Outside it, in reading and writing large
        files, a rank may take as long as it needs while its process lives."""
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
                # Rank 0 watches all ranks; rank 1 watches rank 0, whose process may be the frozen one.
                if self._watches and (found := self._standing_still(self.limit_seconds, self._marks_since)) is not None:
                    self._end_all(found if self._mark[1] else f"{found} ({SLOW_START})")
                if self.on_standing is not None:
                    self.on_standing(self._standing_still(STANDING_SECONDS, 0.0) or "")
        except dist.DistError:
            return  # the store is gone, and so is the job: whoever ended it reports why

    def _outstays_rank_0(self) -> bool:
        """True if rank 0 left over `mistake_seconds` ago and this rank's main thread is still running. A failure that
        rank 0 reported does not count by itself: it may still be writing its report."""
        if self.leads or self._store is None:
            return False
        now, has_left = time.monotonic(), bool(self._store.check(["leaves/0"]))
        return now - self._unchanged_since("end of 0", has_left, now) > self.mistake_seconds and has_left

    def _end_all(self, found: str) -> None:
        """End the job because a rank makes no progress. If other ranks have reported their end, that is why: the first
        with a text is the cause instead of `found`, and without any text this rank leaves silently."""
        ends = [self.end_of(rank, self.attempt) for rank in range(self.count) if rank != self.rank]
        told = [end for end in ends if end is not None]
        if told and not any(end.text for end in told):
            leave_to_others()
        text = min(end for end in told if end.text).text if told else found
        self.report_end(text, lost=True)
        end_with(LostRankError(text))

    def _standing_still(self, limit: float, marks_since: float | None) -> str | None:
        """Describe a rank that is frozen or, on rank 0, one that has made no mark; None if there is none.
        `marks_since`: when marks became due; None if they are not."""
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
        return describe_straggler(marks, {**seconds, **frozen}, list(frozen), limit)

    def _unchanged_since(self, key: str, value: int, now: float) -> float:
        if self._seen.get(key, (-1, now))[0] != value:
            self._seen[key] = (value, now)
        return self._seen[key][1]


class End(NamedTuple):
    """How a rank ended, in its own words."""

    number: int
    """Position among the job's ends, counted by the store: the clocks of two machines may differ."""
    text: str
    """'' if the user ended it, the agent did because of another rank, or all steps were done."""
    lost: bool = False
    """True if the text is about a rank that no longer answers."""
    when: float = 0.0
    """Time by its machine's clock: accurate to seconds, for comparison with another rank's last heartbeat."""


class Mark(NamedTuple):
    """How far a rank has come."""

    number: int
    """Number of this mark: all ranks make the same marks in the same order."""
    step: int
    doing: str
    frame: str
    """Where the main thread is in Python."""


NEVER_SEEN = Mark(0, 0, "getting ready", "")


def describe_straggler(
    marks: Mapping[int, Mark], seconds: Mapping[int, float], frozen: Sequence[int], limit: float
) -> str | None:
    """Describe the rank that holds the others up; None if there is none. `seconds`: time since a rank's last mark, or
    since its last heartbeat if it is one of the `frozen`, whose processes give no sign of life."""
    behind = min(marks, key=lambda rank: (rank not in frozen, marks[rank].number, -seconds[rank]))
    mark = marks[behind]
    ago = f"{seconds[behind]:.0f} s"
    if behind in frozen and mark == NEVER_SEEN:
        return f"rank {behind} has not been seen in {ago}; its process gives no sign of life"
    if behind in frozen:
        return f"rank {behind} was last seen {ago} ago {describe_last_mark(mark)}; its process gives no sign of life"
    if seconds[behind] <= limit:
        return None
    if any(other.number > mark.number for other in marks.values()):
        when = f"{ago} ago at step {mark.step:,}, {mark.doing} ({mark.frame})"
        return f"rank {behind} was last seen {when}; the other ranks are ahead"
    # Most ranks wait in the same function for the one that does not come.
    lines = Counter(other.frame for other in marks.values())
    places = sorted(marks, key=lambda rank: (lines[marks[rank].frame], -rank))[:SHOWN]
    return f"no rank has made progress for {ago}, at step {mark.step:,}, {mark.doing}: " + ", ".join(
        f"rank {rank} is in {marks[rank].frame}" for rank in places
    )


def describe_missing(rank: int, mark: Mark, waiting: int, limit: float) -> str:
    """Describe a rank that the others wait for at the end of a meeting, which all began together."""
    return f"rank {rank} is {mark.doing} ({mark.frame}) {limit:.0f} s after rank {waiting} finished that"


def describe_last_mark(mark: Mark) -> str:
    """Describe the last heartbeat of a process. What it did in the second after that is unknown, hence 'or later'."""
    return f"at step {mark.step:,} or later, {mark.doing} ({mark.frame})"


def describe_staying(rank: int, mark: Mark, lives: bool, seconds: float) -> str:
    sign = "its process is still there" if lives else "its process gives no sign of life"
    return f"rank {rank} has not ended {seconds:.0f} s after the training, last seen {describe_last_mark(mark)}; {sign}"


def this_process() -> tuple[str, int]:
    """Return where the process id is valid (a host and a PID namespace of it, as of a container), and the id."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return f"{socket.gethostname()} {numbers}", os.getpid()


def has_ended(process: int) -> bool:
    """True if a process of this machine has ended. That includes zombies ('Z'), whose exit code nobody has read yet."""
    try:
        state = (
            Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        )
    except OSError:
        return True
    return state in ("Z", "X")


def main_frame() -> str:
    """Describe where the main thread is, such as 'mean, distributed.py, which calls all_reduce'."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    codes = [one.f_code for one, _ in traceback.walk_stack(frame)] if frame is not None else []  # innermost first
    return describe_place([(code.co_name, code.co_filename) for code in codes])


def describe_place(stack: Sequence[tuple[str, str]]) -> str:
    """Describe the innermost function of redline's or the user's, and the library function that it calls. Frames deeper
    in a library, or the standard library waiting for a lock, would tell nobody much. `stack`: functions and their
    files, innermost first."""
    if not stack:
        return "nowhere"
    own = next((depth for depth, (_, file) in enumerate(stack) if is_own(file)), 0)
    name, file = stack[own]
    if any(is_compiled(other) for _, other in stack[:own]):
        return f"{name}, {Path(file).name}, which calls compiled code"
    called = (one for one, other in stack[:own] if is_library(other) and not one.startswith(("_", "<")))
    return ", which calls ".join([f"{name}, {Path(file).name}", *itertools.islice(called, 1)])


def is_own(file: str) -> bool:
    """True for redline's files, wherever it is installed, and for the user's; not for '<frozen ...>' and the like."""
    nobodys = file.startswith((STANDARD_LIBRARY, "<")) or is_library(file) or is_compiled(file)
    return file.startswith(PACKAGE) or not nobodys


def is_compiled(file: str) -> bool:
    """True for a file that Inductor generated: its name is 'c' and a hash, whose first two letters name its folder."""
    path = Path(file)
    return re.fullmatch(r"c[a-z2-7]{51}\.py", path.name) is not None and path.name[1:3] == path.parent.name


def is_library(file: str) -> bool:
    return not file.startswith(PACKAGE) and any(name in Path(file).parts for name in PACKAGES)


def alone() -> Ranks:
    return Ranks()


def join(limit_seconds: float | None = None, *, watches: bool = True) -> Ranks:
    """Join the job described by torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""
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
    """Open a connection of our own: on a shared one, another user's wait would delay the heartbeat."""
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


# The store outlives the ranks. Each new rank 0 begins an attempt, and every other rank asks for its number under a
# unique name: neither an old answer nor an old rank can be mistaken for a new one.


def next_attempt(lasting: Any) -> int:
    """Return the number of a new attempt: never one that was used, and none below torch's own count. A new store
    (TORCH_DISABLE_SHARE_RDZV_TCP_STORE) knows of no earlier attempts, and no store knows of one whose rank 0 died
    before it came here."""
    counted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    attempt = int(lasting.add("attempts", 1)) - 1
    return attempt if attempt >= counted else int(lasting.add("attempts", counted - attempt)) - 1


def welcome(lasting: Any, attempt: int, count: int, ended: threading.Event) -> None:
    """Tell every other rank the number of the attempt; runs in a thread of rank 0 until all have confirmed it."""
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
        return  # the store is gone, and so is the job


def ask_attempt(lasting: Any, rank: int, limit_seconds: float) -> int:
    """Ask rank 0 for the number of the attempt, and return it."""
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
    """Call `leave` when the parent process is gone, even if it was killed, so that nothing is left running."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(BEAT_SECONDS)
        leave()

    threading.Thread(target=watch, name="leave-with-parent", daemon=True).start()


@contextmanager
def recorded(ranks: Ranks) -> Iterator[None]:
    """Record what ends a rank in the file that torchrun's agent reads, so that it is reported once, with the rank's
    name. A user's mistake that rank 0 finds is reported by the command line as usual; other ranks wait for that."""
    folder = rank_pid_file()
    with inside(None if folder is None else folder.parent, ranks.rank):
        try:
            yield
        except UserError as error:
            words = " ".join(f"{error.problem.removeprefix(RANK_0)}: {error.why}".splitlines())
            ranks.report_end(f"rank {ranks.rank} failed: {words}")
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
            ranks.report_end(words, lost=is_lost)
            if not is_lost and ranks.follows():
                traceback.print_exception(error, file=sys.__stderr__)  # a rank's log
                ranks.wait_for_rank_0()  # otherwise the agent would end rank 0 while it still reports
                raise SystemExit(EXIT_INTERRUPTED) from error
            record_failure(error)
            raise SystemExit(1) from error
        finally:
            ranks.report_end("")  # unless reported above: ended by the user, by the agent, or all done


def describe_ends(ends: Mapping[int, End | None], seen: Mapping[int, float]) -> str | None:
    """Describe why an attempt ended, from the ends of its ranks; None if nothing is known. A rank whose end is None
    reported nothing. If a watching rank reported a lost one, that is the cause: a lost rank may report nothing, and the
    agent may have killed others since. `seen`: time of each rank's last heartbeat. A silent rank that lived on after
    the first failure is not blamed: it was waiting in the driver, where no signal reaches it, for an NCCL collective
    with the failed rank, until the agent killed it after the grace period."""
    told = sorted(end for end in ends.values() if end is not None and end.text)
    lost = [end for end in told if end.lost]
    first = told[0].when if told else min((seen[rank] for rank, end in ends.items() if end is None), default=0.0)
    outlived = first + OUTLIVED_SECONDS
    silent = [f"rank {rank}" for rank, end in ends.items() if end is None and not lost and seen[rank] < outlived]
    words = [f"{', '.join(silent)} ended without saying why (killed, or its machine is gone)"] if silent else []
    words += [f"then {end.text}" if silent else end.text for end in (lost or told)[:1]]
    return f"torchrun has started all ranks again: {'; '.join(words)}" if words else None


def first_sentence(text: str) -> str:
    """Return the first line, cut after its first sentence if it is gloo's or NCCL's: those continue with guesses about
    the cause. Any other line is the user's and is kept in full. The log has everything."""
    line = next(iter(text.strip().splitlines()), "")
    return GLOOS_LINE.sub("", line.split(". ")[0]) if BACKENDS_WORDS.search(line) else line


def record_failure(error: Exception, told: Exception | None = None) -> None:
    """Record `error` for torchrun's agent and write its traceback to the log. `told`: what the agent shows instead."""
    traceback.print_exception(error, file=sys.__stderr__)  # a rank's log
    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(told or error)


def leave_to_others() -> NoReturn:
    """End this process from a thread other than the hanging one; another rank reports why."""
    leave_inside()
    os._exit(EXIT_INTERRUPTED)


def end_with(error: Exception) -> None:
    """End this process with `error` as its recorded failure, from a thread other than the hanging one."""
    try:
        raise error  # torch's handler records the exception being handled, and torchrun shows it
    except Exception:
        record_failure(error)
    os._exit(1)
