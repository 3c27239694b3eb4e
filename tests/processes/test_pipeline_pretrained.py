"""Models without memory whose weights each rank reads for its own layers: they train as if they were loaded whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the models are transformers'")

import transformers

from pipeline_balance import ElasticPipeline, init_empty_weights, load_pretrained
from pipeline_balance.elastic import Job, Parallelism
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from tests.helpers.launch import run_gloo
from tests.helpers.transformers_models import FAMILIES, LAYERS, OTHERS, batch, small

UNITS = LAYERS + 2
MAPS = [StageMap((0, 2, UNITS), (0, 1)), StageMap((0, 4, UNITS), (1, 0))]
CASES = [(f, t, kind) for f in [*FAMILIES, *OTHERS] for t in (False, True) for kind in (torch.float32, torch.bfloat16)]
QUICK = [("deepseek_v3", True, torch.bfloat16)]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for _, p in named), lr=0.02, momentum=0.9)


def saved(family: str, tied: bool, folder: Path) -> str:
    model: Any = small(family, tied=tied)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    where = folder / f"{family}_{tied}"
    model.save_pretrained(where)
    return str(where)


def empty(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a folder, without memory for its parameters."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        return getattr(transformers, config.architectures[0])._from_config(config, dtype=dtype).train()


def loaded(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=dtype).train()


def pipeline(model: Any) -> ElasticPipeline:
    return ElasticPipeline.from_transformers(model, MAPS[0], make_optimizer=sgd, microbatches=2, timeout_s=60.0)


def train(folder: str, build: Callable[..., Any], dtype: torch.dtype) -> tuple[list[float], dict[str, Any]]:
    model = build(folder, dtype)
    pipe = pipeline(model)
    if build is empty:
        assert all(p.is_meta for p in model.parameters())
        load_pretrained(pipe, folder)
    held = sum(p.numel() for p in model.parameters() if not p.is_meta)
    assert held < sum(p.numel() for p in model.parameters())
    losses = [pipe.step(*batch())]
    pipe.rebuild(MAPS[1])
    losses.append(pipe.step(*batch("padded")))
    return losses, {n: t.float().numpy() for n, t in pipe.state_dict().items()}


def _both(rank: int, size: int, cases: list[tuple[str, torch.dtype]]) -> list[Any]:
    return [(train(folder, empty, dtype), train(folder, loaded, dtype)) for folder, dtype in cases]


@pytest.mark.parametrize(
    "cases", [QUICK, pytest.param([case for case in CASES if case not in QUICK], marks=pytest.mark.slow)]
)
def test_each_rank_reads_its_own_layers(cases: list[tuple[str, bool, torch.dtype]], tmp_path: Path) -> None:
    folders = [(saved(family, tied, tmp_path), dtype) for family, tied, dtype in cases]
    for case, (mine, plain) in zip(cases, run_gloo(_both, 2, folders, timeout_s=400)[0], strict=True):
        assert mine[0] == plain[0], case
        assert mine[1].keys() == plain[1].keys()
        assert all((value == plain[1][name]).all() for name, value in mine[1].items()), case


def _job(rank: int, size: int, folder: str, layout: str, other: str) -> list[float]:
    torch.manual_seed(rank)  # nothing may be drawn

    class Batches:
        def __iter__(self) -> Any:
            inputs, labels = batch()
            while True:
                yield inputs["input_ids"], labels

    options: dict[str, Any] = {"data": Batches(), "microbatches": 2, "timeout_s": 60.0}
    if not other:  # the model as it is loaded, in one process
        job = Job(lambda: loaded(folder), sgd, Parallelism(), **options)
        return [job.step(), job.step()]
    job = Job(lambda: empty(folder), sgd, Parallelism.parse(layout), weights=folder, **options)
    losses = [job.step()]
    job.switch(Parallelism.parse(other))
    return [*losses, job.step()]


@pytest.mark.parametrize(
    ("layout", "other"), [("pp2", "dp2,zero3"), pytest.param("tp2", "pp2", marks=pytest.mark.slow)]
)
def test_a_job_reads_them_in_any_layout(layout: str, other: str, tmp_path: Path) -> None:
    folder = saved("llama", True, tmp_path)
    (plain,) = run_gloo(_job, 1, folder, "", "")
    for losses in run_gloo(_job, 2, folder, layout, other):
        assert losses == pytest.approx(plain, rel=1e-6)


def _said(model: Any, folder: str) -> str:
    def load() -> None:
        load_pretrained(pipeline(model), folder)

    with pytest.raises(SpecError) as caught:
        load()
    return str(caught.value)


def _refused(rank: int, size: int, tied: str, routers: str) -> dict[str, str]:
    import accelerate

    config = transformers.AutoConfig.from_pretrained(tied)
    with accelerate.init_empty_weights():
        apart = transformers.AutoModelForCausalLM.from_config(config)
    rounded = empty(routers).to(torch.bfloat16)
    with torch.device("meta"):
        everything = transformers.AutoModelForCausalLM.from_config(config)
    own = ElasticPipeline.from_modules(
        [nn.Linear(2, 2), nn.Linear(2, 2)], nn.functional.mse_loss, make_optimizer=sgd, microbatches=2, timeout_s=60.0
    )
    with pytest.raises(SpecError) as chain:
        load_pretrained(own, tied)
    late = pipeline(empty(tied))
    with pytest.raises(SpecError) as early:
        late.step(*batch())
    with pytest.raises(SpecError) as other:
        load_pretrained(late, tied if rank else routers)
    load_pretrained(late, tied)  # still whole
    late.step(*batch())
    return {
        "apart": _said(apart, tied),
        "rounded": _said(rounded, routers),
        "another model": _said(empty(tied), routers),
        "buffers": _said(everything, tied),
        "to meta": _said(small("llama", tied=True).to("meta"), tied),
        "chain": str(chain.value),
        "too early": str(early.value),
        "another folder": str(other.value),
    }


def test_what_cannot_be_filled_is_named(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="its context unties a head")
    folders = saved("llama", True, tmp_path), saved("deepseek_v3", False, tmp_path)
    first, second = run_gloo(_refused, 2, *folders)
    assert first == second
    under = "build the model under pipeline_balance.init_empty_weights()"
    assert "model.embed_tokens.weight and lm_head.weight are one parameter in a LlamaForCausalLM" in first["apart"]
    assert under in first["apart"]
    assert "mlp.gate.weight: the class keeps torch.float32, the model has torch.bfloat16" in first["rounded"]
    assert "lacks" in first["another model"]
    for how in ("buffers", "to meta"):
        assert "inv_freq is on meta" in first[how]
        assert under in first[how]
    assert "a ModuleList has no from_pretrained" in first["chain"]
    assert "has no memory on rank" in first["too early"]
    assert "load_pretrained" in first["too early"]
    assert "lacks" in first["another folder"]


def test_modules_without_memory_keep_ties_buffers_and_attributes() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.norm = nn.BatchNorm1d(3)
            marked = nn.Parameter(torch.ones(2), requires_grad=False)
            marked.mine = True  # type: ignore[attr-defined]
            self.marked = marked

    register = nn.Module.register_parameter
    with pytest.raises(ValueError, match="inside"), init_empty_weights():
        raise ValueError("inside")
    assert nn.Module.register_parameter is register
    with init_empty_weights():
        block = Block()
    assert all(p.is_meta for p in block.parameters())
    assert block.second.weight is block.first.weight
    assert torch.equal(block.norm.running_var, torch.ones(3))
    assert block.marked.mine
    assert not block.marked.requires_grad
    assert not nn.Linear(2, 2).weight.is_meta
