"""The results page: tables of measured switches, plans and the paper's rows, from the files that `--json` wrote."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.switch.cases import LARGE_BYTES
from benchmarks.switch.rows import BUSIEST, HIDDEN, ONE_OVER_OURS, ORDER, SLOWED, Row, summary, table
from benchmarks.switch.universal import UNIVERSAL
from benchmarks.tables import markdown
from prophet.errors import SpecError

NUMBERS = {4: "Four", 8: "Eight"}


def page(files: Sequence[Path]) -> str:
    """The page's text. Raises `SpecError` for a file that `--json` did not write."""
    documents = [_read(file) for file in files]
    first = documents[0]["environment"]
    parts = [
        f"# Switches of the parallel layout, {first['date'][:10]}",
        "How close do moves of training state come to what the links allow, and what do other ways take?",
        "\n".join(_made(documents)),
    ]
    for document in documents:
        if "measured" in document:
            parts += _measured(document["measured"])
        if "paper" in document:
            parts += ["## DynaTran's rows, predicted at its bandwidths", _paper(document["paper"])]
        if "plan" in document:
            parts += ["## Planning", _planning(document)]
    return "\n\n".join(parts) + "\n"


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        some = {"measured", "paper", "plan"} & found.keys()
        lacks = [name for name in ("date", "commit", "command", "load_before") if name not in found["environment"]]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise SpecError(f"{file} is not what --json wrote: {type(error).__name__}: {error}") from error
    if lacks or not some:
        raise SpecError(f"{file} is not what --json wrote: it has {sorted(found)}, its environment lacks {lacks}")
    return found


