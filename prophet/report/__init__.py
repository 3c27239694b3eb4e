"""HTML reports: of a training run (`run`), and of a comparison of planners on a trace (`comparison`)."""

from prophet.errors import ReportError
from prophet.report.comparison import Comparison, render_comparison, write_comparison
from prophet.report.gain import Interval, Pairs, median_interval
from prophet.report.page import Table, check_can_draw
from prophet.report.run import (
    Report,
    Run,
    expert_shares_by_step,
    max_mean,
    relative_difference,
    render_report,
    similarity_by_distance,
    write_report,
)

__all__ = [
    "Comparison",
    "Interval",
    "Pairs",
    "Report",
    "ReportError",
    "Run",
    "Table",
    "check_can_draw",
    "expert_shares_by_step",
    "max_mean",
    "median_interval",
    "relative_difference",
    "render_comparison",
    "render_report",
    "similarity_by_distance",
    "write_comparison",
    "write_report",
]
