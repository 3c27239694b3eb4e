"""Experts that start alike at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from prophet.experts.likeness import strip
from prophet.experts.modules import ModulesBank
from prophet.trials import seed_all, trying

# 2^64 over the golden ratio: spreads neighbouring numbers over all 64 bits
_ODD = 0x9E3779B97F4A7C15


def build_bank(
    make: Callable[[], nn.Module], *, dim: int, total_experts: int, first_expert: int, held: int, ep_size: int
) -> ModulesBank:
    """Make a bank of experts that start alike at any number of ranks.

    Every rank makes all experts, one after another, and keeps the parameters of those at home. Each is made under a
    random state that follows from torch's present one and from the expert's number. Torch's random state is left as it
    was.

    Args:
        make: Returns a new expert each time.
        dim: D, of the rows.
        total_experts: E, how many are made.
        first_expert: The first that is at home here.
        held: How many are at home here.
        ep_size: Ranks that share the experts.

    Raises:
        TypeError: `make` returns no module, or the same one twice.
        ValueError: The experts are not what a `ModulesBank` takes.
    """
    home = range(first_expert, first_expert + held)
    experts: dict[int, nn.Module] = {}
    with trying(None):
        # drawn, so that the user's seed decides what the experts are
        seed = int(torch.randint(0, 1 << 62, ()).item())
        for e in range(total_experts):
            seed_all((seed + _ODD * (e + 1)) % (1 << 63))
            made = make()
            if not isinstance(made, nn.Module) or any(made is known for known in experts.values()):
                got = "the same one again" if isinstance(made, nn.Module) else type(made).__name__
                raise TypeError(f"expert: expected a function that makes a new torch.nn.Module every time, got {got}")
            experts[e] = made
            # at once, so that no rank ever holds the parameters of all experts
            if e not in home:
                strip(made)
    return ModulesBank(
        experts, dim=dim, first_expert=first_expert, held=held, total_experts=total_experts, ep_size=ep_size
    )
