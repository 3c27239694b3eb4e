"""Machines by name: what `--machine` takes in every command, a preset such as `h100-ib` or a topology file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from prophet.errors import SpecError, no_such
from prophet.machine.presets import CLUSTERS, Cluster
from prophet.machine.sizes import ModelSizes
from prophet.machine.topology import read_topology
from prophet.spec import Topology

# Of the precision that `prophet calibrate` measures by default
_MEASURED_ELEMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A preset's cluster, which comes in any size, or a measured topology, which has one size.

    Attributes:
        name: As tables and files show it.
        source: The cluster or the topology.
    """

    name: str
    source: Cluster | Topology

    @property
    def element_bytes(self) -> int:
        """Bytes of one parameter, gradient or activation."""
        return self.source.element_bytes if isinstance(self.source, Cluster) else _MEASURED_ELEMENT_BYTES

    @property
    def ranks(self) -> int | None:
        """Ranks of a measured topology; None for a preset."""
        return self.source.ranks if isinstance(self.source, Topology) else None

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of memory of a rank's device; None for a topology file, which does not give it."""
        return self.source.memory_bytes if isinstance(self.source, Cluster) else None

    @property
    def assumed(self) -> str | None:
        """A sentence on what nobody measured; None for a topology file."""
        if not isinstance(self.source, Cluster):
            return None
        c = self.source
        return (
            f"{self.name} reaches {c.flops_efficiency:.0%} of its stated operations per second, and "
            f"{c.intra_efficiency:.0%} and {c.inter_efficiency:.0%} of its bandwidths within and between nodes; "
            f"a hidden transfer lengthens compute by {c.overlap_cost:.0%} of its seconds"
        )

    def topology(self, ranks: int) -> Topology:
        """The preset cut to `ranks` ranks, or the measured topology, whose ranks the caller compares or stretches."""
        return self.source.topology(ranks) if isinstance(self.source, Cluster) else self.source

    def label(self, model: ModelSizes) -> str:
        """The machine with the model that is taken for it, for people."""
        return f"{self.name}:{model.name}" if isinstance(self.source, Cluster) else f"{self.name}, {model.name}"


def machine_named(text: str) -> Machine:
    """The machine that `text` names, a preset or a topology file.

    Raises `SpecError` for a name that is not known, with the closest one, and `TopologyError` for a file that cannot be
    read.
    """
    if text in CLUSTERS:
        return Machine(name=text, source=CLUSTERS[text])
    # `cluster:model` is how presets are named in tests and benchmarks, but no command takes it.
    head, _, model = text.rpartition(":")
    if (head in CLUSTERS or head.endswith(".toml")) and not Path(text).exists():
        raise SpecError(f"expected a machine alone, got {text!r}: write --machine {head} --model {model or 'NAME'}")
    # Anything that looks like a path is read as one, and refused as one.
    if not (Path(text).exists() or text.endswith(".toml") or os.sep in text):
        raise SpecError(f"{no_such('machine', text, list(CLUSTERS))}, or give the path of a topology file")
    topology = read_topology(text)
    return Machine(name=f"{topology.name} ({text})", source=topology)
