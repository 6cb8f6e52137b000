"""Turns the events of a Chrome trace into a timeline in which every microsecond is accounted for once.

    timeline = read_timeline(events, parameter_bytes=4)      # the profiled steps lie under the annotation WINDOW
    timeline.segments                                        # they fill the window without gap or overlap

On a GPU a segment is a kernel, or the absence of one. Where kernels run side by side, the one that computes counts, so
communication and copies cost only what is not hidden. On a CPU a segment is the innermost operator of the training
thread; gloo's collectives run on threads of their own, and cost only the time for which that thread waits for them.
Nothing here imports torch: a trace of any machine can be read anywhere.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from redline.core.profile import (
    ATTENTION,
    BACKWARD,
    COMMUNICATION,
    CONTRACTION,
    DATA,
    DATA_WAIT,
    FORWARD,
    IDLE,
    LOSS,
    MOVEMENT,
    NORMALISATION,
    OPTIMIZER,
    OTHER,
    UPDATE,
)
from redline.engine.profiling_groups import group_of_kernel, group_of_operators, is_product, is_softmax
from redline.engine.profiling_work import Work, work_of

WINDOW, STEP, DATA_RANGE, MODULE = "redline: profiled steps", "redline: step", "redline: data", "redline: module "
HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
SYNCHRONISATIONS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
GLOO = "gloo:"  # prefix of its collectives, which run on threads of their own
GROUP_NAME, MESH = "Process Group Description", "mesh_"
NODE = "autograd::engine::evaluate_function"
HIDEABLE = (MOVEMENT, COMMUNICATION)  # may be hidden behind work on another stream
SECOND = 1e-6  # the trace counts microseconds


@dataclass(eq=False)
class Node:
    """An event of the host, linked to the event around it."""

    name: str
    category: str
    start: float
    end: float
    arguments: dict[str, Any]
    parent: Node | None = None
    module: str | None = None
    phase: str = FORWARD
    group: str | None = None

    def chain(self) -> list[Node]:
        """Return this node and all nodes around it, outermost first."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    @property
    def sequence(self) -> int | None:
        """Autograd's sequence number: a forward operator shares it with its backward node."""
        return self.arguments.get("Sequence number")


@dataclass(frozen=True, slots=True)
class Segment:
    start: float
    end: float
    phase: str
    group: str
    module: str | None = None

    @property
    def seconds(self) -> float:
        return (self.end - self.start) * SECOND


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel, or on a CPU one stretch of an operator's own time, with the operator's work where that is known."""

    name: str
    segment: Segment
    seconds: float
    operator: Node | None
    work: Work | None


@dataclass(frozen=True, kw_only=True)
class Timeline:
    start: float
    end: float
    steps: int
    segments: tuple[Segment, ...]
    calls: tuple[Call, ...]
    host_seconds: float
    """Seconds of the main thread in all steps, without its waits for the device."""
    sync_idle_seconds: float
    communication_seconds: float
    """Seconds of all steps in which a collective is running, hidden behind other work or not."""
    communication_by_group: dict[str, float] | None
    """The same by group ('tensor', 'data'); None if there are no collectives, or one does not name its group."""

    @property
    def seconds(self) -> float:
        return (self.end - self.start) * SECOND


@dataclass
class Host:
    """The host's side of a trace: nodes by thread, and the annotations around the steps."""

    threads: dict[Any, list[Node]]
    window: Node
    main: Any
    steps: list[Node] = field(default_factory=list)
    data: list[Node] = field(default_factory=list)
    collectives: list[Node] = field(default_factory=list)
    """Collectives that gloo started in the window, on threads of its own."""


def read_timeline(events: Iterable[dict[str, Any]], *, parameter_bytes: int | None = None) -> Timeline:
    whole = [event for event in events if event.get("ph") == "X"]
    host = read_host(whole)
    describe_nodes(host)
    kernels = [event for event in whole if event.get("cat") in DEVICE]
    calls = list(device_calls(kernels, host, parameter_bytes) if kernels else host_calls(host, parameter_bytes))
    # Before its first kernel a device waits for the profiler to begin, which is no part of a step.
    start = min((call.segment.start for call in calls), default=host.window.start) if kernels else host.window.start
    segments = fill(calls, host, start)
    if not kernels:
        segments = list(waits_told_apart(segments, host.collectives))
    return Timeline(
        start=start,
        end=host.window.end,
        steps=len(host.steps),
        segments=tuple(segments),
        calls=tuple(calls),
        host_seconds=host_seconds(host),
        sync_idle_seconds=sync_idle(segments, host),
        communication_seconds=communication(calls, [] if kernels else host.collectives),
        communication_by_group=communication_by_group(kernels, host.window),
    )


# the host


