"""Types of the compiled core. Arrays are C-contiguous and of exactly these types; any other is a TypeError.

Sizes that contradict one another are a ValueError. Arguments whose names begin with `out_` are written.
"""

from prophet.spec import IntArray

SOURCES: str

def held_bytes() -> int:
    """Bytes of the workspace that the calling thread keeps."""

def expert_totals(load_RE: IntArray, out_total_E: IntArray) -> None: ...
