"""What slices cost with torch's operations alone: those of one step, over whole sequences and over rows of slices.

One thread, nothing of ours around them. The ratio is the speed that slices can reach on this processor at best, with
these kernels.

Shape legend: T tokens, S tokens of a slice, N slices, H heads, D head dim.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import Row
from benchmarks.measure import quartiles, seconds_of
from benchmarks.slices.workload import VOCABULARY, Work
from pipeline_balance.slices.attention import _triangle
from prophet.machine.memory import keep_memory
from prophet.ranks.collective import Collective

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Parts = Sequence[slice]
"""The tokens of each slice; one slice of all tokens is the whole sequence."""


class Operations:
    """The operations of one layer of `work`, by group, each on made-up tensors that it never changes."""

    def __init__(self, work: Work) -> None:
        self.work = work
        hidden, wide, heads = work.hidden, work.intermediate, work.heads
        keys = hidden // heads * work.kv_heads
        self.widths = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)]
        self.widths += [(hidden, wide), (hidden, wide), (wide, hidden)]
        self.given = {width: torch.randn(work.tokens, width) for width in {hidden, keys, wide}}
        self.weights = [torch.randn(out, into) for into, out in self.widths]
        self.head = torch.randn(VOCABULARY, hidden)
        self.labels = torch.randint(VOCABULARY, (work.tokens,))
        self.query, self.key, self.value, self.grad = (
            torch.randn(1, work.tokens, h, hidden // heads).transpose(1, 2)
            for h in (heads, work.kv_heads, work.kv_heads, heads)
        )
        self.out, self.lse = _forward(self.query, self.key, self.value, 0.0, True)

    def groups(self) -> dict[str, tuple[Callable[[Parts], None], int]]:
        """Each group, and how often a step runs it."""
        layers = self.work.layers
        return {
            "linear forward": (self.linear, layers),
            "linear backward, inputs": (self.linear_inputs, layers),
            "linear backward, weights": (self.linear_weights, layers),
            "attention forward": (self.attention, layers),
            "attention backward": (self.attention_backward, layers),
            "norms, rotation, products": (self.elementwise, layers),
            "head and loss": (self.loss, 1),
        }

    def linear(self, parts: Parts) -> None:
        for part in parts:
            for (into, _), weight in zip(self.widths, self.weights, strict=True):
                F.linear(self.given[into][part], weight)

    def linear_inputs(self, parts: Parts) -> None:
        for part in parts:
            for (_, out), weight in zip(self.widths, self.weights, strict=True):
                self.given[out][part] @ weight

    def linear_weights(self, parts: Parts) -> None:
        sums: list[Tensor] = []
        for part in parts:
            found = [self.given[out][part].T @ self.given[into][part] for into, out in self.widths]
            sums = [a.add_(b) for a, b in zip(sums, found, strict=True)] if sums else found

    def attention(self, parts: Parts) -> None:
        for part in parts:
            query = self.query[:, :, part]
            if len(parts) == 1:
                _forward(query, self.key, self.value, 0.0, True)
                continue
            total, total_lse = torch.empty_like(query), torch.empty(query.shape[:3])
            for rows, columns, diagonal in self._blocks(part):
                out, lse = _forward(query[:, :, rows], *self._seen(columns), 0.0, diagonal)
                mine, mine_lse = total[:, :, rows], total_lse[:, :, rows]
                if diagonal:
                    mine.copy_(out)
                    mine_lse.copy_(lse)
                else:
                    mine.lerp_(out, torch.sigmoid(lse - mine_lse).unsqueeze(-1))
                    torch.logaddexp(mine_lse, lse, out=mine_lse)

    def attention_backward(self, parts: Parts) -> None:
        sums = [torch.zeros_like(self.key), torch.zeros_like(self.value)] if len(parts) > 1 else []
        for part in parts:
            given = [t[:, :, part] for t in (self.grad, self.query, self.out, self.lse)]
            if len(parts) == 1:
                _backward(*given[:2], self.key, self.value, *given[2:], 0.0, True)
                continue
            total = torch.zeros_like(given[1])
            for rows, columns, diagonal in self._blocks(part):
                grad, query, out, lse = (t[:, :, rows] for t in given)
                found = _backward(grad, query, *self._seen(columns), out, lse, 0.0, diagonal)
                total[:, :, rows].add_(found[0])
                for one, other in zip(sums, found[1:], strict=True):
                    one[:, :, columns].add_(other)

    def _seen(self, columns: slice) -> tuple[Tensor, Tensor]:
        return self.key[:, :, columns], self.value[:, :, columns]

    def _blocks(self, part: slice) -> list[tuple[slice, slice, bool]]:
        """Rows of the slice, columns of the sequence, and whether they are on the diagonal."""
        size = part.stop - part.start
        own = [
            (rows, slice(part.start + columns.start, part.start + columns.stop), diagonal)
            for rows, columns, diagonal in _triangle(0, size)
        ]
        return own + ([(slice(0, size), slice(0, part.start), False)] if part.start else [])

    def elementwise(self, parts: Parts) -> None:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

        norm = LlamaRMSNorm(self.work.hidden)
        hidden, wide = self.given[self.work.hidden][None], self.given[self.work.intermediate][None]
        angles = self.query[0, :1]
        for part in parts:
            given, grad = _leaf(hidden[:, part]), hidden[:, part]
            for _ in range(2):
                torch.autograd.backward(norm(given) + given, grad)
            query, key = _leaf(self.query[:, :, part]), _leaf(self.key[:, :, part])
            turned = apply_rotary_pos_emb(query, key, angles[:, part], angles[:, part])
            torch.autograd.backward(turned, (query.detach(), key.detach()))
            gate, up = _leaf(wide[:, part]), _leaf(wide[:, part])
            torch.autograd.backward(F.silu(gate) * up, wide[:, part])

    def loss(self, parts: Parts) -> None:
        head = _leaf(self.head)
        for part in parts:
            given = _leaf(self.given[self.work.hidden][part])
            F.cross_entropy(F.linear(given, head), self.labels[part], reduction="sum").backward()


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def floor(
    collective: Collective, *, device: str, case: str, work: dict[str, int], slices: Sequence[int], repeats: int
) -> list[Row]:
    """A row per group and number of slices, then one of all groups. Every round times whole sequences and slices in
    turn; the first one does not count.
    """
    keep_memory()
    job = Work(**work)
    seconds: dict[tuple[str, int], list[float]] = {}
    for group, (run, times) in Operations(job).groups().items():
        for turn in range(repeats + 1):
            for n in (1, *slices):
                size = job.tokens // n
                parts = [slice(at, at + size) for at in range(0, job.tokens, size)]
                taken = times * seconds_of(partial(run, parts))
                if turn:
                    seconds.setdefault((group, n), []).append(taken)
    groups = dict.fromkeys(group for group, _ in seconds)
    for n in (1, *slices):
        seconds["all", n] = [sum(x) for x in zip(*(seconds[group, n] for group in groups), strict=True)]
    named = job.named(case, "", 1)
    shared = {name: named[name] for name in ("case", "T", "dims", "threads")}
    return [shared | _row(g, n, seconds[g, 1], seconds[g, n]) for n in slices for g in (*groups, "all")]


def _row(group: str, n: int, whole_s: Sequence[float], sliced_s: Sequence[float]) -> Row:
    speeds = [a / b for a, b in zip(whole_s, sliced_s, strict=True)]
    return {
        "operations": group,
        "n": n,
        "whole_s": statistics.median(whole_s),
        "sliced_s": statistics.median(sliced_s),
        "speed_over_whole": statistics.median(speeds),
        "speed_quartiles": quartiles(speeds),
    }
