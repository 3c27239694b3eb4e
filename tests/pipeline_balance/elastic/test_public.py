"""What users of elastic layouts import: the names of the package, whatever was imported before."""

from __future__ import annotations

import pytest

from pipeline_balance import elastic


@pytest.mark.parametrize("name", elastic.__all__)
def test_a_name_is_what_it_says_however_often_it_is_asked_for(name: str) -> None:
    for _ in range(2):
        found = getattr(elastic, name)
        assert callable(found)
        assert found.__name__ == name
