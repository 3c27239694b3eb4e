"""Parameters of converted models under their original names, in their original layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from prophet.convert.layers.routed import RoutedExperts, block_of
from prophet.errors import ConversionError, some
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import cut_like, roll_call


def original_state_dict(model: nn.Module, *, keep: bool = True, adapters_only: bool = False) -> dict[str, Tensor]:
    """The state dict that `model` would have had it never been converted; collective over the experts' homes.

    Experts are gathered one block at a time and moved to the CPU. So are parameters that `fully_shard` has cut, with
    which the call is collective over all processes.

    Args:
        model: Converted, in whole or in part.
        keep: False on ranks that only take part, which get an empty dictionary.
        adapters_only: Of the experts, only what PEFT has put on them.

    Raises:
        CollectiveTimeout: Where only some ranks call it: on rank 0 within five seconds, on others within five seconds
            of the next forward pass.
    """
    layers = _by_every_name(model)
    found: dict[str, Tensor] = {}
    gathered: dict[RoutedExperts, dict[str, Tensor]] = {}
    done: set[str] = set()
    state = model.state_dict()
    _everybody_is_here(layers.values(), state)
    before = names_before(layers)
    for key, value in state.items():
        name = next((n for n in layers if key.startswith(n + ".")), None)
        if name is None:
            # Only a DTensor has this method
            cut = hasattr(value, "full_tensor")
            # Collective, so ranks that keep nothing call it, too
            whole = value.full_tensor() if cut else value
            if keep:
                found[before.get(key, key)] = whole.cpu() if cut else whole
        elif name not in done:
            done.add(name)
            layer = layers[name]
            # A layer that several blocks share is gathered once, and stands under every name.
            if layer not in gathered:
                originals = layer.adapters() if adapters_only else layer.originals()
                gathered[layer] = {part: t.cpu() for part, t in originals.items()} if keep else {}
            found |= {f"{name}.{part}": t for part, t in gathered[layer].items()}
    return found


def _by_every_name(model: nn.Module) -> dict[str, RoutedExperts]:
    """The converted layers by name; one that several layers of the model share has several names in a state dict."""
    every = model.named_modules(remove_duplicate=False)
    return {name: layer for name, layer in every if isinstance(layer, RoutedExperts)}


def names_before(layers: Mapping[str, RoutedExperts]) -> dict[str, str]:
    """Map keys of a state dict that the conversion has renamed to the former ones; `layers` stand by name."""
    holders = {name.rpartition(".")[0]: layer.origin.renamed for name, layer in layers.items()}
    starts = {name: f"{name}." if name else "" for name in holders}
    return {starts[name] + now: starts[name] + then for name, own in holders.items() for now, then in own.items()}


def _everybody_is_here(layers: Iterable[RoutedExperts], state: Mapping[str, Any]) -> None:
    """Raise soon, and on this rank alone, where others do not take part; collective."""
    op = Operation("original_state_dict")
    groups = [layer.collective for layer in layers if layer.spread]
    # `fully_shard` may cut over more processes than share the experts.
    if any(hasattr(value, "full_tensor") for value in state.values()):
        roll_call(op)
    elif groups:
        groups[0].roll_call(op)


def load_original_state_dict(model: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Load a state dict of the unconverted model.

    Every rank reads all of it, and keeps its own experts and its parts of what `fully_shard` has cut.

    Args:
        model: Converted, in whole or in part.
        state: Under the original names, in the original layout.
        strict: Whether names must match, as for `load_state_dict`.

    Raises:
        ConversionError: Where an expert's parameters are missing or have another shape; nothing is changed then.
        RuntimeError: For other names, as `load_state_dict` does.
    """
    layers = _by_every_name(model)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, layer in layers.items():
        part = {k.removeprefix(f"{name}."): t for k, t in state.items() if k.startswith(f"{name}.")}
        wanted = dict(layer.origin.skeleton.named_parameters())
        missing = some(wanted.keys() - part.keys())
        if missing:
            raise ConversionError(f"{name}: {missing} are missing")
        # Of all blocks before any is changed
        for n, p in wanted.items():
            if part[n].shape != p.shape:
                raise ConversionError(f"{name}.{n}: expected a tensor {list(p.shape)}, got {list(part[n].shape)}")
        parts[name] = part
    for name, layer in layers.items():
        layer.take(parts[name])
    inside = tuple(f"{name}." for name in layers)
    before = names_before(layers)
    given = {k: t for k, t in state.items() if not k.startswith(inside)}
    rest: dict[str, Any] = {k: t for k, t in given.items() if k not in before.values()}
    for key, own in model.state_dict().items():
        name = before.get(key, key)
        if key.startswith(inside):
            # This rank's experts are loaded already; under strict their keys must be there all the same.
            rest[key] = own
        elif name in given:
            rest[key] = cut_like(given[name], own)
    model.load_state_dict(rest, strict=strict)


def put_back(model: nn.Module, name: str, layer: RoutedExperts) -> None:
    """Give the block around converted experts the module it had, with the values that `layer` has now; collective.

    Args:
        model: Changed in place.
        name: Of the layer in it.
        layer: The converted layer.
    """
    origin = layer.origin
    holder = block_of(model, name)
    experts = layer.module_of_originals().train(holder.training)
    setattr(holder, name.rpartition(".")[2], experts)
    # The methods were replaced by a subclass, so the class is all there is to undo.
    if origin.block_class is not None:
        block_of(model, name, origin.around).__class__ = origin.block_class
