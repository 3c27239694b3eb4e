"""Which unit holds which parameter and buffer, and how a tensor's place changes while its object stays.

Shape legend: L units. Every rank has one object per parameter for the whole run. Where a parameter lives elsewhere, it
is on `meta`: shape and type without memory.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model.layers import PipelineModel
from pipeline_balance.pipeline.model.vocabulary import mark, whole_shape
from prophet.errors import SpecError
from prophet.sharing import places_of

_READ_BYTES = 1 << 20
# by bytes of an element; longer elements are read as integers of four bytes
_INTEGERS = {1: torch.int8, 2: torch.int16}
# integers that are summed together
_ROW, _PART = 1 << 11, 1 << 22
# 2^64 by the golden ratio: its multiples lie far apart (Knuth's multiplicative hashing)
_FACTOR = -0x61C8864680B583EB
# In the names of what moves these stand between a parameter and what belongs to it
_SIGNS = "@#%"


def check_names(names: Iterable[str]) -> None:
    """Raise `SpecError` for a parameter or buffer in whose name moves would find something that belongs to it."""
    wrong = [name for name in names if any(sign in name for sign in _SIGNS)]
    if wrong:
        raise SpecError(
            f"{wrong[0]!r} cannot be moved: expected names of parameters and buffers without {', '.join(_SIGNS)}, "
            f"which stand between a parameter and its optimizer state; give its module another name"
        )


@dataclass(frozen=True, slots=True)
class HeldBuffer:
    """A buffer by its place, as modules replace their buffers.

    Attributes:
        module: The module that has it.
        name: Its name in that module.
        units: The units that hold the module.
    """

    module: nn.Module
    name: str
    units: tuple[int, ...]

    @property
    def tensor(self) -> Tensor:
        """The tensor that is there now."""
        found = self.module._buffers[self.name]
        assert found is not None
        return found


class Ownership:
    """Parameters and buffers of `model` by their names in the unsplit model, with the units that hold each.

    Reads the model anew in `read`, since adapters, masks and the like are put in while training goes on. A buffer that
    no unit holds is left out: it stays on every rank.

    A module may have its tensors in another form than checkpoints, such as sparse weights. What moves is the form that
    it has. It is asked for the form of checkpoints by `dense_state(name, tensor)`, a method of its class: name of a
    parameter or buffer of the module; tensor, that one or one kept for it; without values where that is on `meta`.
    Its attribute `shared` is set to whether a parameter of it has several places: such a one keeps the form of
    checkpoints, as ranks that hold it would not agree.
    """

    def __init__(self, model: PipelineModel) -> None:
        self.model = model
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, HeldBuffer] = {}
        self.units_of: dict[str, tuple[int, ...]] = {}
        self._dense: dict[str, Callable[[Tensor], Tensor]] = {}
        # names of what a vocabulary splits over all ranks
        self.split: frozenset[str] = frozenset()
        self._read: list[tuple[int, ...]] = []
        self._structure = 0
        self._split: dict[tuple[int, ...], tuple[list[str], list[str]]] = {}
        self._known: set[str] = set()
        self._trained: frozenset[str] | None = None
        self.read()

    def read(self) -> None:
        """Find parameters and buffers as they are now.

        It is called at every step, so it looks closer only where a module, parameter or buffer is another object.

        Raises:
            SpecError: No unit holds a parameter, so no rank would train it; or see `check_names`.
        """
        if self.model.vocabulary is not None:
            # what is changed about its modules may change no object below
            self.model.vocabulary.look(self.model.root)
        now = [
            (id(m), *map(id, m._parameters.values()), *map(id, m._buffers.values())) for m in self.model.root.modules()
        ]
        if now == self._read:
            return
        self.model.look()
        # names in a list of units begin with the number of the unit
        places = places_of(nn.ModuleList(self.model.units))
        holders = {held: dict.fromkeys(int(p.name.partition(".")[0]) for p in some) for held, some in places.items()}
        parameters: dict[str, nn.Parameter] = {}
        buffers: dict[str, HeldBuffer] = {}
        units_of: dict[str, tuple[int, ...]] = {}
        dense: dict[str, Callable[[Tensor], Tensor]] = {}
        seen: set[int] = set()
        vocabulary = self.model.vocabulary
        everywhere = {id(p) for p in vocabulary.parameters} if vocabulary is not None else set[int]()
        ends = {0, len(self.model.units) - 1}
        for path, module in self.model.root.named_modules():
            dot = f"{path}." if path else ""
            # of the class: a wrapper may give its module's attributes through
            if hasattr(type(module), "dense_state"):
                given: Any = module
                given.shared = any(len(places.get(id(p), ())) > 1 for p in module._parameters.values())
                names = (*module._parameters, *module._buffers)
                dense |= {f"{dot}{name}": partial(given.dense_state, name) for name in names}
            for attribute, parameter in module._parameters.items():
                # a tied parameter has the first of its names, as in `named_parameters`
                if parameter is None or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                name = f"{dot}{attribute}"
                if id(parameter) not in holders:
                    raise SpecError(f"parameter {name} belongs to no layer of the pipeline, so no rank would train it")
                if id(parameter) in everywhere and not ends.issuperset(holders[id(parameter)]):
                    raise SpecError(f"a layer holds {name}, too, of which split_vocabulary leaves it some rows")
                # every rank has some of the rows, whatever its units
                units = range(len(self.model.units)) if id(parameter) in everywhere else holders[id(parameter)]
                parameters[name], units_of[name] = parameter, tuple(units)
            for attribute, buffer in module._buffers.items():
                if buffer is not None and id(module) in holders:
                    buffers[f"{dot}{attribute}"] = HeldBuffer(module, attribute, tuple(holders[id(module)]))
        units_of |= {name: buffer.units for name, buffer in buffers.items()}
        check_names(units_of)
        self.parameters, self.buffers, self.units_of, self._dense = parameters, buffers, units_of, dense
        self.split = frozenset(name for name, p in parameters.items() if id(p) in everywhere)
        self._read, self._split, self._structure = now, {}, self._digest()

    def as_read(self) -> Ownership:
        """A copy of what is known now, for another thread: neither `read` nor a change of what trains reaches it."""
        found = copy.copy(self)
        found._trained = frozenset(self.trained())
        return found

    def dense_state(self, name: str, tensor: Tensor) -> Tensor:
        """What checkpoints have for the parameter or buffer of this name, or for what is kept for it.

        Args:
            name: Its name.
            tensor: What this rank has; returned as it is where checkpoints have the same.
        """
        return self._dense[name](tensor) if name in self._dense else tensor

    def whole(self, name: str) -> Tensor:
        """A parameter or buffer with the shape and type that it has in checkpoints, the same on all ranks."""
        tensor = self.buffers[name].tensor if name in self.buffers else self.parameters[name].detach()
        if name in self.split:
            # all ranks' rows, which nobody has
            return torch.empty(whole_shape(self.parameters[name]), dtype=tensor.dtype, device="meta")
        if name not in self._dense or hasattr(tensor, "to_local"):
            # no shard has another form
            return tensor
        # without values, which would have to be made
        return self.dense_state(name, tensor.to("meta"))

    def trained(self) -> frozenset[str]:
        """Names of the parameters that train."""
        if self._trained is not None:
            return self._trained
        return frozenset(n for n, p in self.parameters.items() if p.requires_grad)

    def become(self, other: Ownership) -> None:
        """Take over `other`, whose model has tensors of the same names. Cannot fail."""
        # what `fresh` has returned already is a matter of this run, not of the model that runs the units
        known = self._known
        self.__dict__.update(other.__dict__)
        self._known = known

    def of(self, units: Collection[int]) -> list[str]:
        """Names of the parameters that any of `units` holds, in the model's order."""
        return [n for n in self._names(units)[0] if n in self.parameters]

    def tensors(self, units: Collection[int], names: Collection[str]) -> list[Tensor]:
        """Parameters and buffers of these `names` that any of `units` holds."""
        buffers = [b.tensor for n, b in self.buffers.items() if n in names and not set(b.units).isdisjoint(units)]
        return [*(self.parameters[n] for n in self.of(units) if n in names), *buffers]

    def fresh(self) -> set[str]:
        """Names that were not there at the last call."""
        found = set(self.units_of) - self._known
        self._known = set(self.units_of)
        return found

    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters and buffers that several units hold, with those units."""
        return {n: units for n, units in self.units_of.items() if len(units) > 1 and n not in self.split}

    def cut(self) -> dict[str, int]:
        """Parameters of which every rank has some rows, with the rows of all ranks."""
        return {n: whole_shape(self.parameters[n])[0] for n in self.parameters if n in self.split}

    def split_over(self, rank: int, ranks: int) -> None:
        """Keep this rank's rows of what a vocabulary splits.

        Args:
            rank: The pipeline rank.
            ranks: P.
        """
        if self.model.vocabulary is None:
            return
        for parameter, rows in self.model.vocabulary.rows_on(rank, ranks):
            # a view would keep the memory of all rows
            own = parameter.detach()[rows.start : rows.stop].clone()
            put(parameter, nn.Parameter(own, requires_grad=parameter.requires_grad))
            mark(parameter, rows)

    def structure(self) -> int:
        """A digest of all names with their shapes and types, equal on ranks that built the same model."""
        return self._structure

    def _digest(self) -> int:
        # a module on `meta` does not know in which form its tensors are on the rank that runs it
        shapes = {name: list(self.whole(name).shape) for name in self.parameters}
        lines = [f"{n} {shapes[n]} {p.dtype} {self.units_of[n]}" for n, p in self.parameters.items()]
        lines += [f"{n} {b.units}" for n, b in self.buffers.items()]
        return number_of("\n".join(lines))

    def trainable(self) -> int:
        """A digest of which parameters train."""
        return number_of("".join("10"[not p.requires_grad] for p in self.parameters.values()))

    def _names(self, units: Collection[int]) -> tuple[list[str], list[str]]:
        """All names, of what `units` hold and of the rest."""
        # asked at every step with the same units, so both lists are kept until `read` finds a change
        key = tuple(units)
        if key not in self._split:
            mine = set(units)
            here = [n for n in self.units_of if not mine.isdisjoint(self.units_of[n])]
            self._split[key] = here, [n for n in self.units_of if mine.isdisjoint(self.units_of[n])]
        return self._split[key]

    def keep_only(self, units: Collection[int]) -> None:
        """Leave on this rank what `units` hold; everything else goes to `meta`, without its gradient."""
        for name in self._names(units)[1]:
            if name in self.buffers:
                buffer = self.buffers[name]
                if not buffer.tensor.is_meta:
                    # buffers are found by their place in a module, so another tensor may stand there
                    buffer.module._buffers[buffer.name] = buffer.tensor.to("meta")
            elif not self.parameters[name].is_meta:
                put(self.parameters[name], like_meta(self.parameters[name]))

    def to_device(self, device: torch.device) -> None:
        """Take what lives on this rank to `device`; what is on `meta` stays there."""
        for parameter in self.parameters.values():
            if not parameter.is_meta and parameter.device.type != device.type:
                put(parameter, nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad))
        for module in self.model.root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device.type != device.type:
                    module._buffers[name] = buffer.to(device)

    def settle(self, units: Collection[int], device: torch.device, rank: int) -> None:
        """Have what `units` hold on `device` and the rest on `meta`.

        Args:
            units: The units that run on this rank.
            device: Where they compute.
            rank: This rank, for the error.

        Raises:
            SpecError: Something that `units` hold has no memory here.
        """
        self.keep_only(units)
        self.to_device(device)
        missing = self.missing(units)
        if missing:
            raise SpecError(f"{missing[0]} has no memory on rank {rank}, which trains it: load_pretrained comes first")

    def missing(self, units: Collection[int]) -> list[str]:
        """What `units` need here and is still on `meta`."""
        mine = self._names(units)[0]
        return [n for n in mine if (self.buffers[n].tensor if n in self.buffers else self.parameters[n]).is_meta]


def number_of(text: str) -> int:
    """Digest a text to 62 bits, for comparing over ranks."""
    # 62 bits fit a signed integer of 64, as which it travels
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def digest_of(entries: Iterable[tuple[str, Any]]) -> int:
    """Digest named values into a number that is equal for the same bits, in any order of the entries."""
    found = 0
    for name, value in sorted(entries, key=lambda entry: str(entry[0])):
        for part in _bytes_of(value):
            found = zlib.crc32(part, zlib.crc32(str(name).encode(), found))
    return found


def sum_of_bits(tensors: Iterable[Tensor]) -> Tensor | None:
    """Digest tensors into a number that is equal for the same bits, on the tensors' device; None without any.

    Elements are integers, each times its place, and summed modulo 2^64. It is cheaper than `digest_of`.
    """
    found: Tensor | None = None
    for tensor in tensors:
        bits = local(tensor).detach().reshape(-1).contiguous().view(_INTEGERS.get(tensor.element_size(), torch.int32))
        for part in bits.split(_PART):
            # whole rows are summed without a tensor of products, the rest is less than a row
            whole = part.numel() // _ROW * _ROW
            for some in filter(len, (part[:whole], part[whole:])):
                found = _by_place(some) if found is None else found * _FACTOR + _by_place(some)
    return found


def _by_place(integers: Tensor) -> Tensor:
    """Their sum, each times its place (1, 2, ...); of whole rows by the sums of rows and columns."""
    place = torch.arange(1, _ROW + 1, device=integers.device)
    if integers.numel() < _ROW:
        return (integers * place[: integers.numel()]).sum()
    # place of (row, column) is row * _ROW + column + 1, so two matrix sums do for all products
    rows = integers.to(torch.int64).view(-1, _ROW)
    above = torch.arange(len(rows), device=integers.device) * _ROW
    return (rows.sum(0) * place).sum() + (rows.sum(1) * above).sum()


def _bytes_of(value: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, Tensor):
        yield str((value.dtype, tuple(value.shape))).encode()
        flat = local(value).detach().contiguous().reshape(-1).view(torch.uint8)
        for part in flat.split(_READ_BYTES):
            # copied: memory that numpy has seen can never be given back
            yield part.to("cpu", copy=True).numpy().data
    else:
        yield repr(value).encode()


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor: of a `DTensor` its shard, which shares memory with it."""
    shard: Any = tensor
    if not hasattr(tensor, "to_local"):
        return tensor
    # with gradients on, it would join a graph, which takes ten times as long
    with torch.no_grad():
        found: Tensor = shard.to_local()
    return found


