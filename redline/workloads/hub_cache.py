"""Models by their name on the Hugging Face hub, if they are in this machine's cache.

    find_cached("Qwen/Qwen2-0.5B") -> .../models--Qwen--Qwen2-0.5B/snapshots/HASH, the folder with its config.json

The cache is read as files and folders in huggingface_hub's layout: that package is not imported, and nothing is
downloaded. Not supported: revisions other than main, and other kinds of repositories.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from redline.core.errors import UserError

# What the hub allows: letters, digits, - _ . in each part, an optional organisation, 96 characters at most.
NAME = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
LONGEST_NAME = 96
REVISION = "main"


def is_hub_name(words: str) -> bool:
    return len(words) <= LONGEST_NAME and NAME.fullmatch(words) is not None and not words.endswith((".json", ".py"))


def hub_cache() -> Path:
    """Return where huggingface_hub keeps its downloads, by the variables it reads, newest name first."""
    home = _given("HF_HOME") or (_given("XDG_CACHE_HOME") or Path(os.path.expanduser("~/.cache"))) / "huggingface"
    return _given("HF_HUB_CACHE") or _given("HUGGINGFACE_HUB_CACHE") or home / "hub"


def _given(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(os.path.expandvars(os.path.expanduser(value))) if value else None


def repository(name: str) -> Path:
    return hub_cache() / "--".join(("models", *name.split("/")))


def find_cached(name: str) -> Path | None:
    """Return the folder of the newest downloaded version of a model; None if it was never downloaded."""
    folder = repository(name)
    if not folder.is_dir():
        return None
    try:
        version = (folder / "refs" / REVISION).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise _incomplete(name, f"it has no refs/{REVISION}, which says what version it is") from None
    snapshot = folder / "snapshots" / version
    if not version or not (snapshot / "config.json").is_file():
        raise _incomplete(name, f"the version that refs/{REVISION} names has no config.json there")
    return snapshot


def not_cached(name: str) -> UserError:
    return UserError(
        f"{name} is neither a file nor a model in the local cache",
        f"nothing is downloaded, and {hub_cache()} has no {repository(name).name}",
        f"{_download(name)}; or point at a config.json, a model folder or a preset",
    )


def _incomplete(name: str, why: str) -> UserError:
    return UserError(f"the local cache holds {name} in part only", why, _download(name))


def _download(name: str) -> str:
    return f"fetch it with `hf download {name} config.json`"
