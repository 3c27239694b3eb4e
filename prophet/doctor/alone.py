"""What one rank can see without another, all of it at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prophet.doctor import devices, disks, extensions, installed
from prophet.doctor.check import Check, Look, finding, look, sound, unseen
from prophet.errors import TopologyError
from prophet.machine.topology import read_topology

_MEASURE = "`prophet calibrate --out FILE` measures this machine"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the user has asked for on the command line; None for what was left out.

    Attributes:
        backend: The job's backend.
        checkpoints: Folder for its checkpoints.
        topology: Its topology file.
    """

    backend: str | None = None
    checkpoints: Path | None = None
    topology: Path | None = None


def look_alone(
    asked: Asked, environment: Mapping[str, str], versions: Mapping[str, str], local_ranks: int, limit_s: float
) -> tuple[list[Check], str]:
    """Run the checks that need no other rank.

    Args:
        asked: What the user has asked for.
        environment: Environment variables.
        versions: What is installed, by `installed.versions`.
        local_ranks: Ranks of this machine.
        limit_s: Seconds for all checks together.

    Returns:
        The checks, and the backend that this rank takes.
    """
    # Should the drivers hang, the report goes on with a backend that needs none
    backend = "gloo"

    def gpus() -> list[Check]:
        nonlocal backend
        seen = devices.see()
        backend, chosen = devices.backend(asked.backend, seen)
        return devices.gpus(environment, seen, local_ranks) + devices.usable(seen.by_torch) + chosen

    smi = "`nvidia-smi` says what is wrong; `export CUDA_VISIBLE_DEVICES=` goes on without GPUs"
    looks = [
        Look("core", installed.core, "`pip install -v -e .` in the checkout"),
        Look("import name", installed.clash, "`pip list` says what is installed"),
        Look("GPUs", gpus, smi),
        Look("topology", partial(topology, asked.topology), _MEASURE),
    ]
    for folder in disks.folders(environment, versions, asked.checkpoints):
        looks.append(Look(folder.name, partial(disks.writable, folder), folder.elsewhere))
    # DeepSpeed is what compiles extensions at their first use
    if versions["deepspeed"] != installed.NOT_INSTALLED:
        hangs = f"`ls {extensions.root(environment)}` says why"
        looks.append(Look("extension lock", partial(extensions.locks, environment), hangs))
    checks = look(limit_s, looks)
    if asked.checkpoints is None:
        checks.append(unseen("checkpoints", "no folder was given (--checkpoints FOLDER)"))
    return checks, backend


def topology(file: Path | None) -> list[Check]:
    """Whether the planner knows how fast this machine's links are."""
    if file is None:
        return [unseen("topology", "no file was given (--machine FILE)")]
    try:
        found = read_topology(file)
    # An error of a file that the user named is a finding like any other, and not the end of the report
    except (TopologyError, OSError) as error:
        return [finding("topology", str(error), _MEASURE)]
    return [sound("topology", f"{file}: {found.name}, {found.ranks} ranks")]
