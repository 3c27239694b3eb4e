"""What the layers, the engine and checkpoints need of the experts that live on this rank.

An expert is one flat vector to those that move it: Trans brings its P parameters to a replica, Agg brings the G
gradients of those that train back. What is in the vector, and how an expert computes, a bank alone knows.

Shape legend: m experts of this rank, E experts, P parameters of one expert, G those of them that train, B rows, D model
dim, O output dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from prophet.experts.replica import Replica, ReplicaPool
from prophet.kernels.choice import Impl
from prophet.spec import LayerShape

_T = TypeVar("_T", bound=Tensor)
_averaged: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()


def _averaged_by(wrapper: nn.Module) -> frozenset[int]:
    """Identities of the parameters that a DistributedDataParallel averages; it decides on them when it is made."""
    found = _averaged.get(wrapper)
    if found is None:
        found = _averaged[wrapper] = frozenset(map(id, getattr(wrapper, "_module_parameters", ())))
    return found


@dataclass(frozen=True, slots=True)
class Entry:
    """One expert's share of one of a bank's parameters, as a checkpoint has it.

    expert: its number among all. pattern: the share's name in the bank's state dict, with a star for the number.
    parameter: the name of what holds it. index: where it is in there.
    """

    expert: int
    pattern: str
    parameter: str
    index: tuple[int | slice, ...]

    @property
    def key(self) -> str:
        """The share's name in the bank's state dict."""
        return self.pattern.replace("*", str(self.expert), 1)

    def of(self, value: Tensor) -> Tensor:
        """The share of `value`, the parameter or an optimizer's state of its shape: a view."""
        return value[self.index]


