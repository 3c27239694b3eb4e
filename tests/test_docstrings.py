"""Public functions with several parameters describe each of them, in Google's form, which the API pages show."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.helpers.house import PACKAGES, sources, text_of

MANY = 3  # parameters from which on a docstring lists them


def functions(tree: ast.AST, private: bool = False) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Public functions and methods with their docstrings; a constructor's may be the class's."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, private or node.name.startswith("_"))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node) or ""
            if node.name == "__init__" and isinstance(tree, ast.ClassDef):
                doc = f"{ast.get_docstring(tree) or ''}\n{doc}"
            elif node.name.startswith("_"):
                continue
            if not private and doc.strip():
                yield node, doc
        else:
            yield from functions(node, private)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of its parameters, without `self`, `cls` and what collects the rest."""
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [a.arg for a in every if a.arg not in ("self", "cls") and not a.arg.startswith("_")]


def described(doc: str) -> list[str] | None:
    """Names in the section `Args:`; None where there is none. A line may describe several, as `a, b: ...`."""
    found = re.search(r"^( *)Args:\n((?:(?:\1 +.*)?\n?)+)", doc, re.M)
    if found is None:
        return None
    names = re.findall(rf"^{found[1]}    (\*{{0,2}}\w+(?:, \w+)*)(?: \([^)]*\))?:", found[2], re.M)
    return [n.strip().lstrip("*") for group in names for n in group.split(",")]


def faults(source: str) -> list[str]:
    found = []
    for node, doc in functions(ast.parse(source)):
        wanted, given = parameters(node), described(doc)
        if given is None and len(wanted) >= MANY:
            found.append(f"{node.lineno}: {node.name} has {len(wanted)} parameters and no Args:")
        elif given is not None and (
            wrong := set(wanted) ^ {n for n in given if n != (node.args.vararg or node.args.kwarg or ast.arg("")).arg}
        ):
            found.append(f"{node.lineno}: {node.name}: Args: and the signature differ in {sorted(wrong)}")
    return found


@pytest.mark.parametrize("room", sorted({"/".join(p.parts[:2]) for p in sources(*PACKAGES, "integrations")}))
def test_parameters_are_described(room: str) -> None:
    found = [
        f"{p.as_posix()}:{line}"
        for p in sources(*PACKAGES, "integrations")
        if "/".join(p.parts[:2]) == room
        for line in faults(text_of(p))
    ]
    assert not found


def test_a_fault_is_seen() -> None:
    call = 'def f(a, b, c):\n    """Adds.\n\n    {}\n    """\n'
    assert faults(call.format("a: one."))
    assert faults(call.format("Args:\n        a: One.\n        b: Two."))
    assert not faults(call.format("Args:\n        a: One.\n        b, c: Others."))
