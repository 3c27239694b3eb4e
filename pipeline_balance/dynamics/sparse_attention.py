"""Dynamic block-sparse attention by hashing: a token attends to earlier tokens that fall into the same bucket.

Shape legend: B sequences, H heads, T tokens, d dim of a head, C buckets, S tokens per tile. Queries and keys are hashed
by the signs of random projections (after Pagliardini et al., 2023; DynMo, Section 2.4), sorted by bucket, and cut into
tiles; only tiles in which a query and an earlier key share a bucket are computed. A token always attends to itself, so
no row is empty. Which tiles those are depends on the data, hence the load of a layer does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from prophet.errors import SpecError


class HashAttention(nn.Module):
    """Causal attention within buckets, [B, T, D] -> [B, T, D].

    Args:
        dim: D.
        heads: H, which divide D.
        bits: Hash bits, which give 2**bits buckets; 0 is dense.
        tile: S, tokens per tile.

    Attributes:
        bits: How many of the bits hash now. Lower it, and raise it again while training, to sharpen the buckets.
        density: The share of causal tiles that the last forward computed.
    """

    planes: Tensor

    def __init__(self, dim: int, heads: int, *, bits: int = 3, tile: int = 16) -> None:
        super().__init__()
        if dim % heads or bits < 0 or tile < 1:
            raise SpecError(
                f"need dim a multiple of heads, bits >= 0 and tile >= 1, got {dim}, {heads}, {bits}, {tile}"
            )
        self.heads, self.bits, self.tile = heads, bits, tile
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.register_buffer("planes", torch.randn(heads, dim // heads, bits))
        self.density = 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        computed = 0
        heads = []
        for b in range(x.shape[0]):
            for h in range(self.heads):
                mixed, count = self._one(q[b, h], k[b, h], v[b, h], self.planes[h])
                heads.append(mixed)
                computed += count
        rows = math.ceil(x.shape[1] / self.tile)
        causal = len(heads) * rows * (rows + 1) // 2
        self.density = computed / causal if causal else 1.0
        mixed = torch.stack(heads).unflatten(0, (x.shape[0], self.heads))
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected

    def buckets(self, x: Tensor, planes: Tensor) -> Tensor:
        """Hash every row of x [T, d] to its bucket, [T]."""
        signs = (x.detach() @ planes[:, : self.bits] > 0).to(torch.int64)
        return (signs << torch.arange(self.bits, device=x.device)).sum(dim=-1)

    def _one(self, q: Tensor, k: Tensor, v: Tensor, planes: Tensor) -> tuple[Tensor, int]:
        """One head of one sequence: [T, d] each -> ([T, d], tiles computed)."""
        q_bucket, k_bucket = self.buckets(q, planes), self.buckets(k, planes)
        q_order, k_order = torch.sort(q_bucket, stable=True).indices, torch.sort(k_bucket, stable=True).indices
        scale = 1.0 / math.sqrt(q.shape[-1])
        # a token always attends to itself, so no row is empty
        own = (q * k).sum(dim=-1) * scale
        out: list[Tensor] = []
        tiles = 0
        for rows in q_order.split(self.tile):
            scores, values = [own[rows, None]], []
            for columns in k_order.split(self.tile):
                # positions are those of the sequence: sorting by bucket must not let a token see later ones
                allowed = (q_bucket[rows, None] == k_bucket[columns]) & (rows[:, None] > columns)
                if not bool(allowed.any()):
                    continue
                tiles += 1
                scores.append((q[rows] @ k[columns].t() * scale).masked_fill(~allowed, float("-inf")))
                values.append(v[columns])
            weights = torch.cat(scores, dim=1).softmax(dim=1)
            mixed = weights[:, :1] * v[rows]
            out.append(mixed + weights[:, 1:] @ torch.cat(values) if values else mixed)
        # the inverse permutation, to the order of the sequence
        back = torch.empty_like(q_order)
        back[q_order] = torch.arange(q_order.numel(), device=q.device)
        return torch.cat(out)[back], tiles
