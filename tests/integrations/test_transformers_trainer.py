"""The callback and its Trainer on one process: refusals, resuming, and that one checkpoint is always whole."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install '.[hf]'")
pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[hf]'")

from prophet_transformers import ProphetCallback
from prophet_transformers.callback import _check_settings
from transformers import Trainer, TrainerCallback

import prophet
from prophet.errors import CheckpointError
from prophet.monitor.read import read_steps
from prophet.traces import read_trace
from tests.helpers.small_trainer import callback, key_warnings, logged, same_weights, small_trainer, trained


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The folder of a run with checkpoints 2 and 4, and its losses."""
    out = tmp_path_factory.mktemp("run")
    return out, logged(trained(out, callback()))


# --- refusals ---


@pytest.mark.parametrize("setting", ["auto_find_batch_size", "save_on_each_node", "enable_jit_checkpoint"])
def test_settings_that_would_lose_something(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting}=True .* set {setting}=False"):
        small_trainer(tmp_path, callback(), **{setting: True})


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("is_deepspeed_enabled", "deepspeed: .* leave ProphetCallback out, write `import prophet_deepspeed`"),
        ("is_fsdp_enabled", "fsdp: ProphetCallback works with DistributedDataParallel"),
    ],
)
def test_a_second_framework_that_wraps_the_model(setting: str, text: str) -> None:
    """As accelerate's launcher may have set it, with nothing in Trainer's arguments."""
    trainer = SimpleNamespace(args=SimpleNamespace(), accelerator=SimpleNamespace(), model_init=None, **{setting: True})
    with pytest.raises(ValueError, match=text):
        _check_settings(trainer)


def test_a_model_that_is_balanced_already(tmp_path: Path) -> None:
    made = small_trainer(tmp_path, None)
    prophet.convert(made.model)
    engine = prophet.attach(made.model)
    with pytest.raises(ValueError, match=r"has been converted already; prophet\.revert\(model\) first"):
        Trainer(model=made.model, args=made.args, callbacks=[callback()])
    engine.close()


def test_a_callback_that_comes_too_late(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, None)
    trainer.add_callback(callback())
    with pytest.raises(RuntimeError, match=r"give ProphetCallback\(\) to Trainer\(callbacks="):
        trainer.train()


def test_a_callback_without_its_trainer(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, None)
    with pytest.raises(RuntimeError, match="no Trainer that is being built has this ProphetCallback"):
        callback().on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model)


def test_model_init(tmp_path: Path) -> None:
    made = small_trainer(tmp_path, None)
    with pytest.raises(ValueError, match=r"model_init makes a new model .* Trainer\(model=model_init\(\)\)"):
        Trainer(model_init=lambda: made.model, args=made.args, callbacks=[callback()])


class Listener(TrainerCallback):  # type: ignore[misc]
    """Keeps what TensorBoard, W&B and the like are told."""

    def __init__(self) -> None:
        self.told: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.told.append(dict(logs))


@pytest.mark.parametrize("balance", [True, False])
def test_the_balance_is_in_the_logs(tmp_path: Path, balance: bool) -> None:
    """With losses alone, as means over the steps since the last, also for callbacks that come before ours."""
    run = tmp_path / "monitored"
    made = callback(balance=balance, monitor=run if balance else None)
    trainer = small_trainer(tmp_path, made, logging_steps=2, save_strategy="no", eval_strategy="steps", eval_steps=2)
    listener = Listener()
    trainer.callback_handler.callbacks.insert(0, listener)
    steps: list[Any] = []
    if balance:
        attached = made.on_train_begin

        def attach(*args: Any, **named: Any) -> None:
            attached(*args, **named)
            made.engine.on_step.append(steps.append)

        made.on_train_begin = attach
    trainer.train()
    with_balance = [row for row in listener.told if "moe/copies" in row or "moe/max_mean" in row]
    if not balance:
        assert with_balance == []
        with pytest.raises(ValueError, match=r"ProphetCallback\.monitor writes what an engine balances"):
            callback(balance=False, monitor=run)
        return
    assert len(with_balance) == 2
    assert all("loss" in row for row in with_balance)
    by_step = [[step.max_mean for step in steps[at : at + 2]] for at in (0, 2)]
    assert [row["moe/max_mean"] for row in with_balance] == pytest.approx([sum(pair) / 2 for pair in by_step])
    assert [row["moe/copies"] for row in with_balance] == [0.0, 0.0]  # there is no other rank
    assert logged(trainer, "moe/max_mean") == [row["moe/max_mean"] for row in with_balance]
    # a loss is logged after its step, so it is in the next line
    assert [row.get("loss") for row in read_steps(run).rows] == [None, None, with_balance[0]["loss"], None]


class ForgetsTheModel(Trainer):  # type: ignore[misc]
    """Reads no model."""

    def train(self, resume_from_checkpoint: Any = None, **_: Any) -> Any:
        return self._inner_training_loop(self.args.train_batch_size, self.args, resume_from_checkpoint)


