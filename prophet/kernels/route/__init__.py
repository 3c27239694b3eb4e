"""The top-k gate."""

from prophet.kernels.route.naive import Routed
from prophet.kernels.route.op import route, tally

__all__ = ["Routed", "route", "tally"]
