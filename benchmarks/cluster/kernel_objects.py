"""Network namespaces, token buckets and processor quotas: the kernel's objects behind the emulated hosts.

Every name starts with the testbed's own prefix. `remove_all(prefix)` finds what carries the prefix and removes it, in
whatever state it was left, so tearing down does not depend on remembering what was set up.

One host is a network namespace with one interface, eth0, whose other end is a port of its node's switch (a bridge in a
namespace of its own). With several nodes the switches hang on a further one, the spine. Nothing is created in the
machine's own network namespace.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster.profiles import Profile

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 10_000  # short, so that a host is slow evenly and not stopped for tenths of a second
BURST_S = 0.002  # of a link's time that it may catch up on at once
LEAST_BURST_KB = 16  # two packets
# As in a machine room, whatever this machine's own settings are: full speed after a pause, no probing for the rate, and
# a connection gives the next one its turn instead of filling the link's queue alone. A network card takes small pieces
# from its queues in turn; here a packet may be 8 KB, and a connection may have four of them under way.
PIECE_BYTES = 8000
TCP_SETTINGS = {
    "tcp_slow_start_after_idle": "0",
    "tcp_congestion_control": "reno",
    "tcp_limit_output_bytes": str(1 << 15),
}
# By the layout's version; ten times what others have. More would starve the kernel's own threads, which work on packets
WEIGHT = {1: ("cpu.shares", 10_240), 2: ("cpu.weight", 1000)}
NETWORK = "10.77"  # the first half of every host's address
PREFIX = re.compile(r"^mp\d+-[0-9a-f]{4}-$")


class TestbedUnavailable(RuntimeError):
    """This machine or this user cannot run the testbed; the message says what is missing."""

    __test__ = False  # not a test class, whatever pytest makes of the name


class TestbedError(RuntimeError):
    """The testbed could not be set up or driven."""

    __test__ = False


def address(host: int) -> str:
    return f"{NETWORK}.{(host + 1) // 256}.{(host + 1) % 256}"


def namespace(prefix: str, host: int) -> str:
    return f"{prefix}h{host}"


def switch(prefix: str, node: int) -> str:
    return f"{prefix}s{node}"


def spine(prefix: str) -> str:
    return f"{prefix}spine"


def namespace_commands(profile: Profile, prefix: str) -> list[str]:
    """Lines for `ip -batch` that add the namespaces of `profile`. Pure."""
    names = [switch(prefix, node) for node in range(profile.nodes)]
    names += [spine(prefix)] if profile.nodes > 1 else []
    names += [namespace(prefix, host) for host in range(profile.hosts)]
    return [f"netns add {name}" for name in names]


def _bridge(ports: Sequence[tuple[str, str, str]]) -> list[str]:
    """Lines that make a switch. ports: a port's name, and what its other end is called in which namespace."""
    lines = ["link add br0 type bridge stp_state 0 forward_delay 0", "link set br0 up", "link set lo up"]
    for port, end, where in ports:
        lines.append(f"link add {port} type veth peer name {end} netns {where}")
        lines += [f"link set {port} master br0", f"link set {port} up"]
    return lines


def setup_commands(profile: Profile, prefix: str) -> list[tuple[str, list[str]]]:
    """(namespace, lines for `ip -batch` inside it), in order: links, bridges, addresses. Pure."""
    commands: list[tuple[str, list[str]]] = []
    for node in range(profile.nodes):
        own = [host for host in range(profile.hosts) if profile.node_of(host) == node]
        ports = [(f"p{host}", "eth0", namespace(prefix, host)) for host in own]
        commands.append((switch(prefix, node), _bridge(ports)))
    if profile.nodes > 1:
        ports = [(f"n{node}", "up0", switch(prefix, node)) for node in range(profile.nodes)]
        commands.append((spine(prefix), _bridge(ports)))
        commands += [(switch(prefix, n), ["link set up0 master br0", "link set up0 up"]) for n in range(profile.nodes)]
    for host in range(profile.hosts):
        # acknowledged at once, and no slow start
        lines = [
            "link set lo up",
            f"address add {address(host)}/16 dev eth0 noprefixroute",
            f"link set eth0 gso_max_size {PIECE_BYTES} up",
            f"route add {NETWORK}.0.0/16 dev eth0 src {address(host)} quickack 1 initcwnd 64 initrwnd 64",
        ]
        commands.append((namespace(prefix, host), lines))
    return commands


