"""Running a user's module to find something out, and leaving no trace: random state and modes are put back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# The generators belong to all threads
_ALONE = threading.RLock()


@contextmanager
def trying(seed: int | None = 0) -> Iterator[None]:
    """Put all generators back after the `with` block; one thread at a time.

    Args:
        seed: What the generators start from inside; None: from where they are.
    """
    # Asking for CUDA's generator would start CUDA in a process that does not use it.
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with _ALONE, torch.random.fork_rng(devices=devices):
        if seed is not None:
            seed_all(seed)
        yield


def seed_all(seed: int) -> None:
    """Seed all generators; `torch.manual_seed` also notes where it was called from, which takes a millisecond."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put `module` in evaluation mode inside the `with` block, and each of its parts back into its own afterwards."""
    # By part: users may keep a frozen part in evaluation mode all the time, so `train()` would not restore it
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
