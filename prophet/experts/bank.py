"""A bank of expert feed-forward networks: the home parameters, and the pool in which replicas live for one step.

Shape legend: E experts, m experts per rank, D model dim, H hidden dim, P parameters of one expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from prophet.errors import ReplicaMemoryError
from prophet.kernels.grouped_ffn.naive import ExpertWeights
from prophet.spec import GATED, Activation, LayerShape

_averaged: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()


def _averaged_by(wrapper: nn.Module) -> frozenset[int]:
    """Identities of the parameters that a DistributedDataParallel averages; it decides on them when it is made."""
    found = _averaged.get(wrapper)
    if found is None:
        found = _averaged[wrapper] = frozenset(map(id, getattr(wrapper, "_module_parameters", ())))
    return found


class ExpertBank(nn.Module):
    """The m experts that live on this rank, as stacked parameters.

    w_in: [m, H, D] (gated: [m, 2H, D], gate rows first), w_out: [m, D, H], b_in and b_out if `bias`.
    `first_expert` is the global index of the first of them; `total_experts` is E. In a state dict every expert has
    entries of its own, `<name>.<global index>`, so that checkpoints do not depend on the number of ranks.
    """

    b_in: nn.Parameter | None
    b_out: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        *,
        first_expert: int = 0,
        total_experts: int | None = None,
        ep_size: int = 1,
        activation: Activation = "gelu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.dim, self.hidden, self.experts = dim, hidden, experts
        self.first_expert = first_expert
        self.total_experts = experts if total_experts is None else total_experts
        self.activation: Activation = activation
        rows = 2 * hidden if activation in GATED else hidden
        self.w_in = nn.Parameter(torch.empty(experts, rows, dim))
        self.w_out = nn.Parameter(torch.empty(experts, dim, hidden))
        self.b_in = nn.Parameter(torch.empty(experts, rows)) if bias else None
        self.b_out = nn.Parameter(torch.empty(experts, dim)) if bias else None
        self.ep_size = ep_size
        self.grad_scale = 1.0 / ep_size
        self._mark()
        self.reset_parameters()

    @classmethod
    def from_weights(
        cls,
        weights: Sequence[ExpertWeights],
        activation: Activation,
        *,
        first_expert: int = 0,
        total_experts: int | None = None,
        ep_size: int = 1,
    ) -> ExpertBank:
        """A bank of copies of the `weights` of single experts, on their device and of their dtype."""
        dim, hidden = weights[0].w_out.shape
        with torch.device("meta"):
            bank = cls(
                dim,
                hidden,
                len(weights),
                first_expert=first_expert,
                total_experts=total_experts,
                ep_size=ep_size,
                activation=activation,
                bias=weights[0].b_in is not None,
            )
        for name, p in list(bank.stacked()):
            value = torch.stack([getattr(w, name).detach() for w in weights])
            if value.shape != p.shape:
                raise ValueError(f"{name}: expected {list(p.shape)} for {activation} experts, got {list(value.shape)}")
            setattr(bank, name, nn.Parameter(value, requires_grad=value.is_floating_point()))
        bank._mark()
        return bank

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

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform in ±1/sqrt(fan in), as `nn.Linear`; expert e gets the same values at any number of ranks."""
        if self.w_in.is_meta:
            return
        seed = int(torch.randint(0, 1 << 62, ()).item())
        for local in range(self.experts):
            generator = torch.Generator(device="cpu").manual_seed(
                (seed + 0x9E3779B97F4A7C15 * (self.first_expert + local + 1)) % (1 << 63)
            )
            for name, p in self.stacked():
                bound = 1.0 / math.sqrt(self.dim if name.endswith("in") else self.hidden)
                draw = torch.empty(p.shape[1:], dtype=torch.float32).uniform_(-bound, bound, generator=generator)
                p[local].copy_(draw)

    def check_parameters(self) -> None:
        """Raise ValueError where the parameters are not of one dtype, or something mixes different ranks' experts."""
        p = self.w_in
        # FSDP takes the ranks' experts for parts of one tensor, and loses the marks
        if self.ep_size > 1 and isinstance(p, nn.Parameter) and not hasattr(p, "prophet_expert"):
            raise ValueError(
                "the experts' parameters were replaced by others, as fully_shard() does, which would mix the experts "
                "of different ranks: call it with "
                "ignored_params={p for _, p in prophet.parallel.expert_parameters(model)}"
            )
        wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)  # the one whose forward pass this is
        if self.ep_size > 1 and wrapper is not None and id(p) in _averaged_by(wrapper):
            raise ValueError(
                "DistributedDataParallel averages the experts' parameters, which are others on every rank: call "
                "prophet.attach (with planner='static' for no balancing) or prophet.parallel.ExpertReplicas before "
                "wrapping the model"
            )
        if any(q.dtype != p.dtype for _, q in self.stacked()):
            found = ", ".join(f"{name} {q.dtype}" for name, q in self.stacked())
            raise ValueError(f"the experts' parameters must have one dtype, got {found}")

    def stacked(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The stacked parameters in the order in which an expert's flat vector lists them."""
        for name in ("w_in", "b_in", "w_out", "b_out"):
            p = getattr(self, name)
            if p is not None:
                yield name, p

    def stacked_weights(self) -> ExpertWeights:
        """The home experts' parameters as they are: stacked, their gradients unscaled."""
        return ExpertWeights(self.w_in, self.w_out, self.b_in, self.b_out)

    def shape(self) -> LayerShape:
        """The sizes the performance model needs, at the parameters' precision."""
        size = self.w_in.element_size()
        return LayerShape(
            dim=self.dim,
            hidden=self.hidden,
            activation=self.activation,
            bias=self.b_in is not None,
            param_bytes=size,
            grad_bytes=size,
            token_element_bytes=size,
        )

    @property
    def expert_numel(self) -> int:
        """P: parameters of one expert."""
        return sum(p[0].numel() for _, p in self.stacked())

    # --- an expert as a flat vector, what Trans and Agg move ---

    @torch.no_grad()
    def flat_slice(self, local: int, start: int, stop: int) -> Tensor:
        """Elements start..stop of the flat parameter vector of home expert `local`, in pieces joined together."""
        pieces = self.flat_views(local, start, stop)
        return torch.cat(pieces) if pieces else self.w_in.new_empty(0)

    def flat_views(self, local: int, start: int, stop: int) -> list[Tensor]:
        """The same elements where they are: one flat view for every parameter that has some of them."""
        return [p.detach()[local].reshape(-1)[a:b] for p, a, b in self._overlaps(start, stop)]

    @torch.no_grad()
    def add_flat_grad(self, local: int, start: int, stop: int, piece: Tensor) -> None:
        """Add `piece` (elements start..stop of a flat gradient, unscaled) to the gradients of home expert `local`."""
        offset = 0
        for p, a, b in self._overlaps(start, stop):
            n = b - a
            if p.requires_grad:
                if p.grad is None:
                    p.grad = torch.zeros_like(p, memory_format=torch.contiguous_format)
                elif not p.grad.is_contiguous():
                    p.grad = p.grad.contiguous()
                p.grad[local].view(-1)[a:b].add_(piece[offset : offset + n], alpha=self.grad_scale)
            offset += n

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[nn.Parameter, int, int]]:
        base = 0
        for _, p in self.stacked():
            n = p[0].numel()
            a, b = max(start - base, 0), min(stop - base, n)
            if a < b:
                yield p, a, b
            base += n

    # --- checkpoints that do not depend on the number of ranks ---

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, p in self.stacked():
            for local in range(self.experts):
                value = p[local] if keep_vars else p[local].detach()
                destination[f"{prefix}{name}.{self.first_expert + local}"] = value

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        expected = {f"{prefix}{name}.{e}" for name, _ in self.stacked() for e in range(self.total_experts)}
        for name, p in self.stacked():
            for local in range(self.experts):
                key = f"{prefix}{name}.{self.first_expert + local}"
                value = state_dict.get(key)
                if value is None:
                    missing_keys.append(key)
                elif p.is_meta:
                    error_msgs.append(f"{key}: the experts are on the meta device; call to_empty(device=...) first")
                elif not isinstance(value, Tensor) or value.shape != p.shape[1:]:
                    got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                    error_msgs.append(f"{key}: expected a tensor of shape {list(p.shape[1:])}, got {got}")
                else:
                    with torch.no_grad():
                        p[local].copy_(value)
        if strict:
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in expected]


