"""Compiles the Triton kernels for a GPU that is not there, and prints what each takes as a line of JSON.

`python -m tests.helpers.compile_for ARCH [NAME ...]` with the compute capability times ten, one of
`prophet.kernels.tuning.ARCHITECTURES`, and bf16, fp16, fp32, tf32 (the grouped FFN's kernels), activations (all of
them in large tiles) or others (the other ops, and all activations in small tiles); all without a name. For Hopper (90)
the grouped FFN's tiles are also those that are tuned over. Run it in a process of its own, because Triton reads its
settings on import.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from benchmarks.kernels.tune import candidates
from prophet.kernels.grouped_ffn import kernel as ffn
from prophet.kernels.permute import kernel as permute
from prophet.kernels.route import kernel as route
from prophet.kernels.split_apply import kernel as split_apply
from prophet.kernels.tuning import ARCHITECTURES, Config, rule
from prophet.spec import ACTIVATIONS, parts_of
from tests.helpers.oracle import LIMITED

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
ARCH = ARCHITECTURES[int(sys.argv[1])]


def compiled(fn: Any, types: dict[str, str], constants: dict[str, Any], warps: int = 4, stages: int = 3) -> Any:
    """`fn` compiled for a launch in which all pointers, and the integers but those never specialised, are aligned."""
    signature = {n: types.get(n, "constexpr") for n in fn.arg_names}
    at = {n: (i,) for i, n in enumerate(fn.arg_names)}
    free = {p.name for p in fn.params if p.do_not_specialize}
    hints = {at[n]: [["tt.divisibility", 16]] for n, t in types.items() if t != "fp32" and n not in free}
    fixed = {at[n]: v for n, v in constants.items()}
    source = ASTSource(fn=fn, signature=signature, constexprs=fixed, attrs=hints)
    return triton.compile(
        source, target=GPUTarget("cuda", ARCH.capability, 32), options={"num_warps": warps, "num_stages": stages}
    )


def resources(built: Any) -> dict[str, int]:
    """Registers per thread and spilled bytes, as the assembler that comes with Triton says."""
    tool = get_ptxas(ARCH.capability).path
    # instructions of one architecture only, which Triton uses where there are any
    name = f"sm_{ARCH.capability}{'a' if ARCH.capability >= 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(built.asm["ptx"])
        target = str(Path(folder) / "kernel.cubin")
        done = subprocess.run(
            [tool, "-v", "--gpu-name", name, str(source), "-o", target],
            capture_output=True,
            text=True,
            check=True,
        )
    patterns = {"registers": r"Used (\d+) registers", "spilled_bytes": r"(\d+) bytes spill stores"}
    return {name: int((re.search(pattern, done.stderr) or [0, -1])[1]) for name, pattern in patterns.items()}


def shapes(kind: Any, dtype: torch.dtype) -> list[Config]:
    """Every tile shape that a kernel of this kind may be launched with: the rule's, on Hopper those tuned over, too."""
    device = torch.device("cuda")
    ruled = [rule(kind, device, dtype, (rows, 4096, 4096)) for rows in (16, 32, 64, 128, 4096)]
    return list(dict.fromkeys([*ruled, *(candidates(kind, dtype) if ARCH.capability == 90 else [])]))


def activation(name: Any) -> dict[str, Any]:
    """What the rows kernel is told of an activation."""
    parts = parts_of(name)
    clamped = parts.limit is not None
    return {"FUNCTION": parts.function, "GATED": parts.gated, "CLAMPED": clamped, "PLUS_ONE": parts.plus_one}


