"""DeepSpeed's layers name their experts: code that reads `experts.deepspeed_experts[i]` finds this rank's there.

What is read are views of the bank's parameters. DeepSpeed's `safe_get_full_grad` and `safe_get_full_fp32_param` answer
for them; both are collective with ZeRO, as ever.

Shape legend: m experts of this rank.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, overload

from torch import Tensor, nn

from prophet.convert import RoutedExperts, converted
from prophet.kernels.grouped_ffn import ExpertWeights

LIST = "deepspeed_experts"


def show_experts(model: nn.Module) -> None:
    """Give converted layers of DeepSpeed the attribute that their experts were in."""
    for *_, layer in converted(model):
        if hasattr(layer.origin.skeleton, LIST) and layer.origin.spec.bank == "feed-forward":
            # Past nn.Module: the views are no modules of the model, and their parameters have no names in it.
            vars(layer)[LIST] = Experts(layer)


class Experts(Sequence[nn.Module]):
    """This rank's m experts as the modules that they were."""

    def __init__(self, layer: RoutedExperts) -> None:
        self._layer = layer

    def __len__(self) -> int:
        return self._layer.experts.experts

    @overload
    def __getitem__(self, at: int) -> nn.Module: ...
    @overload
    def __getitem__(self, at: slice) -> list[nn.Module]: ...
    def __getitem__(self, at: int | slice) -> nn.Module | list[nn.Module]:
        numbers = range(len(self))[at]
        return [self._expert(e) for e in numbers] if isinstance(numbers, range) else self._expert(numbers)

    def _expert(self, number: int) -> nn.Module:
        skeleton: Any = self._layer.origin.skeleton
        # A copy per question: the skeleton's parameters stay on the meta device.
        expert: nn.Module = copy.deepcopy(getattr(skeleton, LIST)[number])
        values = self._named(number, lambda p: p.detach())
        grads = self._grads(number)
        tools: Any = importlib.import_module("deepspeed.utils")
        for name, value in values.items():
            p = nn.Parameter(value, requires_grad=False)
            if grads is not None:
                p.grad = grads[name]
            # ZeRO has the gradients, in flat tensors
            else:
                shown: Any = p
                shown._hp_mapping = self
                for method, tool in (
                    ("get_full_hp_grad", tools.safe_get_full_grad),
                    ("get_full_hp_param", tools.safe_get_full_fp32_param),
                ):
                    setattr(shown, method, partial(self._full, number, name, tool))
            where, _, attribute = name.rpartition(".")
            expert.get_submodule(where)._parameters[attribute] = p
        return expert

    def _grads(self, number: int) -> Mapping[str, Tensor] | None:
        """The gradients that are on the bank's parameters, or None where ZeRO has taken them."""
        if any(p.grad is None for p in self._layer.experts.parameters()):
            return None
        return self._named(number, lambda p: p.grad)

    def _full(self, number: int, name: str, tool: Callable[[nn.Parameter], Tensor]) -> Tensor:
        return self._named(number, tool)[name]

    def _named(self, number: int, of: Callable[[nn.Parameter], Any]) -> dict[str, Tensor]:
        """By name within an expert, its share of what `of` returns for the bank's parameters."""
        layer = self._layer
        origin, bank = layer.origin, layer.experts
        one: dict[str, Any] = {}
        for field, stacked in bank.weights()._asdict().items():
            one[field] = None
            if stacked is not None:
                # `weights()` may be views of another shape, so the parameter is found by its memory.
                p = next(q for q in bank.parameters() if q.data_ptr() == stacked.data_ptr())
                one[field] = of(p).reshape(stacked.shape)[number]
        weights = ExpertWeights(**one)
        prefix = f"{LIST}.0."
        return {n.removeprefix(prefix): t for n, t in origin.adapter.pack(origin.spec, [weights]).items()}
