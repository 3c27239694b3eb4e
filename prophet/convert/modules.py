"""Experts of a converted block that stay the modules they are.

Shape legend: E experts, m experts of this rank.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from prophet.convert.base import ExpertsSpec
from prophet.convert.copies import trying
from prophet.convert.routed import RoutedExperts
from prophet.experts.likeness import check_alike, parts_of, strip
from prophet.experts.modules import ModulesBank
from prophet.experts.trial import Trial
from prophet.ranks.collective import Operation


class RoutedModules(RoutedExperts):
    """`RoutedExperts` whose bank holds the user's modules, as they are."""

    experts: ModulesBank  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """This rank's experts have the name of the list that they were in: other code may reach into it."""
        if "origin" in self.__dict__ and name and name == self._prefix.rstrip("."):
            return self.experts.home_experts()
        return super().__getattr__(name)

    @property
    def _prefix(self) -> str:
        prefix: str = self.origin.adapter.list_prefix or ""
        return prefix

    @property
    def _first(self) -> int:
        """The number of this rank's first expert in the list that it comes from."""
        whole = self.origin.spec.held == self.num_experts
        return self.experts.first_expert if whole else 0

    def originals(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in self.experts.home_experts()[0].state_dict():
            held = torch.stack([home.state_dict()[name] for home in self.experts.home_experts()])
            if self.origin.spec.held == self.num_experts:
                op = Operation(f"gathering of the experts' {name}")
                held = self.collective.all_gather(held, op=op).flatten(0, 1)
            found |= {f"{self._prefix}{e}.{name}": value for e, value in enumerate(held)}
        return {name: found[name] for name in self.origin.skeleton.state_dict()}

    @torch.no_grad()
    def take(self, state: dict[str, Tensor]) -> None:
        for e, home in enumerate(self.experts.home_experts(), self._first):
            for name, value in home.state_dict().items():
                value.copy_(state[f"{self._prefix}{e}.{name}"])

    @torch.no_grad()
    def module_of_originals(self) -> nn.Module:
        state, home = self.originals(), self.experts.home_experts()
        attributes = self.origin.attributes
        modules: Any = list_in(self.origin.skeleton, self._prefix)
        offset = self._first - self.experts.first_expert
        for number, expert in self.experts.let_go().items():
            e = number + offset
            if not 0 <= e < len(modules):
                continue  # it never was on this rank
            for part in parts_of(expert):
                name = f"{self._prefix}{e}.{part.name}"
                p = expert.get_parameter(part.name)
                if expert not in home:
                    p = nn.Parameter(state[name].clone(), part.trains)
                vars(p).update(attributes.get(name, {}))
                for where, attribute in part.places:
                    setattr(expert.get_submodule(where), attribute, p)
            modules._modules[str(e)] = expert
        return self.origin.skeleton

    def let_go_of_originals(self) -> None:
        home = self.experts.home_experts()
        for expert in list_in(self.origin.skeleton, self._prefix):
            if expert not in home:
                strip(expert)

    def undo(self) -> None:
        self.experts.let_go()


def list_in(experts: nn.Module, prefix: str) -> nn.ModuleList:
    """The list of experts in the module that holds them; prefix: of its parameters' names, with a dot, or nothing."""
    found: Any = experts.get_submodule(prefix.rstrip("."))
    return found  # type: ignore[no-any-return]


def kept_as_modules(
    experts: nn.ModuleList, first: int, *, total: int, top_k: int, dim: int, router: str, why: str
) -> ExpertsSpec:
    """The description of experts that no feed-forward bank can hold, for the reason `why`.

    first: which of the list is tried. Raises ValueError for experts that no bank can hold.
    """
    check_alike(dict(enumerate(experts)))
    with trying():
        Trial(experts[first], dim)
    return ExpertsSpec(
        num_experts=total,
        held=len(experts),
        top_k=top_k,
        dim=dim,
        form="modules",
        router=router,
        bank="modules",
        why=why,
    )


def modules_bank(experts: nn.ModuleList, spec: ExpertsSpec, rank: int, ranks: int) -> ModulesBank:
    """A bank of this rank's share of E experts, which are used as they are; of the others, it copies those in the list
    without their values.

    Raises ValueError for experts that no bank can hold.
    """
    m = spec.num_experts // ranks
    home = range(rank * m, rank * m + m)
    offset = 0 if len(experts) == spec.num_experts else home.start
    numbered = enumerate(experts, offset)
    given = {e: expert if e in home else _without_values(expert) for e, expert in numbered}
    with trying():  # it runs an expert
        return ModulesBank(
            given, dim=spec.dim, first_expert=home.start, held=m, total_experts=spec.num_experts, ep_size=ranks
        )


def _without_values(expert: nn.Module) -> nn.Module:
    """A copy without parameters' values, in which hooks and buffers are as they were."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in expert.parameters()}
    twin: nn.Module = copy.deepcopy(expert, empty)
    return twin
