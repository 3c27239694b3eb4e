"""What ranks tell each other in JSON, and in which words they tell what is wrong."""

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
FIRST_BYTES = 4096  # of what a rank says
_SIZES = struct.Struct("<qq")  # bytes of the text, and of the text packed


def gather_json(value: Any, collective: Collective, device: torch.device, op: Operation) -> list[Any]:
    """Every rank's `value` (anything JSON can say), by rank.

    What is said packs well: one message of `FIRST_BYTES` holds most of it, and only what is longer takes a second one.
    """
    text = json.dumps(value).encode()
    packed = zlib.compress(text, 1)
    first = bytearray(FIRST_BYTES)
    _SIZES.pack_into(first, 0, len(text), len(packed))
    room = FIRST_BYTES - _SIZES.size
    first[_SIZES.size : _SIZES.size + len(packed)] = packed[:room]
    rows = [bytes(row) for row in collective.gather_at_once(_as_tensor(first, device), op=op).cpu().numpy()]
    sizes = [_SIZES.unpack_from(row) for row in rows]
    if max(text for text, _ in sizes) > MAX_BYTES:
        raise LayoutError(f"{op}: a rank says {max(sizes)[0]} bytes, more than {MAX_BYTES}")
    longest = max(size for _, size in sizes)
    rests = [b""] * len(rows)
    if longest > room:
        rest = bytearray(packed[room:].ljust(longest - room, b"\0"))
        rests = [bytes(row) for row in collective.all_gather(_as_tensor(rest, device), op=op).cpu().numpy()]
    return [
        json.loads(zlib.decompress((row[_SIZES.size :] + rest)[:size]))
        for row, rest, (_, size) in zip(rows, rests, sizes, strict=True)
    ]


def _as_tensor(message: bytearray, device: torch.device) -> Tensor:
    return torch.frombuffer(message, dtype=torch.uint8).to(device)


def reasons_text(said: Sequence[str], most: int = 3) -> str:
    """What ranks say is wrong, each reason once with the first rank that gives it; nothing where none says anything."""
    first = {words: r for r, words in reversed(list(enumerate(said))) if words}
    ordered = sorted(first.items(), key=lambda item: item[1])
    return "; ".join(f"rank {r}: {words}" for words, r in ordered[:most])
