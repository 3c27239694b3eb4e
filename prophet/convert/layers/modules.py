"""Experts of a converted block that were modules in a list: they stay the modules that they are.

Shape legend: E experts, m experts of this rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from prophet.convert.base import ExpertsSpec
from prophet.convert.layers.routed import Origin, RoutedExperts
from prophet.convert.sources.lists import list_in
from prophet.errors import ConversionError
from prophet.experts.likeness import parts_of
from prophet.experts.modules import ModulesBank
from prophet.experts.plain import Network
from prophet.kernels.choice import Impl
from prophet.layer.moe import MoE
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.trials import trying


class RoutedModules(RoutedExperts):
    """Experts that were a list of modules, and are one still: this rank's are the user's objects, under their numbers.

    Of an expert that lives elsewhere the layer has the module, whose parameters have no values here.

    Args:
        bank: This rank's experts.
        origin: The list that they come from.
        collective: The expert-parallel group.
        impl: Which kernels run the experts, as for `prophet.MoE`.
    """

    experts: ModulesBank  # type: ignore[assignment]

    def __init__(self, bank: ModulesBank, origin: Origin, collective: Collective, impl: Impl = "auto") -> None:
        super().__init__(bank, origin, collective, impl)  # type: ignore[arg-type]
        # past nn.Module: the experts have one name each, that of the list
        self.__dict__.update(experts=self._modules.pop("experts"), gate=self._modules.pop("gate"))
        for number, expert in bank.named_children():
            self.add_module(f"{self._key}{number}", expert)
        # torch has not annotated this method
        module: Any = self
        module.register_load_state_dict_post_hook(_lay_out_again)
        if origin.spec.idle_called:
            bank.called = range(self.num_experts)

    def keys_prefix(self, name: str) -> str:
        """Add what stood before the experts' numbers in a dictionary: they keep the names that they had there."""
        return name + self._key

    names_prefix = keys_prefix

    # --- a list ---

    def listed(self) -> nn.ModuleList:
        """The experts of the list that this layer stands for. Those that live elsewhere have no values."""
        every = self.experts.all_experts()
        # A list that held one rank's share numbers its experts from 0.
        first = self.experts.first_expert - self._first
        return nn.ModuleList(every[first : first + self.origin.spec.held])

    def __len__(self) -> int:
        return self.origin.spec.held

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.listed())

    def __getitem__(self, at: Any) -> Any:
        return self.listed()[int(at.removeprefix(self._key)) if isinstance(at, str) else at]

    def _refuse_change(self, *_: Any) -> Any:
        raise ConversionError(
            f"{self.origin.adapter.family}: a converted list of experts keeps its modules; change them inside, or call "
            f"prophet.revert(model) (engine.close() first), change the list, and prophet.convert(model) again"
        )

    __setitem__ = __delitem__ = __iadd__ = append = extend = insert = pop = _refuse_change

    def __getattr__(self, name: str) -> Any:
        """Answer to the name that the list had inside the module which held it: other code may reach into it."""
        if "origin" in self.__dict__ and name and name == self._prefix.rpartition(".")[0]:
            return self.listed()
        return super().__getattr__(name)

    # --- what nn.Module does for all modules inside ---

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Apply `fn` to experts that live elsewhere, too.

        What it draws at random is drawn for them on every rank, so all ranks' generators stay in step.
        """
        for module in self.listed():
            module.apply(fn)
        fn(self)
        return self

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        # The bank is no child of this module, so nothing reaches it by itself, nor in `_apply`.
        self.experts.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.experts._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *given: Any) -> None:
        self.experts._load_from_state_dict(state, self.keys_prefix(prefix), *given)

    # --- as they were ---

    @property
    def _prefix(self) -> str:
        return self.origin.adapter.list_prefix

    @property
    def _key(self) -> str:
        """What keys begin with where a dictionary holds the experts."""
        return self._prefix.rpartition(".")[2]

    @property
    def _first(self) -> int:
        """Number of this rank's first expert in the list that it comes from."""
        whole = self.origin.spec.held == self.num_experts
        return self.experts.first_expert if whole else 0

    def check(self) -> None:
        # Past `RoutedExperts.check`: the experts are still where PEFT looks for them.
        MoE.check(self)

    def originals(self) -> dict[str, Tensor]:
        if not self.spread:
            return {name: value.clone() for name, value in self.origin.skeleton.state_dict().items()}
        found: dict[str, Tensor] = {}
        for name in self.experts.home_experts()[0].state_dict():
            held = torch.stack([home.state_dict()[name] for home in self.experts.home_experts()])
            op = Operation(f"gathering of the experts' {name}")
            held = self.collective.all_gather(held, op=op).flatten(0, 1)
            found |= {f"{self._prefix}{e}.{name}": value.clone() for e, value in enumerate(held)}
        # In the order of the original state dict
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
        modules: Any = self.origin.skeleton.get_submodule(self._prefix.rpartition(".")[0])
        offset = self._first - self.experts.first_expert
        for number, expert in self.experts.let_go().items():
            e = number + offset
            if not 0 <= e < len(modules):
                # It never was on this rank: the model was built expert-parallel.
                continue
            for part in parts_of(expert):
                name = f"{self._prefix}{e}.{part.name}"
                p = expert.get_parameter(part.name)
                # This rank's experts keep their parameter objects; the others' have no values here.
                if expert not in home:
                    p = nn.Parameter(state[name].clone(), part.requires_grad)
                vars(p).update(attributes.get(name, {}))
                # A parameter that an expert uses twice has several places.
                for where, attribute in part.places:
                    setattr(expert.get_submodule(where), attribute, p)
            modules._modules[f"{self._key}{e}"] = expert
        return self.origin.skeleton

    def let_go_of_originals(self) -> None:
        bank, modules = self.experts, list_in(self.origin.skeleton, self._prefix)
        # Replicas run in the user's modules, so whoever holds one of these can change it.
        if self.origin.spec.held == self.num_experts:
            bank.take_skeletons({e: m for e, m in enumerate(modules) if m not in bank.home_experts()})

    def undo(self) -> None:
        self.experts.let_go()


