"""The demo corpus: equal on every rank, split by file, batches that do not depend on the number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prophet.demo.text import Corpus, held_out_rows, load_corpus, rank_batch
from prophet.errors import TextError


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return load_corpus(max_bytes=1 << 20)


def test_the_standard_library_is_the_default(stdlib: Corpus) -> None:
    assert "standard library" in stdlib.source
    assert 900_000 < stdlib.train.size + stdlib.held_out.size <= 1 << 20
    assert stdlib.held_out.size > 20_000
    assert b"import" in stdlib.train.tobytes()
    again = load_corpus(max_bytes=1 << 20)
    assert np.array_equal(again.train, stdlib.train)
    assert np.array_equal(again.held_out, stdlib.held_out)


def folder(root: Path, files: int = 20) -> Path:
    for i in range(files):
        (root / f"sub{i % 3}").mkdir(exist_ok=True)
        (root / f"sub{i % 3}" / f"file{i:02}.txt").write_text(f"<{i:02}>" * 50)
    return root


def test_a_folder_is_split_by_file(tmp_path: Path) -> None:
    corpus = load_corpus(folder(tmp_path))
    train, held_out = corpus.train.tobytes().decode(), corpus.held_out.tobytes().decode()
    names = [f"<{i:02}>" for i in range(20)]
    assert sum(n in train for n in names) == 18
    assert sum(n in held_out for n in names) == 2
    assert not [n for n in names if n in train and n in held_out]


def test_what_is_not_text_is_passed_over(tmp_path: Path) -> None:
    before = load_corpus(folder(tmp_path))
    (tmp_path / "picture.bin").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "link.txt").symlink_to(tmp_path / "sub0" / "file00.txt")
    after = load_corpus(tmp_path)
    assert np.array_equal(before.train, after.train)
    assert np.array_equal(before.held_out, after.held_out)


def test_a_single_file_holds_out_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 101)))
    corpus = load_corpus(tmp_path / "a.txt")
    assert corpus.train.tolist() == list(range(1, 91))
    assert corpus.held_out.tolist() == list(range(91, 101))
    assert load_corpus(tmp_path / "a.txt", max_bytes=20).train.tolist() == list(range(1, 19))


def test_errors_say_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="a text file or a folder of them"):
        load_corpus(tmp_path / "absent")
    with pytest.raises(TextError, match="at least 10 text files in this folder, found 0"):
        load_corpus(tmp_path)
    (tmp_path / "b.bin").write_bytes(b"\0" * 10)
    with pytest.raises(TextError, match="expected text"):
        load_corpus(tmp_path / "b.bin")
    short = np.zeros(4, np.uint8)
    with pytest.raises(TextError, match="4 bytes, expected at least 9"):
        rank_batch(short, seed=0, step=0, sequences=4, length=8, rank=0, ranks=4)
    with pytest.raises(TextError, match="4 bytes, expected at least 9"):
        held_out_rows(short, sequences=1, length=8)
    with pytest.raises(ValueError, match="5 sequences cannot be divided among 4 ranks"):
        rank_batch(np.zeros(99, np.uint8), seed=0, step=0, sequences=5, length=8, rank=0, ranks=4)


def test_the_global_batch_does_not_depend_on_the_ranks(stdlib: Corpus) -> None:
    def whole(step: int, ranks: int, seed: int = 3) -> np.ndarray:
        return np.concatenate(
            [
                rank_batch(stdlib.train, seed=seed, step=step, sequences=8, length=16, rank=r, ranks=ranks)
                for r in range(ranks)
            ]
        )

    assert whole(0, 1).shape == (8, 17)
    for ranks in (2, 4, 8):
        assert np.array_equal(whole(5, 1), whole(5, ranks))
    assert not np.array_equal(whole(0, 1), whole(1, 1))
    assert not np.array_equal(whole(0, 1), whole(0, 1, seed=4))


def test_rows_are_text_and_reach_both_ends() -> None:
    data = np.arange(1, 12, dtype=np.uint8)
    seen = set()
    for step in range(50):
        for row in rank_batch(data, seed=0, step=step, sequences=2, length=9, rank=0, ranks=1):
            assert (np.diff(row) == 1).all()
            seen.add(int(row[0]))
    assert seen == {1, 2}
    rows = held_out_rows(data, sequences=2, length=9)
    assert rows[0, 0] == 1
    assert rows[-1, -1] == 11
