"""What is installed, which GPUs there are, and the environment variables that decide how they work together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from prophet.doctor import devices, installed
from prophet.doctor.check import Check, finding, sound
from prophet.gpu_check.checks import Answer, Place

# By variable and value: what it does here
_WRONG = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "the host waits for every kernel, so no transfer is hidden",
    ("CUDA_DEVICE_MAX_CONNECTIONS", "1"): (
        "all communicators share one queue, in which a pipeline with replicas may wait for ever"
    ),
    ("TRITON_INTERPRET", "1"): "kernels run in Triton's interpreter, thousands of times slower",
    ("NCCL_P2P_DISABLE", "1"): "GPUs of one machine exchange through the host's memory",
}


def environment(place: Place) -> Answer:
    """Look at versions, GPUs, driver, NCCL, peer access and variables."""
    versions, variables = installed.versions(), place.variables
    figures: dict[str, Any] = {"versions": versions, "variables": dict(variables), "gpus": []}
    checks = installed.core() + installed.clash()
    if not place.on_gpu:
        checks.append(sound("device", f"the CPU, torch {versions['torch']}"))
    else:
        seen = devices.see()
        checks += devices.gpus(place.variables, seen, 1)
        found = [torch.cuda.get_device_properties(i) for i in range(seen.by_torch)]
        figures["gpus"] = [
            {"name": one.name, "bytes": one.total_memory, "processors": one.multi_processor_count} for one in found
        ]
        figures["cuda"], figures["driver"] = torch.version.cuda, driver()
        if found:
            checks += [*devices.usable(seen.by_torch), *nccl(figures), *peers(seen.by_torch)]
        checks += wrong(variables)
    named = ", ".join(f"{name}={value}" for name, value in variables.items()) or "none of CUDA, NCCL, gloo or Triton"
    checks.append(sound("variables", named))
    return Answer(checks=checks, figures=figures, paste=mends(checks))


def wrong(variables: Mapping[str, str]) -> list[Check]:
    """Find variables whose values slow training down or stop it."""
    return [
        finding("variables", f"{name}={value}: {does}", f"`unset {name}`")
        for (name, value), does in _WRONG.items()
        if variables.get(name) == value
    ]


def mends(checks: list[Check]) -> list[str]:
    """The lines for a shell that mend what is wrong with variables."""
    return [check.mend.strip("`") for check in checks if check.name == "variables" and check.state == "finding"]


def driver() -> str | None:
    """The version of the kernel's driver, in NVIDIA's words."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return None


def nccl(figures: dict[str, Any]) -> list[Check]:
    """Find NCCL's version, and put it into `figures`."""
    try:
        figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError) as error:
        return [finding("NCCL", f"this torch has none: {error}", "install PyTorch for CUDA: https://pytorch.org")]
    return [sound("NCCL", f"{figures['nccl']}, CUDA {figures['cuda']}, driver {figures['driver']}")]


def peers(count: int) -> list[Check]:
    """Say which pairs of GPUs reach each other's memory."""
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    without = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if not pairs:
        return []
    if without:
        return [sound("peer access", f"not between {', '.join(without[:6])}: their bytes go through the host")]
    return [sound("peer access", f"all {count} GPUs reach each other")]
