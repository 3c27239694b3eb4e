"""Runs the Triton kernels' tests in Triton's interpreter, and compiles the kernels for a GPU that is not there.

Both need a process of their own: whether a kernel is interpreted is settled when Triton is imported.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
ROOT = Path(__file__).parents[2]


def version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def run(arguments: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


INTERPRETER = pytest.mark.skipif(
    version(triton.__version__) < (3, 8) and version(np.__version__) >= (2, 4),
    reason="this Triton's interpreter fails with numpy 2.4",
)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests/gpu runs on it")
@INTERPRETER
def test_kernels_agree_with_their_definitions_in_the_interpreter() -> None:
    done = run(["-m", "pytest", "-q", "-x", "tests/gpu/test_kernels_triton.py"], TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@INTERPRETER
def test_the_layers_own_tests_pass_on_the_kernels_in_the_interpreter() -> None:
    done = run(["-m", "pytest", "-q", "-x", "tests/unit/test_layer.py", "-k", "triton"], TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from prophet.kernels.grouped_ffn import kernel

def build(fn, pointers, integers, constants):
    signature = {n: pointers.get(n, "i32" if n in integers else "constexpr") for n in fn.arg_names}
    at = {n: (i,) for i, n in enumerate(fn.arg_names)}
    fixed = {at[n]: v for n, v in constants.items()}
    hints = {at[n]: [["tt.divisibility", 16]] for n in (*pointers, *integers)}
    source = ASTSource(fn=fn, signature=signature, constexprs=fixed, attrs=hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "num_stages": 3})

tile = dict(PRECISION="ieee", BM=128, BN=128, BK=64, SWIZZLE=8)
half = dict.fromkeys(("a", "out", "extra", "w_like"), "*bf16") | dict.fromkeys(("sizes", "w_table", "b_table"), "*i64")
whole = ("groups", "n_cols", "depth", "a_stride", "out_stride", "extra_stride", "w_stride_n")
found = build(kernel._rows_kernel, half, whole, dict(
    tile, MODE=1, SWIGLU=True, BIASED=True, KEEP=True, ALIGNED=True, w_stride_k=1))
print("rows", found.metadata.shared, found.asm["ptx"].count("wgmma.mma"))
"""


@pytest.mark.slow
def test_the_compiler_pipelines_weights_that_are_read_through_a_table_of_addresses() -> None:
    done = run(["-c", COMPILE])
    assert done.returncode == 0, done.stderr[-4000:]
    name, shared, products = done.stdout.split()[-3:]
    assert name == "rows"
    assert int(products) > 0  # Hopper's matrix instructions
    assert int(shared) >= 3 * 3 * 128 * 64 * 2  # three stages of the rows' tile and both weights' tiles
