"""Once imported, engines of this process measure no machine: it takes seconds, and plans would follow other load.

`tests/machine/test_auto.py` and examples that tests start as programs do measure.
"""

from __future__ import annotations

from prophet.engine import engine
from prophet.experts.bank import Bank
from prophet.ranks.collective import Collective
from prophet.spec import Topology


def _uniform(collective: Collective, bank: Bank) -> Topology:
    return Topology.uniform(collective.size)


engine.topology_of = _uniform
