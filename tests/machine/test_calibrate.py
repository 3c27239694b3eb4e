"""Calibration: the fit is exact on lines, robust on others, checked on what it has not seen, and equal on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from prophet.errors import SpecError
from prophet.experts.feed_forward import FeedForwardBank
from prophet.machine.calibrate import Calibration, calibrate, calibration_of, check, model_lines
from prophet.machine.fit import Fit, Line, Point, fit_line, noise_of, noise_seconds_of, rate_of
from prophet.machine.measure import (
    Measured,
    Probe,
    Ranges,
    measure_duplex,
    measure_link_overlap,
    measure_overlap,
    peers_by_level,
)
from prophet.planner.model.cost import step_cost
from prophet.ranks.threads import ThreadCollective, ThreadWorld
from prophet.spec import FloatArray, LayerShape, Link, Placement, PlanContext, Split, Topology, last_of_alike

SMALL = Ranges(rows=(4, 64), tokens=(8, 32), groups=(1, 2), halves=(1, 3), points=3)


def points(seconds: Callable[[float, float], float], *counts: float) -> list[Point]:
    return [Point(x, c, seconds(x, c)) for c in counts for x in (1e3, 1e5, 1e6, 1e8)]


def test_a_line_is_found_exactly() -> None:
    line = fit_line(points(lambda x, _: 3e-5 + 2e-9 * x, 1.0))
    assert (line.fixed_s, line.unit_s, line.count_s) == (pytest.approx(3e-5), pytest.approx(2e-9), 0.0)


def test_costs_per_call_per_expert_and_per_token_are_told_apart() -> None:
    line = fit_line(points(lambda x, c: 3e-5 + 1e-5 * c + 2e-9 * x, 1.0, 2.0, 4.0))
    assert (line.fixed_s, line.unit_s, line.count_s) == (
        pytest.approx(3e-5),
        pytest.approx(2e-9),
        pytest.approx(1e-5),
    )


def test_the_relative_error_counts_not_the_absolute() -> None:
    # a point that is far off at the large end must not spoil the small one
    line = fit_line([Point(1.0, 1, 1.0), Point(10.0, 1, 10.0), Point(1000.0, 1, 1200.0)])
    assert abs(line.seconds(Point(1.0, 1, 0.0)) - 1.0) < 0.2


def test_one_disturbed_size_does_not_bend_the_line() -> None:
    good = [Point(x, 1, 1e-4 + 1e-9 * x) for x in (1e4, 3e4, 1e5, 3e5, 1e6, 3e6)]
    line = fit_line([*good, Point(2e5, 1, 9e-4)])
    assert max(line.errors(good)) < 0.01


@pytest.mark.parametrize("seconds", [(1.0, 4.0, 9.0), (3.0, 2.0, 1.0)])
def test_no_part_is_negative(seconds: tuple[float, ...]) -> None:
    line = fit_line([Point(float(i), 1, t) for i, t in enumerate(seconds, start=1)])
    assert line.fixed_s >= 0
    assert line.unit_s >= 0


def test_errors_are_measured_on_points_the_fit_has_not_seen() -> None:
    fit = Fit("a2a", "byte", Line(1.0, 1.0), (Point(1.0, 1, 9.0),), (Point(3.0, 1, 5.0), Point(1.0, 1, 2.0)))
    assert fit.mean_error == pytest.approx((1 / 5 + 0) / 2)
    assert fit.max_error == pytest.approx(1 / 5)
    assert Fit("a2a", "byte", Line(1.0, 1.0), fit.fitted, ()).max_error == 0.0


def body(c: ThreadCollective) -> Calibration:
    return calibrate(c, dim=8, hidden=16, repeats=3, ranks_per_node=2, ranges=SMALL)


def test_nodes_may_be_uneven() -> None:
    """Both ends of a pair say the same number of rows, though one of them has more peers."""
    found = ThreadWorld(3, timeout_s=20.0).run(body)
    assert all(f == found[0] for f in found)
    assert {"a2a_intra", "a2a_inter"} < {f.operation for f in found[0].fits}


def test_all_ranks_get_the_same_topology() -> None:
    found = ThreadWorld(4).run(body)
    assert all(f == found[0] for f in found)
    operations = {f.operation for f in found[0].fits}
    exchanges = {"a2a_intra", "a2a_inter", "a2a_alone"}
    assert operations == exchanges | {"expert_forward", "expert_backward", "trans", "agg"}
    assert {f.operation for f in found[0].model} == operations
    topology = found[0].topology
    assert (topology.ranks, topology.nodes) == (4, 2)
    assert all(f > 0 for f in topology.flops_per_s)
    assert 0 <= topology.overlap_cost < 1
    for fit in found[0].fits:
        fitted, held_out = {p.size for p in fit.fitted}, {p.size for p in fit.held_out}
        assert fitted
        assert held_out
        assert not fitted & held_out
        assert min(fitted) < min(held_out)
        assert max(held_out) < max(fitted)
    forward = next(f for f in found[0].fits if f.operation == "expert_forward")
    assert {p.count for p in forward.fitted} == {1, 2}


def told(operation: str, unit: str, fixed_s: float, unit_s: float, ranks: int, **noise: float) -> Measured:
    points = tuple(Point(size, 1, fixed_s + unit_s * size) for size in (1e4, 1e5, 1e6))
    return Measured(operation, unit, points, (), np.ones((len(points), ranks)), **noise)


def test_both_passes_are_fitted_apart_and_noise_is_kept() -> None:
    shape = LayerShape.feed_forward(dim=8, hidden=16)
    measured = [
        told("a2a_intra", "byte", 1e-5, 1e-9, 4, noise=0.5, noise_s=4e-6),
        told("expert_forward", "token", 1e-4, 1e-6, 4, noise=0.02),
        told("expert_backward", "token", 2.3e-4, 2.3e-6, 4, noise=0.04),
    ]
    found = calibration_of(
        {m.operation: m for m in measured}, shape, 4, ranks_per_node=4, free_bytes=1, duplex_cost=0.2, name="told"
    ).topology
    assert found.backward_ratio == pytest.approx(2.3)
    assert (found.compute_noise, found.exchange_noise_s) == (pytest.approx(0.03), 4e-6)
    assert (found.duplex_cost, found.link_overlap_cost) == (0.2, 1.0)
    # its line is that of the last of four
    later_s = 4e-6 * last_of_alike(4)
    assert found.intra.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert found.intra.latency_s == pytest.approx(1e-5 - later_s, rel=1e-3)
    # planners go by a third of both, as before
    assert found.flops_per_s[0] == pytest.approx(shape.forward_flops_per_token / 1.1e-6, rel=1e-3)
    lines = model_lines(found, shape)
    assert lines["a2a_intra"].fixed_s == pytest.approx(1e-5, rel=1e-3)
    assert lines["trans"].fixed_s == pytest.approx(1e-5 - later_s, rel=1e-3)
    assert lines["a2a_intra"].unit_s == lines["trans"].unit_s == pytest.approx(1e-9, rel=1e-3)
    assert lines["expert_forward"].unit_s == pytest.approx(1e-6, rel=1e-3)
    assert lines["expert_backward"].unit_s == pytest.approx(2.3e-6, rel=1e-3)


@pytest.mark.parametrize("alone_s", [1e-9, 4e-9])
def test_ranks_behind_one_port_have_no_noise_of_their_own(alone_s: float) -> None:
    """They are done in any order, and the last of them with the port."""
    measured = [
        told("a2a_intra", "byte", 1e-5, 1e-9, 4, noise_s=2e-6),
        told("a2a_inter", "byte", 1e-5, 4e-9, 4, noise_s=3e-6),
        told("a2a_alone", "byte", 1e-5, alone_s, 4, noise_s=9e-6),
        told("expert_forward", "token", 1e-4, 1e-6, 4),
        told("expert_backward", "token", 2e-4, 2e-6, 4),
    ]
    shape = LayerShape.feed_forward(dim=8, hidden=16)
    table = {m.operation: m for m in measured}
    found = calibration_of(table, shape, 4, ranks_per_node=2, free_bytes=1, name="told").topology
    assert (found.port_bytes_per_s is None) == (alone_s == 4e-9)
    assert found.exchange_noise_s == (2e-6 if found.port_bytes_per_s else 3e-6)


@pytest.mark.parametrize(("ranks", "noise"), [(2, 0.05), (4, 0.1), (8, 0.02)])
def test_noise_is_what_was_drawn(ranks: int, noise: float) -> None:
    """Of ranks that differ, at moments that were slow for all of them, with disturbed observations among them."""
    rng = np.random.default_rng(ranks)
    speed, moment = 1 + rng.random(ranks), rng.lognormal(0, 0.5, size=(400, 1))
    seconds = speed * moment * (1 + noise * rng.normal(size=(400, ranks)))
    assert noise_of(seconds) == pytest.approx(noise, rel=0.1)
    seconds[::10, 0] *= 3.0
    assert noise_of(seconds) == pytest.approx(noise, rel=0.25)
    assert noise_of(seconds[:, :1]) == 0.0
    assert noise_of(np.zeros((3, ranks))) == 0.0


@pytest.mark.parametrize(("ranks", "noise_s"), [(2, 0.005), (4, 0.003), (8, 0.007)])
def test_noise_in_seconds_is_what_was_drawn(ranks: int, noise_s: float) -> None:
    """Of exchanges of three sizes, by ranks of which some are always later."""
    rng = np.random.default_rng(ranks)
    size_s = np.repeat([[0.05], [0.1], [0.2]], 100, axis=0)
    seconds = size_s + 0.01 * rng.random(ranks) + noise_s * rng.normal(size=(300, ranks))
    assert noise_seconds_of(seconds) == pytest.approx(noise_s, rel=0.1)
    seconds[::10, 0] *= 3.0
    assert noise_seconds_of(seconds) == pytest.approx(noise_s, rel=0.25)
    assert noise_seconds_of(seconds[:, :1]) == 0.0


@pytest.mark.parametrize(
    ("alone", "port", "own"),
    [(1e9, None, 1e9), (1.2e9, None, 1e9), (4e9, 4e9, 4e9), (2e9, 4e9, 2e9), (0.8e9, None, 1e9)],
)
def test_a_port_is_what_makes_all_ranks_slower_than_one(alone: float, port: float | None, own: float) -> None:
    """Two nodes of four ranks, which send 1 GB/s each where all send."""
    shape = LayerShape.feed_forward(dim=8, hidden=16)
    measured = [
        told("a2a_intra", "byte", 1e-5, 1 / 8e9, 8),
        told("a2a_inter", "byte", 3e-5, 1 / 1e9, 8),
        told("a2a_alone", "byte", 2e-5, 1 / alone, 8),
        told("trans", "byte", 3e-5, 1 / 0.5e9, 8),
        *(told(f"expert_{way}", "token", 1e-4, 1e-6, 8) for way in ("forward", "backward")),
    ]
    found = calibration_of({m.operation: m for m in measured}, shape, 8, ranks_per_node=4, free_bytes=1, name="told")
    topology = found.topology
    assert topology.port_bytes_per_s == (None if port is None else pytest.approx(port, rel=1e-3))
    assert topology.inter.bytes_per_s == pytest.approx(own, rel=1e-3)
    assert topology.inter.latency_s == pytest.approx(3e-5, rel=1e-2)
    assert topology.even_inter.bytes_per_s == pytest.approx(1e9, rel=1e-3), "as measured, with a port and without"
    assert topology.trans_rate == pytest.approx(0.5, rel=0.05), "of what is left where all send"
    lines = model_lines(topology, shape)
    for operation, fixed_s, rate in (("a2a_inter", 3e-5, 1e9), ("a2a_alone", 3e-5, own), ("trans", 3e-5, 0.5e9)):
        assert lines[operation].fixed_s == pytest.approx(fixed_s, rel=1e-2)
        assert 1 / lines[operation].unit_s == pytest.approx(rate, rel=0.05)


def test_one_rank_of_every_node_sends_alone() -> None:
    """Three nodes of two ranks, the last of which has one; nodes of one rank have nobody to share a port with."""
    alone = np.array([peers_by_level(5, 2, rank)["alone"] for rank in range(5)])
    assert np.argwhere(alone).tolist() == [[0, 2], [0, 4], [2, 0], [2, 4], [4, 0], [4, 2]]
    inter = np.array([peers_by_level(5, 2, rank)["inter"] for rank in range(5)])
    assert (alone <= inter).all()
    assert inter.sum() == 5 * 5 - (4 + 4 + 1)
    assert set(peers_by_level(3, 1, 0)) == {"intra", "inter"}
    assert not peers_by_level(2, 2, 0)["alone"].any()


def test_one_rank_has_no_links_to_measure() -> None:
    found = calibrate(ThreadWorld(1).collective(0), dim=8, hidden=16, repeats=2, ranges=SMALL, held_out=False)
    assert {f.operation for f in found.fits} == {"expert_forward", "expert_backward"}
    assert found.model == ()
    assert all(f.held_out == () for f in found.fits)


class _Told(Probe):
    """Takes the seconds of the probes from a list; every other of four samples lies `spread_s` above them."""

    def __init__(self, collective: ThreadCollective, seconds: list[list[float]], spread_s: float = 0.0) -> None:
        super().__init__(collective, torch.device("cpu"), 1)
        self.seconds, self.spread_s = seconds, spread_s

    def samples(self, runs: Sequence[Callable[[], float | None]]) -> list[FloatArray]:
        for run in runs:
            run()
        return [np.full((4, 1), lower) for lower in self.seconds.pop(0)]

    def differences(self, first: Callable[[], float], second: Callable[[], float]) -> FloatArray:
        first()
        second()
        alone_s, beside_s = self.seconds.pop(0)
        return np.tile([beside_s - alone_s + self.spread_s, beside_s - alone_s], 2)


@pytest.mark.parametrize(
    ("beside_s", "spread_s", "expected"),
    [(5.0, 0.0, 0.0), (4.9, 0.0, 0.0), (5.5, 0.0, 0.25), (9.0, 0.0, 0.95), (5.4, 0.2, 0.25), (5.1, 0.8, 0.0)],
)
def test_what_a_hidden_transfer_costs_is_what_it_adds_per_second(
    beside_s: float, spread_s: float, expected: float
) -> None:
    bank = FeedForwardBank(8, 16, 1)

    def told(c: ThreadCollective) -> float:
        return measure_overlap(_Told(c, [[2.0, 1.0], [5.0, beside_s]], spread_s), bank, rows=4, n_bytes=256)

    assert ThreadWorld(2).run(told) == [pytest.approx(expected)] * 2
    assert measure_overlap(_Told(ThreadWorld(1).collective(0), []), bank, rows=4, n_bytes=256) == 0.0


@pytest.mark.parametrize(
    ("one_s", "both_s", "expected"), [(2.0, 2.5, 0.25), (2.0, 2.0, 0.0), (2.0, 1.9, 0.0), (2.0, 9.0, 1.0)]
)
def test_what_both_directions_cost_is_what_the_second_adds(one_s: float, both_s: float, expected: float) -> None:
    bank = FeedForwardBank(8, 16, 1)

    class Both(Probe):
        """Two nodes, of three ranks and of two; the latter's seconds do not count, nor does a disturbed sample."""

        def samples(self, runs: Sequence[Callable[[], float | None]]) -> list[FloatArray]:
            for run in runs:
                run()
            times = np.array([[1], [1], [1], [1], [7]])
            # who only sends is done early; where all receive, the mean over ranks counts
            return [times * np.array(s) for s in ([one_s, 0.1, 0.1, 8, 8], [both_s - 1, both_s, both_s + 1, 9, 9])]

    def found(c: ThreadCollective) -> float:
        return measure_duplex(Both(c, torch.device("cpu"), 1), bank, ranks_per_node=3, n_bytes=256)

    assert ThreadWorld(5).run(found) == [pytest.approx(expected)] * 5
    assert measure_duplex(_Told(ThreadWorld(1).collective(0), []), bank, ranks_per_node=1, n_bytes=256) == 0.0


