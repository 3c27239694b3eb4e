"""What a conversion did, as values and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prophet.convert.base import ExpertsSpec
from prophet.convert.discover import LeftAlone
from prophet.spec import Bias

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Replaced:
    """One converted block.

    name: of the experts' module in the model. block: class of the block around it. spec: what the adapter found.
    experts: global indices of those that this rank is home to. methods: those of the block that were replaced.
    params, params_before: numbers of expert parameters on this rank.
    """

    name: str
    family: str
    block: str
    spec: ExpertsSpec
    experts: range
    methods: tuple[str, ...]
    dtype: str
    params: int
    params_before: int


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What `convert` replaced, on one rank, and which lists it left alone; prints as a table where `rich` prints."""

    replaced: tuple[Replaced, ...]
    rank: int
    ranks: int
    left: tuple[LeftAlone, ...] = ()

    @property
    def params(self) -> int:
        """Expert parameters on this rank now."""
        return sum(r.params for r in self.replaced)

    @property
    def params_before(self) -> int:
        """Expert parameters on this rank before."""
        return sum(r.params_before for r in self.replaced)

    def rows(self) -> list[tuple[str, ...]]:
        """A row of text per block, in the order of `COLUMNS`."""
        return [
            (
                r.name,
                f"{r.family} ({r.spec.form})",
                f"{r.spec.num_experts}, top-{r.spec.top_k}",
                f"{r.experts.start}-{r.experts.stop - 1}",
                f"{r.spec.dim} x {r.spec.hidden}" + (f" x {r.spec.outputs}" if r.spec.outputs != r.spec.dim else ""),
                r.spec.activation + _BIASES[r.spec.bias],
                r.dtype,
                r.spec.router + (f"; own {', '.join(r.methods)}" if r.methods else ""),
            )
            for r in self.replaced
        ]

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title=self._title())
        for column in COLUMNS:
            table.add_column(column)
        for row in self.rows():
            table.add_row(*row)
        return table

    def __str__(self) -> str:
        left = [f"left alone: {one.name}: {one.why}" for one in self.left]
        return "\n".join([self._title(), *(" · ".join(row) for row in self.rows()), *left])

    def _title(self) -> str:
        return (
            f"{len(self.replaced)} MoE blocks converted, rank {self.rank} of {self.ranks}: "
            f"{self.params:,} of {self.params_before:,} expert parameters stay here"
        )


_BIASES: dict[Bias, str] = {True: " + bias", False: "", "in": " + bias in", "out": " + bias out"}
COLUMNS = ("experts", "family", "E, top-k", "home here", "dim x hidden", "activation", "dtype", "router kept")
