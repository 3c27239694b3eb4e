"""Random numbers that do not depend on where a unit runs: its generator is seeded anew for every microbatch.

The key is (seed, unit, update, microbatch), with the slice where the microbatch is cut. Microbatches are counted over
replicas and accumulated calls. So nothing travels with a layer, and one process with the same keys draws the same
numbers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from prophet.trials import RandomState, seed_host


def unit_seed(seed: int, unit: int, update: int, microbatch: int, slice_: int | None = None) -> int:
    """Seed one unit's generators for one microbatch or one slice of it, 63 bits.

    Args:
        seed: The run's seed.
        unit: The unit's number.
        update: Updates made so far.
        microbatch: Its number, over replicas and accumulated calls.
        slice_: The slice's number (None: the microbatch passes whole).
    """
    text = f"{seed} {unit} {update} {microbatch}" + ("" if slice_ is None else f" {slice_}")
    # a digest, as neighbouring keys must give unrelated seeds; 63 bits fit a signed integer
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def going_on(device: torch.device) -> Iterator[None]:
    """Whatever is seeded or drawn inside, the default generators of the host, of Python and of `device` go on after."""
    before, python = RandomState(device), random.getstate()
    try:
        yield
    finally:
        before.put_back()
        random.setstate(python)


def seed_generators(seed: int, device: torch.device) -> None:
    """Let the default generators of the host, of Python and of `device` draw from `seed`."""
    on_device = getattr(torch, device.type, None) if device.type not in ("cpu", "meta") else None
    # not `torch.manual_seed`, which seeds the generators of all devices
    seed_host(seed)
    random.seed(seed)
    if on_device is not None:
        on_device.manual_seed(seed)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, the default generators of the host, of Python and of `device` draw from `seed`; afterwards they go on."""
    with going_on(device):
        seed_generators(seed, device)
        yield