@pytest.mark.parametrize(
    ("transfer_s", "together_s", "expected"),
    [(3.0, 5.0, 1.0), (1.0, 2.8, 0.8), (1.0, 2.0, 0.0), (3.0, 2.9, 0.0), (3.0, 9.0, 1.0)],
)
def test_an_all_to_all_and_a_transfer_share_a_link_by_what_they_take_together(
    transfer_s: float, together_s: float, expected: float
) -> None:
    """Which of the two is done first does not count: a link that carries all bytes of both in turn costs 1."""
    bank = FeedForwardBank(8, 16, 1)

    def found(c: ThreadCollective) -> float:
        return measure_link_overlap(_Told(c, [[2.0, transfer_s, together_s]]), bank, n_bytes=256)

    assert ThreadWorld(3).run(found) == [pytest.approx(expected)] * 3
    assert measure_link_overlap(_Told(ThreadWorld(1).collective(0), []), bank, n_bytes=256) == 1.0


def test_a_check_fits_nothing_and_uses_the_lines_it_is_given() -> None:
    lines = {"expert_forward": Line(1e9, 0.0), "trans": Line(0.0, 1e9)}

    def checked(c: ThreadCollective) -> tuple[Fit, ...]:
        return check(c, lines, dim=8, hidden=16, repeats=2, ranges=SMALL)

    found = ThreadWorld(2).run(checked)
    assert found[0] == found[1]
    assert [f.operation for f in found[0]] == ["expert_forward", "trans"]
    assert all(f.fitted == () and f.mean_error > 1e3 for f in found[0])


