"""The program of docs/tutorial.md: would balancing pay, and does it? In an empty folder, in this order:

python examples/tutorial.py record                                     # trains; writes routing.npz and model/
prophet plan routing.npz
torchrun --standalone --nproc-per-node 2 examples/tutorial.py train    # goes on, balanced; writes runs/ and trained/
python examples/tutorial.py reload                                     # plain transformers
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import prophet


def build() -> Qwen3MoeForCausalLM:
    """A small Qwen3-MoE from its configuration, with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    router = {"num_experts_per_tok": 2, "norm_topk_prob": True, "output_router_logits": True}  # its loss counts
    config = Qwen3MoeConfig(num_experts=16, router_aux_loss_coef=0.01, **router, **sizes, **heads)
    return Qwen3MoeForCausalLM(config)


def read_text() -> torch.Tensor:
    """Python's own sources; every byte is a token."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sources)), dtype=torch.uint8).long()


def batch(text: torch.Tensor, step: int) -> torch.Tensor:
    """Token ids [16, 128] of a step, the same on every process."""
    starts = torch.randint(len(text) - 128, (16,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + 128] for start in starts.tolist()])


def record() -> None:
    """Train as ever, in one process, and note which tokens went to which experts."""
    text, model = read_text(), build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with prophet.record(model, "routing.npz", ranks=8):
        for step in range(20):
            for ids in batch(text, step).chunk(8):  # eight passes are a step: one for each would-be rank
                loss = model(input_ids=ids, labels=ids).loss
                (loss / 8).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 4:
                print(f"step {step + 1}: loss {loss.item():.2f}")
    model.save_pretrained("model")


def train() -> None:
    """Go on from there on all processes, with the experts divided among them and balanced."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text, model = read_text(), Qwen3MoeForCausalLM.from_pretrained("model").train()
    report = prophet.convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = prophet.attach(model, optimizer)
    wrapped = DistributedDataParallel(model)
    if rank == 0:
        print(repr(report))
    with prophet.monitor(engine, "runs/tutorial"):
        for step in range(20, 40):
            ids = batch(text, step).chunk(ranks)[rank]
            loss = wrapped(input_ids=ids, labels=ids).loss
            loss.backward()
            engine.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 4 and rank == 0:
                seen = engine.last_step
                print(
                    f"step {step + 1}: loss {loss.item():.2f}, busiest rank {seen.max_mean:.2f} of the mean, "
                    f"{seen.max_mean_static:.2f} without balancing"
                )
    model.save_pretrained("trained")  # every rank calls it; the file holds all experts
    with torch.no_grad():
        loss = model.eval()(input_ids=(ids := batch(text, 1000)), labels=ids).loss
    if rank == 0:
        print(f"on other text: loss {loss.item():.4f}")
    engine.close()
    dist.destroy_process_group()


def reload() -> None:
    """What was trained is a model of transformers: nothing of ours is in it."""
    model = Qwen3MoeForCausalLM.from_pretrained("trained").eval()
    ids = batch(read_text(), 1000)
    with torch.no_grad():
        print(f"on other text: loss {model(input_ids=ids, labels=ids).loss.item():.4f}")


if __name__ == "__main__":
    {"record": record, "train": train, "reload": reload}[sys.argv[1]]()
