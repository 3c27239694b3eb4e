"""A training loop around Tutel's MoE layer, balanced by one line. Run it on two processes:

torchrun --standalone --nproc-per-node 2 examples/tutel_training.py --out out/tutel

Once model and optimizer are there, `prophet_tutel.balance` takes both; `--plain` leaves it out. The rest is a loop as
in Tutel's own examples: gradients of all parameters but the marked ones are averaged by hand, or with `--ddp` by
DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import prophet_tutel
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tutel import moe, net

import prophet

VOCAB, DIM, HIDDEN, EXPERTS, LENGTH = 61, 16, 24, 8, 12
ROWS = 16  # sequences of one step, on all ranks


class Experts(nn.Module):
    """Experts of one's own, of the type `custom`: a matrix and a norm each."""

    def __init__(self, model_dim: int, num_experts_per_device: int, **_: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(num_experts_per_device, model_dim, model_dim))
        self.scale = nn.Parameter(torch.empty(num_experts_per_device, 1, model_dim))

    def forward(self, x: Tensor, layer: Any) -> Tensor:
        return F.silu(F.layer_norm(x @ self.w, (x.shape[-1],)) * self.scale)


class Gate(nn.Module):
    """A gate of one's own: scores between -1 and 1."""

    def __init__(self, model_dim: int, num_global_experts: int, k: int) -> None:
        super().__init__()
        self.top_k = k
        self.linear = nn.Linear(model_dim, num_global_experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Model(nn.Module):
    """Embedding, two MoE layers with residuals, read-out."""

    def __init__(self, group: dist.ProcessGroup | None, custom: bool) -> None:
        super().__init__()
        self.custom = custom
        self.embed = nn.Embedding(VOCAB, DIM)
        self.moes = nn.ModuleList(self.layer(group, i) for i in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def layer(self, group: dist.ProcessGroup | None, number: int) -> nn.Module:
        gate: dict[str, Any] = {"type": "top", "k": 2, "capacity_factor": 0}  # 0: nothing is dropped
        experts: dict[str, Any] = {"type": "ffn", "hidden_size_per_expert": HIDDEN, "activation_fn": F.gelu}
        if self.custom:
            gate, experts = {"type": "custom", "module": Gate, "k": 2}, {"type": "custom", "module": Experts}
        layer: nn.Module = moe.moe_layer(
            gate_type=gate,
            experts={"num_experts_per_device": EXPERTS // dist.get_world_size(group), **experts},
            model_dim=DIM,
            group=group,
            scan_expert_func=lambda _, p: setattr(p, "skip_allreduce", True),
            seeds=(1 + number, 1, 1),  # the gate's, the experts', whatever follows
        )
        local = layer.num_local_experts
        for i in range(local):
            # experts that differ from one another, the same at any number of ranks
            generator = torch.Generator().manual_seed(100 * number + dist.get_rank(group) * local + i)
            for p in layer.experts.parameters():
                nn.init.normal_(p.data[i], std=0.3, generator=generator)
        return layer

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.moes:
            x = x + layer(x)
        out: Tensor = self.head(x)
        return out


def batch(step: int) -> Tensor:
    """This process's share of step `step`."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCAB, (ROWS, 1), generator=generator)
    ids: Tensor = (start + 3 * torch.arange(LENGTH)) % VOCAB
    return ids.chunk(dist.get_world_size())[dist.get_rank()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/tutel"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--planner", default="prophet")
    parser.add_argument("--ep-size", type=int, help="processes that share the experts (default: all)")
    parser.add_argument("--aux", type=float, default=0.01, help="weight of the balance loss, a mean over each rank")
    parser.add_argument("--sharded", action="store_true", help="Tutel's own distributed optimizer")
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel, which leaves the experts alone")
    parser.add_argument("--custom", action="store_true", help="experts and gates of one's own")
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16, by autocast")
    parser.add_argument("--load", type=Path, help="a folder that an earlier run wrote")
    parser.add_argument("--plain", action="store_true", help="Tutel alone, to compare")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ep_size = options.ep_size or ranks
    # every process makes all groups, and is in one of each kind
    experts = [dist.new_group([*range(i, i + ep_size)]) for i in range(0, ranks, ep_size)][rank // ep_size]
    copies = [dist.new_group([*range(i, ranks, ep_size)]) for i in range(ep_size)][rank % ep_size]
    torch.manual_seed(0)
    model: Any = Model(experts, options.custom)
    moes = model.moes
    if options.ddp:
        marked = [name for name, p in model.named_parameters() if hasattr(p, "skip_allreduce")]
        model._ddp_params_and_buffers_to_ignore = marked
        model = nn.parallel.DistributedDataParallel(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if options.sharded:
        optimizer = net.TutelDistributedOptimizer(model.parameters(), average_shared=True)
        optimizer.warp_local(torch.optim.SGD, lr=0.1)

    balanced = None
    if not options.plain:
        config = prophet.EngineConfig(planner=options.planner)
        balanced = prophet_tutel.balance(model, optimizer, config=config)
    if options.load:
        # a file for every process, as Tutel's examples have it; written with or without the call
        model.load_state_dict(torch.load(options.load / f"{rank}-{ranks}.pt", weights_only=True))

    shared = [p for p in model.parameters() if not hasattr(p, "skip_allreduce")]
    own = [p for p in model.parameters() if hasattr(p, "skip_allreduce")]
    losses, copied = [], 0
    for step in range(options.steps):
        ids = batch(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.amp):
            logits = model(ids)[:, :-1]
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + options.aux * sum(layer.l_aux for layer in moes)).backward()
        if not (options.sharded or options.ddp):
            for p in shared:
                p.grad = net.simple_all_reduce(p.grad / ranks)
        for p in own if ep_size < ranks else ():
            # several processes have the same experts: a sum again, as it is over the processes of one group
            p.grad = net.simple_all_reduce(p.grad, group=copies)
        optimizer.step()
        losses.append(float(net.simple_all_reduce(loss.detach() / ranks)))
        if balanced is not None and balanced.engine.last_step is not None:
            copied += int(balanced.engine.last_step.copies.sum())

    options.out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), options.out / f"{rank}-{ranks}.pt")
    if balanced is not None:
        last = balanced.engine.last_step
        balanced.revert()
        torch.save(model.state_dict(), options.out / f"reverted-{rank}-{ranks}.pt")
        if rank == 0 and last is not None:
            print(balanced.report)
            print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; {copied} replicas in {options.steps} steps;", end=" ")
            print(f"rank max/mean {last.max_mean:.3f} (without balancing {last.max_mean_static:.3f})")
    if rank == 0:
        (options.out / "losses.json").write_text(json.dumps({"losses": losses, "replicas": copied}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
