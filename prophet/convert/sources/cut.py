"""Experts that one module computes all at once, cut into a module for each, so that any rank can run any of them.

Tutel's custom experts are such: `forward(x, ctx)` maps x [m, C, D] to [m, C, O], expert by expert. Every parameter
holds those of the m experts one after the other: stacked [m, ...], or flat [m n].

Shape legend: m experts of this rank, C rows of each, n rows or numbers of one, D model dim, O output dim.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from prophet.convert.trials.module_copies import distance, scramble, twin_of
from prophet.convert.trials.verify import TOLERANCE
from prophet.errors import ConversionError
from prophet.trials import trying

# Rows of each expert on which a module is tried
ROWS = 5


class Context:
    """The layer as its experts see it in `ctx`.

    It has whole experts on every rank, which is how they run once converted.
    """

    # Tutel's own values for experts that no other rank shares
    adaptive_degree = sharded_count = 1
    megablocks_size = 0

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        if name == "dispatch_count":
            raise AttributeError("dispatch_count: a converted layer sends no rows in the order that it describes")
        return getattr(self._layer, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        # The copy's layer, where that is copied too
        return Context(memo.get(id(self._layer), self._layer))


class OneExpert(nn.Module):
    """One of the m experts that `whole` computes: a copy of it that holds this expert alone.

    Some modules compute with m. Then this expert takes all m places, and each gets a part of its rows.

    Args:
        whole: The module that computes all m experts.
        context: Passed to its forward.
        expert: Its number among the m; None makes a copy without values.
        experts: m.
        places: 1 where the copy runs with one expert, else m.
    """

    def __init__(self, whole: nn.Module, context: Context, expert: int | None, experts: int, places: int) -> None:
        super().__init__()
        put: dict[int, Any] = {}
        for p in whole.parameters():
            values = cut(p.detach(), 0 if expert is None else expert, experts)
            values = torch.empty_like(values, device="meta") if expert is None else values.clone()
            # The memo of `deepcopy`: the whole parameters are never copied
            put[id(p)] = nn.Parameter(values, p.requires_grad)
        self.module: nn.Module = copy.deepcopy(whole, put)
        self.context, self.places = context, places

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows [n, D] to [n, O]."""
        n, m = rows.shape[0], self.places
        # Padded to a multiple of m with rows of zeros, whose answers are cut off at the end
        x = F.pad(rows, (0, 0, 0, -n % m)).view(m, -1, rows.shape[1])
        if m == 1:
            y = self.module(x, self.context)
        else:
            # Every place has this expert's values; their gradients sum up in the one parameter.
            params = {k: p.expand(m, *p.shape[1:]) if p.shape[0] == 1 else p.repeat(m) for k, p in self._named()}
            y = functional_call(self.module, params, (x, self.context))
        if not isinstance(y, Tensor) or y.shape[:2] != x.shape[:2]:
            got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"expected a tensor {[*x.shape[:2], 'any']} for {list(x.shape)}, got {got}")
        return y.reshape(y.shape[0] * y.shape[1], -1)[:n]

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()


def cut(values: Tensor, expert: int, experts: int) -> Tensor:
    """The share of one of m experts in a parameter, or in a state of its shape.

    Args:
        values: [m, ...] or [m n].
        expert: Its number among the m.
        experts: m.

    Returns:
        A view: [1, ...] of [m, ...], [n] of [m n].
    """
    if values.shape[0] == experts:
        return values[expert : expert + 1]
    return values.view(experts, -1)[expert]


def check_cuttable(whole: nn.Module, layer: nn.Module, experts: int, dim: int) -> int:
    """Find out, by trying it, in how many places each copy of `whole` needs its expert.

    Nothing is changed. Collective where the module's forward is.

    Args:
        whole: The module that computes all experts held here.
        layer: The Tutel layer around it.
        experts: m, those held here.
        dim: D.

    Returns:
        1 where a copy runs with one expert, else m.

    Raises:
        ConversionError: Where it cannot be cut.
    """
    who = type(whole).__name__
    for name, _ in whole.named_buffers():
        raise ConversionError(f"{who}.{name}: a buffer, which would not be cut by expert: expected parameters only")
    for name, p in whole.named_parameters():
        if not p.ndim or (p.shape[0] != experts and (p.ndim > 1 or p.numel() % experts)):
            raise ConversionError(
                f"{who}.{name}: expected those of {experts} experts one after the other, [{experts}, ...] or flat, got "
                f"shape {list(p.shape)}"
            )
    context, problem = Context(layer), ""
    with trying(), torch.no_grad():
        like = next(whole.parameters())
        # float64 tells a wrong answer from a re-ordered sum; half precision is left as its kernels need it.
        dtype = torch.float64 if like.dtype == torch.float32 else like.dtype
        twin = scramble(twin_of(whole), dtype).eval()
        x = torch.randn(experts, ROWS, dim, dtype=torch.float64).to(like.device, dtype)
        try:
            want, again = twin(x, context), twin(x, context)
        # Somebody else's module may raise anything
        except Exception as error:
            raise ConversionError(f"{who} fails on {list(x.shape)}: {type(error).__name__}: {error!s:.300}") from error
        if not isinstance(want, Tensor) or want.shape[:2] != x.shape[:2]:
            got = list(want.shape) if isinstance(want, Tensor) else type(want).__name__
            raise ConversionError(f"{who}: expected a tensor {[*x.shape[:2], 'any']} for {list(x.shape)}, got {got}")
        if not torch.equal(want, again):
            raise ConversionError(f"{who}: its answer is random in evaluation, so nothing can compare it")
        for places in dict.fromkeys((1, experts)):
            ones = [OneExpert(twin, context, e, experts, places) for e in range(experts)]
            try:
                answers = torch.stack([one(rows) for one, rows in zip(ones, x, strict=True)])
                # Experts get any number of rows once converted, so no row may depend on the others.
                fewer = torch.stack([one(rows[:2]) for one, rows in zip(ones, x, strict=True)])
            # The module may need all places to be there
            except Exception as error:
                problem = f"it fails: {type(error).__name__}: {error!s:.300}"
                continue
            limit = TOLERANCE.get(dtype, TOLERANCE[torch.float32])
            if distance(want.reshape(answers.shape), answers) > limit:
                problem = "its answer is another"
            elif distance(answers[:, :2], fewer) > limit:
                problem = "a row of its answer depends on other rows"
                break
            else:
                return places
    raise ConversionError(f"{who}: cut into {experts} experts, {problem}")
