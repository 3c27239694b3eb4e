"""Boxes through files: what one set of boxes has written, another reads; gaps and other tensors are refused."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from prophet.errors import CheckpointError, SpecError
from prophet.state.checkpoint.files import Boxes, Files, by_tensor, write
from prophet.state.checkpoint.folder import DESCRIPTION, read_description, tensors_of
from prophet.state.json_values import from_json, to_json
from prophet.state.layout import Piece, slice_box
from prophet.state.space import Box, Space, TensorSpec

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SPACE = Space((TensorSpec(name="a", shape=(7, 5)), TensorSpec(name="b", shape=(), dtype="int64")))
WHOLE = {"a": torch.arange(35.0).reshape(7, 5), "b": torch.tensor(3)}


def cut(parts: int, dim: int = 0) -> dict[Piece, torch.Tensor]:
    boxes = [Piece("a", slice_box((7, 5), dim, parts, k)) for k in range(parts)]
    return {p: WHOLE[p.name][p.box.slices(SPACE[p.name].box)] for p in (*boxes, Piece("b", Box((), ())))}


def alone(what: str, call: Any) -> list[Any]:
    return [call()]


def saved(folder: Path, number: int = 1, parts: int = 3) -> Files:
    write(folder, number, {"step": number}, by_tensor(SPACE, cut(parts)), alone)
    return Files(tensors_of(folder, read_description(folder)))


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("dim", [0, 1])
def test_any_boxes_are_read_from_any_others(parts: int, dim: int, tmp_path: Path) -> None:
    files = saved(tmp_path)
    files.check_space(SPACE)
    wanted = cut(parts, dim)
    state = {piece: torch.full_like(t, -1) for piece, t in wanted.items()}
    files.read(by_tensor(SPACE, state), tmp_path)
    assert all(torch.equal(state[piece], t) for piece, t in wanted.items())


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    saved(tmp_path)
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    half = {piece: t for piece, t in cut(2).items() if piece.box.start[:1] != (0,)}
    with pytest.raises(CheckpointError, match=r"no file holds a\[0:4, 0:5\]"):
        write(tmp_path, 2, {}, by_tensor(SPACE, half), alone)
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before
    assert read_description(tmp_path)["step"] == 1


def test_a_file_that_lacks_its_last_byte_is_refused(tmp_path: Path) -> None:
    (file,) = saved(tmp_path).tensors.glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=f"at least {len(whole)} bytes, got {len(whole) - 1}: the copy is inc"):
        Files(file.parent)


def test_a_save_takes_the_place_of_a_damaged_one(tmp_path: Path) -> None:
    before = saved(tmp_path)
    (tmp_path / DESCRIPTION).write_text("{")
    saved(tmp_path, 2).check_space(SPACE)
    assert read_description(tmp_path)["step"] == 2
    assert not before.tensors.exists()


def test_a_gap_in_the_index_is_refused(tmp_path: Path) -> None:
    files = saved(tmp_path)
    path = files.tensors / ".metadata"
    good = path.read_bytes()
    index: Metadata = pickle.loads(good)
    index.state_dict_metadata["a"].chunks.pop(1)  # type: ignore[union-attr]
    path.write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"no file holds a\[3:5, 0:5\]"):
        Files(files.tensors).check_space(SPACE)
    index = pickle.loads(good)
    extra = ChunkStorageMetadata(offsets=torch.Size((0, 0)), sizes=torch.Size((7, 5)))
    index.state_dict_metadata["a"].chunks = [extra]  # type: ignore[union-attr]
    index.storage_data = {k: v for k, v in index.storage_data.items() if k.fqn != "a"}
    path.write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="names a part of a that no file holds"):
        Files(files.tensors).check_space(SPACE)


@pytest.mark.parametrize("other", [{"shape": (7, 6)}, {"dtype": "float64"}, {"name": "c"}])
def test_a_description_of_other_tensors_is_refused(other: dict[str, Any], tmp_path: Path) -> None:
    spec = TensorSpec(**{"name": "a", "shape": (7, 5), **other})
    with pytest.raises(CheckpointError, match="as the description says, the files have"):
        saved(tmp_path).check_space(Space((spec,)))


def test_a_description_names_tensors_within_the_folder(tmp_path: Path) -> None:
    for name in ("../x", "/etc", 3, None, "tensors-1"):
        with pytest.raises(CheckpointError, match="files: expected the name of a folder of tensors"):
            tensors_of(tmp_path, {"files": name})
    (tmp_path / DESCRIPTION).write_text("{")
    with pytest.raises(CheckpointError, match=r"training\.json: expected a description"):
        read_description(tmp_path)
    assert Boxes((2,), torch.float32).size() == (2,)


VALUE = {
    "numbers": [1, 2.5, True, None, float("inf"), np.float64(0.5)],
    "betas": (0.9, (0.8, "x")),
    "counts": Counter({3: 2, 5: 1}),
    "tuple": {"entries": 1},
    "tensors": [
        torch.tensor([1.5, float("nan")]),
        torch.zeros(0, 2),
        torch.tensor(True),
        torch.ones(2, dtype=torch.bfloat16),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor([1 + 2j]).conj().imag,  # negated when it is read
    ],
}


def test_values_come_back_from_words_as_they_were() -> None:
    found = from_json(json.loads(json.dumps(to_json(VALUE, "it"))))
    plain = dict(VALUE)
    tensors, back = plain.pop("tensors"), found.pop("tensors")
    assert found == plain
    assert type(found["betas"]) is tuple
    for a, b in zip(tensors, back, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize(
    "words",
    [
        {"tuple": 3},
        {"entries": [[[1], 2]]},
        {"entries": [[1]]},
        {"tuple": [], "x": 1},
        {"tensor: dtype, shape, bytes in base 64": ["torch.load", [1], ""]},
        {"tensor: dtype, shape, bytes in base 64": ["torch.float32", [2], "AAAAAA=="]},
        {"tensor: dtype, shape, bytes in base 64": ["torch.float32", [-1], "AAAAAA=="]},
        {"tensor: dtype, shape, bytes in base 64": ["torch.float32", [1], "AAAA!AA=="]},
    ],
)
def test_words_that_nobody_said_are_refused(words: Any) -> None:
    with pytest.raises(SpecError, match="expected a value as it is saved"):
        from_json({"a": [words]})


LARGE = torch.zeros(3)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(
            (value, r" is a tensor of torch.float32 \[3\]; expected at most 8 bytes of")
            for value in (LARGE, [LARGE], (LARGE,), {"a": LARGE}, {1: LARGE})
        ),
        (torch.zeros(1, dtype=torch.complex64), r"^it is a tensor of torch.complex64 \[1\]"),
        (torch.zeros(1, device="meta"), "^it is a Tensor; expected numbers"),
        ({"a": {(1, 2): 3}}, r"^it\['a'\] is a dict; expected numbers"),
    ],
)
def test_what_has_no_words_is_named(value: Any, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        to_json(value, "it", most_bytes=8)
