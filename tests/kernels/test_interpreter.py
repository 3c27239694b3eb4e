"""Runs the Triton kernels' tests in Triton's interpreter, and compiles the kernels for a GPU that is not there.

Both need a process of their own: whether a kernel is interpreted is settled when Triton is imported.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from prophet.kernels.tuning import ARCHITECTURES, rule
from prophet.spec import ACTIVATIONS
from tests.helpers.oracle import LIMITED
from tests.helpers.own_process import passed, run
from tests.helpers.pretend_device import SUPPORTED

triton = pytest.importorskip("triton", reason="Triton is not installed")


def version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def passed_interpreted(*arguments: str) -> str:
    return passed("-p", "tests.helpers.interpreted", *arguments, told={"TRITON_INTERPRET": "1"})


INTERPRETER = pytest.mark.skipif(
    version(triton.__version__) < (3, 8) and version(np.__version__) >= (2, 4),
    reason="this Triton's interpreter fails with numpy 2.4",
)


# A GPU runs the kernels' own tests by `python -m tests.gpu`
KERNELS = [] if torch.cuda.is_available() else ["tests/gpu/test_kernels_triton.py"]


# What the interpreter would take minutes for, and how a layer's step goes, where kernels do not differ
GPU, ENGINES = "real_tile_shapes", "refetch or checkpointing or larger"


@INTERPRETER
def test_kernels_agree_with_their_definitions_and_layers_train_on_them_in_the_interpreter() -> None:
    names = f"triton and not ({GPU} or {ENGINES})"
    assert "skipped" not in passed_interpreted(*KERNELS, "tests/layer/test_moe.py", "-m", "not gpu", "-k", names)


@pytest.mark.slow
@INTERPRETER
def test_layers_train_on_kernels_in_the_interpreter_whatever_their_step() -> None:
    assert "skipped" not in passed_interpreted("tests/layer/test_moe.py", "-k", f"triton and ({ENGINES})")


@INTERPRETER
@pytest.mark.skipif(not SUPPORTED, reason="this torch knows no devices made in Python")
def test_a_step_waits_for_its_device_once_per_layer_and_launches_little() -> None:
    passed_interpreted("tests/engine/test_host_waits.py", "tests/engine/test_launches.py")


@pytest.mark.slow
@pytest.mark.skipif(not SUPPORTED, reason="this torch knows no devices made in Python")
def test_an_engines_tests_pass_on_a_device_that_is_not_the_host() -> None:
    names = ["engine/test_agreement", "engine/test_prediction", "engine/test_resume", "scheduler/test_recording"]
    names += ["engine/test_replan", "engine/test_stale_replicas"]
    passed("-p", "tests.helpers.pretended", *(f"tests/{name}.py" for name in names))


def compiled_for(arch: int, *names: str) -> list[dict[str, Any]]:
    done = run("tests.helpers.compile_for", str(arch), *names)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "tf32"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_tile_shape_compiles_and_fits(arch: int, dtype: str) -> None:
    """All tile shapes that the rule may choose, on Hopper those that are tuned over, in the grouped FFN's kernels."""
    rows = compiled_for(arch, dtype)
    assert {row["kernel"] for row in rows} == {
        "rows: product", "rows: swiglu", "rows: gelu", "rows: swiglu backward", "rows: gelu backward", "weights"
    }  # fmt: skip
    for row in rows:
        assert 0 < row["shared_bytes"] <= ARCHITECTURES[arch].shared_bytes, row
        assert row["async"], row  # weights are found through a table of addresses, and pipelined all the same
        if arch == 90 and dtype != "fp32" and row["tile"][0] >= 64:
            assert row["wgmma"], row  # Hopper's matrix instructions
    # 256 rows are tuned over, where a spill costs what is measured, and no rule chooses them
    ruled = [row for row in rows if arch != 90 or (row["tile"][1:] == [128, 64, 8, 3] and row["tile"][0] == 128)]
    assert len(ruled) >= 5 or dtype in ("fp32", "tf32")
    for row in ruled:
        assert row["spilled_bytes"] <= (64 if row["kernel"] == "weights" else 32), row


def test_few_rows_per_expert_fit_cards_with_little_shared_memory() -> None:
    """RTX 30 and 40, A10, L40S: 99 KiB for a program; a gated layer's weights would take more in four stages."""
    from prophet.kernels.grouped_ffn.kernel import ACT, fitting

    arch = ARCHITECTURES[86]
    for rows in (16, 32):
        ruled = rule("rows", torch.device("cuda"), torch.bfloat16, (rows, 4096, 4096))
        assert fitting(ruled, ACT, True, arch).stages == 3
        assert fitting(ruled, ACT, False, arch) == fitting(ruled, ACT, True, ARCHITECTURES[80]) == ruled


def test_the_other_kernels_compile_for_hopper() -> None:
    rows = compiled_for(90, "others")
    kernels = {row["kernel"] for row in rows}
    passes = {f"rows: {name}{end}" for name in (*ACTIVATIONS, *LIMITED) for end in ("", " backward")}
    assert passes - kernels == {"rows: gelu", "rows: gelu backward", "rows: swiglu", "rows: swiglu backward"}
    assert len(rows) == 18 + len(passes & kernels)
    assert all(row["shared_bytes"] <= ARCHITECTURES[90].shared_bytes for row in rows)


@pytest.mark.slow
def test_every_activation_fits_into_registers_in_large_tiles() -> None:
    rows = compiled_for(90, "activations")
    assert len(rows) == 2 * (len(ACTIVATIONS) + len(LIMITED) - 2)
    for row in rows:
        assert 0 < row["shared_bytes"] <= ARCHITECTURES[90].shared_bytes, row
        assert row["spilled_bytes"] <= 128, row  # the two accumulators of gated ones fill the registers
