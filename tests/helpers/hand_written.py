"""Ten MoE blocks as people write them, each after the habits of one well-known code, and a model made of two of them.

None of them knows of the library. `FOUND` are those that a conversion finds without a line; the counts of `NAMED` never
change with the input, so their experts have to be named.

Shape legend: N tokens, K top-k, E experts, C capacity, D model dim, H hidden dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.support import seeded

DIM, HIDDEN, EXPERTS, TOP_K = 8, 12, 8, 2


def feed_forward(activation: type[nn.Module] = nn.GELU, *after: nn.Module, bias: bool = True) -> nn.Sequential:
    """Two linear layers, and whatever comes after them."""
    return nn.Sequential(nn.Linear(DIM, HIDDEN, bias=bias), activation(), nn.Linear(HIDDEN, DIM, bias=bias), *after)


class NoisyDropout(nn.Module):
    """After makeMoE: trained noise in the router, in evaluation, too; dropout in the experts; a mask per expert."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.noise = nn.Linear(DIM, EXPERTS), nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(feed_forward(nn.ReLU, nn.Dropout(0.1)) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.route(x)
        logits = logits + torch.randn_like(logits) * F.softplus(self.noise(x))
        top, ids = logits.topk(TOP_K, dim=-1)
        shares = torch.full_like(logits, -math.inf).scatter(-1, ids, top).softmax(dim=-1).view(-1, EXPERTS)
        tokens, y = x.reshape(-1, DIM), torch.zeros_like(x).view(-1, DIM)
        for e, expert in enumerate(self.experts):
            mask = (ids == e).any(dim=-1).view(-1)
            if mask.any():
                y[mask] += expert(tokens[mask]) * shares[mask, e].unsqueeze(1)
        return y.view(x.shape)


class Swiglu(nn.Module):
    """A gated expert without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class FloatSoftmax(nn.Module):
    """After Mixtral's loop: softmax in float32, normalised; every expert is called, with no rows, too; two results."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Swiglu() for _ in range(EXPERTS))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        tokens = hidden_states.view(-1, DIM)
        logits = self.gate(tokens)
        weights, chosen = F.softmax(logits, dim=1, dtype=torch.float).topk(TOP_K, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(tokens.dtype)
        y = torch.zeros_like(tokens)
        mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for e in range(EXPERTS):
            place, at = torch.where(mask[e])
            y.index_add_(0, at, self.experts[e](tokens[None, at].reshape(-1, DIM)) * weights[at, place, None])
        return y.view(hidden_states.shape), logits


class SwitchCapacity(nn.Module):
    """After a Switch transformer: jitter, top-1, a capacity by order; what is dropped passes through; five results."""

    def __init__(self, capacity_factor: float = 1.25) -> None:
        super().__init__()
        self.switch, self.capacity_factor = nn.Linear(DIM, EXPERTS), capacity_factor
        self.experts = nn.ModuleList(feed_forward() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
        tokens = x.reshape(-1, DIM)
        seen = tokens * torch.empty_like(tokens).uniform_(0.98, 1.02) if self.training else tokens
        probs = self.switch(seen).softmax(dim=-1)
        top, ids = probs.max(dim=-1)
        mine = [(ids == e).nonzero().view(-1) for e in range(EXPERTS)]
        capacity = int(self.capacity_factor * len(tokens) / EXPERTS)
        dropped = torch.cat([m[capacity:] for m in mine])
        mine = [m[:capacity] for m in mine]
        results = [self.experts[e](tokens[mine[e]]) for e in range(EXPERTS)]
        y = torch.zeros_like(tokens)
        for at, result in zip(mine, results, strict=True):
            y[at] = result
        y[dropped] = tokens[dropped]
        y = y * top.unsqueeze(1)
        counts = torch.stack([(ids == e).sum() for e in range(EXPERTS)]).to(x.dtype)
        return y.view(x.shape), counts, probs.sum(dim=0), len(dropped), top


class NoisyTopK(nn.Module):
    """After Shazeer's noisy top-k as David Rau wrote it: the router is two parameters, zero at first; noise in
    training; results are combined as logarithms; the loss is returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(feed_forward(nn.ReLU, nn.Softmax(dim=1)) for _ in range(EXPERTS))
        self.w_gate = nn.Parameter(torch.zeros(DIM, EXPERTS))
        self.w_noise = nn.Parameter(torch.zeros(DIM, EXPERTS))

    def forward(self, x: Tensor, epsilon: float = 1e-2) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, DIM)
        logits = tokens @ self.w_gate
        if self.training:
            logits = logits + torch.randn_like(logits) * (F.softplus(tokens @ self.w_noise) + epsilon)
        top, ids = logits.topk(TOP_K, dim=1)
        gates = torch.zeros_like(logits).scatter(1, ids, top.softmax(dim=1))
        importance = gates.sum(dim=0)
        loss = importance.var() / (importance.mean() ** 2 + 1e-10)
        expert_of, order = torch.nonzero(gates.t(), as_tuple=True)
        parts = torch.split(tokens[order], (gates > 0).sum(dim=0).tolist())
        results = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        weighted = results.exp() * gates[order, expert_of].unsqueeze(1)
        combined = torch.zeros_like(tokens).index_add(0, order, weighted)
        combined = torch.where(combined == 0, torch.finfo(x.dtype).eps, combined)
        return combined.log().view(x.shape), loss


class GroupedGate(nn.Module):
    """Sigmoid scores, a bias for the selection, the best two of four groups, a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, DIM) * 0.3)
        self.register_buffer("correction", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).sigmoid()
        biased = (scores + self.get_buffer("correction")).view(len(x), 4, -1)
        best = biased.topk(2, dim=-1)[0].sum(dim=-1).topk(2, dim=-1)[1]
        closed = torch.ones(len(x), 4, dtype=torch.bool).scatter(1, best, False)
        ids = biased.masked_fill(closed.unsqueeze(-1), -math.inf).flatten(1).topk(TOP_K, dim=-1)[1]
        weights = scores.gather(1, ids)
        return weights / weights.sum(dim=-1, keepdim=True) * 2.5, ids


