"""Rows of the measured switches, and what is held against them.

A move is over when its slowest rank is: seconds are the largest of all ranks, then the median of the repetitions.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common import Row
from benchmarks.measure import slowest
from benchmarks.switch.cases import LARGE_BYTES, Case, alike, least_port_bytes, model_bytes
from benchmarks.switch.jobs import BUDGET_BYTES
from benchmarks.switch.universal import UNIVERSAL
from benchmarks.switch.ways import DCP, GATHER, ONE_BY_ONE, OURS
from benchmarks.tables import cell, markdown
from pipeline_balance.elastic.layouts.boxes import layout_of
from pipeline_balance.elastic.predict.bound import demand_of, least_direct_s, least_s
from pipeline_balance.elastic.predict.simulate import simulate
from prophet.state.route import route

AND_RESTART = f"{DCP}, and restart"
BUSIEST, ORDER = "busiest port of the plan / bound", "bytes in the chosen order / as given"
HIDDEN, SLOWED = "groups and routes: hidden share", "steps slowed meanwhile"
CORES = len(os.sched_getaffinity(0))
ONE_OVER_OURS = "one message per tensor / ours"


def _spread(seconds: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Median, least and most of the repetitions [ranks][repetitions]."""
    every = slowest(seconds)
    return statistics.median(every), min(every), max(every)


def _port_bytes(phases: Sequence[Sequence[Sequence[int]]]) -> int:
    """Bytes at the busiest port, by rank, phase and direction; phases come one after the other."""
    return int(np.array(phases).max(axis=2).max(axis=0).sum())


def case_rows(
    case: Case,
    parts: Sequence[Mapping[str, Any]],
    *,
    bytes_per_s: float,
    probe: Mapping[str, float],
    restart_s: float,
    universal: Mapping[str, Any] | None = None,
) -> list[Row]:
    """One row per peer. parts: of every rank; bytes_per_s: of a link, one way; universal: what DeepSpeed's took."""
    hosts = len(parts)
    plan = case.plan(hosts)
    given = route(plan.before, layout_of(case.model(), replace(plan.parallelism, order=None), ranks=hosts))
    demand = demand_of(plan.route.atoms, plan.route.space.item_bytes)
    nodes, rates = np.arange(hosts), alike(bytes_per_s)
    bound_s = least_s(demand, nodes, rates)
    seen = alike(probe["bytes_per_s"], box_s=probe["box_s"], copied_byte_s=probe["copied_byte_s"])
    simulated = simulate(plan.route, seen)
    empty_s = statistics.median(slowest(p["empty_s"] for p in parts))
    blocked_s, least, most = _spread([p["ways"][OURS]["seconds"] for p in parts])
    own = [p["ways"][OURS] for p in parts]
    row: Row = {
        "case": case.name,
        "from": case.before,
        "to": case.after,
        "order": list(plan.parallelism.rank_of_place),
        "hosts": hosts,
        "model_bytes": model_bytes(plan.route),
        "wire_bytes": plan.route.wire_bytes,
        "given_bytes": given.wire_bytes,
        "least_port_bytes": least_port_bytes(plan.route),
        "port_bytes": max(*plan.route.sent_bytes(), *plan.route.received_bytes()),
        "bound_s": bound_s,
        "direct_bound_s": least_direct_s(demand, nodes, rates),
        "blocked_s": blocked_s,
        "blocked_least_s": least,
        "blocked_most_s": most,
        "ratio": blocked_s / bound_s if bound_s else None,
        "plan_s": sum(parts[0]["plan"].values()),
        "group_s": max(p["group_s"] for p in parts),
        "hidden_s": None,
        "messages": sum(p["messages"] for p in own),
        "peak_bytes": max(p["peak_bytes"] for p in own),
        "predicted_s": simulated.seconds + (probe["start_s"] if plan.route.wire_bytes else 0.0) + empty_s,
        "host_s": simulated.host_s,
        "empty_s": empty_s,
    }
    rows = []
    for name in parts[0]["ways"]:
        if name == OURS:
            continue
        seconds, low, high = _spread([p["ways"][name]["seconds"] for p in parts])
        peer_bytes = _port_bytes([p["ways"][name]["phases"] for p in parts])
        peer = {"peer": name, "peer_bytes": peer_bytes, "peer_s": seconds, "peer_least_s": low, "peer_most_s": high}
        if name == ONE_BY_ONE and row["least_port_bytes"]:
            peer["possible"] = seconds * probe["bytes_per_s"] / row["least_port_bytes"]
        rows.append(row | peer)
        if name == DCP:
            more = {"peer_s": seconds + restart_s, "peer_least_s": low + restart_s, "peer_most_s": high + restart_s}
            rows.append(row | peer | more | {"peer": AND_RESTART})
    if universal is not None:
        rows.append(row | _universal(universal))
    return rows or [row | {"peer": "", "peer_bytes": None, "peer_s": None}]


