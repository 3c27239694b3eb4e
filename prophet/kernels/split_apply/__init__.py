"""From an integer split to the order in which rows travel."""

from prophet.kernels.split_apply.op import SendOrder, inverse, regroup, send_order

__all__ = ["SendOrder", "inverse", "regroup", "send_order"]
