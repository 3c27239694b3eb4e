"""Calibration: the fit is exact on lines, robust on others, and equal on all ranks."""

from __future__ import annotations

import pytest
import torch

from prophet import calibrate as module
from prophet.calibrate import Calibration, Fit, calibrate, fit_line
from prophet.comm import ThreadCollective, ThreadWorld


def test_a_line_is_found_exactly() -> None:
    points = [(x, 3e-5 + 2e-9 * x) for x in (1e3, 1e5, 1e6, 1e8)]
    assert fit_line(points) == pytest.approx((3e-5, 2e-9), rel=1e-6)


def test_the_relative_error_counts_not_the_absolute() -> None:
    # a point that is far off at the large end must not spoil the small one
    fixed, unit = fit_line([(1.0, 1.0), (10.0, 10.0), (1000.0, 1200.0)])
    assert abs(fixed + unit * 1.0 - 1.0) < 0.2


@pytest.mark.parametrize("points", [[(1.0, 1.0), (2.0, 4.0), (3.0, 9.0)], [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]])
def test_neither_part_is_negative(points: list[tuple[float, float]]) -> None:
    fixed, unit = fit_line(points)
    assert fixed >= 0
    assert unit >= 0


def test_held_out_error_is_measured_on_points_the_fit_has_not_seen() -> None:
    fit = Fit("a2a", "byte", 1.0, 1.0, ((1.0, 2.0),), ((3.0, 5.0), (1.0, 2.0)))
    assert fit.held_out_error == pytest.approx((1 / 5 + 0) / 2)


def test_all_ranks_get_the_same_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "A2A_BYTES", (1 << 10, 1 << 14))
    monkeypatch.setattr(module, "A2A_HELD_OUT", (1 << 12,))
    monkeypatch.setattr(module, "TOKENS", (8, 32))
    monkeypatch.setattr(module, "TOKENS_HELD_OUT", (16,))

    def body(c: ThreadCollective) -> Calibration:
        return calibrate(c, dim=8, hidden=16, repeats=3, ranks_per_node=2, dtype=torch.float32)

    found = ThreadWorld(4).run(body)
    assert all(f == found[0] for f in found)
    assert {f.operation for f in found[0].fits} == {
        "a2a_intra",
        "a2a_inter",
        "expert_forward",
        "expert_backward",
        "trans",
        "agg",
    }
    topology = found[0].topology
    assert (topology.ranks, topology.nodes) == (4, 2)
    assert all(f > 0 for f in topology.flops_per_s)


def test_one_rank_has_no_links_to_measure() -> None:
    found = calibrate(ThreadWorld(1).collective(0), dim=8, hidden=16, repeats=2)
    assert {f.operation for f in found.fits} == {"expert_forward", "expert_backward"}