def _universal(found: Mapping[str, Any]) -> Row:
    """DeepSpeed's part of a row; without seconds where its conversion does not cover the case."""
    peer: Row = {"peer": UNIVERSAL, "peer_bytes": None, "peer_s": None}
    if found["reason"]:
        return peer | {"reason": found["reason"]}
    spread = dict(zip(("peer_s", "peer_least_s", "peer_most_s"), _spread([found["seconds"]]), strict=True))
    return peer | {k: v for k, v in found.items() if k not in ("reason", "seconds")} | spread


def job_rows(parts: Sequence[Sequence[Mapping[str, Any]]], *, bytes_per_s: float) -> list[Row]:
    """One row per switch of a job, there and back. parts: of every rank, its kinds of jobs."""
    rows = []
    for every in zip(*parts, strict=True):
        for switches in zip(*(p["switches"] for p in every), strict=True):
            rows.append(_job_row(every[0]["job"], switches, bytes_per_s))
    return rows


def _job_row(name: str, switches: Sequence[Mapping[str, Any]], bytes_per_s: float) -> Row:
    """One change of one job, by what every rank says of all repetitions."""
    times = [s["times"] for s in switches]

    def spread(name: str) -> tuple[float, float, float]:
        return _spread([[at[name] for at in row] for row in times])

    blocked_s, least, most = spread("blocked_s")
    n_bytes = {k: statistics.median(at[k] for at in times[0]) for k in ("wire_bytes", "least_port_bytes", "port_bytes")}
    bound_s = n_bytes["least_port_bytes"] / bytes_per_s
    return {
        "case": name if switches[0]["mode"] == "safe" else f"{name}, {switches[0]['mode']}",
        "from": switches[0]["before"],
        "to": switches[0]["after"],
        "mode": switches[0]["mode"],
        "hosts": len(switches),
        "model_bytes": times[0][0]["model_bytes"],
        **n_bytes,
        "bound_s": bound_s,
        "blocked_s": blocked_s,
        "blocked_least_s": least,
        "blocked_most_s": most,
        "ratio": blocked_s / bound_s if bound_s else None,
        "inside_s": spread("inside_s")[0],
        "hidden_s": spread("hidden_s")[0],
        "messages": sum(row[-1]["messages"] for row in times),
        "larger_bytes": max(at["larger_bytes"] for at in times[0]),
        "budget_bytes": BUDGET_BYTES,
        "peak_bytes": max(at["peak_bytes"] for row in times for at in row),
    }


def beside_rows(parts: Sequence[Sequence[Mapping[str, Any]]]) -> list[Row]:
    """Of every kind of job, how much of preparing was hidden behind steps, and what it did to them."""
    return [{"job": every[0]["job"], **_beside([p["beside"] for p in every])} for every in zip(*parts, strict=True)]


