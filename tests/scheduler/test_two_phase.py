"""The two forms of Trans and Agg: the same gradients bit by bit, on all collectives, and the cheaper one is taken."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from prophet.planner.model.cost import step_cost, transfer_seconds
from prophet.ranks.collective import Coming, Done
from prophet.ranks.operation import Operation
from prophet.scheduler.forms import FormChooser, Transfers, phase_cover
from prophet.scheduler.pieces import GRAIN, HALVES, Form, agg_chunks, trans_chunks
from prophet.scheduler.schedules import block_wise
from prophet.scheduler.simulate import predicted_durations, simulate
from prophet.scheduler.windows import predicted_window_us
from prophet.spec import (
    LayerShape,
    Link,
    Placement,
    PlanContext,
    Route,
    Split,
    Topology,
    TransferSeconds,
    Windows,
    relayed,
)
from tests.helpers.launch import on_processes
from tests.helpers.recorder import RecordingCollective
from tests.helpers.support import FixedPlanner, on_threads
from tests.helpers.training import Case, Run, Step, compare, expected, train, train_in_process

# three receivers of expert 0, two of expert 5, one of expert 7
PAIRS = [(0, 1), (0, 2), (0, 3), (5, 0), (5, 3), (7, 0)]
CASE = Case(ranks=4, shapes=((3,), (2, 2), (0,), (5,)), slots=3, microbatches=2, steps=3, seed=11)


def same_bits(a: Step, b: Step) -> None:
    assert a.loss == b.loss
    for name, grad in {**a.dense, **a.experts}.items():
        assert np.array_equal(grad, {**b.dense, **b.experts}[name]), name


VARIANTS: list[dict[str, object]] = [{}, {"announced": False}, {"uses": 2}, {"checkpointing": "non-reentrant"}]
# every variant with the schedule that puts the most between two phases, the other schedule with one
BITS = [
    pytest.param(schedule, variant, marks=[] if schedule == "block-wise" or not variant else pytest.mark.slow)
    for variant in VARIANTS
    for schedule in ("block-wise", "blocking")
]


@pytest.mark.parametrize(("schedule", "variant"), BITS)
def test_both_forms_give_the_same_bits(schedule: str, variant: dict[str, object]) -> None:
    case = replace(CASE, schedule=schedule, **variant)  # type: ignore[arg-type]
    found = [
        on_threads(4, lambda group, form=form: train(replace(case, transfers=form), group, FixedPlanner(PAIRS)))  # type: ignore[misc]
        for form in ("direct", "two-phase")
    ]
    compare(expected(case), found[1])
    for direct, two_phase in zip(*found, strict=True):
        for a, b in zip(direct, two_phase, strict=True):
            same_bits(a, b)


@pytest.mark.parametrize("case", [
    replace(CASE, transfers="two-phase", microbatches=1),
    replace(CASE, transfers="node-once", ranks_per_node=2, refetch=True),
    replace(CASE, transfers="spread", ranks_per_node=2, refetch=True),
])  # fmt: skip
def test_two_phases_on_processes(case: Case) -> None:
    compare(expected(case), on_processes(4, train_in_process, case))


# of four ranks the last node may have one; a copy of expert 0 is beside its home, two are in another node
NODES = [(2, PAIRS), (3, [(0, 1), (0, 2), (0, 3), (7, 0), (7, 1), (3, 2), (3, 3)])]


@pytest.mark.parametrize("variant", [*VARIANTS, {"refetch": True}, {"refetch": True, "uses": 2}])
@pytest.mark.parametrize(("ranks_per_node", "pairs"), NODES)
@pytest.mark.parametrize("transfers", ["node-once", "spread"])
def test_what_crosses_once_gives_the_oracles_gradients(
    transfers: str, variant: dict[str, object], ranks_per_node: int, pairs: list[tuple[int, int]]
) -> None:
    case = replace(CASE, transfers=transfers, ranks_per_node=ranks_per_node, **variant)  # type: ignore[arg-type]

    def run(case: Case) -> list[list[Step]]:
        return on_threads(4, lambda group: train(case, group, FixedPlanner(pairs)))

    found = run(case)
    compare(expected(case), found)
    # a second run arrives in another order
    for first, second in zip(found, run(case), strict=True):
        for a, b in zip(first, second, strict=True):
            same_bits(a, b)


def test_a_card_per_rank_is_used_where_it_pays() -> None:
    """Of two nodes of four with a card each. Copies of expert 0 are far, those of expert 5 are near."""
    pairs = [(0, 4), (0, 5), (0, 6), (5, 3)]
    case = replace(CASE, ranks=8, ranks_per_node=4, own_cards=True, shapes=tuple((4,) for _ in range(8)))
    found = on_threads(8, lambda group: train(case, group, FixedPlanner(pairs)))
    compare(expected(case), found)
    report = found[0][-1].report
    assert report is not None
    # the first block's second phase has no window
    form = report.forms[1]
    assert form.trans_routes == form.agg_routes == {0: Route(((4, 5, 6),), (0, 1, 2, 3), ((4, 5, 6, 7),))}


@pytest.mark.parametrize(("transfers", "once"), [("auto", True), ("two-phase", False), ("node-once", True)])
def test_every_expert_has_the_groups_that_are_cheaper(transfers: Transfers, once: bool) -> None:
    """Two nodes of four ranks behind ports. Expert 0 crosses once; the copies of expert 1 are in one node already."""
    topology = Topology.uniform(
        8, ranks_per_node=4, intra=Link(bytes_per_s=8e6), inter=Link(bytes_per_s=1e6), port_bytes_per_s=1e6
    )
    context = PlanContext(topology=topology, shape=LayerShape.feed_forward(dim=8, hidden=8), home=tuple(range(8)))
    placement = Placement.with_replicas(context.home, 8, [(0, r) for r in range(1, 8)] + [(1, 5), (1, 6)])
    form = FormChooser(transfers).form(placement, context)
    assert form.two_phase_trans
    assert form.two_phase_agg
    apart = {0: Route(((1, 2, 3), (4, 5, 6, 7)))} | ({1: Route(((5, 6),))} if transfers == "node-once" else {})
    assert form.trans_routes == form.agg_routes == (apart if once else {})


def test_ports_are_crossed_once_by_what_the_ranks_send() -> None:
    """What the chunks list is what the model counts: bytes of every expert between the nodes."""
    p = Placement.with_replicas([0] * 8, 8, [(0, r) for r in range(1, 8)])
    apart, everywhere = Route(((1, 2, 3), (4, 5, 6, 7))), range(1, 8)
    two_nodes = Topology.uniform(8, ranks_per_node=4)
    routes = {0: apart}, {0: relayed(0, everywhere, two_nodes)}, {}
    for chunks_of in (trans_chunks, agg_chunks):
        for given, crossing in zip(routes, (840, 840, 840 * 4 // 7 + 2 * 3 * 4 * 840 // 7), strict=True):
            crossed = sum(
                piece.size
                for rank in range(8)
                for chunk in chunks_of(p, rank, 840, two_phase=True, routes=given)
                for exchange in chunk
                for piece in exchange.sends
                if piece.source // 4 != piece.target // 4
            )
            assert crossed == crossing


@pytest.mark.parametrize("arrived", [True, False])
def test_calls_of_the_two_phases(monkeypatch: pytest.MonkeyPatch, arrived: bool) -> None:
    monkeypatch.setattr(Done, "ended", lambda _: arrived)
    case = Case(ranks=4, blocks=2, shapes=((5,),) * 4, slots=8, transfers="two-phase")
    fake = RecordingCollective(0, 4)
    run = Run(case, fake, FixedPlanner(PAIRS))
    run.whole_step(0)
    fake.calls.clear()
    run.whole_step(1)
    weights = [c.op for c in fake.calls if c.channel == "weights" and c.kind == "all_to_all"]
    names = ["Trans scatter chunk 0", "Trans gather chunk 1", "Agg reduce chunk 0", "Agg home chunk 1"]
    assert weights == [
        Operation(names[i], b) for i, b in ((0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (3, 1), (2, 0), (3, 0))
    ]
    one = run.engine.layers[0].experts.expert_numel * 8
    scatter = next(c for c in fake.calls if c.op == Operation(names[0], 1)).sent_bytes
    assert scatter == (0, *(pytest.approx(one / 3, abs=8),) * 3)
    order = [str(c.op) for c in fake.calls if c.kind == "all_to_all"]
    # the first block's second phase has no window of its own: it follows the first where that has arrived when counts
    # are exchanged, and else waits for it as late as it can
    gather, dispatch = order.index("Trans gather chunk 1 of layer 0"), order.index("dispatch of layer 0")
    assert (gather < dispatch) == arrived
    assert order.index("Trans scatter chunk 0 of layer 1") < order.index("combine of layer 0")
    assert order.index("combine of layer 0") < order.index("Trans gather chunk 1 of layer 1")
    run.close()


@pytest.mark.parametrize("schedule", ["block-wise", "look-ahead"])
def test_ranks_may_see_the_first_phase_end_at_different_times(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """Those that have seen it launch the second phase before tokens travel, the others later, all in one order."""
    seen = set()

    def ended(_: object) -> bool:
        rank = int(threading.current_thread().name.removeprefix("rank-"))
        seen.add(rank)
        return rank % 2 == 0

    monkeypatch.setattr(Coming, "ended", ended)
    case = replace(CASE, transfers="two-phase", schedule=schedule, refetch=True)
    compare(expected(case), on_threads(4, lambda group: train(case, group, FixedPlanner(PAIRS))))
    assert seen == {0, 1, 2, 3}


def test_the_cheaper_form_is_taken() -> None:
    topology = Topology.uniform(8, intra=Link(bytes_per_s=1e6))
    context = PlanContext(topology=topology, shape=LayerShape.feed_forward(dim=8, hidden=8), home=tuple(range(8)))
    many = Placement.with_replicas(context.home, 8, [(0, r) for r in range(1, 8)])
    one = Placement.with_replicas(context.home, 8, [(0, 1), (2, 3)])
    chooser, other = FormChooser(), FormChooser()

    def chosen(who: FormChooser, placement: Placement, **cover_s: float) -> tuple[bool, bool]:
        form = who.form(placement, context, **cover_s)  # type: ignore[arg-type]
        return form.two_phase_trans, form.two_phase_agg

    for placement, two_phase in ((many, True), (one, False)):
        sizes = placement, topology, context.shape.expert_bytes
        _, trans, agg = chooser.prepare(placement, context)
        assert trans == pytest.approx(transfer_seconds(*sizes))
        assert agg == pytest.approx(transfer_seconds(*sizes, sum_bytes=sizes[-1]))
        for _ in range(2):
            assert chosen(chooser, placement) == (two_phase, two_phase)
    assert chosen(other, many) == (True, True)
    assert chosen(other, one) == (False, False), "what is remembered belongs to its placement"
    assert chosen(FormChooser("direct"), many) == (False, False)
    assert chosen(FormChooser("two-phase"), one) == (True, True)
    form = chooser.form(many, context, trans_cut=(0, 100, 1024), agg_cut=(0, 1024))
    assert (form.trans_cut, form.agg_cut) == ((0, 100, 1024), (0, 1024))


def test_published_policies_keep_to_the_forms_they_are_given() -> None:
    """Two nodes of four that share a slow port: an expert on all ranks is cheapest when it crosses once."""
    wide = Link(bytes_per_s=8e6)
    topology = Topology(ranks=8, ranks_per_node=4, intra=wide, inter=wide, port_bytes_per_s=1e6,
                        flops_per_s=(1e9,) * 8, free_bytes=(1 << 30,) * 8)  # fmt: skip
    context = PlanContext(topology=topology, shape=LayerShape.feed_forward(dim=8, hidden=8), home=tuple(range(8)))
    everywhere = Placement.with_replicas(context.home, 8, [(0, r) for r in range(1, 8)])
    once = FormChooser().form(everywhere, context)
    assert set(once.trans_routes) == set(once.agg_routes) == {0}
    published = FormChooser(("direct", "two-phase")).form(everywhere, context)
    assert published == FormChooser("two-phase").form(everywhere, context)
    assert not published.trans_routes


def test_a_form_that_is_cheaper_but_hides_less_is_not_taken() -> None:
    seconds = TransferSeconds(direct=10.0, first=3.0, second=3.0)

    def taken(cut: tuple[int, ...], cover_s: float) -> bool:
        return seconds.form(phase_cover(cut, cover_s), 0.0) == "two-phase"

    even, uneven = HALVES, (0, GRAIN // 8, GRAIN)
    assert taken(even, 0.0)
    assert taken(even, 8.0), "4 + 4 cover 3 + 3; a direct transfer has 2 left over"
    assert taken(uneven, 8.0), "2 of the first phase are exposed, as of a direct transfer"
    assert not taken(uneven, 12.0), "1.5 before the second phase can start; a direct transfer is hidden"
    assert taken(uneven, 24.0)


def model_and_simulator(
    block: int, *, fec_s: float, fnec_s: float, bnec_s: float, overlap_cost: float = 0.0
) -> tuple[tuple[float, float], tuple[float, float], Form]:
    """By how many seconds Trans and Agg of a block lengthen a step, by the model and by the simulator; and their form.

    One of four experts goes to three ranks, at a second per copy: 3 s directly, 1 s to scatter, 2/3 s to gather. The
    all-to-alls are so long that what runs beside them is paid in full.
    """
    topology = replace(Topology.uniform(4, intra=Link(bytes_per_s=512.0), flops_per_s=64 * 256 / fec_s),
                       overlap_cost=overlap_cost)  # fmt: skip
    shape = LayerShape.feed_forward(dim=8, hidden=8, bias=False)
    under = Windows(fnec_s=fnec_s, bnec_s=bnec_s)
    later = PlanContext(topology=topology, shape=shape, home=(0, 1, 2, 3), windows=under)
    contexts = [replace(later, windows=replace(under, experts=False)), later][: block + 1]
    homes = later.homes_only()
    split = Split.to_homes(np.full((4, 4), 16), homes)
    placement = Placement.with_replicas(later.home, 4, [(0, 1), (0, 2), (0, 3)])
    schedule, splits = block_wise(block + 1), [split] * (block + 1)
    lengths = predicted_window_us(contexts, [s.rank_load() for s in splits])
    form = FormChooser().form_under(schedule, block, placement, contexts[block], lengths)

    def makespan_s(sizes: tuple[bool, bool]) -> float:
        """With Trans, with Agg, or with neither."""
        placements = [homes] * block + [placement]
        d = predicted_durations(placements, splits, contexts, forms=[Form()] * block + [form],
                                start_s=fnec_s, end_s=bnec_s)  # fmt: skip
        d = replace(d, trans_s=sizes[0] * d.trans_s, agg_s=sizes[1] * d.agg_s)
        return simulate(schedule, d).makespan_s

    cost, without_s = step_cost(split, placement, contexts[block]), makespan_s((False, False))
    simulated = makespan_s((True, False)) - without_s, makespan_s((False, True)) - without_s
    return (cost.exposed_trans_s, cost.exposed_agg_s), simulated, form


@pytest.mark.parametrize(
    ("windows", "trans_s", "agg_s", "two_phase"),
    [
        ({"fec_s": 0.5, "fnec_s": 1.0, "bnec_s": 0.5}, 0.5, 1 / 6, (True, True)),
        ({"fec_s": 1.5, "fnec_s": 0.25, "bnec_s": 0.25}, 5 / 12, 0.0, (True, False)),  # 5/12 of Agg's first phase
        ({"fec_s": 0.25, "fnec_s": 3.0, "bnec_s": 2.25}, 0.0, 0.25, (False, False)),  # 3/4 of Trans's first phase
        ({"fec_s": 2.0, "fnec_s": 0.75, "bnec_s": 0.75}, 0.0, 0.0, (True, True)),
        ({"fec_s": 2.0, "fnec_s": 0.75, "bnec_s": 0.75, "overlap_cost": 0.25}, 5 / 12, 5 / 12, (True, True)),
    ],
)  # fmt: skip
def test_each_phase_has_its_own_window_in_the_model_as_in_the_simulator(
    windows: dict[str, float], trans_s: float, agg_s: float, two_phase: tuple[bool, bool]
) -> None:
    """All of these transfers fit the sum of their windows, or nearly, in one form or the other."""
    model, simulated, form = model_and_simulator(1, **windows)
    assert model == pytest.approx((trans_s, agg_s))
    assert (form.two_phase_trans, form.two_phase_agg) == two_phase
    assert simulated == pytest.approx(model, abs=0.01)  # cuts are rounded


def test_a_second_phase_of_the_first_block_has_no_window() -> None:
    """The step's start covers a scatter, its end a part of the reduce, and neither covers what follows."""
    model, simulated, form = model_and_simulator(0, fec_s=2.0, fnec_s=1.5, bnec_s=0.5)
    assert model == pytest.approx((2 / 3, 1 / 6 + 1.0))
    assert (form.two_phase_trans, form.two_phase_agg) == (True, True)
    assert simulated[0] == pytest.approx(model[0], abs=0.01)