# --- replicas ---


@dataclass(slots=True)
class Replica:
    """One expert's parameters on a rank that is not its home, for one step.

    `params` and `grads` are flat, [P]; `weights` are leaf views of `params` whose gradients accumulate into `grads`.
    """

    expert: int
    params: Tensor
    grads: Tensor
    weights: ExpertWeights

    @classmethod
    def build(cls, expert: int, bank: ExpertBank, params: Tensor, grads: Tensor) -> Replica:
        """A replica of `expert` whose weights are views of the flat `params`, and their gradients of `grads`."""
        views: dict[str, Tensor] = {}
        base = 0
        for name, p in bank.stacked():
            n = p[0].numel()
            leaf = params[base : base + n].view(p.shape[1:]).detach()
            leaf.requires_grad_(p.requires_grad)
            if p.requires_grad:
                leaf.grad = grads[base : base + n].view(p.shape[1:])
            views[name] = leaf
            base += n
        return cls(expert, params, grads, ExpertWeights(**views))

    def weight_grads(self) -> ExpertWeights:
        """Where the gradients of `weights` accumulate: views of `grads`, None for what is frozen or not there."""
        self.collect_grads()
        return ExpertWeights(*(None if w is None else w.grad for w in self.weights))  # type: ignore[arg-type]

    def collect_grads(self) -> None:
        """Make sure `grads` holds what autograd accumulated, also where it replaced `.grad` by a new tensor."""
        base = 0
        for name in ("w_in", "b_in", "w_out", "b_out"):
            leaf = getattr(self.weights, name)
            if leaf is None:
                continue
            n = leaf.numel()
            view = self.grads[base : base + n]
            if leaf.grad is not None and leaf.grad.data_ptr() != view.data_ptr():
                view.copy_(leaf.grad.reshape(-1))
                leaf.grad = view.view(leaf.shape)
            base += n


