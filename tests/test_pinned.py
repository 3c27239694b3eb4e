"""What tests need is installed with them; the one package that no index has is named here, and what waits for it."""

from __future__ import annotations

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


def test_tutel_is_pinned_by_its_commit() -> None:
    assert re.search(r"github\.com/microsoft/tutel@[0-9a-f]{12}\n", (ROOT / "docs" / "tutel.md").read_text())
