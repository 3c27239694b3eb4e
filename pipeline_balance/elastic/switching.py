"""What a job makes ahead of a switch."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline_balance.elastic.parallelism import Parallelism
from pipeline_balance.pipeline.reseat import Arrangement, Way


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What was made ahead of a switch, or in words why it could not be; `broken`: ranks have lost each other."""

    problem: str = ""
    broken: bool = False
    layout: Parallelism | None = None
    target: Arrangement | None = None
    way: Way | None = None
