"""The experts of `transformers` since its release 5, whatever the family: one interface, which describes itself.

Classes under its `use_experts_implementation` stack the parameters of all experts, are called with (tokens, ids,
weights), and have attributes for how their matrices lie. So an adapter reads these, and no family needs a line here.
What `_apply_gate` computes is found by trying.

It is the experts' module that is known here, not the block: some decoder layers call it themselves.

Nothing of transformers is imported.

Shape legend: N tokens, K top-k, E experts, D model dim, H hidden dim.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prophet.convert.base import Adapter, ExpertsSpec, bare, check_shapes, integer
from prophet.convert.checks import SPREAD
from prophet.convert.trials.module_copies import twin_of
from prophet.convert.trials.probe import activation_of, gate_of
from prophet.errors import ConversionError
from prophet.experts.plain import RowOrder
from prophet.kernels.grouped_ffn import ExpertWeights
from prophet.spec import Activation, activation_named
from prophet.trials import trying


@dataclass(frozen=True, slots=True)
class Layout:
    """How a module stacks its experts' parameters.

    Attributes:
        transposed: Matrices are [E, inputs, outputs].
        interleaved: Gate and `up` take turns, row by row.
        bias: Both matrices have one.
        gate: Experts are gated, and the first matrix is called gate_up_proj, else up_proj.
    """

    transposed: bool = False
    interleaved: bool = False
    bias: bool = False
    gate: bool = True

    @property
    def first(self) -> str:
        """Name of the first matrix."""
        return "gate_up_proj" if self.gate else "up_proj"

    @property
    def order(self) -> RowOrder:
        return RowOrder(interleaved=self.interleaved)

    def sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Read E, D and H from the shape of the first matrix."""
        e, rows, dim = (shape[0], shape[2], shape[1]) if self.transposed else shape
        return e, dim, rows // 2 if self.gate else rows

    def shapes(self, e: int, dim: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters, by name.

        The first matrix is [E, H, D], with a gate [E, 2H, D], and `down_proj` [E, D, H]; where the layout is transposed
        the last two dimensions change places. Biases are [E, outputs].

        Args:
            e: Number of experts.
            dim: Width of the model.
            hidden: Width of an expert's hidden layer.
        """
        rows = 2 * hidden if self.gate else hidden
        matrices = {self.first: (rows, dim), "down_proj": (dim, hidden)}
        found: dict[str, tuple[int, ...]] = {}
        for name, (out, given) in matrices.items():
            found[name] = (e, given, out) if self.transposed else (e, out, given)
            if self.bias:
                found[f"{name}_bias"] = (e, out)
        return found

    def unpack(self, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        """Read one expert in the library's layout: [outputs, inputs], the gate's rows before those of `up`."""
        w_in, w_out = (state[name][expert] for name in (self.first, "down_proj"))
        b_in, b_out = (state[f"{name}_bias"][expert] if self.bias else None for name in (self.first, "down_proj"))
        if self.transposed:
            # The kernels take [outputs, inputs]
            w_in, w_out = w_in.t(), w_out.t()
        if self.interleaved:
            w_in, b_in = self.order.gate_first(w_in), None if b_in is None else self.order.gate_first(b_in)
        return ExpertWeights(w_in, w_out, b_in, b_out)

    def pack(self, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        """Undo `unpack`, for all experts."""

        def rows(t: Tensor) -> Tensor:
            return self.order.back(t) if self.interleaved else t

        def matrix(t: Tensor) -> Tensor:
            return t.t() if self.transposed else t

        found = {
            self.first: torch.stack([matrix(rows(w.w_in)) for w in experts]),
            "down_proj": torch.stack([matrix(w.w_out) for w in experts]),
        }
        if self.bias:
            found[f"{self.first}_bias"] = torch.stack([rows(w.b_in) for w in experts if w.b_in is not None])
            found["down_proj_bias"] = torch.stack([w.b_out for w in experts if w.b_out is not None])
        return found


class Interface(Adapter):
    """The experts' module of any family; `at` makes the adapter that knows a module's layout."""

    family = "Hugging Face"
    experts_name = ""
    # `_check_none_is_dropped` makes sure of it
    drops_none = True

    def __init__(self, layout: Layout | None = None, family: str = "") -> None:
        self.layout = layout or Layout()
        self.family = family or self.family

    def matches(self, block: nn.Module) -> bool:
        # Not getattr: a wrapper may answer for the module inside it
        attributes: set[str] = set(vars(bare(block)))
        return {"is_transposed", "has_bias"} <= attributes

    def at(self, block: nn.Module) -> Interface:
        experts = bare(block)
        attributes = vars(experts)
        layout = Layout(
            transposed=bool(attributes["is_transposed"]),
            interleaved=not attributes.get("is_concatenated", True),
            bias=bool(attributes["has_bias"]),
            gate=bool(attributes.get("has_gate", True)),
        )
        return Interface(layout, type(experts).__name__.removesuffix("Experts"))

    def describe(self, block: nn.Module) -> ExpertsSpec:
        experts: Any = block
        who, layout = type(experts).__name__, self.layout
        check_not_spread(experts)
        # The class norms each expert's answer before it is weighted.
        if vars(experts).get("has_post_expert_norm"):
            raise ConversionError(
                f"{who}.has_post_expert_norm: expected False, got True: a norm of each expert's answer has no place "
                f"in the grouped kernels"
            )
        matrix = experts._parameters.get(layout.first)
        if matrix is None or matrix.ndim != 3:
            has = "none" if matrix is None else f"one of {matrix.ndim} dimensions"
            raise ConversionError(f"{who}.{layout.first}: expected a parameter of 3 dimensions, got {has}")
        e, dim, hidden = layout.sizes(matrix.shape)
        check_shapes(experts, layout.shapes(e, dim, hidden))
        self._check_none_is_dropped(experts, e)
        return ExpertsSpec(
            num_experts=e,
            held=e,
            top_k=_top_k(experts, e),
            dim=dim,
            hidden=hidden,
            activation=self._activation(experts),
            bias=layout.bias,
            form="stacked",
            router="its own",
        )

    def _activation(self, experts: Any) -> Activation:
        """Find the activation by trying: what `_apply_gate` makes of numbers, or `act_fn` where there is no gate."""
        who, layout = type(experts).__name__, self.layout
        function = getattr(experts, "act_fn", None)
        if not layout.gate:
            return activation_of(function, f"{who}.act_fn")

        def _apply_gate(rows: Tensor) -> Tensor:
            # `_apply_gate` expects rows in the module's order, and `gate_of` makes them gate first.
            return experts._apply_gate(layout.order.back(rows.t()).t())  # type: ignore[no-any-return]

        settings = {n: v for n, v in vars(experts).items() if type(v) is float or ("limit" in n and type(v) is int)}
        described = [f"act_fn {type(function).__name__}"] if function is not None else []
        described += [f"{name} {value}" for name, value in settings.items()]
        # A clamp's bound is an attribute; which one it is, trying finds out.
        limits = [float(v) for v in settings.values() if 0 < v < math.inf]
        return activation_named(gate_of(_apply_gate, f"{who}._apply_gate ({', '.join(described)})", limits=limits))

    def _check_none_is_dropped(self, experts: Any, e: int) -> None:
        """Raise `ConversionError` where the id E, which means none here, adds something to the answer.

        The class's own forward answers, on the CPU, on a copy with few numbers. A class that fails on this id is never
        given it.
        """
        # Every id counts, so all E experts are kept, but with D = 4 and H = 3.
        shapes = self.layout.shapes(e, 4, 3)
        with trying(), torch.no_grad():
            small = {
                p: nn.Parameter(torch.randn(shapes[n], dtype=torch.float64)) for n, p in experts.named_parameters()
            }
            x, weights = torch.randn(3, 4, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)
            try:
                twin = twin_of(experts, small).eval()
                # Past the decorator, which may choose one of transformers' own kernels
                own = inspect.unwrap(type(twin).forward)
                with_none = own(twin, x, torch.tensor([[0, e], [e, e], [e - 1, 0]]), weights)
                there = torch.tensor([[True, False], [False, False], [True, True]])
                without = own(twin, x, torch.tensor([[0, 0], [0, 0], [e - 1, 0]]), weights * there)
            except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
                return
        if not torch.allclose(with_none, without, rtol=0, atol=1e-9):
            raise ConversionError(
                f"{type(experts).__name__}.forward: the id {e}, one beyond the last expert, adds to the answer; "
                f"expected it to mean no expert"
            )

    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        return self.layout.unpack(state, expert)

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        return self.layout.pack(experts)

    def call(self, block: nn.Module, x: Tensor) -> Any:
        """Run the experts alone, on ids and weights that a random router makes of `x`."""
        tokens = x.reshape(-1, x.shape[-1])
        experts: Any = bare(block)
        e = experts.num_experts
        generator = torch.Generator().manual_seed(0)
        router = torch.randn(tokens.shape[1], e, generator=generator, dtype=torch.float64)
        scores, ids = (tokens @ router.to(x.device, x.dtype)).topk(min(e, 2))
        return block(tokens, ids, scores.sigmoid())


def _top_k(experts: Any, e: int) -> int:
    """K where the config gives it under its usual name, else 0: then it is the number of ids of a token."""
    k = getattr(getattr(experts, "config", None), "num_experts_per_tok", None)
    return k if isinstance(k, int) and 1 <= k <= e else 0


def check_not_spread(experts: nn.Module) -> None:
    """Raise `ConversionError` for experts that something else has spread over ranks already."""
    who = type(experts).__name__
    if getattr(experts, "_is_expert_parallel", False):
        raise ConversionError(f"{who}._is_expert_parallel: expected False, got True: spread over ranks by {SPREAD}")
    count = integer(experts, "num_experts")
    for name, p in experts.named_parameters(recurse=False):
        # transformers cuts the stacked parameters and leaves num_experts
        if p.ndim and p.shape[0] != count:
            raise ConversionError(
                f"{who}.{name} holds {p.shape[0]} experts, and num_experts is {count}: spread over ranks by {SPREAD}"
            )
