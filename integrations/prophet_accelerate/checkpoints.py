"""`accelerator.save_state` and `load_state`: model and optimizer by `prophet.checkpoint`, the rest by accelerate.

accelerate writes what one rank has, and its hooks see neither optimizers nor what FSDP2 has cut. So the model with
experts and its optimizer are hidden from it, and written beside what it writes:

  random_states_<rank>.pkl, scheduler.bin, scaler.pt, custom_checkpoint_<i>.pkl, ...    accelerate's
  prophet/                                 model, optimizer, and what balancing remembers
  prophet_accelerate.json                  what the others belong to; written last, removed first
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn

import prophet
from prophet import checkpoint
from prophet.engine.checkpoint.fail_together import on_all_ranks, together
from prophet.errors import CheckpointError
from prophet.files import read_bytes, read_json
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import processes, roll_call

DESCRIPTION = "prophet_accelerate.json"
TRAINING = "prophet"
_FORMAT = 1
# The description is a few hundred bytes; anything larger is another file.
_MAX_BYTES = 1 << 16
# accelerate would read another number of these without a warning, or fail when half is read
_COUNTED = {
    "schedulers": "accelerator.prepare(scheduler)",
    "custom_objects": "accelerator.register_for_checkpointing(...)",
    "scalers": "mixed_precision='fp16', which has a scaler",
}


class States:
    """Saves and loads what one accelerator trains.

    Args:
        accelerator: Prepared.
        model: As it was before accelerate wrapped it.
        optimizer: The one that holds its experts, if there is one.
        engine: The running engine, if there is one.
        timeout_s: Seconds to wait for other ranks.
    """

    def __init__(
        self,
        accelerator: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        engine: prophet.Engine | None,
        timeout_s: float,
    ) -> None:
        self._accelerator, self._model, self._optimizer = accelerator, model, optimizer
        self._engine, self._timeout_s = engine, timeout_s

    def save(self, inner: Callable[..., Any], output_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as accelerate does, with the experts of all ranks. Collective.

        Args:
            inner: accelerate's own method.
            output_dir: As for that, like all further arguments.

        Returns:
            What accelerate's method returns.

        Raises:
            RuntimeError: Within a step.
            CheckpointError: Where a rank cannot write.
        """
        roll_call(Operation("save_state"), patience_s=self._timeout_s)
        self._between_steps("save_state")
        settings = self._accelerator.project_configuration
        if settings.automatic_checkpoint_naming:
            folder = Path(self._accelerator.project_dir, "checkpoints", f"checkpoint_{settings.iteration}")
        else:
            folder = Path(output_dir)
        writer = self._accelerator.is_main_process
        with self._on_all_ranks("beginning of save_state", folder):
            if writer and folder.exists() and not settings.automatic_checkpoint_naming:
                # From here on until its end the folder is not a whole save
                (folder / DESCRIPTION).unlink(missing_ok=True)
                # Of ranks that there may be no more
                for stale in folder.glob("random_states_*.pkl"):
                    stale.unlink()
        with self._on_all_ranks("save_state", folder), self._hidden():
            result = inner(output_dir, *args, **kwargs)
        extra: dict[str, Any] = {}
        if self._engine is not None and self._engine.collective.size == processes():
            # The engine's history is about one expert-parallel group; with several, each has another one.
            extra["engine"] = self._engine.state_dict()
        checkpoint.save(folder / TRAINING, self._model, self._optimizer, extra=extra)
        with self._on_all_ranks("end of save_state", folder):
            if writer:
                text = json.dumps({"training": _digest(folder), **self._described()}, indent=1)
                (folder / DESCRIPTION).write_text(text, encoding="utf-8")
        return result

    def load(self, inner: Callable[..., Any], input_dir: Any, *args: Any, **kwargs: Any) -> None:
        """Load as accelerate does, on any number of ranks. Collective.

        Args:
            inner: accelerate's own method.
            input_dir: As for that, like all further arguments.

        Raises:
            RuntimeError: Within a step.
            CheckpointError: Where the folder does not fit; nothing is changed then.
        """
        roll_call(Operation("load_state"), patience_s=self._timeout_s)
        self._between_steps("load_state")
        folder = Path(input_dir or self._accelerator.project_dir or "").expanduser()
        found: dict[str, Any] = {}

        def fit() -> None:
            nonlocal folder, found
            folder = self._newest() if input_dir is None else folder
            found = self._fitting(folder)

        # All ranks agree that the folder fits before any of them changes something.
        together("description of load_state", folder, fit, timeout_s=self._timeout_s)
        extra = checkpoint.load(folder / TRAINING, self._model, self._optimizer)
        with self._on_all_ranks("load_state", folder), self._hidden():
            inner(str(folder), *args, **kwargs)
        # accelerate reads it from a file of this rank, which a new rank does not have.
        self._accelerator.step = found["step"]
        engine = self._engine
        if engine is not None and engine.collective.size == processes() == found["ranks"] and "engine" in extra:
            engine.load_state_dict(extra["engine"])

    # --- parts ---

    def _on_all_ranks(self, what: str, folder: Path) -> Any:
        return on_all_ranks(what, folder, timeout_s=self._timeout_s)

    def _between_steps(self, what: str) -> None:
        if self._engine is not None and self._engine.runtime.running:
            raise RuntimeError(
                f"accelerator.{what}() belongs between two steps, and one is under way: with gradient accumulation, "
                f"call it where accelerator.sync_gradients is True, after optimizer.step()"
            )

    def _described(self) -> dict[str, Any]:
        a = self._accelerator
        return {
            "format": _FORMAT,
            "ranks": processes(),
            "step": a.step,
            "schedulers": len(a._schedulers),
            "custom_objects": len(a._custom_objects),
            "scalers": int(a.scaler is not None),
        }

    def _fitting(self, folder: Path) -> dict[str, Any]:
        """Read the description of a folder; raises `CheckpointError` unless it fits what is prepared now."""
        path = folder / DESCRIPTION
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing: expected a folder that save_state() of a balanced run has written to its end"
            )
        found: dict[str, Any] = read_json(
            path, most_bytes=_MAX_BYTES, expected="the file that save_state() writes", error=CheckpointError
        )
        mine = self._described()
        for name in ("training", *mine):
            kind = str if name == "training" else int
            if not isinstance(found, dict) or type(found.get(name)) is not kind:
                raise CheckpointError(f"{path}: {name}: expected {'text' if kind is str else 'an integer'}")
        if found["format"] != _FORMAT:
            raise CheckpointError(f"{path}: format: expected {_FORMAT}, got {found['format']}")
        for name, call in _COUNTED.items():
            if found[name] != mine[name]:
                raise CheckpointError(
                    f"{path}: {name}: the folder has {found[name]}, this run {mine[name]}; expected as many: {call}"
                )
        if found["training"] != _digest(folder):
            raise CheckpointError(f"{path}: training: {folder / TRAINING} is of another save than the files beside it")
        return found

    def _newest(self) -> Path:
        """The folder that accelerate takes where the caller names none."""
        settings = self._accelerator.project_configuration
        if not settings.automatic_checkpoint_naming:
            raise ValueError("load_state: expected input_dir, as automatic_checkpoint_naming is off")
        above = Path(self._accelerator.project_dir, "checkpoints")
        numbers = {int(m[1]): p for p in above.iterdir() if (m := re.search(r"(\d+)$", p.name))}
        if not numbers:
            raise CheckpointError(f"{above} holds no checkpoint")
        return numbers[max(numbers)]

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """Hide the model and its optimizer from accelerate inside the `with` block; hooks see them as always."""
        a = self._accelerator
        models, optimizers = list(a._models), list(a._optimizers)
        hooks = a._save_model_state_pre_hook, a._load_model_state_pre_hook

        def save_hook(hook: Any) -> Any:
            def call(_: Any, weights: Any, folder: Any) -> Any:
                cut = a.distributed_type == DistributedType.FSDP
                return hook(list(models), list(weights) if cut else [m.state_dict() for m in models], folder)

            return call

        # accelerate passes hooks what it saves, so they get the full lists from these stand-ins.
        a._models = [m for m in models if a.unwrap_model(m, keep_torch_compile=False) is not self._model]
        a._optimizers = [o for o in optimizers if o.optimizer is not self._optimizer]
        a._save_model_state_pre_hook = {key: save_hook(hook) for key, hook in hooks[0].items()}
        a._load_model_state_pre_hook = {
            key: lambda _, folder, hook=hook: hook(list(models), folder) for key, hook in hooks[1].items()
        }
        try:
            yield
        finally:
            a._models, a._optimizers = models, optimizers
            a._save_model_state_pre_hook, a._load_model_state_pre_hook = hooks


def _digest(folder: Path) -> str:
    """Digest of the description of model and optimizer, which names the tensors' folder and is replaced last."""
    path = folder / TRAINING / checkpoint.DESCRIPTION
    text = read_bytes(path, most_bytes=1 << 28, expected="a checkpoint's description", error=CheckpointError)
    return hashlib.sha256(text).hexdigest()
