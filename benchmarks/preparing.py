"""How fast `redline data prepare` is beside the bare tokenizer: MB of text per second and core, on the same text.

    python benchmarks/preparing.py [--text FILE] [--megabytes 48] [--processes 2] [--rounds 5]

Bare is tiktoken's `encode_ordinary_batch` on one thread in each of as many processes, over documents already in memory:
no reading, splitting, writing or hashing. Both are timed in turn, by core seconds (CPU time of all their processes
together, which a busy machine disturbs least) and by the clock. The start of the processes, negligible for a large
corpus, is measured with a corpus of one word for each of them and subtracted. The exit code is 1 if the median share by
core seconds is under 85 %; on an idle machine the clock must agree. (Not called tokenize.py: a script's folder is
searched first, and Python has a module of that name.)
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from redline.core.host import core_count
from redline.data.prepare import Preparation, prepare
from redline.data.text import read_corpus
from redline.data.tokenizer import tokenizer

PROMISE = 0.85
DOCUMENT_CHARACTERS = 4000  # about a web page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", default="sample", help="a UTF-8 file (default: the manual that comes with Python)")
    parser.add_argument("--megabytes", type=float, default=48.0, help="of text, repeated if the file is shorter")
    parser.add_argument("--processes", type=int, default=core_count())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    documents = make_documents(read_corpus(options.text), options.megabytes)
    megabytes = sum(len(text.encode()) for text in documents) / 1e6
    print(f"{len(documents):,} documents, {megabytes:.1f} MB, {options.processes} processes, {options.rounds} rounds")

    found: dict[str, list[Spent]] = {"bare": [], "prepare": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, words = write(folder / "text.jsonl", documents), write(folder / "words.jsonl", ["w"] * options.processes)
        for number in range(options.rounds):
            found["bare"].append(encode_bare(documents, options.processes))
            start = prepare_once(words, folder / f"words-{number}", options.processes, part_bytes=1)
            whole = prepare_once(text, folder / f"text-{number}", options.processes)
            found["prepare"].append(Spent(whole.core - start.core, whole.clock - start.clock))
    shares = {}
    for how, cores in (("core", 1), ("clock", options.processes)):
        bare = [getattr(spent, how) for spent in found["bare"]]
        for name, all_spent in found.items():
            seconds = [getattr(spent, how) for spent in all_spent]
            share = statistics.median(b / s for b, s in zip(bare, seconds, strict=True))
            rate = megabytes / statistics.median(seconds) / cores
            print(f"by the {how:5} {name:8} {rate:6.2f} MB/s per core, {100 * share:5.1f} % of bare")
            shares[how, name] = share
    return int(shares["core", "prepare"] < PROMISE)


class Spent(NamedTuple):
    core: float
    """CPU seconds of all processes together."""
    clock: float


def make_documents(text: str, megabytes: float) -> list[str]:
    pages = [text[start : start + DOCUMENT_CHARACTERS] for start in range(0, len(text), DOCUMENT_CHARACTERS)]
    return pages * max(1, round(megabytes * 1e6 / len(text)))


def write(path: Path, documents: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def encode_bare(documents: Sequence[str], processes: int) -> Spent:
    """Time from a common start, with tokenizer and text loaded, to the end of the last process."""
    context = multiprocessing.get_context("spawn")
    crew = []
    for number in range(processes):
        ours, theirs = context.Pipe()
        process = context.Process(target=encode_share, args=(theirs, documents[number::processes]))
        process.start()
        crew.append((process, ours))
    for _, connection in crew:
        connection.recv()
    for _, connection in crew:
        connection.send("go")
    spent = [connection.recv() for _, connection in crew]
    for process, _ in crew:
        process.join()
    return Spent(sum(core for core, _ in spent), max(clock for _, clock in spent))


def encode_share(connection: Connection, documents: Sequence[str]) -> None:
    encoding = tiktoken_of("gpt2")
    connection.send("ready")
    connection.recv()
    core, clock = time.process_time(), time.perf_counter()
    encoding.encode_ordinary_batch(documents, num_threads=1)
    connection.send((time.process_time() - core, time.perf_counter() - clock))


def tiktoken_of(name: str) -> Any:
    """Return the tiktoken object inside our tokenizer, which has the very same merges."""
    cells = getattr(tokenizer(name).encode, "__closure__", None) or ()
    return next(cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "encode_ordinary_batch"))


def prepare_once(source: Path, out: Path, processes: int, part_bytes: int | None = None) -> Spent:
    order = Preparation(sources=(str(source),), out=out, processes=processes, part_bytes=part_bytes, val_fraction=0)
    core, clock = core_seconds(), time.perf_counter()
    prepare(order)
    return Spent(core_seconds() - core, time.perf_counter() - clock)


def core_seconds() -> float:
    """Return the CPU seconds of this process and of all its children that have ended."""
    mine, theirs = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return mine.ru_utime + mine.ru_stime + theirs.ru_utime + theirs.ru_stime


if __name__ == "__main__":
    sys.exit(main())
