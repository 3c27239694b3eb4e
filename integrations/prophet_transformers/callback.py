"""A TrainerCallback that converts the model, balances it while it trains, and keeps checkpoints in their layout.

Instead, it may leave the model as it is and record its routing.

What Trainer does on rank 0 alone is wrong where experts live on several ranks: it saves one rank's experts and one
rank's optimizer state, and clips by one rank's gradient norm. The callback does those three on all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

import prophet
from prophet.convert import ConversionReport, converted
from prophet.engine.parallel import ExpertReplicas, clip_grad_norm_
from prophet.engine.step_report import StepReport
from prophet.monitor import Monitor
from prophet.ranks.collective import Collective
from prophet.ranks.process_group import expert_groups
from prophet.spec import checked
from prophet_transformers.checkpoints import Checkpoints, wrap


@checked
class ProphetCallback(TrainerCallback):  # type: ignore[misc]  # transformers may be absent where types are checked
    """Give it to `Trainer(callbacks=[...])`; nothing else in the script changes.

    When the Trainer is built the model is converted. Do not pass your own optimizer to Trainer. `report` holds what was
    converted, `engine` is the running engine.

    With every training loss Trainer logs `moe/max_mean`, the largest rank load over the mean one, and `moe/copies`, the
    replicas in force. Both are means over the steps since the last log. Clipping (`max_grad_norm`) and the `grad_norm`
    that Trainer logs are by the norm over all ranks' experts.

    `trainer.save_model(folder)`, on every rank, writes the original layout, and so does
    `prophet_transformers.save_pretrained(model, folder)`.

    Args:
        ep_size: Ranks that share the experts, None for all processes. With fewer, expert gradients are averaged over
            the groups.
        config: How to balance; None takes the defaults.
        balance: False leaves plain expert parallelism.
        adapters: For your own kinds of blocks, as for `prophet.convert`.
        revert_at_end: Give every rank the whole original model back when training ends.
        record: A file, such as `routing.npz`. Then the callback only calls `prophet.record`, and training stays what it
            is. When `trainer.train()` ends, by an error too, the file has the routing of the training passes. Of the
            other arguments only `adapters` and `ranks` go with it.
        ranks: Recorded passes that make one step.
        monitor: The folder of a run for `prophet watch` and `prophet report`, which `monitor` then writes. Trainer's
            losses are in it, each in the line of the step after it was logged.

    Raises:
        ValueError: For arguments that exclude each other.
    """

    def __init__(
        self,
        *,
        ep_size: int | None = None,
        config: prophet.EngineConfig | None = None,
        balance: bool = True,
        adapters: Sequence[prophet.Adapter] = (),
        revert_at_end: bool = False,
        record: str | Path | None = None,
        ranks: int = 8,
        monitor: str | Path | None = None,
    ) -> None:
        others = (ep_size, config, monitor)
        if record is not None and (any(o is not None for o in others) or not balance or revert_at_end):
            raise ValueError(
                "record= converts and balances nothing: leave out ep_size, config, balance, revert_at_end and monitor "
                "beside it"
            )
        self.record, self.ranks, self._recorded = record, ranks, False
        if monitor is not None and not balance:
            raise ValueError("ProphetCallback.monitor writes what an engine balances: leave out balance=False")
        self.ep_size, self.config, self.balance = ep_size, config, balance
        self.adapters, self.revert_at_end = adapters, revert_at_end
        self.report: ConversionReport | None = None
        self.engine: prophet.Engine | None = None
        self.monitor: Monitor | None = None
        self._run = monitor
        self._experts: Collective | None = None
        self._replicas: ExpertReplicas | None = None
        self._groups: tuple[Collective, Collective] | None = None
        self._checkpoints: Checkpoints | None = None
        self._accelerator: Any = None
        self._clipped = False
        self._unlogged: list[StepReport] = []

    # --- events ---

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Convert the model, or prepare its recording: before the optimizer exists, and before it is wrapped.

        Args:
            args: The Trainer's.
            state: The Trainer's.
            control: The Trainer's.
            **kwargs: Trainer passes the model in it.
        """
        model = kwargs["model"]
        trainer = _holder(self)
        if self.record is not None:
            self._recorded = True
            wrap(trainer, "train", lambda inner, *a, **k: self._recording(trainer, inner, *a, **k))
            return
        _check_settings(trainer)
        group = None
        if self.ep_size is not None:
            self._groups = expert_groups(self.ep_size)
            group = self._groups[0]
        self.report = prophet.convert(model, group=group, adapters=self.adapters)
        self._experts = next(layer for *_, layer in converted(model)).collective
        self._checkpoints = Checkpoints(trainer, before_best=self._let_go)
        self._accelerator = trainer.accelerator
        # On this Trainer's objects only: other Trainers in the process are not changed.
        wrap(trainer.accelerator, "clip_grad_norm_", self._clip)
        wrap(trainer, "log", self._log)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the engine.

        Args:
            args: The Trainer's.
            state: Says at which step training goes on.
            control: The Trainer's.
            **kwargs: Trainer passes model and optimizer in it.

        Raises:
            RuntimeError: Where the model was not converted, or model and optimizer were resumed from different folders.
            ValueError: Where the optimizer has other parameters than the converted model.
        """
        if self._recorded:
            return
        if self._checkpoints is None:
            raise RuntimeError(
                "the model was not converted: give ProphetCallback() to Trainer(callbacks=[...]); add_callback() comes "
                "too late for it"
            )
        model = kwargs["model"]
        if next(converted(model), None) is None:
            raise RuntimeError("the model is not converted any more (revert_at_end=True): build another Trainer for it")
        self._checkpoints.check_resumed(state.global_step)
        # accelerate wraps it, and the engine hooks the one that steps
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        # An optimizer that was passed to Trainer holds the experts from before the conversion.
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(p.requires_grad and id(p) not in known for p in model.parameters()):
            raise ValueError("the optimizer was not built from the converted model's parameters")
        if self._groups is not None:
            self._replicas = ExpertReplicas(model, self._groups[1])
        if self.balance:
            self.engine = prophet.attach(model, optimizer, config=self.config)
            # A second `train()` attaches a new engine; steps of the first are not in its logs.
            self._unlogged.clear()
            self.engine.on_step.append(self._unlogged.append)
            if self._run is not None:
                self.monitor = prophet.monitor(self.engine, self._run)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that gradients were clipped by the norm over all ranks, where they are to be clipped.

        Args:
            args: Say whether to clip.
            state: The Trainer's.
            control: The Trainer's.
            **kwargs: Not used.

        Raises:
            RuntimeError: Where something else than `accelerator.clip_grad_norm_` has clipped, or nothing has.
        """
        if self.record is None and args.max_grad_norm and args.max_grad_norm > 0 and not self._clipped:
            raise RuntimeError(
                f"max_grad_norm={args.max_grad_norm} was not applied by accelerator.clip_grad_norm_(), where "
                f"ProphetCallback clips by the norm over all ranks: set max_grad_norm=0 and clip by "
                f"prophet.parallel.clip_grad_norm_()"
            )
        # Asked anew for every step
        self._clipped = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop balancing, and give the original model back if asked to.

        Args:
            args: The Trainer's.
            state: The Trainer's.
            control: The Trainer's.
            **kwargs: Trainer passes the model in it.
        """
        self._let_go()
        if self.revert_at_end:
            prophet.revert(kwargs["model"])
            self._experts = None

    # --- parts ---

    def _recording(self, trainer: Any, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the place of `trainer.train`: record while it runs."""
        path: Any = self.record
        with prophet.record(trainer.model, path, ranks=self.ranks, adapters=self.adapters, training_only=True):
            return inner(*args, **kwargs)

    def _let_go(self) -> None:
        if self.monitor is not None:
            self.monitor.close()
        if self.engine is not None:
            self.engine.close()
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None

    def _log(self, inner: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Take the place of `trainer.log`: add the balance to what is logged, wherever it is written."""
        if "loss" in logs and self.monitor is not None:
            self.monitor.log(loss=logs["loss"])
        if "loss" in logs and self._unlogged:
            steps = len(self._unlogged)
            logs["moe/max_mean"] = sum(step.max_mean for step in self._unlogged) / steps
            logs["moe/copies"] = sum(int(step.copies.sum()) for step in self._unlogged) / steps
            self._unlogged.clear()
        inner(logs, *args, **kwargs)

    def _clip(self, inner: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Take the place of `accelerator.clip_grad_norm_`: clip by the norm over all ranks' experts."""
        if self._experts is None:
            return inner(parameters, max_norm, norm_type)
        held: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # Without a limit Trainer asks for the norm only
        self._clipped |= max_norm != float("inf")
        # For fp16, as accelerate's own clipping does
        self._accelerator.unscale_gradients()
        if self.engine is not None:
            return self.engine.clip_grad_norm_(held, max_norm, norm_type)
        return clip_grad_norm_(held, max_norm, self._experts, held[0].device, norm_type)


def _holder(callback: ProphetCallback) -> Any:
    """Find the Trainer that is being built with `callback`: transformers passes none, so search the callers for it."""
    frame = sys._getframe(1)
    while frame is not None:
        # `Trainer.__init__` calls `on_init_end`, so the Trainer is `self` in one of the frames above.
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError(
        "no Trainer that is being built has this ProphetCallback: expected Trainer(callbacks=[ProphetCallback()]), "
        "whose saving and loading it takes part in"
    )


def _check_settings(trainer: Any) -> None:
    """Raise ValueError for what would not work, before anything changes."""
    args = trainer.args
    # Some devices' scalers keep what they find to themselves
    scaler = getattr(trainer.accelerator, "scaler", None)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ValueError(
            f"fp16=True scales the loss by a {type(scaler).__name__} here, and the ranks can agree on what a "
            f"torch.amp.GradScaler finds: use bf16=True"
        )
    if getattr(args, "deepspeed", None) or getattr(trainer, "is_deepspeed_enabled", False):
        raise ValueError(
            "deepspeed: two integrations would wrap one model: leave ProphetCallback out, write "
            '`import prophet_deepspeed`, and give the configuration a section "prophet"'
        )
    if getattr(args, "fsdp", None) or getattr(trainer, "is_fsdp_enabled", False):
        raise ValueError("fsdp: ProphetCallback works with DistributedDataParallel; expected fsdp to be off")
    if trainer.model_init is not None:
        raise ValueError(
            "model_init makes a new model when training begins, which would not be converted: pass "
            "Trainer(model=model_init()) instead"
        )
    for name, why in (
        ("auto_find_batch_size", "starts anew on the rank that runs out of memory, while the others wait for it"),
        ("save_on_each_node", "writes on every node what one rank has; checkpoints need a folder that all ranks share"),
        ("enable_jit_checkpoint", "saves when this rank gets its signal, and a checkpoint needs all ranks at once"),
    ):
        if getattr(args, name, False):
            raise ValueError(f"{name}=True {why}: set {name}=False with ProphetCallback")
