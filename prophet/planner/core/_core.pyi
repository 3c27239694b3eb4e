"""Types of the compiled core. Arrays are C-contiguous and of exactly these types; any other is a TypeError.

Sizes that contradict one another, and indices that point outside, are a SpecError. Arguments whose names
begin with `out_` are written.
"""

from prophet.spec import BoolArray, FloatArray, IntArray

_Seconds = tuple[float, float, float, float, float]  # total, a2a, expert, exposed Trans, exposed Agg

SOURCES: str

def held_bytes() -> int:
    """Bytes of the workspace that the calling thread keeps."""

def split(
    load_RE: IntArray,
    holds_ER: BoolArray,
    home_E: IntArray,
    node_R: IntArray,
    speed_R: FloatArray,
    seconds_per_token_R: FloatArray,
    figures: FloatArray,
    effort: float,
    out_tokens_RED: IntArray,
) -> tuple[IntArray, IntArray, IntArray, float, _Seconds]:
    """The split of the shortest step: shared experts [M], their rows [F, 4] as of `Flows`, rank loads [R], the
    lowest bottleneck of any split, the cost.

    `figures` are those of `model.machine.Machine`; `effort` is the share of what could be saved on exchanges that may
    be spent on saving it. With 0 it is the exact split. Where `out_tokens_RED` has rows, a `Split`'s tokens are written
    to it.
    """

def plan(
    load_RE: IntArray,
    home_E: IntArray,
    node_R: IntArray,
    speed_R: FloatArray,
    seconds_per_token_R: FloatArray,
    figures: FloatArray,
    limit_R: IntArray,
    previous_ER: BoolArray,
    effort: float,
    split_effort: float,
    out_holds_ER: BoolArray,
) -> None:
    """Write the holders of the next placement; `previous_ER` has no rows where none is in force."""

def minimal_bottleneck(
    units: IntArray,
    state: IntArray,
    active: IntArray,
    held: IntArray,
    speed: FloatArray,
    capacity: IntArray,
    links: FloatArray,
) -> float:
    """The least bottleneck of a partition of layers over stages, or -1.0 where none fits: see
    `pipeline_balance.maps.search`."""

def best_boundaries(
    units: IntArray,
    state: IntArray,
    active: IntArray,
    held: IntArray,
    speed: FloatArray,
    capacity: IntArray,
    links: FloatArray,
    beta: float,
    square_weight: float,
    penalty: FloatArray,
    out_boundaries: IntArray,
) -> bool:
    """Write the boundaries of the cheapest partition with a bottleneck of at most `beta`; False where there is none."""
