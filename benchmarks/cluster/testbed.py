"""Testbed: N emulated hosts on one machine, each with its own network namespace, link and processor quota or pace.

    with Testbed(load_profile("four-hosts")) as bed:
        results = bed.run("benchmarks.cluster.worker:train", {"steps": 20}, timeout_s=120)

`run` starts one process per host, in its namespace and under its quota, and returns what the named function returned
there. Leaving the context removes everything, after any failure: an exception, Ctrl-C, killed hosts. Should this very
process be killed, a guardian process notices and cleans up in its place.

`prophet.ranks.launch.run_ranks` starts the ranks of one host. Here root starts a separate interpreter inside every
host's namespace, and puts it under the host's quota: children of one fork server would all share one network.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.cluster import kernel_objects as kernel
from benchmarks.cluster.kernel_objects import TestbedError, TestbedUnavailable
from benchmarks.cluster.profiles import Profile
from benchmarks.pacing import compute_cores, network_cores

__all__ = [
    "HostFailed",
    "HostResult",
    "Running",
    "SharesExceedCores",
    "Testbed",
    "TestbedError",
    "TestbedUnavailable",
    "unwound_when_ended",
]

ROOT = Path(__file__).resolve().parents[2]
MASTER_PORT = 29511  # free in every testbed: its namespaces are its own
TAIL_CHARS = 4000
START_LIMIT_S = 120.0  # for interpreters to start and import, all at once on a busy machine


@contextlib.contextmanager
def unwound_when_ended() -> Iterator[None]:
    """Inside, being told to end (SIGTERM) unwinds a testbed like any other failure."""
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class SharesExceedCores(TestbedUnavailable):
    """The profile's hosts together get more than the cores that they would compute on."""


class HostFailed(TestbedError):
    """A host's function raised, its process ended, or it ran past the time limit; names the host."""


@dataclass(frozen=True, slots=True)
class HostResult:
    """How one host ended. value: what the function returned, if it did. error: else the last line of why.

    error_type: the exception's class name, "Killed" or "TimeLimit". wall_s: from start to end of the process.
    """

    rank: int
    value: Any
    error_type: str | None
    error: str | None
    wall_s: float
    log: str

    @property
    def ok(self) -> bool:
        return self.error_type is None


@dataclass(slots=True)
class _Process:
    rank: int
    popen: subprocess.Popen[bytes]
    out: Path
    log: Path
    ended_s: float | None = None


