"""Expert-parallel layers in stages: whose group they must have, what balances them, and which time is theirs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import nn

import prophet
from pipeline_balance.pipeline.measure.meter import Meter
from pipeline_balance.pipeline.run.experts import StageExperts, TimedCollective
from prophet.errors import SpecError
from prophet.layer.moe import MoE
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation
from prophet.ranks.threads import ThreadWorld

OP = Operation("test")


def units(column: Collective) -> list[nn.Module]:
    """The second has experts over the column, the third has all of its experts here."""
    alone = ThreadWorld(1).collective(0)
    moe = MoE(4, 8, 2, 1, group=column)
    return [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), moe), MoE(4, 8, 2, 1, group=alone)]


def test_experts_over_the_column_are_found() -> None:
    def run(column: Collective) -> list[int]:
        made = units(column)
        found = StageExperts(made, column.rank, (0, 1), Meter())
        assert found.units == (1,)
        moe = made[1][1]
        assert found.parameters == set(moe.experts.parameters())
        assert all(p.prophet_averaged for p in found.parameters)
        with pytest.raises(SpecError, match=r"cannot save a model while the replicas of layers \[1\] share"):
            found.check_static("save a model")
        return list(found.units)

    assert ThreadWorld(2, timeout_s=20.0).run(run) == [[1], [1]]
    StageExperts([nn.Linear(2, 2)], 0, (0,), Meter()).check_static("save a model")


def test_another_group_than_the_column_is_refused_on_all_of_its_ranks() -> None:
    def run(column: Collective) -> str:
        # processes 4 and 6 share the experts, 4 and 5 run the layer
        with pytest.raises(SpecError) as caught:
            StageExperts(units(column), 4 + 2 * column.rank, (4, 5), Meter())
        return str(caught.value)

    for said in ThreadWorld(2, timeout_s=20.0).run(run):
        assert said.startswith(
            "layer 1 (1) shares its experts over processes [4, 6], but the replicas of its stage are"
        )
        assert "[4, 5]: make it with group=prophet.parallel.expert_groups(pipeline_ranks)[1]" in said


class Recorder:
    """A balancer that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def ensure_step(self) -> None:
        self.told.append("begin")

    def no_sync(self) -> AbstractContextManager[None]:
        @contextmanager
        def inside() -> Iterator[None]:
            self.told.append("away")
            yield
            self.told.append("back")

        return inside()

    def complete_gradients(self) -> None:
        self.told.append("complete")

    def finish_step(self) -> None:
        self.told.append("finish")

    def close(self) -> None:
        self.told.append("close")


def test_layers_that_move_leave_the_machine_behind() -> None:
    """Another column may be on other hosts, and its balancer knows its own machine."""

    def run(column: Collective) -> list[str]:
        made = units(column)
        experts = StageExperts(made, column.rank, (0, 1), Meter())
        balanced = prophet.EngineConfig(topology=prophet.Topology.uniform(2))
        assert experts.balance(lambda part: prophet.attach(part, config=balanced), (1,), 1, column) is not None
        (remembered,) = experts.memory().values()
        experts.release()
        return sorted(remembered)

    assert ThreadWorld(2, timeout_s=20.0).run(run) == [["histories", "plans", "ranks", "step"]] * 2


def test_a_balancer_follows_the_updates() -> None:
    def run(column: Collective) -> list[str]:
        recorder, given = Recorder(), []
        made = units(column)
        experts = StageExperts(made, column.rank, (0, 1), Meter())
        assert experts.balance(lambda part: given.append(part) or recorder, (0, 2), 1, column) is None  # type: ignore[func-returns-value]
        with experts.passing(update=True):
            experts.complete()
        assert not recorder.told
        assert experts.balance(lambda part: given.append(part) or recorder, (0, 1), 1, column) is recorder  # type: ignore[func-returns-value]
        assert [list(part) for part in given] == [[made[1]]]
        for update in (False, True):
            with experts.passing(update=update):
                recorder.told.append("pass")
        experts.complete()
        experts.finish()
        return recorder.told

    expected = ["begin", "away", "pass", "back", "begin", "pass", "complete", "finish"]
    assert ThreadWorld(2, timeout_s=20.0).run(run) == [expected] * 2


def test_what_was_released_stays_so_after_a_move() -> None:
    def run(column: Collective) -> list[str]:
        recorder, given = Recorder(), []
        experts = StageExperts(units(column), column.rank, (0, 1), Meter())
        experts.balance(lambda part: given.append(part) or recorder, (0, 1), 3, column)  # type: ignore[func-returns-value]
        experts.release()
        experts.follow((0,), (0, 1), {"1": None}, column)
        assert experts.balancer is None
        assert len(given) == 1
        return recorder.told

    assert ThreadWorld(2, timeout_s=20.0).run(run) == [["close"]] * 2


def test_waiting_for_another_rank_is_no_work() -> None:
    def run(column: Collective) -> float:
        meter, peer = Meter(), 1 - column.rank
        timed = TimedCollective(column, meter).with_timeout(column.timeout_s)
        began_s = meter.work_s()
        for call in (
            lambda: timed.all_gather(torch.ones(1), op=OP),
            lambda: timed.gather_messages(torch.ones(1), op=OP),
            lambda: timed.all_to_all(torch.ones(2, 1), [1, 1], [1, 1], op=OP).wait(),
            lambda: timed.exchange([(peer, torch.ones(1))], [(peer, torch.ones(1))], op=OP).wait(),
        ):
            if column.rank == 1:
                time.sleep(0.1)
            call()
        return meter.work_s() - began_s

    worked_s = ThreadWorld(2, timeout_s=20.0).run(run)
    assert worked_s[1] >= 0.4
    assert worked_s[0] < 0.3  # it has waited 0.4 s
