"""Topology files: what `prophet calibrate` measured, as TOML that a person can read and edit.

A file comes from outside, so it is bounded, and refused with the file, the field and what was expected.

Shape legend: R ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from prophet.errors import SpecError, TopologyError
from prophet.files import is_number, read_toml, shown
from prophet.spec import Link, Topology

T = TypeVar("T")

# Bounds on a file from outside; MAX_RANKS ranks have two numbers each
MAX_FILE_BYTES = 1 << 20
MAX_RANKS = 1 << 16
FORMAT = 1
_OVERHEADS = ("expert_overhead_s", "call_overhead_s")
_RATES = ("trans_rate", "agg_rate", "overlap_cost")
_PORT = "port_bytes_per_s"
# Absent where they were not measured: such a file reads as before there were such figures, and keeps its digest
_MEASURED = ("backward_ratio", "compute_noise", "exchange_noise_s", "duplex_cost", "link_overlap_cost")
_OPTIONAL: dict[str, Any] = {field.name: field.default for field in fields(Topology) if field.name in _MEASURED}
_FIELDS = {"format", "name", "ranks", "ranks_per_node", *_OVERHEADS, *_RATES, *_OPTIONAL, _PORT}
_FIELDS |= {"intra", "inter", "rank", "fit"}


def read_topology(path: str | os.PathLike[str]) -> Topology:
    """Read a topology file; raises `TopologyError` for one that is missing, too large, damaged or contradictory."""
    file = Path(path)
    return _from_file(file, topology_from)


def read_fits(path: str | os.PathLike[str]) -> dict[str, dict[str, float]]:
    """The measured lines that a topology file records under `fit`, by operation; raises as `read_topology`."""
    return _from_file(Path(path), _fits)


def _from_file(file: Path, parse: Callable[[Mapping[str, Any]], T]) -> T:
    table = read_toml(file, most_bytes=MAX_FILE_BYTES, expected="a topology file", error=TopologyError)
    try:
        return parse(table)
    except (SpecError, TopologyError) as error:
        raise TopologyError(f"{file}: {error}") from None


def _fits(table: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    fits = table.get("fit", {})
    if not isinstance(fits, dict) or not all(isinstance(f, dict) for f in fits.values()):
        raise TopologyError("fit: expected a table of tables, one per operation")
    return {
        operation: {name: _number(figures, name, f"fit.{operation}.{name}") for name in figures}
        for operation, figures in fits.items()
    }


def topology_from(table: Mapping[str, Any]) -> Topology:
    """Read what `topology_table` returned, of unknown origin; raises `SpecError` or `TopologyError`."""
    _known(table, "", _FIELDS)
    # A later format may mean something else by the same names
    if table.get("format") != FORMAT:
        raise TopologyError(f"format: expected {FORMAT}, got {shown(table.get('format'))}")
    ranks = _integer(table, "ranks", 1, MAX_RANKS)
    rank = table.get("rank", {})
    if not isinstance(rank, dict):
        raise TopologyError(f"rank: expected a table with flops_per_s and free_bytes, got {type(rank).__name__}")
    _known(rank, "rank.", {"flops_per_s", "free_bytes"})
    name = table.get("name", "unnamed")
    if not isinstance(name, str):
        raise TopologyError(f"name: expected a string, got {shown(name)}")
    return Topology(
        ranks=ranks,
        ranks_per_node=_integer(table, "ranks_per_node", 1, MAX_RANKS),
        intra=_link(table, "intra"),
        inter=_link(table, "inter"),
        flops_per_s=tuple(_per_rank(rank, "rank.flops_per_s", ranks)),
        free_bytes=tuple(int(b) for b in _per_rank(rank, "rank.free_bytes", ranks)),
        expert_overhead_s=_number(table, "expert_overhead_s", "expert_overhead_s"),
        # Files of older releases lack this field and the three below
        call_overhead_s=_number({"call_overhead_s": 0.0, **table}, "call_overhead_s", "call_overhead_s"),
        trans_rate=_number({"trans_rate": 1.0, **table}, "trans_rate", "trans_rate"),
        agg_rate=_number({"agg_rate": 1.0, **table}, "agg_rate", "agg_rate"),
        overlap_cost=_number({"overlap_cost": 0.0, **table}, "overlap_cost", "overlap_cost"),
        **{key: _number({key: default, **table}, key, key) for key, default in _OPTIONAL.items()},
        # Absent where every rank has a network card of its own
        port_bytes_per_s=_number(table, _PORT, _PORT) if _PORT in table else None,
        name=name,
    )


def _known(table: Mapping[str, Any], prefix: str, names: set[str]) -> None:
    # A misspelt field would be left at its default, and nobody would notice.
    unknown = sorted(str(name) for name in set(table) - names)
    if unknown:
        raise TopologyError(f"{prefix}{unknown[0][:64]}: unknown field; expected {', '.join(sorted(names))}")


def _number(table: Mapping[str, Any], key: str, where: str) -> float:
    value = table.get(key)
    if not is_number(value):
        raise TopologyError(f"{where}: expected a finite number, got {shown(value)}")
    return float(value)  # type: ignore[arg-type]


def _integer(table: Mapping[str, Any], key: str, low: int, high: int) -> int:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise TopologyError(f"{key}: expected an integer from {low} to {high}, got {shown(value)}")
    return value


def _link(table: Mapping[str, Any], key: str) -> Link:
    value = table.get(key)
    if not isinstance(value, dict):
        raise TopologyError(f"{key}: expected a table with bytes_per_s and latency_s, got {shown(value)}")
    _known(value, f"{key}.", {"bytes_per_s", "latency_s"})
    return Link(
        bytes_per_s=_number(value, "bytes_per_s", f"{key}.bytes_per_s"),
        latency_s=_number(value, "latency_s", f"{key}.latency_s"),
    )


def _per_rank(table: Mapping[str, Any], where: str, ranks: int) -> list[float]:
    """Read a list with one number per rank, or one number for all."""
    value = table.get(where.rpartition(".")[2])
    values = value if isinstance(value, list) else [value] * ranks
    if len(values) != ranks:
        raise TopologyError(f"{where}: expected one number, or one per rank ({ranks}), got {len(values)}")
    return [_number({"": v}, "", where) for v in values]


def _quoted(text: str) -> str:
    """A TOML string: JSON's escapes are TOML's, but for the DEL character and for pairs of surrogates."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def topology_table(topology: Topology) -> dict[str, Any]:
    """Return a topology as numbers, strings, lists and tables by name, as its file has it."""
    return {
        "format": FORMAT,
        "name": topology.name,
        "ranks": topology.ranks,
        "ranks_per_node": topology.ranks_per_node,
        # As Python's own numbers: numpy's are no TOML, and are refused by `torch.load(weights_only=True)`
        **{name: float(getattr(topology, name)) for name in (*_OVERHEADS, *_RATES)},
        **{name: float(x) for name, off in _OPTIONAL.items() if (x := getattr(topology, name)) != off},
        **({} if topology.port_bytes_per_s is None else {_PORT: float(topology.port_bytes_per_s)}),
        "intra": _link_table(topology.intra),
        "inter": _link_table(topology.inter),
        "rank": {
            "flops_per_s": [float(f) for f in topology.flops_per_s],
            "free_bytes": [int(b) for b in topology.free_bytes],
        },
    }


def _link_table(link: Link) -> dict[str, float]:
    return {name: float(value) for name, value in asdict(link).items()}


def write_topology(
    path: str | os.PathLike[str], topology: Topology, *, fits: Mapping[str, Mapping[str, float]] | None = None
) -> None:
    """Write a topology file; it appears whole or not at all.

    Args:
        path: The file; its folder is made.
        topology: What to write.
        fits: Figures of the measured lines by operation (see `read_fits`); None records none.
    """
    tables = topology_table(topology)
    # Plain values come before the first table in TOML
    lines = _lines({name: value for name, value in tables.items() if not isinstance(value, dict)})
    tables |= {
        f"fit.{operation}": {n: float(v) for n, v in figures.items()} for operation, figures in (fits or {}).items()
    }
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *_lines(table)]
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    # Under another name first: whoever reads meanwhile sees the old file.
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(file)


def _lines(values: Mapping[str, Any]) -> list[str]:
    # repr gives as many digits as it takes to read back the same number
    return [f"{n} = {_quoted(v) if isinstance(v, str) else repr(v)}" for n, v in values.items()]
