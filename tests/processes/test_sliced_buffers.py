"""Buffers of pipelines over slices: as many as a rank holds slices, and none is made by a second step."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.closed_forms import sliced_peak_units
from pipeline_balance.schedules.sliced import sliced
from pipeline_balance.schedules.transfers import received_ahead, with_messages
from pipeline_balance.slices.options import SliceOptions
from pipeline_balance.slices.parts import Sliced
from tests.helpers import sliced_layers as own
from tests.helpers.launch import run_gloo
from tests.helpers.received import most_received

BYTES = own.ROWS * own.TOKENS * own.DIM * 8  # of a microbatch's boundary


def _buffers(rank: int, size: int, slices: int, order: Any, stages: int = 1) -> list[tuple[int, int]]:
    pipe = own.pipe(own.layers(), SliceOptions(slices, stages, order))
    executor = pipe.stages.executor
    assert executor is not None
    found = []
    for update in range(3):
        inputs, labels = own.batch(update, 0)
        shorter = own.TOKENS if update < 2 else own.TOKENS // 2
        pipe.step({n: t[:, :shorter] for n, t in inputs.items()}, labels[:, :shorter])
        found.append((executor.received.allocated, pipe.meter.boundary_bytes))
        if not update:
            _check_chunks(pipe, sliced_peak_units(rank, size, 1, own.PARTS, slices, order), slices, stages)
        pipe.evaluate(inputs, labels)
    return found


def _check_chunks(pipe: ElasticPipeline, peak: int, slices: int, stages: int) -> None:
    """Keys and values of each slice that a layer holds, and the gradients of all but one slice of a microbatch."""
    assert isinstance(pipe.model, Sliced)
    layers = sum(isinstance(layer, own.Block) for layer in pipe.layers.values())
    each = own.ROWS * (own.TOKENS // slices) * own.DIM // 2 * 8  # bytes of a slice's keys, in float64
    if stages == 1:
        assert pipe.model.store.n_bytes == layers * 2 * (peak + slices - 1) * each


@pytest.mark.parametrize(
    ("size", "slices", "order"), [(2, 6, "minimal"), pytest.param(4, 6, "aligned", marks=pytest.mark.slow)]
)
def test_receive_buffers_are_as_many_as_a_rank_holds_slices(size: int, slices: int, order: Any) -> None:
    for rank, ((first, n_bytes), again, (more, shorter)) in enumerate(run_gloo(_buffers, size, slices, order)):
        peak = sliced_peak_units(rank, size, 1, own.PARTS, slices, order)
        # the slices that are held, and two more; the first rank receives gradients alone
        most = peak + 2 if rank else 2
        assert 0 < first <= most
        assert again == (first, n_bytes)
        assert n_bytes == first * BYTES // slices
        assert first < own.PARTS * slices
        # buffers of lengths that are no longer used are let go
        assert shorter == (more - first) * BYTES // slices // 2


@pytest.mark.parametrize("order", ["minimal", pytest.param("aligned", marks=pytest.mark.slow)])
def test_receive_buffers_with_two_stages_per_rank(order: Any) -> None:
    """As many as the schedule asks for, which `test_transfers` bounds, and no more in a second step."""
    for rank, ((first, n_bytes), again, _) in enumerate(run_gloo(_buffers, 2, 6, order, 2)):
        schedule = sliced(2, 2, own.PARTS, 6, order)
        steps = with_messages(schedule.actions, schedule.stage_ranks)[rank]
        assert first == most_received(received_ahead(steps))[0]
        assert again == (first, n_bytes)
