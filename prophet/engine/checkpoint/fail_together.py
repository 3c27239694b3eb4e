"""Processes exchange their errors before any of them raises: nobody waits for one that has ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from prophet.errors import CheckpointError
from prophet.layer.moe import moe_layers
from prophet.ranks.collective import DEFAULT_TIMEOUT_S
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import at_work, meet, process_rank

# Of an error's text: it travels through the process group's store
_MESSAGE_BYTES = 400


def limit_of(model: nn.Module) -> float:
    """Return how many seconds processes that train `model` wait for an idle one: the longest limit of its layers."""
    return max((layer.collective.timeout_s for layer in moe_layers(model)), default=DEFAULT_TIMEOUT_S)


@contextmanager
def on_all_ranks(
    what: str,
    where: object = "",
    *,
    outcome: str = "failed, their errors say why",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Iterator[None]:
    """Go on when every process has completed the block under `with`, however long that takes; collective.

    Args:
        what: The name of the work, by which ranks meet; the same on all of them.
        where: May differ, as folders that somebody has mixed up.
        outcome: Ends the text for ranks where it has not failed.
        timeout_s: Seconds to wait for a process that has not begun.

    Raises:
        Exception: The error of this process, where it has failed.
        CheckpointError: Where only others have failed; it names them.
        PeerLost: Where another process has ended.
        CollectiveTimeout: Where one has not begun after `timeout_s`.
    """
    text = f"{what} {where}".strip()
    error: Exception | None = None
    try:
        with at_work(text):
            yield
    except Exception as caught:
        error = caught
    # Also after an error: the others wait here, and would otherwise do so until the time limit
    texts = meet(Operation(what), "" if error is None else "failed", timeout_s=timeout_s)
    failed = [rank for rank, failure in enumerate(texts) if failure]
    if error is not None:
        raise error
    if failed:
        raise CheckpointError(
            f"{what} {where}: rank(s) {failed} {outcome}" if where else f"{what}: rank(s) {failed} {outcome}"
        )


def together(what: str, folder: Path, call: Callable[[], Any], *, timeout_s: float) -> list[Any]:
    """Exchange what a function returns, or its error; collective.

    Args:
        what: The name of the exchange, the same on all ranks.
        folder: Stands in the text of errors.
        call: Returns this process's value; anything that JSON can hold.
        timeout_s: Seconds to wait for a process that is not at work.

    Returns:
        Every process's value, by rank.

    Raises:
        Exception: This process's error, as `CheckpointError` where it is one of the file system.
        CheckpointError: Where other processes have an error, with its text.
    """
    value: Any = None
    error: Exception | None = None
    try:
        value = call()
    except (ValueError, RuntimeError, OSError) as caught:
        error = caught
    mine = [None if error is None else _short(error), value]
    every = [json.loads(text) for text in meet(Operation(what), json.dumps(mine), timeout_s=timeout_s)]
    # Users catch one class for all that goes wrong with a checkpoint's files
    if isinstance(error, OSError):
        raise CheckpointError(f"{folder}: rank {process_rank()}: {_short(error)}") from error
    if error is not None:
        raise error
    failed = [f"rank {r}: {text}" for r, (text, _) in enumerate(every) if text is not None]
    if failed:
        raise CheckpointError(f"{folder}: {'; '.join(failed)}")
    return [value for _, value in every]


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MESSAGE_BYTES]
