"""Routing history: the recent loads of a layer, and a forecast of the next one.

Shape legend: R ranks, E experts, W window (steps kept), F forecasters.

Hot experts stay hot for hundreds of steps, so the last steps predict the next one (Pro-Prophet, section
III: locality). Every rank feeds its history with the same gathered integers and predicts with integer
arithmetic only, so that all ranks plan from equal loads and reach equal plans without communicating.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from prophet.errors import SpecError
from prophet.spec import FloatArray, IntArray, check_load

PredictMode = Literal["last", "ema", "mean", "best"]
PREDICT_MODES: tuple[PredictMode, ...] = ("last", "ema", "mean", "best")

# Fractional bits of the fixed-point moving average, and of the fixed-point forecast error
_FRACTION_BITS = 16
_ERROR_BITS = 20
# Weight of the newest error, in 256ths: about the last sixteen steps decide which forecaster is best
_ERROR_WEIGHT_256 = 16
# Weight of the newest step in the moving average: with a quarter a step is forgotten in about four
_EMA_WEIGHT_256 = 64
# Weights of further moving averages that "best" chooses among
_BEST_WEIGHTS_256 = (32, 128)


class History:
    """Recent loads of one layer, and their prediction.

    Memory is taken once: W * R * E integers of 32 bits, plus one of 64 bits per cell for every moving average.

    Args:
        ranks: R of the loads.
        experts: E of the loads.
        window: W, the steps kept.
        adaptive: Keep what "best" needs, further moving averages and each forecaster's recent error.

    Raises:
        SpecError: For sizes below one.
    """

    def __init__(self, ranks: int, experts: int, *, window: int = 16, adaptive: bool = False) -> None:
        for name, value in (("ranks", ranks), ("experts", experts), ("window", window)):
            if value < 1:
                raise SpecError(f"History.{name} must be at least 1, got {value}")
        self.ranks, self.experts, self.window = ranks, experts, window
        self.adaptive = adaptive
        weights = (_EMA_WEIGHT_256, *_BEST_WEIGHTS_256) if adaptive else (_EMA_WEIGHT_256,)
        self._weights = np.array(weights, dtype=np.int64)
        self._ring = np.zeros((window, ranks, experts), dtype=np.int32)
        # Fixed point, 47.16
        self._ema = np.zeros((len(weights), ranks, experts), dtype=np.int64)
        # Of last, mean and every moving average, in this order
        self._errors = np.zeros(2 + len(weights), dtype=np.int64)
        self._observed = np.zeros((), dtype=np.int64)
        # Each forecaster's load of every expert, summed over ranks: not saved, since it follows from the rest
        self._forecasts = np.zeros((2 + len(weights), experts if adaptive else 0), dtype=np.int64)

    @property
    def observed(self) -> int:
        """Steps that were observed, including those no longer kept."""
        return int(self._observed)

    def observe(self, load: npt.NDArray[Any]) -> None:
        """Remember `load` ([R, E] non-negative integers below 2**31) as the newest step."""
        array = self._checked(load)
        if array.size and array.max() > np.iinfo(np.int32).max:
            raise SpecError(f"load must be below 2**31 tokens per rank and expert, got {int(array.max())}")
        # First of all: the forecasts are compared with this step, so they must not have seen it
        if self.adaptive:
            self._errors[:] = self._scored(array)
        self._ring[self.observed % self.window] = array
        for i in range(len(self._weights)):
            self._ema[i] = self._averaged(array, i)
        self._observed += 1
        self._update_forecasts()

    def _checked(self, load: npt.NDArray[Any]) -> IntArray:
        array = check_load(load)
        if array.shape != (self.ranks, self.experts):
            raise SpecError(f"load must have shape [{self.ranks}, {self.experts}], got {list(array.shape)}")
        return array

    def _update_forecasts(self) -> None:
        """Set every forecaster's load of the next step."""
        if self.adaptive:
            self._forecasts[0] = self.predict("last").sum(axis=0)
            self._forecasts[1] = self.predict("mean").sum(axis=0)
            self._forecasts[2:] = _rounded(self._ema).sum(axis=1)

    def _averaged(self, load: IntArray, i: int) -> IntArray:
        """Return the i-th moving average with `load` as its newest step, in fixed point, [R, E]."""
        scaled = load << _FRACTION_BITS
        # The first step is the average: from zero it would take many steps to come up to the loads
        if not self._observed:
            return scaled
        # ema += (x - ema) * w / 256, rounded down by the shift: integers, hence equal on every rank
        average: IntArray = self._ema[i] + (((scaled - self._ema[i]) * self._weights[i]) >> 8)
        return average

    def _scored(self, load: IntArray) -> IntArray:
        """Return the forecasters' recent errors [F] once `load` has come.

        The error of a step is the share of tokens forecast for the wrong expert, in fixed point; the recent error is a
        moving average of those.
        """
        if not self._observed:
            return self._errors
        actual = load.sum(axis=0)
        missed = np.abs(self._forecasts - actual).sum(axis=1)
        error = (missed << _ERROR_BITS) // max(1, int(actual.sum()))
        if self._observed == 1:
            return np.asarray(error, dtype=np.int64)
        scored: IntArray = self._errors + (((error - self._errors) * _ERROR_WEIGHT_256) >> 8)
        return scored

    def forecast(self, load: npt.NDArray[Any], mode: PredictMode = "last") -> IntArray:
        """Return what `predict` would if `load` [R, E] were observed now; the history does not change.

        For a step that is still running: its microbatches so far stand for the whole.
        """
        array = self._checked(load)
        self._check_mode(mode, "forecast")
        choice = int(self._scored(array).argmin()) if mode == "best" else _CHOICE[mode]
        if choice == 0:
            return array
        if choice == 1:
            seen = self.observed
            # A full ring loses its oldest step when the next one is observed, so that step is left out here
            kept = [i for i in range(min(seen, self.window)) if seen < self.window or i != seen % self.window]
            return _mean(np.concatenate([self._ring[kept], array[np.newaxis]]))
        return _rounded(self._averaged(array, choice - 2))

    def predict(self, mode: PredictMode = "last") -> IntArray:
        """Return the load expected of the next step, [R, E] integers; zeros before the first observation.

        Args:
            mode: "last" repeats the newest step; "ema" is a moving average and "mean" the mean of the kept steps,
                rounded to the nearest token. "best" is the one of these, and of a faster and a slower moving average,
                whose forecasts of the last steps were best.
        """
        self._check_mode(mode, "predict")
        choice = int(self._errors.argmin()) if mode == "best" else _CHOICE[mode]
        if choice == 0:
            last: IntArray = self._ring[(self.observed - 1) % self.window].astype(np.int64)
            return last
        if choice == 1:
            return _mean(self._ring[: max(1, min(self.observed, self.window))])
        return _rounded(self._ema[choice - 2])

    def _check_mode(self, mode: str, what: str) -> None:
        if mode not in PREDICT_MODES:
            known = ", ".join(repr(m) for m in PREDICT_MODES)
            raise SpecError(f"History.{what} mode must be one of {known}, got {mode!r}")
        if mode == "best" and not self.adaptive:
            raise SpecError(f"History.{what}: 'best' needs History(adaptive=True)")

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return all that the history remembers, as copies by name, for a checkpoint."""
        return {name: getattr(self, f"_{name}").copy() for name in _SAVED}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over the memory of a history of the same ranks, experts, window and kind.

        Args:
            arrays: What `arrays` of that history returned; `engine_state_from` checks shapes and kinds.

        Raises:
            SpecError: For negative numbers; nothing is changed then.
        """
        # In two passes, so that nothing is changed where one array is wrong
        for name in _SAVED:
            if (arrays[name] < 0).any():
                raise SpecError(f"History.{name}: must not be negative")
        for name in _SAVED:
            getattr(self, f"_{name}")[...] = arrays[name]
        self._update_forecasts()