class GroupsAndShared(nn.Module):
    """After DeepSeek: a gate that is a module with a parameter, experts without tokens skipped, a shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = GroupedGate()
        self.experts = nn.ModuleList(Swiglu() for _ in range(EXPERTS))
        self.shared_experts = Swiglu()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, DIM)
        weights, ids = self.gate(tokens)
        y = torch.zeros_like(tokens)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
        for e in range(EXPERTS):
            if counts[e] == 0:
                continue
            at, place = torch.where(ids == e)
            y[at] += self.experts[e](tokens[at]) * weights[at, place, None]
        y = y + self.shared_experts(tokens)
        return y.view(x.shape)


class TwoPaths(nn.Module):
    """After minimind: one way in training, another in evaluation; the loss is left on the block."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, DIM) * 0.3)
        self.experts = nn.ModuleList(Swiglu() for _ in range(EXPERTS))
        self.aux_loss: Any = 0

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, DIM)
        scores = F.linear(tokens, self.weight).softmax(dim=-1)
        weights, ids = scores.topk(TOP_K, dim=-1)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        if not self.training:
            y = torch.zeros_like(tokens)
            for e, expert in enumerate(self.experts):
                at, place = torch.where(ids == e)
                if len(at):
                    y.index_add_(0, at, expert(tokens[at]) * weights[at, place, None])
            return y.view(x.shape)
        load = F.one_hot(ids.flatten(), EXPERTS).to(x.dtype).mean(dim=0)
        self.aux_loss = (scores.mean(dim=0) * load * EXPERTS).sum() * 0.01
        copies, flat = tokens.repeat_interleave(TOP_K, dim=0), ids.view(-1)
        y = torch.empty_like(copies)
        for e, expert in enumerate(self.experts):
            y[flat == e] = expert(copies[flat == e]).to(y.dtype)
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1).view(x.shape)


