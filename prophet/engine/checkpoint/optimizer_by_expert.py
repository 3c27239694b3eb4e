"""An optimizer's state expert by expert, whether a parameter holds one expert or all experts of a rank.

Shape legend: m experts per rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prophet.experts.bank import Bank, Entry
from prophet.layer.moe import MoE


@dataclass(frozen=True, slots=True)
class Share:
    """One expert's share of a parameter.

    Attributes:
        key: Its name in the model's state dict.
        pattern: That name with a star for the expert's number.
        entry: Its place in the parameter.
    """

    key: str
    pattern: str
    entry: Entry


def banks_of(model: nn.Module) -> Iterator[tuple[str, str, Bank]]:
    """Yield the banks of `model`, each with the prefixes of its keys in a state dict and its parameters' names."""
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            own = f"{name}." if name else ""
            yield module.keys_prefix(own), module.names_prefix(own), module.experts


def shares_of(model: nn.Module) -> dict[str, list[Share]]:
    """Return the shares of every parameter of experts, by the parameter's name."""
    found: dict[str, list[Share]] = {}
    for keys, names, bank in banks_of(model):
        for entry in bank.entries():
            share = Share(keys + entry.key, keys + entry.pattern, entry)
            found.setdefault(names + entry.parameter, []).append(share)
    return found


def split_state(name: str, p: Tensor, shares: Sequence[Share], state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Cut the state of a parameter into its experts'.

    Args:
        name: The parameter's name, for errors.
        p: The parameter.
        shares: Its shares.
        state: The optimizer's state of it, by field.

    Returns:
        State by the shares' keys: views of tensors that have one part per expert, all else as it is.

    Raises:
        ValueError: For a tensor that cannot be cut into experts.
    """
    return {s.key: {field: _cut(name, p, shares, s, field, value) for field, value in state.items()} for s in shares}


def _cut(name: str, p: Tensor, shares: Sequence[Share], share: Share, field: str, value: Any) -> Any:
    if is_number(value, p):
        return value
    index = share.entry.index
    # An empty index: the parameter holds one expert, so all of the value belongs to it
    if value.shape == p.shape or not index:
        return share.entry.of(value)
    # A value per expert, or with fewer dimensions, as factored second moments have
    if len(index) == 1 and isinstance(index[0], int) and value.shape[:1] == p.shape[:1]:
        return value[index[0]]
    raise ValueError(
        f"the optimizer's {field} of {name} has shape {list(value.shape)}, which cannot be cut into "
        f"{len({s.entry.expert for s in shares})} experts"
    )


def empty_state(
    name: str, p: Tensor, shares: Sequence[Share], saved: Mapping[str, Mapping[str, Any]], *, on_device: bool
) -> dict[str, Any]:
    """Make state of a parameter to read the experts' saved state into; tensors are zero.

    Args:
        name: The parameter's name, for errors.
        p: The parameter.
        shares: Its shares.
        saved: The saved state by the shares' keys; shapes and types count, not values.
        on_device: Whether numbers in tensors are kept beside the parameter.

    Raises:
        ValueError: Where experts differ in a field that stacked experts have in common, as their step.
    """
    first = saved.get(shares[0].key, {})
    state: dict[str, Any] = {}
    for field in sorted({field for s in shares for field in saved.get(s.key, {})}):
        values: list[Any] = [saved.get(s.key, {}).get(field) for s in shares]
        one: Any = first.get(field)
        alike = all(type(v) is type(one) for v in values)
        # Either every value has its expert's shape, or all have one shape, which need not be the parameter's
        if alike and isinstance(one, Tensor):
            own = [v.shape == s.entry.of(p).shape for v, s in zip(values, shares, strict=True)]
            alike = all(v.dtype == one.dtype for v in values) and (
                all(own) or all(v.shape == one.shape for v in values)
            )
        if not alike:
            lacking = [s.entry.expert for s, v in zip(shares, values, strict=True) if v is None]
            raise ValueError(
                f"the optimizer's {field} of {name} is not alike for all experts (expert {lacking[:1]} has none): "
                f"expected experts that have taken the same steps, or one module per expert"
            )
        if not isinstance(one, Tensor):
            state[field] = one
        elif one.dim() == 0 and p.dim() > 0:
            state[field] = torch.zeros((), dtype=one.dtype, device=p.device if on_device else "cpu")
        # Like the parameter: its memory format and its device, and cut as it is
        elif all(v.shape == s.entry.of(p).shape for v, s in zip(values, shares, strict=True)):
            state[field] = torch.zeros_like(p, dtype=one.dtype).detach()
        else:
            index = shares[0].entry.index
            shape = [p.shape[0], *one.shape] if index else list(one.shape)
            state[field] = torch.zeros(shape, dtype=one.dtype, device=p.device)
    return state


def is_number(value: Any, p: Tensor) -> bool:
    """Whether `value` is one number for all of the parameter `p`, in a tensor or not."""
    # A parameter without dimensions has state without dimensions that is no mere number
    return not isinstance(value, Tensor) or (value.dim() == 0 and p.dim() > 0)


@torch.no_grad()
def fill_numbers(
    name: str, p: Tensor, shares: Sequence[Share], saved: Mapping[str, Mapping[str, Any]], state: dict[str, Any]
) -> None:
    """Set the numbers in the state of a parameter from those of its experts.

    Args:
        name: The parameter's name, for errors.
        p: The parameter.
        shares: Its shares.
        saved: The experts' state by the shares' keys.
        state: The state that `empty_state` made; changed in place.

    Raises:
        ValueError: Where numbers differ between experts that are stacked.
    """
    for field, value in state.items():
        if not is_number(value, p):
            continue
        values = [saved[s.key][field] for s in shares]
        if not all(_same(v, values[0]) for v in values):
            raise ValueError(
                f"the optimizer's {field} of {name} is {sorted({float(v) for v in values})} for its experts: expected "
                f"experts that have taken the same steps, or one module per expert"
            )
        if isinstance(value, Tensor):
            value.copy_(values[0])
        else:
            state[field] = values[0]


@torch.no_grad()
def join_state(
    name: str, p: Tensor, shares: Sequence[Share], saved: Mapping[str, Mapping[str, Any]], *, on_device: bool
) -> dict[str, Any]:
    """Join the experts' state to that of the parameter, in new memory: the inverse of `split_state`.

    Args:
        name: The parameter's name, for errors.
        p: The parameter.
        shares: Its shares.
        saved: The experts' state by the shares' keys.
        on_device: Whether numbers in tensors are kept beside the parameter.

    Raises:
        ValueError: Where stacked experts differ in what they have in common.
    """
    state = empty_state(name, p, shares, saved, on_device=on_device)
    if state:
        fill_numbers(name, p, shares, saved, state)
    # The parts are views of `state`, which is filled through them
    for key, parts in split_state(name, p, shares, state).items():
        for field, part in parts.items():
            if not is_number(part, p):
                part.copy_(saved[key][field])
    return state


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a.cpu(), b.cpu())
    return bool(a == b)


def patterns(shares: Iterable[Share]) -> list[str]:
    """Return the patterns that stand for a parameter's shares of all experts, each once."""
    return list(dict.fromkeys(s.pattern for s in shares))