def rows_launches(name: str) -> Iterator[tuple[str, Config, Any]]:
    dtype = "fp32" if name == "tf32" else name
    types = dict.fromkeys(("a", "out", "extra", "pre", "w_like"), f"*{dtype}")
    types |= dict.fromkeys(("sizes", "w_table", "b_table"), "*i64")
    types |= dict.fromkeys(("groups", "n_cols", "depth", "a_stride", "out_stride", "extra_stride"), "i32")
    types["limit"] = "fp32"
    for given in shapes("rows", DTYPES[name]):
        for what, mode, gated in (
            ("product", ffn.PLAIN, False),
            ("swiglu", ffn.ACT, True),
            ("gelu", ffn.ACT, False),
            ("swiglu backward", ffn.ACT_BACKWARD, True),
            ("gelu backward", ffn.ACT_BACKWARD, False),
        ):
            size = DTYPES[name].itemsize
            c = ffn.fitting(given, mode, gated, ARCH, item_bytes=size, weight_bytes=size)
            transposed = mode == ffn.ACT_BACKWARD
            stride = {"w_stride_k": "i32"} if transposed else {"w_stride_n": "i32"}
            one = "w_stride_n" if transposed else "w_stride_k"
            constants = {
                "MODE": mode, **activation("swiglu" if gated else "gelu"), "BIASED": not transposed,
                "KEEP": mode == ffn.ACT, "ALIGNED": True,
                "PRECISION": "tf32" if name == "tf32" else "ieee",
                "BM": c.rows, "BN": c.cols, "BK": c.depth, "SWIZZLE": c.swizzle, one: 1,
            }  # fmt: skip
            yield f"rows: {what}", c, compiled(ffn._rows_kernel, types | stride, constants, c.warps, c.stages)


def odd_launches() -> Iterator[tuple[str, Any]]:
    """What the others leave out: an integer that is 1, which Triton makes a constant, and weights wider than rows."""
    types = dict.fromkeys(("a", "out", "extra", "pre"), "*bf16")
    types |= dict.fromkeys(("sizes", "w_table", "b_table"), "*i64")
    types |= dict.fromkeys(("groups", "depth", "a_stride", "out_stride", "extra_stride", "w_stride_n"), "i32")
    types["limit"] = "fp32"
    device = torch.device("cuda")
    for name, width, more, rows in (
        ("one column", "*bf16", {"n_cols": 1}, 4096),
        ("float32 weights", "*fp32", {}, 4096),
        ("float32 weights, few rows", "*fp32", {}, 32),
    ):
        wide = 4 if width == "*fp32" else 2
        c = ffn.fitting(
            rule("rows", device, torch.bfloat16, (rows, 4096, 4096)), ffn.ACT, True, ARCH, weight_bytes=wide
        )
        constants = {
            "MODE": ffn.ACT, **activation("swiglu"), "BIASED": True, "KEEP": True, "ALIGNED": True, "PRECISION": "ieee",
            "BM": c.rows, "BN": c.cols, "BK": c.depth, "SWIZZLE": c.swizzle, "w_stride_k": 1, **more,
        }  # fmt: skip
        sizes = {} if more else {"n_cols": "i32"}
        kernel = compiled(ffn._rows_kernel, types | {"w_like": width} | sizes, constants, c.warps, c.stages)
        yield f"rows: {name}", kernel


def other_activations(tile: Config) -> Iterator[tuple[str, Any]]:
    """Both passes of every activation that `rows_launches` leaves out, in one tile shape."""
    types = dict.fromkeys(("a", "out", "extra", "pre", "w_like"), "*bf16")
    types |= dict.fromkeys(("sizes", "w_table", "b_table"), "*i64")
    types |= dict.fromkeys(("groups", "n_cols", "depth", "a_stride", "out_stride", "extra_stride", "w_stride_n"), "i32")
    types["limit"] = "fp32"
    for name in (*ACTIVATIONS, *LIMITED):
        for mode in (ffn.ACT, ffn.ACT_BACKWARD):
            if name in ("gelu", "swiglu"):
                continue
            c = ffn.fitting(tile, mode, parts_of(name).gated, ARCH)
            constants = {
                "MODE": mode, **activation(name), "BIASED": True, "KEEP": True, "ALIGNED": True, "PRECISION": "ieee",
                "BM": c.rows, "BN": c.cols, "BK": c.depth, "SWIZZLE": c.swizzle, "w_stride_k": 1,
            }  # fmt: skip
            what = f"{name} backward" if mode == ffn.ACT_BACKWARD else name
            yield f"rows: {what}", compiled(ffn._rows_kernel, types, constants, c.warps, c.stages)


