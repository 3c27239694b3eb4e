"""What does this feed-forward module compute? Found by trying: its output is compared with that of every candidate.

The comparison runs on a copy in float64 with random parameters and in training mode. So a module that is taken for a
plain feed-forward network is one: another activation, a norm or a dropout makes a difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from prophet.convert.base import ExpertsSpec
from prophet.convert.trials.module_copies import Rounding, device_of, scramble, twin_of
from prophet.convert.trials.replay import Tape, with_stand_ins
from prophet.errors import ConversionError
from prophet.experts.plain import FfnNames, RowOrder
from prophet.kernels.grouped_ffn.naive import FUNCTIONS, bounded, expert_ffn
from prophet.spec import ACTIVATIONS, Activation, ActivationParts, activation_named, parts_of
from prophet.trials import trying

# A dropout of one in a hundred leaves no narrow expert's output as it was with so many rows.
ROWS = 64
TOLERANCE = 1e-9
# Of a factor of a gate that is computed in float32, which is off by 2e-7
ROUNDED = 1e-6


def identify(expert: nn.Module) -> tuple[FfnNames, Activation]:
    """Find the names of an expert's parameters and its activation. Raises `ConversionError` where nothing fits."""
    linears = {name: m for name, m in expert.named_modules() if isinstance(m, nn.Linear)}
    known = {f"{name}.{part}" for name in linears for part in ("weight", "bias")}
    foreign = [name for name, _ in expert.named_parameters() if name not in known]
    who = type(expert).__name__
    if foreign or len(linears) not in (2, 3):
        raise ConversionError(
            f"{who}: expected an expert of two linear layers, or three where it is gated, got "
            f"{len(linears)} ({', '.join(linears) or 'none'}) and the other parameters {foreign}"
        )
    tried = _Tried(expert, list(dict.fromkeys(m.in_features for m in linears.values())))
    for names, activation in _candidates(linears, tried.x.shape[1], tried.y.shape[-1]):
        if tried.computes(names, activation):
            return names, activation
    raise ConversionError(
        f"{who}: its output is not that of a feed-forward network with one of the activations "
        f"{', '.join(ACTIVATIONS)} (linear layers: {', '.join(linears)})"
    )


def check_computes(expert: nn.Module, names: FfnNames, activation: Activation) -> None:
    """Raise `ConversionError` unless an expert is this feed-forward network.

    Args:
        expert: The module.
        names: Of its parameters.
        activation: Between its layers.
    """
    dim = dict(expert.named_parameters())[names.w_in[0]].shape[1]
    if not _Tried(expert, [dim]).computes(names, activation):
        raise ConversionError(f"{type(expert).__name__}: its output is not that of expert 0, which has {activation}")


class _Tried:
    """What a copy of an expert, with random parameters, answers to rows of the first of `dims` that it takes."""

    def __init__(self, expert: nn.Module, dims: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        who = type(expert).__name__
        # On the CPU in float64: there is no rounding that could hide one activation behind another.
        twin = twin_of(expert).cpu().double()
        errors = []
        with torch.no_grad(), trying():
            for p in twin.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / max(p.shape[-1], 1) ** 0.5)
            for dim in dims:
                self.x = 2 * torch.randn(ROWS, dim, generator=generator, dtype=torch.float64)
                try:
                    self.y, trained = (_first(twin.train(mode)(self.x.clone())) for mode in (False, True))
                    break
                except (RuntimeError, TypeError, ValueError) as error:
                    errors.append(f"{who}: it cannot be called with rows {[ROWS, dim]}: {error}")
            else:
                raise ConversionError(errors[0])
        # Dropout inside an expert, or code that asks for self.training, has no place in the kernels.
        if not torch.equal(self.y, trained):
            random = ", ".join(str(m) for m in twin.modules() if isinstance(m, nn.modules.dropout._DropoutNd))
            raise ConversionError(
                f"{who}: its output is not that of a feed-forward network in training ({random or 'self.training'})"
            )
        self._state = dict(twin.named_parameters())

    @torch.no_grad()
    def computes(self, names: FfnNames, activation: Activation) -> bool:
        """Whether this feed-forward network gives the answer that the expert gave."""
        guess = expert_ffn(self.x, names.unpack(self._state, ""), activation)
        return guess.shape == self.y.shape and torch.allclose(guess, self.y, rtol=0, atol=TOLERANCE)


