"""DeepSpeed's own tests of its MoE layers, with balanced experts behind `deepspeed.initialize`.

PEERS_DEEPSPEED names a checkout of DeepSpeed. Its tests run on a copy, unchanged but for what `INJECTED` adds to their
common module: the import, a default section, and what lets 16-bit tests run on a CPU. `make test-peers` runs this, and
with `ARGS="-k 'TestMoE and 2-4'"` a part of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 400  # for one of them
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S + 60)]
COPIES = "copies.txt"
INJECTED = f"""
import deepspeed.ops
import prophet
import prophet_deepspeed
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

prophet_deepspeed.install(section={{"planner": "top2"}})
CPU_Accelerator.is_fp16_supported = lambda self: True  # torch computes fp16 on every processor
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes a minute

_finish_step = prophet.Engine.finish_step


def _counted(engine):
    _finish_step(engine)
    if engine.last_step is not None and engine.collective.rank == 0:
        with open({COPIES!r}, "a") as file:
            print(int(engine.last_step.copies.sum()), file=file)


prophet.Engine.finish_step = _counted
"""
# of the release 0.19.8, in which an attribute is gone that the tests of 0.19.6 still compare
GONE = "saved_model.sparse_tensor_module_names"

MOE, TP, CHECKPOINT = "test_moe.py", "test_moe_tp.py", "test_moe_checkpoint.py"
WHOLE = [  # every rank holds all experts: there is nothing to copy
    *(f"{MOE}::TestSimpleMoE::test[{stage}]" for stage in (0, 1, 2)),
    f"{MOE}::TestMoESingleton::test_all_to_all[single]",
]
ONE_STEP = [f"{MOE}::TestExpertWeightGradWithZero::test[{stage}]" for stage in (0, 1, 2)]  # no history to plan from
BALANCED = [
    *(f"{MOE}::TestMoE::test[{r}-{z}-{ep}]" for r in (True, False) for z in (0, 1, 2) for ep in (2, 4)),
    *(f"{MOE}::TestPRMoE::test[2-{residual}]" for residual in (True, False)),
    f"{CHECKPOINT}::TestMoECheckpoint::test_checkpoint_moe[4]",
    *(
        f"{CHECKPOINT}::TestMoECheckpoint::test_checkpoint_moe_and_zero[{case}]"
        for case in ("4-True", "4-False", "2-True", "2-False")
    ),
]
# It counts calls of a function inside DeepSpeed's own layer, two in a forward pass. A balanced layer makes none.
COUNTS_CALLS = f"{MOE}::TestMoESingleton::test_all_to_all[multi]"
TWO_CALLS, NO_CALLS = "[(1, 0), (2, 2)]", "[(1, 0), (2, 0)]"
TENSOR_PARALLEL = [f"{TP}::TestMOETensorParallel::test[True-True-{sizes}]" for sizes in ("1-2", "1-4", "2-2")]


@dataclass(frozen=True)
class Outcome:
    """passed, failure, error or skipped; what was said; replicas in force by step, of every group of experts."""

    kind: str
    text: str
    copies: list[int]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of DeepSpeed's tests, in a folder of its own, so that the installed DeepSpeed is the one imported."""
    pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")
    given = os.environ.get("PEERS_DEEPSPEED")
    if not given:
        pytest.skip("PEERS_DEEPSPEED names no checkout of DeepSpeed")
    source = Path(given) / "tests"
    if not (source / "unit" / "common.py").exists():
        pytest.fail(f"PEERS_DEEPSPEED: expected a checkout of DeepSpeed with its tests, found none in {given}")
    folder = tmp_path_factory.mktemp("deepspeed") / "tests"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("inference", "compression", "hybrid_engine"))
    with (folder / "unit" / "common.py").open("a") as common:
        common.write(INJECTED)
    compared = folder / "unit" / "checkpoint" / "common.py"
    lines = compared.read_text().splitlines(keepends=True)
    compared.write_text("".join(line for line in lines if GONE not in line))
    return folder


def path_of(suite: Path, file: str) -> Path:
    """Releases have it in different folders."""
    return next((suite / "unit").rglob(file))


def outcome(suite: Path, name: str) -> Outcome:
    """Run one test of DeepSpeed's in a process of its own."""
    file, _, case = name.partition("::")
    copies, report = suite / COPIES, suite / "found.xml"
    for left in (copies, report):
        left.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")]),
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "4",  # without it the CPU counts as one device, and tests of several are skipped
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            f"{path_of(suite, file)}::{case}",
        ],
        cwd=suite,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            printed, _ = running.communicate(timeout=LIMIT_S)
        except BaseException:
            os.killpg(running.pid, signal.SIGKILL)  # the ranks, too
            raise
    assert report.exists(), printed[-4000:]
    (ran,) = ElementTree.parse(report).iter("testcase")
    bad = next((c for c in ran if c.tag in ("failure", "error", "skipped")), None)
    text = "" if bad is None else f"{bad.attrib.get('message', '')}\n{bad.text or ''}"
    steps = [int(line) for line in copies.read_text().split()] if copies.exists() else []
    print(f"{name}: {sum(n > 0 for n in steps)} of {len(steps)} steps with replicas, {sum(steps)} in all")
    return Outcome("passed" if bad is None else bad.tag, text, steps)


@pytest.mark.parametrize("name", WHOLE + ONE_STEP)
def test_deepspeeds_own_test_passes(name: str, suite: Path) -> None:
    found = outcome(suite, name)
    assert found.kind == "passed", found.text[-3000:]


@pytest.mark.parametrize("name", BALANCED)
def test_deepspeeds_own_test_passes_with_replicas(name: str, suite: Path) -> None:
    found = outcome(suite, name)
    assert found.kind == "passed", found.text[-3000:]
    assert sum(n > 0 for n in found.copies) > len(found.copies) / 2


def test_the_test_that_counts_calls_passes_with_their_number_alone_changed(suite: Path) -> None:
    found = outcome(suite, COUNTS_CALLS)
    assert found.kind == "failure"
    assert "assert len(all_to_all_calls) == expected_calls" in found.text
    file = path_of(suite, MOE)
    source = file.read_text()
    assert source.count(TWO_CALLS) == 1
    file.write_text(source.replace(TWO_CALLS, NO_CALLS))
    try:
        found = outcome(suite, COUNTS_CALLS)
    finally:
        file.write_text(source)
    assert found.kind == "passed", found.text[-3000:]


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_tensor_parallelism_is_refused_by_name(name: str, suite: Path) -> None:
    found = outcome(suite, name)
    assert found.kind == "failure"
    assert "ConfigError" in found.text
    assert "mpu" in found.text
