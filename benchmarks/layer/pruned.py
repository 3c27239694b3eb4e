"""`python -m benchmarks.layer.pruned`: from which share of weights on a pruned layer is faster stored sparse.

Shape legend: N tokens, D features of the input and of the output.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks.common import Row, add_common, chosen, finish
from benchmarks.measure import quartiles, rotated, seconds_of
from benchmarks.tables import show as show_table
from pipeline_balance.dynamics.pruning import PrunedLinear, note_shared

NEAR = 1e-4  # of the largest element: what sums in another order may differ by in float32


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.layer.pruned", description=__doc__)
    p.add_argument("--dim", type=int, default=1024, help="D (%(default)s)")
    p.add_argument("--tokens", type=int, default=512, help="N (%(default)s)")
    p.add_argument("--kept", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.15, 0.2, 0.3], help="shares of weights")
    p.add_argument("--repeats", type=int, default=15, help="samples of each case (default: %(default)s)")
    add_common(p)
    return p


def measure(*, dim: int, tokens: int, kept: Sequence[float], repeats: int) -> list[Row]:
    """A row per share of weights: median milliseconds of a step with Adam, masked dense and stored sparse, in turns."""
    rows: list[Row] = []
    for share in kept:
        torch.manual_seed(0)
        mask = torch.rand(dim, dim) < share
        x = torch.randn(tokens, dim)
        layers = {"dense_ms": PrunedLinear(dim, dim), "sparse_ms": PrunedLinear(dim, dim, sparse_below=1.0)}
        layers["sparse_ms"].load_state_dict(layers["dense_ms"].state_dict())
        optimizers = {name: torch.optim.Adam(layer.parameters()) for name, layer in layers.items()}
        note_shared(layers.values())
        for name, layer in layers.items():
            layer.prune(mask, optimizers[name])
        row: Row = {"kept": share, "dim": dim, "tokens": tokens, "repetitions": repeats}
        want, got = (layer(x).detach() for layer in layers.values())
        gap = float((got - want).abs().max() / want.abs().max())
        if not gap <= NEAR:
            rows.append({**row, "wrong": f"differs by {gap:.2g}"})
            continue
        samples: dict[str, list[float]] = {name: [] for name in layers}
        for turn in range(repeats + 1):
            for name in rotated(list(layers), turn):
                taken = seconds_of(lambda name=name: _step(layers[name], optimizers[name], x))  # type: ignore[misc]  # noqa: B023
                if turn:  # the first warms up
                    samples[name].append(1e3 * taken)
        row |= {name: statistics.median(found) for name, found in samples.items()}
        row |= {f"{name}_quartiles": quartiles(found) for name, found in samples.items()}
        rows.append({**row, "speedup": row["dense_ms"] / row["sparse_ms"]})
    return rows


def _step(layer: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    layer(x.detach().requires_grad_()).square().mean().backward()
    optimizer.step()


def break_even(rows: Sequence[Row]) -> float:
    """The share of weights from which on downwards sparse is as fast, between measured shares by a line; 0 for none."""
    found = sorted((r["kept"], r["speedup"]) for r in rows if "speedup" in r)
    best = 0.0
    for i, (share, speedup) in enumerate(found):
        if speedup < 1.0:
            if i:
                before, faster = found[i - 1]
                best = before + (share - before) * (faster - 1.0) / (faster - speedup)
            break
        best = share
    return best


def show(rows: Sequence[Row]) -> None:
    lines = [
        (f"{r['kept']:.2f}", "wrong", r["wrong"], "")
        if "wrong" in r
        else (f"{r['kept']:.2f}", f"{r['dense_ms']:.2f}", f"{r['sparse_ms']:.2f}", f"{r['speedup']:.2f}")
        for r in rows
    ]
    show_table((), ("weights left", "masked dense, ms", "stored sparse, ms", "dense / sparse"), lines)
    print(f"break-even: sparse_below={break_even(rows):.2f}")


def plot(rows: Sequence[Row], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    timed = [r for r in rows if "speedup" in r]
    axes.plot([r["kept"] for r in timed], [r["speedup"] for r in timed], marker="o")
    axes.axhline(1.0, color="grey")
    axes.set(xlabel="weights left", ylabel="masked dense / stored sparse")
    figure.savefig(file, dpi=150)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 where the two forms compute different things."""
    p = parser()
    a = p.parse_args(argv)
    if min(a.dim, a.tokens, a.repeats) < 1 or not all(0.0 < share <= 1.0 for share in a.kept):
        p.error("expected sizes of at least 1 and shares above 0 up to 1")
    rows = measure(**chosen(a, "dim", "tokens", "kept", "repeats"))
    return finish("layer.pruned", rows, a, show=show, plot=plot, wrong="differed", break_even=break_even(rows))


if __name__ == "__main__":
    raise SystemExit(main())
