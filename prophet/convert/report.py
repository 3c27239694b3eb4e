"""What a conversion did, as values and as a table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prophet.convert.base import RUNS_TWICE, ExpertsSpec
from prophet.convert.discover import LeftAlone
from prophet.spec import Bias

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Replaced:
    """One converted block.

    name: of the experts' module in the model. block: class of the block around it. spec: what the adapter found.
    experts: global indices of those that this rank is home to. methods: those of the block that were replaced.
    params, params_before: numbers of expert parameters on this rank. flops_per_row: of an expert, forward.
    expert_bytes: what a replica receives.
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
    flops_per_row: float
    expert_bytes: float


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
                f"{r.spec.num_experts}" + ("" if r.spec.router == RUNS_TWICE else f", top-{r.spec.top_k}"),
                f"{r.experts.start}-{r.experts.stop - 1}",
                _sizes(r.spec),
                _bank(r.spec),
                f"{_short(r.flops_per_row)}FLOP a row, {_short(r.expert_bytes)}B a replica",
                r.dtype,
                r.spec.router + (f"; own {', '.join(r.methods)}" if r.methods else ""),
            )
            for r in self.replaced
        ]

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title=self._title(), caption="\n".join(self.remarks()) or None)
        for column in COLUMNS:
            table.add_column(column)
        for row in self.rows():
            table.add_row(*row)
        return table

    def __str__(self) -> str:
        return "\n".join([self._title(), *(" · ".join(row) for row in self.rows()), *self.remarks()])

    def remarks(self) -> list[str]:
        """Why experts stay modules, and why other lists were left alone; once for layers that differ in numbers."""
        said = [(r.name, f"stay modules: {r.spec.why}") for r in self.replaced if r.spec.why]
        said += [(one.name, f"was left alone: {one.why}") for one in self.left]
        alike: dict[str, list[str]] = {}
        for name, why in said:
            alike.setdefault(re.sub(r"\b\d+\b", "*", f"{name} {why}"), []).append(f"{name} {why}")
        return [lines[0] + (f" (and {len(lines) - 1} like it)" if lines[1:] else "") for lines in alike.values()]

    def _title(self) -> str:
        return (
            f"{len(self.replaced)} MoE blocks converted, rank {self.rank} of {self.ranks}: "
            f"{self.params:,} of {self.params_before:,} expert parameters stay here"
        )


def _sizes(spec: ExpertsSpec) -> str:
    """Those of an expert's input, of what is inside where that is known, and of its output if it is another."""
    inside = [spec.hidden] if spec.bank == "feed-forward" else []
    out = [spec.outputs] if spec.outputs != spec.dim else []
    return " x ".join(map(str, [spec.dim, *inside, *out]))


def _bank(spec: ExpertsSpec) -> str:
    """What holds and runs the experts."""
    return spec.bank if spec.bank != "feed-forward" else f"{spec.bank}: {spec.activation}{_BIASES[spec.bias]}"


def _short(x: float) -> str:
    """A figure with its prefix of thousands."""
    for prefix in ("", "k", "M", "G"):
        if x < 1000:
            return f"{x:.3g} {prefix}"
        x /= 1000
    return f"{x:.3g} T"


_BIASES: dict[Bias, str] = {True: " + bias", False: "", "in": " + bias in", "out": " + bias out"}
COLUMNS = ("experts", "family", "E, top-k", "home here", "dim x hidden", "bank", "cost", "dtype", "router kept")
