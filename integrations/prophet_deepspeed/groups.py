"""Optimizer parameter groups that were written for a model before its conversion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from prophet.convert import converted
from prophet_deepspeed.section import ConfigError

Group = nn.Parameter | dict[str, Any]


class ParameterGroups:
    """Remembers `given`, made for `model` as it is now; `renewed()` says the same of the converted model.

    given: parameters or groups of them, as for `deepspeed.initialize`; None stands for all of the model.
    """

    def __init__(self, model: nn.Module, given: Iterable[Group] | None) -> None:
        self._model = model
        items = None if given is None else list(given)
        # a group's own iterables are read once, here
        self._items = None if items is None else [_listed(g) if isinstance(g, Mapping) else g for g in items]
        self._names = {id(p): n for n, p in model.named_parameters()}

    def renewed(self) -> list[Group]:
        """Experts' parameters replaced by those that took their place; everything else as it was given."""
        model = self._model
        if self._items is None:
            return [p for p in model.parameters() if p.requires_grad]
        alive = {id(p) for p in model.parameters()}
        layers = {name: layer for name, _, _, layer in converted(model)}
        used: dict[int, int] = {}

        def renew(params: Iterable[nn.Parameter], group: int) -> list[nn.Parameter]:
            found = []
            for p in params:
                name = self._names.get(id(p), "")
                if id(p) in alive or not name:
                    found.append(p)
                    continue
                where = next(n for n in layers if name.startswith(n + "."))
                bias = "bias" in name.rsplit(".", 1)[-1]
                for kind, new in layers[where].experts.named_parameters():
                    if ("bias" in kind) != bias:
                        continue
                    if used.setdefault(id(new), group) != group:
                        raise ConfigError(
                            f"model_parameters: {where}.experts.{kind} stacks all experts of the layer, which are in "
                            f"different groups; expected one group"
                        )
                    if all(new is not q for q in found):
                        found.append(new)
            return found

        if any(isinstance(g, dict) for g in self._items):
            if not all(isinstance(g, dict) for g in self._items):
                raise ConfigError("model_parameters: expected parameters or groups, got both")
            groups: list[Group] = []
            for at, g in enumerate(self._items):
                named: dict[str, Any] = dict(g)
                groups.append({"name": f"group{at}", **named, "params": renew(named["params"], at)})
            return groups
        return list(renew(self._items, 0))  # type: ignore[arg-type]


def _listed(group: Mapping[str, Any]) -> dict[str, Any]:
    params = group["params"]
    return {**group, "params": [params] if isinstance(params, nn.Parameter) else list(params)}
