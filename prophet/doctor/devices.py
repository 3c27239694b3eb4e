"""GPUs that are named, there and usable, and the backend that ranks talk by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from prophet.doctor.check import Check, finding, sound

_NO_CUDA = "install PyTorch for CUDA: https://pytorch.org/get-started names the line for your driver"


@dataclass(frozen=True, slots=True)
class Seen:
    """What torch and the machine know of GPUs.

    Attributes:
        by_torch: How many torch sees.
        by_machine: How many have a device file.
        built_for: What torch was built for; None: the CPU.
    """

    by_torch: int
    by_machine: int
    built_for: str | None


def see() -> Seen:
    """Ask torch for GPUs, and count the machine's device files."""
    # Device files are there even where the driver does not answer or torch was built without CUDA
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return Seen(torch.cuda.device_count(), there, torch.version.cuda or torch.version.hip)


def gpus(environment: Mapping[str, str], seen: Seen, local_ranks: int) -> list[Check]:
    """Check that the GPUs that are named or there can be used, and suffice for the ranks of this machine.

    Args:
        environment: Environment variables.
        seen: What torch and the machine know of GPUs.
        local_ranks: Ranks of this machine.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    # Values with which a user or a launcher hides all GPUs on purpose
    named = [d for d in (visible or "").split(",") if d.strip() not in ("", "-1", "NoDevFiles")]
    if named and seen.by_torch < len(named):
        message = f"CUDA_VISIBLE_DEVICES={visible} names {len(named)}, and torch sees {seen.by_torch}"
        if seen.built_for is None:
            message += ": it was built for the CPU"
        there = "`unset CUDA_VISIBLE_DEVICES`, or name those that `nvidia-smi -L` lists"
        return [finding("GPUs", message, _NO_CUDA if seen.built_for is None and seen.by_machine else there)]
    if not seen.by_torch and seen.by_machine and visible is None:
        if seen.built_for is None:
            return [finding("GPUs", f"{seen.by_machine} are here, and torch was built for the CPU", _NO_CUDA)]
        return [finding("GPUs", f"{seen.by_machine} are here, and torch sees none", "`nvidia-smi` says what is wrong")]
    # With CUDA_VISIBLE_DEVICES set, each rank may have been given other GPUs than its neighbours
    if 0 < seen.by_torch < local_ranks and visible is None:
        message = f"{local_ranks} ranks on this machine share {seen.by_torch}, and NCCL wants one for each"
        start = f"`torchrun --standalone --nproc-per-node {seen.by_torch}`"
        return [finding("GPUs", message, f"{start}, or `CUDA_VISIBLE_DEVICES=` for none")]
    if not seen.by_torch:
        hidden = " (CUDA_VISIBLE_DEVICES hides them)" if visible is not None and seen.by_machine else ""
        return [sound("GPUs", f"none{hidden}")]
    return [sound("GPUs", f"{seen.by_torch}, the first is {torch.cuda.get_device_name(0)}")]


def usable(count: int) -> list[Check]:
    """Check that every GPU computes."""
    for index in range(count):
        # A sum, since a GPU that is listed may still fail at the first kernel
        total = torch.ones(1024, device=f"cuda:{index}").sum().item()
        if total != 1024:
            return [
                finding("GPUs", f"cuda:{index} adds 1024 ones to {total:g}", "`export CUDA_VISIBLE_DEVICES` without it")
            ]
    return [sound("GPUs compute", f"all {count}")] if count else []


def backend(asked: str | None, seen: Seen) -> tuple[str, list[Check]]:
    """Choose the backend that a job takes here, and check that the one that was asked for suits the machine."""
    usual = "nccl" if seen.by_torch else "gloo"
    if asked == "nccl" and not seen.by_torch:
        message = "nccl moves tensors between GPUs, and torch sees none here"
        return "gloo", [
            finding("backend", message, '`init_process_group("gloo")` and `--backend gloo`, or see GPUs above')
        ]
    if asked == "gloo" and seen.by_torch:
        message = f"gloo takes tensors of the {seen.by_torch} GPUs through the host"
        return "gloo", [finding("backend", message, '`init_process_group("nccl")` and `--backend nccl`')]
    return usual, [sound("backend", usual)]