class ReplicaPool:
    """Memory for replicas, shared by all layers of a model and bounded in bytes.

    Buffers are kept for reuse; `in_use_bytes` counts those lent out, `held_bytes` all that were ever allocated.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(f"budget_bytes must not be negative, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.in_use_bytes = 0
        self.held_bytes = 0
        self._free: dict[tuple[int, torch.dtype, torch.device], list[tuple[Tensor, Tensor, bool]]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Lend a flat parameter buffer and a zeroed gradient buffer of `numel` elements."""
        free = self._free.setdefault((numel, dtype, device), [])
        size = 2 * numel * dtype.itemsize
        self._check_budget(size)
        if free:
            params, grads, zeroed = free.pop()
            if not zeroed:
                grads.zero_()
        else:
            self._make_room(size)
            params = torch.empty(numel, dtype=dtype, device=device)
            grads = torch.zeros(numel, dtype=dtype, device=device)
            self.held_bytes += size
        self.in_use_bytes += size
        return params, grads

    def release(self, params: Tensor) -> None:
        """Free a lent parameter buffer's memory; the tensor and its views stay, empty until `restore`."""
        size = params.numel() * params.element_size()
        params.untyped_storage().resize_(0)
        self.in_use_bytes -= size
        self.held_bytes -= size

    def restore(self, params: Tensor) -> None:
        """Give a released parameter buffer its memory back; what is in it is undefined."""
        size = params.numel() * params.element_size()
        self._check_budget(size)
        self._make_room(size)
        params.untyped_storage().resize_(size)
        self.in_use_bytes += size
        self.held_bytes += size

    def give(self, params: Tensor, grads: Tensor, *, zeroed: bool = False) -> None:
        """Take buffers back; `zeroed` says that every gradient is zero, and saves doing so when they are lent again."""
        if params.numel() and not params.untyped_storage().size():
            # the parameters are gone already, and half a pair is of no use
            size = grads.numel() * grads.element_size()
            self.in_use_bytes -= size
            self.held_bytes -= size
            return
        self._free[(params.numel(), params.dtype, params.device)].append((params, grads, zeroed))
        self.in_use_bytes -= 2 * params.numel() * params.element_size()

    def _check_budget(self, size: int) -> None:
        if self.budget_bytes is not None and self.in_use_bytes + size > self.budget_bytes:
            raise ReplicaMemoryError(
                f"a replica needs {size} bytes, but {self.in_use_bytes} of the budget's {self.budget_bytes} are in use"
            )

    def _make_room(self, size: int) -> None:
        """Drop free buffers of other sizes where keeping them would exceed the budget."""
        if self.budget_bytes is None:
            return
        for (numel, dtype, _), buffers in self._free.items():
            while buffers and self.held_bytes + size > self.budget_bytes:
                buffers.pop()
                self.held_bytes -= 2 * numel * dtype.itemsize
