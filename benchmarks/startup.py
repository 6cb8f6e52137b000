"""How long the commands that need no device take to answer: they promise less than half a second.

    python benchmarks/startup.py [--rounds 10]

Each command runs in its own process, interleaved; the figures are the quickest and the median of the rounds. The exit
code is 1 if a command's quickest run is over the promise: slower runs are this machine's doing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

PROMISE_SECONDS = 0.5
COMMANDS = (
    ["--help"],
    ["ladder", "--help"],
    ["ladder", "--list-rungs"],
    ["lint", "gpt2-xl", "--gpu", "A100-80-SXM"],
    ["lint", "gpt2-xl", "--json"],
    ["estimate", "gpt2-xl", "--gpu", "A100-80-SXM", "--micro-batch", "8"],
    ["estimate", "gpt2-xl", "--gpu", "A100-80-SXM", "--json"],
    ["hardware", "--name", "NVIDIA L40S"],
    ["hardware", "--list"],
    ["hardware", "--json"],
    ["data", "--help"],
    ["train", "--help"],
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    taken: dict[str, list[float]] = {" ".join(words): [] for words in COMMANDS}
    for _ in range(rounds):
        for words in COMMANDS:
            start = time.perf_counter()
            subprocess.run([sys.executable, "-m", "redline", *words], capture_output=True, check=True)
            taken[" ".join(words)].append(time.perf_counter() - start)
    for words, seconds in taken.items():
        print(f"redline {words:55} quickest {min(seconds):.3f} s, median {statistics.median(seconds):.3f} s")
    return int(any(min(seconds) > PROMISE_SECONDS for seconds in taken.values()))


if __name__ == "__main__":
    sys.exit(main())
