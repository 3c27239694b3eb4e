"""Where a step's line goes: a file of JSON lines, TensorBoard, Weights & Biases.

Sinks are made and used on the monitor's own thread, so that a slow import or a slow disk never holds training up.

Shape legend: L layers, R ranks, E experts.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prophet.traces.importers import STEPS

FILE = STEPS
FORMAT = 1
# Pixels of one cell of a heat map
_CELL = 8
# Cells of a heat map; a larger one is not drawn
_LARGEST = 1 << 20
# Dark blue, grey and yellow: readable without telling red from green
_RAMP = np.array([(0, 34, 78), (124, 123, 120), (254, 232, 56)], dtype=np.float64)

Row = dict[str, Any]


class Sink(Protocol):
    """Takes the start of a run, then its steps in order."""

    name: str

    def start(self, header: Row) -> None:
        """Take the header of a run, before its first step."""

    def step(self, row: Row) -> None:
        """Take a step's line."""

    def close(self) -> None:
        """Write what is held, and stop."""


class JsonLines:
    """Appends to `steps.jsonl` in the run's folder; every line is with the operating system when `step` returns."""

    name = "JSONL"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / FILE).open("ab", buffering=0)
        self._cut = self._file.tell() > 0

    def start(self, header: Row) -> None:
        self._write({"format": FORMAT, "start": header})

    def step(self, row: Row) -> None:
        self._write(row)

    def _write(self, row: Row) -> None:
        # After a crash the file may end within a line: what follows begins on a new one
        line = ("\n" if self._cut else "") + json.dumps(row, separators=(",", ":")) + "\n"
        # If the write fails half-way this stays set, so that the next line does not join the fragment
        self._cut = True
        # Unbuffered, a write may take a part of the bytes only
        data = memoryview(line.encode())
        while data:
            data = data[self._file.write(data) :]
        self._cut = False

    def close(self) -> None:
        self._file.close()


def heat_map(values: npt.NDArray[Any], *, low: float = 0.0, high: float = 2.0) -> npt.NDArray[np.uint8]:
    """Draw cells as colours, from dark blue over grey to yellow.

    Args:
        values: A number for every cell, [L, n].
        low: What is dark blue; less is too.
        high: What is yellow; more is too.

    Returns:
        Pixels, [8 L, 8 n, 3].
    """
    level = np.clip((np.asarray(values, dtype=np.float64) - low) / (high - low), 0.0, 1.0) * (len(_RAMP) - 1)
    at = np.minimum(level.astype(int), len(_RAMP) - 2)
    part = (level - at)[..., None]
    colour = _RAMP[at] * (1 - part) + _RAMP[at + 1] * part
    return np.repeat(np.repeat(colour.round().astype(np.uint8), _CELL, axis=0), _CELL, axis=1)


def over_mean(load: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Every load over its layer's mean, [L, n]."""
    found: npt.NDArray[np.float64] = load / np.maximum(load.mean(axis=1, keepdims=True), 1e-12)
    return found


def scalars(row: Row) -> dict[str, float]:
    """A step's numbers by name; those of single layers only where the step has its details."""
    found = {
        "prophet/max_mean": float(np.mean(row["max_mean"])),
        "prophet/max_mean_static": float(np.mean(row["max_mean_static"])),
        "prophet/copies": float(sum(row["copies"])),
        "prophet/dropped": float(sum(row["dropped"])),
        "prophet/exposed_s": row["exposed_s"],
    }
    for name in ("step_s", "gain_measured"):
        if row.get(name) is not None:
            found[f"prophet/{name}"] = row[name]
    if row.get("gain_predicted"):
        found["prophet/gain_predicted"] = float(np.mean(row["gain_predicted"]))
    if "experts" in row:
        for name in ("max_mean", "max_mean_static", "copies", "dropped", "gain_predicted"):
            for layer, value in enumerate(row.get(name) or ()):
                found[f"prophet_{name}/layer_{layer:02d}"] = float(value)
    return found


def images(row: Row) -> dict[str, npt.NDArray[np.uint8]]:
    """Heat maps of a step that has its details: layers downwards, experts or ranks across, load over its mean."""
    found = {}
    for name, key in (("experts", "experts"), ("ranks", "rank_load"), ("ranks_static", "rank_load_static")):
        if key in row and np.size(row[key]) <= _LARGEST:
            found[f"prophet_heat/{name}"] = heat_map(over_mean(np.asarray(row[key])))
    return found


class TensorBoard:
    """Scalars in every step, layers in steps with details, and heat maps in every tenth of those."""

    name = "TensorBoard"

    def __init__(self, folder: Path, *, heat_every: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), flush_secs=10)
        self._heat_every = heat_every
        self._details = 0

    @staticmethod
    def installed() -> bool:
        """Whether TensorBoard's writer can be imported."""
        return importlib.util.find_spec("tensorboard") is not None

    def start(self, header: Row) -> None:
        self._writer.add_text("prophet/run", "\n".join(f"- {k}: {v}" for k, v in header.items()), 0)

    def step(self, row: Row) -> None:
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, row["step"])
        if "experts" in row:
            if self._details % self._heat_every == 0:
                for name, image in images(row).items():
                    self._writer.add_image(name, image, row["step"], dataformats="HWC")
            self._details += 1

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Logs to a run of Weights & Biases that the caller has started; `prophet/step` is the axis.

    The caller's own steps are left alone: lines carry the step as a value and name none of W&B's.
    """

    name = "Weights & Biases"

    def __init__(self, run: Any, *, heat_every: int) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._run = run
        self._heat_every = heat_every
        self._details = 0

    @staticmethod
    def active() -> Any:
        """The run of this process, or None; never imports the library."""
        # A program that has a run has imported the library; importing it here would take seconds for nothing
        return getattr(sys.modules.get("wandb"), "run", None)

    def start(self, header: Row) -> None:
        self._run.define_metric("prophet/step")
        # Without this, W&B would draw our lines over its count of `log` calls, which the caller's own calls advance too
        self._run.define_metric("prophet*", step_metric="prophet/step")
        self._run.config.update({"prophet": header}, allow_val_change=True)

    def step(self, row: Row) -> None:
        values: dict[str, Any] = {"prophet/step": row["step"], **scalars(row)}
        if "experts" in row:
            if self._details % self._heat_every == 0:
                values |= {name: self._wandb.Image(image) for name, image in images(row).items()}
            self._details += 1
        self._run.log(values)

    def close(self) -> None:
        """The run belongs to the caller, who ends it."""
