"""DeepSpeed's PipelineModule with our stages, on gloo processes: the map is met, and losses are one process's."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")

from prophet_deepspeed.pipeline import decide_stages, measure_layers, pipeline_module, stage_weights

from pipeline_balance.spec import LayerCost, StageMap
from prophet.errors import SpecError
from tests.helpers.deepspeed_support import prepare
from tests.helpers.launch import on_processes

LAYERS, DIM, ROWS, MICROBATCHES, STEPS = 7, 6, 4, 3, 3
# the first rule DeepSpeed would use gives (0, 3, 5, 7)
STAGES = StageMap.contiguous((0, 1, 2, LAYERS))


class _Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    xs = [torch.randn(ROWS, DIM, generator=generator) for _ in range(MICROBATCHES)]
    return [(x, x.flip(0)) for x in xs]


def alone() -> list[float]:
    """Losses of one process without an engine."""
    model = nn.Sequential(*(_Layer(i) for i in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [nn.functional.mse_loss(model(x), y) / MICROBATCHES for x, y in batches(step)]
        torch.autograd.backward(parts)
        optimizer.step()
        losses.append(float(sum(float(p.detach()) for p in parts)))
    return losses


def _specs() -> list[Any]:
    spec: Any = importlib.import_module("deepspeed.pipe").LayerSpec
    # every kind that DeepSpeed takes: a module, specifications, a function
    return [_Layer(0), *(spec(_Layer, i) for i in range(1, LAYERS - 1)), _Layer(LAYERS - 1)]


def _train() -> dict[str, Any]:
    deepspeed = prepare()
    base: Any = importlib.import_module("deepspeed.pipe").PipelineModule

    class GPTModelPipe(base):  # type: ignore[misc]
        pass

    module = pipeline_module(_specs(), STAGES, base=GPTModelPipe, loss_fn=nn.functional.mse_loss)
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=list(module.parameters()),
        config={
            "train_batch_size": ROWS * MICROBATCHES,
            "train_micro_batch_size_per_gpu": ROWS,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "steps_per_print": 10_000,
        },
    )
    losses = [float(engine.train_batch(iter(batches(step)))) for step in range(STEPS)]
    return {
        "parts": [int(p) for p in module.parts],
        "mine": sorted(int(n) for n, _ in module.named_children() if n.isdigit()),
        "name": type(module).__name__,
        "losses": losses,
    }


def test_stages_are_those_of_the_map_and_training_is_unchanged() -> None:
    answers = on_processes(3, _train, timeout_s=120.0)
    for rank, answer in enumerate(answers):
        assert answer["parts"] == list(STAGES.boundaries)
        assert answer["mine"] == list(STAGES.layers_of(rank))
        # DeepSpeed looks at the name of the class for activation checkpointing
        assert answer["name"] == "GPTModelPipe"
        assert answer["losses"] == pytest.approx(alone(), rel=1e-5)


def _measured() -> dict[str, Any]:
    prepare()
    pipe: Any = importlib.import_module("deepspeed.pipe")
    tied = pipe.TiedLayerSpec("tied", _Layer, 2, forward_fn=lambda module, x: 2 * module(x), tied_weight_attr=[])
    layers = [*_specs()[:-1], torch.tanh, tied]
    costs = measure_layers(layers, torch.randn(ROWS, DIM), repeats=2)
    stage_map = decide_stages(costs, 2, microbatches=MICROBATCHES)
    module = pipeline_module(layers, stage_map)
    # what other processes have measured decides, too: one slow rank is outvoted
    mine = [LayerCost(forward_s=9.0 if dist.get_rank() == 0 and i == 0 else 1.0) for i in range(6)]
    return {
        "map": stage_map,
        "parts": [int(p) for p in module.parts],
        "bytes": [c.parameter_bytes for c in costs],
        "outvoted": decide_stages(mine, 2, microbatches=1).boundaries,
    }


def test_measured_decided_built() -> None:
    first, second = on_processes(2, _measured, timeout_s=120.0)
    size = (DIM * DIM + DIM) * 4
    assert first["map"] == second["map"]
    assert first["parts"] == second["parts"] == list(first["map"].boundaries)
    assert first["bytes"] == [size] * (LAYERS - 1) + [0, size]
    assert first["outvoted"] == second["outvoted"] == (0, 3, 6)


def _refused() -> list[str]:
    prepare()
    topology: Any = importlib.import_module("deepspeed.runtime.pipe.topology").PipeDataParallelTopology
    rank, specs = dist.get_rank(), _specs()
    wrong: list[tuple[StageMap, dict[str, Any]]] = [
        (StageMap.contiguous((0, 2, LAYERS + 1)), {}),
        (StageMap((0, 2, LAYERS), (1, 0)), {}),
        (StageMap.contiguous((0, 2, LAYERS)), {"topology": topology(num_pp=1, num_dp=2)}),
        (StageMap.contiguous((0, 2 + rank, LAYERS)), {}),
        (StageMap.contiguous((0, 2, LAYERS)), {"partition_method": "uniform"}),
        (StageMap.contiguous((0, 2, LAYERS)), {"base": nn.Module}),
        (StageMap.contiguous((0, 2, LAYERS + rank)), {}),
    ]
    said = []
    for stage_map, options in wrong:
        try:
            pipeline_module(specs, stage_map, **options)
        except SpecError as error:
            said.append(str(error))
    return said


def test_a_map_that_does_not_suit_is_refused_on_every_rank() -> None:
    first, second = on_processes(2, _refused, timeout_s=120.0)
    expected = [
        "8 layers, 7 were",
        "k-th rank",
        "topology has 1",
        "another stage map",
        "leave it out",
        "PipelineModule",
    ]
    for said in (first, second):
        assert len(said) == 7
        assert all(text in line for text, line in zip(expected, said, strict=False))
    assert "of ranks [1] do not suit" in first[-1]
    assert "of 8 layers, 7 were" in second[-1]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
@settings(max_examples=80, deadline=None)
def test_deepspeed_finds_the_map_in_its_weights(lengths: list[int]) -> None:
    balanced: Any = importlib.import_module("deepspeed.runtime.utils").partition_balanced
    stage_map = StageMap.contiguous([sum(lengths[:k]) for k in range(len(lengths) + 1)])
    weights = stage_weights(stage_map)
    assert min(weights) >= 1
    found = balanced(weights, len(lengths))
    assert [int(b) for b in found] == list(stage_map.boundaries)
