"""Processes that tell each other their errors before any of them raises: nobody waits for one that has ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from prophet.errors import CheckpointError
from prophet.layer.moe import moe_layers
from prophet.ranks.collective import DEFAULT_TIMEOUT_S
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import at_work, meet, process_rank

_MESSAGE_BYTES = 400


def limit_of(model: nn.Module) -> float:
    """How long the processes that train `model` wait for one that does nothing: as its layers do."""
    return max((layer.collective.timeout_s for layer in moe_layers(model)), default=DEFAULT_TIMEOUT_S)


@contextmanager
def on_all_ranks(
    what: str, where: object = "", *, said: str = "failed, their errors say why", timeout_s: float = DEFAULT_TIMEOUT_S
) -> Iterator[None]:
    """Go on when every process has done what stands under `with`, however long that takes.

    what: the same on all ranks, by which they meet; where may differ, as folders that somebody has mixed up.

    Where one fails it raises its error, and the others `CheckpointError`: both, the ranks and `said`. Where one ends
    the others raise `PeerLost`; `CollectiveTimeout` where one has not begun after `timeout_s`.
    """
    text = f"{what} {where}".strip()
    error: Exception | None = None
    try:
        with at_work(text):
            yield
    except Exception as caught:
        error = caught
    words = meet(Operation(what), "" if error is None else "failed", timeout_s=timeout_s)
    failed = [rank for rank, word in enumerate(words) if word]
    if error is not None:
        raise error
    if failed:
        raise CheckpointError(
            f"{what} {where}: rank(s) {failed} {said}" if where else f"{what}: rank(s) {failed} {said}"
        )


def together(what: str, folder: Path, error: Exception | None, value: Any = None, *, timeout_s: float) -> list[Any]:
    """Every process's `value`, as JSON says it.

    Raises `error`; where others have one, `CheckpointError` with its text.
    """
    mine = [None if error is None else _short(error), value]
    said = [json.loads(words) for words in meet(Operation(what), json.dumps(mine), timeout_s=timeout_s)]
    if isinstance(error, OSError):
        raise CheckpointError(f"{folder}: rank {process_rank()}: {_short(error)}") from error
    if error is not None:
        raise error
    failed = [f"rank {r}: {text}" for r, (text, _) in enumerate(said) if text is not None]
    if failed:
        raise CheckpointError(f"{folder}: {'; '.join(failed)}")
    return [value for _, value in said]


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MESSAGE_BYTES]
