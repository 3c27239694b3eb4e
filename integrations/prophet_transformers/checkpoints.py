"""What a Trainer saves and loads, done by all ranks.

Trainer saves on rank 0 alone, which has one rank's experts and their optimizer state. It calls callbacks after a save
when it has already pushed the checkpoint and deleted older ones, and never passes the folder that it resumes from. So
its own methods are wrapped, on the instance: each still runs, with the model or the optimizer taken care of.

A checkpoint is whole once its `trainer_state.json` is there, which Trainer writes last: before it pushes, and before
it deletes older checkpoints. Beside it `prophet_files.json` lists the others, so that a folder which is being copied or
deleted is not whole either. A save into a folder that holds a whole checkpoint moves that one aside first, to
`replaced-checkpoint-<step>`, and deletes it in the end.
"""

from __future__ import annotations

import functools
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from prophet.convert import converted
from prophet.convert.saving import load_pretrained, save_pretrained
from prophet.engine.checkpoint.fail_together import on_all_ranks
from prophet.errors import CheckpointError
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import meet, process_rank
from prophet_transformers.optimizer_parts import SHARED, OptimizerParts

# Trainer writes this file last
STATE = "trainer_state.json"
FILES = "prophet_files.json"
SCHEDULER = "scheduler.pt"
# Suffixes of files whose size must be what was listed
_TENSORS = {".pt", ".pth", ".bin", ".safetensors"}
_REPLACED = "replaced-"
_FOLDER = re.compile(rf"({_REPLACED})?checkpoint-(\d+)")


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method on one object, so that it can do more.

    Args:
        owner: The object.
        name: Of the method.
        around: Called as `around(inner, ...)`, where `inner` is the method as it was.

    Raises:
        RuntimeError: Where there is no such method.
    """
    inner = getattr(owner, name, None)
    if inner is None:
        raise RuntimeError(
            f"{type(owner).__name__} of transformers {transformers.__version__} has no {name}(), by which "
            f"ProphetCallback saves and loads: expected a version from 4.57 to 5"
        )

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(inner, *args, **kwargs)

    setattr(owner, name, call)


def whole_checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints in a Trainer's folder that have all their files.

    Returns:
        The oldest step first; one that was moved aside comes before its successor.
    """
    found = [(int(m[2]), not m[1], p) for p in output_dir.glob("*checkpoint-*") if (m := _FOLDER.fullmatch(p.name))]
    return [path for *_, path in sorted(found) if flaw(path) is None]


def flaw(folder: Path) -> str | None:
    """Why `folder` is not a whole checkpoint, which file and what is wrong with it; None where nothing is."""
    for name, field in ((STATE, "global_step"), (FILES, "files")):
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
            if field not in content:
                return f"{folder / name}: expected the field {field}"
        except (OSError, ValueError, TypeError) as error:
            return f"{folder / name}: expected the file that ends a checkpoint, but it cannot be read ({error})"
    try:
        for name, size in content["files"].items():
            found = (folder / name).stat().st_size
            # A text may have been edited
            if found != size and Path(name).suffix in _TENSORS:
                return f"{folder / name}: expected {size} bytes, got {found}"
    except (OSError, AttributeError, TypeError) as error:
        return f"{folder}: expected the files that {FILES} lists ({error})"
    return None


def _replaced(folder: Path) -> Path:
    return folder.with_name(_REPLACED + folder.name)


def _make_room(folder: Path) -> None:
    """Prepare a save into `folder`: what it holds is moved aside, or is no checkpoint any more."""
    if folder.exists() and flaw(folder) is None:
        shutil.rmtree(_replaced(folder), ignore_errors=True)
        folder.rename(_replaced(folder))
    # Without this file a half-written folder is not taken for a checkpoint.
    (folder / STATE).unlink(missing_ok=True)


def _list_files(folder: Path) -> None:
    files = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    wanted = {name: size for name, size in sorted(files.items()) if name not in (STATE, FILES)}
    (folder / FILES).write_text(json.dumps({"files": wanted}, indent=1), encoding="utf-8")


