"""Whether this release of torch gives in two halves what it gives in one backward pass; tried before it is relied on.

The graphs are those that people's layers make, on a few deterministic numbers. No random number is drawn.

Shape legend: N rows, D numbers of a row; N = D, so that gradients may be passed on as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline_balance.pipeline.model.halves import first_half
from prophet.errors import SpecError

_D, _PASSES = 4, 2
Graph = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
"""A stage: from its input [N, D] and its weights [D, D], [D, D] and [D] to its outputs."""


class _Times(torch.autograd.Function):
    """A custom autograd function, as users write them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.t(), x.t() @ grads[0]


_times: Callable[[Tensor, Tensor], Tensor] = _Times.apply


def _attention(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    query, key = (x @ a)[None, None], (x @ b)[None, None]
    return F.scaled_dot_product_attention(query, key, query)[0, 0]


def _in_turns(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    state = torch.zeros_like(x)
    for _ in range(3):
        state = torch.tanh(state @ a + x @ b + c)
    return state


def _block(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    for _ in range(2):
        h = F.layer_norm(x, (_D,), c, c)
        x = x + F.silu(h @ a) * (h @ b) @ a.t()
    return x


def _experts(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The second expert gets no rows in one of the passes."""
    weights, out = (x @ a).softmax(-1), torch.zeros_like(x)
    for e, expert in enumerate((a, b)):
        rows = (weights[:, 0] > weights[:, 1] if e else weights[:, 0] >= 0).nonzero()[:, 0]
        out = out.index_add(0, rows, torch.tanh(x[rows] @ expert) * weights[rows, e : e + 1])
    return x + out


def _recomputed(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A layer as checkpointing runs it: what backward needs is computed during backward."""
    # `t * 1` stands for a second forward: what is unpacked is another tensor than what was packed
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t * 1):
        return x + torch.tanh(x @ a) @ a


def _in_place(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (x @ a * 2).add_(c).sigmoid_() @ a


GRAPHS: Mapping[str, Graph] = {
    "a weight used once": lambda x, a, b, c: x + torch.tanh(x @ a + c) @ b,
    "a weight used twice in a row": lambda x, a, b, c: x + F.linear(torch.tanh(F.linear(x, a, c)), a, c),
    "weights used in turns": _in_turns,
    "a weight used in parallel branches": lambda x, a, b, c: torch.tanh(x @ a) @ b + torch.sigmoid(x @ a),
    "a tied weight": lambda x, a, b, c: torch.tanh(x @ a) @ a.t(),
    "slices of a weight": lambda x, a, b, c: torch.cat([torch.tanh(x @ a[:, :2]), x @ a[:, 2:]], 1) @ a,
    "a weight made of others": lambda x, a, b, c: torch.tanh(x @ (a + b @ b)) @ (a + b @ b),
    "a weight in another precision": lambda x, a, b, c: torch.tanh(x.float() @ a.float()) @ a.float() + c.float(),
    "frozen weights": lambda x, a, b, c: torch.tanh(x @ a.detach()) @ b @ a.detach(),
    "a norm and two projections": _block,
    "experts": _experts,
    "several outputs": lambda x, a, b, c: (x @ a, torch.tanh(x @ a) @ a * c, x),
    "an output that depends on weights alone": lambda x, a, b, c: (x @ a, (a * b).sum(), c * 2),
    "a view as the output": lambda x, a, b, c: torch.tanh(x @ a).view(1, _D, _D)[0].t(),
    "gradients that are passed on": lambda x, a, b, c: x + a + b + c.sum(),
    "attention": _attention,
    "a function of one's own": lambda x, a, b, c: _times(torch.tanh(_times(x, a)), a),
    "operations in place": _in_place,
    "recomputing": _recomputed,
}


def _numbers(*shape: int, by: float) -> Tensor:
    count = torch.Size(shape).numel()
    # sines instead of random numbers: the check runs inside a user's process, whose random stream must not change
    return (torch.arange(count, dtype=torch.float64, device="cpu") * 0.7 + by).sin().reshape(shape)


def gradients(graph: Graph, *, split: bool) -> list[Tensor | None]:
    """Return the gradients of the inputs of some passes, and of the weights after all of them."""
    weights = [_numbers(_D, _D, by=1.1), _numbers(_D, _D, by=2.3), _numbers(_D, by=3.9)]
    inputs = [_numbers(_D, _D, by=0.1 + n) for n in range(_PASSES)]
    for leaf in (*weights, *inputs):
        leaf.requires_grad_()
    for x in inputs:
        made = graph(x, *weights)
        # several passes add to the same weights, as microbatches do
        outputs = made if isinstance(made, tuple) else (made,)
        grads = [_numbers(*t.shape, by=0.5 + i).to(t.dtype) for i, t in enumerate(outputs)]
        if split:
            (x.grad,), second = first_half(outputs, grads, [x], weights)
            second.run()
        else:
            torch.autograd.backward(outputs, grads)
    return [leaf.grad for leaf in (*inputs, *weights)]


def differing(graphs: Mapping[str, Graph]) -> list[str]:
    """The graphs whose gradients in two halves are others than in one pass."""
    found = []
    # a pipeline may be built inside `no_grad`, where there would be no graph to try
    with torch.inference_mode(False), torch.enable_grad():
        for name, graph in graphs.items():
            try:
                pairs = zip(gradients(graph, split=False), gradients(graph, split=True), strict=True)
                same = all(_alike(one, other) for one, other in pairs)
            except Exception:
                # whatever it is, a step would meet it too
                same = False
            if not same:
                found.append(name)
    return found


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    # not bit for bit: two halves may add the parts of a gradient in another order
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@cache
def check_halves() -> None:
    """Raise `SpecError` where two halves are not what one pass is; looks once per process, for milliseconds."""
    wrong = differing(GRAPHS)
    if wrong:
        raise SpecError(
            f"split_backward=True: with torch {torch.__version__} a backward pass in two halves gives other gradients "
            f"than a whole one ({', '.join(wrong)}): write split_backward=False"
        )
