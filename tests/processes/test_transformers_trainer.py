"""The example script on real processes: with the callback Trainer gives the losses and the model of one without."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.launch import EXAMPLES, torchrun

pytest.importorskip("transformers", reason="needs transformers: pip install 'moe-prophet[hf]'")
pytest.importorskip("accelerate", reason="needs accelerate: pip install 'moe-prophet[hf]'")

STEPS = ("--steps", "4", "--save-every", "2")


def run(out: Path, *options: str, ranks: int = 2) -> list[float]:
    """Losses of the example, by step."""
    torchrun(EXAMPLES / "transformers_trainer.py", "--out", str(out), *STEPS, *options, ranks=ranks)
    found: list[float] = json.loads((out / "losses.json").read_text())
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import MixtralForCausalLM

    return dict(MixtralForCausalLM.from_pretrained(folder).state_dict())


def same(a: Path, b: Path, tolerance: float) -> None:
    left, right = weights(a), weights(b)
    assert set(left) == set(right)
    for name, value in left.items():
        assert float((value - right[name]).abs().max()) <= tolerance, name


def test_on_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(EXAMPLES / "transformers_trainer.py")
    losses = {}
    for name, options in (("plain", ["--plain"]), ("balanced", [])):
        out = tmp_path / name
        monkeypatch.setattr(sys, "argv", ["example", "--out", str(out), *STEPS, *options])
        runpy.run_path(script, run_name="__main__")
        losses[name] = json.loads((out / "losses.json").read_text())
    assert losses["balanced"] == pytest.approx(losses["plain"], rel=1e-5)
    same(tmp_path / "plain" / "final", tmp_path / "balanced" / "final", 2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "ep"), [(2, ()), (4, ("--ep-size", "2"))])
def test_losses_models_and_resuming(tmp_path: Path, ranks: int, ep: tuple[str, ...]) -> None:
    plain = run(tmp_path / "plain", "--plain", ranks=ranks)
    balanced = run(tmp_path / "balanced", *ep, ranks=ranks)
    assert balanced == pytest.approx(plain, rel=1e-5)
    # Adam divides by the gradient's size, so rounding in a tiny gradient moves a weight visibly
    same(tmp_path / "plain" / "final", tmp_path / "balanced" / "final", 2e-3)
    same(tmp_path / "balanced" / "checkpoint-4", tmp_path / "balanced" / "final", 0.0)

    (tmp_path / "resumed").mkdir()
    shutil.copytree(tmp_path / "balanced" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    resumed = run(tmp_path / "resumed", "--resume", *ep, ranks=ranks)
    assert resumed == pytest.approx(balanced, rel=1e-5)
    same(tmp_path / "resumed" / "final", tmp_path / "balanced" / "final", 2e-3)
