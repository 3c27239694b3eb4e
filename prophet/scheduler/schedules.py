"""Which transfer is launched in which window.

`block_wise` is the paper's Algorithm 2: Trans of block i+1 is cut in two and launched under FEC(i) and FNEC(i), Agg of
block i+1 under BNEC(i) and BEC(i). The paper leaves open where the first block's Trans and Agg go. They have no block
before them, so Trans(0) starts with the forward pass and Agg(0) at the end of block 0's backward pass. The others are
what it is compared with. A schedule is the transfers alone; `program` puts them among a step's other operations.

Shape legend: L blocks, C chunks per transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prophet.scheduler.actions import Action, Launch, TransferKind, Window
from prophet.scheduler.pieces import cut_by_weights

Schedule = tuple[Action, ...]

NAMES = ("block-wise", "look-ahead", "operator", "blocking")


def block_wise(blocks: int) -> Schedule:
    """Return Algorithm 2 for `blocks` MoE blocks, in the order in which a step reaches the windows."""
    return look_ahead(blocks, 1)


def look_ahead(blocks: int, depth: int = 2) -> Schedule:
    """Return Algorithm 2 over several blocks: a transfer is spread over the windows of `depth` blocks before its own.

    Trans of block i is cut in 2·depth chunks for FEC and FNEC of blocks i-depth .. i-1, Agg for BNEC and BEC of blocks
    i-1 .. i-depth; blocks that do not exist are left out. A block whose neighbour has little compute can then hide
    under an earlier one; in return replicas live longer (see `depth_within`).

    Args:
        blocks: L, MoE blocks of the model.
        depth: How many blocks ahead; 1 is the paper's schedule.
    """
    _check(blocks)
    if depth < 1:
        raise ValueError(f"look-ahead needs a depth of at least one block, got {depth}")
    transfers = []
    for i in range(blocks):
        before = range(max(0, i - depth), i)
        # without a block before it both chunks start in one window: they are one there, see `cut_of`
        there = [Window(k, j) for j in before for k in ("FEC", "FNEC")] or [Window("START")] * 2
        back = [Window(k, j) for j in reversed(before) for k in ("BNEC", "BEC")] or [Window("END")] * 2
        transfers += [Action("TRANS", i, c, w) for c, w in enumerate(there)]
        transfers += [Action("AGG", i, c, w) for c, w in enumerate(back)]
    return ordered(transfers, blocks)


def operator_grained(blocks: int) -> Schedule:
    """Return a schedule that cuts nothing: a transfer starts whole under the operator next to its block (Fig. 9a)."""
    _check(blocks)
    transfers = [
        Action("TRANS", i, c, Window("FEC", i - 1) if i else Window("START")) for i in range(blocks) for c in (0, 1)
    ]
    transfers += [
        Action("AGG", i, c, Window("BNEC", i - 1) if i else Window("END")) for i in range(blocks) for c in (0, 1)
    ]
    return ordered(transfers, blocks)


def blocking(blocks: int) -> Schedule:
    """Return a schedule that hides nothing: every Trans before its experts run, every Agg after the backward pass."""
    _check(blocks)
    transfers = [Action("TRANS", i, c, Window("FEC", i)) for i in range(blocks) for c in (0, 1)]
    transfers += [Action("AGG", i, c, Window("UPDATE")) for i in range(blocks) for c in (0, 1)]
    return ordered(transfers, blocks)


def schedule_named(name: str, blocks: int, *, depth: int = 2, refetch: bool = False) -> Schedule:
    """Return one of `NAMES`.

    Args:
        name: Which schedule.
        blocks: L, MoE blocks of the model.
        depth: Blocks ahead, of "look-ahead".
        refetch: Whether replicas are dropped after the forward pass and fetched again.

    Raises:
        ValueError: There is no such schedule, or it cannot have these blocks.
    """
    makers: dict[str, Callable[[int], Schedule]] = {
        "block-wise": block_wise,
        "look-ahead": lambda n: look_ahead(n, depth),
        "operator": operator_grained,
        "blocking": blocking,
    }
    if name not in makers:
        raise ValueError(f"there is no schedule {name!r}; expected one of {', '.join(NAMES)}")
    made = makers[name](blocks)
    return with_refetch(made, blocks) if refetch else made


def with_refetch(schedule: Schedule, blocks: int) -> Schedule:
    """Return the schedule of replicas that are dropped after the forward pass and fetched again for the backward pass.

    FETCH(i) takes the two windows before block i's experts run backward, BEC(i+1) and BNEC(i); where nothing is hidden
    it comes right before them. The last block's replicas are still there.

    Args:
        schedule: Trans and Agg.
        blocks: L, MoE blocks of the model.
    """
    hidden = any(a.kind == "TRANS" and a.window is not None and a.window.block != a.block for a in schedule[1:])
    fetches = []
    # the last block's replicas are still there: its backward pass comes right after its forward pass
    for i in range(blocks - 1):
        windows = (Window("BEC", i + 1), Window("BNEC", i)) if hidden else (Window("BEC", i),) * 2
        fetches += [Action("FETCH", i, c, w) for c, w in enumerate(windows)]
    return ordered((*schedule, *fetches), blocks)


def depth_within(block_bytes: Sequence[int], budget_bytes: int | None, most: int) -> int:
    """Return the largest look-ahead at which replicas of any depth + 1 blocks in a row fit the budget.

    With a depth of 1 the block in use and the next one are there; that much is always granted.

    Args:
        block_bytes: What each block's replicas may take on one rank, [L].
        budget_bytes: Bytes of replicas on a rank; None for no limit.
        most: The largest depth that may be returned, 1 at least.
    """
    if most < 1:
        raise ValueError(f"look-ahead needs a depth of at least one block, got {most}")
    if budget_bytes is None:
        return most
    fits = 1
    # upwards, and done at the first that does not fit: a longer span holds every shorter one
    for depth in range(2, most + 1):
        spans = (sum(block_bytes[i : i + depth + 1]) for i in range(max(1, len(block_bytes) - depth)))
        if max(spans, default=0) > budget_bytes:
            break
        fits = depth
    return fits


def _check(blocks: int) -> None:
    if blocks < 1:
        raise ValueError(f"a schedule needs at least one block, got {blocks}")


# --- the whole step ---


def windows(blocks: int) -> list[Window]:
    """Return all windows of a step in the order in which it reaches them."""
    found = [Window("START")]
    for i in range(blocks):
        found += [Window("FEC", i), Window("FNEC", i)]
    for i in reversed(range(blocks)):
        found += [Window("BNEC", i), Window("BEC", i)]
    return [*found, Window("END"), Window("UPDATE")]


def ordered(transfers: Iterable[Action], blocks: int) -> Schedule:
    """Return transfers in the order in which a step comes to them; in one window what is needed first goes first."""
    place = {w: at for at, w in enumerate(windows(blocks))}

    def key(action: Action) -> tuple[int, bool, int, int]:
        launch = Launch.of(action)
        # forward the lower block is needed first, backward the higher one
        urgent = launch.block if launch.kind == "TRANS" else -launch.block
        return place[launch.window], launch.kind == "AGG", urgent, launch.chunk

    return tuple(sorted(transfers, key=key))


def program(schedule: Iterable[Action], blocks: int) -> Schedule:
    """Return the whole step: every operation in the order in which a rank comes to it, transfers among them.

    Raises:
        ValueError: A window is outside the step.
    """
    table = by_window(schedule)
    made = tuple(_program(table, blocks))
    # a transfer in a window that never comes would be launched late without a word
    left = [a for actions in table.values() for a in actions if a not in made]
    if left:
        raise ValueError(f"{left[0]} names a window outside a step of {blocks} blocks")
    return made


def _program(table: Mapping[Window, tuple[Action, ...]], blocks: int) -> Iterator[Action]:
    """Yield the operations of a step of `blocks` blocks, the transfers of `table` at the starts of their windows."""

    def launched(window: Window, *kinds: TransferKind, own: bool | None = None) -> Iterator[Action]:
        for a in table.get(window, ()):
            if own is None or own == (a.kind in kinds and a.block == window.block):
                yield a

    yield from launched(Window("START"))
    yield Action("START")
    for i in range(blocks):
        yield Action("COUNTS", i)
        yield Action("PLAN", i)
        yield Action("A2A", i, 0)
        # a block's Trans in its own window hides nothing: it is waited for before the window begins
        yield from launched(Window("FEC", i), "TRANS", own=True)
        yield Action("WAIT_TRANS", i)
        yield from launched(Window("FEC", i), "TRANS", own=False)
        yield Action("FEC", i)
        yield Action("A2A", i, 1)
        yield from launched(Window("FNEC", i))
        yield Action("FNEC", i)
    # only blocks whose parameters were dropped have something to wait for
    refetched = {a.block for actions in table.values() for a in actions if a.kind == "FETCH"}
    for i in reversed(range(blocks)):
        yield from launched(Window("BNEC", i))
        yield Action("BNEC", i)
        yield Action("A2A", i, 2)
        # likewise before BEC
        yield from launched(Window("BEC", i), "FETCH", own=True)
        if i in refetched:
            yield Action("WAIT_FETCH", i)
        yield from launched(Window("BEC", i), "FETCH", own=False)
        yield Action("BEC", i)
        yield Action("A2A", i, 3)
    yield from launched(Window("END"))
    yield Action("END")
    yield from launched(Window("UPDATE"))
    for i in reversed(range(blocks)):
        yield Action("WAIT_AGG", i)
    yield Action("UPDATE")
    yield Action("WAIT_PLAN")


def by_window(schedule: Iterable[Action]) -> Mapping[Window, tuple[Action, ...]]:
    """Return the schedule's transfers as a table from window to what is launched there."""
    table: dict[Window, list[Action]] = {}
    for action in schedule:
        if action.window is not None:
            table.setdefault(action.window, []).append(action)
    return {window: tuple(actions) for window, actions in table.items()}


