"""Attention over slices on a GPU against its definition in float64; `python -m tests.gpu` runs this, too.

`tests/pipeline_balance/slices/` has the same on the host, with twins of torch's operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pipeline_balance.slices import kernel
from pipeline_balance.slices.kernel import EFFICIENT, FLASH
from tests.helpers.sliced_attention import DOCUMENTS, EVEN, UNEVEN, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="no NVIDIA GPU"),
]
# products in float32 may use TensorFloat-32
TOLERANCES = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", [*TOLERANCES])
LONG = (0, 100, 356, 500)
LONG_DOCUMENTS = torch.stack([(torch.arange(500) >= 90).long(), (torch.arange(500) >= 333).long()])


def skip_without_bfloat16(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no bfloat16")


@DTYPES
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("starts", "documents"),
    [(EVEN, None), (UNEVEN, None), (UNEVEN, DOCUMENTS), (LONG, None), (LONG, LONG_DOCUMENTS), ((0, 1, 12), None)],
)
def test_chunks_are_merged_to_the_definition(
    starts: Sequence[int], documents: Tensor | None, kv_heads: int, again: bool, dtype: torch.dtype
) -> None:
    skip_without_bfloat16(dtype)
    check(starts, documents, again, kv_heads, device="cuda", dtype=dtype, tolerance=TOLERANCES[dtype], width=64)


@DTYPES
@pytest.mark.parametrize(("width", "value_width"), [(5, 3), (16, 9), (192, 128), (256, 256), (264, 264)])
def test_heads_of_any_width(width: int, value_width: int, dtype: torch.dtype) -> None:
    skip_without_bfloat16(dtype)
    near = TOLERANCES[dtype]
    for documents in (None, LONG_DOCUMENTS):
        check(LONG, documents, device="cuda", dtype=dtype, tolerance=near, width=width, value_width=value_width)


@DTYPES
@pytest.mark.parametrize("window", [1, 5, 120])
@pytest.mark.parametrize("documents", [None, LONG_DOCUMENTS])
def test_windows_sinks_and_caps(documents: Tensor | None, window: int, dtype: torch.dtype) -> None:
    skip_without_bfloat16(dtype)
    near = TOLERANCES[dtype]
    check(LONG, documents, device="cuda", dtype=dtype, tolerance=near, width=64, window=window, sink=True)
    check(LONG, documents, device="cuda", dtype=dtype, tolerance=near, width=64, window=window, soft_cap=0.5)


def test_masks_hide_all_from_some_tokens() -> None:
    """Torch's kernel says -inf there, and 0 for the output; it said NaN once."""
    query = torch.randn(1, 2, 40, 8, device="cuda")
    seen = torch.ones(1, 40, 40, dtype=torch.bool).tril(-1)
    mask = kernel.additive(seen, query)
    out, lse = kernel.forward(query, query, query, 0.0, False, attn_mask=mask, scale=0.3)
    assert not out[:, :, 0].any()
    assert torch.isinf(kernel.without_blind(lse, mask)[:, :, 0]).all()
    assert out.isfinite().all()


def test_each_kernel_is_used() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert kernel.chosen(device, torch.float32, 64, True) is EFFICIENT
    newer = torch.cuda.get_device_capability() >= (8, 0)
    assert kernel.chosen(device, torch.float16, 64, True) is (FLASH if newer else EFFICIENT)
