"""The emulated cluster: profiles as values, and hosts that are really set up, limited and removed."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks.cluster import kernel_objects as kernel
from benchmarks.cluster.profiles import BUILT_IN, ProfileError, load_profile, uniform
from benchmarks.cluster.testbed import HostFailed, Running, Testbed, TestbedError, TestbedUnavailable
from benchmarks.pacing import PLANNING_NICE, compute_cores, network_cores
from tests.helpers.cluster_testbed import needs_testbed

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = "tests.helpers.cluster_programs"


def two_hosts(**options: float) -> Testbed:
    return Testbed(uniform("two", hosts=2, share=options.pop("share", 0.4), **options))  # type: ignore[arg-type]


# --- profiles ---


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_profiles(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert sum(profile.share) <= 0.75  # of the core that they share


GOOD = """
nodes = 2
hosts_per_node = 2
link_mbit_per_s = 200
uplink_mbit_per_s = 100
share = 0.3
[[host]]
rank = 3
share = 0.1
link_mbit_per_s = 20
"""


def test_profile_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    profile = load_profile(str(path))
    assert profile.name == "mine"
    assert profile.share == (0.3, 0.3, 0.3, 0.1)
    assert profile.link_mbit_per_s == (200, 200, 200, 20)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nodes = 2", "nodes = 2.5", "nodes must be a whole number"),
        ("hosts_per_node = 2", "hosts_per_node = 4\nqueue_s = 9", "queue_s must be"),
        ("nodes = 2", "nodes = 4000", "must be 1..64"),
        ("share = 0.3", "", "share must be a number"),
        ("share = 0.3", "share = -1", "share must be at least"),
        ("rank = 3", "rank = 4", r"host\[0\].rank must be 0..3"),
        ("uplink_mbit_per_s = 100", "uplink = 100", "uplink_mbit_per_s must be a number"),
        ("share = 0.3", "share = 0.3\nspeed = 2", "unknown field.*speed"),
        ("[[host]]", "[host]", "array of tables"),
        ("nodes = 2", "nodes = [", "expected TOML"),
    ],
)
def test_bad_profile_files_name_file_and_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ProfileError, match=message) as error:
        load_profile(str(path))
    assert "mine.toml" in str(error.value)


def test_missing_profiles() -> None:
    with pytest.raises(ProfileError, match="there are four-hosts"):
        load_profile("five-hosts")
    with pytest.raises(ProfileError, match="expected a profile"):
        load_profile("nowhere/x.toml")


# --- commands and quotas, without touching the kernel ---


def test_commands_of_two_nodes() -> None:
    profile = uniform("x", hosts=4, nodes=2, uplink_mbit_per_s=100, share=0.1)
    names = kernel.namespace_commands(profile, "mp1-aaaa-")
    assert [n.removeprefix("netns add mp1-aaaa-") for n in names] == ["s0", "s1", "spine", "h0", "h1", "h2", "h3"]
    in_switch_1 = [lines for where, lines in kernel.setup_commands(profile, "mp1-aaaa-") if where == "mp1-aaaa-s1"]
    assert "link add p3 type veth peer name eth0 netns mp1-aaaa-h3" in in_switch_1[0]
    assert not any("add p1 " in line for line in in_switch_1[0])
    assert kernel.uplink_commands(profile, "mp1-aaaa-", 1, 100) == [
        ("mp1-aaaa-s1", "qdisc replace dev up0 root tbf rate 100000kbit burst 25kb latency 500ms"),
        ("mp1-aaaa-spine", "qdisc replace dev n1 root tbf rate 100000kbit burst 25kb latency 500ms"),
    ]


@pytest.mark.parametrize("version", [1, 2])
def test_quota_files(tmp_path: Path, version: int) -> None:
    quotas = kernel.Quotas(tmp_path, version)
    quotas.create("mp1-aaaa-", 0, 0.25)
    folder = tmp_path / "mp1-aaaa-h0"
    if version == 2:
        assert (folder / "cpu.max").read_text() == "2500 10000"
    else:
        assert (folder / "cpu.cfs_quota_us").read_text() == "2500"
    quotas.set_share("mp1-aaaa-", 0, 0.04)  # 0.4 ms per 10 ms is below the kernel's smallest quota
    if version == 2:
        assert (folder / "cpu.max").read_text() == "1200 30000"
    else:
        assert (folder / "cpu.cfs_period_us").read_text() == "30000"


def test_no_controller_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TestbedUnavailable, match="cpu controller"):
        kernel.Quotas.find(tmp_path)


def test_missing_tools_and_rights_are_clear_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(TestbedUnavailable, match="as root"):
        kernel.check_available()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "tc" else "/bin/x")
    with pytest.raises(TestbedUnavailable, match=r"'tc'.*iproute2"):
        kernel.check_available()


@pytest.mark.parametrize(
    ("cores", "written"), [((1,), "2"), ((0, 2, 3), "d"), ((31, 32), "1,80000000"), ((64,), "1,00000000,00000000")]
)
def test_cores_are_written_as_the_kernel_reads_them(cores: tuple[int, ...], written: str) -> None:
    assert kernel.mask(cores) == written


def test_only_own_names_are_removed() -> None:
    for prefix in ("", "mp", "mp12-", "mp12-zzzz-"):
        with pytest.raises(TestbedError, match="refusing"):
            kernel.remove_all(prefix, kernel.Quotas(Path("/nonexistent"), 1))


@needs_testbed
def test_more_cores_than_there_are() -> None:
    with pytest.raises(TestbedUnavailable, match="hands out"):
        Testbed(uniform("greedy", hosts=2, share=1000.0))
    with pytest.raises(TestbedUnavailable, match="to compute on: the hosts would be slower"):
        Testbed(uniform("paced", hosts=2, share=0.51 * len(compute_cores())), paced=True)


def test_nine_hosts_of_a_ninth_each_share_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "check_available", lambda: None)
    monkeypatch.setattr("benchmarks.pacing._cores", lambda: (0, 1))
    Testbed(uniform("ninths", hosts=9, share=1 / 9), paced=True)


# --- the real thing ---


@needs_testbed
def test_what_arrives_at_paced_hosts_is_worked_on_apart_from_what_they_compute() -> None:
    if not (cores := network_cores()):
        pytest.skip("one core")
    profile = uniform("arrives", hosts=2, share=0.25)
    with Testbed(profile, paced=True) as bed:
        for where in (kernel.namespace(bed.prefix, 1), kernel.switch(bed.prefix, 0)):
            show = ["ip", "netns", "exec", where, "sh", "-c", "cat /sys/class/net/*/queues/rx-*/rps_cpus"]
            found = {int(line.replace(",", ""), 16) for line in kernel.run(show).split()}
            assert found == {sum(1 << core for core in cores)}


@needs_testbed
def test_only_the_thread_that_is_paced_is_where_hosts_compute() -> None:
    """Also threads that begin later, whatever they do: those that plan would make other hosts' operators wait."""
    if not network_cores():
        pytest.skip("one core")
    with Testbed(uniform("apart", hosts=2, share=0.25), paced=True) as bed:
        for main, others in bed.run(f"{PROGRAMS}:cores_of_threads", {}, timeout_s=60):
            assert main == list(compute_cores())
            assert {"plans", "gloo waits"} <= others.keys()
            assert all(cores == list(network_cores()) for cores, _ in others.values())
            assert others["plans"][1] == PLANNING_NICE
            assert others["gloo waits"][1] == 0
            assert len([1 for _, nice in others.values() if nice == 0]) > 1
        both = sorted([*compute_cores(), *network_cores()])
        assert bed.run(f"{PROGRAMS}:cores_of_actions", {}, timeout_s=60) == [[list(compute_cores()), both]] * 2


