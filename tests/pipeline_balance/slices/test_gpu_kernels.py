"""The kernels for GPUs, on the host: which one is chosen, what it is called with, and what the merged chunks give.

`tests.helpers.gpu_operators` stands for torch's operators. `tests/gpu/test_slices.py` has the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline_balance.slices import gpu, kernel
from pipeline_balance.slices.attention import attend
from pipeline_balance.slices.kernel import CPU, EFFICIENT, FLASH, Kernel
from pipeline_balance.slices.store import ChunkStore, Unit, active
from prophet.errors import SpecError
from tests.helpers import gpu_operators
from tests.helpers.gpu_operators import chosen_for, on_a_gpu
from tests.helpers.sliced_attention import DOCUMENTS, EVEN, UNEVEN, check

CUDA = torch.device("cuda", 0)
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
NEAR = 1e-12


# --- merged chunks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BRAIN, SINGLE])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("starts", [EVEN, UNEVEN, (0, 1, 12)])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_chunks_are_merged_to_the_definition(
    documents: Tensor | None, starts: Sequence[int], kv_heads: int, again: bool, dtype: torch.dtype
) -> None:
    with on_a_gpu(dtype) as calls:
        check(starts, documents, again, kv_heads, tolerance=NEAR)
    name = gpu_operators.FLASH if dtype == BRAIN and documents is None else gpu_operators.EFFICIENT
    assert name in calls
    if documents is None:
        assert {*calls} == {name, f"{name}_backward"}


@pytest.mark.parametrize("dtype", [BRAIN, SINGLE])
@pytest.mark.parametrize(("width", "value_width"), [(5, 3), (16, 9), (12, 12), (264, 264)])
def test_heads_of_any_width(width: int, value_width: int, dtype: torch.dtype) -> None:
    for documents in (None, DOCUMENTS):
        with on_a_gpu(dtype) as calls:
            check(UNEVEN, documents, width=width, value_width=value_width, tolerance=NEAR)
        # flash attention has no wider heads than 256
        assert (gpu_operators.FLASH in calls) <= (dtype == BRAIN and width <= 256)


@pytest.mark.parametrize("dtype", [BRAIN, SINGLE])
@pytest.mark.parametrize("window", [1, 3, 5, 8, 11])
@pytest.mark.parametrize("starts", [EVEN, UNEVEN, (0, 12)])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_windows_sinks_and_caps(
    documents: Tensor | None, starts: Sequence[int], window: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a window's masks are in parts
    monkeypatch.setattr("pipeline_balance.slices.attention.CUT", 3)
    monkeypatch.setattr("pipeline_balance.slices.attention.BLOCK", 1)
    with on_a_gpu(dtype):
        check(starts, documents, window=window, sink=True, tolerance=NEAR)
        check(starts, documents, window=window, soft_cap=0.5, tolerance=NEAR)


def test_a_slice_attends_to_itself_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline_balance.slices.attention.CUT", 4)
    monkeypatch.setattr("pipeline_balance.slices.attention.BLOCK", 1)
    with on_a_gpu(BRAIN) as calls:
        check((0, 12), None, tolerance=NEAR)
    assert calls == {gpu_operators.FLASH: 1, f"{gpu_operators.FLASH}_backward": 1}


# --- one call --------------------------------------------------------------------------------------------------


def given(rows: int, columns: int, kv_heads: int = 2, width: int = 8) -> list[Tensor]:
    """Queries, keys and values [2, H, T, D] in the order [B, T, H, D]."""
    torch.manual_seed(0)
    shapes = [(2, rows, 4, width), (2, columns, kv_heads, width), (2, columns, kv_heads, width)]
    return [torch.randn(shape, dtype=torch.float64).transpose(1, 2) for shape in shapes]


def mask_of(rows: int, columns: int) -> Tensor:
    """A mask of 0 and -inf for two sequences, whose rows are cut out of longer ones; row 1 sees nothing."""
    torch.manual_seed(1)
    seen = torch.rand(2, 1, rows, columns + 3) < 0.7
    seen[:, :, min(1, rows - 1)] = False
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, float("-inf"))[..., 3:]


def strange(tensor: Tensor) -> Tensor:
    """The same numbers where no kernel for GPUs can load them."""
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), float("nan"), dtype=tensor.dtype)
    wide[..., 1::2] = tensor
    return wide[..., 1::2]


@pytest.mark.parametrize("move", [lambda t: t, lambda t: t.contiguous(), strange], ids=["token", "head", "strange"])
@pytest.mark.parametrize("dtype", [BRAIN, SINGLE])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("rows", "columns", "causal", "masked"),
    [
        (5, 5, True, False),
        (1, 1, True, False),
        (33, 32, False, False),
        (32, 70, False, False),
        (5, 7, False, True),
        (40, 33, False, True),
        (1, 9, False, True),
        # more columns than rows: the causal mask is that of the first ones, as on the CPU
        (5, 9, True, False),
    ],
)
def test_a_kernel_gives_what_that_of_the_cpu_gives(
    rows: int, columns: int, causal: bool, masked: bool, kv_heads: int, dtype: torch.dtype, move: Callable[..., Tensor]
) -> None:
    query, key, value = given(rows, columns, kv_heads)
    mask = mask_of(rows, columns) if masked else None
    how: dict[str, Any] = {"attn_mask": mask, "scale": 0.3}
    out, lse = kernel.forward(query, key, value, 0.0, causal, **how)
    grad = torch.randn_like(out)
    # as if merged with more: the kernel takes them as they come
    lse_of_all = lse + 0.1
    grads = kernel.backward(grad, query, key, value, out, lse_of_all, 0.0, causal, **how)
    with on_a_gpu(dtype):
        query, key, value = (move(t) for t in (query, key, value))
        found, found_lse = kernel.forward(query, key, value, 0.0, causal, **how)
        # rows of longer ones
        long = F.pad(lse_of_all, (2, 3))[..., 2:-3]
        found_grads = kernel.backward(move(grad), query, key, value, move(out), long, 0.0, causal, **how)
    for one, other in zip((found, found_lse, *found_grads), (out, lse, *grads), strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


# --- the choice ------------------------------------------------------------------------------------------------


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Sets the compute capability of GPUs."""

    def put(*found: int) -> None:
        monkeypatch.setattr(gpu, "capability", lambda device: found)
        kernel.chosen.cache_clear()

    put(9, 0)
    yield put
    kernel.chosen.cache_clear()


