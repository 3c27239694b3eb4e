"""Rows as a table and as a picture, and what was measured."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import Row
from benchmarks.layer.cases import Sizes
from benchmarks.layer.implementations import INSTALL, NAMES, PARTS
from benchmarks.tables import show as show_table

PART_NAMES = (*PARTS, "rest")
LEFT = ("ranks", "skew", "implementation")
WIDTH = 120


def about(sizes: Sizes) -> dict[str, Any]:
    """The sizes, and the peers' versions."""
    versions: dict[str, str | None] = {}
    for package in INSTALL:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {"dtype": "float32", "versions": versions, "sizes": asdict(sizes)}


def show(rows: Sequence[Row]) -> None:
    """The table, and below it where our time goes."""
    lines = []
    for r in rows:
        words = r.get("wrong") or r.get("note")
        cells = [words or ""]
        if words is None:
            ratio = r["ratio_to_prophet"]
            cells = [f"{r['fwd_ms']:.2f}", f"{r['fwd_bwd_ms']:.2f}", "" if ratio is None else f"{ratio:.2f}"]
            cells.append(f"{r['max_mean']:.2f}" if "max_mean" in r else "")
            cells.append(f"{r['replicas']:g}" if "replicas" in r else "")
            cells.append(f"{r['rows_padded']:.1f}x" if "rows_padded" in r else "")
        lines.append((str(r["ranks"]), r["skew"], r.get("impl", ""), *cells))
    show_table(LEFT, ("fwd ms", "fwd+bwd ms", "ratio", "max/mean", "replicas", "rows"), lines, width=WIDTH)
    parts = [
        (str(r["ranks"]), r["skew"], r["impl"], *(f"{r['breakdown_ms'][p]:.2f}" for p in PART_NAMES))
        for r in rows
        if "breakdown_ms" in r
    ]
    if parts:
        show_table(LEFT, PART_NAMES, parts, width=WIDTH, title="of which, ms (mean over ranks)")


def plot(rows: Sequence[Row], file: Path) -> None:
    """Left the times of all implementations by case, right where the time of ours goes."""
    from matplotlib.figure import Figure

    timed = [r for r in rows if "fwd_bwd_ms" in r]
    cases = list(dict.fromkeys((r["ranks"], r["skew"]) for r in timed))
    names = [n for n in NAMES if any(r["impl"] == n for r in timed)]
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    width = 0.8 / max(1, len(names))
    for j, name in enumerate(names):
        found = [(cases.index((r["ranks"], r["skew"])), r["fwd_bwd_ms"]) for r in timed if r["impl"] == name]
        left.bar([at + j * width for at, _ in found], [ms for _, ms in found], width, label=name)
    labels = [f"{skew}\n{ranks} ranks" for ranks, skew in cases]
    left.set_xticks([i + 0.4 - width / 2 for i in range(len(cases))], labels, fontsize=8)
    left.set(ylabel="forward + backward, ms", yscale="log")
    left.legend(fontsize=8)
    ours = [r for r in timed if "breakdown_ms" in r]
    base = [0.0] * len(ours)
    for part in PART_NAMES:
        height = [r["breakdown_ms"][part] for r in ours]
        right.bar(range(len(ours)), height, bottom=base, label=part)
        base = [b + h for b, h in zip(base, height, strict=True)]
    marks = [f"{r['impl']}, {r['skew']}, {r['ranks']} ranks" for r in ours]
    right.set_xticks(range(len(ours)), marks, fontsize=7, rotation=60, ha="right")
    right.set(ylabel="ms, mean over ranks")
    if ours:
        right.legend(fontsize=7)
    figure.savefig(file)
