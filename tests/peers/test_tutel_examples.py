"""Tutel's own example scripts from a checkout, with two lines of ours: the losses of the scripts as they are.

`make test-peers PEERS_TUTEL=folder` runs this, with Tutel installed from that folder.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.launch import ROOT, torchrun

FOLDER = os.environ.get("PEERS_TUTEL", "")
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not FOLDER, reason="needs a checkout of Tutel: make test-peers PEERS_TUTEL=folder"),
]
PROGRAM = ROOT / "tests" / "helpers" / "peer_program.py"
IMPORT = "import prophet, prophet_tutel"
LINE = 'balanced = prophet_tutel.balance(model, optimizer, config=prophet.EngineConfig(planner="top2"))'
SMALL = "--batch_size 8 --num_tokens 16 --model_dim 16 --num_steps 20"
HIDDEN = f"{SMALL} --hidden_size 24"


@dataclass(frozen=True, slots=True)
class Run:
    """What the ranks of one run report: losses by step, replicas of the last step; and what was printed."""

    losses: list[list[float]]
    copies: list[int]
    printed: str


def run(script: str, out: Path, *arguments: str, balanced: bool, harness: tuple[str, ...] = ()) -> Run:
    """Run one example on two processes, as it is, or with our two lines."""
    source = (Path(FOLDER) / "tutel" / "examples" / script).read_text()
    if balanced:
        source, imports = re.subn(r"^(from tutel import system)$", rf"\1\n{IMPORT}", source, count=1, flags=re.M)
        source, lines = re.subn(r"^( *)(optimizer = .*)$", rf"\1\2\n\1{LINE}", source, count=1, flags=re.M)
        assert imports == lines == 1
        # what main() keeps to itself
        source = source.replace(f"    {LINE}", f"    global balanced\n    {LINE}")
    out.mkdir()
    (out / script).write_text(source)
    printed = torchrun(PROGRAM, "--out", str(out), *harness, str(out / script), *arguments, ranks=2, timeout_s=280)
    ends = sorted(out.glob("?.json"))
    assert len(ends) == 2, printed
    found = [json.loads(end.read_text()) for end in ends]
    return Run([one["losses"] for one in found], [one["copies"] for one in found], printed)


CASES = {
    "helloworld": ("helloworld.py", f"{HIDDEN} --l_aux_wt 0.01"),
    "dropless": ("helloworld.py", f"{HIDDEN} --capacity_factor 0 --top 1"),
    "llama": ("helloworld.py", f"{HIDDEN} --expert_type llama_ffn --num_steps 3"),
    "amp": ("helloworld_amp.py", f"{HIDDEN} --l_aux_wt 0.01"),
    "ddp": ("helloworld_ddp.py", HIDDEN),
    "ddp_tutel": ("helloworld_ddp_tutel.py", HIDDEN),
    "switch": ("helloworld_switch.py", HIDDEN),
    "custom_gate_expert": ("helloworld_custom_gate_expert.py", SMALL),
    "custom_expert_sharded": ("helloworld_custom_expert_sharded.py", SMALL),
    "mnist": ("moe_mnist.py", "--epochs 1 --batch-size 16 --lr 0.05"),
    "cifar10": ("moe_cifar10.py", "--epochs 1 --batch-size 16 --lr 0.05"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_losses_are_those_of_the_script(case: str, tmp_path: Path) -> None:
    script, text = CASES[case]
    arguments, harness = text.split(), ("--lr", "1e6" if case == "llama" else "1e3")
    plain = run(script, tmp_path / "plain", *arguments, balanced=False, harness=harness)
    ours = run(script, tmp_path / "balanced", *arguments, balanced=True, harness=harness)
    gap = max(abs(a - b) for p, o in zip(plain.losses, ours.losses, strict=True) for a, b in zip(p, o, strict=True))
    print(f"{case}: {len(plain.losses[0])} steps, {plain.losses[0][0]:.6f} to {plain.losses[0][-1]:.6f}, gap {gap:.2g}")
    assert min(ours.copies) > 0
    assert abs(plain.losses[0][0] - plain.losses[0][-1]) > 1e-3
    # amp computes in bfloat16, of 8 bits
    assert gap <= (4e-3 if case == "amp" else 1e-6) * max(1.0, *plain.losses[0])
    accuracies = [re.findall(r"\(Top-\d\) [\d.]+%", one.printed) for one in (plain, ours)]
    assert accuracies[0] == accuracies[1]


def test_dropout_in_the_experts_is_random_and_learns(tmp_path: Path) -> None:
    arguments = ["--epochs", "2", "--batch-size", "16"]
    ours = run("moe_mnist.py", tmp_path / "o", *arguments, balanced=True, harness=("--random-dropout",))
    assert min(ours.copies) > 0
    assert ours.losses[0][-1] < 0.8 * ours.losses[0][0]


def test_a_layer_built_from_scratch_is_none_of_tutels(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"the model has no tutel\.moe\.moe_layer"):
        run("helloworld_from_scratch.py", tmp_path / "o", balanced=True)
