"""Engine.state_dict(): a resumed run uses the placements that the saved one would have used, and goes on bit by bit."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch

import prophet
from prophet.engine.config import Experiment
from prophet.engine.history import History
from prophet.engine.replan import ReplanConfig
from prophet.errors import SpecError
from prophet.ranks.threads import ThreadCollective
from tests.helpers.support import RandomPlanner, TinyModel, next_id_loss, on_threads


class Run:
    """A float32 model, its optimizer and engine on one rank."""

    def __init__(self, group: ThreadCollective, blocks: int = 2, **varied: Any) -> None:
        self.rank, self.steps = group.rank, 0
        self.model = TinyModel(group=group, blocks=blocks, seed=3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        options = prophet.EngineConfig(planner=RandomPlanner(1, 0.6))
        experiment = Experiment(check_every=1, **varied)
        self.engine = prophet.attach(self.model, self.optimizer, config=options, experiment=experiment)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            ids = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(10 * self.steps + self.rank))
            self.optimizer.zero_grad()
            loss = next_id_loss(self.model(ids), ids, 0.1)
            loss.backward()
            self.optimizer.step()
            losses.append(float(loss.detach()))
            self.steps += 1
        return losses

    def save(self) -> dict[str, Any]:
        content = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "engine": self.engine.state_dict(),
        }
        file = io.BytesIO()
        torch.save(content, file)
        file.seek(0)
        found: dict[str, Any] = torch.load(file, weights_only=True)
        return found

    def load(self, saved: dict[str, Any], *, engine: bool = True) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if engine:
            self.engine.load_state_dict(saved["engine"])
        self.steps = 3


@pytest.mark.parametrize(
    "options",
    [
        {"replan": ReplanConfig(predict="ema", interval=1, gain_loss=None)},
        {"replan": ReplanConfig(predict="best", interval=1, gain_loss=None)},
        {"replan": ReplanConfig(interval=4)},
    ],
    ids=["ema", "best", "replan"],
)
def test_a_resumed_run_goes_on_bit_by_bit(options: dict[str, Any]) -> None:
    def body(group: ThreadCollective) -> bool:
        first = Run(group, **options)
        first.train(3)
        saved = first.save()
        wanted = first.train(3)
        assert first.engine.last_step is not None
        placements = first.engine.last_step.placements
        again = Run(group, **options)
        again.load(saved)
        assert again.train(3) == wanted
        assert again.engine.last_step is not None
        assert again.engine.last_step.placements == placements
        assert again.engine.step == first.engine.step == 6
        for (name, a), (_, b) in zip(first.model.named_parameters(), again.model.named_parameters(), strict=True):
            assert torch.equal(a, b), name
        # the check can fail: without the engine's state the first step has no replicas
        without = Run(group, **options)
        without.load(saved, engine=False)
        without.train(1)
        assert without.engine.last_step is not None
        for run in (first, again, without):
            run.engine.close()
        return any(not p.is_static for p in placements) and all(
            p.is_static for p in without.engine.last_step.placements
        )

    assert all(on_threads(2, body))


def test_what_is_not_this_engines_is_refused_and_nothing_changes() -> None:
    def body(group: ThreadCollective) -> None:
        run = Run(group)
        run.train(2)
        saved = run.save()["engine"]
        before = run.engine.state_dict()

        def broken(**changes: Any) -> dict[str, Any]:
            return {**copy.deepcopy(saved), **changes}

        other = copy.deepcopy(saved["plans"])
        other[1]["holds"] = ~other[1]["holds"]
        shorter = copy.deepcopy(saved["histories"])
        shorter[0]["ring"] = shorter[0]["ring"][:, :-1]
        negative = copy.deepcopy(saved["histories"])
        negative[1]["ring"] -= 1000
        for state, text in (
            ({}, "expected the state of an engine, got nothing"),
            (broken(step=-1), "step: expected an integer from 0 on"),
            (broken(ranks=4), "the state is of 4 ranks; expected 2"),
            (broken(plans=saved["plans"][:1]), "the state is of 1 MoE layers, expected 2"),
            (broken(plans=[saved["plans"][0], 7]), "plan of MoE layer 1: expected a plan, got int"),
            (broken(plans=other), "the home rank must hold its expert"),
            (broken(histories=shorter), "history of MoE layer 0, ring: expected int32"),
            (broken(histories=negative), "History.ring: must not be negative"),
            (broken(histories=[saved["histories"][0], 7]), "history of MoE layer 1: expected tensors by name, got int"),
            (broken(histories=[{}, {}]), "history of MoE layer 0, ring: expected a tensor, got NoneType"),
        ):
            with pytest.raises(SpecError, match=text.replace("[", r"\[")):
                run.engine.load_state_dict(state)
        after = run.engine.state_dict()
        assert torch.equal(after["plans"][0]["holds"], before["plans"][0]["holds"])
        run.engine.ensure_step()
        with pytest.raises(RuntimeError, match=r"state_dict\(\) belongs between two steps"):
            run.engine.state_dict()
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\) belongs between two steps"):
            run.engine.load_state_dict(saved)
        run.engine.close()

    on_threads(2, body)


def test_a_history_restored_predicts_the_same() -> None:
    rng = np.random.default_rng(0)
    history, again = (History(2, 3, window=3, adaptive=True) for _ in range(2))
    for _ in range(5):
        history.observe(rng.integers(0, 100, (2, 3)))
    again.restore(history.arrays())
    load = rng.integers(0, 100, (2, 3))
    for mode in ("last", "ema", "mean", "best"):
        np.testing.assert_array_equal(again.forecast(load, mode), history.forecast(load, mode))  # type: ignore[arg-type]
