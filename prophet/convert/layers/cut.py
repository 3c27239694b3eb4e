"""The layer for experts that one module computed all at once: each is a module by itself.

Shape legend: m experts of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from prophet.convert.base import ExpertsSpec
from prophet.convert.layers.routed import RoutedExperts
from prophet.convert.sources.cut import Context, OneExpert, cut
from prophet.experts.modules import ModulesBank
from prophet.ranks.operation import Operation
from prophet.trials import trying


class CutExperts(RoutedExperts):
    """A converted block's experts that one module computed, cut into a copy of that module for each."""

    experts: ModulesBank  # type: ignore[assignment]

    def pieces(self) -> Iterator[tuple[str, nn.Parameter, str, int]]:
        """Every parameter of the bank: its name there, itself, whose piece it is, and of which of the m experts."""
        bank = self.experts
        for local, home in enumerate(bank.home_experts()):
            for name, p in home.named_parameters():
                # `OneExpert` holds its copy under `module.`, a prefix that the original's names lack
                yield f"{bank.first_expert + local}.{name}", p, name.removeprefix("module."), local

    def here(self) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {}
        for _, p, name, _ in self.pieces():
            found.setdefault(name, []).append(p.detach())
        return {name: torch.cat(parts) for name, parts in found.items()}

    def originals(self) -> dict[str, Tensor]:
        # Built expert-parallel: the original module held this rank's experts only.
        if not self.spread:
            return self.here()
        return {
            name: self.collective.all_gather(mine, op=Operation(f"gathering of the experts' {name}")).flatten(0, 1)
            for name, mine in self.here().items()
        }

    def entries_of(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        spec, bank = self.origin.spec, self.experts
        first = bank.first_expert if self.spread else 0
        return {key: cut(given[name], first + local, spec.held) for key, _, name, local in self.pieces()}

    @torch.no_grad()
    def take(self, state: dict[str, Tensor]) -> None:
        for key, value in self.entries_of(state).items():
            self.experts.get_parameter(key).copy_(value)


def cut_bank(whole: nn.Module, layer: nn.Module, spec: ExpertsSpec, rank: int, ranks: int) -> ModulesBank:
    """Make a bank of this rank's share of the experts that one module computes.

    Args:
        whole: The module that computes all experts held here.
        layer: The Tutel layer around it, which experts see in `ctx`.
        spec: Its description, with the `places` that each copy needs.
        rank: This rank in the expert-parallel group.
        ranks: Size of that group.

    Raises:
        ValueError: Where no bank can hold the copies.
    """
    m = spec.num_experts // ranks
    home = range(rank * m, rank * m + m)
    # Built expert-parallel, the module numbers its own experts from 0; expert e is its (e - offset)th.
    offset = 0 if spec.held == spec.num_experts else home.start
    context = Context(layer)
    given = {
        e: OneExpert(whole, context, e - offset if e in home else None, spec.held, spec.places)
        for e in range(spec.num_experts)
    }
    # The bank runs an expert to learn its output's size, which may draw random numbers.
    with trying():
        bank = ModulesBank(
            given, dim=spec.dim, first_expert=home.start, held=m, total_experts=len(given), ep_size=ranks
        )
    # The module that held all experts called all of them, so none has a gradient of None.
    bank.called = range(len(given))
    return bank