def _first(y: Any) -> Tensor:
    first = y[0] if isinstance(y, tuple) else y
    if not isinstance(first, Tensor):
        raise TypeError(f"expected a tensor, got {type(first).__name__}")
    return first


def _candidates(linears: dict[str, nn.Linear], dim: int, dim_out: int) -> Iterator[tuple[FfnNames, Activation]]:
    orders = [RowOrder(up_first=u, interleaved=i) for i in (False, True) for u in (False, True)]
    # Names do not say which layer comes first, so all orders are tried.
    for order in itertools.permutations(linears.items()):
        *first, (last_name, last) = order
        if any(m.in_features != dim for _, m in first) or last.out_features != dim_out:
            continue
        biased = {m.bias is not None for _, m in first}
        if len({m.out_features for _, m in first}) > 1 or len(biased) > 1:
            continue
        # Rows before the activation, of a plain expert and of a gated one
        widths = {1: last.in_features, 2: 2 * last.in_features}
        units = sum(m.out_features for _, m in first)
        for gated in (False, True):
            if units != widths[1 + gated] or (len(first) == 2 and not gated):
                continue
            # One matrix for gate and `up` may hold either first, or row by row in turns.
            for rows in orders if gated and len(first) == 1 else orders[:1]:
                names = FfnNames(
                    tuple(f"{n}.weight" for n, _ in first),
                    f"{last_name}.weight",
                    tuple(f"{n}.bias" for n, _ in first) if biased == {True} else None,
                    None if last.bias is None else f"{last_name}.bias",
                    rows,
                )
                yield from ((names, activation) for activation in ACTIVATIONS if parts_of(activation).gated == gated)


def activation_of(function: object, what: str, *, gated: bool = False) -> Activation:
    """Find the activation that a function of numbers computes.

    Args:
        function: Perhaps a module, perhaps not even callable.
        what: How messages call it.
        gated: Whether to name the activation of gated experts with this function.

    Raises:
        ConversionError: Where it is none that is known.
    """
    # A dropout of one in a hundred does not miss all of so many numbers.
    x = torch.linspace(-8, 8, 4097, dtype=torch.float64)
    answers = _answers(function, x)
    for parts in _unbounded(gated):
        wanted = FUNCTIONS[parts.function](x)
        if answers and all(y.shape == x.shape and torch.allclose(y, wanted, rtol=0, atol=1e-12) for y in answers):
            return activation_named(parts)
    expected = ", ".join(parts.function for parts in _unbounded(gated))
    where = " in gated experts" if gated else ""
    raise ConversionError(f"{what}: expected one of {expected}{where}, got {_name_of(function)}")


