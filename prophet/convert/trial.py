"""A block that is about to be converted, tried beforehand: a copy as written beside a copy as it will be.

Both have random parameters and buffers. They run on inputs of two shapes, on one that overloads an expert, in
evaluation and in training, from one random state, and everything must be equal: answers, gradients, attributes. Blocks
that will run twice have cheap functions in the place of their experts; what those compute is checked one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace as with_fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from prophet.convert.find import Found
from prophet.convert.layers.routed import with_rest
from prophet.convert.replace import replace
from prophet.convert.sources.listed import Listed
from prophet.convert.trials.discover import Listing
from prophet.convert.trials.module_copies import (
    ROUNDED,
    Rounding,
    device_of,
    differences,
    globals_of,
    scramble,
    state_of,
    twin_of,
)
from prophet.convert.trials.replay import Note, Passes, Tape, with_stand_ins
from prophet.convert.trials.verify import TOLERANCE
from prophet.errors import ConversionError, ReplayError
from prophet.ranks.threads import ThreadWorld
from prophet.trials import RandomState, evaluating, seed_all, trying

# Parameters of a block that is copied in float64: a larger one is copied in its own dtype.
MOST_PARAMETERS = 1 << 27
# What a module's code raises that cannot run in this way; other errors are not caught.
WRONG = (ReplayError, RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError)


def check_by_trying(model: nn.Module, found: Sequence[Found]) -> None:
    """Raise `ConversionError` unless every block would compute what it does now; nothing is changed.

    Blocks of an adapter that are alike in all that can be seen of them are tried once.
    """
    tried = set()
    for f in found:
        if isinstance(f.adapter, Listed):
            check_runs_twice(model, f.adapter.listing)
        # Built expert-parallel, a block's own forward needs the other ranks.
        elif f.spec.held == f.spec.num_experts:
            kind = _kind_of(f.known(model))
            if kind not in tried:
                tried.add(kind)
                _check_adapter(model, f)


def _kind_of(block: nn.Module) -> str:
    """A text that is equal for blocks alike: class, modules, and all settings that are numbers and texts."""
    settings = [
        f"{name}.{key}={value!r}"
        for name, m in block.named_modules()
        for key, value in sorted(vars(m).items())
        if isinstance(value, bool | int | float | str | None)
    ]
    return "\n".join([type(block).__qualname__, repr(block), *settings])


def _compare(
    want: Mapping[str, Any], got: Mapping[str, Any], limit: float, where: str, meaning: Callable[[str, str], str]
) -> None:
    found = next(differences(want, got, limit), None)
    if found is not None:
        raise ConversionError(f"{where}: {meaning(*found)}")


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


# --- blocks that will run twice ---


def check_runs_twice(model: nn.Module, listing: Listing) -> None:
    """Raise `ConversionError` unless the block around `listing` may run twice; nothing is changed."""
    device = device_of(model.get_submodule(listing.tried))
    limit = TOLERANCE.get(listing.dtype, TOLERANCE[torch.float32])
    with trying():
        once, twice = _Copy(model, listing, twice=False), _Copy(model, listing, twice=True)
        for training in (False, True):
            for at, x in enumerate(_inputs(listing.shapes, device, listing.dtype)):
                where = f"{listing.name}: tried in {_mode(training)} on {list(x.shape)}, the block around it"
                # Only read if the second run fails, to name what a pass changes
                before = once.attributes()
                try:
                    want = once.run(x, at, training)
                # Somebody else's block may raise anything
                except Exception as error:
                    raise ConversionError(f"{where} fails: {str(error).splitlines()[0]}") from error
                try:
                    got = twice.run(x, at, training)
                except WRONG as error:
                    changed = ", ".join(sorted({place for place, _ in differences(before, once.attributes(), 0.0)}))
                    also = f". A pass changes {changed}" if changed else ""
                    raise ConversionError(f"{where} fails when it runs twice: {error}{also}") from error
                _compare(want, got, limit, f"{where} does not run twice as it runs once", _meaning)


def _meaning(place: str, how: str) -> str:
    kind, _, name = place.partition(".")
    if kind == "state":
        return (
            f"{name}: {how}. A pass may not read what another has left behind, unless it is in a buffer "
            f"(register_buffer): buffers are put back"
        )
    if kind == "global":
        return f"{name}: {how}. A pass may not change what its file holds"
    return f"{place}: {how}"


def _inputs(shapes: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype) -> Iterator[Tensor]:
    """Random inputs of every shape, then one of the first shape with one token many times, which overloads experts."""
    for seed, shape in enumerate((*shapes, shapes[0])):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
        if seed == len(shapes):
            x = x.flatten(0, -2)[:1].expand(x[..., 0].numel(), -1).reshape(x.shape).clone()
        yield x.to(device, dtype)


class _Copy:
    """A copy of the module around a list, with functions for experts; its block runs once, or twice.

    The functions are cheap and differ by expert, so a wrong expert, row or order shows in the answer.
    """

    def __init__(self, model: nn.Module, listing: Listing, *, twice: bool) -> None:
        outer: Any = model.get_submodule(listing.tried)
        experts: Any = model.get_submodule(listing.name)
        self._tape = Tape(listing.name, listing.dim)
        # Both copies draw the same maps
        seed_all(1)
        self._stand_ins = with_stand_ins(experts, self._tape)
        self._module = scramble(twin_of(outer, {experts: self._stand_ins}), torch.float64).to(listing.dtype)
        shape = (len(experts), listing.dim, listing.out)
        self._maps = torch.randn(shape, dtype=torch.float64).to(device_of(outer), listing.dtype) / listing.dim**0.5
        inside = listing.block.removeprefix(listing.tried).removeprefix(".")
        block: Any = self._module.get_submodule(inside)
        # Kept before it may be replaced on this instance
        self._forward: Callable[..., Any] = block.forward
        self._twice = twice
        if twice:
            block.forward = self._run_twice
        self._parts = [m for m in block.modules() if m not in set(self._stand_ins.modules())]

    def _expert(self, expert: int, rows: Tensor) -> Tensor:
        y: Tensor = rows.tanh() @ self._maps[expert]
        # No gradient needs it: the block may write to it
        return y

    def _answer(self, notes: Sequence[Note], like: Tensor | None) -> list[Tensor]:
        return [self._expert(*note) for note in notes]

    def _run_twice(self, *args: Any, **named: Any) -> Any:
        passes = Passes(
            tape=self._tape,
            modules=self._parts,
            blank=lambda rows: rows.new_zeros((*rows.shape[:-1], self._maps.shape[2])),
            answer=self._answer,
        )
        return passes.run(self._forward, args, named)

    def attributes(self) -> dict[str, Any]:
        """What modules hold besides parameters and buffers."""
        known = {n for n, _ in (*self._module.named_parameters(), *self._module.named_buffers())}
        return {k: v for k, v in state_of(self._module).items() if k not in known}

    def run(self, x: Tensor, seed: int, training: bool) -> dict[str, Any]:
        """Run a forward and a backward pass, and return everything that comes out of it."""
        module = self._module.train(training)
        before = globals_of(module)
        seed_all(seed)
        if self._twice:
            found = _everything(module, module, x)
        else:
            with self._tape.playing(self._expert):
                found = _everything(module, module, x)
        # As differences: both copies change the same globals, one after the other.
        moved = {k: v - before.get(k, 0.0) for k, v in globals_of(module).items()}
        # `forward` was set on the block that runs twice
        state = {k: v for k, v in state_of(module).items() if k.rpartition(".")[2] != "forward"}
        gradients = {n: p.grad for n, p in module.named_parameters()}
        return {"state": state, "global": moved, **found, "gradient of": gradients}


def _everything(call: Callable[[Tensor], Any], module: nn.Module, x: Tensor) -> dict[str, Any]:
    """Run `call` on `x` and go backward: what `module` answers, leaves behind and draws; `grad` is set."""
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    # Some blocks write to their input, which a leaf does not allow
    given = leaf.clone()
    answer = call(given)
    random = RandomState(x.device).states
    left = _left_on(module)
    # There is a gradient even where no answer has one
    total = leaf.sum()
    for t in tree_leaves((answer, left)):
        if isinstance(t, Tensor) and t.requires_grad:
            # Unequal weights, so that a gradient in a wrong place makes a difference.
            weights = torch.linspace(1, 2, t.numel(), dtype=t.dtype, device=t.device).view(t.shape)
            # Infinite values, such as masked logits, would make the total useless.
            total = total + (t.where(t.isfinite(), torch.zeros_like(t)) * weights).sum()
    total.backward()
    return {
        "its answer": answer,
        "its input": given.detach(),
        "what it leaves": {k: v.detach().clone() for k, v in left.items()},
        "its input's gradient": leaf.grad,
        "random state": random,
    }


def _left_on(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that a pass has set as attributes, by name."""
    return {
        f"{name}.{key}".removeprefix("."): value
        for name, m in module.named_modules()
        for key, value in vars(m).items()
        if isinstance(value, Tensor)
    }