@pytest.mark.parametrize(
    ("found", "dtype", "width", "plain", "expected"),
    [
        ((9, 0), BRAIN, 128, True, FLASH),
        ((8, 0), HALF, 256, True, FLASH),
        ((12, 0), BRAIN, 256, True, FLASH),
        # wider than what it has, or has gradients for
        ((9, 0), BRAIN, 257, True, EFFICIENT),
        ((8, 6), BRAIN, 200, True, EFFICIENT),
        ((8, 9), HALF, 192, True, FLASH),
        ((12, 0), BRAIN, 200, True, EFFICIENT),
        ((12, 1), HALF, 224, True, EFFICIENT),
        ((12, 1), HALF, 192, True, FLASH),
        ((10, 0), BRAIN, 200, True, FLASH),
        # without dropout these have gradients everywhere
        ((8, 6), HALF, 256, True, FLASH),
        ((9, 0), BRAIN, 128, False, EFFICIENT),
        ((9, 0), SINGLE, 128, True, EFFICIENT),
        ((7, 5), HALF, 128, True, EFFICIENT),
        ((7, 5), SINGLE, 128, False, EFFICIENT),
    ],
)
def test_the_kernel_for_a_case(
    found: tuple[int, int],
    dtype: torch.dtype,
    width: int,
    plain: bool,
    expected: Kernel,
    capability: Callable[..., None],
) -> None:
    capability(*found)
    assert kernel.chosen(CUDA, dtype, width, plain) is expected
    assert kernel.chosen(torch.device("cpu"), dtype, width, plain) is CPU