class Checkpoints:
    """Wraps the methods of a Trainer that save and load; see the module.

    Attributes:
        model_from: The folder that the model was resumed from, None where it was not.
        optimizer_from: The same of the optimizer.

    Args:
        trainer: Its methods are replaced on this instance.
        before_best: Called before the best model is loaded.
    """

    def __init__(self, trainer: Any, before_best: Callable[[], None]) -> None:
        self._trainer, self._before_best = trainer, before_best
        self.model_from: Path | None = None
        self.optimizer_from: Path | None = None
        self._in_checkpoint = False
        # Folders of models, since the last checkpoint began
        self._saved: list[Path] = []
        self._reading = False
        for name, around in (
            ("train", self._train),
            ("_load_from_checkpoint", self._load_model),
            ("_load_optimizer_and_scheduler", self._load_optimizer),
            ("_load_best_model", self._load_best),
            ("_issue_warnings_after_load", self._warn),
            ("_save_checkpoint", self._save_checkpoint),
            ("_save", self._save),
            ("_save_optimizer_and_scheduler", self._save_optimizer),
            ("_save_rng_state", self._save_rng),
        ):
            wrap(trainer, name, functools.partial(self._while_converted, around))

    def _while_converted(self, around: Callable[..., Any], inner: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a wrapper, or the method itself for a model that was reverted: it is saved and loaded as any other."""
        if next(converted(self._trainer.model), None) is None:
            return inner(*args, **kwargs)
        return around(inner, *args, **kwargs)

    def check_resumed(self, step: int) -> None:
        """Raise RuntimeError unless training that starts at `step` has its model and optimizer from one folder."""
        if step > 0 and (self.model_from is None or self.model_from != self.optimizer_from):
            raise RuntimeError(
                f"training goes on at step {step}, with the model from {self.model_from} and the optimizer from "
                f"{self.optimizer_from}: expected that {type(self._trainer).__name__} calls _load_from_checkpoint() "
                f"and _load_optimizer_and_scheduler() for one folder, as Trainer does, which tells ProphetCallback "
                f"where the experts are"
            )

    # --- loading ---

    def _train(self, inner: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.model_from = self.optimizer_from = None
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(self._newest())
        return inner(resume_from_checkpoint, *args, **kwargs)

    def _newest(self) -> Path:
        """The newest whole checkpoint of the output folder; collective, and the same on all ranks."""
        folder = Path(self._trainer.args.output_dir)
        found = whole_checkpoints(folder)
        newest = int(found[-1].name.split("-")[-1]) if found else -1
        limit_s = float(self._trainer.args.ddp_timeout)
        # Ranks may see a shared folder at different times; a mixture of checkpoints would train on.
        steps = [int(n) for n in meet(Operation("choice of a checkpoint"), str(newest), timeout_s=limit_s)]
        if min(steps) < 0:
            there = sorted(p.name for p in folder.glob("checkpoint-*"))
            raise CheckpointError(f"{folder}: expected a whole checkpoint-<step>, got {there}")
        if min(steps) < max(steps):
            raise CheckpointError(
                f"{folder}: the newest whole checkpoint is that of step {steps} by rank: expected one folder that all "
                f"ranks share"
            )
        return found[-1]

    def _load_model(self, inner: Any, resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        folder = Path(resume_from_checkpoint)
        with self._together("reading of the model from", folder):
            # Before anything is read, on all ranks: a rank alone with an error would leave the others waiting.
            wrong = flaw(folder)
            if wrong is not None:
                beside = [p.name for p in whole_checkpoints(folder.parent)]
                raise CheckpointError(f"{wrong}; whole checkpoints beside {folder.name}: {beside}")
            self._read_model(folder, lambda: inner(resume_from_checkpoint, *args, **kwargs))
        self.model_from = folder

    def _load_best(self, inner: Any, *args: Any, **kwargs: Any) -> None:
        folder = Path(self._trainer.state.best_model_checkpoint)
        self._before_best()
        with self._together("reading of the best model from", folder):
            self._read_model(folder, lambda: inner(*args, **kwargs))

    def _read_model(self, folder: Path, inner: Callable[[], Any]) -> None:
        """Read as Trainer does, which knows adapters; then read experts, and what else the file calls differently."""
        model = self._trainer.model
        # Adapters: the experts are in the base model, which is not in this folder
        if hasattr(model, "peft_config"):
            inner()
            return
        self._reading = True
        try:
            inner()
            self._reading = False
            load_pretrained(model, folder)
        except CheckpointError:
            raise
        except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(
                f"{folder}: expected a {type(model).__name__}, which cannot be read: {error}"
            ) from error
        finally:
            self._reading = False

    def _warn(self, inner: Any, *args: Any, **kwargs: Any) -> None:
        """Keep quiet about experts that Trainer misses: the reading that follows raises for what is missing."""
        if not self._reading:
            inner(*args, **kwargs)

    def _load_optimizer(self, inner: Any, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        if checkpoint is None:
            inner(checkpoint, *args, **kwargs)
            return
        folder = Path(checkpoint)
        with self._together("reading of the optimizer's state from", folder):
            # Trainer reads one file on every rank; the stand-in adds this rank's experts..
            with self._by_name(folder) as optimizer:
                try:
                    inner(checkpoint, *args, **kwargs)
                except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
                    raise CheckpointError(f"{folder}: {SHARED} or {SCHEDULER} cannot be read: {error}") from error
            lacking = [name for name in (SHARED, SCHEDULER) if not (folder / name).is_file()]
            if not optimizer.asked and not lacking:
                raise RuntimeError(
                    f"{type(self._trainer).__name__}._load_optimizer_and_scheduler() left {folder / SHARED} unread: "
                    f"expected that it gives its contents to self.optimizer.load_state_dict(), as Trainer does"
                )
            if not optimizer.asked:
                raise CheckpointError(
                    f"{folder} lacks {' and '.join(lacking)}, so the optimizer's state would be lost (a checkpoint "
                    f"with save_only_model=True has none): to train on from the model alone, load it by "
                    f"from_pretrained({str(folder)!r}) and do not resume"
                )
        self.optimizer_from = folder

    # --- saving ---

    def _save_checkpoint(self, inner: Any, *args: Any, **kwargs: Any) -> None:
        self._in_checkpoint = True
        self._saved.clear()
        try:
            inner(*args, **kwargs)
        finally:
            self._in_checkpoint = False
        # A subclass that saves differently would write one rank's experts, and nobody would notice.
        if not self._saved:
            raise RuntimeError(
                f"{type(self._trainer).__name__} saved a checkpoint without calling Trainer._save() on this rank, "
                f"which is where ProphetCallback writes the experts of all ranks"
            )
        if process_rank() == 0:
            shutil.rmtree(_replaced(self._saved[-1]), ignore_errors=True)

    def _save(self, inner: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        model = self._trainer.model
        folder = Path(self._trainer.args.output_dir if output_dir is None else output_dir)
        writer = self._in_checkpoint and process_rank() == 0
        with self._together("beginning of a save to", folder):
            if writer:
                _make_room(folder)
        save_pretrained(model, folder)
        with self._together("writing of what is beside the model to", folder):
            # The tokenizer and the arguments are still Trainer's to write
            with _written(model):
                inner(output_dir, *args, **kwargs)
            if writer:
                _list_files(folder)
        self._saved.append(folder)

    def _save_optimizer(self, inner: Any, output_dir: Any, *args: Any, **kwargs: Any) -> None:
        folder = Path(output_dir)
        with self._together("writing of the optimizer's state to", folder):
            with self._by_name(folder) as optimizer:
                inner(output_dir, *args, **kwargs)
            parts = optimizer.parts
            # Only the first of the groups writes: the others hold copies
            if process_rank() == parts.rank:
                folder.mkdir(parents=True, exist_ok=True)
                torch.save(parts.experts(), folder / parts.experts_file())

    def _save_rng(self, inner: Any, output_dir: Any, *args: Any, **kwargs: Any) -> None:
        """Wait until every rank has written its file.

        Rank 0 may go on to delete older checkpoints, and must not before all have written.
        """
        with self._together("writing of random states to", output_dir):
            inner(output_dir, *args, **kwargs)
        with self._together("listing of the files in", output_dir):
            if process_rank() == 0:
                _list_files(Path(output_dir))

    # --- parts ---

    @contextmanager
    def _by_name(self, folder: Path) -> Iterator[_OptimizerByName]:
        """Let Trainer see, as the optimizer's state, that of the parameters which all ranks share."""
        trainer = self._trainer
        optimizer = trainer.optimizer
        trainer.optimizer = _OptimizerByName(optimizer, OptimizerParts(trainer.model, optimizer), folder)
        try:
            yield trainer.optimizer
        finally:
            trainer.optimizer = optimizer

    def _together(self, what: str, where: object) -> AbstractContextManager[None]:
        return on_all_ranks(what, where, timeout_s=float(self._trainer.args.ddp_timeout))


class _OptimizerByName:
    """Stands for the optimizer while Trainer writes or reads its state.

    Args:
        optimizer: The one that it stands for.
        parts: Its state by names.
        folder: Where Trainer writes or reads.
    """

    def __init__(self, optimizer: Any, parts: OptimizerParts, folder: Path) -> None:
        self._optimizer, self.parts, self._folder = optimizer, parts, folder
        # Whether Trainer has written or read a state
        self.asked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def state_dict(self) -> dict[str, Any]:
        self.asked = True
        return self.parts.shared()

    def load_state_dict(self, state: Any) -> None:
        self.asked = True
        self._optimizer.load_state_dict(self.parts.read(state, self._folder))


@contextmanager
def _written(model: Any) -> Iterator[None]:
    """Make `model.save_pretrained` do nothing inside the `with` block: the model has been written."""
    before = model.__dict__.get("save_pretrained")
    model.save_pretrained = lambda *args, **kwargs: None
    try:
        yield
    finally:
        if before is None:
            del model.save_pretrained
        else:
            model.save_pretrained = before
