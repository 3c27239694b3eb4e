"""From an integer split to the order in which rows travel."""

from prophet.kernels.split_apply.op import SendOrder, inverse, order_of_runs, regroup, send_order

__all__ = ["SendOrder", "inverse", "order_of_runs", "regroup", "send_order"]
