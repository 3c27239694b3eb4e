"""Functions that the testbed's tests run on the emulated hosts."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from typing import Any

from benchmarks.cluster.host import Host

PORT = 5001


def who(host: Host, args: dict[str, Any]) -> dict[str, Any]:
    """What the host knows of itself."""
    interfaces = sorted(os.listdir("/sys/class/net"))
    return {"rank": host.rank, "hosts": host.hosts, "word": args["word"], "interfaces": interfaces}


def receives_first(host: Host, args: dict[str, Any]) -> bool:
    """Whether the collective of all hosts posts its receives first, and delivers."""
    import torch

    from prophet.ranks.operation import Operation
    from prophet.ranks.process_group import ProcessGroupCollective, collective_for

    with host.process_group(timeout_s=30):
        group = collective_for(None, timeout_s=30)
        found = group.all_to_all(torch.full((2,), float(host.rank)), [1, 1], [1, 1], op=Operation("test")).wait()
        return isinstance(group, ProcessGroupCollective) and bool(group._receive_first) and found.tolist() == [0.0, 1.0]


def paced_products(host: Host, args: dict[str, Any]) -> tuple[float, str]:
    """How many times longer than their processor time matrix products take, and the host's control groups."""
    import torch

    torch.set_num_threads(1)
    x = torch.ones(512, 512)
    with host.paced():
        x @ x  # the first one imports
        began, worked = time.perf_counter(), time.thread_time()
        for _ in range(args["products"]):
            x @ x
        slowdown = (time.perf_counter() - began) / (time.thread_time() - worked)
    with open("/proc/self/cgroup", encoding="utf-8") as f:
        return slowdown, f.read()


def cores_of_threads(host: Host, args: dict[str, Any]) -> tuple[list[int], dict[str, tuple[list[int], int]]]:
    """The cores of the main thread; by name the cores and the niceness of all others, after some paced work."""
    import torch

    from prophet.ranks.process_group import collective_for
    from prophet.ranks.waiting import Waiter

    torch.set_num_threads(1)
    x = torch.ones(256, 256)
    with host.process_group(timeout_s=30), host.paced():
        x @ x
        waiters = [Waiter("plans"), Waiter("gloo waits")]
        group = collective_for(None, timeout_s=30)
        until = time.perf_counter() + 1.0
        while time.perf_counter() < until:
            x @ x
        names = {str(t.native_id): t.name for t in threading.enumerate()}
        others = {
            names.get(task, task): (sorted(os.sched_getaffinity(int(task))), os.getpriority(os.PRIO_PROCESS, int(task)))
            for task in os.listdir("/proc/self/task")
            if task != str(os.getpid())
        }
        del waiters, group
        return sorted(os.sched_getaffinity(0)), others


def cores_of_actions(host: Host, args: dict[str, Any]) -> list[list[int]]:
    """The cores of a main thread that is paced by the action: within one, and after it."""
    pace = host.pace()
    return [pace.work(lambda: sorted(os.sched_getaffinity(0))), sorted(os.sched_getaffinity(0))]


def ring(host: Host, args: dict[str, Any]) -> float:
    """Send bytes to the next host; returns the bytes per second at which the previous host's arrived."""
    size = int(args["mbytes"] * (1 << 20))
    listener = socket.create_server((host.address, PORT))
    after = f"10.77.0.{(host.rank + 1) % host.hosts + 1}"
    deadline = time.monotonic() + 20
    while True:
        try:
            out = socket.create_connection((after, PORT), timeout=20)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    incoming, _ = listener.accept()
    # the first byte says that all are there; only what follows is timed
    out.sendall(b"x")
    incoming.recv(1)
    sender = threading.Thread(target=out.sendall, args=(bytes(size),))
    began = time.perf_counter()
    sender.start()
    left = size
    while left:
        left -= len(incoming.recv(min(left, 1 << 16)))
    took_s = time.perf_counter() - began
    sender.join()
    return size / took_s


def streams(host: Host, args: dict[str, Any]) -> list[float]:
    """Send bytes from rank to rank, several rounds of [source, destination] pairs one after the other.

    Returns the bytes per second at which this rank's arrived in each round; 0 where nothing was sent to it. A round's
    streams begin once all of them are connected.
    """
    size, found = int(args["mbytes"] * (1 << 20)), []
    with host.process_group(timeout_s=30):
        import torch
        import torch.distributed as dist

        for pairs in args["rounds"]:
            mine = [(a, b) for a, b in pairs if host.rank in (a, b)]
            dist.barrier()
            for a, b in mine:  # a pair's first message makes the connection
                one = torch.zeros(1, dtype=torch.uint8)
                if a == host.rank:
                    dist.send(one, b)
                else:
                    dist.recv(one, a)
            dist.barrier()
            began, rate = time.perf_counter(), 0.0
            data = torch.zeros(size, dtype=torch.uint8)
            works = [dist.isend(data, b) if a == host.rank else dist.irecv(data, a) for a, b in mine]
            for work in works:
                assert work is not None
                work.wait()
            if any(b == host.rank for _, b in mine):
                rate = size / (time.perf_counter() - began)
            found.append(rate)
    return found


def burn(host: Host, args: dict[str, Any]) -> float:
    """Compute for a while; returns the share of one core that it got."""
    wall, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < args["seconds"]:
        sum(range(1000))
    return (time.process_time() - used) / (time.perf_counter() - wall)


def fail_on(host: Host, args: dict[str, Any]) -> str:
    """One host raises (or exits), the others wait for longer than the test lasts."""
    if host.rank == args["rank"]:
        if args.get("exit"):
            os._exit(7)
        raise ValueError("this host was told to fail")
    time.sleep(args["others_s"])
    return "done"


def hang(host: Host, args: dict[str, Any]) -> None:
    """Say that it has begun, then never end; leaves a child behind as well."""
    import subprocess

    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    host.say("hanging")
    time.sleep(600)
