"""A run's optimizers: made once from all parameters on every rank, with what they keep per parameter and per group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline_balance.pipeline.model.ownership import number_of
from prophet.errors import SpecError
from prophet.state.json_values import from_json, to_json

NamedParameters = list[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[NamedParameters], Optimizer | Sequence[Optimizer]]

# entries of a group that are parameters and their names, as newer releases of torch keep them
_NOT_OPTIONS = ("params", "param_names")


class Optimizers:
    """What `make_optimizer` returned, as a list, with lookup by parameter.

    Attributes:
        made: What it returned, as it is.
        all: Its optimizers.
        stepping: Whether `step` is under way.

    Args:
        make_optimizer: Makes one optimizer or several from all named parameters.
        parameters: All parameters of the unsplit model, by name.

    Raises:
        SpecError: There is an LBFGS, whose step mixes layers, or two optimizers or groups have a parameter.
    """

    def __init__(self, make_optimizer: MakeOptimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.stepping = False
        self.made = make_optimizer(list(parameters.items()))
        self.all: list[Optimizer] = [self.made] if isinstance(self.made, Optimizer) else list(self.made)
        for optimizer in self.all:
            if not isinstance(optimizer, Optimizer):
                raise SpecError(f"make_optimizer must return optimizers of torch, got a {type(optimizer).__name__}")
            if isinstance(optimizer, torch.optim.LBFGS):
                raise SpecError("LBFGS mixes all layers in one step and cannot train stages: use another optimizer")
        # a parameter that steps twice per update would be trained with a rate that nobody chose
        names = {id(p): n for n, p in parameters.items()}
        seen: set[int] = set()
        for parameter in self._parameters():
            if id(parameter) in seen:
                raise SpecError(f"parameter {names.get(id(parameter), '?')} is in two optimizers or groups")
            seen.add(id(parameter))

    def _parameters(self) -> Iterator[nn.Parameter]:
        for optimizer in self.all:
            for group in optimizer.param_groups:
                yield from group["params"]

    def unscale_(self, scaler: torch.amp.GradScaler) -> None:
        """Have `scaler` take its scale out of all gradients."""
        for optimizer in self.all:
            scaler.unscale_(optimizer)

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Step all of them, in their order; with a `scaler`, those whose gradients it has found finite."""
        self.stepping = True
        try:
            for optimizer in self.all:
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
        finally:
            self.stepping = False
        if scaler is not None:
            scaler.update()

    def exchange(self, others: Mapping[int, nn.Parameter], entries: Mapping[int, dict[str, Any]]) -> None:
        """Train `others` instead. Cannot fail. Groups keep their lists, and their order.

        Args:
            others: The parameters from now on, by the id of those from before.
            entries: Their optimizer state, likewise.
        """
        for optimizer in self.all:
            for group in optimizer.param_groups:
                before = list(group["params"])
                # in place: schedulers and users may refer to the list
                group["params"][:] = [others.get(id(p), p) for p in before]
                for p in before:
                    if id(p) in others:
                        optimizer.state.pop(p, None)
                        if id(p) in entries:
                            optimizer.state[others[id(p)]] = entries[id(p)]

    def of(self) -> dict[int, Optimizer]:
        """Return the optimizer of every parameter, by the parameter's id; groups may have been added since the
        start.
        """
        return {id(p): o for o in self.all for g in o.param_groups for p in g["params"]}

    def state(self) -> dict[int, dict[str, Any]]:
        """Return what they keep per parameter, by its id."""
        return {id(p): entries for o in self.all for p, entries in o.state.items() if isinstance(p, Tensor)}

    def options(self, parameters: Mapping[str, nn.Parameter]) -> list[list[dict[str, Any]]]:
        """Return every group's options and its parameters' names, as JSON can hold them: [optimizer][group]."""
        names = {id(p): n for n, p in parameters.items()}
        return [
            [
                {
                    "parameters": [names.get(id(p), "") for p in group["params"]],
                    "options": {k: to_json(v, k) for k, v in group.items() if k not in _NOT_OPTIONS},
                }
                for group in optimizer.param_groups
            ]
            for optimizer in self.all
        ]

    def digest(self) -> int:
        """Digest the options that are numbers or texts, such as rates, and how many parameters groups have."""

        def plain(value: Any) -> Any:
            # `capturable` optimizers have their rate as a tensor
            if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
                return value.item()
            return value if isinstance(value, bool | int | float | str | tuple) else None

        groups = [g for o in self.all for g in o.param_groups]
        return number_of(repr([(len(g["params"]), [(k, plain(v)) for k, v in sorted(g.items())]) for g in groups]))

    def check(self, options: list[list[dict[str, Any]]], parameters: Mapping[str, nn.Parameter]) -> None:
        """Raise `SpecError` unless `options` are of these groups with these parameters."""
        mine = [[g["parameters"] for g in groups] for groups in self.options(parameters)]
        others = [[g["parameters"] for g in groups] for groups in options]
        if [len(g) for g in mine] != [len(g) for g in others]:
            raise SpecError(
                f"the optimizers have {[len(g) for g in mine]} groups, the saved ones {[len(g) for g in others]}"
            )
        for o, (here, there) in enumerate(zip(mine, others, strict=True)):
            for g, (a, b) in enumerate(zip(here, there, strict=True)):
                if a != b:
                    differ = sorted(set(a) ^ set(b))[:3] or a[:3]
                    raise SpecError(f"group {g} of optimizer {o} holds other parameters than the saved one: {differ}")
                for name, encoded in options[o][g]["options"].items():
                    _check_option(
                        f"{name} of group {g} of optimizer {o}", self.all[o].param_groups[g].get(name), encoded
                    )

    def set_options(self, options: list[list[dict[str, Any]]]) -> None:
        """Take over the groups' options, as `options` gave them and `check` has passed them."""
        for optimizer, groups in zip(self.all, options, strict=True):
            for group, given in zip(optimizer.param_groups, groups, strict=True):
                for name, encoded in given["options"].items():
                    value = from_json(encoded)
                    # into the tensor that is there: a captured graph reads it
                    if isinstance(group.get(name), Tensor):
                        group[name].copy_(torch.as_tensor(value))
                    else:
                        group[name] = value


def _check_option(what: str, now: Any, encoded: Any) -> None:
    """Raise `SpecError` unless a saved option can take the place of the one in force."""
    try:
        value = from_json(encoded)
    except SpecError as error:
        raise SpecError(f"{what}: {error}") from error
    if isinstance(now, Tensor) and isinstance(value, Tensor):
        fits = now.shape == value.shape
    else:
        # a rate may be a number here and a tensor in the file, or the other way round
        number = isinstance(now, Tensor) or type(now) in (int, float)
        fits = not number or isinstance(value, Tensor) or type(value) in (int, float)
    if not fits:
        raise SpecError(f"{what}: expected a value like {now!r:.60}, the saved one is {value!r:.60}")
