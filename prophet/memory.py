"""Keep freed memory for the next tensors, on the CPU. A door: the code is in `prophet.machine.memory`."""

from prophet.machine.memory import keep_memory

__all__ = ["keep_memory"]
