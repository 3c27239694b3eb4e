"""One frame of `prophet watch`: the last steps of a run as a table for a terminal.

Shape legend: L layers, R ranks, E experts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from prophet.monitor.read import Tail
from prophet.monitor.sinks import Row
from prophet.terminal import Column, FittedTable

_BARS = "▁▂▃▄▅▆▇█"
# columns of the course of max/mean
_WIDTH = 16
_COLUMNS = (
    Column("layer"),
    Column("max/mean"),
    Column("without", 1),
    Column("course", 6, "left"),
    Column("copies", 2),
    Column("predicted", 3),
    Column("dropped", 4),
    Column("hottest experts", 5, "left"),
)
# A run is called quiet after the time of so many steps without one
_QUIET_STEPS = 20


def course(values: Sequence[float], width: int = _WIDTH) -> str:
    """Draw the last values as bars; the lowest bar is 1.0, the highest at least 1.5."""
    shown = list(values)[-width:]
    top = max([1.5, *shown])
    return "".join(_BARS[min(len(_BARS) - 1, int((v - 1.0) / (top - 1.0) * (len(_BARS) - 1) + 0.5))] for v in shown)


def last_known(rows: Sequence[Row], name: str) -> list[float] | None:
    """The latest value of a field that not every line has."""
    return next((row[name] for row in reversed(rows) if row.get(name)), None)


def _colour(ratio: float) -> str:
    return "green" if ratio < 1.1 else "yellow" if ratio < 1.5 else "red"


def chosen_layers(row: Row, most: int) -> list[int]:
    """At most `most` layers: the worst ones where there are more, in the model's order."""
    ratio = row["max_mean"]
    # Ties by number, so that the table does not jump from frame to frame
    worst = sorted(range(len(ratio)), key=lambda i: (-ratio[i], i))[: max(1, most)]
    return sorted(worst)


def _experts(row: Row, layer: int, most: int) -> str:
    return "  ".join(f"{int(e)} ×{share:.1f}" for e, share in row["hottest"][layer][:most])


def frame(tail: Tail, *, now_s: float, height: int = 40, width: int = 100) -> RenderableType:
    """One view of a run.

    Args:
        tail: The end of the run's file; it has a step.
        now_s: The time, in seconds since the epoch.
        height: Lines of the terminal.
        width: Columns of the terminal.
    """
    rows = list(tail.rows)
    last = rows[-1]
    wide = width >= 96
    # Lines around the table; in a narrow terminal they are wrapped and need more
    layers = chosen_layers(last, height - (10 if wide else 16))
    gains = last_known(rows, "gain_predicted")
    cells = []
    for layer in layers:
        ratio = last["max_mean"][layer]
        dropped = last["dropped"][layer]
        cells.append(
            (
                str(layer),
                Text(f"{ratio:.3f}", style=_colour(ratio)),
                f"{last['max_mean_static'][layer]:.3f}",
                course([r["max_mean"][layer] for r in rows]),
                str(last["copies"][layer]),
                "" if gains is None else f"{gains[layer]:.2f} ×",
                Text(str(dropped), style="red" if dropped else ""),
                _experts(last, layer, 4 if wide else 2),
            )
        )
    return Group(_head(tail, rows, now_s), Text(), FittedTable(_COLUMNS, cells), *_foot(tail, last, rows, len(layers)))


def _head(tail: Tail, rows: Sequence[Row], now_s: float) -> Text:
    header, last = tail.header, rows[-1]
    taken = [r["step_s"] for r in rows if r.get("step_s")]
    step_s = statistics.median(taken) if taken else None
    ago_s = max(0.0, now_s - last["time_s"])
    text = Text(f"step {last['step'] + 1}", style="bold")
    text.append(
        f"  {header['ranks']} ranks, {header['layers']} layers, planner {header.get('planner', '?')}", "default"
    )
    if step_s is not None:
        text.append(f"  {1e3 * step_s:.1f} ms/step", "default")
    # At least ten seconds, or any pause of a run with short steps would be called quiet
    quiet = ago_s > max(10.0, _QUIET_STEPS * (step_s or 0.0))
    text.append(f"  last step {ago_s:.0f} s ago", "bold red" if quiet else "dim")
    if tail.starts > 1:
        text.append(f"  start {tail.starts}", "dim")
    return text


def _foot(tail: Tail, last: Row, rows: Sequence[Row], shown: int) -> list[RenderableType]:
    gain, step_s = last.get("gain_measured"), last.get("step_s")
    share = f" ({100 * last['exposed_s'] / step_s:.1f} % of the step)" if step_s else ""
    lines = [
        f"exposed {1e3 * last['exposed_s']:.2f} ms{share}"
        + ("" if gain is None else f"  measured gain of the experts' time {gain:.2f} ×"),
        "ms: " + "  ".join(f"{name} {1e3 * s:.1f}" for name, s in sorted(last["seconds"].items())),
    ]
    dropped = sum(sum(r["dropped"]) for r in rows)
    if dropped:
        lines.append(f"{dropped} choices dropped in the last {len(rows)} steps")
    if shown < len(last["max_mean"]):
        lines.append(f"the worst {shown} of {len(last['max_mean'])} layers")
    if last.get("skipped"):
        lines.append(f"{last['skipped']} steps were not written: they came faster than the disk took them")
    if tail.left_out.count:
        lines.append(str(tail.left_out))
    return [Text(line, style="dim") for line in lines]
