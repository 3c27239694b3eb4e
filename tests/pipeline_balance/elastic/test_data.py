"""Global batches: one position, the same samples in every layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pipeline_balance.elastic.data import Batches, GlobalBatches, Stream, cuts, microbatches_of, rows_from, rows_of
from prophet.errors import SpecError

NUMBERS = torch.arange(23)


class _Counts(Dataset[tuple[int, int]]):
    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 23

    def __getitem__(self, i: int) -> tuple[int, int]:
        self.read.append(i)
        return i, -i


@given(st.integers(1, 6), st.integers(1, 12), st.booleans(), st.integers(0, 3))
@settings(deadline=None)
def test_replicas_read_every_sample_once(replicas: int, wanted: int, shuffle: bool, seed: int) -> None:
    parts = microbatches_of(wanted, replicas) * replicas
    assert wanted <= parts < wanted + replicas
    batch = 12 if parts > 7 else 7
    if parts > batch:
        with pytest.raises(SpecError, match="cannot be cut into"):
            cuts(batch, parts)
        return
    data = Batches(TensorDataset(NUMBERS, -NUMBERS), batch, shuffle=shuffle, seed=seed)
    for _ in range(4):
        whole = data.read(0, batch)[0]
        pieces = [data.read(a, b) for a, b in cuts(batch, parts)]
        assert torch.equal(torch.cat([x for x, _ in pieces]), whole)
        assert torch.equal(torch.cat([y for _, y in pieces]), -whole)
        assert max(len(x) for x, _ in pieces) - min(len(x) for x, _ in pieces) <= 1
        data.advance()
    assert data.position == 4 * batch


def test_an_epoch_has_every_sample_and_its_own_order() -> None:
    data = Batches(TensorDataset(NUMBERS, NUMBERS), 5, seed=1)
    epochs = []
    for _ in range(2):
        seen: list[int] = []
        for _ in range(4):  # the rest of three samples is left out
            seen += data.read(0, 5)[0].tolist()
            data.advance()
        assert len(set(seen)) == 20
        epochs.append(seen)
    assert epochs[0] != epochs[1]
    other = Batches(TensorDataset(NUMBERS, NUMBERS), 5, seed=2)
    assert other.read(0, 5)[0].tolist() != epochs[0][:5]
    again = Batches(TensorDataset(NUMBERS, NUMBERS), 5, seed=1)
    again.position = 25
    assert again.read(0, 5)[0].tolist() == epochs[1][5:10]


def test_a_rank_reads_its_own_rows_alone() -> None:
    counts = _Counts()
    data = Batches(counts, 8, shuffle=False)
    data.position = 8
    data.read(2, 5)
    assert counts.read == [10, 11, 12]


def test_a_batch_is_whole_at_a_position_that_another_batch_size_has_left() -> None:
    data = Batches(_Counts(), 5, shuffle=False)
    go = data.reach(18)  # an epoch has 20 of the 23 samples
    assert data.position == 0
    go()
    assert data.read(0, 5)[0].tolist() == [18, 19, 0, 1, 2]
    assert data.read(1, 3)[0].tolist() == [19, 0]


def test_a_stream_begins_anew_and_counts_samples() -> None:
    loader = DataLoader(TensorDataset(NUMBERS, NUMBERS), batch_size=10)
    data: GlobalBatches = Stream(loader)
    seen = []
    for _ in range(4):
        rows = data.rows()
        seen.append(data.read(0, rows)[0].tolist())
        assert data.read(1, 2)[0].tolist() == seen[-1][1:2]
        data.advance()
    assert seen[0] == seen[3] == list(range(10))
    assert data.position == 33


def test_a_stream_goes_to_a_position_when_all_are_ready() -> None:
    loader = DataLoader(TensorDataset(NUMBERS, NUMBERS), batch_size=10)
    data = Stream(loader)
    data.advance()
    go = data.reach(33)
    assert (data.position, data.read(0, 1)[0].tolist()) == (10, [10])
    go()
    assert (data.position, data.read(0, 2)[0].tolist()) == (33, [10, 11])
    data.reach(33)()
    assert data.read(0, 2)[0].tolist() == [10, 11]
    with pytest.raises(SpecError, match="no batch of data begins at sample 15: one ends at 20"):
        data.reach(15)
    once = Stream(iter(loader))
    once.advance()
    once.reach(10)()
    with pytest.raises(SpecError, match="an iterator, which cannot begin anew to go to sample 20"):
        once.reach(20)
    assert once.read(0, 1)[0].tolist() == [10]


@pytest.mark.parametrize(
    ("batches", "words"), [([], "data has no batch"), ([torch.zeros(2)], r"data must give \(inputs, labels\)")]
)
def test_data_of_another_kind_is_refused(batches: list[object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Stream(batches).rows()


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(SpecError, match="batch_size must be from 1 to the dataset's 23 samples, got 24"):
        Batches(_Counts(), 24)


def test_rows_of_named_inputs() -> None:
    batch = {"ids": torch.zeros(4, 2), "mask": torch.ones(4)}
    assert rows_of(batch) == 4
    assert {n: len(t) for n, t in rows_from(batch, 1, 4).items()} == {"ids": 3, "mask": 3}
    assert rows_from(None, 1, 4) is None
