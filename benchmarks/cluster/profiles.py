"""What an emulated cluster looks like: hosts, nodes, links and processor shares, as values and as TOML files.

Shape legend: R hosts (one rank each).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prophet.files import read_toml

MAX_HOSTS = 64
QUEUE_S = 0.5  # long enough that bursts of several senders are not lost
MAX_FILE_BYTES = 1 << 20
MIN_SHARE = 0.01  # the kernel's smallest quota is 1 ms; with the period used here a share below this is refused


class ProfileError(ValueError):
    """A profile contradicts itself; the message names the field (and the file) and says what was expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """R = nodes * hosts_per_node hosts, numbered node by node.

    link_mbit_per_s: [R] rate of every host's own link, both ways. share: [R] part of one processor core that every
    host gets. uplink_mbit_per_s: rate of the link from a node to the others, shared by its hosts; None where there
    is one node. queue_s: how long a packet may wait in a token bucket; what waits longer is lost.
    """

    name: str
    nodes: int
    hosts_per_node: int
    link_mbit_per_s: tuple[float, ...]
    share: tuple[float, ...]
    uplink_mbit_per_s: float | None = None
    queue_s: float = QUEUE_S

    def __post_init__(self) -> None:
        for name in ("nodes", "hosts_per_node"):
            if getattr(self, name) < 1:
                raise ProfileError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hosts > MAX_HOSTS:
            raise ProfileError(f"at most {MAX_HOSTS} hosts can be emulated, got {self.hosts}")
        for name in ("link_mbit_per_s", "share"):
            values = getattr(self, name)
            if len(values) != self.hosts:
                raise ProfileError(f"{name} needs one entry per host ({self.hosts}), got {len(values)}")
        if not all(rate > 0 for rate in self.link_mbit_per_s):
            raise ProfileError(f"link_mbit_per_s must be positive, got {min(self.link_mbit_per_s)}")
        if not all(share >= MIN_SHARE for share in self.share):
            raise ProfileError(f"share must be at least {MIN_SHARE}, got {min(self.share)}")
        if (self.uplink_mbit_per_s is None) != (self.nodes == 1):
            need = "no" if self.nodes == 1 else "an"
            raise ProfileError(f"{self.nodes} node(s) take {need} uplink_mbit_per_s")
        if self.uplink_mbit_per_s is not None and not self.uplink_mbit_per_s > 0:
            raise ProfileError(f"uplink_mbit_per_s must be positive, got {self.uplink_mbit_per_s}")
        if not 0 < self.queue_s <= 1:
            raise ProfileError(f"queue_s must be in (0, 1], got {self.queue_s}")

    @property
    def hosts(self) -> int:
        return self.nodes * self.hosts_per_node

    def node_of(self, host: int) -> int:
        return host // self.hosts_per_node


def uniform(
    name: str,
    *,
    hosts: int,
    nodes: int = 1,
    link_mbit_per_s: float = 200.0,
    uplink_mbit_per_s: float | None = None,
    share: float = 0.3,
) -> Profile:
    """Hosts that are all alike."""
    return Profile(
        name=name,
        nodes=nodes,
        hosts_per_node=hosts // nodes,
        link_mbit_per_s=(link_mbit_per_s,) * hosts,
        share=(share,) * hosts,
        uplink_mbit_per_s=uplink_mbit_per_s,
    )


_FOUR = uniform("four-hosts", hosts=4, share=0.09, link_mbit_per_s=50.0)
BUILT_IN = {
    profile.name: profile
    for profile in (
        _FOUR,
        uniform("eight-hosts", hosts=8, share=0.045, link_mbit_per_s=40.0),
        uniform("two-nodes", hosts=8, nodes=2, share=0.045, link_mbit_per_s=40.0, uplink_mbit_per_s=80.0),
        # one rank alone may use its node's whole port; four together get a twelfth of their own links' rate
        uniform("two-nodes-shared-ports", hosts=8, nodes=2, share=0.045, link_mbit_per_s=240.0, uplink_mbit_per_s=80.0),
        dataclasses.replace(_FOUR, name="slow-host", share=(*_FOUR.share[:-1], _FOUR.share[-1] / 3)),
    )
}


def load_profile(name_or_path: str) -> Profile:
    """A built-in profile, or the TOML file of that path (anything with a dot or a slash)."""
    if "." in name_or_path or "/" in name_or_path:
        return read_profile(Path(name_or_path))
    if name_or_path not in BUILT_IN:
        raise ProfileError(f"there is no built-in profile {name_or_path!r}; there are {', '.join(BUILT_IN)}")
    return BUILT_IN[name_or_path]


@dataclass(slots=True)
class _Reader:
    """Checked access to a TOML table; every error names the file and the field."""

    path: Path
    where: str
    table: Mapping[str, Any]
    seen: set[str] = field(default_factory=set)

    def number(self, name: str, default: float | None = None) -> float:
        self.seen.add(name)
        value = self.table.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ProfileError(f"{self.path}: {self.where}{name} must be a number, got {value!r}")
        return float(value)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value):
            raise ProfileError(f"{self.path}: {self.where}{name} must be a whole number, got {value!r}")
        return int(value)

    def finish(self) -> None:
        unknown = sorted(set(self.table) - self.seen)
        if unknown:
            raise ProfileError(f"{self.path}: unknown field(s) {unknown}; known are {sorted(self.seen)}")


def read_profile(path: Path) -> Profile:
    """Read a profile file.

    >>> text = '''
    ... nodes = 2
    ... hosts_per_node = 2
    ... link_mbit_per_s = 200
    ... uplink_mbit_per_s = 100
    ... share = 0.3
    ... [[host]]              # an exception: this host is slower
    ... rank = 3
    ... share = 0.1
    ... '''
    """
    table = read_toml(path, most_bytes=MAX_FILE_BYTES, expected="a profile", error=ProfileError)
    top = _Reader(path, "", table)
    name = table.get("name", path.stem)
    if not isinstance(name, str) or not name:
        raise ProfileError(f"{path}: name must be a text, got {name!r}")
    nodes, per_node = top.integer("nodes", 1), top.integer("hosts_per_node")
    hosts = nodes * per_node
    if not 1 <= hosts <= MAX_HOSTS:
        raise ProfileError(f"{path}: nodes * hosts_per_node must be 1..{MAX_HOSTS}, got {hosts}")
    rates = [top.number("link_mbit_per_s")] * hosts
    shares = [top.number("share")] * hosts
    uplink = top.number("uplink_mbit_per_s") if nodes > 1 or "uplink_mbit_per_s" in table else None
    queue_s = top.number("queue_s", QUEUE_S)
    exceptions = table.get("host", [])
    if not isinstance(exceptions, list) or not all(isinstance(x, dict) for x in exceptions):
        raise ProfileError(f"{path}: host must be an array of tables, [[host]]")
    for i, entry in enumerate(exceptions):
        reader = _Reader(path, f"host[{i}].", entry)
        rank = reader.integer("rank")
        if not 0 <= rank < hosts:
            raise ProfileError(f"{path}: host[{i}].rank must be 0..{hosts - 1}, got {rank}")
        rates[rank] = reader.number("link_mbit_per_s", rates[rank])
        shares[rank] = reader.number("share", shares[rank])
        reader.finish()
    top.seen |= {"name", "host", "uplink_mbit_per_s"}
    top.finish()
    try:
        return Profile(
            name=name,
            nodes=nodes,
            hosts_per_node=per_node,
            link_mbit_per_s=tuple(rates),
            share=tuple(shares),
            uplink_mbit_per_s=uplink,
            queue_s=queue_s,
        )
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
