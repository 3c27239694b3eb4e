"""Checks for `prophet gpu-check` that go wrong, each in another way, in processes that the command starts."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

from prophet.doctor.check import finding, sound
from prophet.gpu_check.checks import Answer, Place, Task

_FOREVER_S = 600.0


def first(place: Place) -> Answer:
    return Answer(checks=[sound("environment", "quick")], figures={"gpus": []})


def hangs(place: Place) -> Answer:
    print("about to hang", flush=True)
    time.sleep(_FOREVER_S)
    return first(place)


def one_rank_hangs(place: Place) -> Answer:
    return hangs(place) if place.rank == 1 else Answer(checks=[sound("one-hangs", "here")])


def dies(place: Place) -> Answer:
    os.kill(os.getpid(), signal.SIGSEGV)
    return first(place)


def prints_garbage(place: Place) -> Answer:
    sys.stdout.buffer.write(bytes(range(256)) * 1000 + b'\n{"checks": []}\n\x1b[2J')
    sys.stdout.flush()
    return Answer(checks=[sound("garbage", "went on")])


def fills_memory(place: Place) -> Answer:
    # A limit that the machine does not notice
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    return Answer(checks=[sound("memory", str(len(bytearray(1 << 32))))])


def raises(place: Place) -> Answer:
    raise KeyError("x")


def finds(place: Place) -> Answer:
    return Answer(checks=[finding("finds", f"wrong at {place.timeout_s:.0f} s", "mend it")], paste=["unset IT"])


def last(place: Place) -> Answer:
    return Answer(checks=[sound("last", f"{place.ranks} rank on {place.device}")])


_HERE = "tests.helpers.gpu_check_bodies"
BLOWS = (
    Task(name="environment", function=f"{_HERE}:first", limit_s=60),
    Task(name="hangs", function=f"{_HERE}:hangs", limit_s=4),
    Task(name="one-hangs", function=f"{_HERE}:one_rank_hangs", limit_s=10, on_cpu=2),
    Task(name="dies", function=f"{_HERE}:dies", limit_s=60),
    Task(name="garbage", function=f"{_HERE}:prints_garbage", limit_s=60),
    Task(name="memory", function=f"{_HERE}:fills_memory", limit_s=60),
    Task(name="raises", function=f"{_HERE}:raises", limit_s=60, on_cpu=2),
    Task(name="finds", function=f"{_HERE}:finds", limit_s=60),
    Task(name="last", function=f"{_HERE}:last", limit_s=60),
)
