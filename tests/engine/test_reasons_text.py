"""What an engine, a step and a conversion print, and what the library's loggers carry."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

import prophet
from prophet.ranks.threads import ThreadCollective
from tests.helpers.house import ROOT
from tests.helpers.support import FixedPlanner, TinyModel, everywhere, next_id_loss, on_threads


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.arange(48).view(4, 12) % 7
    optimizer.zero_grad()
    next_id_loss(model(ids), ids, 1 / 48).backward()
    optimizer.step()


def two_steps(group: ThreadCollective) -> list[str]:
    model = TinyModel(group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = prophet.EngineConfig(slots_per_rank=4, planner=FixedPlanner(everywhere(8, 2)))
    engine = prophet.attach(model, optimizer, config=config)
    found = [repr(engine)]
    for _ in range(3):
        step(model, optimizer)
        found.append(str(engine.last_step))
    assert engine.last_step is not None
    exposed_s = sum(s for name, s in engine.last_step.seconds.items() if name.startswith("exposed_"))
    assert found[-1].endswith(f"copies, {1e3 * exposed_s:.1f} ms exposed")
    engine.close()
    return found


def test_one_line_each_and_the_log_of_the_first_rank(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="prophet"):
        first, second = on_threads(2, two_steps)
    assert first[0] == second[0] == "Engine(2 layers, 2 ranks, planner fixed)"
    assert first[1].startswith("step 0: max/mean ")
    assert " without), 0 copies, " in first[1]
    assert " without), 16 copies, " in first[2]
    assert not any("\n" in line for line in first)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"attached {first[0]}, topology uniform", *first[1:3]]  # of one rank, without the third step
    assert {record.name.split(".")[0] for record in caplog.records} == {"prophet"}
    with caplog.at_level(logging.DEBUG, logger="prophet"):
        caplog.clear()
        first, _ = on_threads(2, two_steps)
    assert [r.getMessage() for r in caplog.records][-1] == first[3]


class Block(nn.Module):
    """Top-1, over a list of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, ids = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out[ids == e] = expert(x[ids == e]) * scores[ids == e, None]
        return out


def test_a_conversion(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="prophet"):
        report = prophet.convert(nn.Sequential(Block()))
    said = "1 MoE blocks converted, rank 0 of 1: 80 of 80 expert parameters stay here"
    assert repr(report) == f"ConversionReport({said})"
    assert [record.getMessage() for record in caplog.records] == [str(report)]
    assert str(report).startswith(said)


@pytest.mark.parametrize("package", ["prophet", "pipeline_balance"])
def test_nothing_is_printed_unless_asked_for(package: str) -> None:
    code = f"import logging, {package}\nlogging.getLogger('{package}.x').warning('seen')\n"
    silent = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert silent.stdout + silent.stderr == ""
