"""The all-to-all benchmark: both forms move the same elements, and the bandwidths are those of nccl-tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.a2a.__main__ import main, plot
from benchmarks.a2a.exchange import busiest, check, measure, one_level, pairs_of, two_level
from prophet.ranks.threads import ThreadCollective
from tests.helpers.support import on_threads


@pytest.mark.parametrize("uneven", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_two_levels_bring_what_one_level_brings(uneven: float, per_node: int) -> None:
    # every rank sends other numbers
    pairs = pairs_of(4, 37, uneven) + np.random.default_rng(per_node).integers(0, 9, (4, 4))

    def body(ranks: ThreadCollective) -> None:
        x = 1000.0 * ranks.rank + torch.arange(int(pairs[ranks.rank].sum()), dtype=torch.float32)
        assert sorted(two_level(x, pairs, ranks, per_node).tolist()) == sorted(one_level(x, pairs, ranks).tolist())
        assert torch.equal(two_level(x, pairs, ranks, per_node), one_level(x, pairs, ranks))
        check(pairs, ranks, torch.device("cpu"), per_node)

    on_threads(4, body)


def test_bandwidths(tmp_path: Path) -> None:
    def body(ranks: ThreadCollective) -> list[dict[str, object]]:
        options = {"sizes": [4096], "dtypes": ["float32", "bfloat16"], "uneven": [0.0, 0.5]}
        return measure(ranks, **options, per_node=2, repeats=2, device="cpu")  # type: ignore[arg-type]

    rows = on_threads(4, body)[0]
    assert len(rows) == 2 * 2 * 2
    even = [r for r in rows if r["uneven"] == 0.0]
    for r in even:
        assert r["bytes"] == 4096
        assert r["busbw_bytes_per_s"] == pytest.approx(r["algbw_bytes_per_s"] * 3 / 4)  # type: ignore[operator]
    assert {r["levels"] for r in rows} == {1, 2}
    plot(rows, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000
    assert busiest(np.array([[9, 1], [5, 0]])) == 5


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--ranks", "4", "--ranks-per-node", "3"])
    assert "divides 4 ranks" in capsys.readouterr().err