def _lay_out_again(layer: RoutedModules, _: Any) -> None:
    """Let the bank adopt the experts' parameters again: `load_state_dict(assign=True)` has replaced them."""
    layer.experts.adopt()


def modules_bank(experts: nn.ModuleList, spec: ExpertsSpec, rank: int, ranks: int) -> ModulesBank:
    """Make a bank of this rank's share of E experts, which are used as they are.

    Of the other experts in the list it copies the modules without their values.

    Args:
        experts: The list: all E, or this rank's share where the model was built expert-parallel.
        spec: Their description.
        rank: This rank in the expert-parallel group.
        ranks: Size of that group.

    Raises:
        ValueError: For experts that no bank can hold.
    """
    m = spec.num_experts // ranks
    home = range(rank * m, rank * m + m)
    network = None
    if spec.bank == "feed-forward":
        assert spec.names is not None
        network = Network(spec.names, spec.activation)
    offset = 0 if len(experts) == spec.num_experts else home.start
    numbered = enumerate(experts, offset)
    given = {e: expert if e in home else _without_values(expert) for e, expert in numbered}
    # The bank runs an expert to learn its output's size.
    with trying():
        return ModulesBank(
            given,
            dim=spec.dim,
            first_expert=home.start,
            held=m,
            total_experts=spec.num_experts,
            ep_size=ranks,
            network=network,
        )


def _without_values(expert: nn.Module) -> nn.Module:
    """A copy without parameters' values, in which hooks and buffers are as they were."""
    # The memo of `deepcopy` puts these in the place of the parameters, so their values are never copied.
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in expert.parameters()}
    twin: nn.Module = copy.deepcopy(expert, empty)
    return twin