class Bank(nn.Module):
    """The m experts that live on this rank, `first_expert` and those that follow it, of `total_experts`.

    dim: D, of the rows. dim_out: O, of the answers. grad_scale: factor on the gradients of home experts, once per
    backward pass; 1 / ep_size makes sums over the ranks of a group means.
    """

    dim: int
    dim_out: int
    experts: int

    def __init__(self, experts: int, *, first_expert: int, total_experts: int | None, ep_size: int) -> None:
        super().__init__()
        self.experts = experts
        self.first_expert = first_expert
        self.total_experts = experts if total_experts is None else total_experts
        self.ep_size = ep_size
        self.grad_scale = 1.0 / ep_size

    # --- what it computes with ---

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters; of the first where they have several."""
        return self._any().dtype

    @abstractmethod
    def row_dtype(self, x: Tensor) -> torch.dtype:
        """In which precision the rows of `x` travel to the experts."""

    @property
    def device(self) -> torch.device:
        return self._any().device

    @abstractmethod
    def run(
        self, rows: Tensor, sizes: Sequence[int], replicas: Sequence[Replica] = (), *, impl: Impl = "auto"
    ) -> Tensor:
        """Answers [B, O] to `rows` [B, D], in groups of these sizes: the m home experts', then the replicas'."""

    @abstractmethod
    def shape(self) -> LayerShape:
        """The sizes the performance model needs, at the parameters' precision."""

    @abstractmethod
    def signature(self) -> str:
        """What must be equal on all ranks, as text."""

    def version(self) -> int:
        """Grows with every change of the parameters in place."""
        return sum(p._version for p in self.parameters())

    # --- an expert as a flat vector, what Trans and Agg move ---

    @property
    def expert_numel(self) -> int:
        """P: parameters of one expert."""
        return sum(n for n, _ in self._sizes())

    @property
    def flat_dtype(self) -> torch.dtype:
        """Of the vector of parameters."""
        return self.dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """Of the vector of gradients."""
        return self.dtype

    @property
    def grad_numel(self) -> int:
        """G: those of them that train."""
        return sum(n for n, requires_grad in self._sizes() if requires_grad)

    @abstractmethod
    def _sizes(self) -> list[tuple[int, bool]]:
        """Elements of each of an expert's parameters, in the order of its flat vector, and whether it trains."""

    def requires_grad(self) -> list[bool]:
        """Which parameters of an expert train in one of the home experts at least; empty where they are stacked."""
        return []

    def settle(self, requires_grad: Sequence[bool]) -> None:
        """Of what replicas have gradients: what `requires_grad` on one rank at least."""

    def structure_digest(self) -> int:
        """What must be equal on all ranks for a replica to compute as its expert does; 56 bits."""
        return 0

    @abstractmethod
    def replica(self, expert: int, pool: ReplicaPool) -> Replica:
        """A replica of `expert`, which lives elsewhere, in the pool's memory; its parameters are still to come."""

    @abstractmethod
    def flat_views(self, local: int, start: int, stop: int) -> list[Tensor]:
        """Elements start..stop of the P parameters of home expert `local`: a view of every parameter in it."""

    @abstractmethod
    def add_flat_grad(self, local: int, start: int, stop: int, piece: Tensor) -> None:
        """Add `piece`, elements start..stop of G gradients, not scaled, to the gradients of home expert `local`."""

    def share_over(self, rank: int, ranks: int) -> None:
        """Be the experts of one of so many ranks, whose parameters are put in place by the caller.

        Raises ValueError for experts that cannot be shared anew.
        """
        if (rank * self.experts, ranks) != (self.first_expert, self.ep_size):
            raise ValueError(f"{type(self).__name__}: experts that are modules stay on their ranks")

    # --- names ---

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """What a checkpoint holds of the home experts, by expert."""

    @abstractmethod
    def all_keys(self) -> set[str]:
        """The keys of the entries of all E experts."""

    # --- what is checked ---

    def check_parameters(self) -> None:
        """Raise ValueError where something mixes the experts of different ranks."""
        p = self._any()
        # FSDP takes the ranks' experts for parts of one tensor, and loses the marks
        if self.ep_size > 1 and isinstance(p, nn.Parameter) and not hasattr(p, "prophet_expert"):
            raise ValueError(
                "the experts' parameters were replaced by others, as fully_shard() does, which would mix the experts "
                "of different ranks: call it with "
                "ignored_params={p for _, p in prophet.parallel.expert_parameters(model)}, and write new values of an "
                "expert into the parameters that it has"
            )
        wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)  # the one whose forward pass this is
        if self.ep_size > 1 and wrapper is not None and id(p) in _averaged_by(wrapper):
            raise ValueError(
                "DistributedDataParallel averages the experts' parameters, which are others on every rank: call "
                "prophet.attach (with planner='static' for no balancing) or prophet.parallel.ExpertReplicas before "
                "wrapping the model"
            )

    def _any(self) -> Tensor:
        """One of the parameters, by which to know what all have in common."""
        return next(self.parameters())

    # --- marks ---

    def _mark(self) -> None:
        """Mark the parameters with what DeepSpeed reads: an expert's gradient, and of which group of ranks."""
        for p in self.parameters():
            p.allreduce = False  # type: ignore[attr-defined]
            p.group_name = f"ep_size_{self.ep_size}"  # type: ignore[attr-defined]
            p.prophet_expert = True  # type: ignore[attr-defined]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark()  # moving off the meta device makes new parameters
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()  # a copied parameter has lost its attributes


def overlaps(parts: Sequence[_T], start: int, stop: int, *, shares: int = 1) -> Iterator[tuple[_T, int, int]]:
    """Those of `parts`, laid end to end, that are in elements start..stop, and from where to where.

    shares: how many experts each of the parts is of, in equal shares; the elements are one expert's.
    """
    base = 0
    for part in parts:
        n = part.numel() // shares
        a, b = max(start - base, 0), min(stop - base, n)
        if a < b:
            yield part, a, b
        base += n


def gradient_of(p: nn.Parameter) -> Tensor:
    """The gradient of `p`, contiguous; zeros where it had none."""
    if p.grad is None:
        p.grad = torch.zeros_like(p, memory_format=torch.contiguous_format)
    elif not p.grad.is_contiguous():
        p.grad = p.grad.contiguous()
    return p.grad
