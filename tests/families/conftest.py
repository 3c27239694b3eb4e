"""Prints a row for each family when the walk has ended, whichever process has walked it."""

from __future__ import annotations

from collections import Counter
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [r for kind in terminalreporter.stats.values() for r in kind if getattr(r, "when", "") == "call"]
    rows = sorted(value for r in reports for key, value in r.user_properties if key == "family")
    if not rows:
        return
    terminalreporter.section("families")
    for family, case, verdict, said in rows:
        terminalreporter.line(f"{family:24} {case:11} {verdict:10} {said}".rstrip())
    for case in dict.fromkeys(case for _, case, *_ in rows):
        counts = Counter(verdict for _, its, verdict, _ in rows if its == case)
        terminalreporter.line(f"{case}: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common()))
