"""Draws the picture of `tutorial.md` from what its commands wrote: the recorded routing, and the balanced run.

python docs/tools/tutorial_picture.py FOLDER docs/images/tutorial.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from prophet.traces import read_trace

matplotlib.use("agg")


def draw(folder: Path, picture: Path) -> None:
    """Left: each expert's share of the tokens in every recorded step. Right: the busiest rank in every step."""
    counts = read_trace(folder / "routing.npz").counts[:, -1].sum(axis=1)  # [steps, experts] of the last layer
    lines = [json.loads(line) for line in (folder / "runs/tutorial/steps.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "max_mean" in line]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    shares = (counts / counts.sum(axis=1, keepdims=True)).T
    image = left.imshow(100 * shares, aspect="auto", origin="lower", cmap="Blues", vmin=0)
    left.set(xlabel="recorded step", ylabel="expert", title="Choices of the last layer's router, %")
    figure.colorbar(image, ax=left)
    for field, colour, name in (("max_mean_static", "#de2d26", "without"), ("max_mean", "#3182bd", "with balancing")):
        right.plot([np.mean(line[field]) for line in steps], color=colour, label=name)
    right.set(xlabel="step of the balanced run", title="Busiest of two ranks over the mean", ylim=(0.95, None))
    right.legend()
    figure.savefig(picture, dpi=90)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
