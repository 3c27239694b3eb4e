"""Naive twins of what `pipeline_balance` computes in a faster way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline_balance.dynamics.sparse_attention import HashAttention
from pipeline_balance.schedules.links import Transfers, message_s
from pipeline_balance.spec import LayerCost, PartitionError, RankLimits, StageMap, fits, rank_loads_s


def partition_by_time_naive(
    costs: Sequence[LayerCost], limits: Sequence[RankLimits], *, microbatches: int, transfer_s: Transfers = 0.0
) -> tuple[float, StageMap]:
    """The naive twin of `partition_by_time`: tries every set of boundaries. Returns (bottleneck_s, one best map)."""
    links = message_s(transfer_s, len(limits)).tolist()
    layers, stages = len(costs), len(limits)
    best: tuple[float, StageMap] | None = None
    for inner in itertools.combinations(range(1, layers), stages - 1):
        stage_map = StageMap.contiguous((0, *inner, layers))
        if fits(costs, stage_map, limits, microbatches):
            bottleneck = max(a + b for a, b in zip(rank_loads_s(costs, stage_map, limits), links, strict=True))
            if best is None or bottleneck < best[0]:
                best = (bottleneck, stage_map)
    if best is None:
        raise PartitionError(f"none of the partitions of {layers} layers over {stages} ranks fits")
    return best


def global_top_k_naive(parts: Sequence[Tensor], keep: int) -> list[Tensor]:
    """The naive twin of `global_top_k`, for all ranks at once: sort everything."""
    flat = torch.cat([p.detach().abs().reshape(-1) for p in parts])
    order = torch.sort(flat, descending=True, stable=True).indices[:keep]
    mask = torch.zeros(flat.numel(), dtype=torch.bool)
    mask[order] = True
    return [m.view(p.shape) for m, p in zip(mask.split([p.numel() for p in parts]), parts, strict=True)]


def hash_attention_naive(layer: HashAttention, x: Tensor) -> Tensor:
    """The naive twin of `HashAttention.forward`: dense scores and one mask."""
    q, k, v = (t.unflatten(-1, (layer.heads, -1)).transpose(1, 2) for t in layer.qkv(x).chunk(3, dim=-1))
    of_q, of_k = (
        torch.stack([torch.stack([layer.buckets(t, p) for t, p in zip(row, layer.planes, strict=True)]) for row in x])
        for x in (q, k)
    )
    tokens = x.shape[1]
    earlier = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril(-1)
    same = of_q[..., :, None] == of_k[..., None, :]
    mask = (same & earlier) | torch.eye(tokens, dtype=torch.bool, device=x.device)
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    projected: Tensor = layer.out(mixed.transpose(1, 2).flatten(2))
    return projected


def squared_deviations(costs: Sequence[LayerCost], limits: Sequence[RankLimits], stage_map: StageMap) -> float:
    """The sum of squared deviations of the ranks' loads from the even split of all seconds over all speeds."""
    mean = sum(c.total_s for c in costs) / sum(r.speed for r in limits)
    return sum((load - mean) ** 2 for load in rank_loads_s(costs, stage_map, limits))
