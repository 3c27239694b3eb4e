"""Groups are all tried, whichever fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prophet.ranks.works import all_made


def test_groups_behind_one_that_fails_are_tried_and_its_failure_is_raised() -> None:
    tried: list[int] = []

    def making(number: int) -> Callable[[], int]:
        def make() -> int:
            tried.append(number)
            if number in (1, 2):
                raise (RuntimeError if number == 2 else ValueError)(f"group {number}")
            return number

        return make

    with pytest.raises(ValueError, match="group 1"):
        all_made([making(number) for number in range(4)])
    assert tried == [0, 1, 2, 3]
    assert all_made([making(0), making(3)]) == [0, 3]
