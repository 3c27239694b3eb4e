"""Measures the machine that a process group runs on, and fits the performance model to it.

Four operations are timed on all ranks at once, as training runs them: the all-to-all over sizes, the experts' forward
and backward pass over token counts, Trans and Agg over sizes. Each is fitted by a line, fixed seconds plus seconds per
unit, that minimises the *relative* error; sizes between the fitted ones are kept out of the fit and only checked.

Shape legend: R ranks, n tokens of one expert, D model dim, H hidden dim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from prophet.comm import Collective, Operation
from prophet.experts import ExpertBank
from prophet.kernels.grouped_ffn.naive import ExpertWeights, expert_ffn
from prophet.spec import Activation, Link, Topology

A2A_BYTES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
A2A_HELD_OUT = (1 << 17, 1 << 19, 3 << 19, 1 << 21)
TOKENS = (128, 512, 1024, 2048)
TOKENS_HELD_OUT = (256, 768, 1536)
COPIES = (1, 2, 4)
COPIES_HELD_OUT = (3,)


@dataclass(frozen=True, slots=True)
class Fit:
    """One operation: seconds = fixed_s + unit_s · size. Sizes are bytes (or tokens), seconds are medians.

    fitted, held_out: (size, measured seconds) of the points used for the line, and of those only compared with it.
    """

    operation: str
    unit: str
    fixed_s: float
    unit_s: float
    fitted: tuple[tuple[float, float], ...]
    held_out: tuple[tuple[float, float], ...]

    def predict(self, size: float) -> float:
        return self.fixed_s + self.unit_s * size

    def error(self, points: Sequence[tuple[float, float]]) -> float:
        """Mean of |predicted - measured| / measured."""
        return float(np.mean([abs(self.predict(x) - t) / t for x, t in points])) if points else 0.0

    @property
    def held_out_error(self) -> float:
        """Mean relative error on the sizes that the fit has not seen."""
        return self.error(self.held_out)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted topology, and how well each operation's line describes it."""

    topology: Topology
    fits: tuple[Fit, ...]


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(fixed, per unit) of the line through (size, seconds) with the least squared relative error; neither negative."""
    x, t = np.array(points, dtype=np.float64).T
    weighted = np.stack([1.0 / t, x / t], axis=1)
    (fixed, unit), *_ = np.linalg.lstsq(weighted, np.ones_like(t), rcond=None)
    if fixed < 0:  # through the origin
        fixed, unit = 0.0, float((weighted[:, 1].sum()) / (weighted[:, 1] ** 2).sum())
    if unit < 0:  # constant
        fixed, unit = float((weighted[:, 0].sum()) / (weighted[:, 0] ** 2).sum()), 0.0
    return float(fixed), float(unit)


class _Probe:
    """Times operations on all ranks at once; a sample is the time of the slowest rank."""

    def __init__(self, collective: Collective, device: torch.device, repeats: int) -> None:
        self.collective = collective
        self.device = device
        self.repeats = repeats

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def table(self, runs: dict[float, Callable[[], None]]) -> tuple[dict[float, float], dict[float, np.ndarray]]:
        """Medians by size: of the slowest rank, and of every rank [R]; sizes take turns, so drift hits all alike."""
        samples: dict[float, list[np.ndarray]] = {size: [] for size in runs}
        for run in runs.values():
            run()  # first touch of memory and connections
        for _ in range(self.repeats):
            for size, run in runs.items():
                self._sync()
                self.collective.all_gather(torch.zeros(1, device=self.device), op=Operation("start of a probe"))
                before = time.perf_counter()
                run()
                self._sync()
                mine = torch.tensor([time.perf_counter() - before], dtype=torch.float64, device=self.device)
                found = self.collective.all_gather(mine, op=Operation("end of a probe")).cpu().numpy().reshape(-1)
                samples[size].append(found)
        slowest = {size: float(np.median([s.max() for s in rows])) for size, rows in samples.items()}
        by_rank = {size: np.median(np.stack(rows), axis=0) for size, rows in samples.items()}
        return slowest, by_rank


def calibrate(
    collective: Collective,
    *,
    dim: int = 256,
    hidden: int = 512,
    activation: Activation = "gelu",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ranks_per_node: int | None = None,
    free_bytes: int = 1 << 30,
    repeats: int = 15,
    name: str = "calibrated",
) -> Calibration:
    """Measure and fit; collective over all ranks, and equal on all of them.

    dim, hidden, activation, dtype: the expert to be timed. ranks_per_node: None for one node. repeats: samples per
    size; a few seconds in all with the default on a small machine.
    """
    place = torch.device(device)
    probe = _Probe(collective, place, repeats)
    size, rank = collective.size, collective.rank
    per_node = ranks_per_node or size
    fits: list[Fit] = []
    links: dict[str, Link] = {}
    node = np.arange(size) // per_node
    levels = {"intra": (node == node[rank]) & (np.arange(size) != rank), "inter": node != node[rank]}
    for level, peers in levels.items():
        count = int(peers.sum())
        if collective_max(collective, count, place) == 0:
            continue
        fit = _fit_exchange(probe, f"a2a_{level}", peers, place)
        fits.append(fit)
        links[level] = Link(bytes_per_s=1.0 / max(fit.unit_s, 1e-15), latency_s=fit.fixed_s)
    intra = links.get("intra") or links.get("inter") or Link(bytes_per_s=1e12)

    bank = ExpertBank(dim, hidden, 1, activation=activation).to(place, dtype)
    forward, backward, rates, overhead_s = _fit_experts(probe, bank, place, dtype)
    fits += [forward, backward]
    if size > 1:
        fits += _fit_transfers(probe, bank, place)
    topology = Topology(
        ranks=size,
        ranks_per_node=per_node,
        intra=intra,
        inter=links.get("inter", intra),
        flops_per_s=tuple(float(r) for r in rates),
        free_bytes=(free_bytes,) * size,
        expert_overhead_s=overhead_s,
        name=name,
    )
    return Calibration(topology, tuple(fits))


def collective_max(collective: Collective, value: int, device: torch.device) -> int:
    """The largest `value` over the ranks."""
    mine = torch.tensor([value], dtype=torch.int64, device=device)
    return int(collective.all_gather(mine, op=Operation("largest value")).max())


def _fit(operation: str, unit: str, measured: dict[float, float], held_out: Sequence[float]) -> Fit:
    fitted = tuple((x, t) for x, t in measured.items() if x not in held_out)
    fixed, per_unit = fit_line(fitted)
    kept = tuple((x, t) for x, t in measured.items() if x in held_out)
    return Fit(operation, unit, fixed, per_unit, fitted, kept)


def _fit_exchange(probe: _Probe, operation: str, peers: np.ndarray, device: torch.device) -> Fit:
    """An all-to-all in which every rank sends the same bytes, in all, to its `peers` [R]."""
    op = Operation("probe of the all-to-all")
    runs: dict[float, Callable[[], None]] = {}
    for n_bytes in A2A_BYTES + A2A_HELD_OUT:
        share = n_bytes // max(1, int(peers.sum()))
        rows = [share if p else 0 for p in peers]
        x = torch.zeros(sum(rows), dtype=torch.uint8, device=device)

        def run(x: torch.Tensor = x, rows: list[int] = rows) -> None:
            probe.collective.all_to_all(x, rows, rows, op=op).wait()

        runs[float(n_bytes)] = run
    slowest, _ = probe.table(runs)
    return _fit(operation, "byte", slowest, A2A_HELD_OUT)


def _fit_experts(
    probe: _Probe, bank: ExpertBank, device: torch.device, dtype: torch.dtype
) -> tuple[Fit, Fit, np.ndarray, float]:
    """Lines for the forward and the backward pass of one expert, flops/s by rank, and the cost per expert."""
    inputs = {
        n: torch.randn(n, bank.dim, device=device, dtype=dtype, requires_grad=True) for n in TOKENS + TOKENS_HELD_OUT
    }
    weights = ExpertWeights(*(None if p is None else p[0] for p in bank.stacked_weights()))  # type: ignore[arg-type]
    runs: dict[float, Callable[[], None]] = {}
    for n, x in inputs.items():

        def forward_run(x: torch.Tensor = x) -> None:
            with torch.enable_grad():
                expert_ffn(x, weights, bank.activation)

        runs[float(n)] = forward_run
    forward_s, by_rank = probe.table(runs)
    forward = _fit("expert_forward", "token", forward_s, TOKENS_HELD_OUT)

    runs = {}
    for n, x in inputs.items():
        out = expert_ffn(x, weights, bank.activation)
        grad = torch.ones_like(out)
        parts = [x, *(w for w in weights if w is not None)]

        def backward_run(out: torch.Tensor = out, grad: torch.Tensor = grad, parts: list[torch.Tensor] = parts) -> None:
            torch.autograd.grad(out, parts, grad, retain_graph=True)

        runs[float(n)] = backward_run
    backward_s, _ = probe.table(runs)
    backward = _fit("expert_backward", "token", backward_s, TOKENS_HELD_OUT)

    # the model counts the backward pass as twice the forward one: its rate is that of both together
    flops = bank.shape().forward_flops_per_token
    per_token = max((forward.unit_s + backward.unit_s) / 3.0, 1e-15)
    slowest = max(TOKENS)
    speed = by_rank[float(slowest)] / by_rank[float(slowest)].max()  # relative seconds of the ranks, slowest 1
    rates = flops / (per_token * speed)
    return forward, backward, rates, (forward.fixed_s + backward.fixed_s) / 3.0


def _fit_transfers(probe: _Probe, bank: ExpertBank, device: torch.device) -> list[Fit]:
    """Trans and Agg: every rank sends its expert to the ranks after it, and adds up what comes back."""
    size, rank = probe.collective.size, probe.collective.rank
    numel = bank.expert_numel
    shape = bank.shape()
    fits = []
    for operation, adds in (("trans", False), ("agg", True)):
        op = Operation(f"probe of {operation}")
        runs: dict[float, Callable[[], None]] = {}
        for copies in COPIES + COPIES_HELD_OUT:
            rows = [0] * size
            back = [0] * size
            for c in range(copies):
                rows[(rank + 1 + c % (size - 1)) % size] += numel
                back[(rank - 1 - c % (size - 1)) % size] += numel

            def run(rows: list[int] = rows, back: list[int] = back, adds: bool = adds, op: Operation = op) -> None:
                send = torch.cat([bank.flat_slice(0, 0, numel)] * (sum(rows) // numel))
                got = probe.collective.all_to_all(send, rows, back, op=op, channel="weights").wait()
                if adds:
                    for piece in got.split(numel):
                        bank.add_flat_grad(0, 0, numel, piece)

            runs[float(copies * shape.expert_bytes)] = run
        slowest, _ = probe.table(runs)
        held_out = [float(c * shape.expert_bytes) for c in COPIES_HELD_OUT]
        fits.append(_fit(operation, "byte", slowest, held_out))
    return fits
