"""HTML reports: of a training run (`run`), and of what a planner would have done with a trace (`plan`)."""

from prophet.errors import ReportError
from prophet.report.page import Table
from prophet.report.plan import PlanReport, render_plan, write_plan
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
    "PlanReport",
    "Report",
    "ReportError",
    "Run",
    "Table",
    "expert_shares_by_step",
    "max_mean",
    "relative_difference",
    "render_plan",
    "render_report",
    "similarity_by_distance",
    "write_plan",
    "write_report",
]