def test_the_models_lines_are_what_the_cost_model_says() -> None:
    from prophet.planner.model.cost import compute_seconds, exchange_seconds

    shape = LayerShape.feed_forward(dim=8, hidden=16)
    topology = Topology(
        ranks=2,
        ranks_per_node=2,
        intra=Link(bytes_per_s=1e6, latency_s=1e-3),
        inter=Link(bytes_per_s=1e3, latency_s=1e-1),
        flops_per_s=(1e6, 2e6),
        free_bytes=(1 << 30,) * 2,
        expert_overhead_s=2e-3,
        call_overhead_s=5e-3,
    )
    lines = model_lines(topology, shape)
    context = PlanContext(topology=topology, shape=shape, home=(0, 0, 1, 1))
    load = np.array([[10, 20, 0, 0], [0, 0, 10, 20]])
    split = Split.to_homes(load, Placement.homes_only(4, 2))
    forward = compute_seconds(split.tokens.sum(axis=0), context)
    assert lines["expert_forward"].seconds(Point(30, 2, 0.0)) == pytest.approx(forward)
    assert lines["expert_backward"].seconds(Point(30, 2, 0.0)) == pytest.approx(2 * forward)
    exchange = exchange_seconds(np.array([[0.0, 4096.0], [4096.0, 0.0]]), topology)
    for operation in ("a2a_intra", "trans", "agg"):
        assert lines[operation].seconds(Point(4096, 1, 0.0)) == pytest.approx(exchange)


