"""Saved tensors on the host change no number; they leave the device, and nothing is left of them."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

pytest.importorskip("transformers", reason="the models are transformers'")

from benchmarks.slices.by_hand import Dims, chunk_gradient_bytes, kept_per_token, unit_bytes
from benchmarks.slices.live_bytes import LiveBytes
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.closed_forms import offloaded_peak_bytes, sliced_peak_bytes
from pipeline_balance.schedules.sliced import Order
from pipeline_balance.slices.adapter import SlicedTransformers
from pipeline_balance.slices.options import Recompute, SliceOptions
from pipeline_balance.slices.parts import Sliced
from pipeline_balance.slices.saved.offload import Offloader
from pipeline_balance.slices.store import current
from prophet.errors import SpecError, StageFailed
from tests.helpers import sliced_layers as own
from tests.helpers.launch import run_gloo
from tests.helpers.sliced_models import batch_of, model_of, pipe_of

LINK = 1e9
# family, kind of batch, slices, options of the model, options of the pipeline
Case = tuple[str, str, int, dict[str, Any], dict[str, Any]]
CASES: list[Case] = [
    ("llama", "silent", 4, {}, {}),
    ("qwen3", "packed", 8, {"tied": True, "frozen": 1}, {"stages": 2, "recompute": "selective"}),
    ("gpt2", "plain", 4, {"resid_pdrop": 0.3, "embd_pdrop": 0.3}, {"order": "aligned", "recompute": "full"}),
    ("mixtral", "plain", 4, {"router_aux_loss_coef": 3.0}, {"order": "aligned"}),
    ("llama", "plain", 4, {}, {"order": "aligned", "balance": "exchange", "keep_bytes": 1 << 20}),
    ("llama", "padded", 5, {}, {"balance": "uneven"}),
]
MORE: list[Case] = [
    ("gemma2", "plain", 4, {"sliding_window": 6}, {}),
    ("gpt_oss", "packed", 4, {}, {"recompute": "full"}),
    ("deepseek_v3", "plain", 4, {"dtype": torch.float32}, {}),
    ("llama", "plain", 4, {"recompute": True}, {}),
    ("llama", "packed", 8, {"dtype": torch.bfloat16}, {"balance": "uneven"}),
    ("qwen3_moe", "packed", 4, {"router_aux_loss_coef": 3.0}, {"recompute": "selective"}),
    ("llama", "silent", 4, {}, {"stages": 2, "order": "aligned", "balance": "exchange", "recompute": "full"}),
    ("qwen3", "packed", 4, {}, {"order": "aligned", "balance": "exchange", "recompute": "selective"}),
]


def _offloader(pipe: ElasticPipeline) -> Offloader:
    assert isinstance(pipe.model, Sliced)
    assert pipe.model.offloader is not None
    return pipe.model.offloader


def _left(pipe: ElasticPipeline) -> tuple[int, int]:
    """Bytes that either pool still has."""
    moved = _offloader(pipe)
    return moved.host_bytes, sum(m.here.nbytes for some in moved._away.values() for m in some if m.here is not None)


def _steps(pipe: ElasticPipeline, model: nn.Module, kind: str) -> tuple[list[float], list[Tensor]]:
    """Three updates of Adam, an evaluation between, and the last gradients."""
    batch = batch_of(kind)
    losses = [pipe.step(*batch, max_norm=0.5), pipe.evaluate(*batch)]
    losses += [pipe.step(*batch, max_norm=0.5) for _ in range(2)]
    # the mode of evaluation has no dropout
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None and not p.is_meta]
    return [*losses, pipe.evaluate(*batch)], grads


def _both(rank: int, size: int, cases: list[Case]) -> list[Any]:
    found = []
    for family, kind, slices, options, how in cases:
        outcomes, moved = [], []
        for share in (0.0, 0.5, 1.0):
            model = model_of(family, **options)
            pipe = pipe_of(model, slices, offload=share, host_bytes_per_s=LINK if share else None, **how)
            outcomes.append(_steps(pipe, model, kind))
            if share:
                host = _offloader(pipe).host
                assert host is not None
                # checkpoints of frozen layers save what no backward reads
                assert host.sent_bytes == host.fetched_bytes or "frozen" in options
                assert host.busy_s == (host.sent_bytes + host.fetched_bytes) / LINK
                assert _left(pipe) == (0, 0)
                moved.append(host.sent_bytes)
        found.append((outcomes, moved))
    return found


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, CASES),
        pytest.param(1, CASES[:1] + CASES[5:], marks=pytest.mark.slow),
        pytest.param(2, MORE, marks=pytest.mark.slow),
        pytest.param(4, [c for c in CASES + MORE if "stages" not in c[4]], marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_bit_for_bit_those_without(size: int, cases: list[Case]) -> None:
    for found in run_gloo(_both, size, cases, timeout_s=300.0):
        for case, (outcomes, moved) in zip(cases, found, strict=True):
            (losses, grads), *others = outcomes
            for other_losses, other_grads in others:
                assert other_losses == losses, case
                assert len(grads) == len(other_grads)
                assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True)), case
            assert 0 < moved[0] < moved[1], case


def _own_layers(rank: int, size: int) -> list[Any]:
    """Dropout, replicas, accumulation."""
    found: list[Any] = []
    for share in (0.0, 1.0):
        pipe = own.pipe(own.layers(seed=rank), SliceOptions(4, offload=share), replicas=2)
        losses = []
        for call in range(4):
            inputs, labels = own.batch(call // 2, call % 2)
            mine = {n: t.chunk(2)[pipe.groups.replica] for n, t in inputs.items()}
            losses.append(pipe.step(mine, labels.chunk(2)[pipe.groups.replica], update=call % 2 == 1))
        found.append((losses, pipe.state_dict()))
        if share:
            host = _offloader(pipe).host
            assert host is not None
            assert host.sent_bytes > 0
    return found


def test_layers_of_ones_own_with_dropout_and_replicas() -> None:
    for (losses, state), (others, other) in run_gloo(_own_layers, 2):
        assert losses == others
        assert all(torch.equal(state[n], other[n]) for n in state)


def _freed(rank: int, size: int) -> list[int]:
    pipe = pipe_of(model_of("llama"), 4, offload=1.0, order="aligned")
    pipe.step(*batch_of())
    moved = _offloader(pipe)
    saved: list[tuple[Any, Any]] = []
    alive: list[int] = []
    pack, send = moved.pack, moved._send

    def watch(tensor: Tensor) -> Any:
        one = pack(tensor)
        saved.append((one, ref(tensor.untyped_storage())))
        return one

    def leave(action: Any, chunks: Any) -> None:
        send(action, chunks)
        gone = [storage for one, storage in saved if one.memory is not None]
        alive.append(sum(storage() is not None for storage in gone))
        alive.append(-len(gone))
        saved.clear()

    moved.pack, moved._send = watch, leave  # type: ignore[method-assign]
    pipe.step(*batch_of())
    return alive


def test_what_leaves_is_freed_at_once() -> None:
    for alive in run_gloo(_freed, 2):
        assert set(alive[::2]) == {0}
        # tens of tensors in every pass
        assert max(alive[1::2]) < -20


def _failing(rank: int, size: int) -> tuple[Any, ...]:
    model = own.layers()
    pipe = own.pipe(model, SliceOptions(4, offload=1.0), timeout_s=30.0)
    pipe.step(*own.batch(0, 0))
    # fails with some passes away, in a backward and in a forward
    moved, memories = _offloader(pipe), []
    assert moved.host is not None
    send, attend = moved.host.send, model[own.BLOCKS].attention

    def sent(here: Tensor) -> Tensor:
        there = send(here)
        memories.append(ref(there))
        return there

    moved.host.send = sent  # type: ignore[method-assign]
    calls = []

    def fail(*given: Any, **options: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("asked to fail")
        return attend(*given, **options)

    model[own.BLOCKS].attention = fail
    with pytest.raises(StageFailed, match="asked to fail"):
        pipe.step(*own.batch(1, 0))
    return (*_left(pipe), len(memories), sum(memory() is not None for memory in memories), moved.taking)


def test_an_error_leaves_both_pools_empty() -> None:
    for here, there, sent, alive, taking in run_gloo(_failing, 2):
        assert (here, there, alive, taking) == (0, 0, 0, False)
        assert sent > 0


class _Changing(nn.Module):
    """Changes in place what the first slices have saved for their backward."""

    def forward(self, x: Tensor) -> Tensor:
        found = x.exp()
        out = found * 2
        if not isinstance(x, FakeTensor) and current()[1].slice == 0:
            found.add_(1.0)
        return out


def _in_place(rank: int, size: int) -> list[str]:
    said = []
    for share in (0.0, 1.0):
        model = own.layers()
        layers = nn.Sequential(*model[:-1], _Changing(), model[-1])
        pipe = own.pipe(layers, SliceOptions(4, offload=share), timeout_s=30.0)
        with pytest.raises(StageFailed) as caught:
            pipe.step(*own.batch(0, 0))
        said.append(str(caught.value))
    return said


def test_what_was_changed_in_place_is_an_error_too() -> None:
    for without, with_it in run_gloo(_in_place, 1):
        assert "inplace operation" in without
        assert "changed in place" in with_it


def _bytes(rank: int, size: int, slices: int, order: Order, recompute: Recompute, moved: int) -> tuple[int, ...]:
    model = model_of("llama", torch.float32, num_hidden_layers=2 * size - 2, num_key_value_heads=4)
    options: dict[str, Any] = {"order": order, "recompute": recompute, "microbatches": 4}
    pipe = pipe_of(model, slices, offload=moved / slices, **options)
    batch = batch_of(rows=4, tokens=64)
    # the first step counts what layers keep in hooks of its own
    pipe.step(*batch)
    assert isinstance(pipe.model, SlicedTransformers)
    count = LiveBytes(pipe.model)
    pipe.step(*batch)
    layers = len(set(pipe.layers) - {0, 2 * size - 1})
    dims, each = Dims.of(model.config), (1, 64 // slices, layers)
    whole = unit_bytes(dims, *each, recompute)
    kept = kept_per_token(dims, recompute)
    # keys and values, and what the first layer has received
    stays = 64 // slices * (layers * kept["keys and values (chunk)"] + (rank > 0) * kept["input of the layer"])
    gradients = chunk_gradient_bytes(dims, *each)
    beyond = (size - 1 - rank) * (1 if order == "minimal" else 2)
    form = offloaded_peak_bytes(rank, size, slices, moved, (stays, whole - stays), gradients, order)
    return count.peak, form, sliced_peak_bytes(slices + beyond, slices, whole, gradients)


@pytest.mark.parametrize(
    ("size", "order", "slices", "recompute", "moved"),
    [
        (2, "minimal", 8, "selective", 4),
        (2, "aligned", 8, "full", 6),
        pytest.param(2, "minimal", 8, "none", 6, marks=pytest.mark.slow),
        pytest.param(4, "aligned", 8, "none", 4, marks=pytest.mark.slow),
    ],
)
def test_a_rank_keeps_the_bytes_of_the_closed_form(
    size: int, order: Order, slices: int, recompute: Recompute, moved: int
) -> None:
    for rank, (peak, form, without) in enumerate(run_gloo(_bytes, size, slices, order, recompute, moved)):
        print(rank, peak, form, without, peak / form, peak / without)
        assert peak == form
        assert peak < without


def _auto(rank: int, size: int, link: float | None) -> tuple[list[float], str, int, int]:
    pipe = pipe_of(model_of("llama"), 8, order="aligned", offload="auto", host_bytes_per_s=link, microbatches=4)
    losses, sent = [], [0]
    for _ in range(4):
        losses.append(pipe.step(*batch_of()))
        host = _offloader(pipe).host
        assert host is not None
        sent.append(host.sent_bytes)
    return losses, _offloader(pipe).why, sent[2] - sent[1], sent[4] - sent[3]


def test_auto_takes_what_the_schedule_hides_and_says_why() -> None:
    losses = [run_gloo(_without, 2)[0]]
    for link, text in ((1e15, "offload: "), (1.0, "offload: 0%"), (None, "offload: ")):
        for found, why, first, last in run_gloo(_auto, 2, link):
            assert found == losses[0]
            assert text in why
            assert "GB/s" in why
            # memory counts until times are known
            assert first > 0
            if link == 1.0:
                assert last == 0
                assert "a backward would wait" in why
            elif link is not None:
                # nothing goes that would not make the peak smaller
                assert 0 < last <= first


def _without(rank: int, size: int) -> list[float]:
    pipe = pipe_of(model_of("llama"), 8, order="aligned", microbatches=4)
    return [pipe.step(*batch_of()) for _ in range(4)]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), "most", True, None, [0.5]])
def test_other_shares_are_refused(share: Any) -> None:
    with pytest.raises(SpecError, match=r"offload must be a share from 0 to 1, or \"auto\""):
        SliceOptions(4, offload=share)


def test_other_links_are_refused() -> None:
    for link in (0, -1.0, float("inf"), float("nan"), "fast", True):
        with pytest.raises(SpecError, match="host_bytes_per_s must be a number of bytes above 0"):
            SliceOptions(4, offload=0.5, host_bytes_per_s=link)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="host_bytes_per_s needs offload"):
        SliceOptions(4, host_bytes_per_s=1e9)
    assert not SliceOptions(1, offload=0.5).offloads
