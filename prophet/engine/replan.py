"""When to plan: a placement is kept while it saves enough, and planned anew at once where routing moves away.

Functions from values to values: every rank calls them with the same gathered integers and reaches the same decision.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from prophet.engine.history import PREDICT_MODES, PredictMode, similarity
from prophet.errors import SpecError
from prophet.planner.base import Planner
from prophet.planner.model.cost import step_cost
from prophet.spec import IntArray, Placement, PlanContext

Reason = Literal["step", "first", "interval", "gain", "drift", "kept"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplanConfig:
    """When a placement is planned anew, and for which load.

    Attributes:
        predict: The load that placements are planned for: that of the "last" step, a moving average ("ema"), the "mean"
            of the last steps, or "best": per layer the one of these whose forecasts were best.
        interval: Steps after which a placement comes up for re-planning.
        gain_loss: At that time it is kept unless its predicted gain over no replicas has fallen by this fraction since
            it was planned; None always re-plans.
        drift: Re-plan inside the interval, too, when the overlap of the experts' shares between the step and the load
            that the placement was planned for falls this far below the layer's usual overlap; None never does.

    Raises:
        SpecError: For values outside their ranges.
    """

    predict: PredictMode = "last"
    interval: int = 10
    gain_loss: float | None = 0.1
    drift: float | None = 0.05

    def __post_init__(self) -> None:
        if self.predict not in PREDICT_MODES:
            known = ", ".join(repr(mode) for mode in PREDICT_MODES)
            raise SpecError(f"ReplanConfig.predict must be one of {known}, got {self.predict!r}")
        if not isinstance(self.interval, int) or isinstance(self.interval, bool) or self.interval < 1:
            raise SpecError(f"ReplanConfig.interval must be an integer of at least 1, got {self.interval!r}")
        for name in ("gain_loss", "drift"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value <= 1):
                raise SpecError(f"ReplanConfig.{name} must be a number above 0 and at most 1, or None, got {value!r}")


# The default of engines: always a new plan, and no gains or overlaps to compute
EVERY_STEP = ReplanConfig(interval=1, gain_loss=None, drift=None)


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class KeptPlan:
    """A layer's placement and the load it was planned for.

    Attributes:
        placement: The placement.
        load: The forecast [R, E] that it was planned from.
        gain: Predicted seconds saved over no replicas, as a fraction of those without.
        age: Steps since it was planned, or last found worth keeping.
        fresh: Whether no step has run with it yet.
        usual: Overlap of a step with the load planned for, as it usually is right after planning.
        reason: Why it was planned now, or "kept".
    """

    placement: Placement
    load: IntArray
    gain: float = 0.0
    age: int = 0
    fresh: bool = True
    usual: float | None = None
    reason: Reason = "step"


def next_plan(
    kept: KeptPlan | None,
    seen: IntArray,
    forecast: IntArray,
    planner: Planner,
    context: PlanContext,
    config: ReplanConfig,
) -> KeptPlan:
    """Return the plan for the coming step.

    Args:
        kept: The plan of the step that runs; None before the first.
        seen: That step's load so far, [R, E].
        forecast: The load expected of the coming step, [R, E].
        planner: Makes placements and splits.
        context: What it plans for.
        config: When to plan anew.
    """
    # Every step is planned for: gains and overlaps would cost time, and nobody reads them
    if config.interval == 1 and config.gain_loss is None:
        return KeptPlan(placement=planner.place(forecast, context), load=forecast)
    if kept is None:
        return _planned(None, "first", forecast, planner, context)
    overlap = similarity(kept.load, seen)
    usual = kept.usual
    drifted = config.drift is not None and usual is not None and overlap < usual - config.drift
    # How well plans fit their first step is what is usual; it may change slowly
    if kept.fresh and not drifted:
        usual = overlap if usual is None else usual + 0.25 * (overlap - usual)
    now = replace(kept, age=kept.age + 1, fresh=False, usual=usual, reason="kept")
    if drifted:
        return _planned(now, "drift", forecast, planner, context)
    if now.age < config.interval:
        return now
    if config.gain_loss is None:
        return _planned(now, "interval", forecast, planner, context)
    # A plan that saved nothing when it was made has nothing to lose, and is always planned anew
    enough = kept.gain * (1.0 - config.gain_loss)
    if kept.gain > 0 and predicted_gain(kept.placement, forecast, planner, context) >= enough:
        return replace(now, age=0)
    return _planned(now, "gain", forecast, planner, context)


def _planned(
    before: KeptPlan | None, reason: Reason, forecast: IntArray, planner: Planner, context: PlanContext
) -> KeptPlan:
    placement = planner.place(forecast, context)
    gain = predicted_gain(placement, forecast, planner, context)
    usual = before.usual if before else None
    return KeptPlan(placement=placement, load=forecast, gain=gain, usual=usual, reason=reason)


def predicted_gain(placement: Placement, load: IntArray, planner: Planner, context: PlanContext) -> float:
    """Predict the seconds that a placement saves, as a fraction of those of homes only.

    Args:
        placement: The placement.
        load: Tokens [R, E].
        planner: Splits the load.
        context: The machine and the layer.
    """
    if placement.is_static:
        return 0.0
    static = context.homes_only()
    before_s = step_cost(planner.split(load, static, context), static, context).total_s
    after_s = step_cost(planner.split(load, placement, context), placement, context).total_s
    return 1.0 - after_s / before_s if before_s > 0 else 0.0
