"""`python -m benchmarks.gradient_memory`: bytes that means of gradients and their norm take beside the gradients."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

import prophet
from benchmarks.common import Row
from benchmarks.gradient_memory.peak import Metered, PeakBytes
from benchmarks.tables import markdown
from pipeline_balance.pipeline.run.replicas import ReplicaMeans
from prophet.parallel import ExpertReplicas, clip_grad_norm_
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld

MIB = 1 << 20


def experts(mebibytes: int, ranks: Collective) -> int:
    """Average the gradients of an MoE layer's experts over ranks."""
    # An expert of 1 MiB in float32
    layer = prophet.MoE(256, 512, mebibytes, bias=False, group=ThreadWorld(1).collective(0))
    averager = ExpertReplicas(layer, metered := Metered(ranks, PeakBytes()))
    fill(layer.experts.parameters())
    with metered.peak:
        averager.average()
    return metered.peak.peak_bytes


def layer(mebibytes: int, ranks: Collective) -> int:
    """Average the gradients of a pipeline's layer over replicas, in this thread."""
    parameters = [nn.Parameter(torch.zeros(MIB // 4)) for _ in range(mebibytes)]
    means = ReplicaMeans(metered := Metered(ranks, PeakBytes()))
    fill(parameters)
    with metered.peak:
        means._average(parameters, 0)
    means.close()
    return metered.peak.peak_bytes


def norm(mebibytes: int, ranks: Collective) -> int:
    """Measure the norm of one gradient in bfloat16."""
    parameter = nn.Parameter(torch.zeros(mebibytes, MIB // 2, dtype=torch.bfloat16))
    fill([parameter])
    with (peak := PeakBytes()):
        clip_grad_norm_([parameter], math.inf, ranks, parameter.device)
    return peak.peak_bytes


def fill(parameters: Iterable[nn.Parameter]) -> None:
    for p in parameters:
        p.grad = torch.ones_like(p)


CASES: dict[str, Callable[[int, Collective], int]] = {
    "experts of an MoE layer, `ExpertReplicas`": experts,
    "a layer of a pipeline, `replicas=R`": layer,
    "norm, bfloat16": norm,
}


def measure(ranks: Sequence[int], mebibytes: int) -> list[Row]:
    """A row per case and number of ranks: bytes at the peak beside gradients of so many MiB, of the rank with most."""
    rows: list[Row] = []
    for name, case in CASES.items():
        for size in ranks if case is not norm else (1,):
            found = ThreadWorld(size).run(lambda c, case=case: case(mebibytes, c))  # type: ignore[misc]
            rows.append({"what": name, "ranks": size, "gradient_bytes": mebibytes * MIB, "extra_bytes": max(found)})
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.gradient_memory", description=__doc__)
    p.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="threads (default: %(default)s)")
    p.add_argument("--mebibytes", type=int, default=16, help="of all gradients (default: %(default)s)")
    a = p.parse_args(argv)
    if min(a.ranks) < 1 or a.mebibytes < 2:
        p.error("expected ranks of at least 1 and mebibytes of at least 2")
    rows = measure(a.ranks, a.mebibytes)
    head = ("what", "ranks", "gradients, MiB", "beside them, MiB", "times")
    lines = [
        (
            r["what"],
            str(r["ranks"]),
            f"{r['gradient_bytes'] / MIB:g}",
            f"{r['extra_bytes'] / MIB:.2f}",
            f"{r['extra_bytes'] / r['gradient_bytes']:.2f}",
        )
        for r in rows
    ]
    print(markdown(head, lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