def test_a_call_overhead_is_paid_once_and_only_where_there_is_work() -> None:
    from prophet.planner.model.cost import compute_seconds

    topology = Topology.uniform(2, flops_per_s=1e6)
    shape = LayerShape.feed_forward(dim=8, hidden=16)
    slow = Topology(**{**{f: getattr(topology, f) for f in topology.__slots__}, "call_overhead_s": 0.5})
    load = np.array([[3, 0], [0, 4]])
    plain, more = (compute_seconds(load, PlanContext(topology=t, shape=shape, home=(0, 1))) for t in (topology, slow))
    assert more == pytest.approx(plain + 0.5)
    assert compute_seconds(0 * load, PlanContext(topology=slow, shape=shape, home=(0, 1))) == 0.0


@pytest.mark.parametrize(
    "wrong", [{"rows": (8, 8)}, {"tokens": (0, 4)}, {"groups": ()}, {"groups": (300,)}, {"points": 1}]
)
def test_ranges_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SpecError, match="Ranges"):
        Ranges(**wrong)  # type: ignore[arg-type]


def test_other_types_of_numbers() -> None:
    found = calibrate(
        ThreadWorld(1).collective(0),
        dim=8,
        hidden=16,
        repeats=2,
        ranges=SMALL,
        dtype=torch.bfloat16,
        activation="swiglu",
    )
    assert all(f.line.unit_s >= 0 for f in found.fits)


