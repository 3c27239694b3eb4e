"""One layer, by several implementations, with the same parameters.

Shape legend: N tokens of this rank, E experts, m experts of this rank, R ranks, D model dim, H hidden dim.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import prophet
from benchmarks.cluster.peers import Peer, deepspeed_layer, tutel_layer
from benchmarks.layer.cases import Sizes
from prophet.experts.gate import GateConfig
from prophet.layer.port import PlainPort
from prophet.ranks.collective import Collective
from prophet.scheduler.windows import Stopwatch
from prophet.spec import Topology

_CPU = torch.device("cpu")
MODULES = ("modules", "modules-static")  # experts that are modules of the user's own, with and without replicas
OURS = ("prophet", "static", *MODULES)
INSTALL = {
    "deepspeed": "pip install deepspeed",
    "tutel": "NO_CUDA=1 pip install --no-build-isolation git+https://github.com/microsoft/tutel",
}
PEERS = ("static", *MODULES, *INSTALL)
NAMES = ("prophet", *PEERS)
# where the time of one of our steps goes: column, and what the layer and the engine call it
PARTS = {
    "gate": ("gate",),
    "counts": ("counts",),
    "split": ("split",),
    "a2a": ("a2a",),
    "experts": ("expert",),
    "trans": ("exposed_trans",),
    "agg": ("exposed_agg",),
    "plan": ("exposed_plan", "plan_wait"),
}


def missing(name: str) -> str | None:
    """Why an implementation cannot be measured here, or None."""
    if name in OURS:
        return None
    try:
        importlib.import_module("tutel.moe" if name == "tutel" else "deepspeed.moe.layer")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == name:
            return f"not installed: {INSTALL[name]}"
        return f"cannot be imported: {error}"
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"cannot be imported: {error}"
    return None


@dataclass(slots=True)
class Implementation:
    """A layer that can be stepped: `forward`, the caller's backward pass, `end`."""

    name: str
    layer: nn.Module
    ranks: int
    engine: prophet.Engine | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] to [N, D]; collective."""
        # the peers want sequences
        out: Tensor = self.layer(x) if self.name in OURS else self.layer(x.unsqueeze(0)).squeeze(0)
        return out

    def end(self) -> None:
        """What a training loop does after the backward pass, the update left out; collective.

        The plan of the next step is waited for: it must not run while another implementation is timed.
        """
        if self.engine is not None:
            self.engine.runtime.finish_gradients()
            self.engine.finish_step()
            with self.engine.stopwatch("plan_wait"):
                for layer in self.engine.balanced:
                    layer.plans.latest()
            report = self.engine.last_step
            self.seconds = report.seconds if report else {}
        elif isinstance(self.layer, prophet.MoE):
            self.seconds = self.layer.port.stopwatch.take()

    def parts(self, total_s: float) -> dict[str, float]:
        """Seconds of the last step by part; "rest" is what nobody has timed: permutations, autograd, copies.

        To be called once the device has done the step, whose times are known then.
        """
        stopwatch = self.layer.port.stopwatch if isinstance(self.layer, prophet.MoE) else Stopwatch()
        seconds = {**self.seconds, **stopwatch.take()}
        found = {part: sum(seconds.get(n, 0.0) for n in names) for part, names in PARTS.items()}
        return {**found, "rest": max(0.0, total_s - sum(found.values()))}

    def max_mean(self) -> float | None:
        """Largest over mean rows computed by the ranks in the last step, where we know."""
        stats = getattr(self.layer, "stats", None)
        return None if stats is None else float(stats.max_mean)

    def replicas(self) -> int:
        """Replicas on all ranks in the last step."""
        report = self.engine.last_step if self.engine is not None else None
        return 0 if report is None else int(report.copies.sum())

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the last step: the gate's [E, D], w_in [m, H, D] and w_out [m, D, H] as means over ranks."""
        inner: Any = self.layer
        if self.name in MODULES:
            own = inner.experts.home_experts()
            w_in, w_out = (torch.stack([_or_zero(e[i].weight) for e in own]) for i in (0, 2))
            return {"gate": inner.gate.weight.grad, "w_in": w_in, "w_out": w_out}
        if self.name in OURS:
            return {"gate": inner.gate.weight.grad, "w_in": inner.experts.w_in.grad, "w_out": inner.experts.w_out.grad}
        inner = inner.layer
        if self.name == "tutel":
            gate, w_in = inner.gates[0].wg.weight.grad, inner.experts.batched_fc1_w.grad
            w_out = inner.experts.batched_fc2_w.grad.transpose(1, 2)
        else:
            gate = inner.deepspeed_moe.gate.wg.weight.grad
            own = inner.deepspeed_moe.experts.deepspeed_experts
            w_in, w_out = (torch.stack([e[i].weight.grad for e in own]) for i in (0, 2))
        return {"gate": gate, "w_in": w_in / self.ranks, "w_out": w_out / self.ranks}

    def close(self) -> None:
        """Let go of threads and hooks."""
        if self.engine is not None:
            self.engine.close()


def build(
    name: str,
    sizes: Sizes,
    state: Mapping[str, Tensor],
    collective: Collective,
    topology: Topology,
    device: torch.device = _CPU,
) -> Implementation:
    """The named implementation with this rank's part of `state`, on `device`; collective."""
    ranks, m = collective.size, sizes.experts // collective.size
    if name not in OURS:
        make = {"deepspeed": deepspeed_layer, "tutel": tutel_layer}[name]
        return Implementation(name, Peer(make(sizes, state, collective.rank * m, m, ranks)).to(device), ranks)
    # of one choice the peers keep the probability as its weight
    gate = GateConfig(normalize=sizes.top_k > 1)
    if name in MODULES:
        layer = prophet.MoE(
            sizes.dim,
            num_experts=sizes.experts,
            top_k=sizes.top_k,
            expert=lambda: nn.Sequential(
                nn.Linear(sizes.dim, sizes.hidden), nn.GELU(), nn.Linear(sizes.hidden, sizes.dim)
            ),
            gate=gate,
            group=collective,
        )
        layer.load_state_dict({_as_modules(key): value for key, value in state.items()})
    else:
        layer = prophet.MoE(sizes.dim, sizes.hidden, sizes.experts, sizes.top_k, gate=gate, group=collective)
        layer.load_state_dict(dict(state))
    layer.to(device)
    # with an engine attached, the stopwatch is the engine's, which knows the device itself
    if isinstance(layer.port, PlainPort):
        layer.port.stopwatch.on(device)
    engine = None
    if name in ("prophet", "modules"):
        engine = prophet.attach(layer, config=prophet.EngineConfig(planner="prophet", topology=topology))
    return Implementation(name, layer, ranks, engine)


def _as_modules(key: str) -> str:
    """What the experts' entry `key` of `prophet.MoE` is called where they are modules."""
    names = {"w_in": "0.weight", "bias_in": "0.bias", "w_out": "2.weight", "bias_out": "2.bias"}
    parts = key.split(".")
    return f"experts.{parts[2]}.{names[parts[1]]}" if parts[0] == "experts" else key


def _or_zero(p: nn.Parameter) -> Tensor:
    """Its gradient; an expert without rows has none."""
    return torch.zeros_like(p) if p.grad is None else p.grad
