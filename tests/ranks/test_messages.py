"""Messages of integers: one length whatever they are about, and a rank that is elsewhere is named on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from prophet.errors import OutOfStep
from prophet.ranks.collective import Collective
from prophet.ranks.messages import gather_numbers, share
from prophet.ranks.operation import Operation
from tests.helpers.recorder import RecordingCollective
from tests.helpers.support import on_threads

RANKS = 3
CPU = torch.device("cpu")
LIMIT_S = 20.0


def said(body: Callable[[Collective], object]) -> list[str]:
    """What every rank's `OutOfStep` says."""

    def catch(group: Collective) -> str:
        with pytest.raises(OutOfStep) as caught:
            body(group)
        return str(caught.value)

    return on_threads(RANKS, catch, timeout_s=LIMIT_S)


def sizes(fake: RecordingCollective) -> list[int]:
    return [c.sent_bytes[0] for c in fake.calls]


def test_all_numbers_arrive_in_order() -> None:
    def body(group: Collective) -> list[list[int]]:
        r = group.rank
        both = [torch.tensor([r, -1]), torch.tensor([1 << 62])]
        return gather_numbers(group, [r, 7], both, op=Operation("test")).tolist()

    for table in on_threads(RANKS, body):
        assert table == [[r, 7, r, -1, 1 << 62] for r in range(RANKS)]


def test_floats_arrive_bit_by_bit() -> None:
    values = [0.1, -0.0, torch.inf, 1e-310]

    def body(group: Collective) -> torch.Tensor:
        return share(group, torch.tensor(values, dtype=torch.float64) * (group.rank + 1), op=Operation("test"))

    for table in on_threads(RANKS, body):
        wanted = torch.stack([torch.tensor(values, dtype=torch.float64) * (r + 1) for r in range(RANKS)])
        assert torch.equal(table.view(torch.int64), wanted.view(torch.int64))


def test_whatever_is_told_has_one_length() -> None:
    fake = RecordingCollective(0, 4)
    gather_numbers(fake, [], op=Operation("nothing"))
    gather_numbers(fake, [1, 2], [torch.arange(64), torch.arange(128)], op=Operation("counts", 3))
    share(fake, torch.zeros(1, dtype=torch.float64), op=Operation("norm"))
    assert len(set(sizes(fake))) == 1


def test_a_longer_message_is_announced_once_and_makes_all_as_long() -> None:
    fake = RecordingCollective(0, 4)
    for _ in range(2):
        gather_numbers(fake, [], [torch.arange(500)], op=Operation("counts"))
    gather_numbers(fake, [], op=Operation("nothing"))
    short, *others = sizes(fake)
    assert len(others) == 3
    assert set(others) == {512 * 8}
    assert short < 512 * 8
    share(fake, torch.zeros(1, dtype=torch.float64), op=Operation("norm"))
    assert fake.frames.begun == len(fake.calls) == 5, "others see from it who has gone on"
    gather_numbers(fake, [], [torch.arange(1 << 16)], op=Operation("counts"))
    gather_numbers(fake, [], op=Operation("nothing"))
    assert sizes(fake)[5:] == [512 * 8, (1 << 17) * 8, 512 * 8]


def test_another_operation_another_layer_another_pass() -> None:
    def body(group: Collective) -> None:
        odd = group.rank == 1
        group.frames.forward = 7
        gather_numbers(group, [1], op=Operation("exchange of counts", 2 if odd else 1))

    for rank, text in enumerate(said(body)):
        assert text.startswith(f"rank {rank}: the ranks are out of step: ")
        assert "rank(s) [0, 2] at MoE layer 1 of forward pass 7; rank(s) [1] at MoE layer 2 of forward pass 7" in text
        assert "Did rank(s) [1] skip or repeat" in text

    def kind(group: Collective) -> None:
        group.frames.forward, group.frames.kind = 7, 1 + 2 * (group.rank == 1)
        gather_numbers(group, [1], op=Operation("exchange of counts", 0))

    for text in said(kind):
        assert "[0, 2] at MoE layer 0 of forward pass 7 (training)" in text
        assert "[1] at MoE layer 0 of forward pass 7 (evaluation)" in text

    def norm(group: Collective) -> None:
        group.frames.forward = 7 + (group.rank == 1)
        if group.rank == 2:
            share(group, torch.zeros(1, dtype=torch.float64), op=Operation("gradient norm"))
        else:
            gather_numbers(group, [1], [torch.arange(100)], op=Operation("exchange of counts", 0))

    for text in said(norm):
        for r, where in enumerate(("MoE layer 0 of forward pass 7", "MoE layer 0 of forward pass 8", "gradient norm")):
            assert f"rank(s) [{r}] at {where}" in text


def test_messages_of_different_lengths() -> None:
    """Below the common length, and where one has to be announced and the others have not."""
    for lengths in ((30, 40, 30), (30, 400, 30), (300, 400, 300)):

        def body(group: Collective, lengths: tuple[int, ...] = lengths) -> None:
            gather_numbers(group, [], [torch.arange(lengths[group.rank])], op=Operation("exchange of counts", 1))

        for text in said(body):
            assert f"{lengths[1]} from rank(s) [1]" in text
            assert "the same model" in text


def test_after_a_message_that_failed_the_next_one_arrives() -> None:
    def body(group: Collective) -> list[int]:
        with pytest.raises(OutOfStep):
            gather_numbers(group, [], op=Operation("one" if group.rank else "another"))
        return gather_numbers(group, [group.rank], op=Operation("test"))[:, 0].tolist()

    assert on_threads(RANKS, body) == [[0, 1, 2]] * RANKS


def test_alone_everything_is_told_to_oneself() -> None:
    def body(group: Collective) -> np.ndarray:
        assert share(group, torch.ones(2, dtype=torch.float64), op=Operation("norm")).tolist() == [[1.0, 1.0]]
        return gather_numbers(group, [3], [torch.arange(500)], op=Operation("test"))

    (table,) = on_threads(1, body)
    assert table.tolist() == [[3, *range(500)]]
