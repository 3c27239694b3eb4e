"""What tests need is installed with them; the one package that no index has is named here, and what waits for it."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PEERS = ["accelerate", "datasets", "deepspeed", "peft", "transformers", "trl"]
NEEDS_A_CHECKOUT = {  # by variable of `make test-peers`
    "PEERS_TUTEL": [
        "tests/convert/test_tutel.py",
        "tests/integrations/test_tutel.py",
        "tests/peers/test_tutel_examples.py",
        "tests/processes/test_tutel_example.py",
    ],
    "PEERS_DEEPSPEED": ["tests/peers/test_deepspeed_suite.py"],
}


@pytest.mark.parametrize("package", PEERS)
def test_a_peer_is_installed_with_the_tests_and_pinned(package: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = " ".join([*extras["test"], *extras["deepspeed"], *extras["hf"]])
    assert re.search(rf"\b{package}>=", wanted)
    assert re.search(rf"^{package}[>=]=.*", (ROOT / "constraints.txt").read_text(), re.M)
    assert importlib.util.find_spec(package) is not None  # so no test is skipped for lack of it


@pytest.mark.parametrize("variable", NEEDS_A_CHECKOUT)
def test_what_waits_for_a_checkout_says_so(variable: str) -> None:
    here = Path(__file__).resolve()
    found = [p for p in (ROOT / "tests").rglob("test_*.py") if p != here and variable in p.read_text()]
    assert sorted(p.relative_to(ROOT).as_posix() for p in found) == NEEDS_A_CHECKOUT[variable]


def test_the_page_on_loops_names_what_exists() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "loops.md").read_text(), re.S)
    assert len(blocks) == 6
    for block in blocks:
        known: dict[str, object] = {}
        tree = ast.parse(block)
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(compile(ast.Module([node], []), "loops.md", "exec"), known)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
                assert hasattr(known[node.value.id], node.attr), ast.unparse(node)
