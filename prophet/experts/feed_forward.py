"""A bank of feed-forward networks: stacked parameters, on the grouped kernels.

Shape legend: E experts, m experts per rank, D model dim, H hidden dim, O output dim, P parameters of one expert, G
those of them that train, B rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prophet.experts.bank import Entry, RunsReplicas, gradient_of, overlaps
from prophet.experts.replica import Replica, ReplicaPool
from prophet.kernels.choice import Impl
from prophet.kernels.grouped_ffn import ExpertWeights, grouped_ffn
from prophet.spec import (
    Activation,
    Bias,
    LayerShape,
    activation_named,
    bias_of,
    check_experts_per_rank,
    has_biases,
    parts_of,
)

# the stacked parameters in the order of an expert's flat vector, and what kernels call them
_FIELDS = {"w_in": "w_in", "bias_in": "b_in", "w_out": "w_out", "bias_out": "b_out"}


class FeedForwardBank(RunsReplicas):
    """The m experts that live on this rank, as stacked parameters.

    Biases are flat, and called `bias`, for rules that tell an optimizer's groups by name or dimension. In a state dict
    every expert has separate entries, `<name>.<global index>`, so that checkpoints do not depend on the number of
    ranks.

    Args:
        dim: D, of the rows.
        hidden: H, the inner size.
        experts: m, how many live here.
        first_expert: Global index of the first of them.
        total_experts: E; None where all live here.
        ep_size: Ranks that share the experts.
        activation: A name from `prophet.spec.ACTIVATIONS`, or one with a limit.
        bias: Which matrices have biases, see `prophet.spec.has_biases`.
        dim_out: O, of the answers; None for D.

    Attributes:
        w_in: [m, H, D]; gated: [m, 2H, D], gate rows first.
        w_out: [m, O, H].
        bias_in: [m H], or [m 2H] where gated; None without.
        bias_out: [m O]; None without.
    """

    bias_in: nn.Parameter | None
    bias_out: nn.Parameter | None

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
        bias: Bias = True,
        dim_out: int | None = None,
    ) -> None:
        super().__init__(experts, first_expert=first_expert, total_experts=total_experts, ep_size=ep_size)
        b_in, b_out = has_biases(bias)
        self.dim, self.dim_out, self.hidden = dim, dim if dim_out is None else dim_out, hidden
        parts = parts_of(activation)
        # one spelling, as ranks compare signatures
        self.activation = activation_named(parts)
        rows = 2 * hidden if parts.gated else hidden
        self.w_in = nn.Parameter(torch.empty(experts, rows, dim))
        self.w_out = nn.Parameter(torch.empty(experts, self.dim_out, hidden))
        self.bias_in = nn.Parameter(torch.empty(experts * rows)) if b_in else None
        self.bias_out = nn.Parameter(torch.empty(experts * self.dim_out)) if b_out else None
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
    ) -> FeedForwardBank:
        """Make a bank of copies of single experts' weights, on their device and of their dtype.

        Args:
            weights: Of the m experts that live here.
            activation: A name from `prophet.spec.ACTIVATIONS`, or one with a limit.
            first_expert: Global index of the first of them.
            total_experts: E; None where all live here.
            ep_size: Ranks that share the experts.

        Raises:
            ValueError: Weights have shapes that do not fit the activation.
        """
        first = weights[0]
        dim_out, hidden = first.w_out.shape
        # its parameters are replaced below: drawing values for them would take time and memory, and move the generator
        with torch.device("meta"):
            bank = cls(
                first.w_in.shape[1],
                hidden,
                len(weights),
                first_expert=first_expert,
                total_experts=total_experts,
                ep_size=ep_size,
                activation=activation,
                bias=bias_of(first.b_in, first.b_out),
                dim_out=dim_out,
            )
        for name, p in list(bank._stacked()):
            value = torch.stack([getattr(w, _FIELDS[name]).detach() for w in weights])
            value = value.flatten() if p.dim() == 1 else value
            if value.shape != p.shape:
                raise ValueError(f"{name}: expected {list(p.shape)} for {activation} experts, got {list(value.shape)}")
            # torch refuses an integer parameter that requires a gradient
            setattr(bank, name, nn.Parameter(value, requires_grad=value.is_floating_point()))
        bank._mark()
        return bank

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw uniformly in ±1/sqrt(fan in), as `nn.Linear`; expert e gets the same values at any number of ranks."""
        if self.w_in.is_meta:
            return
        seed = int(torch.randint(0, 1 << 62, ()).item())
        for local in range(self.experts):
            # a generator per expert, on the CPU: values depend on neither the ranks nor the device (the factor: see
            # `build`)
            generator = torch.Generator(device="cpu").manual_seed(
                (seed + 0x9E3779B97F4A7C15 * (self.first_expert + local + 1)) % (1 << 63)
            )
            for name, p in self._stacked():
                bound, own = 1.0 / math.sqrt(self.dim if name.endswith("in") else self.hidden), self._of(p, local)
                draw = torch.empty(own.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
                own.copy_(draw)

    def check_parameters(self) -> None:
        """Raise ValueError as any bank does, and where parameters have several dtypes."""
        super().check_parameters()
        if any(q.dtype != self.w_in.dtype for _, q in self._stacked()):
            found = ", ".join(f"{name} {q.dtype}" for name, q in self._stacked())
            raise ValueError(f"the experts' parameters must have one dtype, got {found}")

    def _stacked(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the stacked parameters in the order in which an expert's flat vector lists them."""
        for name in _FIELDS:
            p = getattr(self, name)
            if p is not None:
                yield name, p

    def _of(self, p: Tensor, local: int) -> Tensor:
        """Return the share of home expert `local` of a stacked parameter, or of its gradient: a view."""
        return p[local] if p.dim() > 1 else p.view(self.experts, -1)[local]

    def weights(self) -> ExpertWeights:
        """Return the home experts' parameters as they are: stacked, their gradients unscaled."""
        biases = (None if b is None else b.view(self.experts, -1) for b in (self.bias_in, self.bias_out))
        return ExpertWeights(self.w_in, self.w_out, *biases)

    def shape(self) -> LayerShape:
        """Return the sizes that the performance model needs, at the parameters' precision."""
        size = self.w_in.element_size()
        return LayerShape.feed_forward(
            dim=self.dim,
            hidden=self.hidden,
            dim_out=self.dim_out,
            activation=self.activation,
            bias=bias_of(self.bias_in, self.bias_out),
            param_bytes=size,
            grad_bytes=size,
            token_element_bytes=size,
        )

    def signature(self) -> str:
        # a replica trains what its home trains: ranks that froze something else would send gradients of another length
        frozen = [name for name, p in self._stacked() if not p.requires_grad]
        return (
            f"dim={self.dim} hidden={self.hidden} dim_out={self.dim_out} activation={self.activation} "
            f"bias={bias_of(self.bias_in, self.bias_out)} dtype={self.dtype} frozen={frozen}"
        )

    def row_dtype(self, x: Tensor) -> torch.dtype:
        """Return the precision of the products: the parameters', or autocast's."""
        device = x.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.dtype

    def run(
        self,
        rows: Tensor,
        sizes: Sequence[int],
        replicas: Sequence[Replica] = (),
        *,
        sizes_on_device: Tensor | None = None,
        impl: Impl = "auto",
    ) -> Tensor:
        return grouped_ffn(
            rows,
            sizes,
            self.weights(),
            self.activation,
            replicas=[_filled(r.leaves) for r in replicas],
            replica_grads=[_gradients(r) for r in replicas],
            grad_scale=self.grad_scale,
            sizes_on_device=sizes_on_device,
            impl=impl,
        )

    def run_replicas(
        self,
        rows: Tensor,
        sizes: Sequence[int],
        replicas: Sequence[Replica],
        *,
        sizes_on_device: Tensor | None = None,
        impl: Impl = "auto",
    ) -> Tensor:
        # the kernels take stacked experts before single ones: the first replica is a stack of one
        (first, *others), (first_grads, *grads) = replicas, map(_gradients, replicas)
        return grouped_ffn(
            rows,
            sizes,
            _stack_of(_filled(first.leaves)),
            self.activation,
            replicas=[_filled(r.leaves) for r in others],
            home_grads=_stack_of(first_grads),
            replica_grads=grads,
            sizes_on_device=sizes_on_device,
            impl=impl,
        )

    # --- an expert as a flat vector, what Trans and Agg move ---

    def _sizes(self) -> list[tuple[int, bool]]:
        return [(p.numel() // self.experts, p.requires_grad) for _, p in self._stacked()]

    def _like(self) -> dict[str, Tensor]:
        """Return one expert's parameters by name, for their shapes, dtypes and `requires_grad` only."""
        return {_FIELDS[name]: self._of(p.detach(), 0).requires_grad_(p.requires_grad) for name, p in self._stacked()}

    def replica(self, expert: int, pool: ReplicaPool) -> Replica:
        buffers = pool.take(self.expert_numel, self.dtype, self.device, self.grad_numel)
        return Replica.build(expert, self._like(), *buffers)

    def flat_views(self, local: int, start: int, stop: int) -> list[Tensor]:
        every = [p for _, p in self._stacked()]
        found = overlaps(every, start, stop, shares=self.experts)
        return [self._of(p.detach(), local).reshape(-1)[a:b] for p, a, b in found]

    def _under(self, local: int, start: int, stop: int, piece: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        # `piece` lists gradients of trained parameters only, while `overlaps` counts their elements alike
        offset = 0
        trained = [p for _, p in self._stacked() if p.requires_grad]
        for p, a, b in overlaps(trained, start, stop, shares=self.experts):
            yield self._of(gradient_of(p), local).view(-1)[a:b], piece[offset : offset + b - a]
            offset += b - a

    def share_over(self, rank: int, ranks: int) -> None:
        self.experts = check_experts_per_rank(self.total_experts, ranks)
        # the mean is over the ranks of the new group from now on
        self.first_expert, self.ep_size, self.grad_scale = rank * self.experts, ranks, 1.0 / ranks
        self._mark()

    # --- checkpoints that do not depend on the number of ranks ---

    def entries(self) -> Iterator[Entry]:
        for name, p in self._stacked():
            rows = p.numel() // self.experts
            for local in range(self.experts):
                own: tuple[int | slice, ...] = (local,) if p.dim() > 1 else (slice(local * rows, (local + 1) * rows),)
                yield Entry(self.first_expert + local, f"{name}.*", name, own)

    def all_keys(self) -> set[str]:
        patterns = {entry.pattern for entry in self.entries()}
        return {pattern.replace("*", str(e), 1) for pattern in patterns for e in range(self.total_experts)}

    def expert_weights(self, local: int) -> ExpertWeights:
        """Return the parameters of home expert `local`, as views."""
        return _filled({_FIELDS[name]: self._of(p.detach(), local) for name, p in self._stacked()})

    @torch.no_grad()
    def set_expert_weights(self, local: int, weights: ExpertWeights) -> None:
        """Copy `weights` into home expert `local`."""
        for name, p in self._stacked():
            self._of(p, local).copy_(getattr(weights, _FIELDS[name]))

    def as_entries(self, local: int, weights: ExpertWeights) -> dict[str, Tensor]:
        """Return `weights` under the keys that the state dict has for home expert `local`."""
        number = self.first_expert + local
        return {f"{name}.{number}": getattr(weights, _FIELDS[name]) for name, _ in self._stacked()}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for entry in self.entries():
            value = entry.of(self.get_parameter(entry.parameter))
            # views: a state dict shares memory with the module, as torch's does
            destination[prefix + entry.key] = value if keep_vars else value.detach()

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
        for entry in self.entries():
            own, key = entry.of(self.get_parameter(entry.parameter).detach()), prefix + entry.key
            value = state_dict.get(key)
            if value is None:
                missing_keys.append(key)
            elif own.is_meta:
                error_msgs.append(f"{key}: the experts are on the meta device; call to_empty(device=...) first")
            elif not isinstance(value, Tensor) or value.shape != own.shape:
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                error_msgs.append(f"{key}: expected a tensor of shape {list(own.shape)}, got {got}")
            else:
                with torch.no_grad():
                    own.copy_(value)
        if strict:
            # a checkpoint holds all E experts: those of other ranks are no surprise
            expected = {prefix + key for key in self.all_keys()}
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in expected]


def _filled(parts: Mapping[str, Tensor | None]) -> ExpertWeights:
    """Return weights of which some may be missing, as gradients are where nothing is trained."""
    return ExpertWeights(*(parts.get(name) for name in ExpertWeights._fields))  # type: ignore[arg-type]


def _gradients(replica: Replica) -> ExpertWeights:
    """Return the views of the vector that Agg sends home, to which kernels add."""
    replica.collect_grads()
    return _filled({name: leaf.grad for name, leaf in replica.leaves.items()})


def _stack_of(weights: ExpertWeights) -> ExpertWeights:
    """Return one expert as a stack of one, by views."""
    return ExpertWeights(*(None if w is None else w.unsqueeze(0) for w in weights))  # type: ignore[arg-type]
