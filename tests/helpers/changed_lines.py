"""What a loop has to change to become another: lines added or changed between two programs."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
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


# a statement with one of these only looks at what balancing does, or ends it
_LOOKS = {"last_step", "report", "close", "revert", "print"}


def lines_of_ours(source: str) -> list[str]:
    """First lines of the statements that use what this library's packages export, imports and mere looks left out.

    What a call of ours returns counts as exported, too; so does the section "prophet" of a configuration.
    """
    ours: set[str] = set()
    found: list[str] = []
    lines = source.splitlines()
    for node in _in_order(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if any(name.split(".")[0].startswith("prophet") for name in names):
                ours |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.stmt) and not hasattr(node, "body") and _uses(node, ours):
            found.append(lines[node.lineno - 1].strip())
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _uses(node.value.func, ours):
                stored = (n for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name))
                ours |= {n.id for n in stored if isinstance(n.ctx, ast.Store)}
    return found


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def _uses(part: ast.AST, ours: set[str]) -> bool:
    nodes = list(ast.walk(part))
    if _LOOKS & {n.attr if isinstance(n, ast.Attribute) else getattr(n, "id", "") for n in nodes}:
        return False
    keys = {n.slice.value for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Constant)}
    loaded = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return "prophet" in keys or bool(loaded & ours)
