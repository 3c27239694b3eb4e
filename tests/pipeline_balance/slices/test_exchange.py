"""Parts of the exchange on one rank: messages, pieces of documents, kept memory."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline_balance.schedules.exchange import Help, Slot
from pipeline_balance.slices import kernel
from pipeline_balance.slices.kernel import Heads
from pipeline_balance.slices.sharing.exchange import KeptMemory, Turn, piece_bytes, visible
from pipeline_balance.slices.store import Unit
from prophet.errors import SpecError


def test_a_message_is_unpacked_as_it_was_packed() -> None:
    torch.manual_seed(0)
    sent = [
        torch.randn(2, 3, 5),
        torch.randn(2, 5, 3, 4).transpose(1, 2).bfloat16(),
        torch.randn(2, 0, 4).bfloat16(),
        torch.randn(3).bfloat16(),
    ]
    likes = [(tuple(t.shape), t.dtype) for t in sent]
    message = kernel.packed(sent)
    assert message.numel() == kernel.bytes_of(likes) == 30 * 4 + 123 * 2
    for one, other in zip(sent, kernel.unpacked(message, likes), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("starts", [(0, 4, 8, 12), (0, 5, 10, 15), (0, 1, 2, 3)])
def test_visible_pieces_are_those_with_a_token_of_the_slice_s_documents(starts: tuple[int, ...]) -> None:
    tokens, counts = starts[-1], 0
    for a, b in product(range(tokens), repeat=2):
        # two rows with other documents
        documents = torch.stack([(torch.arange(tokens) >= a).long(), (torch.arange(tokens) >= b).long()])
        for number in range(3):
            unit = Unit(0, number, 3, documents, starts)
            mine = documents[:, starts[number] : starts[number + 1]]
            want = []
            for piece in range(2 * number):
                start, stop = kernel.half_of((starts[piece // 2], starts[piece // 2 + 1]), piece)
                theirs = documents[:, start:stop]
                if (mine[:, :, None] == theirs[:, None, :]).any():
                    want.append(piece)
            assert list(visible(unit)) == want
            counts += len(want)
    assert counts > 0
    assert list(visible(Unit(0, 2, 3, None, starts))) == [0, 1, 2, 3]


def test_kept_memory_is_used_again() -> None:
    heads = Heads(4, 2, 8, torch.float32, 1.0)
    # keys and values of three of five tokens
    assert piece_bytes(heads, rows=2, tokens=5) == 2 * 2 * 2 * 3 * 8 * 4
    memory = KeptMemory(1000, torch.device("cpu"))
    assert memory.cut(300) == 3
    like = ((2, 2, 3), torch.float32)
    taken = [memory.take([like, like]) for _ in range(3)]
    for number, (_, tensors) in enumerate(taken):
        for t in tensors:
            t.fill_(number)
    assert [float(tensors[0].mean()) for _, tensors in taken] == [0.0, 1.0, 2.0]
    memory.give([taken[1][0]])
    assert memory.take([like])[0] == taken[1][0]
    # a pass begins with all of it
    assert memory.cut(500) == 1
    with pytest.raises(SpecError, match=f"keep_bytes={1 << 60}: there is not so much memory"):
        KeptMemory(1 << 60, torch.device("cpu"))


def test_all_helpers_are_asked_before_any_answers() -> None:
    """A device's messages go in the order of their launch: the second request is not to wait for the first answer."""
    helps = [Help(0, helper, (0,), (0,), (0,)) for helper in (1, 2)]
    launched: list[tuple[str, int]] = []

    def exchanged(sends: Any, recvs: Any, slot: int) -> Any:
        launched.extend([("send", row) for row, _ in sends] + [("receive", row) for row, _ in recvs])

    exchanger: Any = SimpleNamespace(
        plan=SimpleNamespace(
            slots=[Slot(True, ((0, 1), None, None))],
            at=lambda slot, position: helps,
        ),
        row=0,
        heads=[[Heads(4, 2, 8, torch.float32, 1.0)]],
        rows=[1, 1],
        units=[Unit(0, n, 2, None, (0, 4, 8)) for n in range(2)],
        memory=None,
        device=torch.device("cpu"),
        ranks=1,
        exchanged=exchanged,
        moved_bytes=[0, 0],
        begin_next=lambda: launched.append(("next", 0)),
    )
    Turn(exchanger, 0, 0).ask([torch.zeros(1, 4, 4, 8)])
    assert launched == [("send", 1), ("send", 2), ("receive", 1), ("receive", 2), ("next", 0)]
