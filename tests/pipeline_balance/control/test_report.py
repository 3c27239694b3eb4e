"""What moved and what it gained, in words."""

from __future__ import annotations

from pipeline_balance.control.report import BalanceReport, Move
from pipeline_balance.spec import StageMap


def test_a_line_for_each_move() -> None:
    layers = StageMap.contiguous((0, 2, 5, 8)).moves_to(StageMap.contiguous((0, 4, 6, 8)))
    move = Move(step=50, layers=layers, predicted_gain_s=0.02, before_s=0.125, after_s=None, seconds=0.035)
    assert move.measured_gain_s is None
    assert str(move) == (
        "step 50: layers 2-3 from rank 1 to 0, layer 5 from rank 2 to 1; gain per step 20.0 ms predicted, "
        "not measured yet; the move took 35.0 ms"
    )
    later = Move(step=60, layers=layers[:1], predicted_gain_s=0.02, before_s=0.125, after_s=0.1, seconds=0.035)
    report = BalanceReport(steps=70, moves=(move, later), reason="")
    assert str(report).splitlines() == [str(move), str(later)]
    assert "25.0 ms measured (125.0 to 100.0 ms)" in str(later)
    assert (
        str(BalanceReport(steps=7, moves=(), reason="nothing to gain"))
        == "no layer has moved in 7 steps: nothing to gain"
    )
