"""Gradual global magnitude pruning: schedule, an exact top-k over all ranks, and layers that stay pruned.

Shape legend: N parameters of the model, k of them kept, P ranks. The schedule is Zhu and Gupta's (2017; DynMo, Eq. 3).
The papers gather every rank's k largest magnitudes on rank 0, which is P k values on one rank; here all ranks find the
threshold together, by counting in the bits of the magnitude, and nothing but counts travels. Ties at the threshold go
to the lower rank and the lower position, so exactly k are kept, on any number of ranks the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import prune

from pipeline_balance.dynamics.csr import Pattern, product
from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.spec import digest

_DIGIT_BITS = 8
_BUCKETS = 1 << _DIGIT_BITS
# Fewer values are not stored sparse: one could not be distinguished from numbers that optimizers keep
_FEWEST = 2
# torch has sparse products in these
_TYPES = (torch.float32, torch.float64)
# They take a weight for a matrix, or all weights for one vector. By name, as not every torch has both
_BY_MATRIX = ("LBFGS", "Muon")

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None
"""An optimizer or several; None where nobody has said which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PruningSchedule:
    """Sparsity by step, a cubic curve (Zhu and Gupta 2017; DynMo, Eq. 3).

    Attributes:
        initial: Sparsity before `first_step`.
        final: Sparsity after the last pruning.
        first_step: When pruning begins.
        prunings: How many prunings follow.
        every_steps: Steps from one to the next.
    """

    initial: float = 0.0
    final: float = 0.9
    first_step: int = 0
    prunings: int = 10
    every_steps: int = 100

    def __post_init__(self) -> None:
        if not 0.0 <= self.initial <= self.final < 1.0:
            raise SpecError(f"need 0 <= initial <= final < 1, got {self.initial} and {self.final}")
        if self.prunings < 1 or self.every_steps < 1 or self.first_step < 0:
            raise SpecError("prunings and every_steps must be at least 1, first_step not negative")

    def due(self, step: int) -> bool:
        """Whether the model is pruned at this step."""
        since = step - self.first_step
        return since >= 0 and since % self.every_steps == 0 and since <= self.prunings * self.every_steps

    def sparsity(self, step: int) -> float:
        """Return the share of parameters that is zero from this step on; constant between prunings and after the
        last.
        """
        since = min(max(step - self.first_step, 0) // self.every_steps, self.prunings)
        if step < self.first_step:
            return self.initial
        return self.final + (self.initial - self.final) * (1.0 - since / self.prunings) ** 3


def _magnitude_bits(values: Tensor) -> Tensor:
    """Integers [n] ordered as the magnitudes of float32 values; not-a-number counts as the largest."""
    # without the sign, bits of IEEE floats are ordered as their magnitudes
    bits: Tensor = values.detach().float().reshape(-1).contiguous().view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    return bits


def global_top_k(values: Tensor, keep: int, collective: Collective) -> Tensor:
    """Find which of this rank's values are among the largest in magnitude of all ranks; exact, collective.

    Four all-gathers of 256 counts and two of a single count. Ties go to the lower rank, then the lower position.

    Args:
        values: This rank's part, of any length and shape, none at all included.
        keep: k, how many of all ranks' values to keep.
        collective: Over all ranks.

    Returns:
        A mask in the shape of `values`.

    Raises:
        SpecError: `keep` exceeds what there is.
    """
    bits = _magnitude_bits(values)
    op = Operation("global top-k")
    total = int(collective.all_gather(torch.tensor([bits.numel()]), op=op).sum())
    if not 0 <= keep <= total:
        raise SpecError(f"cannot keep {keep} of {total} values")
    if keep == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    # Radix select from the top digit down: `wanted` counts what is still to be kept among values that share `prefix`.
    prefix, wanted = 0, keep
    candidates = bits
    for shift in range(32 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        digits = (candidates >> shift) & (_BUCKETS - 1)
        counts = collective.all_gather(torch.bincount(digits, minlength=_BUCKETS).cpu(), op=op).sum(dim=0)
        # values with this digit or a larger one
        above = counts.flip(0).cumsum(0).flip(0)
        digit = int((above >= wanted).nonzero().max())
        wanted -= int(above[digit] - counts[digit])
        prefix |= digit << shift
        candidates = candidates[digits == digit]
    # All that is left equals the threshold; `wanted` of them are kept, lower ranks first.
    ties = collective.all_gather(torch.tensor([candidates.numel()]), op=op).reshape(-1).tolist()
    mine = min(max(wanted - sum(ties[: collective.rank]), 0), ties[collective.rank])
    mask = bits > prefix
    mask[(bits == prefix).nonzero().reshape(-1)[:mine]] = True
    return mask.view(values.shape)


class PrunedLinear(nn.Linear):
    """A linear layer some of whose weights are zero for good.

    Its weights have one of two forms. In the dense one they are [O, I], and what was pruned is masked in every forward
    pass. In the sparse one the same parameter has the K values that are left, row by row: so have its gradient and what
    optimizers keep for it, and products are sparse. `prune` and `store_sparse` go from the first to the second. A
    weight that other modules share stays dense, as does one with fewer than two values left; of that products are
    sparse all the same. The buffer `mask` has the places of the weights in the form that they
    have, so that both travel together. The `state_dict` of an optimizer that `prune` was told of says which places its
    values are of, and it loads no state of others.

    A `state_dict` is that of the dense form always. In the sparse form it is a copy: what is written into it does not
    reach the layer, and `keep_vars=True` is refused. Loading keeps the form. A layer that is
    stored sparse takes a `state_dict` with its own mask alone, and raises `SpecError` for any other.

    Args:
        in_features: I.
        out_features: O.
        bias: Whether there is a bias.
        sparse_below: Once the share of weights left is at most this, they are stored sparse. Leave it at 0 where dense
            products are faster. Other types than float32 and float64 stay dense.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, sparse_below: float = 0.0) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.sparse_below = sparse_below
        # past `register_buffer`, which takes the property for another attribute
        self._buffers["mask"] = torch.ones_like(self.weight, dtype=torch.bool)
        self._known: tuple[Tensor, Pattern] | None = None
        # a mask of the dense form, its version, and where the weights are if hardly one is left
        self._counted: tuple[Tensor, int, Pattern | None] | None = None
        # whether other modules have the weight, too; whoever sees them all says so, see `note_shared`. None: nobody has
        self.shared: bool | None = None

    @property
    def mask(self) -> Tensor:
        """Which weights are left, [O, I]. Set it in the dense form only; `prune` serves both."""
        return self.dense_state("mask", self._places)

    @property
    def stored_sparse(self) -> bool:
        """Whether the parameter `weight` has the values that are left, [K]."""
        return self.weight.dim() == 1

    @property
    def kept(self) -> float:
        """Share of weights that is left."""
        left = self.weight.numel() if self.stored_sparse else int(self.mask.sum())
        return left / max(self.in_features * self.out_features, 1)

    @property
    def _places(self) -> Tensor:
        found = self._buffers["mask"]
        assert found is not None
        return found

    def _pattern(self) -> Pattern:
        """Where the values of the sparse form are."""
        places = self._places
        if places.dim() != 1:
            raise SpecError(
                "weights are stored sparse: change their mask by prune(mask, optimizers), and share them with no module"
            )
        # kept, as the transpose is derived from it; a layer that moved has another tensor
        if self._known is None or self._known[0] is not places:
            self._known = places, Pattern.unpack(places, (self.out_features, self.in_features))
        return self._known[1]

    @torch.no_grad()
    def prune(self, mask: Tensor, optimizers: Optimizers = None) -> None:
        """Keep only where `mask` says so; what was pruned before stays pruned. Between updates.

        Args:
            mask: [O, I], bool.
            optimizers: All that keep state for the weights, `()` for none. What they keep is pruned as well where the
                layer is stored sparse, before or afterwards; in the dense form it stays as it is.

        Raises:
            SpecError: `mask` is no mask of this layer, or inference mode is on. Or the layer is or would be stored
                sparse, and `optimizers` is None or keeps what cannot be, or nobody has said whether another module
                has the weight, see `note_shared`. Nothing has changed then.
        """
        if torch.is_inference_mode_enabled():
            raise SpecError("tensors of inference mode cannot be trained: prune outside of it")
        self._check_mask(mask)
        if self.shared and self.stored_sparse:
            raise SpecError("another module has a weight that is stored sparse: untie it")
        if not self.stored_sparse:
            kept = self.mask & mask
            if self._goes_sparse(kept):
                if self.shared is None:
                    raise SpecError(
                        "weights are to be stored sparse, and nobody has said whether another module has them, which "
                        "would find a row of values: call note_shared([model]), or set layer.shared"
                    )
                pattern = Pattern.of(kept)
                self._exchange(pattern.pick, pattern.packed(), optimizers)
                return
            _check_dense(self.weight, int(kept.sum()), _listed(optimizers) or ())
            self._buffers["mask"] = kept
            self.weight.mul_(kept)
            if self.weight.grad is not None:
                # a norm counts no gradient of what is gone
                self._regrad(self.weight.grad.masked_fill(~kept, 0))
            return
        pattern = self._pattern()
        left = pattern.pick(mask)
        if left.all():
            return
        fewer = pattern.only(left)
        if len(fewer.columns) >= _FEWEST:
            self._exchange(lambda values: values[left], fewer.packed(), optimizers)
        else:
            self._exchange(lambda values: fewer.dense(values[left]), fewer.mask(), optimizers)

    def _check_mask(self, mask: Tensor) -> None:
        whole = (self.out_features, self.in_features)
        if mask.dtype != torch.bool or mask.shape != whole:
            found = f"{mask.dtype} of {list(mask.shape)}"
            raise SpecError(f"a mask of this layer is torch.bool of {list(whole)}, got {found}")

    def _goes_sparse(self, mask: Tensor) -> bool:
        few = _FEWEST <= int(mask.sum()) <= self.sparse_below * mask.numel()
        # a weight that is computed anew, as under torch's parametrizations, has nothing to exchange
        own = not self.shared and "weight" in self._parameters
        return few and own and self.weight.dtype in _TYPES

    def _exchange(self, change: Callable[[Tensor], Tensor], places: Tensor, optimizers: Optimizers) -> None:
        """Go to another form or to fewer values.

        Args:
            change: Makes of a tensor of the form in force one of the form to go to.
            places: What `mask` has there.
            optimizers: All that keep state for them.
        """
        weight, before = self.weight, self.weight.shape
        listed = _listed(optimizers)
        if listed is None:
            raise SpecError("weights stored sparse take what optimizers keep along: pass optimizers=, () for none")
        found: list[tuple[dict[str, Any], str, Tensor]] = []
        for optimizer in listed:
            kind = type(optimizer).__name__
            if kind in _BY_MATRIX and any(p is weight for g in optimizer.param_groups for p in g["params"]):
                raise SpecError(f"{kind} cannot train weights that are stored sparse: set sparse_below=0")
            entries = optimizer.state.get(weight, {})
            # loaded by an optimizer that nobody had named until now
            self._check_places(entries.get(_PLACES), kind)
            for name, value in entries.items():
                if not isinstance(value, Tensor) or value.numel() == 1:
                    continue
                if value.shape != before:
                    raise SpecError(
                        f"{kind} keeps {name!r} of {list(value.shape)} for weights of {list(before)}, which cannot be "
                        f"stored sparse: {_ORDER if value.dim() == 1 else 'set sparse_below=0'}"
                    )
                found.append((entries, name, change(value)))
        values, grad = change(weight.detach()), weight.grad
        weight.grad = None
        if weight.requires_grad:
            get_gradient_edge(weight).node.register_prehook(_pruned_meanwhile)
        # Of another type first: then torch makes another node that accumulates gradients. The old one is for the old
        # shape, and lives as long as a loss of the last step does.
        weight.data = torch.empty(0, dtype=torch.float16, device=weight.device)
        # the same object: optimizers' groups, hooks and modules go on referring to it
        weight.data = values
        if grad is not None:
            self._regrad(change(grad))
        for entries, name, value in found:
            entries[name] = value
        self._buffers["mask"] = places
        for optimizer in listed:
            optimizer.state.get(weight, {}).pop(_PLACES, None)
            _watch(optimizer, self)

    def places_digest(self) -> int | None:
        """Stand for the places of the weights that are left, in comparisons; None in the dense form."""
        return digest(self._places.cpu().numpy()) if self.stored_sparse and not self._places.is_meta else None

    def _check_places(self, saved: Any, kind: str) -> None:
        """Raise `SpecError` if an optimizer's state says that it is of other places than those of the weights."""
        if saved is not None and saved != self.places_digest():
            raise SpecError(
                f"the state of {kind} is of weights in other places than those that this layer has left: load the "
                f"layer that it was saved with; {_ORDER}"
            )

    def _regrad(self, grad: Tensor) -> None:
        """Have another gradient, and tell that pruning has made it and nobody has changed it since."""
        self.weight.grad = grad
        vars(grad)["pruned"] = grad._version

    def dense_state(self, name: str, tensor: Tensor) -> Tensor:
        """What the dense form has for a tensor of this layer, or one kept for a parameter; `meta` stays `meta`.

        Args:
            name: Of the parameter or buffer.
            tensor: The tensor, which is returned as it is where both forms have the same.
        """
        own = {"weight": self.weight, "mask": self._places}.get(name)
        if not self.stored_sparse or own is None or tensor.shape != own.shape:
            return tensor
        if tensor.is_meta:
            dtype = torch.bool if name == "mask" else tensor.dtype
            return torch.empty((self.out_features, self.in_features), dtype=dtype, device="meta")
        return self._pattern().mask() if name == "mask" else self._pattern().dense(tensor)

    def forward(self, x: Tensor) -> Tensor:
        if not self.stored_sparse:
            few = self._of_next_to_nothing() if x.dtype == self.weight.dtype else None
            if few is not None:
                return self._multiplied(x, self.weight.reshape(-1)[few.places()], few)
            # masked here too: an optimizer with momentum would move a pruned weight away from zero
            return nn.functional.linear(x, self.weight * self.mask, self.bias)
        if self.weight.dtype not in _TYPES:
            raise SpecError(
                f"weights stored sparse are float32 or float64, not {self.weight.dtype}: set sparse_below=0"
            )
        if x.shape[-1] != self.in_features:
            raise SpecError(f"the layer takes {self.in_features} features, got an input of {list(x.shape)}")
        # torch has sparse products in the types of the weights alone
        with torch.autocast(x.device.type, enabled=False):
            return self._multiplied(x, self.weight, self._pattern())

    def _multiplied(self, x: Tensor, values: Tensor, pattern: Pattern) -> Tensor:
        flat = product(x.reshape(-1, self.in_features).to(values.dtype), values, pattern)
        out = flat.view(*x.shape[:-1], self.out_features)
        return out + self.bias if self.bias is not None else out

    def _of_next_to_nothing(self) -> Pattern | None:
        """Where weights are that are too few to be stored sparse; None if there are more.

        Global pruning empties whole layers. As products of zeros these would take as long as before.
        """
        mask = self._places
        # a fake one, by which a pipeline finds shapes, cannot be counted
        if type(mask) is not Tensor or mask.is_meta or mask.is_inference():
            return None
        if not self.sparse_below or self.weight.dtype not in _TYPES:
            return None
        if torch.is_autocast_enabled(mask.device.type):
            # a dense product would be of another type
            return None
        if self._counted is None or self._counted[0] is not mask or self._counted[1] != mask._version:
            few = int(mask.sum()) < _FEWEST
            self._counted = mask, mask._version, Pattern.of(mask) if few else None
        return self._counted[2]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if keep_vars and self.stored_sparse:
            raise SpecError(f"{prefix}weight is stored sparse, so keep_vars=True has no dense parameter to return")
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("weight", "mask"):
            destination[prefix + name] = self.dense_state(name, destination[prefix + name])

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        if self.stored_sparse:
            state_dict = self._gathered(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _gathered(self, state_dict: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """What a `state_dict` has for this layer, in the sparse form."""
        found = {name: value for name, value in state_dict.items() if name.startswith(prefix)}
        pattern = self._pattern()
        mask, weight = (found.get(f"{prefix}{name}") for name in ("mask", "weight"))
        if mask is not None:
            self._check_mask(mask)
            if not torch.equal(mask.to(pattern.columns.device), pattern.mask()):
                raise SpecError(
                    f"{prefix}mask differs from that of the layer, which is stored sparse: load into a new layer, call "
                    "store_sparse, and load a new optimizer after that"
                )
            found[f"{prefix}mask"] = self._places
        if weight is not None:
            if weight.shape != pattern.shape:
                raise SpecError(f"{prefix}weight is {list(weight.shape)}, and that of the layer {list(pattern.shape)}")
            found[f"{prefix}weight"] = pattern.pick(weight.detach().to(pattern.columns.device))
        return found


# In an optimizer's state, beside its tensors; a plain number, as torch would round a tensor to the weight's type
_PLACES = "places_digest"
_ORDER = "after loading the layer call store_sparse first, then load the optimizer"


def _listed(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...] | None:
    """All of them; a generator could be read once only."""
    if optimizers is None:
        return None
    return (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)


def _check_dense(weight: Tensor, kept: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise `SpecError` if one keeps what is of the sparse form for weights that are dense and stay so.

    Torch's fused updates would read and write elsewhere in memory.
    """
    for optimizer in optimizers:
        for name, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == kept > 1:
                raise SpecError(
                    f"{type(optimizer).__name__} keeps {name!r} of weights stored sparse, {list(value.shape)}, for "
                    f"dense ones of {list(weight.shape)}: {_ORDER}"
                )


class _Watch:
    """Has an optimizer's `state_dict` say where its values are, and refuses one that is of other places.

    K values in a row do not say so themselves: those of another pattern would be taken for this one's.

    Attributes:
        layers: Those whose weights it may keep state for.
    """

    def __init__(self) -> None:
        self.layers: WeakSet[PrunedLinear] = WeakSet()

    def _entries(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> Iterator[tuple[PrunedLinear, Any, Mapping[str, Any]]]:
        """Each layer with the key of its weight in a `state_dict`, and what is there."""
        layers = {id(layer.weight): layer for layer in self.layers if "weight" in layer._parameters}
        # torch pairs them by their order over all groups; where the numbers differ it says so itself
        mine = (p for group in optimizer.param_groups for p in group["params"])
        keys = (key for group in state["param_groups"] for key in group["params"])
        for parameter, key in zip(mine, keys, strict=False):
            if id(parameter) in layers and state["state"].get(key):
                yield layers[id(parameter)], key, state["state"][key]

    def saved(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Add the places. What the optimizer itself keeps is not touched."""
        found = {
            key: {**entries, _PLACES: layer.places_digest()}
            for layer, key, entries in self._entries(optimizer, state)
            if layer.stored_sparse
        }
        return {**state, "state": {**state["state"], **found}}

    def loaded(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Compare the places and take them out again; raises `SpecError`, with nothing changed, where they differ."""
        found: dict[Any, Any] = {}
        for layer, key, entries in self._entries(optimizer, state):
            layer._check_places(entries.get(_PLACES), type(optimizer).__name__)
            found[key] = {name: value for name, value in entries.items() if name != _PLACES}
        return {**state, "state": {**state["state"], **found}}


_watches: WeakKeyDictionary[torch.optim.Optimizer, _Watch] = WeakKeyDictionary()


def _watch(optimizer: torch.optim.Optimizer, layer: PrunedLinear) -> None:
    """From now on have an optimizer say, and compare, where the layer's weights are."""
    if optimizer not in _watches:
        watch = _watches[optimizer] = _Watch()
        # what only looks like an optimizer of torch may have no hooks
        with suppress(AttributeError):
            optimizer.register_state_dict_post_hook(watch.saved)
            optimizer.register_load_state_dict_pre_hook(watch.loaded)
    _watches[optimizer].layers.add(layer)


def _pruned_meanwhile(grads: tuple[Tensor | None, ...]) -> None:
    raise SpecError("a layer was pruned between its forward and its backward pass: prune between updates")


def store_sparse(layers: Iterable[nn.Module], optimizers: Optimizers) -> None:
    """Store every `PrunedLinear` sparse that has few enough weights left, as after loading a checkpoint.

    Args:
        layers: Modules that have them.
        optimizers: All that keep state for their weights, `()` for none.

    Raises:
        SpecError: An optimizer keeps what cannot be stored sparse, such as Adafactor's sums over rows and columns, or
            what is stored sparse already: load it after this. Or inference mode is on.
    """
    layers, listed = list(layers), _listed(optimizers)
    note_shared(layers)
    for module in pruned_modules(layers):
        if not module.stored_sparse:
            module.prune(module.mask, listed)


def note_shared(layers: Iterable[nn.Module]) -> None:
    """Tell every `PrunedLinear` whether another of these modules has its weight, which stays dense then.

    `prune_globally`, `store_sparse` and a pipeline do so themselves; before `prune` of a single layer call it.
    """
    holders = Counter(id(p) for m in nn.ModuleList(layers).modules() for p in m._parameters.values() if p is not None)
    for module in pruned_modules(layers):
        weight = module._parameters.get("weight")
        module.shared = bool(module.shared) or (weight is not None and holders[id(weight)] > 1)


def pruned_modules(layers: Iterable[nn.Module]) -> list[PrunedLinear]:
    """All `PrunedLinear` in these modules."""
    return [m for layer in layers for m in layer.modules() if isinstance(m, PrunedLinear)]


def prune_globally(
    layers: Sequence[nn.Module], sparsity: float, collective: Collective, optimizers: Optimizers = None
) -> float:
    """Prune all `PrunedLinear` weights of all ranks by magnitude over the whole model; collective, between updates.

    Weights pruned earlier are zero and lose every tie, so none comes back.

    Args:
        layers: This rank's layers.
        sparsity: The share of all weights that is zero afterwards.
        collective: Over all ranks.
        optimizers: All that keep state for the weights, such as `pipe.optimizer`; `()` for none. Layers with
            `sparse_below` need it.

    Returns:
        The share of this rank's weights that is left (1.0 where it has none).

    Raises:
        SpecError: `sparsity` is no share. On all ranks: `optimizers` is missing on one, or a layer could not be stored
            sparse; the others are pruned then.
    """
    if not 0.0 <= sparsity < 1.0:
        raise SpecError(f"sparsity must be from 0 to below 1, got {sparsity!r}")
    op, modules, optimizers = Operation("pruning"), pruned_modules(layers), _listed(optimizers)
    note_shared(layers)
    # a rank without such weights takes part, too
    device = next((m.weight.device for m in modules), torch.device("cpu"))
    # masked: an optimizer with momentum may have moved a pruned weight away from zero
    flat = torch.cat(
        [(m.dense_state("weight", m.weight.detach()) * m.mask).reshape(-1) for m in modules]
        or [torch.zeros(0, device=device)]
    )
    lacks = optimizers is None and any(m.sparse_below > 0 for m in modules)
    every = collective.all_gather(torch.tensor([flat.numel(), int(lacks)]), op=op).sum(dim=0).tolist()
    if every[1]:
        raise SpecError("layers with sparse_below are stored sparse: pass optimizers=, () where none keeps state")
    mask = global_top_k(flat, round(every[0] * (1.0 - sparsity)), collective)
    failed: SpecError | None = None
    for module, part in zip(modules, mask.split([m.mask.numel() for m in modules]), strict=True):
        try:
            module.prune(part.view(module.out_features, module.in_features), optimizers)
        except SpecError as error:
            failed = failed or error
    # raised by one rank alone it would leave the others waiting
    if bool(collective.all_gather(torch.tensor([int(failed is not None)]), op=op).any()):
        raise failed or SpecError("another rank could not store its pruned layers sparse")
    return float(mask.float().mean()) if mask.numel() else 1.0


@torch.no_grad()
def global_unstructured(parameters: Sequence[tuple[nn.Module, str]], amount: float, collective: Collective) -> None:
    """Prune by magnitude as `torch.nn.utils.prune.global_unstructured` does, over all ranks of a pipeline; collective.

    The masks are those of torch: a parameter is split into `weight_orig` and `weight_mask`, and `prune.remove` makes
    it permanent. Call it on every rank with the same parameters of the whole model, between two steps.

    Args:
        parameters: Modules, each with the name of one of its parameters. What other ranks run is on `meta`.
        amount: The share of the weights left so far that is pruned.
        collective: Over the ranks of the pipeline.

    Raises:
        SpecError: `amount` is no share.
    """
    if not 0.0 <= amount <= 1.0:
        raise SpecError(f"amount must be from 0 to 1, got {amount!r}")
    here = [(m, n) for m, n in parameters if not _values(m, n).is_meta]
    # what was pruned before neither counts nor comes back
    left = [getattr(m, f"{n}_mask", torch.ones_like(_values(m, n))) != 0 for m, n in here]
    device = next((mask.device for mask in left), torch.device("cpu"))
    flat = torch.cat(
        [_values(m, n)[mask] for (m, n), mask in zip(here, left, strict=True)] or [torch.zeros(0, device=device)]
    )
    total = int(collective.all_gather(torch.tensor([flat.numel()]), op=Operation("pruning")).sum())
    kept = iter(global_top_k(flat, total - round(amount * total), collective).split([int(m.sum()) for m in left]))
    masks = iter(left)
    for module, name in parameters:
        values = _values(module, name)
        mask = torch.ones_like(values)
        if not values.is_meta:
            mask[next(masks)] = next(kept).to(mask.dtype)
        # on `meta` too: all ranks have the same parameters and buffers
        prune.custom_from_mask(module, name, mask)


def _values(module: nn.Module, name: str) -> Tensor:
    """A parameter, without the mask that it may have."""
    found: Tensor = getattr(module, f"{name}_orig", None)  # type: ignore[assignment]
    return (found if found is not None else getattr(module, name)).detach()
