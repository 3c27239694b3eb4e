"""Machines by name: presets and topology files, with and without a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from prophet.errors import SpecError, TopologyError
from prophet.machine.models import MODELS
from prophet.machine.named import machine_named
from prophet.machine.presets import PRESET_NAMES, get_preset
from prophet.machine.topology import write_topology
from prophet.spec import Topology

MEASURED = Topology.uniform(4, flops_per_s=3e11, name="here")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_topology(tmp_path / "m.toml", MEASURED)
    return tmp_path / "m.toml"


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_a_preset_is_its_cluster_and_model(name: str) -> None:
    found, preset = machine_named(name), get_preset(name)
    assert found.model == preset.model
    assert found.ranks is None
    assert found.topology(16) == preset.cluster.topology(16)
    assert found.element_bytes == preset.cluster.element_bytes
    assert found.label(preset.model) == name


def test_a_cluster_alone_has_its_usual_model() -> None:
    assert machine_named("h100-ib").model == get_preset("h100-ib").model


def test_a_file_has_its_ranks_and_no_model_unless_one_is_named(file: Path) -> None:
    alone, with_model = machine_named(str(file)), machine_named(f"{file}:MoE-GPT-S")
    assert alone.model is None
    assert with_model.model == MODELS["MoE-GPT-S"]
    for found in (alone, with_model):
        assert (found.name, found.ranks) == (f"here ({file})", 4)
        assert found.topology(8) == MEASURED
        assert found.element_bytes == 4
    assert with_model.label(MODELS["MoE-GPT-S"]) == f"here ({file}), MoE-GPT-S"


def test_a_file_may_have_any_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    for name in ("machine", "a:b.toml"):
        file.rename(file.parent / name)
        assert machine_named(name).ranks == 4
        file = file.parent / name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "h100-nvlin",
            r"no machine 'h100-nvlin'; did you mean 'h100-nvlink'.* or give the path of a topology file",
        ),
        ("h100-ib:Mixtral", "no model 'Mixtral'; did you mean 'Mixtral-8x7B'"),
        ("FILE:Mixtral", "no model 'Mixtral'; did you mean 'Mixtral-8x7B'"),
        ("", "no machine ''|expected a topology file"),
    ],
)
def test_names_that_name_nothing(file: Path, text: str, words: str) -> None:
    with pytest.raises((SpecError, TopologyError), match=words):
        machine_named(text.replace("FILE", str(file)))


def test_a_file_that_is_not_there_is_named() -> None:
    for text in ("none.toml", "none.toml:Mixtral-8x7B", "folder/none"):
        with pytest.raises(TopologyError, match=f"{text.partition(':')[0]}: expected a topology file"):
            machine_named(text)
