"""The peers' own MoE layers inside our model, loaded from the common checkpoint.

Sizes, routing (top-k, weights normalised over the k chosen), parameters, batch and optimizer are those of our layer.
Without a capacity nothing is dropped, so that a step computes the same function: every pair of rank and expert is
padded to the hottest one. Expert gradients are scaled to the mean over ranks.

Shape legend: R ranks, E experts, m experts per rank, D model dim, H hidden dim.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.cluster.workload import Workload
from prophet.demo.model import MoEGPT
from prophet.spec import IntArray


def missing(system: str) -> str | None:
    """Why a peer cannot run in this interpreter, or None."""
    if system != "prophet" and importlib.util.find_spec(system) is None:
        return f"{system} is not installed for this interpreter"
    return None


class Sizes(Protocol):
    """What a peer's layer is built from."""

    @property
    def dim(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...


class Peer(nn.Module):
    """What stands in for `prophet.MoE` in a block: [b, T, D] to the same shape."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    @property
    def gate(self) -> nn.Module:
        """What decides where tokens go."""
        inner: Any = self.layer
        gate: nn.Module = inner.deepspeed_moe.gate if hasattr(inner, "deepspeed_moe") else inner.gates[0]
        return gate

    def counts(self) -> Tensor | None:
        """Choices of this rank by expert in the last forward pass, [E], dropped ones too, where the peer tells."""
        inner = getattr(self.layer, "deepspeed_moe", None)
        return getattr(self.layer, "dispatch_count", None) if inner is None else inner.exp_counts

    def capacity(self, tokens: int, experts: int) -> int | None:
        """Choices of one expert that a rank with so many tokens keeps; None where it drops none."""
        gate: Any = self.gate
        if hasattr(self.layer, "deepspeed_moe"):
            wanted = math.ceil(tokens / experts * gate.capacity_factor * gate.k)
            return max(wanted, int(gate.min_capacity)) if gate.drop_tokens else None
        found = int(gate.top_k) * int(gate.capacity_factor * -(-tokens // experts))
        return found or None  # a factor of 0 drops nothing


def dropped_fraction(load: IntArray, capacity: int | None) -> float:
    """Part of the choices that are dropped; load [..., E]: choices of each rank in each layer."""
    over = 0 if capacity is None else int(np.maximum(load - capacity, 0).sum())
    return over / max(int(load.sum()), 1)


def build_peer(
    system: str,
    workload: Workload,
    state: Mapping[str, Tensor],
    *,
    rank: int,
    ranks: int,
    capacity: float | None = None,
) -> MoEGPT:
    """MoE-GPT with a peer's layers; collective.

    Args:
        system: The peer.
        workload: Sizes of the model.
        state: One rank's part of the common checkpoint.
        rank: Of this process.
        ranks: R.
        capacity: Capacity factor, beyond which the peer drops; None drops nothing.
    """
    from prophet.ranks.threads import ThreadWorld

    model = MoEGPT(workload.model_config(), group=ThreadWorld(1).collective(0))
    # before the peers' layers are in: Tutel's would set to zero whatever of theirs is not in the state
    own = {k: v for k, v in state.items() if ".moe." not in k}
    left = model.load_state_dict(own, strict=False)
    lost = [k for k in left.missing_keys if ".moe." not in k] + list(left.unexpected_keys)
    if lost:
        raise RuntimeError(f"the checkpoint does not fit the model: {lost[:4]}")
    make = {"deepspeed": deepspeed_layer, "tutel": tutel_layer}[system]
    experts = workload.experts // ranks
    for i, block in enumerate(model.blocks):
        parameters = {
            k.removeprefix(f"blocks.{i}.moe."): v for k, v in state.items() if k.startswith(f"blocks.{i}.moe.")
        }
        block.moe = Peer(make(workload, parameters, rank * experts, experts, ranks, capacity))
    for p in model.parameters():
        if not getattr(p, "allreduce", True):
            p.register_hook(lambda grad: grad / ranks)
    return model


def deepspeed_moe(sizes: Sizes, expert: nn.Module, ranks: int, capacity: float | None = None) -> nn.Module:
    """DeepSpeed's layer with copies of `expert` over so many ranks, which drops beyond a capacity; collective."""
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.moe.layer import MoE  # type: ignore[import-not-found]

    if not deepspeed.comm.is_initialized():
        # Its kernel for all-reduces in shared memory is for ranks of one machine; these hosts have none in common.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    layer: nn.Module = MoE(
        sizes.dim,
        expert,
        num_experts=sizes.experts,
        ep_size=ranks,
        k=sizes.top_k,
        drop_tokens=capacity is not None,
        capacity_factor=1.0 if capacity is None else capacity,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )
    layer.set_deepspeed_parallelism()  # type: ignore[operator]
    return layer


def deepspeed_layer(
    sizes: Sizes, state: Mapping[str, Tensor], first: int, experts: int, ranks: int, capacity: float | None = None
) -> nn.Module:
    """DeepSpeed's layer with the gate of `state` and its experts first .. first + experts - 1; collective."""
    expert = nn.Sequential(nn.Linear(sizes.dim, sizes.hidden), nn.GELU(), nn.Linear(sizes.hidden, sizes.dim))
    layer = deepspeed_moe(sizes, expert, ranks, capacity)
    inner: Any = layer.deepspeed_moe
    with torch.no_grad():
        inner.gate.wg.weight.copy_(state["gate.weight"])
        for j, own in enumerate(inner.experts.deepspeed_experts):
            for index, suffix in ((0, "in"), (2, "out")):
                own[index].weight.copy_(state[f"experts.w_{suffix}.{first + j}"])
                own[index].bias.copy_(state[f"experts.bias_{suffix}.{first + j}"])
    return layer


def tutel_layer(
    sizes: Sizes, state: Mapping[str, Tensor], first: int, experts: int, ranks: int, capacity: float | None = None
) -> nn.Module:
    """Tutel's layer with the gate of `state` and its experts first .. first + experts - 1; collective."""
    from tutel import moe  # type: ignore[import-not-found]

    layer = moe.moe_layer(
        gate_type={
            "type": "top",
            "k": sizes.top_k,
            "capacity_factor": capacity or 0.0,
        },  # 0: as large as the step needs
        experts={
            "type": "ffn",
            "num_experts_per_device": experts,
            "hidden_size_per_expert": sizes.hidden,
            "activation_fn": nn.functional.gelu,
        },
        model_dim=sizes.dim,
        scan_expert_func=lambda _, p: setattr(p, "allreduce", False),
    )
    with torch.no_grad():
        layer.gates[0].wg.weight.copy_(state["gate.weight"])
        own = layer.experts
        for j in range(experts):
            own.batched_fc1_w[j].copy_(state[f"experts.w_in.{first + j}"])
            own.batched_fc2_w[j].copy_(state[f"experts.w_out.{first + j}"].t())
            for bias, name in ((own.batched_fc1_bias[j], "bias_in"), (own.batched_fc2_bias[j], "bias_out")):
                bias.copy_(state[f"experts.{name}.{first + j}"].view_as(bias))
    return layer  # type: ignore[no-any-return]
