"""Read and write topology files, which describe a machine. A door: the code is in `prophet.machine.topology`."""

from prophet.errors import TopologyError
from prophet.machine.topology import read_topology, write_topology

__all__ = ["TopologyError", "read_topology", "write_topology"]
