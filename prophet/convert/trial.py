"""A block that is about to run twice, tried beforehand: on copies, beside one that runs once.

Both have random parameters and buffers, and in the place of the experts functions that are cheap. They run on inputs of
two shapes, on one that overloads an expert, in evaluation and in training, from one random state. Everything must be
equal: answers, gradients, buffers, attributes, and the random state afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from prophet.convert.copies import device_of, differences, globals_of, scramble, state_of, trying, twin_of
from prophet.convert.discover import Listing
from prophet.convert.replay import Note, Passes, RandomState, Tape, with_stand_ins
from prophet.convert.verify import TOLERANCE
from prophet.errors import ConversionError, ReplayError


def check_runs_twice(model: nn.Module, listing: Listing) -> None:
    """Raise `ConversionError` unless the block around `listing` may run twice; nothing is changed."""
    outer = model.get_submodule(listing.tried)
    with trying(device_of(outer)):
        once, twice = _Copy(model, listing, twice=False), _Copy(model, listing, twice=True)
        for training in (False, True):
            for at, x in enumerate(_inputs(listing, device_of(outer))):
                mode = "training" if training else "evaluation"
                where = f"{listing.name}: tried in {mode} on {list(x.shape)}, the block around it"
                try:
                    want = once.run(x, at, training)
                except Exception as error:
                    raise ConversionError(f"{where} fails: {str(error).splitlines()[0]}") from error
                try:
                    got = twice.run(x, at, training)
                except (ReplayError, RuntimeError) as error:
                    raise ConversionError(f"{where} fails when it runs twice: {error}") from error
                limit = TOLERANCE.get(listing.dtype, TOLERANCE[torch.float32])
                found = next(differences(want, got, limit), None)
                if found is not None:
                    raise ConversionError(f"{where} does not run twice as it runs once: {_meaning(*found)}")


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


def _inputs(listing: Listing, device: torch.device) -> Iterator[Tensor]:
    """Inputs of every shape that the block takes; the last is one token many times."""
    for seed, shape in enumerate((*listing.shapes, listing.shapes[0])):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        if seed == len(listing.shapes):
            x = x.flatten(0, -2)[:1].expand(x[..., 0].numel(), -1).reshape(shape).clone()
        yield x.to(device, listing.dtype)


class _Copy:
    """A copy of the module around a list, with functions for experts; its block runs once, or twice."""

    def __init__(self, model: nn.Module, listing: Listing, *, twice: bool) -> None:
        outer: Any = model.get_submodule(listing.tried)
        experts: Any = model.get_submodule(listing.name)
        self._tape = Tape(listing.name, listing.dim)
        torch.manual_seed(1)
        self._stand_ins = with_stand_ins(experts, self._tape)
        self._module = scramble(twin_of(outer, {experts: self._stand_ins}), torch.float64).to(listing.dtype)
        shape = (len(experts), listing.dim, listing.out)
        self._maps = torch.randn(shape, dtype=torch.float64).to(device_of(outer), listing.dtype) / listing.dim**0.5
        inside = listing.block.removeprefix(listing.tried).removeprefix(".")
        block: Any = self._module.get_submodule(inside)
        self._forward: Callable[..., Any] = block.forward
        self._twice = twice
        if twice:
            block.forward = self._run_twice
        self._parts = [m for m in block.modules() if m not in set(self._stand_ins.modules())]

    def _expert(self, expert: int, rows: Tensor) -> Tensor:
        y: Tensor = (rows @ self._maps[expert]).tanh()
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

    def run(self, x: Tensor, seed: int, training: bool) -> dict[str, Any]:
        """Everything that comes out of a forward and a backward pass."""
        module = self._module.train(training)
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        given = leaf.clone()
        before = globals_of(module)
        torch.manual_seed(seed)
        if self._twice:
            answer = module(given)
        else:
            with self._tape.playing(self._expert):
                answer = module(given)
        random = RandomState(x.device)
        moved = {k: v - before.get(k, 0.0) for k, v in globals_of(module).items()}
        state = {k: v for k, v in state_of(module).items() if k.rpartition(".")[2] != "forward"}
        left = [v for m in module.modules() for v in vars(m).values() if isinstance(v, Tensor)]
        total = sum(
            (_weighed(t) for t in tree_leaves((answer, left)) if isinstance(t, Tensor) and t.requires_grad),
            leaf.sum(),
        )
        total.backward()
        gradients = {n: p.grad for n, p in module.named_parameters()}
        return {
            "answer": answer,
            "input": given.detach(),
            "state": state,
            "global": moved,
            "gradient": {"input": leaf.grad, **gradients},
            "random state": random.states(),
        }


def _weighed(t: Tensor) -> Tensor:
    """A sum in which every element has its own weight; what is infinite has none."""
    weights = torch.linspace(1, 2, t.numel(), dtype=t.dtype, device=t.device).view(t.shape)
    return (t.where(t.isfinite(), torch.zeros_like(t)) * weights).sum()
