"""An optimizer that exists: its states go with the experts they belong to, and its groups stay where they are.

LR schedulers keep a figure per group, so groups keep their number and order, even one that is left without parameters.
A state moves as its parameter does, expert by expert, by the adapter's pure movement of numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prophet.convert.base import Adapter, ExpertsSpec
from prophet.convert.find import Found
from prophet.convert.layers.cut import CutExperts
from prophet.convert.sources.cut import cut
from prophet.convert.trials.elementwise import is_elementwise
from prophet.engine.config import APART, why_not_apart
from prophet.errors import ConversionError
from prophet.experts.bank import Entry
from prophet.experts.feed_forward import FeedForwardBank
from prophet.kernels.grouped_ffn import ExpertWeights

LATER = "build the optimizer after prophet.convert"


def check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ConversionError` for an optimizer whose states cannot be moved, whatever its parameters are."""
    why = why_not_apart(optimizer)
    if why is not None:
        raise ConversionError(f"optimizer: {why}: {LATER}, and {APART}")
    for kind in type(optimizer).__mro__:
        if isinstance(vars(kind).get("param_groups"), property):
            raise ConversionError(f"optimizer: {kind.__name__} stands for another one: pass that one")


@dataclass(frozen=True, slots=True)
class Move:
    """An optimizer's change from some parameters to others, with everything ready that takes memory.

    Attributes:
        optimizer: The one that changes over.
        old: The parameters that it has.
        new: By the id of an old one, those that take its place, and their names.
        kept: Names of those that stay, by id.
        states: Of the new parameters.
    """

    optimizer: torch.optim.Optimizer
    old: tuple[nn.Parameter, ...]
    new: Mapping[int, Sequence[tuple[str, nn.Parameter]]]
    kept: Mapping[int, str]
    states: Mapping[nn.Parameter, dict[str, Any]]

    def make(self) -> None:
        """Let the optimizer hold the new parameters and their states instead of the old; cannot fail."""
        self.optimizer.state.update({p: state for p, state in self.states.items() if state})
        gone = {id(p) for p in self.old} - self.kept.keys()
        for group in self.optimizer.param_groups:
            # An optimizer built from `named_parameters()` keeps names beside each group's parameters.
            names = group.get("param_names") or [""] * len(group["params"])
            pairs: list[tuple[str, nn.Parameter]] = []
            for own, p in zip(names, group["params"], strict=True):
                pairs += self.new.get(id(p), ())
                if id(p) not in gone:
                    pairs.append((self.kept.get(id(p), own), p))
            # In place: schedulers and users may hold the list itself
            group["params"][:] = [p for _, p in pairs]
            if "param_names" in group:
                group["param_names"][:] = [own for own, _ in pairs]
        for p in self.old:
            if id(p) in gone:
                self.optimizer.state.pop(p, None)