def read_host(events: Sequence[dict[str, Any]]) -> Host:
    by_thread: dict[Any, list[Node]] = defaultdict(list)
    for event in events:
        if event.get("cat") in HOST:
            start = float(event["ts"])
            end = start + float(event.get("dur", 0))
            node = Node(str(event["name"]), event["cat"], start, end, event.get("args") or {})
            by_thread[event.get("pid"), event.get("tid")].append(node)
    threads = {thread: nest(nodes) for thread, nodes in by_thread.items()}
    main, window = next((thread, node) for thread, nodes in threads.items() for node in nodes if node.name == WINDOW)
    host = Host(threads=threads, window=window, main=main)
    inside = [node for node in threads[main] if window.start <= node.start and node.end <= window.end]
    host.steps = [node for node in inside if node.name == STEP]
    host.data = [node for node in inside if node.name == DATA_RANGE]
    everywhere = (node for nodes in threads.values() for node in nodes)
    host.collectives = [
        node for node in everywhere if node.name.startswith(GLOO) and window.start <= node.start < window.end
    ]
    return host


def nest(nodes: list[Node]) -> list[Node]:
    """Set each node's parent, the last node that began before it and has not ended, and return the nodes in order.
    Clocks are read one after the other, so a child may seem to outlast its parent slightly: a node that begins inside
    another belongs to it."""
    ordered = sorted(nodes, key=lambda node: (node.start, -node.end))
    around: list[Node] = []
    for node in ordered:
        while around and around[-1].end <= node.start:
            around.pop()
        node.parent = around[-1] if around else None
        around.append(node)
    return ordered


def describe_nodes(host: Host) -> None:
    """Set phase, module and group of every node of the host, parents before children."""
    ends = {id(step): last_backward(host, step) for step in host.steps}
    made: dict[int | None, Node] = {}  # the last forward operator of each sequence number
    ordered = sorted((node for nodes in host.threads.values() for node in nodes), key=lambda node: node.start)
    for node in ordered:
        node.phase = phase_of(node, host, ends)
        node.module = module_of(node, made)
        if node.category == "cpu_op" and node.phase == FORWARD and node.sequence is not None:
            made[node.sequence] = node
    attention = written_out_attention(ordered)
    for node in ordered:
        node.group = group_of_node(node, attention)
    for node in ordered:
        follow_forward(node, made)


def phase_of(node: Node, host: Host, ends: dict[int, float | None]) -> str:
    if node.name.startswith(NODE):
        return BACKWARD
    if node.parent is not None and node.parent.phase in (BACKWARD, DATA):
        return node.parent.phase
    if node.name == DATA_RANGE:
        return DATA
    step = next((step for step in host.steps if step.start <= node.start < step.end), None)
    end = ends[id(step)] if step is not None else None
    return UPDATE if end is not None and node.start >= end else FORWARD


def last_backward(host: Host, step: Node) -> float | None:
    """Return when the last of autograd's nodes in this step ended: everything after it is the update."""
    ends = (
        node.end
        for nodes in host.threads.values()
        for node in nodes
        if node.name.startswith(NODE) and step.start <= node.start < step.end
    )
    return max(ends, default=None)


def module_of(node: Node, made: dict[int | None, Node]) -> str | None:
    if node.name.startswith(MODULE):
        return node.name.removeprefix(MODULE)
    if node.name.startswith(NODE) and node.sequence in made:
        return made[node.sequence].module
    return None if node.parent is None else node.parent.module


def written_out_attention(nodes: Iterable[Node]) -> set[str | None]:
    """Return the modules that call both batched matmuls and a softmax. None among them stands for code outside any
    module, such as compiled code."""
    products: set[str | None] = set()
    softmaxes: set[str | None] = set()
    for node in nodes:
        if node.category == "cpu_op" and node.phase == FORWARD:
            products |= {node.module} if is_product([node.name]) else set()
            softmaxes |= {node.module} if is_softmax([node.name]) else set()
    return products & softmaxes


def group_of_node(node: Node, attention: set[str | None]) -> str | None:
    if node.phase == UPDATE:
        found = group_of_operators([node.name])
        return found if found == COMMUNICATION else OPTIMIZER
    # Annotations are ignored: a module may have any name. The optimizer, which torch annotates, is handled above.
    names = [each.name for each in node.chain() if each.category == "cpu_op"]
    found = group_of_operators(names)
    if node.module in attention and found in (CONTRACTION, NORMALISATION):
        inside = is_product(names) or is_softmax(names)
        return ATTENTION if inside else found
    if node.module in attention and node.module is not None and found not in (None, IDLE, LOSS, COMMUNICATION):
        return ATTENTION  # scale, mask and copies of the heads
    return found