def cut_of(
    schedule: Iterable[Action], kind: TransferKind, block: int, weights: Mapping[Window, int] | None = None
) -> tuple[int, ...]:
    """Return where a block's transfer is cut: every chunk in proportion to the length of its window.

    Chunks that start in one window are one: the first takes all of it. A block that has no such transfer is not cut.

    Args:
        schedule: What is launched where.
        kind: Which transfer.
        block: The block's place in the order of execution.
        weights: Lengths of windows, integers in any unit; all windows count alike where those in question are missing
            or zero.
    """
    found = [Launch.of(a) for a in schedule if a.kind == kind and a.block == block]
    where = [x.window for x in sorted(found, key=lambda x: x.chunk)]
    # a window is no cover twice: the chunks that share it count once
    first = [where.index(w) == c for c, w in enumerate(where)]
    lengths = [(weights or {}).get(w, 0) if f else 0 for w, f in zip(where, first, strict=True)]
    return cut_by_weights(lengths if any(lengths) else [int(f) for f in first] or [1])


def cover_of(schedule: Iterable[Action], kind: TransferKind, block: int, weights: Mapping[Window, int]) -> int:
    """Return the length of all windows that a block's transfer runs under, in the unit of `weights`.

    Args:
        schedule: What is launched where.
        kind: Which transfer.
        block: The block's place in the order of execution.
        weights: Lengths of windows.
    """
    # a block's experts wait for its Trans, so they hide none of it
    own = Window("FEC", block) if kind == "TRANS" else None
    found = {a.window for a in schedule if (a.kind, a.block) == (kind, block)}
    return sum(weights.get(w, 0) for w in found if w is not None and w != own)


def runs_ahead(schedule: Iterable[Action], block: int) -> bool:
    """Return whether a block's Trans starts before its counts are known."""
    return any(a.kind == "TRANS" and a.block == block and a.window != Window("FEC", block) for a in schedule)
