"""Moving token rows between ranks, differentiably, and telling the runtime when a window begins.

Shape legend: N tokens, K top-k, A choices sent by this rank, B rows received by it, R ranks, E experts, D model dim (in
`send_ED` destination ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from prophet.kernels.tables import to_device
from prophet.spec import Placement, Split

# moves rows, given how many go to and come from each rank, under a name for messages
Move = Callable[[Tensor, list[int], list[int], str], Tensor]


class _AllToAll(torch.autograd.Function):
    """Send rows to their ranks forward, and their gradients back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send_rows: list[int], recv_rows: list[int], name: str, move: Move) -> Tensor:
        ctx.route = (send_rows, recv_rows, name, move)
        out = move(x, send_rows, recv_rows, name)
        # on a single rank `move` returns its input, and the output of a Function has to be another tensor
        return out.view_as(out) if out is x else out

    @staticmethod
    # `_Edge` has refused a second derivative before it comes here
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        send_rows, recv_rows, name, move = ctx.route
        # a gradient may be expanded or strided, and collectives send memory as it lies
        back = move(grads[0].contiguous(), recv_rows, send_rows, f"{name} backward")
        return back, None, None, None, None


def all_to_all(x: Tensor, send_rows: list[int], recv_rows: list[int], name: str, move: Move) -> Tensor:
    """Send consecutive rows to each rank, and receive theirs; collective, forward and backward.

    Args:
        x: Rows [A, D] in the order of the ranks that they go to.
        send_rows: How many rows of `x` go to each rank, [R].
        recv_rows: How many rows come from each rank, [R].
        name: Name of the exchange, for messages.
        move: Carries out the exchange in both passes.

    Returns:
        Rows [sum of recv_rows, D], by source rank.
    """
    out: Tensor = _AllToAll.apply(x, send_rows, recv_rows, name, move)  # type: ignore[no-untyped-call]
    return out


class _Edge(torch.autograd.Function):
    """Identity that calls `on_backward` when its gradient passes; it refuses to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on_backward: Callable[[], None]) -> Tensor:
        ctx.on_backward = on_backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # gradients are on in a backward pass under create_graph alone; the operators and the exchange of rows would
        # leave terms of the second derivative out, most of them without a word
        if torch.is_grad_enabled():
            raise RuntimeError(f"create_graph=True: {_ONCE}")
        # several gradients in one, which vmap wraps: a collective cannot send a tensor without storage
        if not torch._C._has_storage(grads[0]):
            raise RuntimeError(f"is_grads_batched=True, which vectorize=True asks for: {_ONCE}")
        ctx.on_backward()
        return grads[0], None


_ONCE = (
    "experts are differentiated once. Call backward() or torch.autograd.grad() without create_graph, penalise the "
    "gradient by a tensor behind the MoE layers, or take the difference of two gradients for a Hessian-vector product"
)


def check_plain_autograd(tensors: Iterable[Tensor] = ()) -> None:
    """Raise RuntimeError inside a transform of `torch.func`, or for a tensor with a forward-mode tangent.

    Operators and collectives would see wrapped tensors, or lose the tangents without a word.

    Args:
        tensors: What is looked at for tangents.
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"torch.func (grad, vjp, jvp, vmap, ...) cannot transform experts, which several ranks compute: {_ONCE}"
        )
    # outside forward mode the level is -1: unpacking every parameter then would cost time for nothing
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(f"forward-mode derivatives (torch.autograd.forward_ad) do not pass experts: {_ONCE}")


def on_backward(x: Tensor, call: Callable[[], None] = lambda: None) -> Tensor:
    """Return `x`; `call()` runs when the backward pass has computed the gradient of the result, if it does.

    Args:
        x: Tensor to pass on.
        call: Runs at most once per backward pass.

    Raises:
        RuntimeError: In the backward pass, where that runs under `create_graph` or with batched gradients.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    out: Tensor = _Edge.apply(x, call)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's share of a split, as row counts.

    Attributes:
        send_ED: This rank's choices of expert e for rank d, [E, D].
        send_rows: Rows to every rank, [R].
        recv_rows: Rows from every rank, [R].
        sizes: Rows of every group, in the order in which this rank computes its experts, homes first.
        runs: Of the runs of one source and one expert, in the order of the groups: where each begins among the received
            rows, its rows, and where it begins in the groups, [3, runs]. None where rows arrive in groups, as on a
            single rank.
        sizes_on_device: `sizes` as a tensor, where this route has been brought to a device.
    """

    send_ED: Tensor
    send_rows: list[int]
    recv_rows: list[int]
    sizes: list[int]
    runs: Tensor | None
    sizes_on_device: Tensor | None = None

    @classmethod
    def build(cls, split: Split, placement: Placement, rank: int, first_home: int, homes: int) -> Route:
        """Build the route of `rank` from a split that all ranks share.

        Args:
            split: Where every rank's tokens go.
            placement: Which experts each rank holds.
            rank: The rank whose route it is.
            first_home: The lowest of its home experts.
            homes: How many home experts it has, all in a row.
        """
        experts = [*range(first_home, first_home + homes), *placement.replicas_on(rank)]
        send_ED = split.sent_by(rank)
        # in numpy, whose calls take the host less time than those of torch
        recv_RE = split.received_by(rank)
        # rows arrive by source rank, then by expert ascending, while they are computed homes first
        arrival = np.sort(experts)
        lengths = recv_RE[:, arrival]
        starts = (np.cumsum(lengths) - lengths.reshape(-1)).reshape(lengths.shape)
        computed = np.searchsorted(arrival, experts)
        # runs of rows from one source for one expert, in the order in which they are computed
        runs, begins = lengths[:, computed].T.reshape(-1), starts[:, computed].T.reshape(-1)
        some = np.flatnonzero(runs)
        used = np.empty((3, len(some)), dtype=np.int64)
        used[0], used[1] = begins[some], runs[some]
        # runs that rise are in place: reordering rows would only copy them
        grouped = bool((used[0, 1:] > used[0, :-1]).all())
        if not grouped:
            np.cumsum(used[1], out=used[2])
            used[2] -= used[1]
        return cls(
            send_ED=torch.from_numpy(send_ED),
            send_rows=send_ED.sum(axis=0).tolist(),
            recv_rows=recv_RE.sum(axis=1).tolist(),
            sizes=lengths.sum(axis=0)[computed].tolist(),
            runs=None if grouped else torch.from_numpy(used),
        )

    def to(self, device: torch.device) -> Route:
        """Return the same route with its index tensors on `device`; row counts stay on the host."""
        if device.type == "cpu":
            return self
        tables = [self.send_ED, torch.tensor(self.sizes, device="cpu"), *([] if self.runs is None else [self.runs])]
        send_ED, sizes, *runs = to_device(tables, device)
        return replace(self, send_ED=send_ED, sizes_on_device=sizes, runs=runs[0] if runs else None)
