"""Every family with experts in the installed transformers, converted on two ranks, trains as the plain model does.

Losses to 1e-6, what every parameter moved by to 1e-3 of its largest move, over ten steps of SGD with placements at
random; what is saved is loaded bit for bit. A family that would not be kept is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.families import modeling_files
from tests.helpers.family_page import families_that
from tests.helpers.family_walk import Pair, Row

pytest.importorskip("transformers", reason="needs transformers: pip install '.[hf]'")


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    ranks = Pair(tmp_path_factory.mktemp("families"))
    yield ranks
    ranks.close()


def walked(pair: Pair, family: str, case: str, note: Callable[[str, Any], None]) -> Row:
    """The row of one family, and what both ranks say of it."""
    rows = pair.do(family, case)
    row = max(rows, key=lambda r: ORDER.index(r.verdict))
    note("family", (family, case, row.verdict, row.said.splitlines()[0] if row.said else ""))
    row.copies = min(r.copies for r in rows)
    return row


ORDER = ("right", "refused", "not built", "wrong", "failed")


@pytest.mark.parametrize("case", ["plain", "overloaded"])
@pytest.mark.parametrize("family", modeling_files())
def test_trains_as_alone(family: str, case: str, pair: Pair, record_property: Any) -> None:
    """overloaded: every token goes to the same experts, others have no row, and a rank has three tokens."""
    row = walked(pair, family, case, record_property)
    assert row.verdict == ("refused" if family in families_that("are refused") else "right"), row.said
    assert row.verdict == "refused" or row.copies > 0, "no replica sent gradients home"


@pytest.mark.parametrize("family", modeling_files())
def test_a_lost_gradient_is_seen(family: str, pair: Pair, record_property: Any) -> None:
    """Otherwise the comparison would say nothing about the family."""
    row = walked(pair, family, "lost", record_property)
    assert row.verdict in ("wrong", "refused"), row.said
