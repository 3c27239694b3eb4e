"""Which lists of modules are experts? Found by running the block around each, on a copy, with stand-ins for them.

A list is one of experts where its modules are alike and row-wise, no input of one depends on another's answer, and the
numbers of rows change with the input. Which router chooses them does not matter.

Shape legend: E experts, D and O input and output dim of an expert, W input dim of the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from prophet.convert.checks import check_plain
from prophet.convert.trials.module_copies import device_of, distance, scramble, twin_of
from prophet.convert.trials.replay import Note, Tape, same, with_stand_ins
from prophet.convert.trials.verify import TOLERANCE
from prophet.errors import ConversionError
from prophet.sharing import Place, held_by_several, places_of
from prophet.trials import seed_all, trying

# Rows that a module is called with to learn the shape of its answer
ROWS = 12
# Shapes of the inputs that a block is tried with, without their last dimension
SHAPES = ((2, 24), (56,))
# Levels from the module that holds the list up to one that can be called with one tensor
LEVELS_UP = 3
# Parameters of a module around experts that is copied in float64
MOST_PARAMETERS = 1 << 28


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """A list of experts.

    Attributes:
        name: Of the list.
        block: Name of the innermost module of which one call calls all experts.
        tried: Name of the module that was run to find out.
        experts: E.
        dim: D.
        out: O.
        shapes: Of inputs [..., W] that `tried` takes.
        dtype: Of those inputs.
    """

    name: str
    block: str
    tried: str
    experts: int
    dim: int
    out: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftAlone:
    """A list that was not taken for one of experts, and why.

    Attributes:
        name: Of the list.
        why: The reason, as a message.
        constant: Its modules could be experts, but their counts never change.
    """

    name: str
    why: str
    constant: bool = False


class _Not(Exception):
    """The list at hand is not one of experts; the message says why."""

    def __init__(self, why: str, *, constant: bool = False) -> None:
        super().__init__(why)
        self.constant = constant


def discover(
    model: nn.Module, taken: Sequence[str], experts: Sequence[str] | None = None
) -> tuple[list[Listing], list[LeftAlone]]:
    """Find the lists of experts in `model`, and the other lists of at least two modules.

    Args:
        model: Not changed.
        taken: Names of blocks that are known already; nothing inside is tried.
        experts: Patterns of names, as of `fnmatch`, of the lists to take, and no others. These need not have counts
            that change. None takes what is found.

    Returns:
        The lists of experts, and the others with the reason.

    Raises:
        ConversionError: Where a pattern fits no list, and where a list that it fits cannot be taken.
    """
    places = places_of(model)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    # a list may stand in several blocks, or in a block and elsewhere; `checks.check_not_shared` refuses it then
    listed = [(p.name, m) for m in lists for p in held_by_several(places.get(id(m), [])) or [Place("", m, "")]]
    listed = [(n, m) for n, m in listed if not any(_inside(n, t) or _inside(t, n) for t in taken)]
    for pattern in experts or ():
        if not any(fnmatchcase(name, pattern) for name, _ in listed):
            there = ", ".join(name for name, _ in listed) or "none"
            raise ConversionError(f"experts={pattern!r} names no list of at least two modules; the lists are: {there}")
    found: list[Listing] = []
    left: list[LeftAlone] = []
    for name, modules in listed:
        # A list inside an expert, or a second name of one that has been found
        if any(_inside(name, f.name) or modules is model.get_submodule(f.name) for f in found):
            continue
        named = any(fnmatchcase(name, pattern) for pattern in experts or ())
        if experts is not None and not named:
            left.append(LeftAlone(name=name, why="experts= does not name it"))
            continue
        known = next((t for t in taken if t.rpartition(".")[0] == name.rpartition(".")[0]), None)
        # Norms or attention, say, of a layer whose experts have been found
        if known is not None and not named:
            left.append(LeftAlone(name=name, why=f"{known}, which stands beside it, has the experts"))
            continue
        try:
            listing = _tried(model, name, modules, named)
            # A block runs twice for one list: with two, rows of one could depend on answers of the other.
            _check_alone_in_its_block(listing, found)
        except _Not as no:
            if named:
                raise ConversionError(f"{name}: {no}") from no
            left.append(LeftAlone(name=name, why=str(no), constant=no.constant))
        else:
            found.append(listing)
    # A list of blocks, one of which holds experts, is no news to the reader of a report.
    return found, [one for one in left if not any(_inside(f.name, one.name) for f in found)]


def _inside(name: str, other: str) -> bool:
    """Whether the module `name` is, or is in, the module `other`."""
    return other in ("", name) or name.startswith(f"{other}.")


def _check_alone_in_its_block(listing: Listing, found: list[Listing]) -> None:
    for other in found:
        if other.block == listing.block:
            raise _Not(f"{listing.block or 'the model'} calls {other.name}, too: hold both in one expert's module")


def _tried(model: nn.Module, name: str, modules: nn.ModuleList, named: bool) -> Listing:
    """The list as experts. Raises `_Not` where it holds none."""
    _check_alike(modules)
    with trying():
        # All the sizes that a module takes: the block decides which one it uses.
        sizes = [(dim, out) for dim in _widths(modules[0]) if (out := _answer_dim(modules[0], dim)) is not None]
    if not sizes:
        raise _Not("its modules do not take one tensor of rows")
    why = f"what is around it has more than {MOST_PARAMETERS:,} parameters"
    for tried in _around(name):
        outer = model.get_submodule(tried)
        # Experts are replaced by stand-ins, so their size does not count
        inside = {id(p) for p in modules.parameters()}
        if sum(p.numel() for p in outer.parameters() if id(p) not in inside) > MOST_PARAMETERS:
            # Modules further out are larger still
            break
        for dim, out in sizes:
            with trying():
                experiment = _Experiment(outer, name.removeprefix(f"{tried}." if tried else ""), modules, dim, out)
                try:
                    experiment.find_input()
                except _CannotRun as cannot:
                    why = f"{tried or 'the model'} cannot be run to find out: {cannot}"
                    continue
                inner, varying = experiment.check()
                _check_row_wise(modules[0], dim, experiment.noted)
                if not (varying or named):
                    raise _Not(
                        f"the numbers of rows of its modules never change; if they are experts, write "
                        f"prophet.convert(model, experts={name!r})",
                        constant=True,
                    )
            return Listing(
                name=name,
                block=".".join(part for part in (tried, inner) if part),
                tried=tried,
                experts=len(modules),
                dim=dim,
                out=out,
                shapes=experiment.shapes,
                dtype=experiment.dtype,
            )
    raise _Not(why)


def _around(name: str) -> Iterator[str]:
    """Names of the modules around a list, from the one that holds it outwards."""
    parts = name.split(".")[:-1]
    for levels in range(min(len(parts), LEVELS_UP) + 1):
        yield ".".join(parts[: len(parts) - levels])


def _check_alike(modules: nn.ModuleList) -> None:
    """Raise `_Not` unless all modules have parameters of the same names and shapes."""
    first = dict(modules[0].named_parameters())
    if not first:
        raise _Not("its modules have no parameters")
    for e, other in enumerate(modules):
        own = dict(other.named_parameters())
        for n, p in own.items():
            try:
                check_plain(f"{e}.{n}", p)
            except ConversionError as no:
                raise _Not(str(no)) from no
        for n in [*first, *own]:
            if n not in first or n not in own:
                has, lacks = (e, 0) if n in own else (0, e)
                raise _Not(f"{n}: expert {has} has this parameter, expert {lacks} has not; expected alike experts")
            for what, mine, theirs in (
                ("shape", list(own[n].shape), list(first[n].shape)),
                ("dtype", own[n].dtype, first[n].dtype),
            ):
                if mine != theirs:
                    raise _Not(f"{e}.{n}: expected the {what} {theirs}, as of expert 0, got {mine}")


def _widths(expert: nn.Module) -> list[int]:
    """Candidates for D: the sizes of the expert's parameters, the likeliest first."""
    # A linear layer's last dimension is its input; eight candidates bound the time.
    shapes = [p.shape for p in expert.parameters() if p.ndim]
    return list(dict.fromkeys([s[-1] for s in shapes] + [s[0] for s in shapes] + [d for s in shapes for d in s]))[:8]