class PaddedBuffers(nn.Module):
    """After GShard: einsum into buffers [E, C, D] of a fixed size, on which the experts run whole."""

    def __init__(self, capacity_factor: float = 2.0) -> None:
        super().__init__()
        self.gate, self.capacity_factor = nn.Linear(DIM, EXPERTS, bias=False), capacity_factor
        self.experts = nn.ModuleList(feed_forward() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, DIM)
        capacity = int(self.capacity_factor * len(tokens) * TOP_K / EXPERTS)
        weights, ids = self.gate(tokens).softmax(dim=-1).topk(TOP_K, dim=-1)
        combine = x.new_zeros(len(tokens), EXPERTS, capacity)
        used = torch.zeros(EXPERTS, dtype=torch.long)
        for k in range(TOP_K):
            mask = F.one_hot(ids[:, k], EXPERTS)
            place = ((mask.cumsum(dim=0) - 1 + used) * mask).sum(dim=-1)
            used = used + mask.sum(dim=0)
            fits = place < capacity
            combine[torch.arange(len(tokens))[fits], ids[fits, k], place[fits]] = weights[fits, k]
        buffers = torch.einsum("nec,nd->ecd", (combine > 0).to(x.dtype), tokens)
        results = torch.stack([expert(buffer) for expert, buffer in zip(self.experts, buffers, strict=True)])
        return torch.einsum("nec,ecd->nd", combine, results).view(x.shape)


class ExpertChoice(nn.Module):
    """Every expert chooses as many tokens as every other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(feed_forward() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, DIM)
        scores = self.gate(tokens).softmax(dim=-1)
        weights, chosen = scores.t().topk(len(tokens) * TOP_K // EXPERTS, dim=-1)
        y = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            y = y.index_add(0, chosen[e], expert(tokens[chosen[e]]) * weights[e].unsqueeze(1))
        return y.view(x.shape)


class TokenByToken(nn.Module):
    """A loop over tokens: an expert is called once for every token that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(feed_forward() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, DIM)
        weights, ids = self.gate(tokens).softmax(dim=-1).topk(TOP_K, dim=-1)
        rows = []
        for n, token in enumerate(tokens):
            parts = [weights[n, k] * self.experts[int(ids[n, k])](token.unsqueeze(0))[0] for k in range(TOP_K)]
            rows.append(torch.stack(parts).sum(dim=0))
        return torch.stack(rows).view(x.shape)


class LowRank(nn.Module):
    """A frozen linear layer with a small trained one beside it."""

    def __init__(self, wide: int, out: int, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(wide, out).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(wide, rank, bias=False), nn.Linear(rank, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + 2.0 * self.lora_b(self.lora_a(x))
        return y


class TopKThenSoftmaxLora(nn.Module):
    """Softmax over the chosen alone; experts with LoRA in them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(LowRank(DIM, HIDDEN), nn.GELU(), LowRank(HIDDEN, DIM)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, DIM)
        top, ids = self.gate(tokens).topk(TOP_K, dim=-1)
        weights, y = top.softmax(dim=-1), torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            at, place = torch.where(ids == e)
            if len(at):
                y[at] += weights[at, place, None] * expert(tokens[at])
        return y.view(x.shape)


FOUND: tuple[type[nn.Module], ...] = (
    NoisyDropout,
    FloatSoftmax,
    SwitchCapacity,
    NoisyTopK,
    GroupsAndShared,
    TwoPaths,
    TokenByToken,
    TopKThenSoftmaxLora,
)
NAMED: tuple[type[nn.Module], ...] = (PaddedBuffers, ExpertChoice)
NOISY = (NoisyDropout, SwitchCapacity, NoisyTopK)  # they draw random numbers in training


class HandWritten(nn.Module):
    """Two blocks of a kind, each after a linear layer, with random parameters in float64; rows [N, D] in and out."""

    def __init__(self, kind: type[nn.Module], seed: int = 5) -> None:
        super().__init__()
        with seeded(seed):
            self.mixes = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
            self.blocks = nn.ModuleList(kind() for _ in range(2))
            self.double()
            with torch.no_grad():
                for p in self.parameters():
                    p.normal_(std=0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The last rows, and the sum of what the blocks hand out beside theirs."""
        extra = x.new_zeros(())
        for mix, block in zip(self.mixes, self.blocks, strict=True):
            out = block(mix(x))
            y, *others = out if isinstance(out, tuple) else (out,)
            extra = extra + sum(o.square().mean() for o in others if isinstance(o, Tensor))
            aux = getattr(block, "aux_loss", None)
            extra = extra if aux is None else extra + aux
            x = x + y
        return x, extra
