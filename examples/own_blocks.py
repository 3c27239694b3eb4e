"""A GPT with MoE blocks of your own, as most people write them, and an optimizer that exists. Run it on two processes:

torchrun --standalone --nproc-per-node 2 examples/own_blocks.py

Lines that balancing needs: `convert`, `attach`, and `engine.clip_grad_norm_` in place of torch's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import prophet

DIM, EXPERTS, TOKENS = 64, 8, 65


class Expert(nn.Module):
    """Norm first, and dropout at its end: no plain feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.SiLU(), nn.Linear(4 * DIM, DIM), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y


class SparseMoE(nn.Module):
    """Every token visits its two best experts; `aux` is the load-balancing loss of the last pass."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores = self.router(tokens)
        weights, chosen = scores.topk(2, dim=-1)
        weights = weights.softmax(dim=-1)
        visits = F.one_hot(chosen, EXPERTS).sum(dim=1).float().mean(dim=0)
        self.aux = EXPERTS * (scores.softmax(dim=-1).mean(dim=0) * visits).sum()
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            row, choice = (chosen == e).nonzero(as_tuple=True)
            if row.numel():
                out.index_add_(0, row, expert(tokens[row]) * weights[row, choice, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 4, batch_first=True)
        self.moe = SparseMoE()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = x + self.attention(h, h, h, attn_mask=mask, is_causal=True, need_weights=False)[0]
        y: Tensor = x + self.moe(self.norm2(x))
        return y


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same model on every rank
    blocks = [Block(), Block()]
    model = nn.Sequential(nn.Embedding(TOKENS, DIM), *blocks, nn.Linear(DIM, TOKENS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    report = prophet.convert(model, optimizer=optimizer)
    engine = prophet.attach(model, optimizer)
    if rank == 0:
        print(report)
    ddp = DistributedDataParallel(model)

    data = torch.Generator().manual_seed(1 + rank)  # every rank has tokens of its own
    for step in range(20):
        # some tokens come far more often than others, and so do the experts that they visit
        ids = (torch.rand(4, 65, generator=data) ** 4 * TOKENS).long()
        loss = F.cross_entropy(ddp(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + 0.01 * sum(block.moe.aux for block in blocks)).backward()
        engine.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found = engine.last_step
        if rank == 0 and found is not None and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}, rank max/mean {found.max_mean:.3f}", end=" ")
            print(f"(without balancing {found.max_mean_static:.3f}), {found.copies.sum()} copies of experts")

    engine.close()
    prophet.revert(model)  # every rank has all experts again, under their own names
    if rank == 0:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters are back")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