class ForgetsTheOptimizer(Trainer):  # type: ignore[misc]
    """Reads no optimizer's state."""

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None: ...


class OwnCheckpoints(Trainer):  # type: ignore[misc]
    """Saves in a way of its author's."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None: ...


class OwnClipping(Trainer):  # type: ignore[misc]
    """Clips by one rank's norm."""

    def _clip_grad_norm(self, model: Any) -> Any:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)


def test_subclasses_that_leave_out_what_tells_the_callback(tmp_path: Path, run: tuple[Path, list[float]]) -> None:
    source = run[0] / "checkpoint-2"
    with pytest.raises(RuntimeError, match=r"expected that it gives its contents to self.optimizer.load_state_dict"):
        trained(tmp_path, callback(), source, kind=ForgetsTheOptimizer)
    with pytest.raises(RuntimeError, match=r"the model from None and the optimizer from .*: expected that ForgetsThe"):
        trained(tmp_path, callback(), source, kind=ForgetsTheModel)
    with pytest.raises(RuntimeError, match=r"OwnCheckpoints saved a checkpoint without calling Trainer._save\(\)"):
        trained(tmp_path, callback(), kind=OwnCheckpoints)
    with pytest.raises(RuntimeError, match=r"max_grad_norm=1.0 was not applied by accelerator.clip_grad_norm_\(\)"):
        trained(tmp_path, callback(), kind=OwnClipping)


def test_a_model_that_was_reverted(tmp_path: Path) -> None:
    trainer = trained(tmp_path, callback(revert_at_end=True), max_steps=2, save_strategy="no")
    trainer.save_model(str(tmp_path / "a"))
    trainer.model.save_pretrained(tmp_path / "b")
    same_weights(tmp_path / "a", tmp_path / "b", 0.0)
    with pytest.raises(RuntimeError, match=r"not converted any more \(revert_at_end=True\): build another Trainer"):
        trainer.train()


# --- resuming ---


def test_losses_go_on_without_warnings(tmp_path: Path, run: tuple[Path, list[float]]) -> None:
    with key_warnings() as said:
        again = trained(tmp_path, callback(), run[0] / "checkpoint-2")
    assert logged(again) == pytest.approx(run[1], rel=1e-6)
    assert said == []


def test_a_parameter_that_is_really_missing(tmp_path: Path, run: tuple[Path, list[float]]) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    for name, said in (
        ("model.layers.0.block_sparse_moe.experts.3.w1.weight", "expected a MixtralForCausalLM, which cannot be read"),
        ("model.norm.weight", r"broken lacks model.norm.weight: expected all parameters of MixtralForCausalLM"),
    ):
        shutil.copytree(run[0] / "checkpoint-2", broken)
        file = broken / "model.safetensors"
        state = load_file(file)
        assert name in state
        save_file({n: t.clone() for n, t in state.items() if n != name}, file, metadata={"format": "pt"})
        listed = broken / "prophet_files.json"
        files = json.loads(listed.read_text())["files"]
        listed.write_text(json.dumps({"files": files | {"model.safetensors": file.stat().st_size}}))
        with pytest.raises(CheckpointError, match=said):
            trained(tmp_path / "out", callback(), broken)
        shutil.rmtree(broken)


def test_checkpoints_that_cannot_be_resumed(tmp_path: Path, run: tuple[Path, list[float]]) -> None:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(run[0] / "checkpoint-2", tmp_path / name))

    copy("checkpoint-1")
    cut = copy("checkpoint-2")
    state = cut / "trainer_state.json"
    state.write_text(state.read_text()[:-40])
    with pytest.raises(CheckpointError, match=r"checkpoint-2/trainer_state.json: .* checkpoint-2: \['checkpoint-1'\]"):
        trained(tmp_path / "out", callback(), cut)
    with pytest.raises(CheckpointError, match=r"expected a whole checkpoint-<step>, got \[\]"):
        trained(tmp_path / "out", callback(), True)
    part = copy("torn") / "optimizer_experts_0_of_1.pt"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"torn/optimizer_experts_0_of_1.pt: expected \d+ bytes, got 100"):
        trained(tmp_path / "out", callback(), tmp_path / "torn")
    model = copy("deleted") / "model.safetensors"
    model.unlink()
    with pytest.raises(
        CheckpointError, match=r"deleted: expected the files that prophet_files.json lists .*model.safe"
    ):
        trained(tmp_path / "out", callback(), tmp_path / "deleted")
    scheduler = copy("garbage") / "scheduler.pt"
    scheduler.write_bytes(b"x" * scheduler.stat().st_size)
    with pytest.raises(CheckpointError, match=r"garbage: optimizer.pt or scheduler.pt cannot be read"):
        trained(tmp_path / "out", callback(), tmp_path / "garbage")


