"""Reads the packages' sources, never importing them: their rooms, the imports between rooms, and what is too long.

python -m tests.helpers.house          # rooms, arrows, arrows that point up, circles; files and functions too long
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("prophet", "pipeline_balance")
MOST_FUNCTION_LINES = 80


@dataclass(frozen=True)
class Import:
    """One import statement: where it stands, what it names, and whether it runs."""

    path: Path
    line: int
    module: str  # absolute dotted name; for `from a import b` this is "a.b"
    typing_only: bool

    @property
    def where(self) -> str:
        return f"{self.path.as_posix()}:{self.line}"


def module_name(path: Path) -> str:
    """Dotted name of a source file given relative to the repository."""
    parts = list(path.with_suffix("").parts)
    if parts[0] == "integrations":
        parts = parts[1:]
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def imports_of(source: str, path: Path) -> Iterator[Import]:
    """All imports of a file, inside functions too, with relative ones made absolute."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]

    def visit(node: ast.AST, typing_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name, typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(path, node.lineno, f"{stem}.{alias.name}", typing_only)
        elif isinstance(node, ast.If):
            guarded = typing_only or "TYPE_CHECKING" in ast.unparse(node.test)
            for child in node.body:
                yield from visit(child, guarded)
            for child in node.orelse:
                yield from visit(child, typing_only)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):  # no expression holds an import
                    yield from visit(child, typing_only)

    yield from visit(tree_of(source), False)


@cache
def tree_of(source: str) -> ast.Module:
    """A file's syntax, which several tests read."""
    return ast.parse(source)


def sources(*folders: str) -> list[Path]:
    """Python files under `folders`, relative to the repository; folders that are not there yet have none."""
    return sorted(p.relative_to(ROOT) for f in folders for p in (ROOT / f).rglob("*.py"))


@cache
def text_of(path: Path) -> str:
    """Text of a source file given relative to the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def imports_in(*folders: str) -> list[Import]:
    """All imports of the files under `folders`."""
    return [i for p in sources(*folders) for i in imports_of(text_of(p), p)]


def is_door(source: str) -> bool:
    """Whether a module only passes on what others define: a docstring, imports and `__all__`."""
    body = tree_of(source).body
    docstring, rest = body[:1], body[1:]
    return bool(docstring and isinstance(docstring[0], ast.Expr) and rest) and all(
        isinstance(node, ast.ImportFrom)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "__version__"))
        for node in rest
    )


@cache
def rooms() -> set[str]:
    """Folders and modules right below the packages: `prophet.ranks`, `prophet.spec`, and `prophet` for its doors."""
    found = set()
    for path in sources(*PACKAGES):
        parts = module_name(path).split(".")
        door = len(parts) == 2 and path.name != "__init__.py" and is_door(text_of(path))
        found.add(parts[0] if door else ".".join(parts[:2]))
    return found


def room_of(module: str, known: Iterable[str]) -> str:
    """Room of a dotted name; a name that is no room's, as `prophet.attach`, is its package's."""
    parts = module.split(".")
    room = ".".join(parts[:2])
    return room if room in known else parts[0]


def arrows(imports: Iterable[Import], known: set[str]) -> set[tuple[str, str]]:
    """(importing room, imported room) of the imports that run."""
    found = set()
    for i in imports:
        if i.module.split(".")[0] in PACKAGES and not i.typing_only:
            here, there = room_of(module_name(i.path), known), room_of(i.module, known)
            if here != there:
                found.add((here, there))
    return found


def file_arrows(imports: Iterable[Import], files: Collection[str]) -> set[tuple[str, str]]:
    """(importing file, imported file), each by its module's name; imports for typing count, too."""
    found = set()
    for i in imports:
        # `from a import b` names a file a, or a file b of a folder a
        there = next((name for name in (i.module, i.module.rpartition(".")[0]) if name in files), None)
        here = module_name(i.path)
        if there is not None and there != here:
            found.add((here, there))
    return found


def circles(edges: set[tuple[str, str]]) -> list[set[str]]:
    """Rooms or files that reach each other, as sets of two or more."""
    names = {name for edge in edges for name in edge}
    reach = {name: {name} for name in names}
    known = 0
    while known < (known := sum(map(len, reach.values()))):
        for a, b in edges:
            reach[a] |= reach[b]
    found = {frozenset(b for b in reach[a] if a in reach[b]) for a in names}
    return sorted((set(group) for group in found if len(group) > 1), key=sorted)


def too_long(*folders: str) -> list[str]:
    """Functions with more code than the limit, docstring and comments aside; kernels and planner excepted."""
    found = []
    for path in sources(*folders):
        if path.as_posix().startswith(("prophet/planner/", "prophet/kernels/")):
            continue
        source = text_of(path)
        for node in ast.walk(tree_of(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                body = source.split("\n")[first.lineno - 1 : node.end_lineno]
                length = sum(bool(line.strip()) and not line.strip().startswith("#") for line in body)
                if length > MOST_FUNCTION_LINES:
                    found.append(f"{path.as_posix()}:{node.lineno}: {node.name} has {length} lines")
    return found


def main() -> None:
    """Print what `tests/test_architecture.py` holds, as figures."""
    known = rooms()
    for package in PACKAGES:
        imports = imports_in(package)
        inside = {a for a in arrows(imports, known) if all(end.split(".")[0] == package for end in a)}
        here = sorted(room for room in known if room.split(".")[0] == package)
        print(f"{package}: {len(here)} rooms, {len(inside)} arrows, {len(circles(inside))} circles")
    for line in too_long(*PACKAGES, "integrations"):
        print(f"too long: {line}")


if __name__ == "__main__":
    main()
