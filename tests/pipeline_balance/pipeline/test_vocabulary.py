"""A head in blocks beside the definition, and the memory that it takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gradient_memory.peak import PeakBytes
from pipeline_balance.pipeline.model.vocabulary import IGNORED
from pipeline_balance.pipeline.run.vocabulary import Head

TOKENS, HIDDEN, WORDS = 12, 4, 1000


def _made(dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, WORDS).to(dtype)
    labels = torch.randint(WORDS, (TOKENS,))
    labels[3:5] = IGNORED
    return head, 30.0 * torch.randn(TOKENS, HIDDEN, dtype=dtype), labels


@pytest.mark.parametrize("padded", [0, 600])
@pytest.mark.parametrize("rows", [1, 7, 300, WORDS])
def test_blocks_find_what_the_definition_does(rows: int, padded: int) -> None:
    """Also where the first words are none: their bias is -inf."""
    head, x, labels = _made()
    with torch.no_grad():
        head.bias[:padded] = -torch.inf
    labels = torch.where(labels >= 0, labels.clamp(min=padded), labels)
    wanted_x = x.clone().requires_grad_()
    loss = 0.5 * F.cross_entropy(head(wanted_x), labels, reduction="sum")
    loss.backward()
    own, grads = Head(head, rows * TOKENS * 8), [torch.zeros_like(p) for p in head.parameters()]
    sums = own.sums(x, labels)
    most, total, target = sums.figures
    log_sum = most + total.log()
    found_x = own.gradients(sums, log_sum, 0.5, *grads)
    torch.testing.assert_close(0.5 * (log_sum - target)[labels != IGNORED].sum(), loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found_x, wanted_x.grad, rtol=1e-10, atol=1e-12)
    for grad, p in zip(grads, head.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-10, atol=1e-12)


def test_a_block_that_other_sums_have_taken_is_made_again() -> None:
    head, x, labels = _made()
    own, other = Head(head, 300 * TOKENS * 8), Head(head, 300 * TOKENS * 8)
    first = own.sums(x, labels)
    own.sums(-x, labels)
    most, total, _ = first.figures
    log_sum = most + total.log()
    a = own.gradients(first, log_sum, 1.0, None, None)
    b = other.gradients(other.sums(x, labels), log_sum, 1.0, None, None)
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_block_of_logits_is_there_at_a_time(dtype: torch.dtype) -> None:
    head, x, labels = _made(dtype)
    block = 100 * TOKENS * dtype.itemsize
    own, grad = Head(head, block), torch.zeros_like(head.weight)
    with PeakBytes() as peak, torch.no_grad():
        sums = own.sums(x, labels)
        most, total, _ = sums.figures
        own.gradients(sums, most + total.log(), 1.0, grad, None)
    # figures and marks of tokens, and hidden states' gradients
    few = TOKENS * (16 * 8 + 3 * HIDDEN * dtype.itemsize)
    assert block < peak.peak_bytes <= block + few
