"""Order of ranks, bounds, simulated seconds, memory, and the command that shows them."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tomllib
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_balance.elastic.command import add
from pipeline_balance.elastic.layouts import order as ordering
from pipeline_balance.elastic.layouts.boxes import ModelDescription, layout_of
from pipeline_balance.elastic.layouts.order import ordered
from pipeline_balance.elastic.layouts.parallelism import FEWEST_BYTES, Parallelism
from pipeline_balance.elastic.predict.bound import Rates, demand_of, least_direct_s, least_s
from pipeline_balance.elastic.predict.memory import memory_of
from pipeline_balance.elastic.predict.models import check_trainable, description_of
from pipeline_balance.elastic.predict.simulate import simulate
from pipeline_balance.elastic.predict.switch import STATED, plan_switch, predict
from prophet.errors import SpecError, UsageError
from prophet.machine.models import MODELS, model_named
from prophet.machine.sizes import ModelSizes
from prophet.machine.topology import write_topology
from prophet.spec import Topology
from prophet.state.in_place import in_place
from prophet.state.route import route
from tests.helpers.pipeline_support import random_layout, random_space

RATES = Rates(intra_bytes_per_s=8.0, inter_bytes_per_s=2.0)


def tiny() -> ModelDescription:
    return description_of(ModelSizes(name="tiny", layers=4, dim=8, hidden=12, heads=4, kv_heads=2, vocabulary=10))


def described(name: str) -> ModelDescription:
    return description_of(model_named(name))


def gigabytes(model: str, before: str, after: str) -> tuple[int, int]:
    """What moves in the order as given, and in the chosen one; whole GB."""
    a, b = Parallelism.parse(f"{before},zero1"), Parallelism.parse(f"{after},zero1")
    fewest = replace(b, order=FEWEST_BYTES)
    found = [plan_switch(described(model), a, x, ranks_per_node=8, flat=True).route.wire_bytes for x in (b, fewest)]
    return round(found[0] / 1e9), round(found[1] / 1e9)


@pytest.mark.parametrize(
    ("model", "before", "after", "given_gb", "chosen_gb"),
    [
        ("llama2-70b", "tp4,pp4,dp4", "tp4,pp4,dp8", 1766, 966),
        ("llama2-70b", "tp4,pp4,dp4", "tp4,pp4,dp2", 982, 414),
        ("llama2-70b", "tp4,pp4,dp4", "tp4,pp8,dp4", 1282, 690),
        ("llama2-70b", "tp4,pp4,dp4", "tp8,pp4,dp4", 1356, 896),
        ("llama2-70b", "tp8,pp16", "tp4,pp8,dp2", 1094, 863),
        ("qwen3-235b-a22b", "tp4,pp8,dp4,ep16", "tp8,pp16,ep8", 3085, 2480),
    ],
)
def test_the_order_of_ranks_saves_what_another_program_found(
    model: str, before: str, after: str, given_gb: int, chosen_gb: int
) -> None:
    assert gigabytes(model, before, after) == (given_gb, chosen_gb)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_no_other_order_moves_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = tiny()
    texts = ["dp2,zero1", "pp2,dp2", "tp2,pp2,zero1", "tp2,dp2,zero3", "pp4", "dp4,zero1"]
    before = Parallelism.parse(texts[int(rng.integers(len(texts)))])
    before = replace(before, order=tuple(rng.permutation(4)[: before.ranks].tolist()))
    after = Parallelism.parse(texts[int(rng.integers(len(texts)))])
    nodes = [0, 0, 1, 1]
    old = layout_of(model, before, ranks=4)

    def moved(order: tuple[int, ...]) -> int:
        return route(old, layout_of(model, replace(after, order=order), ranks=4)).wire_bytes

    chosen = ordered(model, old, replace(after, order=FEWEST_BYTES), nodes=nodes)
    groups = [sorted(g) for g in chosen.groups("tp")]
    assert all(len({nodes[r] for r in g}) == 1 for g in groups), "a tp group stays on its node"
    possible = [
        o
        for o in itertools.permutations(range(4), after.ranks)
        if all(len({nodes[r] for r in g}) == 1 for g in replace(after, order=o).groups("tp"))
    ]
    assert moved(chosen.rank_of_place) == min(map(moved, possible))


def test_ranks_that_leave_are_those_whose_state_is_elsewhere() -> None:
    model = tiny()
    before = layout_of(model, Parallelism(pp=2, order=(2, 0)), ranks=4)
    chosen = ordered(model, before, Parallelism(pp=2, order=FEWEST_BYTES), nodes=[0, 1, 2, 3])
    assert chosen.order == (2, 0)
    assert ordered(model, before, Parallelism(pp=2)) == Parallelism(pp=2)
    with pytest.raises(SpecError, match="needs 8 ranks, the world has 4"):
        ordered(model, before, Parallelism(dp=8, order=FEWEST_BYTES))


def test_tensor_shards_that_fit_on_no_node_go_anywhere() -> None:
    model = tiny()
    before, after = Parallelism.parse("tp2,dp2,zero1"), Parallelism.parse("tp4,zero1")
    old = layout_of(model, before, ranks=4)
    moved = [
        route(old, layout_of(model, replace(after, order=o), ranks=4)).wire_bytes
        for o in itertools.permutations(range(4))
    ]
    chosen = ordered(model, old, replace(after, order=FEWEST_BYTES), nodes=[0, 1, 2, 3])
    assert route(old, layout_of(model, chosen, ranks=4)).wire_bytes == min(moved) < moved[0]


def test_very_many_blocks_are_matched_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = Parallelism.parse("tp4,pp4,dp4,zero1"), Parallelism.parse("tp4,pp8,dp4,zero1,orderfewest-bytes")
    given_bytes = plan_switch(described("llama2-7b"), before, replace(after, order=None), ranks_per_node=8).route
    best = plan_switch(described("llama2-7b"), before, after, ranks_per_node=8).route.wire_bytes
    monkeypatch.setattr(ordering, "LARGEST_EXACT", 0)
    quick = plan_switch(described("llama2-7b"), before, after, ranks_per_node=8)
    assert sorted(quick.parallelism.rank_of_place) == list(range(128))
    assert best <= quick.route.wire_bytes <= best + (given_bytes.wire_bytes - best) / 2


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_bounds_are_below_every_plan(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    space = random_space(rng)
    before, after = (random_layout(rng, space, ranks, complete=True) for _ in range(2))
    nodes = rng.integers(0, 3, size=ranks)
    way = route(before, after, nodes=nodes.tolist())
    demand = demand_of(way.atoms, space.item_bytes)
    least, direct, taken = least_s(demand, nodes, RATES), least_direct_s(demand, nodes, RATES), simulate(way, RATES)
    assert direct is not None
    assert least <= direct * (1 + 1e-9)
    assert least <= taken.port_s * (1 + 1e-9) <= taken.seconds * (1 + 1e-9) + 1e-12
    assert direct <= taken.port_s * (1 + 1e-9) or (way.feed >= 0).any()
    assert taken.intra_bytes + taken.inter_bytes == way.wire_bytes
    # any other choice of holders, those of the node before others, is no faster than the linear program says
    load = np.zeros((2, 2, ranks))
    for t in way.transfers:
        holders = [p for p in range(ranks) if any(x.name == t.name and x.box.contains(t.box) for x in before.pieces[p])]
        holders = [p for p in holders if nodes[p] == nodes[t.destination]] or holders
        source = holders[int(rng.integers(len(holders)))]
        far = int(nodes[source] != nodes[t.destination])
        load[0, far, source] += way.n_bytes(t)
        load[1, far, t.destination] += way.n_bytes(t)
    other = max(load[:, 0].max() / RATES.intra_bytes_per_s, load[:, 1].max() / RATES.inter_bytes_per_s)
    assert direct <= other * (1 + 1e-9)


def test_a_rank_that_holds_all_alone_must_send_it_once() -> None:
    model = replace(tiny(), entries=())
    old, new = (layout_of(model, Parallelism(dp=n), ranks=4) for n in (1, 4))
    way = route(old, new, nodes=[0, 1, 2, 3])
    size = int(old.table.rank_bytes()[0])
    demand = demand_of(way.atoms, model.space.item_bytes)
    assert least_s(demand, way.nodes, RATES) == pytest.approx(size / 2)
    assert least_direct_s(demand, way.nodes, RATES) == pytest.approx(3 * size / 2)
    assert simulate(way, RATES).port_s == pytest.approx(size / 2)


@pytest.mark.parametrize(
    ("before", "after"),
    [("tp8,pp8,dp2", "tp8,pp4,dp4"), ("tp4,pp8,dp4", "tp8,pp8,dp2"), ("tp4,pp4,dp4", "tp8,pp4,dp4")],
)
def test_routes_are_near_the_bound_and_windows_near_the_ports(before: str, after: str) -> None:
    model = described("llama2-70b")
    a, b = (Parallelism.parse(f"{t},zero1") for t in (before, after))
    found = predict(model, a, b, machine=STATED["a800"], flat=True)
    assert found.least_direct_s is not None
    assert found.simulated.port_s <= 1.15 * found.least_direct_s
    assert found.simulated.seconds <= 1.05 * found.simulated.port_s


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_memory_is_counted_piece_by_piece(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    space = random_space(rng)
    before, after = (random_layout(rng, space, ranks, complete=True) for _ in range(2))

    def n_bytes(pieces: set) -> int:  # type: ignore[type-arg]
        return sum(p.box.elements * space[p.name].item_bytes for p in pieces)

    memory = memory_of(before, after)
    old, new = ([set(row) for row in layout.pieces] for layout in (before, after))
    assert memory.safe_peak.tolist() == [n_bytes(a | b) for a, b in zip(old, new, strict=True)]
    wave, peak = in_place(before, after)
    assert sorted(set(wave.tolist())) == list(range(wave.max() + 1))
    for rank in range(ranks):
        held, most = set(old[rank]), n_bytes(old[rank])
        for number in range(wave.max() + 1):
            names = {t.name for t, w in zip(space.tensors, wave.tolist(), strict=True) if w == number}
            held |= {p for p in new[rank] if p.name in names}
            most = max(most, n_bytes(held))
            held = {p for p in held if p.name not in names or p in new[rank]}
        assert held == new[rank]
        assert peak[rank] == most


def test_the_order_of_tensors_decides_the_peak_in_place() -> None:
    a, b = (Parallelism.parse(t) for t in ("tp4,pp4,dp4,zero1", "tp4,pp8,dp4,zero1"))
    model = described("llama2-7b")
    old, new = (layout_of(model, p, ranks=128, flat=True) for p in (a, b))
    memory = memory_of(old, new)
    assert memory.safe_peak.max() > 1.4 * memory.larger.max()
    assert in_place(old, new)[1].max() <= 1.1 * memory.larger.max()


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("llama2-13b", "pp8,dp2,zero1", "dp16,zero3"),
        ("llama2-13b", "dp16,zero3", "tp4,pp4"),
        ("llama2-13b", "tp2,pp4,dp2,zero1", "tp4,pp4,zero1"),
        ("qwen3-30b-a3b", "pp4,dp4,ep4,zero1", "pp2,dp8,ep8,zero1"),
    ],
)
def test_no_rank_has_much_more_than_the_larger_of_both_states(model: str, before: str, after: str) -> None:
    old, new = (layout_of(described(model), Parallelism.parse(t), ranks=16) for t in (before, after))
    larger = memory_of(old, new).larger
    assert (in_place(old, new)[1] / larger).max() <= 1.02


def run(*arguments: str) -> None:
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    found = parser.parse_args(["switch", *arguments])
    assert found.run(found) == 0


def test_the_command_is_registered_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    value = project["entry-points"]["prophet.commands"]["switch"]
    assert EntryPoint("switch", value, "prophet.commands").load() is add
    run("--model", "llama2-70b", "--from", "tp4,pp8,dp2", "--to", "tp8,pp16", "--machine", "a800")
    text = " ".join(capsys.readouterr().out.split())
    first = "Assumed: bfloat16 parameters, float32 master weights and two moments: 14 bytes a parameter; a800 reaches"
    assert text.startswith(first)
    assert "To measure this machine: prophet calibrate --out topology.toml, then --machine topology.toml." in text
    assert "Fits: 25.9 GB of 80 GB on the fullest rank" in text
    assert "LLaMA2-70B: tp4,pp8,dp2,zero1 -> tp8,pp16,zero1, 128 ranks on 16 nodes of a800." in text
    assert "The order of ranks saves" in text
    run("--model", "llama2-7b", "--from", "tp2,dp4", "--to", "dp8", "--zero", "0", "--keep-order", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["wire_bytes"] == found["given_bytes"] == found["intra_bytes"]
    assert (found["fits"], found["memory_bytes"]) == (False, 80_000_000_000)
    assert found["assumed"][-1] == "a800 reaches all of its stated bandwidths"
    assert 0 < found["least_s"] <= found["seconds"] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--from", "dp2", "--to", "tp2"), "Does not fit: 53.9 GB of 40 GB on the fullest rank."),
        (("--from", "tp4", "--to", "tp2"), "Does not fit: 47.2 GB of 40 GB on the fullest rank."),
        (
            ("--from", "tp4", "--to", "pp4"),
            'whole: 48.1 GB of 40 GB on the fullest rank; switch(mode="in-place") needs',
        ),
        (("--from", "tp8", "--to", "pp8"), "Fits: 25 GB of 40 GB on the fullest rank, before gradients"),
    ],
)
def test_what_does_not_fit_is_said(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATED, "a800", STATED["a800"]._replace(memory_bytes=40_000_000_000))
    run("--model", "llama2-7b", *arguments)
    assert words in " ".join(capsys.readouterr().out.split())


def test_a_measured_machine_assumes_nothing_and_does_not_say_its_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.toml"
    write_topology(file, Topology.uniform(4, ranks_per_node=2, name="here"))
    config = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 100,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    run("--model", str(tmp_path), "--layers", "2", "--from", "dp4,ep2", "--to", "dp4,ep4", "--machine", str(file))
    text = " ".join(capsys.readouterr().out.split())
    assert "Whether it fits is not known: a topology file does not say what memory a rank has." in text
    assert "max_position_embeddings is not there" in text
    assert "calibrate" not in text
    assert "4 ranks on 2 nodes" in text


@pytest.mark.parametrize("sizes", MODELS.values(), ids=lambda m: m.name)
def test_a_description_has_the_weights_that_its_sizes_count(sizes: ModelSizes) -> None:
    sizes = sizes.with_options({"layers": 3})
    model, biases = description_of(sizes), sizes.bias and sizes.experts
    many = sum(math.prod(p.shape) for p in model.parameters)
    norms = sizes.dim * (2 * sizes.layers + 1)
    left_out = sizes.blocks_with_experts * sizes.experts * (sizes.hidden + sizes.dim) if biases else 0
    assert many == sizes.parameters().total + norms - left_out
    assert sum(math.prod(p.shape) for p in model.parameters if p.experts) == sizes.parameters().routed - left_out


def test_dense_layers_shared_experts_and_tied_heads_are_described() -> None:
    sizes = MODELS["DeepSeek-V3"].with_options({"layers": 4, "moe_layers": 2, "tied": True})
    model = description_of(sizes)
    names = {p.name for p in model.parameters}
    assert {"layers.1.mlp.gate", "layers.2.shared.up", "layers.2.experts.down", "layers.3.attention"} <= names
    assert not names & {"layers.1.router", "layers.2.mlp.up", "head"}
    assert next(p.layers for p in model.parameters if p.name == "embed") == (0, 3)
    assert sum(math.prod(p.shape) for p in model.parameters) == sizes.parameters().total + 9 * sizes.dim


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ("LLaMA2-70B", "tp7", "tp7 does not divide the 64 attention heads of LLaMA2-70B"),
        ("LLaMA2-70B", "tp16", "tp16 does not divide the 8 heads of keys and values"),
        ("GPT3-1.3B", "tp3", "tp3 does not divide the 16 attention heads"),
        ("LLaMA2-7B", "pp33", "33 chunks need at least as many layers, the model has 32"),
        ("LLaMA2-7B", "pp2,dp2,zero2", "zero2 with pp2 cannot be trained"),
        ("LLaMA2-7B", "dp2,ep2", "ep2 with a model that has no experts cannot be trained"),
        (
            "LLaMA2-7B",
            "dp2,slices2,zero3",
            "slices2 with zero3 cannot be trained.*FSDP2 wants the model called at once",
        ),
        ("Mixtral-8x7B", "tp2,zero2", "zero2 with experts cannot be trained"),
        ("Mixtral-8x7B", "dp16,ep16", "Mixtral-8x7B: 8 experts cannot be shared by ep16"),
        ("Mixtral-8x7B", "dp2,zero3", "zero3 with experts cannot be trained"),
    ],
)
def test_layouts_that_a_job_refuses_are_refused(model: str, layout: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        check_trainable(MODELS[model], Parallelism.parse(layout))
    for option, other in (("--from", "--to"), ("--to", "--from")):
        with pytest.raises(UsageError, match=f"{option}: .*{words}"):
            run("--model", model, option, layout, other, "dp2")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--from", "tp3x", "--to", "dp2"), "--from: 'tp3x': 'tp3x' is not understood"),
        (("--from", "dp2", "--to", "pp3,ep2"), "--to: .*ep must divide"),
        (("--from", "dp2", "--to", "pp99"), "99 chunks need at least as many layers"),
        (("--from", "dp2", "--to", "dp1", "--machine", "a80"), "no machine 'a80'; did you mean 'a800'"),
        (
            ("--from", "dp2", "--to", "dp1", "--machine", "h100-ib:LLaMA2-7B"),
            "write --machine h100-ib --model LLaMA2-7B",
        ),
        (("--from", "dp2", "--to", "dp1", "--machine", "none.toml"), "--machine: none.toml: expected a topology file"),
        (("--from", "dp2", "--to", "dp1", "--model", "llama2-70"), "no model 'llama2-70'; did you mean"),
    ],
)
def test_the_command_says_what_it_expected(arguments: tuple[str, ...], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        run("--model", "llama2-7b", *arguments)