@pytest.mark.parametrize(
    ("found", "device", "dtype", "words"),
    [
        ((9, 0), "cuda", torch.float64, r"no kernel of torch for GPUs .* in torch\.float64: train slices in float32"),
        ((7, 5), "cuda", BRAIN, r"in bfloat16 needs compute capability 8\.0, cuda.* has 7\.5: train in float16"),
        ((9, 0), "xpu", BRAIN, "has kernels for CPUs and NVIDIA GPUs, got tensors on xpu"),
    ],
)
def test_a_case_without_a_kernel_is_named(
    found: tuple[int, int], device: str, dtype: torch.dtype, words: str, capability: Callable[..., None]
) -> None:
    capability(*found)
    with FakeTensorMode():
        parts = [torch.empty(2, 4, 6, 8, dtype=dtype, device=device) for _ in range(3)]
        with active(ChunkStore(), Unit(0, 0, 2)):
            with pytest.raises(SpecError, match=words):
                attend(parts[0], parts[1], parts[2], layer=0)
            # scores with a cap are computed by sums and products alone
            assert attend(parts[0], parts[1], parts[2], layer=0, soft_cap=2.0).shape == (2, 4, 6, 8)


def test_amd_is_named(capability: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(SpecError, match="on AMD's, log-sum-exps differ"):
        kernel.chosen(CUDA, BRAIN, 128, True)


# --- torch's own shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [BRAIN, SINGLE])
def test_torchs_operators_take_the_calls_and_give_the_twins_shapes(dtype: torch.dtype, masked: bool) -> None:
    """Torch's rules for shapes and strides need no GPU; the twins are held to them."""
    rows, columns = 33, 70
    shapes = {}
    for device in ("meta", "cpu"):
        with chosen_for(dtype) if device == "meta" else on_a_gpu(dtype):
            kind = dtype if device == "meta" else torch.float64
            query, key, value = (t.to(device, kind) for t in given(rows, columns))
            seen = torch.ones(2, rows, columns, dtype=torch.bool)
            mask = kernel.additive(seen, query) if masked else None
            out, lse = kernel.forward(query, key, value, 0.0, False, attn_mask=mask, scale=0.3)
            assert lse.dtype == (torch.float32 if device == "meta" else kind)
            grads = kernel.backward(out, query, key, value, out, lse, 0.0, False, attn_mask=mask, scale=0.3)
            shapes[device] = [(t.shape, t.stride(), t.device.type == device, t.dtype == kind) for t in (out, *grads)]
            shapes[device].append((lse.shape, lse.stride(), lse.device.type == device, True))
    assert shapes["meta"] == shapes["cpu"]


def test_a_mask_made_for_a_gpu_is_not_copied() -> None:
    query = torch.empty(2, 4, 32, 8, dtype=BRAIN, device="meta")
    mask = kernel.additive(torch.ones(2, 32, 37, dtype=torch.bool), query)
    assert mask.shape == (2, 1, 32, 37)
    assert mask.stride() == (32 * 48, 32 * 48, 48, 1)
    for part in (mask, mask[:, :, 16:, 32:], kernel.band(32, 40, 3, False, BRAIN, query.device)):
        made = gpu._mask_of_all(part, query[:, :, : part.shape[2]])
        assert made is not None
        assert made.shape == (2, 4, *part.shape[2:])
        assert made.untyped_storage()._cdata == part.untyped_storage()._cdata
    odd = gpu._mask_of_all(mask[:, :, :, 5:], query)
    assert odd is not None
    assert odd.stride() == (32 * 32, 0, 32, 1)


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        (
            "_scaled_dot_product_flash_attention",
            "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, "
            "bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, ",
        ),
        (
            "_scaled_dot_product_flash_attention_backward",
            "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
            "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, "
            "Tensor philox_offset, *, float? scale=None) -> ",
        ),
        (
            "_scaled_dot_product_efficient_attention",
            "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, "
            "float dropout_p=0., bool is_causal=False, *, float? scale=None) -> (Tensor output, Tensor log_sumexp, ",
        ),
        (
            "_scaled_dot_product_efficient_attention_backward",
            "(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor attn_bias, Tensor out, "
            "Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, float dropout_p, bool[4] grad_input_mask, "
            "bool is_causal=False, *, float? scale=None) -> ",
        ),
    ],
)
def test_torchs_operators_have_these_arguments(name: str, schema: str) -> None:
    assert str(getattr(torch.ops.aten, name).default._schema).startswith(f"aten::{name}{schema}")
