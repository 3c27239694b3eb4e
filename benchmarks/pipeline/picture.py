"""A picture of a run with re-packing: which rank ran which layer at every step, and how many ranks were in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline_balance.spec import StageMap

REPACKING = "partition-repack"


def maps_of(row: Mapping[str, Any]) -> list[StageMap]:
    """The stage map of every counted step, from a row's list of changes."""
    found: list[StageMap] = []
    for step, boundaries, ranks in row["map_changes"]:
        found += found[-1:] * (step - len(found))
        found.append(StageMap(tuple(boundaries), tuple(ranks)))
    return found + found[-1:] * (row["steps"] - len(found))


def draw(rows: Sequence[Mapping[str, Any]], path: Path, policy: str = REPACKING) -> int:
    """Draw every case's row of `policy` into one file; returns how many there were."""
    chosen = [r for r in rows if r["policy"] == policy]
    if not chosen:
        return 0
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    colours = plt.get_cmap("tab10")
    size = (7.5, 0.6 + 2.6 * len(chosen))
    ratios = [3, 1.2] * len(chosen)
    figure, axes = plt.subplots(2 * len(chosen), 1, figsize=size, height_ratios=ratios, squeeze=False)
    ranks = max(int(r["ranks"]) for r in chosen)
    for i, row in enumerate(chosen):
        top, bottom = axes[2 * i, 0], axes[2 * i + 1, 0]
        maps = maps_of(row)
        extent = (0, len(maps), 0, maps[0].layers)
        grid = [[colours(m.assignment()[layer]) for m in maps] for layer in range(maps[0].layers)]
        top.imshow(grid, aspect="auto", interpolation="nearest", origin="lower", extent=extent)
        top.set_ylabel("layer")
        top.set_title(f"{row['case']}: stages" + ("" if row.get("measured", True) else " (simulated)"))
        top.tick_params(labelbottom=False)
        bottom.step(range(len(maps) + 1), [len(m.used_ranks) for m in (*maps, maps[-1])], where="post", color="black")
        bottom.set_xlim(0, len(maps))
        bottom.set_ylim(0, ranks + 0.5)
        bottom.set_yticks(range(0, ranks + 1, 2))
        bottom.set_ylabel("ranks")
        bottom.set_xlabel("step" if i == len(chosen) - 1 else "")
    handles = [Patch(color=colours(r), label=f"rank {r}") for r in range(ranks)]
    axes[0, 0].legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return len(chosen)
