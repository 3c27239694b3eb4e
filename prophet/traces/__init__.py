"""Routing traces: read, write, replay, extrapolate."""

from prophet.errors import TraceError
from prophet.traces.npz import RoutingTrace, TraceWriter, read_trace, write_trace

__all__ = ["RoutingTrace", "TraceError", "TraceWriter", "read_trace", "write_trace"]
