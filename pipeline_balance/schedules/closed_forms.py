"""Closed forms that the simulator is checked against.

Symbols: P ranks, M microbatches, V stages per rank, N slices; F, I, W seconds of one microbatch's forward, input
backward and weight backward on one rank (all its stages together), B = I + W. Idle times are per rank, with even stages
and free transfers.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline_balance.schedules.actions import ScheduleError, check_shape
from pipeline_balance.schedules.sliced import Order


def one_f_one_b_idle_s(ranks: int, forward_s: float, backward_s: float) -> float:
    """(P - 1)(F + B), for 1F1B and GPipe alike.

    Args:
        ranks: P.
        forward_s: F.
        backward_s: B.
    """
    return (ranks - 1) * (forward_s + backward_s)


def interleaved_idle_s(ranks: int, stages_per_rank: int, forward_s: float, backward_s: float) -> float:
    """(P - 1)(F + B) / V; over the work M(F + B) this is the bubble (P - 1) / (VM).

    Args:
        ranks: P.
        stages_per_rank: V.
        forward_s: F.
        backward_s: B.
    """
    return (ranks - 1) * (forward_s + backward_s) / stages_per_rank


def zb_h1_idle_s(ranks: int, forward_s: float, input_s: float, weight_s: float) -> float:
    """(P - 1)(F + I - W), where W is at most F and I (Qi et al., 2023).

    Args:
        ranks: P.
        forward_s: F.
        input_s: I.
        weight_s: W.
    """
    return (ranks - 1) * (forward_s + input_s - weight_s)


def zb_v_idle_s(ranks: int, part_s: float) -> float:
    """(P - 1) times one part of one stage, where F = I = W = 2 `part_s` on a rank of two stages and M >= 2P - 1."""
    return (ranks - 1) * part_s


def chimera_bubble_ratio(ranks: int, forward_s: float, backward_s: float, communication_s: float = 0.0) -> float:
    """Bubble over makespan of Chimera with P microbatches and two model copies (DynPipe supplement, Eq. 1).

    Args:
        ranks: P, even.
        forward_s: F.
        backward_s: B.
        communication_s: The part of one stage-to-stage transfer that nothing hides.
    """
    check_shape(ranks, 1)
    if ranks % 2:
        raise ScheduleError(f"Chimera needs an even number of ranks, got {ranks}")
    p = ranks
    gaps = p * p / 2 - p
    bubble = (3 * gaps + 6 * p - 2 * gaps / p - 8) * communication_s + 2 * gaps * backward_s
    span = (3 * p * p - 2 * p) * communication_s + (2 * p * p - 2 * p) * backward_s + p * p * forward_s
    if not span > 0:
        raise ScheduleError("Chimera's bubble ratio needs positive times")
    return bubble / span


def sliced_peak_units(
    rank: int, ranks: int, stages_per_rank: int, microbatches: int, slices: int, order: Order = "minimal"
) -> int:
    """Most units that a rank holds at once: min(N M V, N V + x (P - 1 - r)).

    x is 1 in the minimal order and 2 in the aligned one (SlimPipe, Eq. 1). A unit is the (N V P)-th part of a
    microbatch's activations.

    Args:
        rank: r.
        ranks: P.
        stages_per_rank: V.
        microbatches: M.
        slices: N.
        order: "minimal" or "aligned".
    """
    # the aligned order runs twice as many forwards ahead, which hides transfers
    ahead = (ranks - 1 - rank) * (1 if order == "minimal" else 2)
    return min(slices * microbatches * stages_per_rank, slices * stages_per_rank + ahead)


def sliced_peak_bytes(peak_units: int, slices: int, unit_bytes: int, chunk_gradient_bytes: int) -> int:
    """Most bytes on a rank with one stage: units * a + (N - 1) g.

    Args:
        peak_units: Most units that it holds at once.
        slices: N.
        unit_bytes: a, what a unit's activations take.
        chunk_gradient_bytes: g, what the gradients of its keys and values take.
    """
    return peak_units * unit_bytes + (slices - 1) * chunk_gradient_bytes


def offloaded_peak_bytes(
    rank: int,
    ranks: int,
    slices: int,
    moved: int,
    unit_bytes: tuple[int, int],
    chunk_gradient_bytes: int,
    order: Order = "minimal",
) -> int:
    """(N + x) a + (N - k + max(x - k, min(x, 2))) o + (N - 1) g, with one stage on the rank, from 3 microbatches.

    A rank holds N + x units, x as in `sliced_peak_units`, which must be at most N. The first k slices of a microbatch
    leave a part on the host: k below N, and below N - 1 where x is at most 1, as one more is needed at once. Of these
    parts at most two are here: what a backward reads, and what is made or fetched beside it.

    Args:
        rank: r.
        ranks: P.
        slices: N.
        moved: k.
        unit_bytes: What a unit's activations take that stays here, a, and what goes, o.
        chunk_gradient_bytes: g, what the gradients of its keys and values take.
        order: "minimal" or "aligned".
    """
    ahead = (ranks - 1 - rank) * (1 if order == "minimal" else 2)
    stays, goes = unit_bytes
    here = slices - moved + max(ahead - moved, min(ahead, 2))
    return (slices + ahead) * stays + here * goes + (slices - 1) * chunk_gradient_bytes


def sliced_peak_tokens(rank: int, ranks: int, starts: Sequence[int], order: Order = "minimal") -> int:
    """Most tokens that a rank with one stage holds at once where slices have different lengths, from 3 microbatches.

    A rank holds N + x slices, x as in `sliced_peak_units`: the first k ones of a microbatch whose last ones are gone,
    and N + x - k first ones of those after it, most where both parts are alike. Slices must not grow, and N must be at
    least x. With equal slices of T / N it is (N + x) T / N.

    Args:
        rank: r.
        ranks: P.
        starts: First token of every slice, and T [N + 1].
        order: "minimal" or "aligned".
    """
    slices, ahead = len(starts) - 1, (ranks - 1 - rank) * (1 if order == "minimal" else 2)

    # `number` first slices of two microbatches, shared out evenly
    def halves(number: int) -> int:
        return starts[number // 2] + starts[number - number // 2]

    # either two microbatches are in flight, or a whole one between parts of two others
    return max(halves(slices + ahead), starts[-1] + halves(ahead))


def sliced_window_chunks(slices: int, slice_tokens: int, window: int) -> int:
    """Chunks that a slice reads in a layer with a window, its own with them: min(N, 1 + ceil((w - 1) / t)).

    Without a backward to come, a layer keeps no more than these. In training keys and values stay until their slice's
    backward; gradients of min(N - 1, these) chunks are there at once.

    Args:
        slices: N.
        slice_tokens: t, of every slice.
        window: w, the tokens that a token sees, up to itself.
    """
    return min(slices, 1 - (1 - window) // slice_tokens)


def context_bytes_over_passed(slices: int, key_share: float = 1.0) -> float:
    """2 / ((N + 1) k): bytes where queries and outputs travel, over those of keys and values of all slices so far.

    Forward: queries and outputs of every slice go to c - 1 ranks, against keys and values of slice n and the n before
    it. Backward: queries, outputs, their gradients, and gradients of queries, against keys, values and their gradients.
    So keys and values without a cache would need k times as many bytes (SlimPipe, 5). Log-sum-exps, one number for a
    head's width, are left out.

    Args:
        slices: N, of equal length.
        key_share: k, key heads over query heads.
    """
    return 2 / ((slices + 1) * key_share)


def sliced_idle_over_work(ranks: int, stages_per_rank: int, microbatches: int, slices: int) -> float:
    """(P - 1) / (N M V) where all slices cost the same and transfers are free, in both orders.

    Args:
        ranks: P.
        stages_per_rank: V.
        microbatches: M.
        slices: N.
    """
    return (ranks - 1) / (slices * microbatches * stages_per_rank)


def sliced_idle_over_work_attention(ranks: int, microbatches: int, slices: int) -> float:
    """(P - 1) / (N + 1) (2 - (M - 1) P / (M N)) where slice n costs n + 1, as attention alone does.

    One stage per rank, the minimal order, free transfers, N a multiple of P. It hardly falls with M: without an
    exchange of attention among the ranks SlimPipe's bound (P - 1) / (N M) does not hold.

    Args:
        ranks: P.
        microbatches: M.
        slices: N.
    """
    return (ranks - 1) / (slices + 1) * (2 - (microbatches - 1) * ranks / (microbatches * slices))


def exchange_last_rank_idle_over_work(ranks: int, microbatches: int, slices: int) -> float:
    """(P - 1) P / ((N + 1) N M): the last rank's wait over its work, where slice n costs n + 1.

    SlimPipe gives it for the bubble. It is the last rank's wait before its first forward and after its last backward
    alone, while the first P - 1 slices run unaided, if all else is even. Exchange that is even among the ranks with a
    pass has (P - 1) / (N M V), as slices of equal cost have (`sliced_idle_over_work`). If idle ranks help, too, and
    parts may be of any size, nothing is left.

    Args:
        ranks: P.
        microbatches: M.
        slices: N.
    """
    return (ranks - 1) * ranks / ((slices + 1) * slices * microbatches)
