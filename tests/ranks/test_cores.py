"""How many cores a process may use, from made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from prophet.ranks.cores import usable_cores


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def siblings(name: str, *groups: str) -> dict[str, str]:
    """Topology files of every hardware thread in the groups, such as "0,4"."""
    return {f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": group for group in groups for cpu in group.split(",")}


def test_without_any_source_every_cpu_is_a_core(tmp_path: Path) -> None:
    assert usable_cores(root=tmp_path, cpus=range(6)) == 6
    assert usable_cores(root=tmp_path, cpus=()) == 1


@pytest.mark.parametrize("name", ["thread_siblings_list", "core_cpus_list"])
def test_hardware_threads_of_one_core_count_once(tmp_path: Path, name: str) -> None:
    root = machine(tmp_path, siblings(name, "0,4", "1,5", "2,6", "3,7"))
    assert usable_cores(root=root, cpus=range(8)) == 4
    assert usable_cores(root=root, cpus=(0, 4)) == 1
    assert usable_cores(root=root, cpus=(0, 1, 4)) == 2


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 8), ("300000 100000", 3), ("250000 100000", 2), ("50000 100000", 1), ("odd", 8)]
)
def test_the_quota_of_a_group_v2(tmp_path: Path, text: str, cores: int) -> None:
    root = machine(tmp_path, {"proc/self/cgroup": "0::/pod/box", "sys/fs/cgroup/pod/box/cpu.max": text})
    assert usable_cores(root=root, cpus=range(8)) == cores


def test_a_parent_limits_its_group(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/b/cpu.max": "600000 100000", "sys/fs/cgroup/a/cpu.max": "200000 100000"}
    root = machine(tmp_path, {"proc/self/cgroup": "0::/a/b", **files})
    assert usable_cores(root=root, cpus=range(8)) == 2


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("400000", 4)])
def test_the_quota_of_a_group_v1(tmp_path: Path, mount: str, quota: str, cores: int) -> None:
    folder = f"sys/fs/cgroup/{mount}/docker/1a2b"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"}
    root = machine(tmp_path, {"proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/docker/1a2b\n0::/", **files})
    assert usable_cores(root=root, cpus=range(8)) == cores


def test_in_a_container_the_path_may_be_the_hosts(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000"}
    root = machine(tmp_path, {"proc/self/cgroup": "1:cpu:/docker/not-mounted-here", **files})
    assert usable_cores(root=root, cpus=range(8)) == 3


def test_this_machine_has_at_least_one() -> None:
    assert usable_cores() >= 1
