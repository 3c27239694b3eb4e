"""1F1B over slices of sequences, as data (SlimPipe, Section 4; in its minimal order also Seq1F1B).

Shape legend: P ranks, V stages per rank, M microbatches, N slices. A slice attends to the slices before it, so a
microbatch's slices go forward in order and backward in reverse. A rank that has the N V units of one microbatch needs
few more before its first backward, so it holds little more than one microbatch where 1F1B holds P.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from math import gcd
from typing import Literal, get_args

from pipeline_balance.schedules.actions import Action, Schedule, ScheduleError, build, check_shape
from pipeline_balance.schedules.classic import interleaved, one_f_one_b
from prophet.errors import SpecError

Order = Literal["minimal", "aligned"]
# Tokens; attention over other numbers than multiples of it takes up to a tenth longer on a CPU
BLOCK = 16
# Tokens of a slice from which on a block is little of it
LONG = 256


def sliced(
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
    slices: int,
    order: Order = "minimal",
    *,
    helped: bool = False,
) -> Schedule:
    """1F1B over N slices of each of M microbatches; stage s runs on rank s mod P.

    Rank r runs N V - 1 forwards ahead of its first forward and backward in turn, and further ones by `order`: P - 1 -
    r of them in the minimal order, twice as many in the aligned one (the paper's). With those every rank runs the same
    kind of pass at the same time, and a transfer has the time of a pass.

    With one slice this is `one_f_one_b`, or `interleaved` with several stages per rank, whatever the order.

    Args:
        ranks: P.
        stages_per_rank: V.
        microbatches: M.
        slices: N.
        order: "minimal" or "aligned".
        helped: Whether ranks without a pass help others with theirs, see `exchange`. Then every row has one action for
            each time slot, in which all passes are of one kind. A help's number is that of the slot.

    Raises:
        ScheduleError: If ranks run several stages and do not divide the slices, or help in the minimal order.
    """
    check_shape(ranks, microbatches)
    if order not in get_args(Order):
        raise ScheduleError(f"order must be one of {', '.join(get_args(Order))}, got {order!r}")
    check_slices(ranks, stages_per_rank, slices)
    if helped and order != "aligned":
        raise ScheduleError(f'ranks can help each other in the aligned order alone, got order="{order}"')
    if slices == 1:
        one_each = stages_per_rank == 1
        return one_f_one_b(ranks, microbatches) if one_each else interleaved(ranks, stages_per_rank, microbatches)
    passes = slices * stages_per_rank
    total = passes * microbatches
    rows = []
    for r in range(ranks):
        forward = [_turn(k, r, ranks, stages_per_rank, slices) for k in range(total)]
        # the backward order mirrors the forward one within each microbatch
        backward = [forward[k // passes * passes + passes - 1 - k % passes] for k in range(total)]
        ahead = min(total, passes - 1 + (ranks - 1 - r) * (1 if order == "minimal" else 2))
        row = [Action(s, "F", u) for s, u in forward[:ahead]]
        for k, (stage, unit) in enumerate(backward):
            row += [Action(s, "F", u) for s, u in forward[ahead + k : ahead + k + 1]]
            row.append(Action(stage, "B", unit))
        rows.append(_with_help(row, r, ranks, passes) if helped else row)
    return build(rows, ranks * stages_per_rank, microbatches, slices)


def _with_help(row: Sequence[Action], rank: int, ranks: int, passes: int) -> list[Action]:
    """A rank's aligned row with a help in each slot in which it has no pass.

    Rank r's k-th forward is in the (k + r)-th slot of forwards, its k-th backward in the (k + P - 1 - r)-th one of
    backwards. Those of a microbatch's forwards and P - 1 more come first, then one of backwards and one of forwards in
    turn, and at the end those of backwards that are left.
    """
    total = len(row) // 2
    ahead, each = passes + ranks - 1, total + ranks - 1
    found: list[Action] = []
    actions = iter(row)
    for slot in range(2 * each):
        # counted among the slots of its kind
        behind = slot - ahead
        forward = behind < 0 or (behind % 2 == 1 and behind < 2 * (each - ahead))
        if forward:
            place = slot - rank if behind < 0 else ahead + behind // 2 - rank
        else:
            place = behind - min((behind + 1) // 2, each - ahead) - (ranks - 1 - rank)
        found.append(next(actions) if 0 <= place < total else Action(rank, "H", slot))
    return found


def check_slices(ranks: int, stages_per_rank: int, slices: int) -> None:
    """Raise `ScheduleError` unless there is a schedule for them; the message names numbers nearby.

    V and N are at least 1. With several stages per rank, N must be a multiple of P.

    Args:
        ranks: P.
        stages_per_rank: V.
        slices: N.
    """
    if min(stages_per_rank, slices) < 1:
        raise ScheduleError(f"stages_per_rank and slices must be at least 1, got {stages_per_rank} and {slices}")
    if stages_per_rank > 1 and slices > 1 and slices % ranks:
        below = slices // ranks * ranks
        near = f"{below} or {below + ranks}" if below else str(ranks)
        raise ScheduleError(
            f"with {stages_per_rank} stages per rank, slices must be a multiple of the {ranks} ranks: "
            f"take {near} instead of {slices}"
        )


def _turn(k: int, rank: int, ranks: int, stages_per_rank: int, slices: int) -> tuple[int, int]:
    """Stage and unit of a rank's k-th forward: P slices pass each of the rank's stages in turn."""
    if stages_per_rank == 1:
        return rank, k
    microbatch, at = divmod(k, slices * stages_per_rank)
    group, at = divmod(at, ranks * stages_per_rank)
    chunk, place = divmod(at, ranks)
    return chunk * ranks + rank, microbatch * slices + group * ranks + place


def slice_starts(
    tokens: int, slices: int, crossover_tokens: int | None = None, windows: Sequence[int | None] = ()
) -> tuple[int, ...]:
    """First tokens of the slices, and the sequence's tokens T.

    Slices of equal cost begin with the longest (TeraPipe, Seq1F1B): token t costs C + t, as attention to the tokens
    before it takes C times less than all else for each of them. A window of w tokens leaves min(t, w - 1) of these t.
    Slices are equal to a token, or to a `BLOCK` where they have `LONG` tokens or more on average. Whole numbers
    throughout, so all ranks find the same.

    Args:
        tokens: T.
        slices: N.
        crossover_tokens: C; None: slices are of equal length.
        windows: Of every attention, all of which count alike: how many tokens a token sees; None, or empty: all.

    Returns:
        [N + 1] numbers, the last of which is T.

    Raises:
        SpecError: Where slices cannot be equal, or would be empty; the message names lengths nearby.
    """
    if tokens < slices:
        raise SpecError(f"sequences of {tokens} tokens cannot be cut into {slices} slices: pad them to {slices} tokens")
    if crossover_tokens is None:
        each = tokens // slices
        if tokens % slices:
            raise SpecError(
                f"sequences of {tokens} tokens cannot be cut into {slices} equal slices: "
                f"pad or cut them to {each * slices} or {(each + 1) * slices} tokens"
            )
        return tuple(range(0, tokens + 1, each))
    # how many earlier tokens are seen at most, in half-tokens, by how many attentions
    sees = Counter(2 * (tokens if w is None or w >= tokens else w - 1) for w in windows or [None])
    alike = gcd(*sees.values())

    def cost(halves: int) -> int:
        """What comes before so many half-tokens costs, times eight and the attentions: of one, 4 C h + h ** 2."""
        found = 0
        for most, many in sees.items():
            near = min(halves, most)
            found += many // alike * (4 * crossover_tokens * halves + near * (2 * halves - near))
        return found

    starts = [0] * slices + [tokens]
    block = BLOCK if tokens >= LONG * slices else 1
    for k in range(slices - 1, 0, -1):
        # k / N of the whole comes before slice k
        target = k * (cost(2 * tokens) // 4) // slices
        # the token nearest to it: the last one whose lower half begins before
        nearest = bisect_right(range(1, tokens + 1), 4 * target, key=lambda t: cost(2 * t - 1))
        # from the last slice on, each at least one token
        starts[k] = min((nearest + block // 2) // block * block, starts[k + 1] - 1)
    return tuple(starts)
