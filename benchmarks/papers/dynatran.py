"""DynaTran's tables and figures: the rows of `benchmarks.switch --paper`, which holds their printed numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from benchmarks.papers.rows import Assumption, Number, Value
from benchmarks.switch import paper

PAPER = "DynaTran"
ASSUMPTIONS: Mapping[str, Assumption] = {
    "order": Assumption(assumed="ranks that keep their numbers", instead="ranks in the order of fewest bytes"),
}
# Its own slower variants, in Table 3
VARIANTS = ("one message per tensor", "packed, in turn")


def numbers() -> list[Number]:
    """Every printed time of DynaTran's own, its slower variants among them."""
    found = []
    for row in paper.ROWS:
        table = row.table if row.table.startswith("Figure") else f"Table {row.table}"
        cell = f"model={row.model} from={row.before} to={row.after}"
        found.append(Number(paper=PAPER, table=table, cell=cell, printed=row.paper_s, aim="less"))
        for way in VARIANTS:
            if way in row.peers_s:
                slower = f"{cell} way={way.replace(' ', '-')}"
                found.append(Number(paper=PAPER, table=table, cell=slower, printed=row.peers_s[way], aim="less"))
    return found


class DynaTran:
    """Ours for every number: the least time of our plan on the stated links, without latency or packing."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], paper.PaperRow] = {
            (row.model, row.before, row.after): row for row in paper.ROWS
        }
        self._found: dict[tuple[str, str, str], dict[str, float]] = {}

    def __call__(self, number: Number, changed: str | None) -> Value:
        """Return ours for a number, with one assumption changed where a name is given."""
        at = number.at
        key = (at["model"], at["from"], at["to"])
        if key not in self._found:
            self._found[key] = paper.predicted(self._rows[key])
        found = self._found[key]
        if at.get("way"):
            # Whatever the messages, the same bytes leave and enter by the same ports
            return found["as_given_s"], math.inf
        return found["predicted_s" if changed == "order" else "as_given_s"], math.inf
