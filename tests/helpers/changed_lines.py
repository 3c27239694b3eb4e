"""What a loop has to change to become another: lines added or changed between two programs."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path


def code_of(path: Path) -> list[str]:
    """A program's lines behind its docstring, without empty ones."""
    text = path.read_text()
    first = ast.parse(text).body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    start = first.end_lineno or 0 if documented else 0
    return [line.rstrip() for line in text.splitlines()[start:] if line.strip()]


def lines_changed(before: Path, after: Path) -> list[str]:
    """Lines of `after` that `before` does not have, in order."""
    return [line[2:] for line in difflib.ndiff(code_of(before), code_of(after)) if line.startswith("+ ")]
