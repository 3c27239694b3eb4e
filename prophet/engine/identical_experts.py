"""Check that experts of different ranks differ: they do not where every rank has initialised its own alike.

Shape legend: R ranks, L layers, m experts of a rank.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence

import torch

from prophet.errors import ConfigMismatch
from prophet.experts.bank import Bank
from prophet.layer.moe import MoE
from prophet.ranks.collective import Collective
from prophet.ranks.messages import gather_numbers
from prophet.ranks.operation import Operation

COMPARISON = "comparison of experts"
# So many last numbers of an expert's largest parameter stand for the whole expert
SAMPLE = 64


def check_not_copies(layers: Sequence[MoE], collective: Collective) -> None:
    """Refuse experts that are bit for bit those of another rank; collective.

    `model.apply(init)` makes such experts: from one random state, every rank draws for its first expert what the others
    draw for theirs. Where all experts of a layer are equal, somebody may have copied them on purpose: it only warns.

    Args:
        layers: This rank's layers.
        collective: The expert-parallel group.

    Raises:
        ConfigMismatch: Where experts of two ranks are equal, but not all experts of the layer.
    """
    # Converted experts are as their framework has made them, and DeepSpeed copies one on purpose
    layers = [layer for layer in layers if layer.initialised_here]
    if collective.size == 1 or not layers:
        return
    digests = [_digest(layer.experts, local) for layer in layers for local in range(layer.experts.experts)]
    table = gather_numbers(collective, digests, op=Operation(COMPARISON)).tolist()
    # Each row has one number per expert, layer after layer
    at = 0
    for layer in layers:
        m = layer.experts.experts
        by_rank = [row[at : at + m] for row in table]
        at += m
        seen: dict[int, tuple[int, int]] = {}
        twins = None
        for rank, of_rank in enumerate(by_rank):
            for local, value in enumerate(of_rank):
                first = seen.setdefault(value, (rank, local))
                # Twins on one rank may be the user's choice; across ranks they are what a shared seed makes
                if first[0] != rank and twins is None:
                    twins = first, (rank, local)
        if twins is None:
            continue
        (r, i), (s, j) = twins
        text = (
            f"{layer.label}: expert {r * m + i} of rank {r} and expert {s * m + j} of rank {s} have weights that "
            f"are equal bit for bit, as after model.apply(init), which draws alike on all ranks"
        )
        if len(seen) == 1:
            warnings.warn(f"{text}; all its experts are, so they may have been copied on purpose", stacklevel=3)
        else:
            raise ConfigMismatch(
                f"{text}: initialise each expert where it is made, prophet.MoE(..., expert=lambda: "
                f"Expert().apply(init)), or convert a model that every rank has initialised whole, with "
                f"prophet.convert(model)"
            )


def _digest(bank: Bank, local: int) -> int:
    """Return a digest of the end of the largest parameter of home expert `local`."""
    # Not of biases, which are zero in many experts, or were never initialised anew
    largest = max(bank.flat_views(local, 0, bank.expert_numel), key=torch.Tensor.numel)
    # A copy: a tensor that numpy has seen shares memory that torch can never free in place again
    sample = largest[-SAMPLE:].to("cpu", copy=True).contiguous().view(torch.uint8)
    # Seven bytes: the number must fit into a signed 64-bit integer
    return int.from_bytes(hashlib.blake2b(sample.numpy().tobytes(), digest_size=7).digest(), "little")