def follow_forward(node: Node, made: dict[int | None, Node]) -> None:
    """Assign the gradient of attention, or of the loss, to the same group, whatever operators compute it."""
    if node.phase != BACKWARD or node.group in (None, IDLE, COMMUNICATION):
        return
    of_autograd = next((each for each in reversed(node.chain()) if each.name.startswith(NODE)), None)
    partner = None if of_autograd is None or of_autograd.sequence is None else made.get(of_autograd.sequence)
    if partner is not None and partner.group in (ATTENTION, LOSS):
        node.group = partner.group


def host_seconds(host: Host) -> float:
    waits = sum(
        node.end - node.start
        for node in host.threads[host.main]
        if node.name in SYNCHRONISATIONS and any(step.start <= node.start < step.end for step in host.steps)
    )
    return (sum(node.end - node.start for node in (*host.steps, *host.data)) - waits) * SECOND


# calls: on a GPU and on a CPU


def device_calls(kernels: Sequence[dict[str, Any]], host: Host, parameter_bytes: int | None) -> Iterator[Call]:
    launches = {
        node.arguments["correlation"]: node
        for nodes in host.threads.values()
        for node in nodes
        if node.category in ("cuda_runtime", "cuda_driver") and "correlation" in node.arguments
    }
    for kernel in kernels:
        start = float(kernel["ts"])
        if not host.window.start <= start < host.window.end:
            continue
        arguments = kernel.get("args") or {}
        launch = launches.get(arguments.get("correlation"))
        yield device_call(kernel, start, launch, parameter_bytes)


def device_call(kernel: dict[str, Any], start: float, launch: Node | None, parameter_bytes: int | None) -> Call:
    name, duration = str(kernel["name"]), float(kernel.get("dur", 0))
    group = None if launch is None else launch.group
    by_name = group_of_kernel(name if kernel["cat"] == "kernel" else "Memcpy")
    if by_name == COMMUNICATION:  # in any phase: clipping sums the norms of all ranks within the update
        group = COMMUNICATION
    elif (group in (None, IDLE, OTHER) or kernel["cat"] != "kernel") and group != OPTIMIZER:
        group = by_name
    operator, work = (None, None) if launch is None else known_work(launch, parameter_bytes)
    segment = Segment(
        start,
        start + duration,
        FORWARD if launch is None else launch.phase,
        group or by_name,
        None if launch is None else launch.module,
    )
    return Call(name, segment, segment.seconds, operator, work)


def known_work(node: Node, parameter_bytes: int | None) -> tuple[Node | None, Work | None]:
    """Return the outermost operator whose work is known, and that work; otherwise the innermost operator and None."""
    operators = [each for each in node.chain() if each.category == "cpu_op"]
    for each in operators:
        work = work_of(each.name, each.arguments, parameter_bytes)
        if work is not None:
            return each, work
    return (operators[-1] if operators else None), None


def host_calls(host: Host, parameter_bytes: int | None) -> Iterator[Call]:
    """Yield every operator's own time, without its children's. Pieces of one operator share its known work."""
    for node, start, end in own_pieces(host):
        group = node.group
        if group is None or group == IDLE or node.phase == DATA or node.category != "cpu_op":
            continue  # on a CPU all of the loader's time in this process is waiting for data
        segment = Segment(start, end, node.phase, group, node.module)
        operator, work = known_work(node, parameter_bytes)
        owner = operator if work is not None else outermost_operator(node)
        yield Call(owner.name if owner is not None else node.name, segment, segment.seconds, owner, work)


def outermost_operator(node: Node) -> Node | None:
    """Return the outermost operator of the same group: 'aten::masked_fill' rather than the copy inside it."""
    same = (each for each in node.chain() if each.category == "cpu_op" and each.group == node.group)
    return next((each for each in same if not each.name.startswith(NODE)), None)


def own_pieces(host: Host) -> Iterator[tuple[Node, float, float]]:
    """Yield (node, start, end) for the main thread's innermost nodes; pieces never overlap."""
    around: list[Node] = []
    clock = host.window.start
    nodes = [node for node in host.threads[host.main] if host.window.start <= node.start < host.window.end]
    for node in nodes:
        while around and around[-1].end <= node.start:
            ended = around.pop()
            if ended.end > clock:
                yield ended, clock, ended.end
                clock = ended.end
        if around and node.start > clock:
            yield around[-1], clock, node.start
        clock = max(clock, node.start)
        around.append(node)
    while around:
        ended = around.pop()
        end = min(ended.end, host.window.end)
        if end > clock:
            yield ended, clock, end
            clock = end


# filling the window