@torch.no_grad()
def _answer_dim(expert: nn.Module, dim: int) -> int | None:
    """O for rows of this D; None where the expert does not take them. Uses the meta device where that is enough."""
    put: dict[Any, Any] = {}
    for t in (*expert.parameters(), *expert.buffers()):
        empty = torch.empty_like(t, device="meta")
        put[t] = nn.Parameter(empty, t.requires_grad) if isinstance(t, nn.Parameter) else empty
    like = next(expert.parameters())
    try:
        y = twin_of(expert, put)(torch.empty(ROWS, dim, dtype=like.dtype, device="meta"))
    # A module that does not take these rows may raise anything
    except Exception as error:
        size = sum(p.numel() for p in expert.parameters())
        if size > MOST_PARAMETERS or not (isinstance(error, NotImplementedError) or "meta" in str(error)):
            return None
        # It cannot run without values
        try:
            y = twin_of(expert)(torch.zeros(ROWS, dim, dtype=like.dtype, device=like.device))
        except Exception:
            return None
    if not isinstance(y, Tensor):
        raise _Not(f"its modules answer with a {type(y).__name__}, expected one tensor of as many rows as are given")
    if y.ndim != 2 or len(y) != ROWS:
        raise _Not(f"its modules answer to rows [{ROWS}, {dim}] with {list(y.shape)}, expected as many rows")
    return y.shape[1]


