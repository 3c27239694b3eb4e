"""Running a user's module to find something out, and leaving no trace: random state and modes are put back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# The generators belong to all threads
_ALONE = threading.RLock()
# Reading a state allocates while torch holds the generator's lock. Where that collects garbage with tensors in it, the
# interpreter's lock is given up, and a thread that takes it and wants the generator then waits for ever. So threads
# take turns; nobody waits for anything else while it has this lock.
_AT_GENERATOR = threading.RLock()


class RandomState:
    """The states of torch's default generators at a moment: the CPU's, and those of some devices.

    Args:
        devices: The devices; the CPU and "meta" add nothing.
    """

    def __init__(self, *devices: torch.device) -> None:
        self._devices = [d for d in devices if d.type not in ("cpu", "meta")]
        with _AT_GENERATOR:
            self.states = [torch.get_rng_state()]  #: as bytes, the CPU's first
            self.states += [torch.get_device_module(d).get_rng_state(d) for d in self._devices]

    def put_back(self) -> None:
        """Set the generators to these states."""
        with _AT_GENERATOR:
            torch.set_rng_state(self.states[0])
            for device, state in zip(self._devices, self.states[1:], strict=True):
                torch.get_device_module(device).set_rng_state(state, device)

    def is_now(self) -> bool:
        """Whether nothing was drawn since."""
        now = RandomState(*self._devices)
        return all(torch.equal(a, b) for a, b in zip(self.states, now.states, strict=True))


@contextmanager
def trying(seed: int | None = 0) -> Iterator[None]:
    """Put all generators back after the `with` block; one thread at a time.

    Args:
        seed: What the generators start from inside; None: from where they are.
    """
    # Asking for CUDA's generator would start CUDA in a process that does not use it.
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    with _ALONE:
        before = RandomState(*(torch.device("cuda", i) for i in range(count)))
        try:
            if seed is not None:
                seed_all(seed)
            yield
        finally:
            before.put_back()


def seed_all(seed: int) -> None:
    """Seed all generators; `torch.manual_seed` also notes where it was called from, which takes a millisecond."""
    seed_host(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def seed_host(seed: int) -> None:
    """Seed the CPU's generator alone."""
    with _AT_GENERATOR:
        torch.default_generator.manual_seed(seed)


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