def test_a_model_saved_alone(tmp_path: Path) -> None:
    trained(tmp_path / "out", callback(), max_steps=2, save_only_model=True)
    with pytest.raises(CheckpointError, match=r"lacks optimizer.pt and .* save_only_model=True .* from_pretrained"):
        trained(tmp_path / "out", callback(), True)


# --- saving ---


class Watch:
    """Sees the checkpoints at every change of a file under `out`: those it may be killed at."""

    def __init__(self, out: Path) -> None:
        self.out, self.points, self.on, self.inside = str(out), 0, True, False
        self.kept: dict[str, tuple[dict[str, Any], Path]] = {}  # by identity of its last file: files, and a copy
        sys.addaudithook(self._event)

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on or self.inside or event not in {"open", "os.remove", "os.rename", "os.rmdir", "os.mkdir"}:
            return
        if event == "open" and not (isinstance(args[1], str) and set(args[1]) & set("wax+")):
            return
        if str(args[0]).startswith(self.out) or event in {"os.remove", "os.rmdir"}:
            self.look()

    def look(self) -> None:
        from prophet_transformers.checkpoints import whole_checkpoints

        self.inside = True
        try:
            self.points += 1
            found = whole_checkpoints(Path(self.out))
            assert found or not self.kept, "no whole checkpoint is left"
            for folder in found:
                last = (folder / "trainer_state.json").stat()
                key = f"{folder.name} {last.st_ino} {last.st_mtime_ns}"
                files = {p.name: (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir()}
                if key not in self.kept:
                    copy = Path(self.out).parent / f"copy {len(self.kept)}"
                    shutil.copytree(folder, copy)
                    self.kept[key] = files, copy
                assert files == self.kept[key][0], f"{key} is said to be whole, and changes"
        finally:
            self.inside = False


def test_one_checkpoint_is_whole_at_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a run saves over the checkpoints of another; what was whole at a time is what a run resumes from."""
    import safetensors.torch

    watch = Watch(tmp_path / "out")
    for module, name in ((torch, "save"), (safetensors.torch, "save_file")):  # they write without Python's files
        write = getattr(module, name)

        def watched(*args: Any, write: Any = write, **kwargs: Any) -> Any:
            watch.look()
            found = write(*args, **kwargs)
            watch.look()
            return found

        monkeypatch.setattr(module, name, watched)
    try:
        first = logged(trained(tmp_path / "out", callback(), save_steps=1, save_total_limit=1))
        source = Path(shutil.copytree(watch.kept[next(iter(watch.kept))][1], tmp_path / "checkpoint-1"))
        state = source / "trainer_state.json"
        state.write_text(state.read_text().replace('"save_steps": 1', '"save_steps": 4'))
        trained(tmp_path / "out", callback(), source, save_steps=4, save_total_limit=1)
    finally:
        watch.on = False
    assert watch.points >= 50, watch.points
    names = [key.split()[0] for key in watch.kept]
    assert names == [*(f"checkpoint-{step}" for step in (1, 2, 3, 4)), "replaced-checkpoint-4", "checkpoint-4"]
    assert [p.name for p in (tmp_path / "out").glob("*checkpoint-*")] == ["checkpoint-4"]
    monkeypatch.undo()
    unfinished = [copy for key, (_, copy) in watch.kept.items() if "checkpoint-4" not in key]
    for copy in unfinished[1::2]:
        again = trained(tmp_path / "again", callback(), copy, save_strategy="no")
        assert logged(again) == pytest.approx(first, rel=1e-6)


# --- recording ---


def test_a_training_is_recorded_and_stays_what_it_is(tmp_path: Path) -> None:
    """Four steps of two microbatches, and evaluations between, which do not count."""
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    plain = trained(tmp_path / "plain", None, **settings)
    recording = ProphetCallback(record=tmp_path / "routing.npz", ranks=4)
    watched = trained(tmp_path / "recorded", recording, **settings)
    assert logged(watched) == logged(plain)
    for want, got in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(want, got)
    assert recording.engine is None
    assert recording.report is None
    trace = read_trace(tmp_path / "routing.npz")
    assert trace.counts.shape == (2, 2, 4, 8)
    assert (trace.counts.sum(axis=3) == 8 * 12 * 2).all()
    assert {k: trace.meta[k] for k in ("tokens", "sequence", "layers")} == {"tokens": 96, "sequence": 12, "layers": 2}


def test_an_interrupted_training_keeps_its_recording(tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise KeyboardInterrupt

    trainer = small_trainer(tmp_path / "out", ProphetCallback(record=tmp_path / "routing.npz", ranks=2))
    trainer.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert read_trace(tmp_path / "routing.npz").steps == 1


def test_a_recording_does_not_balance() -> None:
    with pytest.raises(ValueError, match="record= converts and balances nothing: leave out ep_size"):
        ProphetCallback(record="routing.npz", ep_size=1)
