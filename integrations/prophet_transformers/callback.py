"""A TrainerCallback that converts the model, balances it while it trains, and keeps checkpoints in their layout.

What Trainer does on rank 0 alone is wrong where experts live on several ranks: it saves one rank's experts and one
rank's optimizer state, and clips by one rank's gradient norm. The callback does those three on all ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import prophet
from prophet.convert import ConversionReport, converted
from prophet.engine.parallel import ExpertReplicas, expert_groups
from prophet.ranks.collective import Collective
from prophet_transformers.saving import load_pretrained, save_pretrained

STATE = "optimizer_rank{rank}_of_{ranks}.pt"


class ProphetCallback(TrainerCallback):  # type: ignore[misc]  # transformers may be absent where types are checked
    """Give it to `Trainer(callbacks=[...])`; nothing else in the script changes.

    ep_size: ranks that share the experts, None for all processes; with fewer, expert gradients are averaged over the
    groups. config: how to balance. balance: False leaves plain expert parallelism. adapters: for blocks of your own.

    When the Trainer is built the model is converted; do not pass an optimizer of your own to Trainer. `report` says
    what was converted, `engine` is the running engine. Clipping (`max_grad_norm`) is by the norm over all ranks'
    experts. After training `prophet_transformers.save_pretrained(model, folder)`, on every rank, takes the place of
    `trainer.save_model()`; revert_at_end=True gives every rank the whole original model back instead.
    """

    def __init__(
        self,
        *,
        ep_size: int | None = None,
        config: prophet.EngineConfig | None = None,
        balance: bool = True,
        adapters: tuple[prophet.Adapter, ...] = (),
        revert_at_end: bool = False,
    ) -> None:
        self.ep_size, self.config, self.balance = ep_size, config, balance
        self.adapters, self.revert_at_end = adapters, revert_at_end
        self.report: ConversionReport | None = None
        self.engine: prophet.Engine | None = None
        self._replicas: ExpertReplicas | None = None
        self._groups: tuple[Collective, Collective] | None = None
        self._max_norm = 0.0
        self._checkpointing = False

    # --- events ---

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Convert the model: before the optimizer exists, and before it is wrapped."""
        model = kwargs["model"]
        if args.fp16:
            raise ValueError("fp16=True scales the loss, which clipping over ranks does not know of: use bf16=True")
        if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
            raise ValueError("ProphetCallback works with DistributedDataParallel; deepspeed and fsdp must be off")
        group = None
        if self.ep_size is not None:
            self._groups = expert_groups(self.ep_size)
            group = self._groups[0]
        self.report = prophet.convert(model, group=group, adapters=self.adapters)
        model.save_pretrained = _Saver(model, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the engine, and after `resume_from_checkpoint` load what Trainer cannot."""
        model = kwargs["model"]
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(p.requires_grad and id(p) not in known for p in model.parameters()):
            raise ValueError("the optimizer was not built from the converted model's parameters")
        if state.global_step > 0:
            self._resume(args, Path(args.output_dir) / f"checkpoint-{state.global_step}", model, optimizer)
        if self._groups is not None:
            self._replicas = ExpertReplicas(model, self._groups[1])
        if self.balance:
            self.engine = prophet.attach(model, optimizer, config=self.config)
        self._max_norm, args.max_grad_norm = args.max_grad_norm or 0.0, 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clip by the norm over all ranks."""
        if self._max_norm > 0:
            model = kwargs["model"]
            engine = self.engine
            if engine is None:
                raise ValueError("clipping needs the engine: set max_grad_norm=0 with balance=False")
            engine.clip_grad_norm_(list(model.parameters()), self._max_norm)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What Trainer saves from here to `on_save` belongs to a checkpoint."""
        self._checkpointing = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The same at the end of an epoch."""
        self._checkpointing = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """No checkpoint is under way."""
        self._checkpointing = False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All ranks write the model in its original layout, and their own optimizer state."""
        model = kwargs["model"]
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        save_pretrained(model, folder)
        if not args.save_only_model:
            torch.save(optimizer.state_dict(), folder / _state_name(args))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let go of the model."""
        self._checkpointing = False
        args.max_grad_norm = self._max_norm
        if self.engine is not None:
            self.engine.close()
        if self._replicas is not None:
            self._replicas.close()
        if self.revert_at_end:
            model = kwargs["model"]
            del model.save_pretrained
            prophet.revert(model)

    # --- parts ---

    @property
    def defers_saving(self) -> bool:
        """Whether a checkpoint is under way, whose model `on_save` is about to write."""
        return self._checkpointing

    def _resume(self, args: Any, folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Experts and optimizer state of this rank, of which Trainer loaded none and rank 0's."""
        path = folder / _state_name(args)
        if not path.exists():
            found = sorted(p.name for p in folder.glob(STATE.format(rank="*", ranks="*")))
            raise FileNotFoundError(
                f"{path} is missing: optimizer state resumes on as many ranks as wrote it; {folder} has {found}"
            )
        load_pretrained(model, folder)
        optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


def _state_name(args: Any) -> str:
    return STATE.format(rank=args.process_index, ranks=args.world_size)


class _Saver:
    """Stands for `model.save_pretrained`, which Trainer calls on rank 0 alone."""

    def __init__(self, model: Any, callback: ProphetCallback) -> None:
        self._model, self._callback = model, callback

    def __call__(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        layers = [layer for *_, layer in converted(self._model)]
        if self._callback.defers_saving:
            return
        if not layers or layers[0].collective.size == 1:
            kwargs.pop("state_dict", None)
            save_pretrained(self._model, save_directory, **kwargs)
            return
        raise RuntimeError(
            "the experts are on several ranks, and Trainer saves on one: call "
            "prophet_transformers.save_pretrained(model, folder) on every rank"
        )
