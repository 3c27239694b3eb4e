"""Models with Tutel's MoE layer, their ranks kept balanced: one line after the optimizer, and the rest stays as it is.

>>> import prophet_tutel  # doctest: +SKIP
>>> prophet_tutel.balance(model, optimizer)  # doctest: +SKIP
"""

from prophet_tutel.start import Balanced, TutelError, balance

__all__ = ["Balanced", "TutelError", "balance"]
