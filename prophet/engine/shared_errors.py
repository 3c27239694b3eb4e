"""Processes that tell each other their errors before any of them raises: nobody waits for one that has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

from prophet.errors import CheckpointError
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Operation
from prophet.ranks.process_group import collective_for, process_rank
from prophet.spec import IntArray

_MESSAGE_BYTES = 400


def device_of(model: nn.Module) -> torch.device:
    """Where the ranks exchange tensors."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def failure_of(call: Callable[[], None], *, run: bool = True) -> Exception | None:
    """The error that `call` raises, to be told to the other processes before it is raised."""
    try:
        if run:
            call()
    except (ValueError, RuntimeError, OSError) as error:
        return error
    return None


@contextmanager
def on_all_ranks(
    what: str, model: nn.Module, *, said: str = "failed, their errors say why", timeout_s: float = DEFAULT_TIMEOUT_S
) -> Iterator[None]:
    """Go on when every process has done what stands under `with`.

    Where one fails it raises its error, and the others `CheckpointError`: `what`, the ranks and `said`.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    flag = torch.tensor([int(error is not None)], device=device_of(model))
    failed = collective_for(None, timeout_s=timeout_s).all_gather(flag, op=Operation(what)).flatten().nonzero()
    if error is not None:
        raise error
    if len(failed):
        raise CheckpointError(f"{what}: rank(s) {failed.flatten().tolist()} {said}")


def short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MESSAGE_BYTES]


def together(
    what: str, folder: Path, device: torch.device, error: Exception | None, numbers: Sequence[int] = ()
) -> IntArray:
    """Every process's `numbers`, by process. Raises `error`; where others have one, `CheckpointError` with its text."""
    text = short(error).encode(errors="replace")[:_MESSAGE_BYTES] if error is not None else b""
    row = [int(error is not None), *numbers, *text.ljust(_MESSAGE_BYTES)]
    mine = torch.tensor(row, dtype=torch.int64, device=device)
    table: IntArray = collective_for(None).all_gather(mine, op=Operation(what)).cpu().numpy()
    if isinstance(error, OSError):
        raise CheckpointError(f"{folder}: rank {process_rank()}: {short(error)}") from error
    if error is not None:
        raise error
    texts = table[:, -_MESSAGE_BYTES:].astype(np.uint8)
    failed = [f"rank {r}: {texts[r].tobytes().decode(errors='replace').rstrip()}" for r in table[:, 0].nonzero()[0]]
    if failed:
        raise CheckpointError(f"{folder}: {'; '.join(failed)}")
    return table[:, 1 : 1 + len(numbers)]