def test_samples_that_were_disturbed_show_in_the_spread() -> None:
    """Each run takes one of the seconds below by a made-up clock; the lower quartile counts."""
    took = iter([9.0, 9.0, 1.0, 1.0, 1.0, 3.0, 3.0])  # the first two are the warm-up and the look at its length
    probe = Probe(ThreadWorld(1).collective(0), torch.device("cpu"), 5)
    (lower, median), by_rank = probe.typical([lambda: next(took)])
    assert (lower.tolist(), median.tolist()) == ([1.0], [1.0])
    assert by_rank.tolist() == [[1.0]]
    took = iter([9.0, 9.0, 1.0, 1.0, 3.0, 3.0, 3.0])
    (lower, median), _ = probe.typical([lambda: next(took)])
    assert (lower.tolist(), median.tolist()) == ([1.0], [3.0])


def test_short_runs_are_sampled_more_often() -> None:
    calls = [0, 0, 0]
    lasts = (1.0, 3.0, 100.0)

    def run(i: int) -> float:
        calls[i] += 1
        return lasts[i]

    probe = Probe(ThreadWorld(1).collective(0), torch.device("cpu"), 4)
    (lower, _), _ = probe.typical([lambda i=i: run(i) for i in range(3)])  # type: ignore[misc]
    assert lower.tolist() == list(lasts)
    assert calls == [2 + 4 * 8, 2 + 4 * 8, 2 + 4]  # at most eight times as often


