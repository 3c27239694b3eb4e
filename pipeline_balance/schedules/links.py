"""What a message between two stages takes, by the ranks that it goes between.

Shape legend: S stages, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from prophet.errors import SpecError
from prophet.spec import FloatArray

Transfers = float | FloatArray
"""Seconds of one message between stages: the same on all links, or [P, P] by the two ranks, in either direction."""


def checked_transfers(transfer_s: Transfers, ranks: int) -> FloatArray:
    """Return the seconds between any two of P ranks, [P, P].

    Args:
        transfer_s: Of a message.
        ranks: P.

    Raises:
        SpecError: They are not finite seconds, or of another number of ranks.
    """
    table = np.asarray(transfer_s, dtype=np.float64)
    if table.ndim and table.shape != (ranks, ranks):
        raise SpecError(f"transfer_s must be one figure or [{ranks}, {ranks}], got {list(table.shape)}")
    if not (np.isfinite(table).all() and (table >= 0).all()):
        raise SpecError(f"transfer_s must be finite seconds, not negative, got {table.tolist()}")
    return np.broadcast_to(table, (ranks, ranks))


def between_stages(transfer_s: Transfers, stage_ranks: Sequence[int]) -> FloatArray:
    """Return the seconds from every stage to the next one, [S - 1]; none where both are on one rank.

    Args:
        transfer_s: Of a message.
        stage_ranks: The rank of every stage [S].
    """
    if not np.any(transfer_s):
        return np.zeros(len(stage_ranks) - 1)
    table = np.asarray(transfer_s, dtype=np.float64)
    links = [0.0 if a == b else float(table[a, b] if table.ndim else table) for a, b in pairwise(stage_ranks)]
    return np.array(links)


def among(transfer_s: Transfers, ranks: Sequence[int]) -> Transfers:
    """Return the seconds between these ranks alone, in their numbers.

    Args:
        transfer_s: Of a message.
        ranks: Which, in this order.
    """
    return transfer_s if np.ndim(transfer_s) == 0 else np.asarray(transfer_s)[np.ix_(ranks, ranks)]


def grown(transfer_s: Transfers, ranks: int) -> Transfers:
    """Return the seconds between P ranks from those of fewer; links of those that are new are like the typical one.

    Args:
        transfer_s: Of a message.
        ranks: P.
    """
    table = np.asarray(transfer_s, dtype=np.float64)
    if not table.ndim or len(table) >= ranks:
        return transfer_s
    links = table[~np.eye(len(table), dtype=np.bool_)]
    found = np.full((ranks, ranks), float(np.median(links)) if links.size else 0.0)
    found[: len(table), : len(table)] = table
    return found


def message_s(transfer_s: Transfers, stages: int) -> FloatArray:
    """Return what a microbatch's messages add to every stage's time, with stage k on rank k, [S].

    Under 1F1B stages i and i + 1 have two microbatches under way. Each goes up over their link and comes back, so two
    take the time of both stages and twice the link's: T_i + T_{i+1} + 2 t. Any run of n stages has n under way. Half
    of a link's 2 t counts for either side, and then the slowest stage is the pace of the pipeline.

    Args:
        transfer_s: Of a message.
        stages: S.
    """
    links = between_stages(transfer_s, range(stages))
    added = np.zeros(stages)
    added[:-1] += links
    added[1:] += links
    return added


def pace_s(loads_s: Sequence[float], links_s: Sequence[float]) -> float:
    """Return the least seconds from one microbatch to the next under 1F1B: the largest mean over a run of stages.

    A run of n stages takes its loads and twice its links for n microbatches, see `message_s`.

    Args:
        loads_s: Seconds of a microbatch in every stage [S].
        links_s: Of a message from every stage to the next one [S - 1].
    """
    largest = max(loads_s)
    for first in range(len(loads_s)):
        total = loads_s[first]
        for last in range(first + 1, len(loads_s)):
            total += loads_s[last] + 2 * links_s[last - 1]
            largest = max(largest, total / (last - first + 1))
    return largest
