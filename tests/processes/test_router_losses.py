"""Router losses of Trainer and TRL on two ranks: docs/engine.md has the table."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch import run_gloo
from tests.helpers.small_sft import small_sft
from tests.helpers.small_trainer import callback, small_trainer

pytest.importorskip("transformers", reason="needs transformers: pip install '.[hf]'")
pytest.importorskip("trl", reason="needs TRL: pip install '.[hf]'")


def of_trainer(folder: Path, coefficient: float, made: Any = None) -> Any:
    trainer = small_trainer(folder, made, max_steps=1, save_strategy="no", learning_rate=0.0)
    trainer.model.config.output_router_logits = True
    trainer.model.router_aux_loss_coef = coefficient
    return trainer


def router_parts(rank: int, size: int, folder: Path) -> dict[str, float]:
    """What the router's loss adds to that of a step of 8 sequences, over all ranks."""
    if size > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")  # the group is there already
        gc.freeze()

    def part(make: Any) -> float:
        losses = []
        for coefficient in (1.0, 0.0):
            trainer = make(coefficient)
            trainer.train()
            losses.append(trainer.state.log_history[0]["loss"])
        return float(losses[0] - losses[1])

    return {
        "Trainer": part(lambda c: of_trainer(folder, c)),
        "callback": part(lambda c: of_trainer(folder, c, callback())),
        "TRL": part(lambda c: small_sft(folder, None, max_steps=1, save_strategy="no", router_aux_loss_coef=c)),
    }


def test_trainer_multiplies_by_the_ranks_and_trl_does_not(tmp_path: Path) -> None:
    one = router_parts(0, 1, tmp_path)
    assert one["Trainer"] == pytest.approx(2.0, rel=0.2)
    assert one["callback"] == pytest.approx(one["Trainer"], rel=1e-5)
    for two in run_gloo(router_parts, 2, tmp_path):
        assert two["Trainer"] == pytest.approx(2 * one["Trainer"], rel=0.1)
        assert two["callback"] == pytest.approx(two["Trainer"], rel=1e-5)
        assert two["TRL"] == pytest.approx(one["TRL"], rel=0.1)
