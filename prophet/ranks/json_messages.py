"""Values that ranks exchange as JSON, and the text of what is wrong on some of them."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prophet.errors import LayoutError
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation

MAX_BYTES = 1 << 28
# Length of every rank's first message: all messages of a gather must be equally long
FIRST_BYTES = 4096
# Bytes of the text, and of the compressed text
_SIZES = struct.Struct("<qq")


def gather_json(value: Any, collective: Collective, op: Operation) -> list[Any]:
    """Gather every rank's `value`; collective.

    Args:
        value: Anything that JSON can hold.
        collective: The ranks that take part.
        op: Names the exchange in errors and timelines.

    Returns:
        All values, by rank.

    Raises:
        LayoutError: On all ranks, where a value takes more than `MAX_BYTES` as text.
    """
    text = json.dumps(value).encode()
    # Names of parameters repeat themselves: compressed, nearly all values fit into one message
    packed = zlib.compress(text, 1)
    first = bytearray(FIRST_BYTES)
    _SIZES.pack_into(first, 0, len(text), len(packed))
    room = FIRST_BYTES - _SIZES.size
    first[_SIZES.size : _SIZES.size + len(packed)] = packed[:room]
    rows = [bytes(row) for row in collective.gather_at_once(_as_tensor(first), op=op).numpy()]
    sizes = [_SIZES.unpack_from(row) for row in rows]
    # All ranks read the same sizes, so all raise, or all go on to the second message
    if max(text for text, _ in sizes) > MAX_BYTES:
        raise LayoutError(f"{op}: a rank says {max(sizes)[0]} bytes, more than {MAX_BYTES}")
    longest = max(size for _, size in sizes)
    rests = [b""] * len(rows)
    if longest > room:
        rest = bytearray(packed[room:].ljust(longest - room, b"\0"))
        rests = [bytes(row) for row in collective.all_gather(_as_tensor(rest), op=op).numpy()]
    return [
        json.loads(zlib.decompress((row[_SIZES.size :] + rest)[:size]))
        for row, rest, (_, size) in zip(rows, rests, sizes, strict=True)
    ]


def _as_tensor(message: bytearray) -> Tensor:
    return torch.frombuffer(message, dtype=torch.uint8)


def reasons_text(reasons: Sequence[str], most: int = 3) -> str:
    """Join the ranks' reasons, each once with the first rank that gives it.

    Args:
        reasons: What is wrong on each rank, by rank; empty where nothing is.
        most: How many different reasons the text shows.

    Returns:
        The text; empty where all reasons are.
    """
    # Backwards, so that the first rank with a reason is the one that stays
    first = {reason: r for r, reason in reversed(list(enumerate(reasons))) if reason}
    ordered = sorted(first.items(), key=lambda item: item[1])
    return "; ".join(f"rank {r}: {reason}" for reason, r in ordered[:most])
