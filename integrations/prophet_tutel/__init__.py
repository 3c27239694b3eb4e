"""Models with Tutel's MoE layer, their ranks kept balanced: one call, and the training loop stays as it is.

>>> import prophet_tutel  # doctest: +SKIP
>>> balanced = prophet_tutel.balance(model, lambda params: torch.optim.AdamW(params, lr=1e-3))  # doctest: +SKIP
>>> optimizer = balanced.optimizer  # doctest: +SKIP
"""

from prophet_tutel.start import Balanced, TutelError, balance

__all__ = ["Balanced", "TutelError", "balance"]
