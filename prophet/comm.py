"""Collectives between ranks. A door: the code is in `prophet.ranks`."""

from prophet.errors import CollectiveError, CollectiveTimeout, PeerLost
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective, Pending
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import ProcessGroupCollective, collective_for
from prophet.ranks.threads import ThreadCollective, ThreadWorld

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "Collective",
    "CollectiveError",
    "CollectiveTimeout",
    "Operation",
    "PeerLost",
    "Pending",
    "ProcessGroupCollective",
    "ThreadCollective",
    "ThreadWorld",
    "collective_for",
]
