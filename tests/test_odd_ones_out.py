"""Which ranks differ from the others."""

from __future__ import annotations

import pytest

from prophet.spec import odd_ones_out


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ([7], []),
        ([3, 3, 3], []),
        ([3, 3, 9, 3], [2]),
        ([9, 3, 3, 8], [0, 3]),
        ([5, 4], [0]),
        ([2**62, 2**62, 2**62 - 1], [2]),
    ],
)
def test_the_majority_is_right(values: list[int], ranks: list[int]) -> None:
    assert odd_ones_out(values) == ranks
