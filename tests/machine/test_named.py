"""Machines by name: presets and topology files."""

from __future__ import annotations

from pathlib import Path

import pytest

from prophet.errors import SpecError, TopologyError
from prophet.machine.models import MODELS
from prophet.machine.named import machine_named
from prophet.machine.presets import CLUSTERS
from prophet.machine.topology import write_topology
from prophet.spec import Topology

MEASURED = Topology.uniform(4, flops_per_s=3e11, name="here")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_topology(tmp_path / "m.toml", MEASURED)
    return tmp_path / "m.toml"


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_preset_comes_in_any_size_and_says_what_it_assumes(name: str) -> None:
    found, cluster = machine_named(name), CLUSTERS[name]
    assert found.ranks is None
    assert found.topology(16) == cluster.topology(16)
    assert (found.element_bytes, found.memory_bytes) == (cluster.element_bytes, cluster.memory_bytes)
    assert found.label(MODELS["DeepSeek-V3"]) == f"{name}:DeepSeek-V3"
    assert found.assumed is not None
    assert f"{name} reaches {cluster.flops_efficiency:.0%} of its stated operations" in found.assumed


def test_a_file_has_its_ranks_and_assumes_nothing(file: Path) -> None:
    found = machine_named(str(file))
    assert (found.name, found.ranks) == (f"here ({file})", 4)
    assert found.topology(8) == MEASURED
    assert (found.element_bytes, found.memory_bytes, found.assumed) == (4, None, None)
    assert found.label(MODELS["MoE-GPT-S"]) == f"here ({file}), MoE-GPT-S"


def test_a_file_may_have_any_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    for name in ("machine", "a:b.toml", "h100-ib:Mixtral-8x7B"):
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
        ("h100-ib:Mixtral-8x7B", "expected a machine alone.*: write --machine h100-ib --model Mixtral-8x7B"),
        ("FILE:Mixtral", "expected a machine alone.*: write --machine .*m.toml --model Mixtral"),
        ("none.toml:", "expected a machine alone.*: write --machine none.toml --model NAME"),
        ("", "no machine ''|expected a topology file"),
    ],
)
def test_names_that_name_nothing(file: Path, text: str, words: str) -> None:
    with pytest.raises((SpecError, TopologyError), match=words):
        machine_named(text.replace("FILE", str(file)))


def test_a_file_that_is_not_there_is_named() -> None:
    for text in ("none.toml", "folder/none"):
        with pytest.raises(TopologyError, match=f"{text}: expected a topology file"):
            machine_named(text)