def bucket(device: str, mbit_per_s: float, queue_s: float) -> str:
    """The `tc` line of a token bucket on `device`."""
    rate = max(1, round(mbit_per_s * 1000))
    burst = max(LEAST_BURST_KB, round(rate * BURST_S / 8))
    return f"qdisc replace dev {device} root tbf rate {rate}kbit burst {burst}kb latency {round(queue_s * 1000)}ms"


def rate_commands(profile: Profile, prefix: str, host: int, mbit_per_s: float) -> list[tuple[str, str]]:
    """(namespace, `tc` line) for both ends of a host's link. Pure."""
    return [
        (namespace(prefix, host), bucket("eth0", mbit_per_s, profile.queue_s)),
        (switch(prefix, profile.node_of(host)), bucket(f"p{host}", mbit_per_s, profile.queue_s)),
    ]


def uplink_commands(profile: Profile, prefix: str, node: int, mbit_per_s: float) -> list[tuple[str, str]]:
    """The same for a node's link to the others."""
    return [
        (switch(prefix, node), bucket("up0", mbit_per_s, profile.queue_s)),
        (spine(prefix), bucket(f"n{node}", mbit_per_s, profile.queue_s)),
    ]


def run(argv: Sequence[str], *, stdin: str | None = None) -> str:
    """Run a tool and return what it printed; `TestbedError` with its own words where it fails."""
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        words = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise TestbedError(f"{' '.join(argv)}: {words}")
    return done.stdout


def mask(cores: Sequence[int]) -> str:
    """The cores as the kernel writes a set: hexadecimal digits in groups of eight."""
    digits = f"{sum(1 << core for core in cores):x}"
    groups = [digits[max(0, end - 8) : end] for end in range(len(digits), 0, -8)]
    return ",".join(reversed(groups))


def receive_on(profile: Profile, prefix: str, cores: Sequence[int]) -> None:
    """Let what arrives on any link be worked on by these cores.

    Else the core that sends does it, in the time of the thread that it interrupts there.
    """
    line = f'for queue in /sys/class/net/*/queues/rx-*/rps_cpus; do echo {mask(cores)} > "$queue"; done'
    for where in [words.split()[-1] for words in namespace_commands(profile, prefix)]:
        run(["ip", "netns", "exec", where, "sh", "-ec", line])


def set_up_network(profile: Profile, prefix: str) -> None:
    """Build all namespaces, links and token buckets of `profile`."""
    run(["ip", "-batch", "-"], stdin="\n".join(namespace_commands(profile, prefix)) + "\n")
    for where, lines in setup_commands(profile, prefix):
        run(["ip", "-n", where, "-batch", "-"], stdin="\n".join(lines) + "\n")
    for host in range(profile.hosts):
        for name, value in TCP_SETTINGS.items():
            run(["ip", "netns", "exec", namespace(prefix, host), "tee", f"/proc/sys/net/ipv4/{name}"], stdin=value)
    for host, rate in enumerate(profile.link_mbit_per_s):
        set_buckets(rate_commands(profile, prefix, host, rate))
    if profile.uplink_mbit_per_s is not None:
        for node in range(profile.nodes):
            set_buckets(uplink_commands(profile, prefix, node, profile.uplink_mbit_per_s))


def set_buckets(commands: Sequence[tuple[str, str]]) -> None:
    """Apply (namespace, `tc` line) each."""
    for where, line in commands:
        run(["tc", "-n", where, *line.split()])


# --- processor quotas ---


