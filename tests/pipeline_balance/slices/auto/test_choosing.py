"""What a rank does not measure: pieces of slices on devices, whose time nobody reads yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline_balance.slices.auto import choosing
from pipeline_balance.slices.auto.choice import AutoSlices
from prophet.errors import SpecError


def test_on_a_device_costs_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "free_bytes", lambda device: 1 << 30)
    model: Any = SimpleNamespace(device=torch.device("cuda"), asked=AutoSlices(), units=())
    batch: Any = SimpleNamespace(parts=(), collective=SimpleNamespace(rank=0), stages=(), ranks=())
    with pytest.raises(SpecError, match="timed on CPUs only, not on cuda: give AutoSlices its costs"):
        choosing.Choosing._figures(model, batch)
