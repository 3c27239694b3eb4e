"""A transformers model in a training loop of your own: convert, train, save, load in plain transformers, and resume.

torchrun --standalone --nproc-per-node 2 examples/save_transformers.py --out out            # DistributedDataParallel
torchrun --standalone --nproc-per-node 2 examples/save_transformers.py --out out --fsdp     # FSDP2: fully_shard
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM

import prophet
from prophet import checkpoint, parallel

STEPS = 4


def build() -> MixtralForCausalLM:
    """A small model, the same on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_local_experts": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return MixtralForCausalLM(MixtralConfig(vocab_size=64, initializer_range=0.2, **sizes, **heads))


def prepare(fsdp: bool) -> tuple[MixtralForCausalLM, torch.nn.Module, torch.optim.Optimizer, prophet.Engine]:
    """Model, what to call in a forward pass, optimizer and engine."""
    model = build()
    prophet.convert(model)  # before the optimizer, and before DDP or FSDP
    if fsdp:
        experts = {p for _, p in parallel.expert_parameters(model)}  # they are spread over the ranks already
        for layer in model.model.layers:
            fully_shard(layer, ignored_params=experts)
        fully_shard(model, ignored_params=experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = prophet.attach(model, optimizer, config=prophet.EngineConfig(planner="top2"))
    return model, model if fsdp else DistributedDataParallel(model), optimizer, engine


def train(called: torch.nn.Module, optimizer: torch.optim.Optimizer, engine: prophet.Engine, first: int) -> float:
    """STEPS steps; the last one's loss."""
    for step in range(first, first + STEPS):
        data = torch.Generator().manual_seed(100 * step + dist.get_rank())
        ids = torch.randint(0, 64, (4, 16), generator=data)
        loss = called(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        engine.clip_grad_norm_(called.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fsdp", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    model, called, optimizer, engine = prepare(options.fsdp)
    train(called, optimizer, engine, 0)

    model.save_pretrained(options.out / "model")  # every rank calls it; rank 0 writes
    checkpoint.save(options.out / "state", model, optimizer, extra={"step": STEPS})  # every rank; to resume

    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        here = called.eval()(input_ids=ids).logits  # every rank: its experts serve the others' tokens
    if rank == 0:
        plain = MixtralForCausalLM.from_pretrained(options.out / "model").eval()
        with torch.no_grad():
            gap = (plain(input_ids=ids).logits - here).abs().max().item()
        print(f"logits in plain transformers differ by {gap:.1e} of {here.abs().max().item():.1f}")
    loss = train(called.train(), optimizer, engine, STEPS)
    engine.close()

    model, called, optimizer, engine = prepare(options.fsdp)
    extra = checkpoint.load(options.out / "state", model, optimizer)
    again = train(called, optimizer, engine, extra["step"])
    engine.close()
    if rank == 0:
        print(f"loss {loss:.6f}, resumed {again:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
