"""A DeepSpeed script with its own MoE layer, balanced by a section of its config. Run it on four processes:

torchrun --standalone --nproc-per-node 4 examples/deepspeed_config.py --out out/deepspeed --steps 6 --save-at 3

Two things differ from a plain script: the import, and the "prophet" section, which `--plain` leaves out. With
`--resume` it goes on from the newest checkpoint in `--out`, on as many processes or on another number:

torchrun --standalone --nproc-per-node 2 examples/deepspeed_config.py --out out/deepspeed --steps 9 --save-at 9 --resume
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

VOCAB, DIM, HIDDEN, EXPERTS, LENGTH = 61, 16, 24, 8, 12
ROWS = 8  # sequences of one microbatch, on all ranks


class Model(nn.Module):
    """Embedding, two MoE layers with residuals, read-out."""

    def __init__(self, ep_size: int = 1, aux: float = 0.01, sampling: bool = True) -> None:
        super().__init__()
        self.aux, self.sampling = aux, sampling
        self.embed = nn.Embedding(VOCAB, DIM)
        self.moes = nn.ModuleList(self.layer(ep_size) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def layer(self, ep_size: int) -> nn.Module:
        expert = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM))
        layer = MoE(DIM, expert, EXPERTS, ep_size, k=2, drop_tokens=False, top2_2nd_expert_sampling=self.sampling)
        for n, p in layer.named_parameters():
            # experts that differ from one another, the same at any number of ranks
            if "deepspeed_experts" not in n:
                nn.init.normal_(p, std=0.3)
        seeds = torch.randint(0, 1 << 31, (EXPERTS,)).tolist()
        local = EXPERTS // ep_size
        first = local * (deepspeed.comm.get_rank() % ep_size)
        for i, module in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            generator = torch.Generator().manual_seed(seeds[first + i])
            for p in module.parameters():
                nn.init.normal_(p, std=0.3, generator=generator)
        return layer

    def forward(self, ids: Tensor) -> Tensor:
        x, loss = self.embed(ids), 0.0
        for moe in self.moes:
            y, aux, _ = moe(x)
            x, loss = x + y, loss + self.aux * aux
        logits = self.head(x[:, :-1]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + loss


def batch(number: int) -> Tensor:
    """This rank's share of microbatch `number`."""
    generator = torch.Generator().manual_seed(number)
    start = torch.randint(0, VOCAB, (ROWS, 1), generator=generator)
    ids = (start + 3 * torch.arange(LENGTH)) % VOCAB
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    return ids.chunk(ranks)[rank].to(deepspeed.accelerator.get_accelerator().current_device_name())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/deepspeed"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-at", type=int, default=3)
    parser.add_argument("--ep-size", type=int, default=None)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--aux", type=float, default=0.01, help="weight of the balance loss, a mean over each rank")
    parser.add_argument("--no-sampling", action="store_true", help="the gate draws no noise for the second expert")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--sgd", action="store_true", help="an optimizer that shows the size of gradients")
    parser.add_argument("--planner", default="prophet")
    parser.add_argument("--plain", action="store_true", help="DeepSpeed's own expert parallelism, to compare")
    options = parser.parse_args()

    deepspeed.init_distributed()
    ranks = deepspeed.comm.get_world_size()
    config: dict[str, Any] = {
        "train_batch_size": ROWS * 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": options.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 5e-3}},
    }
    if options.sgd:
        config |= {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_allow_untested_optimizer": True}
        config["scheduler"]["params"]["warmup_max_lr"] = 0.5
    if options.dtype != "fp32":
        config[options.dtype] = {"enabled": True}
        if options.dtype == "fp16":
            config["fp16"]["initial_scale_power"] = 8
    if not options.plain:
        config["prophet"] = {"ep_size": options.ep_size or ranks, "planner": options.planner}

    torch.manual_seed(0)  # the same model on every rank
    built_for = (options.ep_size or ranks) if options.plain else 1
    model = Model(built_for, aux=options.aux, sampling=not options.no_sampling)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    if options.resume:
        folder, _ = engine.load_checkpoint(options.out)
        if folder is None:
            raise SystemExit(f"no checkpoint in {options.out}")

    losses = []
    for step in range(engine.global_steps, options.steps):
        total = torch.zeros((), device=engine.device)
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(batch(step * 2 + micro))
            engine.backward(loss)
            engine.step()
            total += loss.detach() / engine.gradient_accumulation_steps()
        deepspeed.comm.all_reduce(total)
        losses.append(float(total) / ranks)
        if step + 1 == options.save_at:
            engine.save_checkpoint(options.out)
    if deepspeed.comm.get_rank() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "losses.json").write_text(json.dumps(losses))
        if not options.plain:
            last = engine.prophet.last_step
            print(engine.prophet_report)
            print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; rank max/mean {last.max_mean:.3f}", end=" ")
            print(f"(without balancing {last.max_mean_static:.3f})")
    deepspeed.comm.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
