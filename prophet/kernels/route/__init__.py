"""The top-k gate."""

from prophet.kernels.route.naive import Routed, weights_of
from prophet.kernels.route.op import route, tally

__all__ = ["Routed", "route", "tally", "weights_of"]