class Running:
    """Processes under way on the hosts of a testbed; made by `Testbed.start`."""

    def __init__(self, processes: list[_Process], timeout_s: float) -> None:
        self._processes = processes
        self._timeout_s = timeout_s
        self._over_limit: set[int] = set()
        self.let_go()

    def let_go(self) -> None:
        """The time limit counts from here."""
        self._began_s = time.monotonic()
        self._deadline_s = self._began_s + self._timeout_s

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to the host's process: SIGSTOP freezes it, SIGKILL ends it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].popen.pid, number)

    def poll(self) -> bool:
        """Note which processes have ended; returns whether all have."""
        for p in self._processes:
            if p.ended_s is None and p.popen.poll() is not None:
                p.ended_s = time.monotonic()
        return all(p.ended_s is not None for p in self._processes)

    def failed(self) -> list[int]:
        """Hosts whose process has ended other than well."""
        return [p.rank for p in self._processes if p.ended_s is not None and p.popen.returncode]

    def log(self, rank: int) -> str:
        """What the host has printed so far."""
        return self._processes[rank].log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, rank: int, text: str, *, timeout_s: float) -> None:
        """Return once the host has printed `text`; `TestbedError` when it ended or took longer."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log(rank):
            self.poll()
            if self._processes[rank].ended_s is not None and text not in self.log(rank):
                raise TestbedError(f"host {rank} ended without printing {text!r}: {self.log(rank)[-TAIL_CHARS:]}")
            if time.monotonic() > deadline:
                raise TestbedError(f"host {rank} did not print {text!r} within {timeout_s:g} s")
            time.sleep(0.01)

    def follow(self, rank: int, show: Callable[[str], None]) -> None:
        """Show what the host prints, line by line, until all have ended or one has failed."""
        shown = 0
        while True:
            over = self.poll() or bool(self.failed()) or time.monotonic() > self._deadline_s
            lines = self.log(rank).splitlines()
            for line in lines[shown:]:
                show(line)
            shown = len(lines)
            if over:
                return
            time.sleep(0.5)

    def wait(self, *, grace_s: float | None = None) -> list[HostResult]:
        """Wait for all hosts, at most until the time limit; never raises for what happened on a host.

        grace_s: once a host has failed, the others get this long before they are killed; None lets them run to the
        time limit.
        """
        failed_s: float | None = None
        while not self.poll():
            now = time.monotonic()
            if failed_s is None and self.failed():
                failed_s = now
            late = now > self._deadline_s
            if late or (failed_s is not None and grace_s is not None and now > failed_s + grace_s):
                for p in self._processes:
                    if p.ended_s is None:
                        self._over_limit.add(p.rank)
                        p.popen.kill()
                        p.popen.wait()
            time.sleep(0.01)
        return [self._result(p) for p in self._processes]

    def _result(self, p: _Process) -> HostResult:
        log = p.log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:]
        value, kind, error = None, None, None
        with contextlib.suppress(OSError, ValueError):
            answer = json.loads(p.out.read_text(encoding="utf-8"))
            value, kind, error = answer.get("value"), answer.get("error_type"), answer.get("error")
        if p.rank in self._over_limit:
            kind, error = "TimeLimit", f"host {p.rank} was ended: time limit of {self._timeout_s:g} s, or a peer failed"
        elif p.popen.returncode < 0:
            kind, error = "Killed", f"host {p.rank} was killed by {signal.Signals(-p.popen.returncode).name}"
        elif p.popen.returncode and kind is None:
            kind, error = "Exited", f"host {p.rank} ended with status {p.popen.returncode}: {log[-500:]}"
        wall_s = (p.ended_s or time.monotonic()) - self._began_s
        return HostResult(p.rank, value, kind, error, wall_s, log)


class Testbed:
    """A context manager around the emulated hosts of `profile`; see the module's text.

    Raises `TestbedUnavailable` where the machine or the user cannot do it, before anything is made. python: the
    interpreter of the hosts' processes. paced: hosts are told to be slow (`Host.paced`) instead of being under a quota;
    quotas are what can be changed while programs run. Paced hosts go before what else runs on the machine, and what
    arrives at them is worked on by `network_cores`.
    """

    __test__ = False

    def __init__(self, profile: Profile, *, python: str | None = None, paced: bool = False) -> None:
        self.profile = profile
        self.paced = paced
        self.prefix = f"mp{os.getpid()}-{secrets.token_hex(2)}-"
        self.python = python or sys.executable
        self._quotas = kernel.check_available()
        cores, what = (len(compute_cores()), "to compute on") if paced else (os.cpu_count() or 1, "in all")
        shares = math.fsum(profile.share)  # nine ninths are one core
        if shares > cores:
            raise SharesExceedCores(
                f"profile {profile.name!r} hands out {shares:g} cores, this machine has {cores} {what}: "
                f"the hosts would be slower than their shares say"
            )
        self._guardian: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._runs = 0
        self._running: list[Running] = []

    # --- set-up and teardown ---

    def __enter__(self) -> Testbed:
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.cluster.guardian", self.prefix],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the parent alone
            )
            self._folder = Path(tempfile.mkdtemp(prefix=self.prefix))
            kernel.set_up_network(self.profile, self.prefix)
            if self.paced:
                self._quotas.create_shared(self.prefix)
                if cores := network_cores():
                    kernel.receive_on(self.profile, self.prefix, cores)
            else:
                for host, share in enumerate(self.profile.share):
                    self._quotas.create(self.prefix, host, share)
        except OSError as error:
            self.close()
            raise TestbedError(f"the testbed could not be set up: {error}") from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything; may be called twice. `TestbedError` names what could not be removed."""
        left = kernel.remove_all(self.prefix, self._quotas)
        for running in self._running:
            running.wait()  # reaps the killed
        self._running.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._guardian is not None and self._guardian.stdin is not None:
            with contextlib.suppress(OSError):
                self._guardian.stdin.write(b"done\n")
                self._guardian.stdin.close()
            try:
                self._guardian.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self._guardian.kill()
                self._guardian.wait()
            self._guardian = None
        if left:
            raise TestbedError(f"could not be removed: {', '.join(left)}")

    def leftovers(self) -> list[str]:
        """What exists of this testbed in the kernel, as text."""
        return kernel.leftovers(self.prefix, self._quotas)

    @property
    def scratch(self) -> Path:
        """A folder that all hosts see and that goes away with the testbed."""
        if self._folder is None:
            raise TestbedError("the testbed is not set up: use it as a context manager")
        return self._folder

    # --- running ---

    def run(
        self,
        target: str,
        args: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        timeout_s: float,
        grace_s: float = 20.0,
        imports: Sequence[str] = (),
        while_running: Callable[[Running], None] | None = None,
    ) -> list[Any]:
        """Run `target` on every host and return the values by rank; `HostFailed` names the first host that failed."""
        running = self.start(target, args, timeout_s=timeout_s, imports=imports)
        if while_running is not None:
            while_running(running)
        results = running.wait(grace_s=grace_s)
        failed = [r for r in results if not r.ok]
        if failed:
            # what the others say of a lost peer is less telling than the error that came first
            first = min(failed, key=lambda r: (r.error_type == "TimeLimit", r.wall_s))
            raise HostFailed(
                f"host {first.rank} of {self.profile.name!r}: {first.error_type}: {first.error}\n{first.log}"
            )
        return [r.value for r in results]

    def start(
        self,
        target: str,
        args: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        timeout_s: float,
        imports: Sequence[str] = (),
    ) -> Running:
        """Start the function `target` ("module:function") on every host and return at once.

        The function is called as `function(host, args)` with a `benchmarks.cluster.host.Host` and what `args` holds
        (for all hosts, or a sequence with one for each); arguments and results pass as JSON. `imports` names modules to
        import before the quota holds, besides the function's own.
        """
        scratch = self.scratch
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")
        per_host = [args] * self.profile.hosts if isinstance(args, Mapping) else list(args)
        if len(per_host) != self.profile.hosts:
            raise ValueError(f"expected args for {self.profile.hosts} hosts, got {len(per_host)}")
        self._runs += 1
        folder = scratch / f"run{self._runs}"
        folder.mkdir()
        processes: list[_Process] = []
        running = Running(processes, timeout_s)
        self._running.append(running)
        for rank, own in enumerate(per_host):
            out, log = folder / f"{rank}.json", folder / f"{rank}.log"
            job = {
                "rank": rank,
                "hosts": self.profile.hosts,
                "address": kernel.address(rank),
                "master_address": kernel.address(0),
                "master_port": MASTER_PORT,
                "slowdown": 1.0 / self.profile.share[rank] if self.paced else 1.0,
                "target": target,
                "imports": list(imports),
                "args": own,
                "out": str(out),
            }
            with log.open("wb") as sink:
                popen = self._spawn(rank, json.dumps(job), sink)
            processes.append(_Process(rank, popen, out, log))
        self._let_go(running, processes)
        return running

    def _spawn(self, rank: int, job: str, sink: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start one host's process in its namespace; it imports what it needs and waits to be let go."""
        command = [
            *("setpriv", "--pdeathsig", "KILL"),
            *("ip", "netns", "exec", kernel.namespace(self.prefix, rank)),
            *(self.python, "-u", "-m", "benchmarks.cluster.host"),
        ]
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONFAULTHANDLER": "1",
            "DS_ACCELERATOR": "cpu",
            # topology="auto" must not remember these hosts, which have this machine's name
            "HOME": str(self.scratch),
        }
        popen = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: `wait` tells why
            popen.stdin.write(job.encode() + b"\n")
            popen.stdin.flush()
        return popen

    def _let_go(self, running: Running, processes: list[_Process]) -> None:
        """Put every process into its group once its imports are done (they are not what is measured), then let go."""
        ready = [p.out.with_suffix(".ready") for p in processes]
        deadline = time.monotonic() + START_LIMIT_S
        while not all(r.exists() for r in ready):
            running.poll()
            if any(p.ended_s is not None for p in processes) or time.monotonic() > deadline:
                break  # `wait` tells why
            time.sleep(0.01)
        for p in processes:
            assert p.popen.stdin is not None
            with contextlib.suppress(OSError):
                self._quotas.add(self.prefix, None if self.paced else p.rank, p.popen.pid)
                p.popen.stdin.write(b"go\n")
            with contextlib.suppress(OSError):
                p.popen.stdin.close()
        running.let_go()

    # --- faults ---

    def set_rate(self, host: int, mbit_per_s: float) -> None:
        """Change the rate of a host's link, both ways, while programs run."""
        self._check(host, mbit_per_s)
        kernel.set_buckets(kernel.rate_commands(self.profile, self.prefix, host, mbit_per_s))

    def set_uplink_rate(self, node: int, mbit_per_s: float) -> None:
        """Change the rate between a node and the others."""
        if self.profile.nodes == 1 or not 0 <= node < self.profile.nodes:
            raise ValueError(f"profile {self.profile.name!r} has no uplink of node {node}")
        self._check(0, mbit_per_s)
        kernel.set_buckets(kernel.uplink_commands(self.profile, self.prefix, node, mbit_per_s))

    def set_rates(self, links: Sequence[float], uplink: float | None) -> None:
        """Change the rates of all hosts' links and, where there are several nodes, of these."""
        for host, rate in enumerate(links):
            self.set_rate(host, rate)
        for node in range(self.profile.nodes if uplink and self.profile.nodes > 1 else 0):
            self.set_uplink_rate(node, float(uplink or 0.0))

    def set_share(self, host: int, share: float) -> None:
        """Change the part of a core that a host gets, while programs run."""
        self._check(host, share)
        if self.paced:
            raise TestbedError("hosts that pace themselves have no quota that could be changed")
        self._quotas.set_share(self.prefix, host, share)

    def _check(self, host: int, value: float) -> None:
        if not 0 <= host < self.profile.hosts:
            raise ValueError(f"host must be 0..{self.profile.hosts - 1}, got {host}")
        if not value > 0:
            raise ValueError(f"expected a positive rate or share, got {value!r}")
