"""GPUs that are named, there and usable, and the backend that ranks talk by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from prophet.doctor.check import Check, finding, sound

BACKENDS = ("gloo", "nccl")
_NO_CUDA = "install PyTorch for CUDA: https://pytorch.org/get-started names the line for your driver"


@dataclass(frozen=True, slots=True)
class Seen:
    """What torch and the machine say of GPUs: how many each of them sees, and what torch was built for, if for any."""

    by_torch: int
    by_machine: int
    built_for: str | None


def see() -> Seen:
    """Ask torch, and count the machine's device files."""
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return Seen(torch.cuda.device_count(), there, torch.version.cuda or torch.version.hip)


def gpus(environment: Mapping[str, str], seen: Seen, local_ranks: int) -> list[Check]:
    """Whether the GPUs that are named or there can be used, and suffice for the ranks of this machine."""
    told = environment.get("CUDA_VISIBLE_DEVICES")
    named = [d for d in (told or "").split(",") if d.strip() not in ("", "-1", "NoDevFiles")]
    if named and seen.by_torch < len(named):
        said = f"CUDA_VISIBLE_DEVICES={told} names {len(named)}, and torch sees {seen.by_torch}"
        if seen.built_for is None:
            said += ": it was built for the CPU"
        there = "`unset CUDA_VISIBLE_DEVICES`, or name those that `nvidia-smi -L` lists"
        return [finding("GPUs", said, _NO_CUDA if seen.built_for is None and seen.by_machine else there)]
    if not seen.by_torch and seen.by_machine and told is None:
        if seen.built_for is None:
            return [finding("GPUs", f"{seen.by_machine} are here, and torch was built for the CPU", _NO_CUDA)]
        return [finding("GPUs", f"{seen.by_machine} are here, and torch sees none", "`nvidia-smi` says what is wrong")]
    if 0 < seen.by_torch < local_ranks and told is None:  # else each rank may have been given GPUs of its own
        said = f"{local_ranks} ranks on this machine share {seen.by_torch}, and NCCL wants one for each"
        start = f"`torchrun --standalone --nproc-per-node {seen.by_torch}`"
        return [finding("GPUs", said, f"{start}, or `CUDA_VISIBLE_DEVICES=` for none")]
    if not seen.by_torch:
        hidden = " (CUDA_VISIBLE_DEVICES hides them)" if told is not None and seen.by_machine else ""
        return [sound("GPUs", f"none{hidden}")]
    return [sound("GPUs", f"{seen.by_torch}, the first is {torch.cuda.get_device_name(0)}")]


def usable(count: int) -> list[Check]:
    """Whether every GPU computes."""
    for index in range(count):
        total = torch.ones(1024, device=f"cuda:{index}").sum().item()
        if total != 1024:
            return [
                finding("GPUs", f"cuda:{index} adds 1024 ones to {total:g}", "`export CUDA_VISIBLE_DEVICES` without it")
            ]
    return [sound("GPUs compute", f"all {count}")] if count else []


def backend(asked: str | None, seen: Seen) -> tuple[str, list[Check]]:
    """The backend that a job takes here, and whether the one that was `asked` for suits the machine."""
    usual = "nccl" if seen.by_torch else "gloo"
    if asked == "nccl" and not seen.by_torch:
        said = "nccl moves tensors between GPUs, and torch sees none here"
        return "gloo", [
            finding("backend", said, '`init_process_group("gloo")` and `--backend gloo`, or see GPUs above')
        ]
    if asked == "gloo" and seen.by_torch:
        said = f"gloo takes tensors of the {seen.by_torch} GPUs through the host"
        return "gloo", [finding("backend", said, '`init_process_group("nccl")` and `--backend nccl`')]
    return usual, [sound("backend", usual)]
