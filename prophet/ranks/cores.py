"""How many physical cores this process may use: more ranks than that share cores, and their times mean nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath


def usable_cores(*, root: Path = Path("/"), cpus: Iterable[int] | None = None) -> int:
    """Count the physical cores that this process may keep busy at once, at least one.

    The count stays within the affinity mask and the CPU quota of the control groups (v1 and v2) around the process. A
    source that this system does not have limits nothing.

    Args:
        root: Where proc and sys are.
        cpus: The affinity mask, for tests; None asks the system.
    """
    allowed = _affinity() if cpus is None else sorted(cpus)
    # A set: two hardware threads of one core share its arithmetic units, and count once
    cores = {_core_of(root, cpu) for cpu in allowed}
    # Rounded down: with 1.5 CPUs two busy ranks would be throttled in turn
    return max(1, min([len(cores), *map(math.floor, _quotas(root))]))


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    # macOS and Windows have no mask
    return list(range(os.cpu_count() or 1))


def _core_of(root: Path, cpu: int) -> str:
    """A name that the hardware threads of one core have in common."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second is the older name
        text = _read(topology / name)
        if text:
            return text
    return f"cpu {cpu}"


def _quotas(root: Path) -> Iterator[float]:
    """Every quota around this process, in CPUs; a group's parents limit it too."""
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # A line without controllers is the one of version 2, with one file for quota and period
        if not controllers:
            for folder in _folder_and_parents(mounts, path):
                yield from _quota(*_read(folder / "cpu.max").split()[:2])
        elif "cpu" in controllers.split(","):
            for mount in {mounts / controllers, mounts / "cpu"}:
                for folder in _folder_and_parents(mount, path):
                    yield from _quota(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _folder_and_parents(mount: Path, path: str) -> Iterator[Path]:
    """The group's folder up to the mount. In a container the path may be the host's, and only the mount exists."""
    inner = PurePosixPath(path.lstrip("/"))
    for part in (inner, *inner.parents):
        yield mount / part


def _quota(quota: str = "", period: str = "") -> Iterator[float]:
    """One quota in CPUs; none for "max", "-1" and files that are not there."""
    with suppress(ValueError):
        if int(quota) > 0 and int(period) > 0:
            yield int(quota) / int(period)


def _read(file: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text(encoding="utf-8").strip()
    return ""
