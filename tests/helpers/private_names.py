"""Private names of other libraries that the packages reach, read from the sources.

A name counts if it begins with one underscore and is none of ours:
- in an import, anywhere in the dotted path, which is listed up to it;
- as an attribute of anything (`x._name`);
- as a whole string (`getattr(x, "_name")`, tables of names).

A name is ours where a function, class, variable or argument of our packages is called so, or an attribute of `self` or
`cls` is set. What a library calls as we do cannot be told apart: `BOTH` says which of these are a library's too.
Internals without an underscore are not seen.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.helpers.house import ROOT, sources, text_of

FOLDERS = ("prophet", "pipeline_balance", "integrations")
PAGE = Path("docs/private_names.md")
STANDARD = {"_Unpickler", "_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_replace"}
NO_NAMES = {"_s", "_bytes", "_bias", "_registered"}  # ends of words, and a mark of ours
BOTH = {"_apply", "_buffers", "_config", "_configure_optimizer", "_load_from_state_dict", "_maybe_opt_step"}
BOTH |= {"_modules", "_parameters", "_save", "_save_checkpoint", "_schedulers", "_spec", "_unscale_grads_", "_version"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.isidentifier() and name.strip("_") != ""


def ours(trees: Iterable[ast.AST]) -> set[str]:
    """Names that our sources define."""
    found: set[str] = set()
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return found


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def named(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Private names in a file, with their lines, ours too; of an import the path up to it."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            stem = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module and not node.level else ""
            for alias in node.names:
                path = f"{stem}{alias.name}".split(".")
                first = next((i for i, word in enumerate(path) if is_private(word)), None)
                if first and path[0] not in FOLDERS:
                    yield ".".join(path[: first + 1]), node.lineno
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, node.lineno
        elif id(node) not in parts and is_private(str(getattr(node, "value", ""))):
            yield str(node.value), node.lineno  # type: ignore[attr-defined]


def reached(texts: dict[Path, str]) -> dict[str, list[str]]:
    """Names that count, with the places where they stand."""
    trees = {path: ast.parse(text) for path, text in texts.items()}
    own = ours(trees.values()) - BOTH
    found: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for name, line in named(tree):
            if name not in own | STANDARD | NO_NAMES:
                found[name].append(f"{path.as_posix()}:{line}")
    return dict(found)


def read_elsewhere(texts: dict[Path, str]) -> list[str]:
    """Places where a private name of ours is read off another object, in a file whose own classes do not have it."""
    trees = {path: ast.parse(text) for path, text in texts.items()}
    own = ours(trees.values()) - BOTH - STANDARD
    found = []
    for path, tree in trees.items():
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)]
        # subclasses read off `self` what they inherit; classes of one file may know each other
        known = ours([tree]) | {node.attr for node in attributes if is_self(node.value)}
        found += [f"{path.as_posix()}:{node.lineno}: {node.attr}" for node in attributes if node.attr in own - known]
    return found


def of_the_packages() -> dict[str, list[str]]:
    return reached({path: text_of(path) for path in sources(*FOLDERS)})


def rows() -> list[list[str]]:
    """The cells of the page's tables: names, what would break, tests."""
    lines = (ROOT / PAGE).read_text(encoding="utf-8").splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return [row for row in cells if len(row) == 3]


def in_backticks(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