# Names in checkpoints, and of the attributes with an underscore before them
_SAVED = ("ring", "ema", "errors", "observed")
# A forecaster's place among the errors
_CHOICE = {"last": 0, "mean": 1, "ema": 2}


def _mean(steps: npt.NDArray[Any]) -> IntArray:
    """Average over the first dimension, rounded to the nearest token."""
    total: IntArray = steps.sum(axis=0, dtype=np.int64)
    mean: IntArray = (total + len(steps) // 2) // len(steps)
    return mean


def _rounded(fixed: IntArray) -> IntArray:
    """Round fixed point to the nearest integer."""
    rounded: IntArray = (fixed + (1 << (_FRACTION_BITS - 1))) >> _FRACTION_BITS
    return rounded


def expert_shares(load: npt.NDArray[Any]) -> FloatArray:
    """Return every expert's share of the tokens, [E], summing to 1; even shares when there are no tokens.

    Args:
        load: [E], or with any leading dimensions (ranks, steps), which are summed.

    Raises:
        SpecError: For a load without experts.
    """
    array = np.asarray(load)
    if array.ndim < 1 or array.shape[-1] < 1:
        raise SpecError(f"load must have experts as its last dimension, got shape {list(array.shape)}")
    per_expert = array.reshape(-1, array.shape[-1]).sum(axis=0, dtype=np.int64)
    total = int(per_expert.sum())
    if total == 0:
        return np.full(per_expert.size, 1.0 / per_expert.size)
    shares: FloatArray = per_expert / total
    return shares


def similarity(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Return the overlap of the experts' shares in two loads: 1 minus half their L1 distance.

    1 means that every expert gets the same share of tokens in both, 0 that the two use disjoint experts;
    the value is the fraction of tokens that a placement made for `a` finds where it expects them in `b`.

    Args:
        a: One load, [E] or [..., E].
        b: The other.

    Raises:
        SpecError: For different numbers of experts.
    """
    p, q = expert_shares(a), expert_shares(b)
    if p.size != q.size:
        raise SpecError(f"both loads must have the same number of experts, got {p.size} and {q.size}")
    return float(1.0 - 0.5 * np.abs(p - q).sum())
