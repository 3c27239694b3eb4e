"""Hugging Face models and their Trainer, with expert parallelism that stays balanced.

>>> trainer = Trainer(model, args, train_dataset=data, callbacks=[ProphetCallback()])  # doctest: +SKIP
>>> trainer.train()  # doctest: +SKIP
>>> save_pretrained(model, "out")  # on every rank; the original layout  # doctest: +SKIP
"""

from prophet.convert.saving import load_pretrained, save_pretrained
from prophet_transformers.callback import ProphetCallback

__all__ = ["ProphetCallback", "load_pretrained", "save_pretrained"]
