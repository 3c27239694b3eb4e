"""What a checkpoint's files are called and hold, and how experts are found in them at any number of ranks.

- `dense.pt` holds what all ranks share.
- `experts_<rank>_of_<ranks>.pt` holds the experts of one rank of the expert-parallel (EP) group, every expert by itself
  under its name in a state dict.
- `balancing_<group>_of_<groups>.pt` holds what one EP group remembers of its routing.
- `random_<process>_of_<processes>.pt` holds the states of one process's random generators.

Any number of ranks reads the first two; the others belong to as many ranks as wrote them. Files are read without
running code.

Nothing here imports deepspeed.
"""

from __future__ import annotations

import io
import os
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prophet.errors import CheckpointError

FORMAT = 4
DENSE, LATEST = "dense.pt", "latest"
EXPERTS, BALANCING, RANDOM = "experts_{}_of_{}.pt", "balancing_{}_of_{}.pt", "random_{}_of_{}.pt"
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")

Values = dict[str, Tensor]


# --- files ---


def write(content: Mapping[str, Any], path: Path) -> None:
    """Write a file by way of another name, so that what stands under the right one is whole."""
    partial = path.with_suffix(".partial")
    torch.save(dict(content), partial)
    os.replace(partial, path)


def write_latest(name: str, save_dir: Path) -> None:
    """Name the latest checkpoint in `save_dir`, once that one is whole."""
    partial = save_dir / f"{LATEST}.partial"
    partial.write_text(name, encoding="utf-8")
    os.replace(partial, save_dir / LATEST)


def check_module(saved: Mapping[str, Any], own: Mapping[str, Any], strict: bool, folder: Path) -> None:
    """Raise `CheckpointError` where a state dict does not fit the model's own, before any of it is copied.

    Args:
        saved: The state dict from the checkpoint.
        own: The model's.
        strict: Whether the names must be the same.
        folder: For messages.
    """
    if strict and saved.keys() != own.keys():
        missing, others = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
        raise CheckpointError(f"{folder}: of another model: it lacks {missing[:3]}, and has {others[:3]} besides")
    for name in saved.keys() & own.keys():
        shapes = [list(value.shape) for value in (own[name], saved[name]) if isinstance(value, Tensor)]
        if len(shapes) == 2 and shapes[0] != shapes[1]:
            raise CheckpointError(f"{folder}: {name}: expected a tensor {shapes[0]}, got {shapes[1]}")


def check_readable(**contents: Any) -> None:
    """Raise `CheckpointError` for what could be written, but not be read again: reading takes no code from files."""
    for name, content in contents.items():
        buffer = io.BytesIO()
        try:
            torch.save(content, buffer)
            buffer.seek(0)
            torch.load(buffer, map_location="cpu", weights_only=True)
        # torch raises what the pickler and the unpickler do: there is no one class
        except Exception as error:
            raise CheckpointError(
                f"{name}: expected numbers, strings, tensors, and lists and dictionaries of them: {_reason(error)}"
            ) from error


def _reason(error: Exception) -> str:
    """The sentence of torch's message that names the fault, without its advice to trust the file."""
    found = re.search(r"Unsupported [\w ]*: (?:GLOBAL )?(\S+)", str(error))
    return f"it holds {found[1]}" if found else re.split(r"[.!]", str(error))[0] or type(error).__name__


def read(path: Path, dictionaries: Iterable[str] = (), others: Iterable[str] = ()) -> dict[str, Any]:
    """Read a file's dictionary, its tensors on the CPU.

    Args:
        path: The file.
        dictionaries: Keys that it must have, with dictionaries.
        others: Keys that it must have, with whatever value.

    Raises:
        CheckpointError: Where it is not such a file.
    """
    if not path.exists():
        found = sorted(p.name for p in path.parent.glob("*")) if path.parent.exists() else []
        raise CheckpointError(f"{path} is missing; expected a checkpoint of prophet_deepspeed, found {found[:6]}")
    try:
        # weights_only: a checkpoint from somebody else must not run code here.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # torch raises what the unpickler and the archive's reader do: there is no one class
    except Exception as error:
        raise CheckpointError(f"{path}: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a dictionary, got {type(content).__name__}")
    for key in (*dictionaries, *others):
        if key not in content:
            raise CheckpointError(f"{path}: {key} is missing")
    for key in dictionaries:
        if not isinstance(content[key], dict):
            raise CheckpointError(f"{path}: {key}: expected a dictionary, got {type(content[key]).__name__}")
    return content


