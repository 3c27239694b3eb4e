"""Machines by name: what `--machine` takes in every command.

`h100-ib` and `h100-ib:Mixtral-8x7B` name a preset, `my.toml` and `my.toml:Mixtral-8x7B` a topology file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from prophet.errors import SpecError, no_such
from prophet.machine.models import MODELS
from prophet.machine.presets import CLUSTERS, Cluster, get_preset
from prophet.machine.sizes import ModelSizes
from prophet.machine.topology import read_topology
from prophet.spec import Topology

_MEASURED_ELEMENT_BYTES = 4  # the precision that `prophet calibrate` measures unless told otherwise


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A preset's cluster, which comes in any size, or a measured topology, which has its own; and a model.

    model: None where a topology file was named without one. name: as tables and files show it.
    """

    name: str
    source: Cluster | Topology
    model: ModelSizes | None

    @property
    def element_bytes(self) -> int:
        """Bytes of one parameter, gradient or activation."""
        return self.source.element_bytes if isinstance(self.source, Cluster) else _MEASURED_ELEMENT_BYTES

    @property
    def ranks(self) -> int | None:
        """Ranks of a measured topology; None for a preset."""
        return self.source.ranks if isinstance(self.source, Topology) else None

    def topology(self, ranks: int) -> Topology:
        """The preset cut to `ranks` ranks, or the measured topology, whose ranks the caller compares or stretches."""
        return self.source.topology(ranks) if isinstance(self.source, Cluster) else self.source

    def label(self, model: ModelSizes) -> str:
        """The machine with the model that is taken for it, for people."""
        return f"{self.name}:{model.name}" if isinstance(self.source, Cluster) else f"{self.name}, {model.name}"


def machine_named(text: str) -> Machine:
    """The machine that `text` names: MACHINE, MACHINE:MODEL, FILE or FILE:MODEL.

    A preset without a model has its usual one. Raises `SpecError` for a name that is not known, with the closest one,
    and `TopologyError` for a file that cannot be read.
    """
    head, _, model = text.partition(":")
    if head in CLUSTERS:
        _check_model(model)
        preset = get_preset(text)
        return Machine(name=head, source=preset.cluster, model=preset.model)
    file, _, model = (text, "", "") if ":" not in text or Path(text).exists() else text.rpartition(":")
    if not (Path(file).exists() or file.endswith(".toml") or os.sep in file):
        raise SpecError(f"{no_such('machine', head, list(CLUSTERS))}, or give the path of a topology file")
    topology = read_topology(file)
    _check_model(model)
    return Machine(name=f"{topology.name} ({file})", source=topology, model=MODELS[model] if model else None)


def _check_model(model: str) -> None:
    if model and model not in MODELS:
        raise SpecError(no_such("model", model, list(MODELS)))
