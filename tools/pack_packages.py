"""Packs packages for a machine that cannot reach a package index into one small file.

    python tools/pack_packages.py packages.tar.xz --python 3.12 quack-kernels==0.6.5 flash-attn-4==4.0.0b36 ...
    python tools/pack_packages.py --hopper packages.tar.xz       # what the extra `hopper` needs, for CUDA 13

On that machine: `mkdir -p /tmp/site-packages && tar -xJf packages.tar.xz -C /tmp/site-packages`, and put that folder on
PYTHONPATH; for --hopper also its nvidia_cutlass_dsl/dsl_packages, which pip's own .pth file would add. The folder must
be called site-packages: CUTLASS' DSL looks for its libraries from there. Dependencies are not followed: name every
package that is missing there. One stream with a filter for x86 code and a dictionary as long as the longest library
turns 280 MB into 55 MiB; that took a busy core eight minutes.
"""

from __future__ import annotations

import argparse
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

DSL = "4.8.1"
HOPPER = (
    "quack-kernels==0.6.5",
    "flash-attn-4==4.0.0b36",
    f"nvidia-cutlass-dsl=={DSL}",
    *(f"nvidia-cutlass-dsl-libs-{part}=={DSL}" for part in ("base", "core", "cu13")),
    "apache-tvm-ffi==0.1.15.post2",
    "torch-c-dlpack-ext==0.1.5",
    "einops==0.8.2",
)
FILTERS = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 2**28, "pb": 0, "lc": 3},
]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("packages", nargs="*", help="as pip takes them")
    parser.add_argument("--hopper", action="store_true", help="those of the extra `hopper`, for CUDA 13")
    parser.add_argument("--python", default="3.12", help="of that machine (default: 3.12)")
    options = parser.parse_args(words)
    packages = [*options.packages, *(HOPPER if options.hopper else ())]
    if not packages:
        parser.error("which packages?")
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder) / "wheels", Path(folder) / "site-packages"
        download(packages, options.python, wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            zipfile.ZipFile(wheel).extractall(site)
        pack(site, options.out)
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.1f} MiB")
    return 0


def download(packages: list[str], python: str, into: Path) -> None:
    words = ["download", "-q", "--no-deps", "--only-binary=:all:", f"--python-version={python}", "-d", str(into)]
    subprocess.run([sys.executable, "-m", "pip", *words, *packages], check=True)


def pack(folder: Path, out: Path) -> None:
    """Pack the largest files first, so that the dictionary still holds one library when a similar one follows."""
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)
    out.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(out, "wb", filters=FILTERS) as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
        for path in files:
            tar.add(path, arcname=str(path.relative_to(folder)))


if __name__ == "__main__":
    sys.exit(main())
