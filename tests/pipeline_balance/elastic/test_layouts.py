"""Layouts of models against a rank-by-rank oracle that knows one rule at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pipeline_balance.elastic.layouts.boxes import (
    ADAMW,
    Block,
    ModelDescription,
    Parameter,
    cut_dimension,
    layout_of,
)
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.elastic.predict.models import description_of
from prophet.errors import LayoutError
from prophet.machine.models import MODELS
from prophet.state.layout import zero_owners
from prophet.state.route import route
from prophet.state.space import TensorSpec
from tests.helpers.pipeline_support import flat_shard

QKV = (Block(length=12, units=6), Block(length=4, units=2, repeated=True), Block(length=4, units=2, repeated=True))


def small(experts: bool = False) -> ModelDescription:
    """Three layers with every kind of parameter, of lengths that divide by nothing."""
    parts = [Parameter(name="embed", shape=(11, 4), layers=(0, 2), dim=0)]  # tied: first and last layer
    for n in range(3):
        parts += [
            Parameter(name=f"{n}.qkv", shape=(20, 4), layers=(n,), dim=0, blocks=QKV),
            Parameter(name=f"{n}.out", shape=(4, 12), layers=(n,), dim=1, blocks=(Block(length=12, units=6),)),
            Parameter(name=f"{n}.norm", shape=(4,), layers=(n,)),
            Parameter(name=f"{n}.mask", shape=(3,), layers=(n,), trained=False, kind="buffer"),
        ]
        if experts:
            parts.append(Parameter(name=f"{n}.experts", shape=(8, 3, 2), layers=(n,), experts=True))
        else:
            gate_up = (Block(length=7), Block(length=7))
            parts.append(Parameter(name=f"{n}.gate_up", shape=(14, 4), layers=(n,), dim=0, blocks=gate_up))
    everywhere = (TensorSpec(name="scale", shape=(), kind="buffer"),)
    return ModelDescription(name="small", layers=3, parameters=tuple(parts), entries=ADAMW, everywhere=everywhere)


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def chunk(x: torch.Tensor, parts: int, index: int, dim: int = 0) -> torch.Tensor:
    """What torch gives shard `index`; nothing where there are fewer chunks."""
    found = x.chunk(parts, dim) if x.shape[dim] else ()
    return found[index] if index < len(found) else x.narrow(dim, 0, 0)


def local_part(p: Parameter, tp: int, t: int, ep: int, e: int) -> torch.Tensor:
    """Numbers of the elements that a rank computes with, in its own order."""
    whole = numbers(p.shape)
    if p.experts:
        return chunk(whole, ep, e)
    if p.dim is None:
        return whole
    parts = []
    for block in whole.split([b.length for b in p.cut_blocks()], p.dim):
        spec = p.cut_blocks()[len(parts)]
        units = spec.units or spec.length
        rows = block.unflatten(p.dim, (units, -1))
        mine = rows.narrow(p.dim, t * units // tp, 1) if spec.repeated and units < tp else chunk(rows, tp, t, p.dim)
        parts.append(mine.flatten(p.dim, p.dim + 1))
    return torch.cat(parts, p.dim)


def elements(model: ModelDescription, layout: object, rank: int) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for piece in layout.on(rank):  # type: ignore[attr-defined]
        whole = numbers(model.space[piece.name].shape)
        new = set(whole[piece.box.slices(model.space[piece.name].box)].reshape(-1).tolist())
        assert not found.setdefault(piece.name, set()) & new, "boxes of a rank do not overlap"
        found[piece.name] |= new
    return found


LAYOUTS = [
    "dp1",
    "pp3,dp2",
    "tp2,pp2,dp2,stages1:2",
    "tp3,dp2",
    "tp4,dp3",
    "dp4,order3:0:5:1",
    "pp2,tp2,order0:2:1:3",
]


@pytest.mark.parametrize(
    ("text", "experts"), list(itertools.product([*LAYOUTS, "dp4,ep2,pp2", "tp2,dp2,ep4"], [False, True]))
)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_rank_holds_what_its_rules_say(text: str, experts: bool, zero: int) -> None:
    model = small(experts)
    parallelism = Parallelism.parse(f"{text},zero{zero}" if zero else text)
    layout = layout_of(model, parallelism)
    stage_of = parallelism.stage_map(3).assignment()
    for rank in range(layout.ranks):
        place = parallelism.place(rank)
        expected: dict[str, set[int]] = {}
        if place is not None:
            expected["scale"] = {0}
            mine = [p for p in model.parameters if place.pp in {stage_of[n] for n in p.layers}]
            for kind in (False, True):
                members = parallelism.edp if kind else parallelism.dp
                index = place.edp if kind else place.dp
                shards = {p.name: local_part(p, parallelism.tp, place.tp, parallelism.ep, place.ep) for p in mine}
                kin = [p for p in mine if p.experts == kind and p.trained]
                owners = zero_owners([shards[p.name].numel() for p in kin], members)
                keeper = dict(zip([p.name for p in kin], owners.tolist(), strict=True))
                for p in (p for p in mine if p.experts == kind):
                    part = shards[p.name]
                    if zero >= 2 and p.kind == "parameter":
                        part = chunk(part, members, index)
                    expected[p.name] = set(part.reshape(-1).tolist())
                    if p.trained and (zero != 1 or keeper[p.name] == index):
                        expected[f"{p.name}@exp_avg"] = expected[f"{p.name}@exp_avg_sq"] = expected[p.name]
                        expected[f"{p.name}@step"] = {0}
        found = elements(model, layout, rank)
        assert found == {name: there for name, there in expected.items() if there}, rank  # empty parts are no boxes


@pytest.mark.parametrize("text", ["dp3", "pp2,dp2", "tp2,dp3"])
def test_flat_shards_are_equal_ranges_of_all_parts(text: str) -> None:
    model = small()
    parallelism = Parallelism.parse(f"{text},zero1")
    layout = layout_of(model, parallelism, flat=True)
    sizes = []
    for rank in range(layout.ranks):
        found = elements(model, layout, rank)
        sizes.append(sum(len(v) for name, v in found.items() if name.endswith("@exp_avg")))
    for group in parallelism.groups("dp"):
        mine = [sizes[r] for r in group]
        total = sum(mine)
        assert mine == [
            min(-(-total // len(mine)), max(total - k * -(-total // len(mine)), 0)) for k in range(len(mine))
        ]


def test_flat_shards_without_tensor_parallelism_are_those_of_a_flat_buffer() -> None:
    model = small()
    layout = layout_of(model, Parallelism(dp=4, zero=1), flat=True)
    wanted = [model.space[f"{p.name}@exp_avg"] for p in model.parameters if p.trained]
    for rank in range(4):
        expected: dict[str, set[int]] = {}
        for piece in flat_shard(wanted, 4, rank):
            whole = numbers(model.space[piece.name].shape)
            part = whole[piece.box.slices(model.space[piece.name].box)]
            expected.setdefault(piece.name, set()).update(part.reshape(-1).tolist())
        found = elements(model, layout, rank)
        assert {n: v for n, v in found.items() if n.endswith("@exp_avg")} == expected


def test_every_pair_of_layouts_has_a_route_that_misses_nothing() -> None:
    model = small(True)
    texts = ["dp2,zero1", "pp3,dp2", "dp4,ep2,zero1", "tp2,dp3,zero3", "pp2,dp4,ep4,zero1", "tp4,dp2,ep8"]
    layouts = [layout_of(model, Parallelism.parse(t), ranks=8) for t in texts]
    for layout in layouts:
        layout.check_complete()
    for a, b in itertools.permutations(layouts, 2):
        way = route(a, b, nodes=[0, 0, 0, 0, 1, 1, 1, 1])
        wanted = [elements(model, b, r) for r in range(8)]
        held = [elements(model, a, r) for r in range(8)]
        for r in range(8):
            arrived: dict[str, list[int]] = {}
            for t in way.receives(r):
                whole = numbers(model.space[t.name].shape)
                arrived.setdefault(t.name, []).extend(whole[t.box.slices(model.space[t.name].box)].reshape(-1).tolist())
            lacking = {n: v - held[r].get(n, set()) for n, v in wanted[r].items()}
            assert {n: sorted(v) for n, v in arrived.items()} == {n: sorted(v) for n, v in lacking.items() if v}


def test_owners_split_and_merge_in_place() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 100, size=200)
    two, four = zero_owners(sizes, 2), zero_owners(sizes, 4)
    assert (four // 2 == two).mean() > 0.97
    assert np.bincount(four, sizes).max() < 1.1 * sizes.sum() / 4
    assert zero_owners([5, 0, 0], 3).max() < 3
    assert zero_owners([], 3).tolist() == []


@pytest.mark.parametrize("name", [n for n in MODELS if n.startswith(("LLaMA", "GPT3", "Qwen3"))])
def test_named_models_have_their_size(name: str) -> None:
    model = description_of(MODELS[name])
    elements = sum(math.prod(p.shape) for p in model.parameters)
    stated = float(name.split("-")[1][:-1])
    assert elements / 1e9 == pytest.approx(stated, rel=0.09)  # heads are not tied to embeddings


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Parameter(name="w", shape=(4,), layers=()), "at least one layer"),
        (lambda: Parameter(name="w", shape=(4,), layers=(0,), dim=1), "dimension 1 of"),
        (lambda: Parameter(name="w", shape=(4,), layers=(0,), dim=0, blocks=(Block(length=3),)), "blocks are 3 long"),
        (lambda: Parameter(name="w", shape=(4, 4), layers=(0,), dim=1, experts=True), "cut by ep"),
        (lambda: Block(length=5, units=2), "cannot be in 2 units"),
        (
            lambda: ModelDescription(name="m", layers=1, parameters=(Parameter(name="w", shape=(), layers=(1,)),)),
            "outside 0..0",
        ),
        (lambda: layout_of(small(), Parallelism(dp=4), ranks=2), "needs rank 3, the world has 2"),
    ],
)
def test_wrong_descriptions_are_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        make()


def test_a_module_is_cut_where_its_parameters_have_the_dimension() -> None:
    weight, bias = (8, 4), (8,)
    assert [cut_dimension("column", weight), cut_dimension("column", bias)] == [0, 0]
    assert [cut_dimension("row", weight), cut_dimension("row", bias)] == [1, None], "its bias is added once"
    assert [cut_dimension("vocabulary", weight), cut_dimension("whole", weight)] == [0, None]