def test_the_rate_of_transfers_is_that_of_most_of_them() -> None:
    link = Link(bytes_per_s=2e9, latency_s=1e-4)
    points = [Point(n, 1, 1e-4 + n / 0.5e9) for n in (1e5, 1e6, 1e7)]
    assert rate_of(points, link) == pytest.approx(0.25)
    assert rate_of([*points, Point(1e6, 1, 1.0)], link) == pytest.approx(0.25)  # one that was disturbed
    assert rate_of([Point(1e6, 1, 5e-5)], link) > 1  # shorter than the latency alone: fast, but not for nothing


def test_slower_transfers_count_as_more_bytes() -> None:
    shape, link = LayerShape.feed_forward(dim=8, hidden=16), Link(bytes_per_s=1e6)
    slow = dataclasses.replace(Topology.uniform(2, intra=link), trans_rate=0.5, agg_rate=0.25)
    load = np.array([[300, 0], [300, 0]], dtype=np.int64)
    placement = Placement.with_replicas((0, 1), 2, [(0, 1)])
    split = Split(np.array([[[300, 0], [0, 0]], [[0, 300], [0, 0]]], dtype=np.int64))
    even, later = (
        step_cost(split, placement, PlanContext(topology=t, shape=shape, home=(0, 1)))
        for t in (Topology.uniform(2, intra=link), slow)
    )
    split.check(load, placement)
    assert later.trans_s == pytest.approx(2 * even.trans_s)
    assert later.agg_s == pytest.approx(4 * even.agg_s)
    assert later.a2a_s == even.a2a_s
    with pytest.raises(SpecError, match="trans_rate"):
        dataclasses.replace(slow, trans_rate=0.0)
