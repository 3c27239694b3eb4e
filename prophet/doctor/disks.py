"""Folders that training writes to: a file is really written, since a mount may refuse what permissions allow."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prophet.doctor.check import Check, finding, sound
from prophet.doctor.extensions import root
from prophet.doctor.installed import NOT_INSTALLED
from prophet.kernels.tuning import cache_file

_TRIED_BYTES = 1 << 20
# Room for a compiled extension, and for what a compiler writes while it works
_LEAST_BYTES = 64 << 20
# Room for the checkpoint of a small model
_CHECKPOINT_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """A folder that training writes to.

    Attributes:
        name: What it is for.
        path: The folder; it may have to be made.
        elsewhere: What puts it somewhere else.
        need_bytes: Free bytes that it needs; fewer are a finding.
    """

    name: str
    path: Path
    elsewhere: str
    need_bytes: int = _LEAST_BYTES


def folders(environment: Mapping[str, str], versions: Mapping[str, str], checkpoints: Path | None) -> list[Folder]:
    """The folders of the library, torch and DeepSpeed, and the one for checkpoints.

    Args:
        environment: Environment variables.
        versions: What is installed, by `installed.versions`.
        checkpoints: The job's folder for checkpoints; None: it was not given.
    """
    # Read from the variables instead of asking Triton, which may not be installed
    triton = Path(environment.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    places = {
        "temporary files": (Path(environment.get("TMPDIR") or tempfile.gettempdir()), "TMPDIR"),
        "our cache": (cache_file().parent, "HOME"),
        "Triton's cache": (triton, "TRITON_CACHE_DIR"),
    }
    if versions["deepspeed"] != NOT_INSTALLED:
        places["torch's extensions"] = (root(environment), "TORCH_EXTENSIONS_DIR")
    found = [
        Folder(name=name, path=path, elsewhere=f"`export {variable}=FOLDER` with another one")
        for name, (path, variable) in places.items()
    ]
    if checkpoints is not None:
        other = "give your script another folder"
        found.append(Folder(name="checkpoints", path=checkpoints, elsewhere=other, need_bytes=_CHECKPOINT_BYTES))
    return found


def writable(folder: Folder) -> list[Check]:
    """Check that a file can be written to a folder, or to the nearest one there is above it, and that room is left."""
    place = folder.path.expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".prophet-doctor-") as file:
            file.write(bytes(_TRIED_BYTES))
            file.flush()
            # A network disk or a quota may refuse bytes only when they reach it
            os.fsync(file.fileno())
        free = shutil.disk_usage(place).free
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        first = (
            f"delete files (`df -h {place}`)" if full else f"make it writable (`findmnt -T {place}; ls -ld {place}`)"
        )
        message = f"{place} cannot be written to: {error.strerror or error}"
        return [finding(folder.name, message, f"{first}, or {folder.elsewhere}")]
    if free < folder.need_bytes:
        message = f"{place} has {free >> 20} MiB free, expected at least {folder.need_bytes >> 20} MiB"
        return [finding(folder.name, message, f"delete files (`df -h {place}`), or {folder.elsewhere}")]
    return [sound(folder.name, f"{folder.path} is writable, {free / 2**30:.1f} GiB free")]