def read_dense(folder: Path) -> dict[str, Any]:
    """Read `dense.pt` of a checkpoint, and check its fields."""
    path = folder / DENSE
    version = read(path).get("format")
    if version != FORMAT:
        raise CheckpointError(f"{path}: expected format {FORMAT}, got {version!r}")
    dictionaries = ("module", "values", "settings", "counters", "scaler", "made_with")
    found = read(path, dictionaries, ("ranks", "processes", "scheduler", "frozen"))
    for key in ("ranks", "processes"):
        # A bound, as these numbers say how many files to look for
        if not isinstance(found[key], int) or not 1 <= found[key] <= 1 << 20:
            raise CheckpointError(f"{path}: {key}: expected a number of processes, got {found[key]!r}")
    counters = found["counters"]
    if set(counters) != set(COUNTERS) or not all(isinstance(v, int) and v >= 0 for v in counters.values()):
        raise CheckpointError(f"{path}: counters: expected {', '.join(COUNTERS)}, got {counters!r}")
    return found


# Parts of class names that say how an optimizer is made, not what it computes: FusedAdam, DeepSpeedCPUAdam, AdamW
_MAKES = re.compile(r"fused|deepspeed|cpu|w$")


def check_made_with(found: Mapping[str, Any], own: Mapping[str, str | None], folder: Path) -> None:
    """Raise `CheckpointError`, naming the configuration's key, where a run has other parts than the one that saved.

    Optimizers of one kind and of several makes read each other's states.

    Args:
        found: The parts' classes in the checkpoint, by key.
        own: Those of this run.
        folder: For messages.
    """
    for key, name in own.items():
        one, two = (_MAKES.sub("", str(value).lower()) for value in (found.get(key), name))
        if one != two:
            option = {"optimizer.type": "load_optimizer_states", "scheduler.type": "load_lr_scheduler_states"}[key]
            raise CheckpointError(
                f"{key}: {folder} was written with {found.get(key)}, and this run has {name}; {option}=False leaves "
                f"its states out"
            )


def clear(folder: Path) -> None:
    """Remove an older checkpoint of the same name, which may be of more ranks."""
    for name in (DENSE, *(p.name for kind in (EXPERTS, BALANCING, RANDOM) for p in folder.glob(kind.format("*", "*")))):
        (folder / name).unlink(missing_ok=True)


# --- experts ---


def read_experts(
    folder: Path, ranks: int, wanted: Iterable[str]
) -> tuple[dict[str, Values], dict[str, Any], dict[str, Tensor]]:
    """Read the experts that are wanted, from the files of all ranks that wrote.

    Files are mapped, so that only what is wanted is read.

    Args:
        folder: The checkpoint's.
        ranks: How many ranks wrote.
        wanted: Names of experts' parameters.

    Returns:
        Optimizer values, their settings and the module's tensors, each by name.
    """
    names = set(wanted)
    values: dict[str, Values] = {}
    settings: dict[str, Any] = {}
    module: dict[str, Tensor] = {}
    for rank in range(ranks):
        part = read(folder / EXPERTS.format(rank, ranks), ("values", "settings", "module"))
        values |= {k: v for k, v in part["values"].items() if k in names}
        module |= {k: v for k, v in part["module"].items() if k in names}
        settings |= {k: v for k, v in part["settings"].items() if k in names}
    return values, settings, module


def check_values(name: str, found: Any, shape: Sequence[int], folder: Path) -> Values:
    """The values of one parameter, checked.

    Args:
        name: The parameter's.
        found: Values from the checkpoint, if it has them.
        shape: The parameter's.
        folder: For messages.

    Raises:
        CheckpointError: Where they are missing or of another shape.
    """
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{folder}: optimizer states of {name} are missing")
    for key, value in found.items():
        if not isinstance(value, Tensor) or tuple(value.shape) != tuple(shape):
            got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(f"{folder}: {key} of {name}: expected a tensor {list(shape)}, got {got}")
    return found


def micro_steps(counters: Mapping[str, int], per_step: int) -> int:
    """Microbatches so far, where a step has `per_step` of them now: between two steps a multiple of that."""
    micro = counters["micro_steps"]
    return micro if micro % per_step == 0 else counters["global_steps"] * per_step


# --- random generators ---


def random_state() -> dict[str, Any]:
    """Read the states of Python's, numpy's and torch's generators on the host."""
    name, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002  (what users' data pipelines draw from)
    # As int64, because tensors of uint32 are not served everywhere in torch..
    key = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": [str(name), key, int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
    }


def set_random_state(state: Mapping[str, Any], path: Path) -> None:
    """Set the generators to these states; raises `CheckpointError`, naming the file, for anything else."""
    try:
        name, key, *rest = state["numpy"]
        version, inner, gauss = state["python"]
        random.setstate((version, tuple(inner), gauss))
        np.random.set_state((name, key.numpy().astype(np.uint32), *rest))  # noqa: NPY002
        torch.set_rng_state(state["torch"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: expected states of random generators: {error}") from error
