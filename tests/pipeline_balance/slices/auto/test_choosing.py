"""What ranks tell each other: pieces on devices are not timed, and of all figures the slowest rank's count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline_balance.slices.auto import choosing
from pipeline_balance.slices.auto.choice import AutoSlices, SliceSeconds
from prophet.errors import SpecError


def test_on_a_device_costs_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "free_bytes", lambda device: 1 << 30)
    model: Any = SimpleNamespace(device=torch.device("cuda"), asked=AutoSlices(), units=())
    batch: Any = SimpleNamespace(parts=(), collective=SimpleNamespace(rank=0), stages=(), ranks=())
    with pytest.raises(SpecError, match="timed on CPUs only, not on cuda: give AutoSlices its costs"):
        choosing.Choosing._figures(model, batch)


def test_of_all_figures_the_slowest_ranks_count() -> None:
    """Replicas may have measured other lengths, and each rank its own layers."""

    def told(units: dict[str, Any], query_bytes: float, **more: Any) -> dict[str, Any]:
        ends = {"boundary_bytes": 4.0, "wide": 1, "heads": [4, 2], "call_s": [1.0, 2.0], "query_bytes": query_bytes}
        return {"costs": ends | {"units": units} | more}

    def unit(lengths: dict[str, list[float]], window: int | None = None, **kept: float) -> dict[str, Any]:
        again = {how: 0.5 for how in kept if how != "none"}
        found: dict[str, Any] = {"lengths": lengths, "kept_bytes": kept, "again_s": again, "window": window}
        return found | {"gradient_bytes": 1.0, "attentions": 1}

    model: Any = SimpleNamespace(units=(None, None))
    links = {"latency_s": 0.5, "byte_s": 0.25}
    every = [
        told(
            {"0": unit({"8": [1.0, 5.0, 0.1, 0.1], "16": [2.0, 4.0, 0.0, 0.0]}, 20, none=8.0, full=2.0, selective=4.0)},
            64.0,
        ),
        told({"1": unit({"8": [1.0, 1.0, 0.0, 0.0]}, none=2.0, full=1.0)}, 64.0, call_s=[3.0, 1.0]),
        told({"0": unit({"4": [1.0, 1.0, 0.0, 0.0], "8": [2.0, 3.0, 0.0, 0.2]}, 30, none=9.0, full=3.0)}, 32.0),
    ]
    found = choosing.Choosing._slowest(model, every, links)
    first, second = found.units
    assert first.lengths == (
        SliceSeconds(tokens=4, forward_s=1.0, backward_s=1.0),
        SliceSeconds(tokens=8, forward_s=2.0, backward_s=5.0, forward_column_s=0.1, backward_column_s=0.2),
        SliceSeconds(tokens=16, forward_s=2.0, backward_s=4.0),
    )
    # the second replica cannot run one mode in the first layer, so that nobody does
    assert (first.kept_bytes, first.again_s, first.window) == ({"none": 9.0, "full": 3.0}, {"full": 0.5}, 30)
    assert (second.kept_bytes, second.window) == ({"none": 2.0, "full": 1.0}, None)
    assert (found.heads, found.call_s, found.query_bytes) == ((4, 2), (3.0, 2.0), 64.0)
    assert (found.latency_s, found.byte_s, found.boundary_bytes) == (0.5, 0.25, 4.0)
    every[2]["costs"]["units"]["0"]["window"] = None
    every[1]["costs"]["query_bytes"] = 0.0
    other = choosing.Choosing._slowest(model, every, links)
    # where a layer sees all tokens, and where attention cannot be exchanged
    assert (other.units[0].window, other.query_bytes) == (None, 0.0)
