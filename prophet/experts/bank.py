"""What the layers, the engine and checkpoints need of the experts that live on this rank.

An expert is one flat vector to those that move it: Trans brings its P parameters to a replica, Agg brings the G
gradients of those that train back. What is in the vector, and how an expert computes, a bank alone knows.

Shape legend: m experts of this rank, E experts, P parameters of one expert, G those of them that train, B rows, D model
dim, O output dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
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
# kept per wrapper, and asked in every forward pass: a model may have thousands of parameters
_averaged: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()


def _averaged_by(wrapper: nn.Module) -> frozenset[int]:
    """Return ids of the parameters that a DistributedDataParallel averages; it decides on them when it is made."""
    found = _averaged.get(wrapper)
    if found is None:
        found = _averaged[wrapper] = frozenset(map(id, getattr(wrapper, "_module_parameters", ())))
    return found


@dataclass(frozen=True, slots=True)
class Entry:
    """One expert's share of one of a bank's parameters, as a checkpoint has it.

    Attributes:
        expert: Its number among all.
        pattern: The share's name in the bank's state dict, with a star for the number.
        parameter: The name of what holds it.
        index: Where it is in there.
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
        """Return the share of `value`, the parameter or an optimizer's state of its shape: a view."""
        return value[self.index]


class Bank(nn.Module):
    """The m experts that live on this rank, `first_expert` and those that follow it, of `total_experts`.

    Args:
        experts: m, how many live here.
        first_expert: Number among all of the first of them.
        total_experts: E; None where all live here.
        ep_size: Ranks that share the experts.

    Attributes:
        dim: D, of the rows.
        dim_out: O, of the answers.
        grad_scale: Factor on the gradients of home experts, once per backward pass; 1 / ep_size makes sums over the
            ranks of a group means.
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
        """Dtype of the parameters; of the first where they have several."""
        return self._any().dtype

    @abstractmethod
    def row_dtype(self, x: Tensor) -> torch.dtype:
        """Return the precision in which the rows of `x` travel to the experts."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self._any().device

    @abstractmethod
    def run(
        self,
        rows: Tensor,
        sizes: Sequence[int],
        replicas: Sequence[Replica] = (),
        *,
        sizes_on_device: Tensor | None = None,
        impl: Impl = "auto",
    ) -> Tensor:
        """Compute the experts' answers.

        Args:
            rows: Rows [B, D], in groups: the m home experts', then the replicas'.
            sizes: Rows of every group.
            sizes_on_device: The same as an int64 tensor on the device of `rows`, where it is there already.
            replicas: What this rank holds of other ranks' experts.
            impl: Which kernels run, see `prophet.kernels.choice`.

        Returns:
            Answers [B, O], in the order of the rows.
        """

    @abstractmethod
    def shape(self) -> LayerShape:
        """Return the sizes that the performance model needs, at the parameters' precision."""

    @abstractmethod
    def signature(self) -> str:
        """Return, as text, what must be equal on all ranks."""

    def version(self) -> int:
        """Return a number that grows with every change of the parameters in place."""
        return sum(p._version for p in self.parameters())

    # --- an expert as a flat vector, what Trans and Agg move ---

    @property
    def expert_numel(self) -> int:
        """P: elements of one expert's flat vector of parameters."""
        return sum(n for n, _ in self._sizes())

    @property
    def flat_dtype(self) -> torch.dtype:
        """Dtype of the flat vector of parameters."""
        return self.dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """Dtype of the flat vector of gradients."""
        return self.dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype of a sum of replicas' gradients, until the home has added it to its own."""
        return torch.float32 if self.grad_dtype in (torch.float16, torch.bfloat16) else self.grad_dtype

    @property
    def grad_numel(self) -> int:
        """G: elements of one expert's flat vector of gradients, those of parameters that train."""
        return sum(n for n, requires_grad in self._sizes() if requires_grad)

    @abstractmethod
    def _sizes(self) -> list[tuple[int, bool]]:
        """Return, in the order of the flat vector, each parameter's elements and whether it trains."""

    def requires_grad(self) -> list[bool]:
        """Return which parameters of an expert train in any of the home experts; empty where they are stacked."""
        return []

    def settle(self, requires_grad: Sequence[bool]) -> None:
        """Fix which parameters have gradients in replicas.

        Args:
            requires_grad: By parameter, whether it trains in any expert of any rank.
        """

    def structure_digest(self) -> int:
        """Return 56 bits that must be equal on all ranks for a replica to compute as its expert does."""
        return 0

    @abstractmethod
    def replica(self, expert: int, pool: ReplicaPool) -> Replica:
        """Return a replica of `expert`, which lives elsewhere, in the pool's memory; its values are still to come."""

    @abstractmethod
    def flat_views(self, local: int, start: int, stop: int) -> list[Tensor]:
        """Return views of a stretch of a home expert's flat vector of parameters, one for every parameter in it.

        Args:
            local: Place of the expert among those at home.
            start: First of the P elements.
            stop: End of the stretch.
        """

    @torch.no_grad()
    def add_flat_grads(self, pieces: Iterable[tuple[int, int, int, Tensor]]) -> None:
        """Add to stretches of home experts' gradients, in one launch.

        Args:
            pieces: Place of an expert among those at home, first of its G elements, end of the stretch, and what is
                added there, [end - first], not yet multiplied by `grad_scale`. No two meet.
        """
        found = [pair for piece in pieces for pair in self._under(*piece)]
        if found:
            torch._foreach_add_([mine for mine, _ in found], [part for _, part in found], alpha=self.grad_scale)

    @abstractmethod
    def _under(self, local: int, start: int, stop: int, piece: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each part of a stretch of a home expert's gradients, flat, and the part of `piece` that it gets.

        Args:
            local: Place of the expert among those at home.
            start: First of the G elements.
            stop: End of the stretch.
            piece: [stop - start].
        """

    def share_over(self, rank: int, ranks: int) -> None:
        """Become the experts of one of so many ranks; the caller puts their parameters in place.

        Args:
            rank: This rank's place among them.
            ranks: How many share the experts.

        Raises:
            ValueError: The experts cannot be shared anew.
        """
        if (rank * self.experts, ranks) != (self.first_expert, self.ep_size):
            raise ValueError(f"{type(self).__name__}: experts that are modules stay on their ranks")

    # --- names ---

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """Yield what a checkpoint holds of the home experts, by expert."""

    @abstractmethod
    def all_keys(self) -> set[str]:
        """Return the keys of the entries of all E experts."""

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
        # the one whose forward pass this is
        wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if self.ep_size > 1 and wrapper is not None and id(p) in _averaged_by(wrapper):
            raise ValueError(
                "DistributedDataParallel averages the experts' parameters, which are others on every rank: call "
                "prophet.attach (with planner='static' for no balancing) or prophet.parallel.ExpertReplicas before "
                "wrapping the model"
            )

    def _any(self) -> Tensor:
        """Return one of the parameters, by which to know what all have in common."""
        return next(self.parameters())

    # --- marks ---

    def _mark(self) -> None:
        """Mark the parameters as an expert's by attributes that DeepSpeed reads: what they are, and of which group."""
        for p in self.parameters():
            p.allreduce = False  # type: ignore[attr-defined]
            p.group_name = f"ep_size_{self.ep_size}"  # type: ignore[attr-defined]
            p.prophet_expert = True  # type: ignore[attr-defined]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # moving off the meta device makes new parameters, without marks
        self._mark()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # a copied parameter has lost its attributes
        self._mark()


def overlaps(parts: Sequence[_T], start: int, stop: int, *, shares: int = 1) -> Iterator[tuple[_T, int, int]]:
    """Yield those parts that meet a stretch of elements, and from where to where in each.

    Args:
        parts: Tensors laid end to end.
        start: First element of the stretch.
        stop: End of the stretch.
        shares: How many experts each of the parts is of, in equal shares; the elements are one expert's.
    """
    base = 0
    for part in parts:
        n = part.numel() // shares
        a, b = max(start - base, 0), min(stop - base, n)
        if a < b:
            yield part, a, b
        base += n


def gradient_of(p: nn.Parameter) -> Tensor:
    """Return the gradient of `p`, contiguous; zeros where it had none."""
    if p.grad is None:
        # flat views of it are written to, which a parameter's own strides may not allow
        p.grad = torch.zeros_like(p, memory_format=torch.contiguous_format)
    elif not p.grad.is_contiguous():
        p.grad = p.grad.contiguous()
    return p.grad


class RunsReplicas(Bank):
    """A bank whose replicas can run apart from the experts at home."""

    @abstractmethod
    def run_replicas(
        self,
        rows: Tensor,
        sizes: Sequence[int],
        replicas: Sequence[Replica],
        *,
        sizes_on_device: Tensor | None = None,
        impl: Impl = "auto",
    ) -> Tensor:
        """Compute the answers of replicas alone, of one or more; `run` computes those of the home experts then.

        Args:
            rows: Rows [B, D] in the replicas' groups.
            sizes: Rows of every group.
            replicas: What this rank holds of other ranks' experts.
            sizes_on_device: As in `run`.
            impl: Which kernels run, see `prophet.kernels.choice`.

        Returns:
            Answers [B, O], in the order of the rows.
        """