# --- blocks of an adapter ---


def _check_adapter(model: nn.Module, f: Found) -> None:
    """Raise `ConversionError` unless the converted block computes on one rank what it does now."""
    block, who = f.known(model), f"{f.name} ({f.adapter.family})"
    size = sum(p.numel() for p in block.parameters())
    own = next(f.experts(model).parameters()).dtype
    # float64 first, where an error is not lost in rounding; the block's own dtype if it takes no other.
    for dtype in dict.fromkeys((torch.float64 if size <= MOST_PARAMETERS else own, own)):
        with trying():
            try:
                beside = _Beside(block, f, dtype)
                beside.original(next(beside.inputs()), training=False)
            except WRONG:
                # It cannot be copied, or needs its own dtype; `convert` runs it for real in any case.
                continue
            # Cut experts may draw random numbers, in other shapes once they are cut: training cannot be compared.
            if f.spec.places:
                with evaluating(model):
                    for x in beside.inputs():
                        if not beside.draws(x):
                            beside.check(x, False, who)
                return
            if f.spec.bank != "modules":
                beside.check_packing(who)
            for training in (False, True):
                for x in beside.inputs():
                    beside.check(x, training, who)
            return


class _Holder(nn.Module):
    """Holds a module of experts that an adapter knows without a block."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


class _Beside:
    """Two copies of what an adapter knows: as written, and converted for one rank."""

    def __init__(self, block: nn.Module, f: Found, dtype: torch.dtype) -> None:
        name = f.adapter.experts_name
        self._f = with_fields(f, name="" if name else "experts", where=name or "experts")
        self._dtype, self._device = dtype, device_of(block)
        self._limit = TOLERANCE.get(dtype, TOLERANCE[torch.float32])
        self._copies = []
        # Both from one seed, so the copies have the same parameters
        for _ in range(2):
            seed_all(1)
            twin = scramble(twin_of(block), dtype)
            self._copies.append(twin if name else _Holder(twin))
        self._converted = False

    def inputs(self) -> Iterator[Tensor]:
        dim = self._f.spec.dim
        return _inputs(((1, 16, dim), (1, 40, dim)), self._device, self._dtype)

    def check_packing(self, who: str) -> None:
        """Raise `ConversionError` unless `pack` gives back all that `unpack` has taken, unchanged."""
        f, experts = self._f, self._f.experts(self._copies[0])
        state = {n: p.detach() for n, p in experts.named_parameters()}
        try:
            packed = f.adapter.pack(f.spec, [f.adapter.unpack(f.spec, state, e) for e in range(f.spec.held)])
            packed = with_rest(packed, f.adapter.rest(f.spec, state))
        except WRONG as error:
            raise ConversionError(f"{who}: unpack and pack fail: {type(error).__name__}: {error}") from error
        for name in sorted(state.keys() ^ packed.keys()):
            problem = "is lost: pack() does not return it" if name in state else "is in pack(), and not in the experts"
            raise ConversionError(f"{who}: the experts' parameter {name} {problem}")
        for name, p in state.items():
            if packed[name].shape != p.shape or not torch.equal(packed[name], p):
                raise ConversionError(f"{who}: {name}: pack() does not give back what unpack() has taken")

    def original(self, x: Tensor, *, training: bool, experts_training: bool = False) -> dict[str, Any]:
        """Run the block as written: what it answers and leaves, and the gradients outside of its experts."""
        return self._run(self._copies[0], x, training, experts_training)

    def draws(self, x: Tensor) -> bool:
        """Whether the block as written draws random numbers in evaluation."""
        first, second = (self._run(self._copies[0], x, False, False, seed) for seed in (0, 1))
        return any(differences(first["its answer"], second["its answer"], self._limit))

    def check(self, x: Tensor, training: bool, who: str) -> None:
        """Raise `ConversionError` where the two differ, or where training experts would lose what they do only then.

        Args:
            x: Input of the block, [1, N, D].
            training: In which mode the block runs.
            who: How messages call the block.
        """
        rounding = Rounding()
        with rounding:
            want = self.original(x, training=training)
        where = f"{who}: tried in {_mode(training)} on {list(x.shape)}"
        if training and self._f.spec.bank != "modules":
            # Grouped kernels have no training mode, so dropout inside experts would be lost.
            active = self.original(x, training=True, experts_training=True)
            if next(differences(want, active, self._limit), None):
                experts = self._f.experts(self._copies[0])
                kinds = [str(m) for m in experts.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
                raise ConversionError(
                    f"{where}: its experts compute something else in training, which would be lost "
                    f"({kinds[0] if kinds else 'by self.training'}): these experts are no plain feed-forward networks"
                )
        try:
            if not self._converted:
                replace(self._copies[1], self._f, ThreadWorld(1).collective(0), "naive")
                self._converted = True
            with rounding:
                got = self._run(self._copies[1], x, training, False)
        except WRONG as error:
            raise ConversionError(f"{where}: it fails once converted: {type(error).__name__}: {error}") from error
        limit = ROUNDED if rounding.happens and self._dtype == torch.float64 else self._limit
        # A replaced method leaves on the block what matters; the original may leave more.
        both = want["what it leaves"].keys() & got["what it leaves"].keys()
        for found in (want, got):
            found["what it leaves"] = {k: v for k, v in found["what it leaves"].items() if k in both}
        _compare(want, got, limit, f"{where}: once converted it differs", lambda place, how: f"{place}: {how}")

    def _run(
        self, block: nn.Module, x: Tensor, training: bool, experts_training: bool, seed: int = 0
    ) -> dict[str, Any]:
        f = self._f
        block.train(training)
        if not experts_training:
            held: Any = f.experts(block)
            # The copy that is converted has a layer there; its bank is what stands for the experts.
            (held if block is self._copies[0] or not self._converted else held.experts).eval()
        seed_all(seed)
        found = _everything(lambda given: f.run(block, given), block, x)
        inside = f"{f.where}."
        left = {k: v for k, v in found["what it leaves"].items() if not k.startswith(inside)}
        gradients = {n: p.grad for n, p in block.named_parameters() if not n.startswith(inside)}
        # Converted experts may draw in another order than the block's own did..
        found.pop("random state")
        return {**found, "what it leaves": left, "gradient of": gradients}
