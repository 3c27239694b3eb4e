"""`python -m benchmarks.layer`: the whole layer at several skews, ours and its peers, on real ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.common import Row, add_common, finish, ranks_there, rows_on_ranks
from benchmarks.kernels.workload import SKEWS
from benchmarks.layer.cases import Sizes, biased_gate, visits_of
from benchmarks.layer.implementations import NAMES, PEERS
from benchmarks.layer.measure import measure
from benchmarks.layer.output import about, plot, show
from prophet.errors import RankFailed, UsageError
from prophet.ranks.launch import check_gpus


def names_of(text: str) -> list[str]:
    """The implementations that `--peers` asks for; ours comes first."""
    asked = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in asked if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no peer {unknown[0]!r}; there are {', '.join(PEERS)}")
    return [name for name in NAMES if name in asked or name == "prophet"]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.layer", description=__doc__)
    p.add_argument("--peers", type=names_of, default="deepspeed,tutel,static", metavar="LIST", help="%(default)s")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each rank (%(default)s)")
    p.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks to start (2 4)")
    p.add_argument("--tokens", type=int, default=1024, help="tokens of a rank (%(default)s)")
    p.add_argument("--dim", type=int, default=256, help="(%(default)s)")
    p.add_argument("--hidden", type=int, default=512, help="(%(default)s)")
    p.add_argument("--experts", type=int, default=32, help="(%(default)s)")
    p.add_argument("--top-k", type=int, default=2, help="(%(default)s)")
    p.add_argument("--repetitions", type=int, default=15, help="rounds over all implementations (%(default)s)")
    p.add_argument("--skews", nargs="+", choices=SKEWS, default=list(SKEWS), help="(all)")
    add_common(p, limit_s=900.0)
    return p


def run(
    sizes: Sizes, ranks: int, skews: Sequence[str], names: Sequence[str], n: int, limit_s: float, on_gpus: bool
) -> list[Row]:
    """Start `ranks` processes, and return their rows; raises `RankFailed`."""
    gates: dict[str, list[list[float]] | str] = {}
    for skew in skews:
        visits = visits_of(skew, sizes, ranks)
        gates[skew] = visits if isinstance(visits, str) else biased_gate(sizes, visits).tolist()
    options = {"sizes": sizes, "gates": gates, "names": list(names), "repetitions": n}
    return rows_on_ranks(measure, options, ranks=ranks, limit_s=limit_s, on_gpus=on_gpus) or []


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a rank failed or an implementation computed something else."""
    p = parser()
    a = p.parse_args(argv)
    if ranks_there() is not None:
        p.error("this benchmark starts its ranks itself: run it with python, not with torchrun")
    sizes = Sizes(dim=a.dim, hidden=a.hidden, experts=a.experts, top_k=a.top_k, tokens=a.tokens)
    for ranks in a.ranks:
        if (problem := sizes.problem(ranks)) is not None:
            p.error(problem)
    on_gpus = a.device == "cuda"
    if on_gpus:
        try:
            check_gpus(max(a.ranks))
        except UsageError as error:
            p.error(str(error))
    if a.repetitions < 1:
        p.error(f"--repetitions: expected at least 1, got {a.repetitions}")
    rows: list[Row] = []
    for ranks in a.ranks:
        try:
            rows += run(sizes, ranks, a.skews, a.peers, a.repetitions, a.limit_s, on_gpus)
        except RankFailed as error:
            print(f"benchmarks.layer: {ranks} ranks: {error}", file=sys.stderr)
            return 1
    return finish("layer", rows, a, show=show, plot=plot, wrong="computed something else", **about(sizes))


if __name__ == "__main__":
    raise SystemExit(main())