def test_all_emulated_hosts_of_benchmarks_pace_themselves() -> None:
    """So all are pinned and steered alike; quotas are for tests of what happens when hosts change."""
    calls = [
        (file.name, {k.arg: ast.unparse(k.value) for k in node.keywords})
        for file in (ROOT / "benchmarks").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Testbed"
    ]
    assert len(calls) >= 6
    assert [file for file, given in calls if given.get("paced") != "True"] == []


@needs_testbed
def test_hosts_links_and_quotas() -> None:
    """One testbed for several questions: each costs the start of the interpreters."""
    with two_hosts(share=0.3) as bed:
        seen = bed.run(f"{PROGRAMS}:who", {"word": "x"}, timeout_s=60)
        assert [s["rank"] for s in seen] == [0, 1]
        assert all(s["interfaces"] == ["eth0", "lo"] and s["hosts"] == 2 and s["word"] == "x" for s in seen)

        fast = bed.run(f"{PROGRAMS}:ring", {"mbytes": 4}, timeout_s=60)
        bed.set_rate(1, 40)  # 5 MB/s
        slow = bed.run(f"{PROGRAMS}:ring", {"mbytes": 1.5}, timeout_s=60)
        assert max(fast) < 1.15 * 25e6
        assert min(fast) > 1.5 * max(slow)
        assert max(slow) < 1.15 * 5e6

        bed.set_share(1, 0.1)
        shares = bed.run(f"{PROGRAMS}:burn", {"seconds": 1.0}, timeout_s=60)
        assert shares[0] < 0.36
        assert shares[1] < 0.14
    assert bed.leftovers() == []


@needs_testbed
def test_paced_hosts_slow_their_operators_and_have_no_quota() -> None:
    with Testbed(uniform("paced", hosts=2, share=0.25), paced=True) as bed:
        for slowdown, groups in bed.run(f"{PROGRAMS}:paced_products", {"products": 60}, timeout_s=60):
            assert slowdown > 3.5  # more on a busy machine
            assert f"{bed.prefix}hosts\n" in groups
        quotas = kernel.check_available()
        folder = quotas.folder(bed.prefix, None)
        assert [f.name for f in quotas.root.glob(f"{bed.prefix}*")] == [folder.name]
        quota = folder / ("cpu.cfs_quota_us" if quotas.version == 1 else "cpu.max")
        assert quota.read_text().split()[0] in ("-1", "max")
        file, weight = kernel.WEIGHT[quotas.version]
        assert (folder / file).read_text().strip() == str(weight)
        for name, value in kernel.TCP_SETTINGS.items():
            file = f"/proc/sys/net/ipv4/{name}"
            assert kernel.run(["ip", "netns", "exec", kernel.namespace(bed.prefix, 1), "cat", file]).strip() == value
        with pytest.raises(TestbedError, match="no quota"):
            bed.set_share(0, 0.1)
    assert bed.leftovers() == []