@dataclass(frozen=True, slots=True)
class Quotas:
    """Control groups that limit or prefer processor time; one folder per host, or one for all that pace themselves.

    Knows version 1 and version 2 layouts.
    """

    root: Path
    version: int

    @classmethod
    def find(cls, base: Path = CGROUPS) -> Quotas:
        """The machine's controller, or `TestbedUnavailable`."""
        if (base / "cpu" / "cgroup.procs").exists():
            return cls(base / "cpu", 1)
        enabled = base / "cgroup.subtree_control"
        if enabled.exists() and "cpu" in enabled.read_text().split():
            return cls(base, 2)
        raise TestbedUnavailable(
            f"the cpu controller of control groups was not found under {base}: the testbed limits every host's "
            f"processor time with it"
        )

    def folder(self, prefix: str, host: int | None) -> Path:
        """The group of a host; None: the one that all share who pace themselves."""
        return self.root / (f"{prefix}hosts" if host is None else f"{prefix}h{host}")

    def create_shared(self, prefix: str) -> None:
        """One group without a quota, which goes before whatever else runs on the machine.

        Only in a group of theirs are the hosts' threads nice to each other: outside of any, the kernel makes a group of
        every session (`sched_autogroup`), and a thread's niceness counts in its own alone.
        """
        folder, (file, weight) = self.folder(prefix, None), WEIGHT[self.version]
        folder.mkdir()
        (folder / file).write_text(str(weight))

    def create(self, prefix: str, host: int, share: float) -> None:
        self.folder(prefix, host).mkdir()
        self.set_share(prefix, host, share)

    def set_share(self, prefix: str, host: int, share: float) -> None:
        """Give a host `share` of one core."""
        folder, quota_us = self.folder(prefix, host), round(share * PERIOD_US)
        # the kernel's smallest quota is 1 ms: a small share gets a longer period
        scale = -(-1000 // quota_us) if quota_us < 1000 else 1
        if self.version == 2:
            (folder / "cpu.max").write_text(f"{quota_us * scale} {PERIOD_US * scale}")
            return
        (folder / "cpu.cfs_quota_us").write_text("-1")  # quota and period are written one after the other
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US * scale))
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us * scale))

    def add(self, prefix: str, host: int | None, pid: int) -> None:
        """Put a process with all its threads into the group of `folder`."""
        (self.folder(prefix, host) / "cgroup.procs").write_text(str(pid))

    def members(self, prefix: str) -> list[int]:
        """Processes in any of the prefix's groups."""
        found = []
        for folder in self.root.glob(f"{prefix}h*"):
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
        return found

    def remove(self, prefix: str) -> None:
        for folder in self.root.glob(f"{prefix}h*"):
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()


# --- tearing down ---


def check_available() -> Quotas:
    """Raise `TestbedUnavailable` unless this user on this machine can run the testbed."""
    if os.geteuid() != 0:
        raise TestbedUnavailable("the testbed makes network namespaces and processor quotas: it must be run as root")
    for tool in ("ip", "tc", "setpriv"):
        if shutil.which(tool) is None:
            package = "util-linux" if tool == "setpriv" else "iproute2"
            raise TestbedUnavailable(f"the testbed needs the command {tool!r}, which the package {package} provides")
    return Quotas.find()


def namespaces(prefix: str) -> list[str]:
    """Names of the network namespaces that carry the prefix."""
    names = [line.split()[0] for line in run(["ip", "netns", "list"]).splitlines() if line.strip()]
    return [n for n in names if n.startswith(prefix)]


def processes_in(prefix: str, quotas: Quotas) -> list[int]:
    """Processes that live in the prefix's control groups or namespaces."""
    found = set(quotas.members(prefix))
    for name in namespaces(prefix):
        with contextlib.suppress(TestbedError):
            found |= {int(pid) for pid in run(["ip", "netns", "pids", name]).split()}
    return sorted(found - {os.getpid()})


def leftovers(prefix: str, quotas: Quotas) -> list[str]:
    """What still exists of a testbed, as text; empty after a clean end."""
    found = [f"namespace {n}" for n in namespaces(prefix)]
    found += [f"process {pid}" for pid in processes_in(prefix, quotas)]
    return found + [f"control group {f}" for f in sorted(quotas.root.glob(f"{prefix}h*"))]


def remove_all(prefix: str, quotas: Quotas, *, limit_s: float = 10.0) -> list[str]:
    """Kill and remove everything that carries the prefix; returns what could not be removed within `limit_s`."""
    if not PREFIX.match(prefix):
        raise TestbedError(f"refusing to remove by the prefix {prefix!r}: it is not a testbed's")
    deadline = time.monotonic() + limit_s
    while True:
        for pid in processes_in(prefix, quotas):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in namespaces(prefix):
            with contextlib.suppress(TestbedError):
                run(["ip", "netns", "delete", name])
        with contextlib.suppress(OSError):  # busy until the killed processes are reaped
            quotas.remove(prefix)
        left = leftovers(prefix, quotas)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)