@torch.no_grad()
def _check_row_wise(expert: nn.Module, dim: int, noted: Sequence[Note]) -> None:
    """Raise `_Not` unless every row of the answer depends on the same row of the input alone."""
    # Also in as many dimensions as the block uses: a norm over a fixed dimension would show.
    deepest = max(note.rows.ndim for note in noted)
    failed: Exception | None = None
    for dtype in dict.fromkeys((torch.float64, next(expert.parameters()).dtype)):
        # Random parameters, as a zero bias or gate may hide a dependence
        twin = scramble(twin_of(expert), dtype).eval()
        x = torch.randn(ROWS, dim, dtype=torch.float64).to(device_of(expert), dtype)
        try:
            y = twin(x)
            order = torch.randperm(ROWS, device=x.device)
            others = [(twin(x[order]), y[order]), (twin(x[: ROWS // 2]), y[: ROWS // 2])]
            shape = (*(1 for _ in range(deepest - 2)), ROWS)
            others.append((twin(x.view(*shape, dim)), y.view(*shape, -1)))
        except Exception as error:
            failed = failed or error
            continue
        limit = TOLERANCE.get(dtype, TOLERANCE[torch.float32])
        if any(got.shape != want.shape or distance(want, got) > limit for got, want in others):
            raise _Not("its modules are not row-wise: an answer's row depends on other rows")
        return
    raise _Not(f"its modules fail: {failed}")


class _CannotRun(Exception):
    """The module around a list does not take a tensor of tokens."""


class _Experiment:
    """A copy of the module around a list, with stand-ins in it, and what they are called with.

    Args:
        outer: The module around the list.
        path: Of the list in that module.
        modules: The list.
        dim: D.
        out: O.
    """

    def __init__(self, outer: nn.Module, path: str, modules: nn.ModuleList, dim: int, out: int) -> None:
        self._path, self._experts, self._dim, self._out = path, len(modules), dim, out
        self._tape = Tape(path, dim)
        self._stand_ins = with_stand_ins(modules, self._tape)
        try:
            twin = twin_of(outer, {modules: self._stand_ins})
        except Exception as error:
            raise _Not(f"the module around it cannot be copied: {error}") from error
        self._own = next(p.dtype for p in modules.parameters())
        self._twin = scramble(twin, torch.float64).eval()
        self._device = device_of(outer)
        self.shapes: tuple[tuple[int, ...], ...] = ()
        self.dtype = torch.float64
        self.noted: list[Note] = []

    def find_input(self) -> None:
        """Find inputs that the module takes. Raises `_CannotRun` where there are none."""
        first: Exception | None = None
        # The block's input is mostly as wide as the experts', but a projection may come first.
        widths = dict.fromkeys([self._dim, *(p.shape[-1] for p in self._twin.parameters() if p.ndim)])
        for dtype in dict.fromkeys((torch.float64, self._own)):
            self._twin.to(dtype)
            self.dtype = dtype
            for width in list(widths)[:4]:
                taken = []
                for shape in SHAPES:
                    try:
                        self._run(self._input(0, (*shape, width)), answers=0)
                    except Exception as error:
                        first = first or error
                    else:
                        taken.append((*shape, width))
                if taken and (self.noted or self._called_in_training(taken[0])):
                    self.shapes = tuple(taken)
                    return
        if first is None:
            raise _CannotRun("it does not call them")
        raise _CannotRun(f"{str(first).splitlines()[0]} (there are {self._experts} modules in the list)")

    def _called_in_training(self, shape: tuple[int, ...]) -> bool:
        """Whether experts are called in training at least, where they are not in evaluation; it stays in that mode."""
        # Some blocks call their experts in training only
        self._twin.train()
        self._run(self._input(0, shape), answers=0)
        if not self.noted:
            self._twin.eval()
        return bool(self.noted)

    def check(self) -> tuple[str, bool]:
        """Run the module on several inputs, with two sets of answers each.

        Returns:
            The path of the block inside the module, and whether the numbers of rows change with the input.

        Raises:
            _Not: Where the inputs of stand-ins depend on their answers.
        """
        counts = []
        inner = ""
        for shape in self.shapes:
            for seed in range(3):
                x = self._input(seed, shape)
                inner = self._run(x, answers=0)
                zero = self.noted
                self._run(x, answers=1)
                other = self.noted
                if len(zero) != len(other) or not all(map(_alike, zero, other)):
                    raise _Not(
                        "the input of one of its modules depends on another's answer, or on random numbers that are "
                        "not torch's"
                    )
                # Only the first shape's three counts are compared: another shape has other counts in any case.
                if seed == 0 or shape == self.shapes[0]:
                    counts.append(self._count(zero))
        return inner, not counts[0] == counts[1] == counts[2]

    def _count(self, noted: Sequence[Note]) -> list[int]:
        counts = [0] * self._experts
        for e, rows in noted:
            counts[e] += rows.numel() // self._dim
        return counts

    def _input(self, seed: int, shape: tuple[int, ...]) -> Tensor:
        """Random tokens [..., W]; the last of three inputs is one token many times, which overloads its experts."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        if seed == 2:
            x = x.flatten(0, -2)[:1].expand(x[..., 0].numel(), -1).reshape(shape).clone()
        return x.to(self._device, self.dtype)

    @torch.no_grad()
    def _run(self, x: Tensor, answers: int) -> str:
        """Run the module, its stand-ins answering zeros or random numbers; returns the path of the block."""
        self.noted = []
        noted = self.noted
        calls: list[dict[str, int]] = []
        running: dict[str, int] = {}
        generator = torch.Generator(self._device).manual_seed(1)

        def behave(expert: int, rows: Tensor) -> Tensor:
            noted.append(Note(expert, rows.clone()))
            calls.append(dict(running))
            if not answers:
                return rows.new_zeros(*rows.shape[:-1], self._out)
            shape = (*rows.shape[:-1], self._out)
            return torch.randn(shape, generator=generator, dtype=rows.dtype, device=rows.device)

        # A pass may leave something behind, so each runs on a new copy
        twin = twin_of(self._twin, {self._stand_ins: self._stand_ins})
        above = self._path.split(".")[:-1]
        for depth in range(len(above) + 1):
            path = ".".join(above[:depth])
            part = twin.get_submodule(path)
            part.register_forward_pre_hook(_begins(running, path))
            part.register_forward_hook(_ends(running, path))
        # The same noise in every run, so that only the answers differ
        seed_all(0)
        with self._tape.playing(behave):
            twin(x.clone())
        return _innermost(calls)


def _begins(running: dict[str, int], path: str) -> Any:
    """A hook that notes the call of `path` as under way, under a number that no other call has."""

    def hook(*_: Any) -> None:
        # "#" counts all calls so far; no module has that name
        running[path] = running.get("#", 0)
        running["#"] = running[path] + 1

    return hook


def _ends(running: dict[str, int], path: str) -> Any:
    def hook(*_: Any) -> None:
        del running[path]

    return hook


def _innermost(calls: Sequence[dict[str, int]]) -> str:
    """The longest path of which the same single call was under way whenever an expert was called."""
    if not calls:
        return ""
    common = [p for p in calls[0] if p != "#" and all(c.get(p) == calls[0][p] for c in calls)]
    return max(common, key=len)


def _alike(a: Note, b: Note) -> bool:
    return a.expert == b.expert and a.rows.shape == b.rows.shape and bool(same(a.rows, b.rows).all())