@needs_testbed
def test_uplink_limits_traffic_between_nodes() -> None:
    with Testbed(uniform("nodes", hosts=2, nodes=2, uplink_mbit_per_s=40, share=0.4)) as bed:
        assert max(bed.run(f"{PROGRAMS}:ring", {"mbytes": 1.5}, timeout_s=60)) < 1.15 * 5e6
        with pytest.raises(ValueError, match="no uplink"):
            bed.set_uplink_rate(2, 10)
    assert bed.leftovers() == []


@needs_testbed
def test_a_shared_port_belongs_to_whoever_sends() -> None:
    """One rank of a node gets all of its port, four share it, and links inside the node are faster."""
    profile = load_profile("two-nodes-shared-ports")
    port, link = 80e6 / 8, 240e6 / 8
    alone, together, inside = [[0, 4]], [[r, 4 + r] for r in range(4)], [[0, 1]]
    with Testbed(profile, paced=True) as bed:
        job = {"rounds": [alone, together, inside], "mbytes": 4}
        found = bed.run(f"{PROGRAMS}:streams", job, timeout_s=90)
    assert 0.8 * port < found[4][0] < 1.15 * port
    # the last of four ends when all have passed: together they are as fast as one alone
    assert 0.8 * port < 4 * min(found[4 + r][1] for r in range(4)) < 1.15 * port
    assert 0.6 * link < found[1][2] < 1.15 * link
    assert bed.leftovers() == []


@needs_testbed
@pytest.mark.parametrize(("exits", "kind"), [(False, "ValueError: this host was told to fail"), (True, "status 7")])
def test_a_failing_host_is_named_and_the_others_are_ended(exits: bool, kind: str) -> None:
    with two_hosts() as bed:
        began = time.monotonic()
        with pytest.raises(HostFailed, match=f"host 1 of 'two'(?s:.*){kind}"):
            bed.run(f"{PROGRAMS}:fail_on", {"rank": 1, "others_s": 300, "exit": exits}, timeout_s=200, grace_s=0.5)
        assert time.monotonic() - began < 100
    assert bed.leftovers() == []


@needs_testbed
def test_a_hanging_host_meets_the_time_limit_and_a_killed_one_is_told() -> None:
    def kill(running: Running) -> None:
        running.wait_for(0, "hanging", timeout_s=30)
        running.signal(0, signal.SIGKILL)

    with two_hosts() as bed:
        running = bed.start(f"{PROGRAMS}:hang", {}, timeout_s=1.0)
        assert [r.error_type for r in running.wait()] == ["TimeLimit", "TimeLimit"]
        with pytest.raises(HostFailed, match=r"host 0.*Killed.*SIGKILL"):
            bed.run(f"{PROGRAMS}:hang", {}, timeout_s=60, grace_s=0.1, while_running=kill)
        # the children that the programs left behind are still there: the testbed takes them down
        assert any("process" in x for x in bed.leftovers())
    assert bed.leftovers() == []


@needs_testbed
def test_nothing_is_left_after_a_failure_inside() -> None:
    bed = two_hosts()

    def interrupted() -> None:
        with bed:
            bed.start(f"{PROGRAMS}:hang", {}, timeout_s=60)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert bed.leftovers() == []
    with pytest.raises(TestbedError, match="not set up"):
        bed.start(f"{PROGRAMS}:hang", {}, timeout_s=60)


@needs_testbed
def test_nothing_is_left_after_a_failure_during_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "bucket", lambda *_: "qdisc replace dev eth0 root nosuchqdisc")
    bed = two_hosts()
    with pytest.raises(TestbedError, match="qdisc kind is unknown"):
        bed.__enter__()
    assert bed.leftovers() == []


@needs_testbed
def test_the_guardian_cleans_up_after_a_killed_parent() -> None:
    code = (
        "from benchmarks.cluster.testbed import Testbed\n"
        "from benchmarks.cluster.profiles import uniform\n"
        "with Testbed(uniform('x', hosts=2, share=0.3)) as bed:\n"
        f"    bed.start('{PROGRAMS}:hang', {{}}, timeout_s=60).wait_for(0, 'hanging', timeout_s=60)\n"
        "    print(bed.prefix, flush=True)\n"
        "    input()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    prefix = child.stdout.readline().strip()
    quotas = kernel.check_available()
    assert kernel.PREFIX.match(prefix)
    assert kernel.leftovers(prefix, quotas)
    child.kill()
    child.wait()
    deadline = time.monotonic() + 20

    def left() -> list[str]:
        folders = Path(tempfile.gettempdir()).glob(f"{prefix}*")
        return kernel.leftovers(prefix, quotas) + [str(f) for f in folders]

    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left() == []
