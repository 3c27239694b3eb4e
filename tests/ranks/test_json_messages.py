"""What ranks say to one another: whole, in one message where it is short, and in two where any rank says more."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

import pytest
import torch

from prophet.errors import LayoutError
from prophet.ranks import json_messages
from prophet.ranks.json_messages import FIRST_BYTES, gather_json
from prophet.ranks.operation import Operation
from prophet.ranks.threads import ThreadCollective, ThreadWorld

RANKS = 3


def noise(characters: int) -> str:
    """Text that does not get much shorter when it is packed."""
    return "".join(map(chr, random.Random(0).choices(range(33, 127), k=characters)))


class Counts(ThreadCollective):
    """Knows how many messages its rank has gathered."""

    messages = 0

    def all_gather(self, x: torch.Tensor, **options: Any) -> torch.Tensor:  # type: ignore[override]
        self.messages += 1
        return super().all_gather(x, **options)


def told(values: list[Any]) -> list[tuple[list[Any], int]]:
    """What every rank hears where rank r says values[r], and the messages that took."""
    world = ThreadWorld(RANKS, timeout_s=20.0)

    def run(collective: ThreadCollective) -> tuple[list[Any], int]:
        mine = Counts(world, collective.rank)
        return gather_json(values[mine.rank], mine, Operation("telling")), mine.messages

    return world.run(run)


@pytest.mark.parametrize(
    ("values", "messages"),
    [
        (["", None, 0.1], 1),
        ([{"a": [1, [2.5, "ü"]]}, [], {"said": True}], 1),
        ([[f"{i}.mlp.weight@exp_avg" for i in range(1000)]] * RANKS, 1),  # much, of one kind
        (["", noise(2 * FIRST_BYTES), noise(17)], 2),
        ([noise(3 * FIRST_BYTES), noise(2 * FIRST_BYTES), ""], 2),
    ],
)
def test_ranks_hear_what_each_has_said(values: list[Any], messages: int) -> None:
    assert told(values) == [(values, messages)] * RANKS


def test_a_first_message_holds_as_much_as_fits() -> None:
    room = FIRST_BYTES - json_messages._SIZES.size
    by_size = {len(zlib.compress(json.dumps(noise(n)).encode(), 1)): n for n in range(FIRST_BYTES, 2 * FIRST_BYTES)}
    tried = [size for size in range(room - 3, room + 4) if size in by_size]
    assert min(tried) < room + 1 in tried
    for size in tried:
        values = ["", noise(by_size[size]), "short"]
        assert told(values) == [(values, 1 + (size > room))] * RANKS


def test_what_is_too_long_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_messages, "MAX_BYTES", 100)

    def refused(collective: ThreadCollective) -> str:
        with pytest.raises(LayoutError) as caught:
            gather_json("x" * 200 * collective.rank, collective, Operation("telling"))
        return str(caught.value)

    assert ThreadWorld(2, timeout_s=20.0).run(refused) == ["telling: a rank says 202 bytes, more than 100"] * 2