def _beside(parts: Sequence[Sequence[Mapping[str, float]]]) -> Row:
    """Of the rank with the smallest share hidden; what slows steps is the mean of all ranks.

    `cpu_slows_by`: by how much steps take longer since all ranks' threads use the machine's processors, whatever else.
    """
    found = []
    for rows in parts:
        groups_s, routes_s, exposed_s = (sum(r[k] for r in rows) for k in ("groups_s", "routes_s", "exposed_s"))
        cpu_s, overlapped = (statistics.fmean(r[k] for r in rows) for k in ("cpu_s", "overlapped"))
        before_s, meanwhile_s = (statistics.median(r[k] for r in rows) for k in ("before_s", "meanwhile_s"))
        found.append(
            {
                "preparations": len(rows),
                "groups_s": groups_s / len(rows),
                "routes_s": routes_s / len(rows),
                "exposed_s": exposed_s / len(rows),
                "called_s": statistics.fmean(r["called_s"] for r in rows),
                "hidden_share": 1 - exposed_s / (groups_s + routes_s) if groups_s + routes_s else 1.0,
                "step_before_s": before_s,
                "step_meanwhile_s": meanwhile_s,
                "slowed_by": meanwhile_s / before_s - 1,
                "cpu_s": cpu_s,
                "cpu_slows_by": len(parts) * cpu_s / CORES / (max(overlapped, 1.0) * before_s),
            }
        )
    means = {k: statistics.fmean(r[k] for r in found) for k in ("slowed_by", "cpu_s", "cpu_slows_by")}
    return min(found, key=lambda r: r["hidden_share"]) | means


# --- targets ---


def _target(what: str, row: Row | None, value: float, limit: float, *, most: bool, possible: float = math.nan) -> Row:
    """possible: the best value that any mover can have, where that is known."""
    names = {} if row is None else {k: row[k] for k in ("case", "from", "to")}
    met = value <= limit if most else value >= limit
    bound = {} if math.isnan(possible) else {"possible": possible}
    return {"what": what, **names, "value": value, "target": limit, "at_most": most, "met": met, **bound}


def _of_move(row: Row) -> Iterator[Row]:
    if row["least_port_bytes"] >= LARGE_BYTES:
        yield _target("blocked / bound", row, row["ratio"], 1.25, most=True)
    else:
        limit_s = 1.25 * row["bound_s"] + 0.15
        yield _target("blocked s, at most 1.25 x bound + 0.15 s", row, row["blocked_s"], limit_s, most=True)
    if row["least_port_bytes"]:
        yield _target(BUSIEST, row, row["port_bytes"] / row["least_port_bytes"], 1.05, most=True)
    one_dimension = row["case"].split()[0] in ("dp", "tp", "pp")
    if one_dimension and row.get("given_bytes"):
        yield _target(ORDER, row, row["wire_bytes"] / row["given_bytes"], 0.7, most=True)


def _of_job(row: Row) -> Iterator[Row]:
    if row["mode"] == "in-place":
        least = (row["peak_bytes"] - row["budget_bytes"]) / row["larger_bytes"]
        yield _target("in-place: peak less the budget / larger state", row, least, 1.1, most=True)


def _of_peer(row: Row) -> Iterator[Row]:
    if not row["port_bytes"] or row["peer_s"] is None:
        return
    times, by_bytes = row["peer_s"] / row["blocked_s"], (row["peer_bytes"] or 0) / row["port_bytes"]
    if row["peer"] == ONE_BY_ONE:
        yield _target(ONE_OVER_OURS, row, times, 1.25, most=False, possible=row["possible"])
    if row["peer"] == GATHER:
        yield _target("gather-and-cut / ours, of the ratio of bytes", row, times / by_bytes, 0.8, most=False)
    if row["peer"] == DCP:
        yield _target("I/O of DCP / ours, of the ratio of bytes", row, times / by_bytes, 0.8, most=False)
        if row["case"] in ("dp halved", "tp halved", "pp halved"):
            yield _target("I/O of DCP / ours, halved", row, times, 2.4, most=False)
        if row["wire_bytes"] >= LARGE_BYTES:
            yield _target("I/O of DCP / ours, 32 MB moved", row, times, 1.2, most=False)
    if row["peer"] == AND_RESTART:
        yield _target("DCP and restart / ours", row, times, 2.0, most=False)