@dataclass(frozen=True, slots=True)
class Carried:
    """What an optimizer holds of one block's experts, before their conversion.

    Attributes:
        optimizer: The one that holds it.
        where: Name of the experts' module in the model.
        adapter: The one that knows the block.
        spec: Its description.
        params: The module's parameters by name, the objects in the optimizer.
    """

    optimizer: torch.optim.Optimizer
    where: str
    adapter: Adapter
    spec: ExpertsSpec
    params: Mapping[str, nn.Parameter]

    def why_apart(self) -> str | None:
        """Why one stacked parameter cannot take the place of all experts', or None if it can."""
        groups = {name: self._group_of(p) for name, p in self.params.items()}
        for index in sorted({g for g in groups.values() if g is not None}):
            if not is_elementwise(self.optimizer, index, next(iter(self.params.values()))):
                return f"{type(self.optimizer).__name__} treats a stacked parameter otherwise than its parts"
        if self.spec.places:
            return self._why_not_cut()
        # Parts of one stacked parameter come from several: these need one group, and states that agree in all but
        # tensors.
        for sources in self._sources().values():
            first, *others = sorted(sources)
            for name in (first, *others):
                for key, value in self._state_of(name).items():
                    # Only states of the parameter's shape move with it; Adafactor's rows and columns do not.
                    if isinstance(value, Tensor) and value.ndim and value.shape != self.params[name].shape:
                        return f"the state {key!r} of {name} has shape {list(value.shape)}"
            for name in others:
                if groups[name] != groups[first]:
                    return f"{first} is in group {groups[first]} of the optimizer, and {name} in group {groups[name]}"
                a, b = self._plain(first), self._plain(name)
                different = sorted({key for key in (*a, *b) if a.get(key, _MISSING) != b.get(key, _MISSING)})
                if different:
                    key = different[0]
                    one, two = a.get(key, _MISSING), b.get(key, _MISSING)
                    return f"the state {key!r} of {first} is {one}, and that of {name} {two}"
        return None

    def _why_not_cut(self) -> str | None:
        """Why some state cannot be cut as its parameter is, or None if all can."""
        for name, p in self.params.items():
            for key, value in self._state_of(name).items():
                if isinstance(value, Tensor) and value.ndim and value.shape != p.shape:
                    return f"the state {key!r} of {name} has shape {list(value.shape)}"
        return None

    def digest(self) -> Iterator[bytes]:
        """What must be equal on all ranks: groups, numbers, and a sample of every state that all ranks hold."""
        for name, p in self.params.items():
            yield f"{self.where}.{name}: {self._group_of(p)} {sorted(self._plain(name).items())}; ".encode()
            for _, value in sorted(self._state_of(name).items()):
                if isinstance(value, Tensor) and value.ndim and self.spec.held == self.spec.num_experts:
                    yield value.detach().reshape(-1)[-_SAMPLE:].to("cpu", torch.float64, copy=True).numpy().tobytes()

    @torch.no_grad()
    def moved(self, model: nn.Module) -> Move:
        """Prepare the change to the converted experts' parameters, with their states."""
        layer: Any = model.get_submodule(self.where)
        bank = layer.experts
        name = layer.names_prefix(f"{self.where}.")
        new: dict[int, list[tuple[str, nn.Parameter]]] = {}
        states: dict[nn.Parameter, dict[str, Any]] = {}
        kept = {id(p): f"{name}{part}" for part, p in bank.named_parameters()}
        if isinstance(bank, FeedForwardBank):
            for part, (first, state) in self._states_in(bank).items():
                p = bank.get_parameter(part)
                # Frozen experts were never in the optimizer, and stay out
                if self._group_of(self.params[first]) is None:
                    continue
                new.setdefault(id(self.params[first]), []).append((f"{name}{part}", p))
                states[p] = state
        for part, p, source, local in layer.pieces() if self.spec.places else ():
            new.setdefault(id(self.params[source]), []).append((f"{name}{part}", p))
            states[p] = self._cut_state(layer, source, local)
        return Move(self.optimizer, tuple(self.params.values()), new, kept, states)

    def _cut_state(self, layer: CutExperts, source: str, local: int) -> dict[str, Any]:
        """The state that home expert `local` has of the parameter `source`."""
        expert = local + (layer.experts.first_expert if layer.spread else 0)
        found: dict[str, Any] = {}
        for key, value in self._state_of(source).items():
            # Numbers, such as Adam's step, hold for every expert alike
            piece = cut(value, expert, self.spec.held) if isinstance(value, Tensor) and value.ndim else value
            found[key] = piece.clone() if isinstance(piece, Tensor) else piece
        return found

    def put_back(self, experts: nn.Module) -> None:
        """Undo the conversion's effect: `experts` has the parameters again that the optimizer holds."""
        for name, p in self.params.items():
            holder, _, attribute = name.rpartition(".")
            experts.get_submodule(holder)._parameters[attribute] = p

    # --- parts ---

    def _group_of(self, p: nn.Parameter) -> int | None:
        """Number of the optimizer's group that holds a parameter, or None."""
        for index, group in enumerate(self.optimizer.param_groups):
            if any(q is p for q in group["params"]):
                return index
        return None

    def _state_of(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.optimizer.state.get(self.params[name], {})
        return found

    def _plain(self, name: str) -> dict[str, object]:
        """The state without values of tensors that have dimensions, of which only the dtype is kept."""
        return {
            key: (str(value.dtype) if value.ndim else value.item()) if isinstance(value, Tensor) else value
            for key, value in self._state_of(name).items()
        }

    def _unpacked(self, values: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        return self.adapter.unpack(self.spec, values, expert)

    def _sources(self) -> dict[str, set[str]]:
        """By part of an expert, the names of the parameters that all experts' parts come from.

        Asked of a graph of tensors without values: whatever moved there has its beginning in a leaf.
        """
        leaves = {n: torch.empty_like(p, device="meta").requires_grad_() for n, p in self.params.items()}
        found: dict[str, set[str]] = {}
        with torch.enable_grad():
            for expert in range(self.spec.held):
                for part, value in self._unpacked(leaves, expert)._asdict().items():
                    if value is not None:
                        found.setdefault(part, set()).update(_names_of(value, leaves))
        return found

    def _states_in(self, bank: FeedForwardBank) -> dict[str, tuple[str, dict[str, Any]]]:
        """By parameter of the bank: the first of its sources, and its state."""
        blank = {n: torch.empty_like(p, device="meta") for n, p in self.params.items()}
        sources: dict[str, set[str]] = {}
        with torch.enable_grad():
            leaves = {n: t.clone().requires_grad_() for n, t in blank.items()}
            for entry, value in self._entries(bank, leaves):
                sources.setdefault(entry.parameter, set()).update(_names_of(value, leaves))
        found: dict[str, tuple[str, dict[str, Any]]] = {}
        for part, p in bank.named_parameters():
            names = [n for n in self.params if n in sources[part]]
            state: dict[str, Any] = {}
            for key, value in self._state_of(names[0]).items():
                if not isinstance(value, Tensor) or not value.ndim:
                    state[key] = value.clone() if isinstance(value, Tensor) else value
                    continue
                # In the state's own dtype and place: moments may be float32 beside bfloat16 parameters.
                state[key] = torch.empty_like(p, dtype=value.dtype, device=value.device)
                # The adapter moves a state as if it were the parameter; parameters of other parts have no values.
                for entry, moved in self._entries(bank, blank | {n: self._state_of(n)[key] for n in names}):
                    if entry.parameter == part:
                        entry.of(state[key]).copy_(moved)
            found[part] = names[0], state
        return found

    def _entries(self, bank: FeedForwardBank, values: Mapping[str, Tensor]) -> Iterator[tuple[Entry, Tensor]]:
        """What the bank holds of every home expert, with its value where the experts' parameters have `values`."""
        # Built expert-parallel, the original numbers its experts from 0
        whole = self.spec.held == self.spec.num_experts
        own: dict[int, dict[str, Tensor]] = {}
        for local in range(bank.experts):
            number = bank.first_expert + local
            own[number] = bank.as_entries(local, self._unpacked(values, number if whole else local))
        for entry in bank.entries():
            yield entry, own[entry.expert][entry.key]


def carry(optimizer: torch.optim.Optimizer | None, model: nn.Module, found: Sequence[Found]) -> list[Carried]:
    """Collect what `optimizer` holds of the experts of each of `found`; nothing without an optimizer.

    Args:
        optimizer: Built before the conversion, or None.
        model: Not converted yet.
        found: The blocks to convert.

    Raises:
        ConversionError: Where its states cannot move with the experts.
    """
    if optimizer is None:
        return []
    check_kind(optimizer)
    carried = []
    for f in found:
        if f.adapter.takes_lora and f.spec.bank == "modules":
            raise ConversionError(f"{f.where}: LoRA's factors are cut by expert, and their states are not: {LATER}")
        one = Carried(optimizer, f.where, f.adapter, f.spec, dict(f.experts(model).named_parameters()))
        # Experts in a list keep their parameter objects, and so their states.
        why = None if f.spec.form == "modules" and not f.spec.places else one.why_apart()
        if why is not None:
            raise ConversionError(f"{f.where}: {why}: {LATER}")
        carried.append(one)
    return carried


_MISSING = "missing"
# Elements of a state that are compared between ranks
_SAMPLE = 64


def digest(optimizer: torch.optim.Optimizer | None, carried: Sequence[Carried]) -> int:
    """Hash to 56 bits what must be equal on all ranks; 0 without an optimizer."""
    if optimizer is None:
        return 0
    found = hashlib.blake2b(f"{type(optimizer).__name__} {len(optimizer.param_groups)} ".encode(), digest_size=7)
    for one in carried:
        for part in one.digest():
            found.update(part)
    return int.from_bytes(found.digest(), "little")


def _names_of(value: Tensor, leaves: Mapping[str, Tensor]) -> set[str]:
    """Which of `leaves` a value depends on, by its autograd graph; a value without a graph is a leaf itself."""
    name_of = {id(leaf): name for name, leaf in leaves.items()}
    if value.grad_fn is None:
        return {name_of[id(value)]}
    found: set[str] = set()
    ahead, seen = [value.grad_fn], set()
    while ahead:
        node: Any = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # AccumulateGrad, the end of a graph, holds the leaf
        if hasattr(node, "variable"):
            found.add(name_of[id(node.variable)])
        ahead += [following for following, _ in node.next_functions]
    return found
