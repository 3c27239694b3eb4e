"""Topology files: what is written is read back; what is wrong is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prophet.errors import TopologyError
from prophet.machine.topology import MAX_FILE_BYTES, read_fits, read_topology, write_topology
from prophet.spec import Link, Topology

positive = st.floats(1e-3, 1e18)
links = st.builds(Link, bytes_per_s=positive, latency_s=st.floats(0, 10))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    ranks = draw(st.integers(1, 9))
    return Topology(
        ranks=ranks,
        ranks_per_node=draw(st.integers(1, 9)),
        intra=draw(links),
        inter=draw(links),
        flops_per_s=tuple(draw(st.lists(positive, min_size=ranks, max_size=ranks))),
        free_bytes=tuple(draw(st.lists(st.integers(0, 1 << 50), min_size=ranks, max_size=ranks))),
        expert_overhead_s=draw(st.floats(0, 1)),
        call_overhead_s=draw(st.floats(0, 1)),
        trans_rate=draw(st.floats(0.01, 10)),
        agg_rate=draw(st.floats(0.01, 10)),
        overlap_cost=draw(st.floats(0, 0.99)),
        backward_ratio=draw(st.floats(0.1, 10)),
        compute_noise=draw(st.floats(0, 1)),
        exchange_noise_s=draw(st.floats(0, 1)),
        duplex_cost=draw(st.floats(0, 1)),
        link_overlap_cost=draw(st.floats(0, 1)),
        port_bytes_per_s=draw(st.none() | positive),
        name=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
    )


def test_numbers_of_numpy_are_written_as_numbers(tmp_path: Path) -> None:
    topology = Topology.uniform(2, intra=Link(bytes_per_s=np.float64(1e9)), expert_overhead_s=np.float32(0.5))  # type: ignore[arg-type]
    write_topology(tmp_path / "t.toml", topology)
    assert read_topology(tmp_path / "t.toml") == topology


@given(topologies())
def test_what_is_written_is_read_back(topology: Topology) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "sub", "t.toml")
        write_topology(file, topology, fits={"a2a_intra": {"fixed_s": 1e-5}})
        assert read_topology(file) == topology
        assert read_fits(file) == {"a2a_intra": {"fixed_s": 1e-5}}


GOOD = """
format = 1
ranks = 2
ranks_per_node = 2
expert_overhead_s = 0
intra = {bytes_per_s = 1e9, latency_s = 1e-5}
inter = {bytes_per_s = 1e9, latency_s = 1e-5}
rank = {flops_per_s = 1e12, free_bytes = [1, 2]}
"""


def test_one_number_stands_for_all_ranks(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text(GOOD)
    found = read_topology(file)
    assert found.flops_per_s == (1e12, 1e12)
    assert found.free_bytes == (1, 2)
    assert found.call_overhead_s == 0.0  # a file of before there was such a figure
    assert (found.trans_rate, found.agg_rate) == (1.0, 1.0)
    assert found.port_bytes_per_s is None
    assert read_fits(file) == {}


def test_figures_that_were_not_measured_are_not_in_the_file(tmp_path: Path) -> None:
    """An older release reads such a file, what is named after its digest keeps its name, and its terms are off."""
    file = tmp_path / "t.toml"
    write_topology(file, Topology.uniform(2))
    written = file.read_text()
    figures = ("backward_ratio", "compute_noise", "exchange_noise_s", "duplex_cost", "link_overlap_cost")
    assert not any(name in written for name in figures)
    found = read_topology(file)
    assert [getattr(found, name) for name in figures] == [2.0, 0.0, 0.0, 0.0, 1.0]
    measured = dataclasses.replace(found, backward_ratio=np.float64(2.2), exchange_noise_s=0.1)
    write_topology(file, measured)
    assert "backward_ratio = 2.2\nexchange_noise_s = 0.1\n" in file.read_text()
    assert read_topology(file) == measured


def test_a_file_without_a_port_says_nothing_of_one(tmp_path: Path) -> None:
    """So that an older release reads it, and what is named after its digest keeps its name."""
    file = tmp_path / "t.toml"
    write_topology(file, Topology.uniform(2))
    assert "port" not in file.read_text()
    write_topology(file, Topology.uniform(2, port_bytes_per_s=np.float64(5e8)))
    assert "port_bytes_per_s = 500000000.0\n" in file.read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format = 1", "format = 2", "format: expected 1, got 2"),
        ("ranks = 2\n", "ranks = 0\n", "ranks: expected an integer from 1 to"),
        ("ranks = 2\n", "ranks = true\n", "ranks: expected an integer"),
        ("ranks = 2\n", "ranks = 99999999999\n", "ranks: expected an integer from 1 to 65536"),
        ("free_bytes = [1, 2]", "free_bytes = [1]", "rank.free_bytes: expected one number, or one per rank"),
        ("1e12", "nan", "rank.flops_per_s: expected a finite number"),
        ("1e12", "-1.0", "flops_per_s must be positive"),
        ("bytes_per_s = 1e9, latency_s = 1e-5}\ninter", "latency_s = 1e-5}\ninter", "intra.bytes_per_s: expected"),
        ("expert_overhead_s = 0", "expert_overhead = 0", "expert_overhead: unknown field"),
        ("ranks_per_node = 2", "ranks_per_node =", "expected TOML"),
        ("rank = {flops_per_s = 1e12, free_bytes = [1, 2]}", "rank = 3", "rank: expected a table"),
        ("inter = {bytes_per_s = 1e9, latency_s = 1e-5}", "inter = 7", "inter: expected a table"),
        ("format = 1", "format = 1\nname = 3", "name: expected a string"),
        ("format = 1", "format = 1\nport_bytes_per_s = '100G'", "port_bytes_per_s: expected a finite number"),
        ("format = 1", "format = 1\ncompute_noise = 1.5", "compute_noise must be from 0 to 1"),
        ("format = 1", "format = 1\nlink_overlap_cost = -1.0", "link_overlap_cost must be from 0 to 1"),
        ("format = 1", "format = 1\nbackward_ratio = 0.0", "backward_ratio must be positive"),
        ("format = 1", "format = 1\nport_bytes_per_s = inf", "port_bytes_per_s: expected a finite number"),
        ("format = 1", "format = 1\nport_bytes_per_s = 0.0", "port_bytes_per_s must be positive"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    file = tmp_path / "broken.toml"
    file.write_text(GOOD.replace(old, new))
    with pytest.raises(TopologyError, match=message) as caught:
        read_topology(file)
    assert "broken.toml" in str(caught.value)


def test_files_that_are_no_topology(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"nowhere\.toml: expected a topology file"):
        read_topology(tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TopologyError, match="expected TOML"):
        read_topology(tmp_path / "binary.toml")
    (tmp_path / "huge.toml").write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(TopologyError, match="expected at most"):
        read_topology(tmp_path / "huge.toml")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000)
    with pytest.raises(TopologyError, match="expected TOML"):
        read_topology(tmp_path / "deep.toml")


@pytest.mark.parametrize("fit", ["fit = 3", "fit = {trans = 3}", 'fit = {trans = {fixed_s = "long"}}'])
def test_fits_that_are_no_lines(tmp_path: Path, fit: str) -> None:
    (tmp_path / "t.toml").write_text(f"{fit}\n{GOOD}")
    with pytest.raises(TopologyError, match=r"t\.toml: fit"):
        read_fits(tmp_path / "t.toml")
