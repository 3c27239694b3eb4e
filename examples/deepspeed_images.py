"""A small image classifier with DeepSpeed's MoE layers, as a user of DeepSpeed has it, on random data.

torchrun --standalone --nproc-per-node 2 examples/deepspeed_images.py
torchrun --standalone --nproc-per-node 2 examples/deepspeed_images.py --num-experts 2 4 --residual --stage 2

Two lines are for balanced experts: the import, and the section of the configuration. `--plain` leaves the section out.
Experts are one linear layer, or `--depth` of them. `--resume` goes on from the newest checkpoint in --out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import prophet_deepspeed  # noqa: F401  (makes deepspeed.initialize heed the section)
import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES, WIDTH = 10, 24


class Net(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6 * 6 * 6, WIDTH), nn.ReLU()
        )
        layers = [nn.Linear(WIDTH, WIDTH)]
        for _ in range(1, options.depth):
            layers += [nn.Tanh(), nn.Linear(WIDTH, WIDTH)]  # type: ignore[list-item]
        expert = layers[0] if options.depth == 1 else nn.Sequential(*layers)
        self.moe_layers = nn.ModuleList(
            MoE(
                hidden_size=WIDTH,
                expert=expert,
                num_experts=num_experts,
                ep_size=options.ep_size,
                use_residual=options.residual,
                k=options.top_k,
                min_capacity=0,
            )
            for num_experts in options.num_experts
        )
        self.classify = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        for layer in self.moe_layers:
            x, _, _ = layer(x)
        logits: Tensor = self.classify(x)
        return logits


def read_options(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/images"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-at", type=int, default=10)
    parser.add_argument("--stage", type=int, default=0, choices=[0, 1, 2])
    parser.add_argument("--num-experts", type=int, nargs="+", default=[4])
    parser.add_argument("--ep-size", type=int, default=2)
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--residual", action="store_true", help="PR-MoE: a dense network beside the experts")
    parser.add_argument("--depth", type=int, default=1, help="layers of an expert")
    parser.add_argument("--object", action="store_true", help="pass an optimizer that exists")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--plain", action="store_true")
    return parser.parse_args(given)


def train(options: argparse.Namespace) -> tuple[list[float], int]:
    """Losses by step, and how many replicas all steps used."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 3, 16, 16), torch.randint(0, CLASSES, (512,)))
    model = Net(options)
    config: dict[str, Any] = {
        "train_batch_size": 16,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001, "warmup_num_steps": 5}},
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
    }
    if not options.plain:
        config["prophet"] = {"planner": "top2"}
    optimizer = None
    if options.object:
        del config["optimizer"]
        groups: Any = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all"}
        )
        optimizer = torch.optim.AdamW(groups, lr=0.001)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config
    )
    sampler: Any = DistributedSampler(data)
    batches = iter(DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler))
    if options.resume:
        engine.load_checkpoint(options.out)
        for _ in range(engine.global_steps):
            next(batches)

    losses, replicas = [], 0
    for step in range(engine.global_steps, options.steps):
        images, labels = next(batches)
        loss = nn.functional.cross_entropy(engine(images.to(engine.device)), labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        deepspeed.comm.all_reduce(shown := loss.detach().clone())
        losses.append(float(shown) / deepspeed.comm.get_world_size())
        replicas += 0 if options.plain else int(engine.prophet.last_step.copies.sum())
        if step + 1 == options.save_at and not options.resume:
            engine.save_checkpoint(options.out)
    return losses, replicas


def main() -> None:
    options = read_options()
    deepspeed.init_distributed()
    losses, replicas = train(options)
    if deepspeed.comm.get_rank() == 0:
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}, {replicas} replicas")
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "losses.json").write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