def _made(documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    first = documents[0]["environment"]
    commits = ", ".join(dict.fromkeys(d["environment"]["commit"] for d in documents))
    yield f"- Commit: {commits}."
    yield f"  One machine with {first['cores']} cores plays all hosts."
    yield f"  Python {first['python']}, torch {first['torch']}."
    for document in documents:
        at = document["environment"]
        yield fill(f"- Command: `{at['command']}`.", 120, subsequent_indent="  ", break_on_hyphens=False)
        yield f"  Load average before: {at['load_before']:.2f}."
    for found in (d["measured"] for d in documents if "measured" in d):
        name = NUMBERS[found["hosts"]]
        yield f"- {name} hosts: {found['sizes']['repetitions']} repetitions, medians with least and most."


# --- measured ---


def _measured(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {NUMBERS[found['hosts']]} hosts"
    yield f"Links: {found['links']}. {_links(found)}"
    yield "### Targets"
    yield summary(found["targets"])
    yield _misses(found)
    yield "### Seconds"
    yield table(found["rows"], found["jobs"])
    yield from _errors(found["rows"])
    if any(r["peer"] == UNIVERSAL for r in found["rows"]):
        yield "### DeepSpeed's universal checkpoint"
        yield _universal(found["rows"])
    yield "### Bytes and preparation"
    yield _details(found)
    if found["beside"]:
        yield "### Preparing beside steps"
        yield _beside(found)


def _links(found: Mapping[str, Any]) -> str:
    cold = found["cold_start"]
    return (
        f"A ring of messages had {found['probe']['bytes_per_s'] / 1e6:.1f} MB/s of the stated "
        f"{found['bytes_per_s'] / 1e6:.1f}.\n"
        f"A cold start took {cold['seconds']:.2f} s: {statistics.median(cold['imports_s']):.2f} s for imports, "
        f"{cold['process_group_s']:.2f} s for the process group, {cold['layout_groups_s']:.3f} s for the layout's "
        f"groups.\nDynaTran's Figure 1 has up to 6 s on 8 GPUs and near 30 s on 32. "
        f"The whole run took {found['wall_s']:.0f} s."
    )


def _misses(found: Mapping[str, Any]) -> str:
    missed = [t for t in found["targets"] if not t["met"]]
    if not missed:
        return "All are met."
    rows = {(r["case"], r["from"], r["to"]): r for r in (*found["jobs"], *found["rows"])}
    beside = {r["job"]: r for r in found["beside"]}
    lines = []
    for t in missed:
        row = rows.get((t.get("case"), t.get("from"), t.get("to"))) or beside.get(t.get("case"), {})
        where = f"{t['case']}, {t['from']} to {t['to']}" if t.get("from") else t.get("case", "")
        lines.append((t["what"], where, f"{t['value']:.3g}", f"{t['target']:.3g}", _cause(t, row, found)))
    return "Missed:\n\n" + markdown(("target", "case", "value", "limit", "cause"), lines)


def _cause(t: Row, row: Row, found: Mapping[str, Any]) -> str:
    """Why a target is missed, as far as the row's own figures say."""
    if t["what"] == ONE_OVER_OURS:
        busy = f"one message per tensor keeps the busiest port busy {min(1 / t['possible'], 1):.0%} of its time"
        if t["possible"] < t["target"]:
            return f"out of reach: {busy}"
        return f"{busy}; ours takes {t['possible'] / t['value']:.2f} of the least time at the rate seen"
    if t["what"] == BUSIEST and row["port_bytes"] <= 1.001 * row["direct_bound_s"] * found["bytes_per_s"]:
        return "the least without forwarding, which the bound allows"
    if t["what"] == ORDER:
        return "no assignment of ranks to places leaves less to move"
    if t["what"] == HIDDEN:
        return f"{row['called_s'] * 1e3:.0f} ms of {row['exposed_s'] * 1e3:.0f} ms are the call of `prepare`"
    if t["what"] == SLOWED:
        return f"{found['hosts']} threads' processor time on shared cores makes {row['cpu_slows_by']:.3g}"
    if t["what"].startswith("blocked") and row["case"].startswith(("whole job, sharded", "whole job, tp")):
        return "modules are made anew, which is no part of the move"
    if row.get("predicted_s") and t["what"].startswith("blocked"):
        return f"predicted {row['predicted_s']:.2f} s, by the rate seen and the host's own time"
    return ""


def _errors(rows: Sequence[Row]) -> Iterator[str]:
    """Predictions against seconds, with their sign."""
    moves = {_change(r): r for r in rows if r["wire_bytes"]}.values()
    errors = [(r["least_port_bytes"] >= LARGE_BYTES, r["predicted_s"] / r["blocked_s"] - 1) for r in moves]
    words = [
        f"{statistics.fmean(e for is_large, e in errors if is_large == large):+.1%} {name}"
        for large, name in ((True, "of moves of 32 MB"), (False, "of the others"))
        if any(is_large == large for is_large, _ in errors)
    ]
    if words:
        yield f"Predicted over measured, on average: {' and '.join(words)}."


def _universal(rows: Sequence[Row]) -> str:
    mine = [r for r in rows if r["peer"] == UNIVERSAL]
    lines = [
        (
            _change(r),
            *(f"{r[k]:.2f}" for k in ("peer_s", "save_s", "convert_s", "load_s")),
            *(f"{r[k] / 1e6:.1f}" for k in ("saved_bytes", "converted_bytes", "read_bytes")),
        )
        for r in mine
        if r["peer_s"] is not None
    ]
    head = ("case", "s", "save s", "convert s", "load s", "saved MB", "converted MB", "read MB by the fullest rank")
    reasons: dict[str, list[str]] = {}
    for r in mine:
        if r["peer_s"] is None:
            reasons.setdefault(r["reason"], []).append(_change(r))
    refused = [(why, "; ".join(cases)) for why, cases in reasons.items()]
    text = "Files lie on this machine's tmpfs, and its processes talk over loopback: nothing crosses a link.\n\n"
    text += markdown(head, lines) if lines else "No case here is covered."
    return text + ("\n\nNot covered:\n\n" + markdown(("why", "cases"), refused) if refused else "")


def _details(found: Mapping[str, Any]) -> str:
    by_case = {(r["case"], r["from"], r["to"]): r for r in (*found["rows"], *found["jobs"])}
    lines = [
        (
            _change(r),
            *(f"{r[k] / 1e6:.1f}" for k in ("model_bytes", "wire_bytes", "peak_bytes")),
            f"{r['messages']}",
            *("" if r.get(k) is None else f"{r[k]:.3f}" for k in ("plan_s", "group_s", "hidden_s", "host_s")),
        )
        for r in by_case.values()
    ]
    head = ("case", "model MB", "wire MB", "peak MB", "messages", "plan s", "groups s", "hidden s", "host s")
    return markdown(head, lines)


def _beside(found: Mapping[str, Any]) -> str:
    lines = [
        (
            r["job"],
            f"{r['preparations']}",
            *(f"{r[k] * 1e3:.0f}" for k in ("groups_s", "routes_s", "exposed_s", "called_s")),
            f"{r['hidden_share']:.1%}",
            *(f"{r[k] * 1e3:.0f}" for k in ("step_before_s", "step_meanwhile_s")),
            f"{r['slowed_by']:+.1%}",
            f"{r['cpu_s'] * 1e3:.0f}",
            f"{r['cpu_slows_by']:+.1%}",
            f"{r['table_2_here']:.3f}",
        )
        for r in found["beside"]
    ]
    head = ("job", "times", "groups ms", "routes ms", "exposed ms", "in the call ms", "hidden", "step before ms")
    paper = " and ".join(f"{share:.3f} ({name})" for name, share in found["table_2_paper"].items())
    return (
        markdown((*head, "step meanwhile ms", "slowed by", "CPU ms", "by that alone", "Table 2's ratio"), lines)
        + f"\n\nDynaTran's Table 2 has {paper}, with groups that take 41 s. No target is set for it."
    )


# --- without hosts ---


def _paper(rows: Sequence[Row]) -> str:
    lines = [
        (
            r["table"],
            r["model"],
            r["from"],
            r["to"],
            f"{r['ranks']}",
            f"{r['paper_s']:.3g}",
            ", ".join(f"{name} {s:.4g}" for name, s in r["peers_s"].items()),
            *(f"{r[k]:.3g}" for k in ("predicted_s", "as_given_s", "bound_s", "paper_over_predicted")),
        )
        for r in rows
    ]
    slower = sum(r["predicted_s"] > r["paper_s"] for r in rows)
    head = ("table", "model", "from", "to", "ranks", "DynaTran s", "others s", "predicted s", "in the order as given s")
    return markdown((*head, "bound s", "DynaTran / predicted"), lines) + f"\n\nSlower than DynaTran: {slower} rows."


def _planning(document: Mapping[str, Any]) -> str:
    keys = ("description_s", "layouts_s", "order_s", "routes_s", "plan_s")
    lines = [(r["case"], r["from"], r["to"], f"{r['ranks']}", *(f"{r[k]:.3f}" for k in keys)) for r in document["plan"]]
    head = ("model", "from", "to", "ranks", "description s", "layouts s", "order s", "routes s", "all s")
    return markdown(head, lines) + f"\n\nImporting scipy's parts took {document['imports_s']:.2f} s more, once."


def _change(r: Row) -> str:
    return f"{r['case']}, {r['from']} to {r['to']}"
