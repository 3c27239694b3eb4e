"""The one page of results: what a terminal, a Markdown file and an HTML file show, and the JSON."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from typing import Any

from prophet.doctor.check import MARKS, Check
from prophet.gpu_check.verdict import STATES, Verdict
from prophet.report.page import Table, page, remarks, table_html

COLUMNS = ("check", "", "s", "found")


def findings(verdicts: Sequence[Verdict]) -> list[tuple[str, Check]]:
    """All findings, each with the name of its check."""
    return [(one.name, check) for one in verdicts for check in one.checks if check.state == "finding"]


def red_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """The findings as lines, with what mends them."""
    return [f"{line}  mend: {check.mend}" for line, check in zip(*headed(verdicts), strict=True)]


def headed(verdicts: Sequence[Verdict]) -> tuple[list[str], list[Check]]:
    """The findings as lines that begin with their check's name, and the findings."""
    found = findings(verdicts)
    lines = [f"{MARKS[check.state]} {name}: {_named(name, check)}" for name, check in found]
    return lines, [check for _, check in found]


def rows(verdicts: Sequence[Verdict]) -> list[tuple[str, str, str, str]]:
    """Every check as a row of `COLUMNS`; what is wrong comes first, in the checks' own order."""
    return [
        (one.name, MARKS[one.state], f"{one.seconds:.0f}", "; ".join(_named(one.name, check) for check in one.checks))
        for state in STATES
        for one in verdicts
        if one.state == state
    ]


def total(verdicts: Sequence[Verdict]) -> str:
    """One sentence with the numbers."""
    count, states = len(findings(verdicts)), [one.state for one in verdicts]
    found = f"{count} finding{'s' * (count != 1)}" if count else "No findings"
    return f"{found}, {states.count('not checked')} not checked, {sum(one.seconds for one in verdicts):.0f} s."


def paste(verdicts: Sequence[Verdict], topology: str | None) -> list[str]:
    """The lines for a user's script and shell; `topology`: the file of the calibration, if it was written."""
    lines = [line for one in verdicts for line in one.paste]
    ranks = [one.figures["topology"]["ranks"] for one in verdicts if "topology" in one.figures]
    if topology is not None and ranks:
        lines.append(f"# for expert-parallel groups of {ranks[0]}; `prophet calibrate` measures others")
        lines.append(f"config = prophet.EngineConfig(topology={json.dumps(topology)})")
        lines.append("engine = prophet.attach(model, optimizer, config=config)")
    return lines


def answer(verdicts: Sequence[Verdict], device: str, topology: str | None) -> dict[str, Any]:
    """What `--json` prints, and what is to be sent with a report.

    Args:
        verdicts: Of all checks.
        device: What they are about.
        topology: As in `paste`.
    """
    return {
        "sound": not findings(verdicts),
        "device": device,
        "topology": topology,
        "paste": paste(verdicts, topology),
        "checks": [
            {
                "name": one.name,
                "state": one.state,
                "seconds": round(one.seconds, 1),
                "lines": [
                    {"name": check.name, "state": check.state, "message": check.message, "mend": check.mend}
                    for check in one.checks
                ],
                "figures": _of_json(one.figures),
                "output": one.output,
            }
            for one in verdicts
        ],
    }


def _of_json(value: Any) -> Any:
    """The same without numbers that JSON does not have: NaN and infinities become text."""
    if isinstance(value, dict):
        return {key: _of_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_of_json(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def compact(found: dict[str, Any]) -> str:
    """The JSON as one line."""
    return json.dumps(found, separators=(",", ":"))


def markdown(verdicts: Sequence[Verdict], found: dict[str, Any]) -> str:
    """The page in Markdown; `found` is the answer."""

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    lines = [f"# prophet gpu-check on {found['device']}", "", total(verdicts), ""]
    lines += [f"- {line}" for line in red_lines(verdicts)]
    lines += ["", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(map(cell, row))} |" for row in rows(verdicts)]
    if found["paste"]:
        lines += ["", "## Lines to paste", "", "```", *found["paste"], "```"]
    return "\n".join([*lines, "", "## JSON to send", "", "```json", compact(found), "```", ""])


def html_page(verdicts: Sequence[Verdict], found: dict[str, Any]) -> str:
    """The page in HTML; `found` is the answer."""
    caption = "ok: as it should be, !!: a finding, --: not checked."
    body = remarks(red_lines(verdicts), "Findings")
    body += table_html(Table(title="Checks", caption=caption, columns=COLUMNS, rows=rows(verdicts)))
    for title, text in (("Lines to paste", "\n".join(found["paste"])), ("JSON to send", compact(found))):
        if text:
            body += f'<section><h2>{title}</h2><pre class="scroll">{html.escape(text)}</pre></section>'
    return page(f"prophet gpu-check on {found['device']}", total(verdicts), body)


def _named(name: str, check: Check) -> str:
    return check.message if check.name == name else f"{check.name}: {check.message}"