def targets(rows: Sequence[Row], jobs: Sequence[Row], beside: Sequence[Row]) -> list[Row]:
    """Every target with its value, and whether it is met."""
    moves = list({(r["case"], r["from"], r["to"]): r for r in rows}.values())
    found = [t for row in (*moves, *jobs) for t in _of_move(row)]
    found += [t for row in jobs for t in _of_job(row)]
    found += [t for row in rows for t in _of_peer(row)]
    for row in beside:
        at = {"case": row["job"], "from": "", "to": ""}
        found.append(_target(HIDDEN, at, row["hidden_share"], 0.95, most=False))
        found.append(_target(SLOWED, at, row["slowed_by"], 0.05, most=True))
    errors = [r["predicted_s"] / r["blocked_s"] - 1 for r in moves if r["wire_bytes"]]
    if errors:
        found.append(_target("predicted: mean error", None, statistics.fmean(map(abs, errors)), 0.08, most=True))
        found.append(_target("predicted: bias (absolute)", None, abs(statistics.fmean(errors)), 0.03, most=True))
    return found


def table(rows: Sequence[Row], jobs: Sequence[Row]) -> str:
    """The rows as text: a line per change, seconds of the peers beside."""
    peers = list(dict.fromkeys(r["peer"] for r in rows if r["peer"]))
    head = ["case", "from", "to", "port MB", "bound s", "ours s (least - most)", "ratio", "predicted s"]
    for peer in peers:
        head += [peer, "its ratio", "possible"] if peer == ONE_BY_ONE else [peer]
    lines = []
    by_case: dict[tuple[str, str, str], dict[str, Row]] = {}
    for r in rows:
        by_case.setdefault((r["case"], r["from"], r["to"]), {})[r["peer"]] = r
    for group in by_case.values():
        r = next(iter(group.values()))
        cells = [cell for p in peers for cell in _peer_cells(p, group.get(p, {}))]
        lines.append(_line(r, f"{r['predicted_s']:.2f}", *cells))
    lines += [_line(r, *[""] * (len(head) - 7)) for r in jobs]
    return markdown(head, lines)


def _peer_cells(peer: str, r: Row) -> list[str]:
    """Seconds; of one message per tensor also the ratio to ours, and the largest that any mover can have."""
    seconds = r.get("peer_s")
    cells = ["" if seconds is None else f"{seconds:.2f}"]
    if peer == ONE_BY_ONE:
        possible = r.get("possible")
        cells += ["", ""] if possible is None else [f"{r['peer_s'] / r['blocked_s']:.2f}", f"{possible:.2f}"]
    return cells


def _line(r: Row, *more: str) -> list[str]:
    ratio = "" if r["ratio"] is None else f"{r['ratio']:.2f}"
    own = f"{r['blocked_s']:.2f} ({r['blocked_least_s']:.2f} - {r['blocked_most_s']:.2f})"
    port = f"{r['least_port_bytes'] / 1e6:.1f}"
    return [r["case"], r["from"], r["to"], port, f"{r['bound_s']:.2f}", own, ratio, *more]


def where(t: Row) -> str:
    """The change that a target is of."""
    return f"{t['case']} {t['from']} -> {t['to']}" if t.get("from") else t.get("case", "")


def summary(found: Sequence[Row]) -> str:
    """Targets by kind: how many are met, how many no mover can meet, the worst value, and where."""
    lines = []
    for what in dict.fromkeys(t["what"] for t in found):
        group = [t for t in found if t["what"] == what]
        margin = [(t["value"] - t["target"]) * (1 if t["at_most"] else -1) for t in group]
        worst = group[int(np.argmax(margin))]
        met = f"{sum(t['met'] for t in group)} of {len(group)}"
        beyond = sum(t.get("possible", t["target"]) < t["target"] for t in group)
        lines.append([what, met, f"{beyond or ''}", cell(worst["value"]), cell(worst["target"]), where(worst)])
    return markdown(("target", "met", "out of reach", "worst", "limit", "where"), lines)
