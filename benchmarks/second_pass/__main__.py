"""`python -m benchmarks.second_pass`: a block as written beside itself converted, on one rank."""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import prophet
from benchmarks.common import Row, add_common, chosen, finish
from benchmarks.measure import rotated
from benchmarks.second_pass.blocks import BLOCKS
from benchmarks.tables import show as show_table
from prophet.convert import converted
from prophet.ranks.threads import ThreadWorld

NEAR = 1e-4  # of the largest element: what a re-ordered float32 sum may differ by


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.second_pass", description=__doc__)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--repeats", type=int, default=15, help="samples of each case (default: %(default)s)")
    p.add_argument("--blocks", nargs="+", choices=sorted(BLOCKS), default=sorted(BLOCKS))
    p.add_argument("--tokens", type=int, default=2048, help="of a step (default: %(default)s)")
    p.add_argument("--dim", type=int, default=256)
    p.add_argument("--hidden", type=int, default=1024)
    p.add_argument("--experts", type=int, default=8)
    p.add_argument("--top-k", type=int, default=2, help="of the loop (default: %(default)s)")
    add_common(p)
    return p


def measure(
    *,
    device: str,
    blocks: Sequence[str],
    tokens: int,
    dim: int,
    hidden: int,
    experts: int,
    top_k: int,
    repeats: int,
) -> list[Row]:
    """A row per block: median seconds of a forward and backward pass as written, converted, and of what is added.

    first_pass_s: of the router and the gathering alone, which a converted block does once more.
    """
    clock = time.perf_counter if device.startswith("cuda") else time.process_time  # others may use the cores, too
    rows: list[Row] = []
    for name in blocks:
        torch.manual_seed(0)
        original = BLOCKS[name](dim, hidden, experts, top_k).to(device)
        model = nn.Sequential(copy.deepcopy(original))
        prophet.convert(model, group=ThreadWorld(1).collective(0))
        x = torch.randn(4, tokens // 4, dim, device=device)
        row: Row = {"block": name, "tokens": tokens, "dim": dim, "hidden": hidden, "experts": experts}
        with torch.no_grad():
            want, got = original(x), model(x)
        gap = float((got - want).abs().max() / want.abs().max())
        if not gap <= NEAR:
            rows.append({**row, "wrong": f"differs by {gap:.2g}"})
            continue
        cases: dict[str, Callable[[], object]] = {
            "original_s": lambda block=original, x=x: _step(block, x),  # type: ignore[misc]
            "converted_s": lambda block=model, x=x: _step(block, x),  # type: ignore[misc]
            "first_pass_s": lambda block=model, x=x: _first_pass(block, x),  # type: ignore[misc]
        }
        seconds: dict[str, list[float]] = {case: [] for case in cases}
        for repeat in range(repeats + 1):
            for case in rotated(list(cases), repeat):
                began = clock()
                cases[case]()
                if repeat:  # the first warms up
                    seconds[case].append(clock() - began)
        rows.append({**row, **{case: statistics.median(taken) for case, taken in seconds.items()}})
    return rows


def _step(block: nn.Module, x: Tensor) -> None:
    leaf = x.detach().requires_grad_()
    block(leaf).square().mean().backward()
    if x.is_cuda:
        torch.cuda.synchronize()


def _first_pass(model: nn.Module, x: Tensor) -> None:
    """The block with experts that answer zeros at once."""
    (_, block, _, layer) = next(iter(converted(model)))
    forward = type(block).__mro__[1].forward
    with layer._tape.playing(lambda expert, rows: torch.zeros_like(rows)):
        forward(block, x.detach().requires_grad_())  # type: ignore[operator]
    if x.is_cuda:
        torch.cuda.synchronize()


def show(rows: Sequence[Row]) -> None:
    lines = []
    for r in rows:
        if "wrong" in r:
            lines.append((r["block"], "wrong", r["wrong"]))
            continue
        figures = [f"{1e3 * r[case]:.1f}" for case in ("original_s", "converted_s", "first_pass_s")]
        shares = (r["first_pass_s"] / r["original_s"], r["converted_s"] / r["original_s"])
        lines.append((r["block"], *figures, f"{shares[0]:.1%}", f"{shares[1]:.2f}"))
    right = ("as written, ms", "converted, ms", "first pass, ms", "added by it", "converted / as written")
    show_table(("block",), right, lines)


def plot(rows: Sequence[Row], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    good = [r for r in rows if "wrong" not in r]
    axes.bar([r["block"] for r in good], [r["converted_s"] / r["original_s"] for r in good])
    axes.set(ylabel="converted / as written", ylim=(0, None))
    figure.savefig(file)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a converted block was wrong."""
    p = parser()
    a = p.parse_args(argv)
    if min(a.repeats, a.tokens // 4, a.dim, a.hidden) < 1 or a.experts < 2 or not 1 <= a.top_k <= a.experts:
        p.error("expected repeats and sizes of at least 1, tokens of at least 4, and experts of at least 2 and top-k")
    torch.set_num_threads(1)
    rows = measure(**chosen(a, "device", "blocks", "tokens", "dim", "hidden", "experts", "top_k", "repeats"))
    return finish("second_pass", rows, a, show=show, plot=plot, wrong="blocks were wrong", repeats=a.repeats)


if __name__ == "__main__":
    raise SystemExit(main())
