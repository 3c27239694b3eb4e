"""Measuring layers and stages. A door: the code is in `pipeline_balance.control`."""

from pipeline_balance.control.measure import Meter, RankTimes
from pipeline_balance.control.measure_alone import measure_alone

__all__ = ["Meter", "RankTimes", "measure_alone"]
