"""Steps on emulated hosts: equal slices, slices of equal cost and attention exchange in turn, beside the simulator.

Shape legend: P hosts, M microbatches, N slices. Hosts are paced: what they compute lasts longer, the rest is slept. So
only order and waiting are shown, and what links take.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cluster.host import Host
from benchmarks.cluster.profiles import uniform
from benchmarks.cluster.testbed import Running, Testbed
from benchmarks.common import Row
from benchmarks.slices.contenders import Contender, Ours
from benchmarks.slices.steps import all_of, measure
from pipeline_balance.pipeline.measure.meter import Meter
from pipeline_balance.pipeline.measure.slice_costs import OfSlice, SliceFit
from pipeline_balance.schedules.exchange import plan
from pipeline_balance.schedules.exchange_times import ExchangeCosts, LayerSeconds, simulate_exchange
from pipeline_balance.schedules.sliced import sliced
from pipeline_balance.slices.parts import Sliced
from prophet.ranks.process_group import collective_for

HOSTS = 4
# attention is 0.7 of the forward's products
WORK = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "intermediate": 512, "microbatches": 4, "tokens": 6144}
SLICES = 8
EQUAL, UNEVEN, EXCHANGE = (f"aligned-n{SLICES}{more}" for more in ("", "-uneven", "-exchange"))
OVER_SIMULATED, HELD, TIME = 1.10, 0.8, 1.02  # targets of exchange


def emulated(*, share: float, link_mbit_per_s: float, repeats: int, limit_s: float) -> list[Row]:
    """A row per policy. Raises `TestbedUnavailable` where hosts cannot be emulated.

    Args:
        share: Part of a core that every host gets.
        link_mbit_per_s: Of every host's own link.
        repeats: Counted rounds, each of which runs all policies.
        limit_s: For all of it.
    """
    profile = uniform("slices", hosts=HOSTS, share=share, link_mbit_per_s=link_mbit_per_s)
    job = {"work": WORK, "names": (EQUAL, UNEVEN, EXCHANGE), "repeats": repeats, "timeout_s": min(limit_s, 600.0)}
    with Testbed(profile, paced=True) as bed:
        found: list[list[Row]] = bed.run(
            "benchmarks.slices.cluster:on_host", job, timeout_s=limit_s, while_running=_say
        )
    named = {"share": share, "link_mbit_per_s": link_mbit_per_s}
    return judged([row | named for row in found[0]])


def _say(running: Running) -> None:
    running.follow(0, lambda line: print(line, flush=True))


def on_host(host: Host, args: Mapping[str, Any]) -> list[Row]:
    """What runs on every host."""
    with host.process_group(timeout_s=args["timeout_s"]):
        collective = collective_for(None, timeout_s=args["timeout_s"])
        return measure(
            collective,
            device="cpu",
            case="cluster",
            work=args["work"],
            names=args["names"],
            repeats=args["repeats"],
            pace=host.paced,
            more=Simulated(),
        )


class Simulated:
    """What the simulator says of every contender, with the costs that equal slices have measured in the same run."""

    def __init__(self) -> None:
        self._layer: tuple[LayerSeconds, LayerSeconds] | None = None

    def __call__(self, one: Contender) -> Row:
        """A contender's figures; collective, and before its meter is read for anything else."""
        if not isinstance(one, Ours) or not isinstance(one.pipe.model, Sliced):
            return {}
        if one.balance == "none":
            self._layer = _measured(one.pipe.meter, one.work.layers)
        if self._layer is None or one.balance == "uneven":
            return {}
        forward, backward = self._layer
        exchanging = one.pipe.model.exchanging
        found: Row = {}
        call = slice_s = (0.0, 0.0)
        if exchanging is not None:
            assert exchanging.costs is not None
            verdict = exchanging.verdict
            assert verdict is not None
            found["exchange"] = str(verdict)
            found["exchange_on"] = verdict.pays
            call = exchanging.costs.forward.call_s, exchanging.costs.backward.call_s
            slice_s = exchanging.costs.forward.slice_s, exchanging.costs.backward.slice_s
        ranks = one.pipe.ranks
        schedule = sliced(ranks, 1, one.work.microbatches, one.slices, "aligned", helped=True)
        made = exchanging.plan if exchanging is not None else None
        exchange = made if made is not None else plan(schedule, (one.work.layers // ranks,) * ranks)
        costs = ExchangeCosts(
            forward=_with(forward, call[0], slice_s[0]),
            backward=_with(backward, call[1], slice_s[1]),
            kv_share=one.work.kv_heads / one.work.heads,
            boundary_s=slice_s[0],
        )
        simulated = simulate_exchange(exchange, schedule, costs, helped=bool(found.get("exchange_on")))
        found["simulated_s"] = simulated.makespan_s
        if found.get("exchange_on"):
            # two tensors of half a slice of keys and values
            piece = one.work.tokens // one.slices * one.work.hidden * one.work.kv_heads // one.work.heads * 4
            found["exchange_bytes"] = [max(row) * piece for row in exchange.held_pieces()]
        return found


def _with(of: LayerSeconds, call_s: float, slice_s: float) -> LayerSeconds:
    return LayerSeconds(piece_s=of.piece_s, diagonal_s=of.diagonal_s, call_s=call_s, slice_s=slice_s)


def _measured(meter: Meter, layers: int) -> tuple[LayerSeconds, LayerSeconds]:
    """What a layer takes of the first slice, and more of each further one, forward and backward: the ranks' mean."""
    meter.read()
    found = []
    for by_layer in (meter.forward, meter.backward):
        fits = [
            SliceFit.of([x for x in samples if isinstance(x, OfSlice)])
            for layer, samples in by_layer.items()
            if 0 < layer <= layers
        ]
        first, more = (
            sum(each) / len(each)
            for each in (
                all_of(sum(fit.first_s for fit in fits) / len(fits)),
                all_of(sum(fit.more_s for fit in fits) / len(fits)),
            )
        )
        found.append(LayerSeconds(piece_s=more / 2, diagonal_s=first))
    return found[0], found[1]


def judged(rows: Sequence[Row]) -> list[Row]:
    """The same rows with ratios between policies, and whether exchange meets its targets."""
    by_name = {row["schedule"]: row for row in rows if row.get("step_s")}
    for row in by_name.values():
        if row.get("simulated_s"):
            row["over_simulated"] = row["step_s_median"] / row["simulated_s"]
    if by_name.keys() >= {EQUAL, UNEVEN, EXCHANGE}:
        mine, equal, uneven = (by_name[name] for name in (EXCHANGE, EQUAL, UNEVEN))
        # of one round each, so that a disturbance counts for both
        over_equal = [a / b for a, b in zip(mine["step_s"], equal["step_s"], strict=True)]
        mine["over_equal"], mine["over_equal_most"] = statistics.median(over_equal), max(over_equal)
        mine["over_uneven"] = statistics.median(a / b for a, b in zip(mine["step_s"], uneven["step_s"], strict=True))
        bytes_of = [
            max(
                a + b
                for a, b in zip(
                    row["activation_bytes"], row.get("exchange_bytes", [0] * len(row["activation_bytes"])), strict=True
                )
            )
            for row in (mine, uneven)
        ]
        mine["held_over_uneven"] = bytes_of[0] / bytes_of[1]
        mine["target"] = f"on, simulated <= {OVER_SIMULATED}, < equal in every round, uneven: {HELD} held, {TIME} time"
        mine["met"] = (
            mine["exchange_on"]
            and mine["over_simulated"] <= OVER_SIMULATED
            and mine["over_equal_most"] < 1
            and mine["held_over_uneven"] <= HELD
            and mine["over_uneven"] <= TIME
        )
    return list(rows)
