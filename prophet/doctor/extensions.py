"""Extensions that torch compiles at their first use, DeepSpeed's among them: where they lie, and locks on them.

torch takes a file `lock` before it compiles, and waits for ever where one lies there. A build that was interrupted
leaves its own behind.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from prophet.doctor.check import Check, finding, sound


def root(environment: Mapping[str, str]) -> Path:
    """The folder that torch puts all extensions in."""
    value = environment.get("TORCH_EXTENSIONS_DIR")
    caches = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(value) if value else caches / "torch_extensions"


def folders_of(name: str, environment: Mapping[str, str]) -> list[Path]:
    """The folders in which the extension `name` was built for this Python, or is being built; "*" stands for all."""
    # torch adds a folder for Python and device, as py311_cu126, unless it is given a folder by the variable
    python = f"py{sys.version_info.major}{sys.version_info.minor}_*/"
    return sorted(root(environment).glob(name if environment.get("TORCH_EXTENSIONS_DIR") else python + name))


def first_use(name: str, environment: Mapping[str, str]) -> str:
    """What to print before the extension `name` is loaded; empty where it was built and nothing is in the way."""
    folders = folders_of(name, environment)
    for folder in folders:
        if (lock := folder / "lock").exists():
            return f"DeepSpeed waits for {name}: {_locked(lock)}; unless another process compiles it, run `rm {lock}`"
    if any(folder.joinpath(f"{name}.so").exists() for folder in folders):
        return ""
    return f"DeepSpeed compiles {name} now, at its first use: this takes some minutes without a word"


def locks(environment: Mapping[str, str]) -> list[Check]:
    """Check for locks on torch's extensions."""
    found = [folder / "lock" for folder in folders_of("*", environment)]
    mend = "unless a process compiles it now: `rm {}`"
    return [finding("extension lock", _locked(lock), mend.format(lock)) for lock in found if lock.exists()] or [
        sound("extension lock", f"none in {root(environment)}")
    ]


def _locked(lock: Path) -> str:
    try:
        age_s = max(0.0, time.time() - lock.stat().st_mtime)
    except OSError:
        # Released since it was seen
        age_s = 0.0
    age = f"{age_s:.0f} s" if age_s < 120 else f"{age_s / 60:.0f} min"
    return f"{lock} is {age} old, and torch waits for it without a limit"
