"""Which transfer is launched in which window.

`block_wise` is the paper's Algorithm 2: Trans of block i+1 is cut in two and launched under FEC(i) and FNEC(i), Agg of
block i+1 under BNEC(i) and BEC(i). The paper leaves open where the first block's Trans and Agg go; they have no block
before them, so Trans(0) starts with the forward pass and Agg(0) at the end of block 0's own backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prophet.scheduler.actions import Action, TransferKind, Window
from prophet.scheduler.pieces import cut_by_weights

Schedule = tuple[Action, ...]


def block_wise(blocks: int) -> Schedule:
    """Algorithm 2 for `blocks` MoE blocks, in the order in which a step reaches the windows."""
    if blocks < 1:
        raise ValueError(f"a schedule needs at least one block, got {blocks}")
    start = Window("START")
    actions = [Action("TRANS", 0, c, start) for c in (0, 1)]
    for i in range(blocks - 1):
        actions.append(Action("TRANS", i + 1, 0, Window("FEC", i)))
        actions.append(Action("TRANS", i + 1, 1, Window("FNEC", i)))
    for i in reversed(range(blocks - 1)):
        actions.append(Action("AGG", i + 1, 0, Window("BNEC", i)))
        actions.append(Action("AGG", i + 1, 1, Window("BEC", i)))
    actions += [Action("AGG", 0, c, Window("END")) for c in (0, 1)]
    return tuple(actions)


def blocking(blocks: int) -> Schedule:
    """Nothing hidden: every Trans right before its own experts run, every Agg after the whole backward pass."""
    if blocks < 1:
        raise ValueError(f"a schedule needs at least one block, got {blocks}")
    actions = [Action("TRANS", i, c, Window("FEC", i)) for i in range(blocks) for c in (0, 1)]
    actions += [Action("AGG", i, c, Window("END")) for i in reversed(range(blocks)) for c in (0, 1)]
    return tuple(actions)


def by_window(schedule: Iterable[Action]) -> Mapping[Window, tuple[Action, ...]]:
    """The schedule as a table from window to what is launched there."""
    table: dict[Window, list[Action]] = {}
    for action in schedule:
        table.setdefault(action.window, []).append(action)
    return {window: tuple(actions) for window, actions in table.items()}


def cut_of(
    schedule: Iterable[Action], kind: TransferKind, block: int, weights: Mapping[Window, int] | None = None
) -> tuple[int, ...]:
    """Where a block's transfer is cut: every chunk in proportion to the length of its window.

    weights: integers by window, in any unit; all windows alike where those in question are missing or zero. Chunks that
    start in one window are one: the first takes all of it.
    """
    windows = [a.window for a in sorted(_chunks(schedule, kind, block), key=lambda a: a.chunk)]
    first = [windows.index(w) == c for c, w in enumerate(windows)]
    found = [(weights or {}).get(w, 0) if f else 0 for w, f in zip(windows, first, strict=True)]
    return cut_by_weights(found if any(found) else [int(f) for f in first])


def _chunks(schedule: Iterable[Action], kind: TransferKind, block: int) -> list[Action]:
    found = [a for a in schedule if a.kind == kind and a.block == block]
    if not found:
        raise ValueError(f"the schedule has no {kind} of block {block}")
    return found
