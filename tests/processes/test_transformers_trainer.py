"""Trainer on real processes: with the callback it trains, saves and resumes as Trainer does with the whole model."""

from __future__ import annotations

import gc
import json
import os
import runpy
import shutil
import signal
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launch import EXAMPLES, as_launched, process_outcomes, run_gloo, torchrun
from tests.helpers.small_trainer import callback, key_warnings, logged, same_weights, small_trainer, trained

pytest.importorskip("transformers", reason="needs transformers: pip install '.[hf]'")
accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[hf]'")


# --- functions on two ranks ---


def as_started_by_torchrun(rank: int, size: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")  # the group is there already


def copied(rank: int, source: Path, target: Path) -> Path:
    if rank == 0:
        shutil.copytree(source, target)
    torch.distributed.barrier()
    return target


class Hub:
    """Stands for the hub: keeps each upload in a folder."""

    def __init__(self, kept: Path) -> None:
        self.kept = kept

    def init_hf_repo(self: Any, *_: Any, **__: Any) -> None:
        """For a Trainer."""
        self.hub_model_id, self.push_in_progress = "someone/model", None

    def upload_folder(self, *, folder_path: str, **_: Any) -> Future[None]:
        shutil.copytree(folder_path, self.kept, dirs_exist_ok=True)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def many_runs(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Losses and norms of runs that start anew, and of runs that resume, by name."""
    import transformers.trainer

    as_started_by_torchrun(rank, size)
    transformers.trainer.hf_api = lambda: Hub(folder / "hub")
    transformers.Trainer.init_hf_repo = Hub.init_hf_repo
    gc.freeze()  # accelerate collects garbage whenever training begins, among all that was imported
    found: dict[str, Any] = {}

    def keep(name: str, trainer: Any) -> Any:
        found[name] = logged(trainer), logged(trainer, "grad_norm")
        return trainer

    whole = folder / "whole" / "checkpoint-2"
    keep("whole", trained(folder / "whole", callback()))
    keep("unbalanced", trained(folder / "unbalanced", callback(balance=False), max_steps=2, push_to_hub=True))
    keep("other", trained(folder / "other", callback(), seed=1, max_steps=2))
    with key_warnings() as said:
        keep("over another run", trained(folder / "other", callback(), whole))
        keep("elsewhere, renamed", trained(folder / "new", callback(), copied(rank, whole, folder / "renamed")))
        copied(rank, whole, folder / "true" / "checkpoint-2")
        broken = copied(rank, folder / "whole" / "checkpoint-4", folder / "true" / "checkpoint-3")
        if rank == 0:
            (broken / "trainer_state.json").unlink()
        torch.distributed.barrier()
        keep("true", trained(folder / "true", callback(), True))
        keep("of one rank", trained(folder / "more", callback(), folder / "one" / "checkpoint-2"))
        best = keep(
            "best",
            trained(
                folder / "best",
                callback(),
                eval_strategy="steps",
                eval_steps=2,
                load_best_model_at_end=True,
                metric_for_best_model="eval_loss",
                greater_is_better=True,  # so that the first is the best
                save_total_limit=1,
            ),
        )
    found["warnings"] = said
    found["best from"] = Path(best.state.best_model_checkpoint).name
    best.save_model(str(folder / "saved"))
    for name in FULL:
        found[name] = full_disk(folder / f"full at {name}", name)
    return found


def with_scaler(rank: int, size: int, folder: Path, balance: bool) -> dict[str, Any]:
    """A run with the loss scaled as for fp16, in which one expert's gradient is infinite in the second step."""
    if size > 1:
        as_started_by_torchrun(rank, size)
        gc.freeze()
    trainer = small_trainer(folder, callback(balance=balance) if size > 1 else None, save_strategy="no")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    # accelerate refuses to make it without a GPU
    accelerator = trainer.accelerator
    accelerator.scaler, accelerator.native_amp = scaler, True
    accelerator.state._mixed_precision = "fp16"
    accelerator.autocast_handler = accelerate.utils.AutocastKwargs(enabled=False)
    weights = [p for n, p in trainer.model.named_parameters() if ".experts." in n]
    passes = 0

    def overflow(p: torch.Tensor) -> None:
        nonlocal passes
        passes += 1
        if passes == 2 and p.grad is not None:
            p.grad.flatten()[-1] = torch.inf

    if rank == size - 1:
        weights[0].register_post_accumulate_grad_hook(overflow)
    trainer.train()
    shared = sum(float(p.detach().double().sum()) for n, p in trainer.model.named_parameters() if ".experts." not in n)
    return {"losses": logged(trainer), "scale": scaler.get_scale(), "shared": shared}


_save = torch.save
FULL = {
    "optimizer_experts_1_of_2.pt": 1,
    "training_args.bin": 0,
}  # files of a checkpoint, and the ranks that write them


def full_disk(folder: Path, name: str) -> str:
    """What is said where the disk is full when the file `name` of the second checkpoint is written."""

    def save(what: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).name == name and Path(path).parent.name == "checkpoint-4":
            raise OSError(28, "No space left on device")
        _save(what, path, *args, **kwargs)

    torch.save = save  # type: ignore[assignment]
    try:
        trained(folder, callback(), save_total_limit=1)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.save = _save
    return ""


def killed_run(folder: Path, at: str) -> None:
    """Rank 1 is killed while it writes the file `at` of the second checkpoint."""

    def save(what: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).name == at and Path(path).parent.name == "checkpoint-4":
            Path(path).write_bytes(b"PK")  # the beginning of a file
            os.kill(os.getpid(), signal.SIGKILL)
        _save(what, path, *args, **kwargs)

    as_started_by_torchrun(torch.distributed.get_rank(), torch.distributed.get_world_size())
    torch.save = save  # type: ignore[assignment]
    trained(folder, callback(), save_total_limit=1)


# --- the tests ---


def test_training_saving_and_resuming(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", None, save_strategy="no")
    one = trained(tmp_path / "one", callback())
    ranks = run_gloo(many_runs, 2, tmp_path)
    for found in ranks:
        whole, norms = found["whole"]
        assert whole == pytest.approx(logged(plain), rel=1e-5)
        # that of the experts of all ranks
        assert norms == pytest.approx(logged(plain, "grad_norm"), rel=1e-5)
        assert found["unbalanced"][0] == pytest.approx(whole[:2], rel=1e-6)
        assert found["unbalanced"][1] == pytest.approx(norms[:2], rel=1e-5)
        assert found["other"][0] != pytest.approx(whole[:2], rel=1e-3)
        for name in ("over another run", "elsewhere, renamed", "true"):
            assert found[name][0] == pytest.approx(whole, rel=1e-6), name
        assert found["of one rank"][0] == pytest.approx(logged(one), rel=1e-5)
        assert found["warnings"] == []
        assert found["best from"] == "checkpoint-2"
    same_weights(tmp_path / "saved", tmp_path / "best" / "checkpoint-2", 0.0)
    same_weights(tmp_path / "hub", tmp_path / "unbalanced" / "checkpoint-2", 0.0)
    for (name, writer), what in zip(FULL.items(), ("the optimizer's state", "what is beside the model"), strict=True):
        assert f"writing of {what}" in ranks[1 - writer][name]
        assert f"rank(s) [{writer}]" in ranks[1 - writer][name]
        assert "No space left" in ranks[writer][name]
        assert (tmp_path / f"full at {name}" / "checkpoint-2" / "trainer_state.json").exists()
    fewer = trained(tmp_path / "fewer", callback(), tmp_path / "whole" / "checkpoint-2")
    assert logged(fewer) == pytest.approx(ranks[0]["whole"][0], rel=1e-5)
    # Adam divides by the gradient's size, so rounding in a tiny gradient moves a weight visibly
    same_weights(tmp_path / "fewer" / "checkpoint-4", tmp_path / "whole" / "checkpoint-4", 2e-3)


@pytest.mark.parametrize("balance", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_scaled_loss_that_overflows_on_one_rank(tmp_path: Path, balance: bool) -> None:
    """All ranks skip the step, as Trainer does with the whole model."""
    plain = with_scaler(0, 1, tmp_path, balance)
    for found in run_gloo(with_scaler, 2, tmp_path, balance):
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert found["scale"] == plain["scale"] == 512.0
        assert found["shared"] == pytest.approx(plain["shared"], rel=1e-5)


def test_a_rank_killed_while_it_saves(tmp_path: Path) -> None:
    outcomes = process_outcomes(2, killed_run, tmp_path / "run", "rng_state_1.pth", timeout_s=100.0)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert "PeerLost" in str(outcomes[0].error)
    # resumed by one rank, the whole checkpoint that was there before goes on
    again = trained(tmp_path / "run", callback(), True, save_total_limit=1)
    assert logged(again) == pytest.approx(logged(trained(tmp_path / "one", None, save_strategy="no")), rel=1e-5)
    assert [p.name for p in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"]


# --- the example ---

STEPS = ("--steps", "4", "--save-every", "2")


def run(out: Path, *options: str, ranks: int = 2) -> list[float]:
    """Losses of the example, by step."""
    torchrun(EXAMPLES / "transformers_trainer.py", "--out", str(out), *STEPS, *options, ranks=ranks)
    found: list[float] = json.loads((out / "losses.json").read_text())
    return found


def run_here(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> list[float]:
    """Losses of the example on one process, this one."""
    monkeypatch.setattr(sys, "argv", ["example", "--out", str(out), *STEPS, *options])
    runpy.run_path(str(EXAMPLES / "transformers_trainer.py"), run_name="__main__")
    found: list[float] = json.loads((out / "losses.json").read_text())
    return found


def best_of(out: Path) -> Path:
    """The best checkpoint that the last one knows of."""
    last = max(out.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    return Path(json.loads((last / "trainer_state.json").read_text())["best_model_checkpoint"])


def test_example_on_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_here(monkeypatch, tmp_path / "plain", "--plain")
    balanced = run_here(monkeypatch, tmp_path / "balanced")
    assert balanced == pytest.approx(plain, rel=1e-5)
    same_weights(tmp_path / "plain" / "final", tmp_path / "balanced" / "final", 2e-3)
    options = ("--resume", str(tmp_path / "balanced" / "checkpoint-2"), "--best", "--save-total-limit", "1")
    resumed = run_here(monkeypatch, tmp_path / "resumed", *options)
    assert resumed == pytest.approx(balanced, rel=1e-6)
    # a learning rate under which the first checkpoint is the best
    run_here(monkeypatch, tmp_path / "best", "--best", "--learning-rate", "1", "--save-every", "1")
    assert best_of(tmp_path / "best").name == "checkpoint-1"
    same_weights(tmp_path / "best" / "final", best_of(tmp_path / "best"), 0.0)


def launched(out: Path, *options: str, ranks: int = 2) -> list[float]:
    """As `run`, on processes that need not import torch first."""
    as_launched(EXAMPLES / "transformers_trainer.py", "--out", str(out), *STEPS, *options, ranks=ranks, timeout_s=200.0)
    found: list[float] = json.loads((out / "losses.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "ep"), [(2, ()), (4, ("--ep-size", "2"))])
def test_example_losses_models_and_resuming(tmp_path: Path, ranks: int, ep: tuple[str, ...]) -> None:
    plain = run(tmp_path / "plain", "--plain", ranks=ranks)
    balanced = launched(tmp_path / "balanced", *ep, ranks=ranks)
    assert balanced == pytest.approx(plain, rel=1e-5)
    # Adam divides by the gradient's size, so rounding in a tiny gradient moves a weight visibly
    same_weights(tmp_path / "plain" / "final", tmp_path / "balanced" / "final", 2e-3)
    same_weights(tmp_path / "balanced" / "checkpoint-4", tmp_path / "balanced" / "final", 0.0)

    (tmp_path / "resumed").mkdir()
    shutil.copytree(tmp_path / "balanced" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    resumed = launched(tmp_path / "resumed", "--resume", *ep, ranks=ranks)
    assert resumed == pytest.approx(balanced, rel=1e-5)
    same_weights(tmp_path / "resumed" / "final", tmp_path / "balanced" / "final", 2e-3)
    if ep:  # one group of experts instead of two
        source = str(tmp_path / "balanced" / "checkpoint-2")
        assert launched(tmp_path / "one", "--resume", source, ranks=ranks) == pytest.approx(balanced, rel=1e-5)


@pytest.mark.slow
def test_example_resumes_from_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that was renamed, where another run's of that step lies; the newest; and on one process."""
    whole = launched(tmp_path / "whole")
    renamed = shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "kept")
    other = launched(tmp_path / "other", "--learning-rate", "0.05")
    assert other[2:] != pytest.approx(whole[2:], rel=1e-3)
    assert launched(tmp_path / "other", "--resume", str(renamed)) == pytest.approx(whole, rel=1e-6)
    shutil.copytree(renamed, tmp_path / "newest" / "checkpoint-2")
    assert launched(tmp_path / "newest", "--resume") == pytest.approx(whole, rel=1e-6)
    one = run_here(monkeypatch, tmp_path / "one", "--batch", "8", "--resume", str(renamed))
    # part of the loss is that which balances experts, and differs with the sequences that a rank has
    assert one == pytest.approx(whole, rel=3e-3)


KILLED = """
import os, runpy, signal, sys, torch
from pathlib import Path

save = torch.save

def dying(what, path, *args, **kwargs):
    if Path(path).name == "optimizer_experts_1_of_2.pt" and Path(path).parent.name == "checkpoint-4":
        os.kill(os.getpid(), signal.SIGKILL)
    save(what, path, *args, **kwargs)

torch.save = dying
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.slow
def test_example_killed_and_resumed_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it saves, with a limit of one checkpoint; one rank resumes in another folder, for the best model."""
    whole = run(tmp_path / "whole", "--batch", "4")
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    options = ("--out", str(tmp_path / "run"), *STEPS, "--save-total-limit", "1", "--batch", "4")
    with pytest.raises(AssertionError, match=r"SIGKILL|Signal 9"):
        torchrun(program, str(EXAMPLES / "transformers_trainer.py"), *options, ranks=2)
    source = tmp_path / "run" / "checkpoint-2"
    resumed = run_here(monkeypatch, tmp_path / "other", "--batch", "8", "--best", "--resume", str(source))
    # part of the loss is that which balances experts, and differs with the sequences that a rank has
    assert resumed == pytest.approx(whole, rel=3e-3)
    same_weights(tmp_path / "other" / "final", best_of(tmp_path / "other"), 0.0)
