"""Trains small models on gloo ranks and writes what happened, bit by bit: run by `python -m benchmarks.equality`.

The same file runs on the sources of either checkout, whichever PYTHONPATH names, so it uses only what both have: the
layer, `attach`, the engine's step reports. Nothing here imports `benchmarks`.

Shape legend: R ranks, B sequences, T tokens of a sequence.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import prophet
from prophet.planner import get_planner
from prophet.spec import Link, Topology, Windows

VOCABULARY, DIM, HIDDEN, EXPERTS, LAYERS = 96, 32, 64, 8, 3
B, T = 4, 32
LEARNING_RATE = 3e-3
# A slow processor and fast links: replicas pay. Two nodes, so that the forms of Trans differ.
MACHINE = {"flops_per_s": 2e8, "intra": Link(bytes_per_s=2e10), "inter": Link(bytes_per_s=5e9)}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulation_steps": 2},
    "refetch": {"refetch": True},
    "two-phase": {"transfers": "two-phase"},
    "look-ahead": {"schedule": "look-ahead"},
}


class Block(nn.Module):
    """Mixes a sequence's tokens, then the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.moe = prophet.MoE(DIM, HIDDEN, EXPERTS, top_k=2)

    def forward(self, x: Tensor) -> Tensor:
        past = torch.cumsum(self.norm(x), dim=1) / torch.arange(1, x.shape[1] + 1).unsqueeze(1)
        x = x + torch.tanh(self.mix(past))
        return x + self.moe(x)


class Model(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Listening:
    """A planner that writes down the splits it makes; all else is the planner's."""

    def __init__(self, name: str) -> None:
        self._planner = get_planner(name)
        self.splits: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def split(self, load: Any, placement: Any, context: Any) -> Any:
        split = self._planner.split(load, placement, context)
        self.splits.append(split.digest())
        return split


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, planner: Any, mode: dict[str, Any]) -> Any:
    """An engine with these options, by the names that the checkout has for them."""
    known = {f.name for f in dataclasses.fields(prophet.EngineConfig)}
    options = dict(mode)
    if options.pop("refetch", False):
        options |= {"refetch": True} if "refetch" in known else {"replica_memory": "refetch"}
    compared = {name: options.pop(name) for name in list(options) if name not in known}
    topology = Topology.uniform(dist.get_world_size(), ranks_per_node=2, **MACHINE)
    windows = Windows(fnec_s=1e-3, bnec_s=2e-3)
    config = prophet.EngineConfig(planner=planner, topology=topology, windows=windows, slots_per_rank=2, **options)
    if not compared:
        return prophet.attach(model, optimizer, config=config)
    from prophet.engine.config import Experiment

    return prophet.attach(model, optimizer, config=config, experiment=Experiment(**compared))


def batch(step: int, part: int, rank: int) -> Tensor:
    """[B, T + 1] token ids, few of them frequent, others from step to step."""
    random = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    weights = 1.0 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    weights = weights.roll(3 * (step // 5) + 7 * rank)
    return torch.multinomial(weights, B * (T + 1), replacement=True, generator=random).view(B, T + 1)


def average_shared(model: nn.Module) -> None:
    """The mean over ranks of the gradients of all parameters but the experts'."""
    for name, parameter in model.named_parameters():
        if ".experts." not in name and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def train(planner_name: str, mode: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """What every step did: the loss and the norm as hexadecimal floats, placements and splits as digests."""
    torch.manual_seed(7)
    model = Model()
    planner = Listening(planner_name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine = attach(model, optimizer, planner, mode)
    parts = mode.get("accumulation_steps", 1)
    rows = []
    for step in range(steps):
        optimizer.zero_grad()
        losses = []
        for part in range(parts):
            ids = batch(step, part, dist.get_rank())
            loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            (loss / parts).backward()
            losses.append(float(loss.detach()).hex())
        average_shared(model)
        norm = engine.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report = engine.last_step
        rows.append(
            {
                "losses": losses,
                "norm": float(norm).hex(),
                "placements": [p.digest() for p in report.placements],
                "splits": planner.splits,
                "withdrawn": list(report.withdrawn),
                "planned": list(report.planned),
                "rank_load": report.rank_load.tolist(),
                "replicas": int(report.copies.sum()),
            }
        )
        planner.splits = []
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    rows.append({"parameters": total.hex()})
    engine.close()
    return rows


def run(rank: int, ranks: int, folder: str, planners: list[str], modes: list[str], steps: int) -> None:
    """One rank: all planners and modes, one after the other; rows go to a file of the rank's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    found = {f"{planner}, {mode}": train(planner, MODES[mode], steps) for planner in planners for mode in modes}
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Arguments: folder, ranks, steps, planners and modes, the last two joined by commas."""
    folder, ranks, steps, planners, modes = sys.argv[1:]
    told = (int(ranks), folder, planners.split(","), modes.split(","), int(steps))
    mp.start_processes(run, told, nprocs=int(ranks), start_method="forkserver")


if __name__ == "__main__":
    main()