def like_meta(tensor: Tensor) -> nn.Parameter:
    """A parameter of the same shape, type and `requires_grad` without memory."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, requires_grad=tensor.requires_grad)


def check_free(named: Mapping[str, nn.Parameter]) -> None:
    """Raise `SpecError` for a parameter that an autograd graph holds: its backward would use the old one."""

    def held() -> str:
        every: dict[str, Any] = dict(named)
        return next((name for name, p in every.items() if p._use_count() > 1), "")

    if held():
        # graphs of tensor subclasses may live until the collector runs
        gc.collect()
    if name := held():
        raise SpecError(f"{name} is held by an autograd graph that is alive, such as a loss has: delete it first")


def try_put(parameter: nn.Parameter, content: nn.Parameter) -> None:
    """Raise RuntimeError if `put` would; nothing has changed afterwards. Weak references within torch forbid it."""
    # the cache has weak references to every parameter that it has cast
    torch.clear_autocast_cache()
    # the second swap undoes the first
    for _ in range(2):
        torch._C._swap_tensor_impl(parameter, content)


def put(parameter: nn.Parameter, content: nn.Parameter) -> None:
    """Give `parameter` the content of another: the same object, attributes and hooks, another tensor and gradient.

    What refers to it goes on referring to it: modules, optimizers' groups, weak references.
    """
    # `parameter.data = ...` does not reach from a device to `meta`, and `torch.utils.swap_tensors` takes attributes and
    # hooks away
    torch._C._swap_tensor_impl(parameter, content)
    take_hooks(parameter, parameter)


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Return what users have set on a parameter, and what is registered for it."""
    return {name: value for name, value in vars(parameter).items() if name != "_is_param"}


def take_hooks(parameter: nn.Parameter, of: nn.Parameter) -> None:
    """Give `parameter` the hooks of `of`: torch keeps them with a tensor's content, so they must be set again."""
    if of._backward_hooks is not None:
        parameter._backward_hooks = of._backward_hooks
    if of._post_accumulate_grad_hooks is not None:
        parameter._post_accumulate_grad_hooks = of._post_accumulate_grad_hooks
