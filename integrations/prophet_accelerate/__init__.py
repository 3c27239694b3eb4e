"""Hugging Face accelerate, with expert parallelism that stays balanced.

>>> accelerator = Accelerator()  # doctest: +SKIP
>>> balanced = prophet_accelerate.balance(accelerator)  # doctest: +SKIP
>>> model, optimizer, data = accelerator.prepare(model, optimizer, data)  # and train as before  # doctest: +SKIP
"""

from prophet_accelerate.start import Balanced, balance

__all__ = ["Balanced", "balance"]
