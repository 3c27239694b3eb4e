"""What a command imports: help and predictions need no PyTorch, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from prophet.traces.npz import RoutingTrace, write_trace
from tests.helpers.commands import command_names

_PROGRAM = """
import contextlib, io, json, sys
from prophet.cli import main
loaded = {}
for name, arguments in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
    loaded[name] = [code, sorted(m for m in sys.modules if "." not in m)]
print(json.dumps(loaded))
"""


def loaded_by(commands: dict[str, list[str]]) -> dict[str, set[str]]:
    """The packages that are loaded after each of the commands, which run one after another in a fresh process."""
    program = [sys.executable, "-c", _PROGRAM, json.dumps(commands)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: code for name, (code, _) in found.items()} == dict.fromkeys(commands, 0), done.stderr
    return {name: set(packages) for name, (_, packages) in found.items()}


def test_help_is_light() -> None:
    first = {"--version": ["--version"], "--help": ["--help"]}
    found = loaded_by(first | {name: [name, "--help"] for name in sorted(command_names())})
    for name, packages in found.items():
        assert not packages & {"torch", "scipy", "matplotlib", "rich", "transformers"}, name
        assert name not in first or "numpy" not in packages, name


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    counts = np.full((3, 1, 4, 8), 10)
    counts[..., 0] = 4000
    write_trace(tmp_path / "t.npz", RoutingTrace(counts, np.arange(3, dtype=np.int32), {"top_k": 1}))
    return tmp_path / "t.npz"


def test_predictions_and_the_live_view_need_no_torch(trace: Path) -> None:
    start = {"layers": 1, "ranks": 2, "experts": [4], "planner": "prophet"}
    step = {"step": 0, "time_s": 1.0, "exposed_s": 0.5, "hottest": [[[0, 1.5]]], "seconds": {}}
    step |= {name: [1] for name in ("max_mean", "max_mean_static", "copies", "dropped", "rows")}
    lines = [{"format": 1, "start": start}, step]
    (trace.parent / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = loaded_by(
        {
            "plan": ["plan", str(trace)],
            "simulate": ["simulate", "--ranks", "8", "--layers", "2", "--steps", "2"],
            "switch": ["switch", "--model", "llama2-70b", "--from", "tp4,pp2,dp2", "--to", "tp4,pp4,dp1"],
            "watch": ["watch", str(trace.parent), "--once"],
        }
    )
    for name, packages in found.items():
        assert not packages & {"torch", "matplotlib", "transformers"}, name
