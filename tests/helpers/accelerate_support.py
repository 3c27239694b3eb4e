"""Training loops with accelerate on the ranks of a gloo group: plain, and with balanced experts.

Shape legend: R ranks, M microbatches of a step.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import prophet_accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
)
from torch import Tensor, nn

import prophet
from tests.helpers.moe_models import hugging_face
from tests.helpers.support import RandomPlanner

ROWS = 8  # of a microbatch, over all ranks
LENGTH = 7


def fresh_accelerator(kind: str, **options: Any) -> Accelerator:
    """As a script's first one, for "ddp" or "fsdp2".

    accelerate has no FSDP on CPUs: it would be set aside without a word, so it is put in its place here.
    """
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    os.environ.update({"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())})
    os.environ.update({"WORLD_SIZE": str(dist.get_world_size()), "LOCAL_WORLD_SIZE": str(dist.get_world_size())})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"})
    plugin = _fsdp2() if kind == "fsdp2" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **options)
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    if plugin is not None:
        if options.get("mixed_precision", "no") != "no":
            plugin.set_mixed_precision(options["mixed_precision"])
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def _fsdp2() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")


def microbatch(step: int, number: int) -> Tensor:
    """This rank's rows [ROWS / R, LENGTH] of one microbatch, whose rows are the same at any R."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    rows = torch.randint(0, 32, (ROWS, LENGTH), generator=generator) % (8 + step)
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


@dataclass
class Loop:
    """One training script. kind: "ddp" or "fsdp2". balanced: None trains plainly.

    losses: means over ranks, by step; norms: before clipping, by step. skipped: steps that a scaler has left out.
    """

    kind: str
    accumulation: int = 2
    density: float | None = 0.6
    clip: float = 0.5
    options: dict[str, Any] = field(default_factory=dict)
    ep_size: int | None = None
    planner: Any = None
    prepared: Callable[[Loop], None] = lambda _: None
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    copies: int = 0
    skipped: int = 0
    balanced: prophet_accelerate.Balanced | None = None

    def __post_init__(self) -> None:
        self.accelerator = fresh_accelerator(
            self.kind,
            gradient_accumulation_steps=self.accumulation,
            dataloader_config=DataLoaderConfiguration(split_batches=True),  # one step of a schedule per update
            **self.options,
        )
        if self.density is not None:
            planner = self.planner or RandomPlanner(3, self.density)
            config = prophet.EngineConfig(planner=planner)
            self.balanced = prophet_accelerate.balance(self.accelerator, config=config, ep_size=self.ep_size)
        model = hugging_face("mixtral", output_router_logits=False, intermediate_size=16)  # by eight, for bfloat16
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1.0 + 0.1 * n))
        self.prepared(self)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)

    @property
    def bare(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model)

    def train(self, first: int, last: int) -> None:
        a = self.accelerator
        self.model.train()
        for step in range(first, last):
            total = torch.zeros(())
            for number in range(self.accumulation):
                ids = microbatch(step, number)
                with a.accumulate(self.model):
                    loss = self.model(input_ids=ids, labels=ids).loss
                    a.backward(loss)
                    total += loss.detach() / self.accumulation
                    if a.sync_gradients:
                        self.norms.append(float(a.clip_grad_norm_(self.model.parameters(), self.clip)))
                    self.optimizer.step()
                    self.skipped += a.sync_gradients and a.optimizer_step_was_skipped
                    self.schedule.step()
                    self.optimizer.zero_grad()
            self.losses.append(float(a.reduce(total, "mean")))
            if self.balanced is not None and self.balanced.engine is not None:
                report = self.balanced.engine.last_step
                assert report is not None
                self.copies += int(report.copies.sum())

    def evaluate(self) -> float:
        """The mean loss over the rows of a loader that is prepared after the training."""
        rows = torch.cat([torch.arange(LENGTH).view(1, -1) + n for n in range(2 * ROWS)])
        data = self.accelerator.prepare(torch.utils.data.DataLoader(list(rows), batch_size=ROWS))
        self.model.eval()
        losses = []
        with torch.no_grad():
            for ids in data:
                losses.append(self.accelerator.gather_for_metrics(self.model(input_ids=ids, labels=ids).loss))
        return float(torch.stack(losses).mean())

    def travelled(self) -> int:
        """How often gradients of one layer's replicas went home in the last step, at most."""
        assert self.balanced is not None
        assert self.balanced.engine is not None
        report = self.balanced.engine.last_step
        assert report is not None
        return max(Counter(str(action) for action in report.actions if action.kind == "AGG").values())

    def shared(self) -> Tensor:
        """This rank's values of the parameters that all ranks share, as one vector; of FSDP2's, the whole."""
        found = [p.detach() for p in self.bare.parameters() if not getattr(p, "prophet_expert", False)]
        return torch.cat([(p.full_tensor() if hasattr(p, "full_tensor") else p).flatten() for p in found])

    def drift(self) -> float:
        """The largest difference of shared parameters between ranks."""
        mine = self.shared()
        all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(all_ranks, mine)
        return max(float((one - mine).abs().max()) for one in all_ranks)


def named(folder: Path, limit: int | None = None) -> dict[str, Any]:
    """Options for automatic checkpoint names in `folder`."""
    return {
        "project_config": ProjectConfiguration(
            project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=limit
        )
    }
