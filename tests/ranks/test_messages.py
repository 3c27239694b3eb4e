"""Messages of integers: a length that all ranks foresee, and a rank that is elsewhere is named on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from prophet.errors import OutOfStep
from prophet.ranks.collective import Collective
from prophet.ranks.messages import COUNTS, gather_numbers, share, width_of
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


def counts(group: Collective, layer: int, numbers: int, kind: int = 1) -> None:
    """A layer's counts; the frame's kind of pass is set as the layer sets it."""
    group.frames.kind = kind
    gather_numbers(group, [], [torch.arange(numbers)], op=Operation(COUNTS, layer))


def test_whatever_is_told_has_the_length_that_was_foreseen() -> None:
    fake = RecordingCollective(0, 4)
    for _ in range(2):
        gather_numbers(fake, [], op=Operation("nothing"))
        counts(fake, 3, 194)
        share(fake, torch.zeros(1, dtype=torch.float64), op=Operation("norm"))
    assert sizes(fake) == [256 * 8] * 2 + [208 * 8] * 4
    assert fake.frames.begun == len(fake.calls) == 6, "others see from it who has gone on"


def test_a_long_message_is_announced_and_makes_no_other_longer() -> None:
    fake = RecordingCollective(0, 4)
    for _ in range(2):
        gather_numbers(fake, [], [torch.arange(500)], op=Operation("comparison"))
    counts(fake, 0, 100)
    gather_numbers(fake, [], [torch.arange(500)], op=Operation("comparison"))
    counts(fake, 0, 100)
    assert sizes(fake) == [n * 8 for n in (256, 512, 256, 512, 256, 112, 512, 112)]


@pytest.mark.parametrize("sizes_of_layers", [(100, 60, 60), (40, 300, 8), (1000, 1000)])
def test_every_layer_has_its_own_length_from_the_second_step_on(sizes_of_layers: tuple[int, ...]) -> None:
    fake = RecordingCollective(0, 4)
    for step in range(4):
        begun = len(fake.calls)
        for layer, numbers in enumerate(sizes_of_layers):
            counts(fake, layer, numbers)
        if step:
            assert sizes(fake)[begun:] == [8 * width_of(n) for n in sizes_of_layers]


def test_evaluation_between_steps_costs_no_long_message_and_no_announcement() -> None:
    """Its counts are shorter: it has no gradients to compare."""
    fake = RecordingCollective(0, 4)
    for step in range(6):
        begun = len(fake.calls)
        for layer, numbers in enumerate((120, 80)):
            counts(fake, layer, numbers)
        for layer, numbers in enumerate((100, 60)):
            counts(fake, layer, numbers, kind=3)
        if step > 1:
            assert sizes(fake)[begun:] == [8 * width_of(n) for n in (120, 80, 100, 60)]


def test_a_layer_that_is_followed_by_two_others_is_not_announced() -> None:
    """As where forward and backward passes with recomputed layers take turns."""
    fake = RecordingCollective(0, 4)
    order = [(0, 1), (1, 1), (1, 2), (0, 2), (0, 1), (1, 1), (0, 1), (1, 1)]
    for step in range(6):
        begun = len(fake.calls)
        for layer, kind in order:
            counts(fake, layer, (200, 30)[layer], kind)
        if step > 1:
            assert len(fake.calls) - begun == len(order)


def test_share_has_room_in_every_message() -> None:
    fake = RecordingCollective(0, 4)
    counts(fake, 0, 1)
    share(fake, torch.zeros(22, dtype=torch.float64), op=Operation("norm"))
    with pytest.raises(ValueError, match="norm: expected at most 22 numbers, got 23"):
        share(fake, torch.zeros(23, dtype=torch.float64), op=Operation("norm"))


def test_lengths_stay_the_same_on_all_ranks_after_a_rank_was_out_of_step() -> None:
    """It sends a shorter or longer message, which none foresees: the others name it, and all go on alike."""

    def body(group: Collective) -> list[int]:
        for _ in range(2):
            counts(group, 0, 300)
            counts(group, 1, 20)
        odd = group.rank == 1
        for many in (0, 900):
            with pytest.raises(OutOfStep, match=r"rank\(s\) \[1\] at MoE layer 1"):
                counts(group, int(odd), 20 if odd else 300)
            with pytest.raises(OutOfStep, match=r"rank\(s\) \[1\] at comparison"):
                gather_numbers(group, [0] * many if odd else [], op=Operation("comparison" if odd else "nothing"))
        counts(group, 0, 300)
        return gather_numbers(group, [group.rank], op=Operation("test"))[:, 0].tolist()

    assert on_threads(RANKS, body, timeout_s=LIMIT_S) == [[0, 1, 2]] * RANKS


def test_a_rank_whose_wait_was_interrupted_foresees_what_the_others_do() -> None:
    def body(group: Collective) -> list[int]:
        counts(group, 0, 300)
        counts(group, 1, 20)
        inner = group.gather_messages

        def interrupted(x: torch.Tensor, *, op: Operation) -> torch.Tensor:
            inner(x, op=op)
            raise KeyboardInterrupt

        if group.rank == 1:
            group.gather_messages = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                counts(group, 0, 300)
            group.gather_messages = inner  # type: ignore[method-assign]
        else:
            counts(group, 0, 300)
        return gather_numbers(group, [group.rank], op=Operation("test"))[:, 0].tolist()

    assert on_threads(RANKS, body, timeout_s=LIMIT_S) == [[0, 1, 2]] * RANKS


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
