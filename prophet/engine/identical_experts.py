"""Are the experts of different ranks different? They are not where every rank has initialised its own alike.

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
SAMPLE = 64  # last numbers of an expert's largest parameter


def check_not_copies(layers: Sequence[MoE], collective: Collective) -> None:
    """Raise `ConfigMismatch` where weights of an expert equal those of another rank's, and not all experts' are equal.

    `model.apply(init)` does that: from one random state, every rank draws for its first expert what the others draw for
    theirs. Where all experts of a layer are equal, somebody may have copied them on purpose: that is a warning.
    Converted experts are as their framework has made them: DeepSpeed copies one on purpose. Collective.
    """
    layers = [layer for layer in layers if layer.initialised_here]
    if collective.size == 1 or not layers:
        return
    said = [_digest(layer.experts, local) for layer in layers for local in range(layer.experts.experts)]
    table = gather_numbers(collective, said, op=Operation(COMPARISON), device=layers[0].experts.device).tolist()
    at = 0
    for layer in layers:
        m = layer.experts.experts
        by_rank = [row[at : at + m] for row in table]
        at += m
        seen: dict[int, tuple[int, int]] = {}
        twins = None
        for rank, digests in enumerate(by_rank):
            for local, value in enumerate(digests):
                first = seen.setdefault(value, (rank, local))
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
    """Of the end of the largest parameter of home expert `local`; biases are often zero, or left as they were."""
    largest = max(bank.flat_views(local, 0, bank.expert_numel), key=torch.Tensor.numel)
    sample = largest[-SAMPLE:].to("cpu").contiguous().view(torch.uint8)
    return int.from_bytes(hashlib.blake2b(sample.numpy().tobytes(), digest_size=7).digest(), "little")
