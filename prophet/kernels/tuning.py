"""Tile shapes of the Triton kernels: a rule that always answers, and a file of measured choices that overrides it.

Nothing is timed while a model trains: a shape that was never measured runs with the rule's choice, so that no step
stalls and no host synchronisation hides in a first call. `benchmarks.kernels.tune` measures a bounded list of
candidates and writes the best to a file that is keyed by device, dtype and shape class (sizes rounded up to powers of
two).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

from prophet.files import cache_folder

Kind = Literal["rows", "weights"]
# most bytes of a file that is read: a few thousand entries are far below
FILE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Tile shape and launch parameters of a kernel.

    Attributes:
        rows, cols: Of a tile of the result.
        depth: Terms of a product in one step.
        swizzle: Row tiles in a band, which concurrent programs walk through column by column.
        warps: Of a program.
        stages: Of a program's pipeline of loads.
    """

    rows: int
    cols: int
    depth: int
    swizzle: int = 8
    warps: int = 4
    stages: int = 3

    def __post_init__(self) -> None:
        for name in ("rows", "cols", "depth"):
            value = getattr(self, name)
            # `tl.dot` takes 16 at least, and `tl.arange` powers of two
            if not isinstance(value, int) or not 16 <= value <= 256 or value & (value - 1):
                raise ValueError(f"Config.{name} must be a power of two from 16 to 256, got {value!r}")
        if self.warps not in (1, 2, 4, 8, 16) or not 1 <= self.stages <= 8 or not 1 <= self.swizzle <= 64:
            raise ValueError(f"warps, stages or swizzle out of range: {self}")


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a program's tiles have to fit into.

    Attributes:
        capability: Compute capability times ten, such as 86.
        shared_bytes: The most shared memory that one program may use.
    """

    capability: int
    shared_bytes: int


# NVIDIA, CUDA C++ programming guide, technical specifications: "maximum amount of shared memory per thread block"
ARCHITECTURES = {c: Architecture(c, kib << 10) for c, kib in ((80, 163), (86, 99), (89, 99), (90, 227), (100, 227))}


@lru_cache(maxsize=16)
def architecture_of(device: torch.device) -> Architecture | None:
    """Return what tiles have to fit into on `device`; None for the interpreter, which has no limits."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    capability = 10 * major + minor
    # One that is not in the table gets what all of them have
    return ARCHITECTURES.get(capability, Architecture(capability, min(a.shared_bytes for a in ARCHITECTURES.values())))


def cache_file() -> Path:
    """Return the path where measured choices are kept."""
    return cache_folder() / "tiles.json"


def shape_class(rows: int, cols: int, depth: int) -> tuple[int, int, int]:
    """Return rows, columns and depth, each rounded up to a power of two, rows from 16 to 4096.

    Args:
        rows: Rows per group.
        cols: Columns of the result.
        depth: Terms of the products.
    """

    def up(n: int) -> int:
        return 1 << max(0, n - 1).bit_length()

    return min(max(up(rows), 16), 4096), up(cols), up(depth)


def key(kind: Kind, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> str:
    """Return one entry's name in the file.

    Args:
        kind: Which kernel.
        device: The name of its model is in the key.
        dtype: Of the products.
        shape: From `shape_class`.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return "|".join([kind, name, str(dtype).removeprefix("torch."), *map(str, shape)])


def rule(kind: Kind, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> Config:
    """Return the choice for a class that was never measured.

    Args:
        kind: Which kernel.
        device: CUDA, or the CPU of Triton's interpreter.
        dtype: Of the products.
        shape: From `shape_class`.
    """
    if device.type != "cuda":
        # the interpreter: small tiles, so that tests of few rows meet several of them
        return Config(rows=16, cols=16, depth=16, swizzle=2, warps=1, stages=1)
    rows = shape[0]
    if dtype.itemsize >= 4:
        # four-byte elements fill shared memory and registers twice as fast
        return Config(rows=64, cols=64, depth=32, warps=4, stages=2)
    if kind == "weights":
        return Config(rows=128, cols=128, depth=64, warps=8, stages=3)
    if rows <= 32:
        # groups of few rows: taller tiles would multiply padding
        return Config(rows=16 if rows <= 16 else 32, cols=128, depth=64, warps=4, stages=4)
    return Config(rows=64 if rows <= 64 else 128, cols=128, depth=64, warps=4 if rows <= 64 else 8, stages=3)


def read(path: Path) -> dict[str, Config]:
    """Return measured choices in a file; none if there is none. ValueError names the file and what is wrong."""
    if not path.exists():
        return {}
    if path.stat().st_size > FILE_BYTES:
        raise ValueError(f"{path}: expected at most {FILE_BYTES} bytes of tile shapes")
    try:
        table = json.loads(path.read_text())
        return {str(name): Config(**entry) for name, entry in table.items()}
    except (json.JSONDecodeError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: expected an object of tile shapes by name: {error}") from error


def write(path: Path, chosen: dict[str, Config]) -> None:
    """Merge measured choices into a file, replacing it in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = {**read(path), **chosen}
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({name: asdict(c) for name, c in sorted(merged.items())}, indent=1))
    # a reader sees the old file or the new one, never half of one
    fresh.replace(path)
    _measured.cache_clear()


@lru_cache(maxsize=1)
def _measured() -> dict[str, Config]:
    return read(cache_file())


@lru_cache(maxsize=1024)
def _config(kind: Kind, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> Config:
    if device.type != "cuda":
        return rule(kind, device, dtype, shape)
    # cached by class: naming the device and looking the entry up at every launch would cost more than the launch
    return _measured().get(key(kind, device, dtype, shape)) or rule(kind, device, dtype, shape)


def config_for(kind: Kind, device: torch.device, dtype: torch.dtype, rows: int, cols: int, depth: int) -> Config:
    """Return the tile shape to launch; cached, and never measured here.

    Args:
        kind: Which kernel.
        device: Where it runs.
        dtype: Of the products.
        rows: Rows per group, on average.
        cols: Columns of the result.
        depth: Terms of the products.
    """
    return _config(kind, device, dtype, shape_class(rows, cols, depth))


def forget() -> None:
    """Drop what is cached, so that the file is read again at the next use."""
    _measured.cache_clear()
    _config.cache_clear()


@contextmanager
def trying(name: str, config: Config) -> Iterator[None]:
    """Run the class called `name` with `config` inside the context; nothing is written to the file."""
    table = _measured()
    before = table.get(name)
    table[name] = config
    _config.cache_clear()
    try:
        yield
    finally:
        if before is None:
            del table[name]
        else:
            table[name] = before
        _config.cache_clear()