def gate_of(function: object, what: str, *, hidden: int = ROWS, limits: Sequence[float] = ()) -> ActivationParts:
    """Find the gated activation that a function makes of pre-activations.

    All functions of gated activations are tried, unbounded and with each of `limits`, with 1 added to `up` and without.
    A factor may be off by 1e-9 of itself and of 1. It may be off by `ROUNDED` where `Rounding` sees that `function`
    makes a tensor of less than float64 on its way.

    Args:
        function: Maps [n, 2 * hidden], the gate's first, to [n, hidden].
        what: How messages call it.
        hidden: Width of its answer.
        limits: Bounds that it may clamp to.

    Raises:
        ConversionError: Where none fits in evaluation and in training, as where it draws random numbers.
    """
    generator = torch.Generator().manual_seed(0)
    shape = max(ROWS, 4096 // hidden), 2 * hidden
    # where functions differ, beyond the limits, and beyond limits that nobody named
    scales = 2.0, 2 * max(limits, default=2.0), 1e4
    x = torch.cat([scale * torch.randn(shape, generator=generator, dtype=torch.float64) for scale in scales])
    with Rounding() as rounding:
        answers = _answers(function, x)
    tolerance = ROUNDED if rounding.happens else TOLERANCE
    for parts, limit, plus_one in itertools.product(_unbounded(True), (None, *limits), (False, True)):
        tried = replace(parts, limit=limit, plus_one=plus_one)
        # In both modes, so a dropout in the gate fits nothing
        if answers and all(_is_gate(tried, x, y, tolerance) for y in answers):
            return tried
    functions = ", ".join(parts.function for parts in _unbounded(True))
    raise ConversionError(
        f"{what}: expected f(gate) * up or f(gate) * (up + 1), f being one of {functions}, unbounded or with one of "
        f"the limits {list(limits)}, got {_name_of(function)}"
    )


def _is_gate(parts: ActivationParts, x: Tensor, y: Tensor, tolerance: float) -> bool:
    """Whether `y` is that activation of `x`, but for a rounding of its factors."""
    gate, up = bounded(x, parts)
    error = tolerance * (1 + gate.abs()) * (1 + up.abs())
    return y.shape == gate.shape and bool(((y - FUNCTIONS[parts.function](gate) * up).abs() <= error).all())


def _unbounded(gated: bool) -> list[ActivationParts]:
    """The activations without a limit, gated or not."""
    return [parts for parts in map(parts_of, ACTIVATIONS) if parts.gated == gated and parts.limit is None]


def _name_of(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _answers(function: object, x: Tensor) -> list[Tensor]:
    """What `function` makes of `x` in evaluation and in training; an empty list where it fails."""
    found: list[Tensor] = []
    for training in (False, True):
        with trying(), _modules_of(function, training), torch.set_grad_enabled(training):
            try:
                y = function(x.clone()) if callable(function) else None
            except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
                return []
        if not isinstance(y, Tensor):
            return []
        found.append(y.detach().double())
    return found


def check_row_wise(function: Callable[[Tensor], Tensor], what: str, row: tuple[int, ...]) -> None:
    """Raise `ConversionError` unless a function works row by row in evaluation.

    Args:
        function: Maps [1, n, *row].
        what: How messages call it.
        row: Shape of one row.
    """
    with trying(), _modules_of(function, False), torch.no_grad():
        x = torch.randn(1, ROWS, *row)
        try:
            y, fewer = function(x.clone()), function(x[:, : ROWS // 2].clone())
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ConversionError(f"{what}: it fails on {list(x.shape)}: {error}") from error
    if not torch.allclose(y[:, : ROWS // 2], fewer, rtol=0, atol=1e-5):
        raise ConversionError(f"{what}: a row of its answer depends on other rows")


def calls_idle(block: nn.Module, spec: ExpertsSpec, experts: nn.ModuleList, call: Callable[..., Any]) -> bool:
    """Whether a block also calls experts that no token chose; tried with a single token, on a copy.

    Args:
        block: Of any kind.
        spec: Its description.
        experts: Its list of experts.
        call: Runs the block on [1, N, D].
    """
    called: set[int] = set()

    def answer(expert: int, rows: Tensor) -> Tensor:
        called.add(expert)
        return rows.new_zeros(*rows.shape[:-1], spec.outputs)

    tape = Tape(type(block).__name__, spec.dim)
    with trying(), torch.no_grad(), tape.playing(answer):
        # Some blocks mix their dtype with float32, which float64 does not allow.
        dtype = next(experts.parameters()).dtype
        twin = scramble(twin_of(block, {experts: with_stand_ins(experts, tape)}), dtype).eval()
        call(twin, torch.randn(1, 1, spec.dim, device=device_of(twin)).to(dtype))
    return len(called) > spec.top_k


@contextmanager
def _modules_of(function: Any, training: bool) -> Iterator[None]:
    """Put modules that a function refers to, such as a dropout layer, in training or evaluation while inside."""
    code = getattr(function, "__code__", None)
    # A closure, globals that it names, a bound method's object, defaults: all places that it can reach.
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    held += [function.__globals__.get(name) for name in code.co_names] if code else []
    held += [function, getattr(function, "__self__", None), *(getattr(function, "__defaults__", None) or ())]
    modes = {m: m.training for one in held if isinstance(one, nn.Module) for m in one.modules()}
    try:
        for module in modes:
            module.training = training
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