def weights_launches(name: str) -> Iterator[tuple[str, Config, Any]]:
    dtype = "fp32" if name == "tf32" else name
    types = {"left": f"*{dtype}", "right": f"*{dtype}", "ends": "*i64", "table": "*i64", "b_table": "*i64"}
    types |= {"modes": "*i64", "scales": "*i64", "grad_like": "*fp32"}
    types |= dict.fromkeys(("groups", "n_rows", "n_cols", "left_stride", "right_stride"), "i32")
    for c in shapes("weights", DTYPES[name]):
        constants = {
            "BIASED": True, "PRECISION": "tf32" if name == "tf32" else "ieee",
            "BM": c.rows, "BN": c.cols, "BK": c.depth, "SWIZZLE": c.swizzle,
        }  # fmt: skip
        yield "weights", c, compiled(ffn._weights_kernel, types, constants, c.warps, c.stages)


def others() -> Iterator[tuple[str, Any]]:
    """The kernels of the other ops, at the sizes of large models."""
    i32, rows, cols = "i32", *permute._blocks(4096)
    counts = {"order": "*i64", "position": "*i64", "weights": "*fp32", "d_weights": "*fp32"}
    for dtype in ("*bf16", "*fp16", "*fp32"):
        data = dict.fromkeys(("x", "out", "rows", "d_y", "d_rows"), dtype) | counts
        for fn, extra, more in (
            (permute._spread_kernel, {}, {"stride_d": 1}),
            (permute._collect_kernel, {"WEIGHTED": True}, {"stride_d": 1}),
            (permute._collect_backward_kernel, {}, {"stride_nd": 1, "stride_ad": 1}),
        ):
            constants = {"TOP_K": 8, "ROWS": rows, "COLS": cols, **extra, **more}
            names = [n for n in fn.arg_names if n not in constants]
            types = {n: data.get(n, i32) for n in names}
            if fn is permute._spread_kernel:
                types["rows"] = i32  # a count there, and a tensor in the others
            yield fn.__name__, compiled(fn, types, constants)
    cells = "ids", "runs", "counts", "split", "upto", "shares", "starts", *counts
    width = {"kept": "*i8"} | dict.fromkeys(cells, "*i64")
    kernels = split_apply._count_kernel, split_apply._begins_kernel, split_apply._place_kernel, split_apply._runs_kernel
    for fn in kernels:
        constants = {n: v for n, v in {"HAS_KEPT": True, "BLOCK": split_apply.BLOCK}.items() if n in fn.arg_names}
        types = {n: width.get(n, i32) for n in fn.arg_names if n not in constants}
        yield fn.__name__, compiled(fn, types, constants)
    scores = {"ids": "*i64", "counts": "*i64", "scale": "fp32", "tiny": "fp32"}
    scores |= dict.fromkeys(("logits", "bias", "weights", "d_weights", "d_logits"), "*fp32")
    for fn in (route._route_kernel, route._route_backward_kernel):
        block, experts = route._blocks(256)
        constants = {"TOP_K": 8, "SIGMOID": True, "NORMALIZE": True, "BIASED": True, "ROWS": block, "WIDTH": experts}
        constants = {n: v for n, v in constants.items() if n in fn.arg_names} | {"stride_e": 1}
        types = {n: scores.get(n, i32) for n in fn.arg_names if n not in constants}
        yield fn.__name__, compiled(fn, types, constants)


def main(names: list[str]) -> None:
    for name in [n for n in names if n in DTYPES] if names else DTYPES:
        for what, c, built in (*rows_launches(name), *weights_launches(name)):
            shape = [c.rows, c.cols, c.depth, c.warps, c.stages]
            row = {"kernel": what, "dtype": name, "tile": shape, "shared_bytes": built.metadata.shared}
            row |= {"wgmma": "wgmma.mma" in built.asm["ptx"], "async": "cp.async" in built.asm["ptx"]}
            print(json.dumps(row | resources(built)), flush=True)
    large = rule("rows", torch.device("cuda"), torch.bfloat16, (4096, 4096, 4096))
    small = Config(rows=16, cols=32, depth=32, stages=2)
    for name, launches in (
        ("others", lambda: (*others(), *odd_launches(), *other_activations(small))),
        ("activations", lambda: other_activations(large)),
    ):
        for what, built in launches() if not names or name in names else ():
            print(json.dumps({"kernel": what, "shared_bytes": built.metadata.shared} | resources(built)), flush=True)


if __name__ == "__main__":
    main(sys.argv[2:])
