"""Marks of time where work runs: readings of the host's clock on the CPU, events in a stream on a device.

Work on a device is launched now and done later, so the host's clock around a launch says nothing of it. An event is
launched between the work, and the device notes its time when it comes there. It is asked for a step later, when all
of that step is over, so that nobody waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

# Where it is used: a prediction has windows and no device, and loads no torch
if TYPE_CHECKING:
    import torch

Mark = Any
"""A moment: seconds as a float on the host, else an event."""


def clock_on(device: torch.device) -> Callable[[], Mark]:
    """Return what marks now, for work on `device`: after all that this thread has launched into its stream."""
    if device.type in ("cpu", "meta"):
        return time.perf_counter
    return lambda: timed_event(device)


def timed_event(device: torch.device) -> Any:
    """Launch an event that notes the device's time into this thread's stream."""
    import torch

    from prophet.ranks.device import side_stream

    event = torch.Event(device, enable_timing=True)
    event.record(side_stream.current_stream(device))
    return event


def on_host(mark: Mark) -> bool:
    """Whether a mark is a reading of the host's clock."""
    return isinstance(mark, float | int)


def is_over(mark: Mark) -> bool:
    """Whether the device has come to a mark; asks without waiting."""
    return on_host(mark) or bool(mark.query())


def seconds_between(began: Mark, ended: Mark) -> float:
    """Return the seconds between two marks of one device; waits for them if the device has not come there."""
    if on_host(ended):
        return float(ended - began)
    # an event that the device has not reached has no time, and asking for it raises
    for event in (began, ended):
        event.synchronize()
    return float(began.elapsed_time(ended)) * 1e-3


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all that it was given; nothing on the host, where work is done at once."""
    if device.type not in ("cpu", "meta"):
        wait_for_all_streams(device)


def wait_for_all_streams(device: torch.device) -> None:
    """Wait on the host until all streams of `device` are empty."""
    import torch

    torch.accelerator.synchronize(device)