def fill(calls: Sequence[Call], host: Host, start: float) -> list[Segment]:
    """Return segments from `start` to the window's end: work where there is any, waiting elsewhere."""
    busy = list(without_overlap([call.segment for call in calls], start, host.window.end))
    filled, clock = [], start
    for segment in busy:
        filled += waiting(clock, segment.start, segment.phase, host)
        filled.append(segment)
        clock = segment.end
    last = busy[-1].phase if busy else FORWARD
    return filled + waiting(clock, host.window.end, last, host)


def without_overlap(segments: Iterable[Segment], start: float, end: float) -> Iterator[Segment]:
    """Yield segments without overlap. A computing one wins; among equals, the one that began first."""
    ordered = sorted((each for each in segments if each.end > start and each.start < end), key=lambda each: each.start)
    cuts = sorted({max(start, each.start) for each in ordered} | {min(end, each.end) for each in ordered})
    active: list[tuple[bool, float, float, int]] = []  # heap of (can hide, start, end, index), best first
    entered = 0
    for left, right in zip(cuts, cuts[1:], strict=False):
        while entered < len(ordered) and ordered[entered].start <= left:
            each = ordered[entered]
            heapq.heappush(active, (each.group in HIDEABLE, each.start, each.end, entered))
            entered += 1
        while active and active[0][2] <= left:
            heapq.heappop(active)
        if active:
            yield replace(ordered[active[0][3]], start=left, end=right)


def waiting(start: float, end: float, phase: str, host: Host) -> list[Segment]:
    """Return the time without work as segments: waiting for data while the host was in the loader, otherwise idle and
    assigned to `phase`, the phase that follows."""
    segments, clock = [], start
    for data in host.data:
        left, right = max(data.start, clock), min(data.end, end)
        if right <= left:
            continue
        if left > clock:
            segments.append(Segment(clock, left, phase, IDLE))
        segments.append(Segment(left, right, DATA, DATA_WAIT))
        clock = right
    if end > clock:
        segments.append(Segment(clock, end, phase, IDLE))
    return segments


def sync_idle(segments: Sequence[Segment], host: Host) -> float:
    """Return the idle seconds in which a synchronisation inside a step ended: the device had run dry."""
    returns = [
        node.end
        for node in host.threads[host.main]
        if node.name in SYNCHRONISATIONS and any(step.start <= node.start < step.end for step in host.steps)
    ]
    idle = (segment for segment in segments if segment.group == IDLE)
    return sum(each.seconds for each in idle if any(each.start <= moment <= each.end for moment in returns))


# several ranks


def waits_told_apart(segments: Iterable[Segment], collectives: Sequence[Node]) -> Iterator[Segment]:
    """Split the main thread's idle segments: the time during collectives that end within a segment is communication,
    the rest stays idle."""
    for segment in segments:
        awaited = [each for each in collectives if segment.group == IDLE and segment.start < each.end <= segment.end]
        clock = segment.start
        for left, right in union((max(each.start, segment.start), each.end) for each in awaited):
            if left > clock:
                yield replace(segment, start=clock, end=left)
            yield replace(segment, start=left, end=right, group=COMMUNICATION)
            clock = right
        if segment.end > clock:
            yield replace(segment, start=clock)


def communication(calls: Iterable[Call], collectives: Iterable[Node]) -> float:
    """Return the seconds in which a collective is running, whatever else runs."""
    spans = [(call.segment.start, call.segment.end) for call in calls if call.segment.group == COMMUNICATION]
    spans += [(node.start, node.end) for node in collectives]
    return sum(right - left for left, right in union(spans)) * SECOND


def communication_by_group(kernels: Iterable[dict[str, Any]], window: Node) -> dict[str, float] | None:
    """Return the seconds of communication within tensor groups ('tensor') and among ranks that take different data
    ('data'). Each moment counts once per group, since replicas give data two mesh dimensions. torch names the process
    group of a dimension after it ('mesh_tp'), and the profiler attaches that to NCCL's kernels; None if there are none,
    or one has no such name."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for kernel in kernels:
        start = float(kernel["ts"])
        if group_of_kernel(str(kernel["name"])) == COMMUNICATION and window.start <= start < window.end:
            named = str((kernel.get("args") or {}).get(GROUP_NAME, ""))
            group = ("tensor" if named == f"{MESH}tp" else "data") if named.startswith(MESH) else ""
            spans[group].append((start, start + float(kernel.get("dur", 0))))
    if not spans or "" in spans:
        return None
    return {name: sum(right - left for left, right in union(each)) * SECOND for name, each in spans.items()}


def union(spans: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the union of the spans, in order: overlapping spans are merged."""
    begun: tuple[float, float] | None = None
    for left, right in sorted(spans):
        if begun is not None and left <= begun[1]:
            begun = (begun[0], max(begun[1], right))
            continue
        if begun is not None:
            yield begun
        begun = (left, right)
    if begun is not None:
        yield begun
