"""A picture of a step: what every rank computes, exchanges and transfers, and when.

Shape legend: R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prophet.scheduler.timeline import Span

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STREAMS = ("compute", "tokens", "weights")
COLOURS = {"experts": "#4477aa", "rest": "#aabbcc", "tokens": "#ccbb44", "Trans": "#228833", "Agg": "#ee6677"}
_LABELS = {"experts": "experts", "rest": "other compute", "tokens": "all-to-all", "Trans": "Trans", "Agg": "Agg"}


def block_of(name: str) -> int | None:
    """The block of a window, as in FEC(3), or of a simulated transfer, as in Trans(2,0); None where there is none."""
    _, _, numbers = name.partition("(")
    block = numbers.rstrip(")").split(",")[0]
    return int(block) if block.isdigit() else None


def middle_blocks(spans: Iterable[Span]) -> list[int]:
    """Two neighbouring blocks from the middle of those whose compute was recorded; fewer where there are fewer."""
    blocks = sorted({b for s in spans if s.stream == "compute" and (b := block_of(s.name)) is not None})
    # The first and the last block have a neighbour on one side only, so less of their transfers is hidden
    return blocks[max(0, len(blocks) // 2 - 1) :][:2]


def around_blocks(spans: Iterable[Span], blocks: Sequence[int]) -> list[Span]:
    """The spans from the first to the last thing, in the forward pass, that the compute of `blocks` does.

    Empty where the blocks do not occur.
    """
    listed = sorted(spans)
    inside = [
        s
        for s in listed
        if s.stream == "compute" and s.name.startswith(("FEC", "FNEC", "route")) and block_of(s.name) in blocks
    ]
    if not inside:
        return []
    start, end = min(s.start_s for s in inside), max(s.end_s for s in inside)
    return [
        # Cut at the edges, so that transfers that belong to other blocks show where they overlap
        Span(max(s.start_s, start), min(s.end_s, end), s.rank, s.stream, s.name)
        for s in listed
        if s.start_s < end and s.end_s > start
    ]


def _kind(span: Span) -> str:
    if span.stream == "tokens":
        return "tokens"
    if span.stream == "weights":
        return "Agg" if span.name.startswith("Agg") else "Trans"
    return "experts" if span.name.startswith(("FEC", "BEC")) else "rest"


def draw_step(groups: Mapping[str, Iterable[Span]], *, blocks: Sequence[int] | None = None, ranks: int = 4) -> Figure:
    """Draw spans by group ("measured", "simulated") one below the other: three rows per rank, time to the right.

    Args:
        groups: Spans of every group; each begins at time zero.
        blocks: Blocks of whose forward pass spans are drawn, best two neighbours; None: all of the step.
        ranks: The most ranks that are drawn.

    Raises:
        ValueError: There is nothing to draw.
    """
    from matplotlib.figure import Figure

    shown = chosen_spans(groups, blocks=blocks, ranks=ranks)
    figure = Figure(figsize=(9.0, height_in(shown)), layout="constrained")
    paint_step(figure, shown)
    return figure


def chosen_spans(
    groups: Mapping[str, Iterable[Span]], *, blocks: Sequence[int] | None = None, ranks: int = 4
) -> dict[str, list[Span]]:
    """Choose what `draw_step` draws of each group.

    Args:
        groups: Spans of every group.
        blocks: Blocks of whose forward pass spans are drawn; None: all of the step.
        ranks: The most ranks that are drawn.

    Raises:
        ValueError: There is nothing to draw.
    """
    shown: dict[str, list[Span]] = {}
    for name, spans in groups.items():
        kept = [s for s in spans if s.stream in STREAMS and s.rank < ranks]
        shown[name] = sorted(kept if blocks is None else around_blocks(kept, blocks))
    shown = {name: spans for name, spans in shown.items() if spans}
    if not shown:
        raise ValueError("there is nothing to draw: no span of compute, all-to-all or transfer in these blocks")
    return shown


def _rows(spans: Iterable[Span]) -> int:
    return 3 * len({s.rank for s in spans})


def height_in(shown: Mapping[str, Sequence[Span]]) -> float:
    """Height in inches of a figure that holds these spans."""
    return 0.9 + 0.22 * sum(_rows(spans) for spans in shown.values()) + 0.5 * len(shown)


def paint_step(figure: Any, shown: Mapping[str, Sequence[Span]], colours: Mapping[str, str] = COLOURS) -> None:
    """Paint spans onto an empty figure.

    Args:
        figure: The figure.
        shown: What `chosen_spans` has chosen.
        colours: Colours, by the keys of `COLOURS`.
    """
    heights = [_rows(spans) for spans in shown.values()]
    # Rows are as high in every group, however many ranks it has
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    seen: dict[str, Any] = {}
    for axis, (name, spans) in zip(axes, shown.items(), strict=True):
        _draw(axis, spans, seen, colours)
        axis.set_title(name, loc="left", fontsize=9)
    axes[-1].set_xlabel("milliseconds")
    # In a fixed order, whichever was drawn first
    kinds = [k for k in COLOURS if k in seen]
    figure.legend([seen[k] for k in kinds], [_LABELS[k] for k in kinds], loc="outside upper right", ncols=5, fontsize=8)


def _draw(axis: Any, spans: Sequence[Span], seen: dict[str, Any], colours: Mapping[str, str]) -> None:
    zero, order = spans[0].start_s, sorted({s.rank for s in spans})
    for s in spans:
        row = 3 * order.index(s.rank) + STREAMS.index(s.stream)
        kind = _kind(s)
        bars = axis.barh(
            row,
            1e3 * s.seconds,
            left=1e3 * (s.start_s - zero),
            height=0.85,
            color=colours[kind],
            lw=0.0,
        )
        # The legend lists every kind once, whatever group or rank it occurs in
        seen.setdefault(kind, bars)
    names = {"compute": "compute", "tokens": "all-to-all", "weights": "transfers"}
    axis.set_yticks(range(3 * len(order)))
    axis.set_yticklabels([f"rank {r} {names[s]}" for r in order for s in STREAMS], fontsize=7)
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.spines[["top", "right"]].set_visible(False)
