"""Models of transformers over real stages that move: losses and weights equal those of the model's own loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the models are transformers'")


from pipeline_balance.pipeline.adapter import TransformersModel
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from tests.helpers.launch import run_gloo
from tests.helpers.transformers_models import FAMILIES, LAYERS, batch, small, train_whole

UNITS, MICROBATCHES, STEPS = LAYERS + 2, 2, 5
KINDS = ("plain", "packed", "padded")
MAPS = {
    2: [StageMap((0, 2, UNITS), (0, 1)), StageMap((0, 4, UNITS), (1, 0)), StageMap((0, UNITS), (1,))],
    4: [
        StageMap((0, 1, 2, 4, UNITS), (0, 1, 2, 3)),
        StageMap((0, 2, 3, UNITS), (3, 0, 1)),
        StageMap((0, 1, UNITS), (2, 0)),
    ],
}
CASES = [(family, family in ("llama", "gpt2", "mixtral")) for family in FAMILIES]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for _, p in named), lr=0.02, momentum=0.9)


def _train(rank: int, size: int, cases: list[tuple[str, bool]]) -> list[dict[str, Any]]:
    results = []
    for family, tied in cases:
        model = small(family, tied=tied)
        pipe = ElasticPipeline.from_transformers(
            model, MAPS[size][0], make_optimizer=sgd, microbatches=MICROBATCHES, timeout_s=60.0
        )
        losses = []
        for step in range(STEPS):
            if step:
                pipe.rebuild(MAPS[size][step % len(MAPS[size])])
            losses.append(pipe.step(*batch(KINDS[step % 3], tokens=12 + 2 * step)))
        evaluated = pipe.evaluate(*batch("padded", rows=3))
        state = {n: t.numpy() for n, t in pipe.state_dict().items()}
        results.append({"losses": losses, "evaluated": evaluated, "state": state})
    return results


def _alone(family: str, tied: bool) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    model = small(family, tied=tied)
    optimizer = sgd(list(model.named_parameters()))
    counting = TransformersModel(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = counting.cut(*batch(KINDS[step % 3], tokens=12 + 2 * step), MICROBATCHES)
        losses.append(float(train_whole(model, counting, parts)))
        optimizer.step()
    optimizer.zero_grad()
    parts = counting.cut(*batch("padded", rows=3), 2)
    return losses, float(train_whole(model.eval(), counting, parts)), model.state_dict()


@pytest.mark.parametrize("size", [2, 4])
def test_every_family_trains_as_it_does_whole(size: int) -> None:
    results = run_gloo(_train, size, CASES, timeout_s=240.0)
    for i, (family, tied) in enumerate(CASES):
        losses, evaluated, state = _alone(family, tied)
        for said in results:
            assert said[i]["losses"] == pytest.approx(losses, abs=1e-6), (family, tied)
            assert said[i]["evaluated"] == pytest.approx(evaluated, abs=1e-6), (family, tied)
        found = results[0][i]["state"]
        assert found.keys() == state.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(torch.from_numpy(found[name]), tensor, rtol=1e-5, atol=1e-6)
