"""Checkpoints from outside: what torch would unpickle is not run, and damage is refused by the file's name."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

import prophet
from prophet.engine.checkpoint import training as checkpoint
from prophet.errors import CheckpointError
from prophet.state.checkpoint.tensor_index import TensorReader
from tests.helpers.fuzzing import VALUES, Format, Payload, feed, mutated, replaced

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
INDEXES, LOADS = 2000, 400


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = prophet.MoE(dim=4, hidden=6, num_experts=4, top_k=2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    folder = tmp_path_factory.mktemp("saved")
    checkpoint.save(folder, model, optimizer, extra={"step": 1, "t": torch.ones(2)})
    return folder


def index_of(folder: Path) -> Path:
    """The index that is read: the one beside the tensors."""
    return next(iter(sorted(folder.rglob("*.distcp")))).parent / ".metadata"


def indexes(folder: Path) -> Format:
    """torch's index, damaged as bytes and as a pickle of other objects."""
    valid = index_of(folder).read_bytes()
    good: Metadata = pickle.loads(valid)

    def wrong(rng: random.Random) -> tuple[bytes, tuple[str, ...]]:
        found: Metadata = pickle.loads(valid)
        name, place = rng.choice([*found.state_dict_metadata]), rng.choice([*found.storage_data])
        entry, part = found.state_dict_metadata[name], found.storage_data[place]
        field = rng.choice(("state_dict_metadata", "storage_data", "planner_data", "size", "chunks", "part"))
        odd = rng.choice((3, "x", [1], (1,), -1, [None]))
        if field in ("size", "chunks"):
            setattr(entry, field, odd if field == "size" else [odd])
        elif field == "part":
            numbers = (-1, "x", 1 << 63, True)
            attribute = rng.choice(("relative_path", "offset", "length", "transform_descriptors"))
            values: dict[str, tuple[object, ...]] = {
                "relative_path": ("../x", "..", "/etc/passwd", "", "a/b", 3, None),
                "transform_descriptors": (["zstd"], ("x",)),
            }
            value = rng.choice(values.get(attribute, numbers))
            found.storage_data[place] = dataclasses.replace(part, **{attribute: value})
        else:
            setattr(found, field, odd)
        words = {"size": "state_dict_metadata", "chunks": "state_dict_metadata", "part": "storage_data"}
        return pickle.dumps(found), (words.get(field, field),)

    return Format(
        name="torch's index", file=".metadata", valid=(valid, pickle.dumps(good, protocol=5)),
        read=lambda file: TensorReader(file.parent).read_metadata(), error=CheckpointError, wrong=wrong,
    )  # fmt: skip


def test_a_damaged_index_is_refused_by_name(tmp_path: Path) -> None:
    """Of a model alone: its index has all that one with an optimizer's state has, in fewer entries."""
    checkpoint.save(tmp_path / "saved", prophet.MoE(dim=4, hidden=6, num_experts=4, top_k=2))
    print(feed(indexes(tmp_path / "saved"), tmp_path, files=INDEXES, seed=1))


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04" + b")" + b"\x85" * 1_000_000 + b".",  # a million tuples in each other
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",  # a byte array of a terabyte
        b"\x80\x04K\x01r\xff\xff\xff\x7f.",  # a place far beyond all others
        b"\x80\x04cos\nsystem\n\x8c\x04true\x85R.",
        b"\x80\x04cbuiltins\neval\n\x8c\x011\x85R.",
        b"\x80\x04ctorch.serialization\nload\n\x8c\x01x\x85R.",
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x01xK\x01s\x86b.",  # fields for a class
    ],
)
def test_what_no_index_holds_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata: expected torch's index of the tensors"):
        TensorReader(tmp_path).read_metadata()
    assert not hasattr(Metadata, "x")


def test_a_payload_is_named_and_not_run(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"\.metadata: .*an index has no os\.makedirs; it was not run"):
        TensorReader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()


def test_a_damaged_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    """The description, as bytes and field by field, read into a model and its optimizer as `load` does it."""
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    model = prophet.MoE(dim=4, hidden=6, num_experts=4, top_k=2)
    optimizer = torch.optim.AdamW(model.parameters())
    document = json.loads((saved / "training.json").read_text())
    fields = [
        *(((name,), VALUES) for name in ("format", "optimizer", "groups", "states", "extra")),
        *((("groups", 0, name), VALUES) for name in ("parameters", "settings")),
        *((("states", "gate.weight", "exp_avg", name), VALUES) for name in ("dtype", "shape")),
        (("states", "gate.weight", "step", "value"), VALUES),
    ]
    rng = random.Random(1)
    valid = ((saved / "training.json").read_bytes(),)
    wrong: list[str] = []
    for i in range(LOADS):
        content = (
            json.dumps(replaced(rng, document, fields)[0]).encode() if i % 2 else mutated(rng, valid, b"\x80\x04N.")
        )
        (folder / "training.json").write_bytes(content)
        try:
            checkpoint.load(folder, model, optimizer)
        except CheckpointError as error:
            if str(folder) not in str(error):
                wrong.append(f"no file named: {error}")
        except BaseException as error:
            wrong.append(f"{type(error).__name__}: {error!s:.100} from {content[:80]!r}")
    assert not wrong, f"{len(wrong)}: {wrong[:5]!a}"
