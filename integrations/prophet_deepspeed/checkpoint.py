"""`save_checkpoint` and `load_checkpoint` of a DeepSpeed engine with balanced experts.

The layout is that of `prophet_deepspeed.layout`: it depends neither on the number of ranks, nor on which of them are
home to an expert, nor on the ZeRO stage. On as many ranks as wrote it, training goes on bit by bit. The states of the
random generators are part of it, as DeepSpeed's top-2 gate draws noise for every token. So are the placements that come
next, which decide the order of sums.
"""

from __future__ import annotations

import importlib
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import prophet
from prophet.convert import converted, original_state_dict
from prophet.convert.state import names_before
from prophet.engine.checkpoint.fail_together import limit_of, on_all_ranks
from prophet.engine.checkpoint.optimizer_by_expert import Share, join_state, shares_of, split_state
from prophet.errors import CheckpointError, SpecError
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import meet, process_rank, processes
from prophet_deepspeed import layout
from prophet_deepspeed.layout import Values
from prophet_deepspeed.zero_states import States


class Checkpoints:
    """Saves and loads a DeepSpeed engine `ds` with balanced experts."""

    def __init__(self, ds: Any, engine: prophet.Engine) -> None:
        self._ds, self._engine = ds, engine

    # --- save ---

    def save(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint, as `save_checkpoint` of DeepSpeed; collective over all processes, between two steps.

        Args:
            save_dir: The folder of all checkpoints.
            tag: Name of this one in it; None takes the number of steps.
            client_state: Numbers, strings, tensors, and lists and dictionaries of them.
            save_latest: Whether `latest` names this one afterwards.
            exclude_frozen_parameters: Leave out parameters that do not train, as of a base model under adapters.
                `load_module_strict=False` reads the rest.
        """
        ds, model, ep = self._ds, self._ds.module, self._engine.collective
        folder = Path(save_dir) / (f"global_step{ds.global_steps}" if tag is None else str(tag))
        states = self._states()
        dense_writer, expert_writer = process_rank() == 0, process_rank() < ep.size
        dense: dict[str, Any] = {"values": {}, "settings": {}}
        experts: dict[str, Any] = {"values": {}, "settings": {}}
        shares = shares_of(model)
        # The same order on every rank, as reading is collective with ZeRO.
        for name, p in model.named_parameters():
            if states is None or not states.holds(p):
                continue
            found = {k: v.cpu() for k, v in states.read(p).items()}
            if _is_expert(p) and expert_writer:
                own = split_state(name, p, shares[name], found)
                experts["values"] |= {key: {k: v.clone() for k, v in parts.items()} for key, parts in own.items()}
                experts["settings"] |= dict.fromkeys(own, states.settings(p))
            elif not _is_expert(p) and dense_writer:
                dense["values"][name] = found
                dense["settings"][name] = states.settings(p)
        keys = self._expert_keys()
        left_out = self._frozen() if exclude_frozen_parameters else set()
        module = {k: v.detach().cpu() for k, v in model.state_dict().items() if k not in left_out}
        # Cloned: torch.save writes a view with the whole tensor behind it.
        experts["module"] = {k: v.clone() for k, v in module.items() if k in keys}
        scheduler = None if ds.lr_scheduler is None else ds.lr_scheduler.state_dict()
        # Before the older checkpoint of this name is removed
        with self._all("start of save_checkpoint"):
            layout.check_readable(client_state=client_state, lr_scheduler=scheduler)
        with self._all("start of save_checkpoint"):
            if process_rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                layout.clear(folder)
        with self._all("writing of save_checkpoint"):
            if expert_writer:
                layout.write(experts, folder / layout.EXPERTS.format(ep.rank, ep.size))
            balancing, generators = self._own_files(folder)
            # One file per group: its ranks remember the same routing
            if ep.rank == 0:
                layout.write(self._engine.state_dict(), balancing)
            layout.write(layout.random_state() | {"device": _accelerator().get_rng_state()}, generators)
            if dense_writer:
                dense |= {
                    "format": layout.FORMAT,
                    "ranks": ep.size,
                    "processes": processes(),
                    "module": {k: v for k, v in module.items() if k not in keys},
                    "counters": {k: int(getattr(ds, k)) for k in layout.COUNTERS},
                    "scaler": {} if states is None else states.scaler(),
                    "scheduler": scheduler,
                    "client_state": client_state or {},
                    "frozen": not left_out,
                    "made_with": self._made_with(),
                }
                layout.write(dense, folder / layout.DENSE)
        with self._all("end of save_checkpoint"):
            # Only now is the checkpoint whole on every rank
            if save_latest and process_rank() == 0:
                layout.write_latest(str(folder.relative_to(save_dir)), Path(save_dir))
        return True

    def save_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the model's parameters alone, as `save_16bit_model` of DeepSpeed; collective over all processes.

        They are named as before the conversion, and the original model loads the file.

        Args:
            save_dir: The folder.
            save_filename: The file in it.
            exclude_frozen_parameters: Leave out what does not train, layers of experts as a whole.
        """
        writer, model = process_rank() == 0, self._ds.module
        state = original_state_dict(model, keep=writer)
        if exclude_frozen_parameters:
            found = {n: layer for n, *_, layer in converted(model)}
            before = names_before(found)
            frozen = {before.get(n, n) for n, p in model.named_parameters() if not p.requires_grad}
            layers = [n for n, layer in found.items() if not any(p.requires_grad for p in layer.parameters())]
            state = {
                k: v for k, v in state.items() if k not in frozen and not k.startswith(tuple(f"{n}." for n in layers))
            }
        with self._all("writing of save_16bit_model"):
            if writer:
                Path(save_dir).mkdir(parents=True, exist_ok=True)
                layout.write({k: v.detach().cpu() for k, v in state.items()}, Path(save_dir) / save_filename)
        return True

    def _states(self) -> States | None:
        if self._engine.runtime.running:
            raise CheckpointError("a checkpoint belongs between two steps, and one is under way: call engine.step()")
        return None if self._ds.optimizer is None else States(self._ds)

    def _frozen(self) -> set[str]:
        """Names in a state dict of this rank's parameters that do not train."""
        shares = shares_of(self._ds.module)
        frozen = [n for n, p in self._ds.module.named_parameters() if not p.requires_grad]
        return {key for n in frozen for key in ([s.key for s in shares[n]] if n in shares else [n])}

    def _made_with(self) -> dict[str, str | None]:
        """Classes of the optimizer and the scheduler, by the configuration's keys."""
        parts = {"optimizer.type": self._ds.basic_optimizer, "scheduler.type": self._ds.lr_scheduler}
        return {key: None if part is None else type(part).__name__ for key, part in parts.items()}

    def _expert_keys(self) -> set[str]:
        """Names of this rank's experts, in a state dict and in a checkpoint."""
        return {s.key for shares in shares_of(self._ds.module).values() for s in shares}

    def _own_files(self, folder: Path) -> tuple[Path, Path]:
        """Paths of the files with the balancing of this rank's group and this process's random generators."""
        rank, ranks, size = process_rank(), processes(), self._engine.collective.size
        return folder / layout.BALANCING.format(rank // size, ranks // size), folder / layout.RANDOM.format(rank, ranks)

    def _all(self, what: str) -> AbstractContextManager[None]:
        """Go on when all processes have done what stands under `with`; where one fails, all raise."""
        return on_all_ranks(what, timeout_s=limit_of(self._ds.module))

    def _latest(self, load_dir: Path) -> str:
        """The name in `latest`, on which all processes agree; empty where there is no such file."""
        latest = load_dir / layout.LATEST
        with self._all("reading of latest"):
            name = latest.read_text(encoding="utf-8").strip() if latest.exists() else ""
        op = Operation("names of the latest checkpoint")
        found = sorted(set(meet(op, name, timeout_s=limit_of(self._ds.module))))
        if len(found) > 1:
            raise CheckpointError(f"{latest}: expected the same checkpoint on all ranks, found {found}")
        return name

    # --- load ---

    def load(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Read a checkpoint, as `load_checkpoint` of DeepSpeed; collective over all processes.

        The number of ranks, the expert-parallel size and the ZeRO stage may differ from those that wrote it. Where the
        number of processes and the expert-parallel size are the same, random generators and placements go on where they
        were, too.

        Args:
            load_dir: The folder of all checkpoints.
            tag: Which one; None takes the one that `latest` names.
            load_module_strict: Whether the model must have exactly these parameters.
            load_optimizer_states: False leaves the optimizer as it is.
            load_lr_scheduler_states: False leaves the scheduler as it is.
            load_module_only: Read nothing but the model.
            custom_load_fn: Not supported.

        Returns:
            The checkpoint's folder and client state; (None, None) where there is none.

        Raises:
            CheckpointError: On every process, for a file that is missing or another's; nothing is changed then.
        """
        if custom_load_fn is not None:
            raise CheckpointError("custom_load_fn is not supported")
        ds = self._ds
        if tag is None:
            tag = self._latest(Path(load_dir))
            if not tag:
                return None, None
        folder = Path(load_dir) / str(tag)
        states = self._states()
        with on_all_ranks("reading of", folder, outcome="could not read it", timeout_s=limit_of(ds.module)):
            dense = layout.read_dense(folder)
            if load_module_strict and not dense["frozen"]:
                raise CheckpointError(
                    f"{folder} was saved with exclude_frozen_parameters=True: load_module_strict=False keeps the "
                    f"model's own"
                )
            wanted_parts = {
                "optimizer.type": load_optimizer_states and ds.optimizer is not None,
                "scheduler.type": load_lr_scheduler_states,
            }
            if not load_module_only:
                own = {key: name for key, name in self._made_with().items() if wanted_parts[key]}
                layout.check_made_with(dense["made_with"], own, folder)
            wanted = states if load_optimizer_states and not load_module_only else None
            module, values, settings = self._read(folder, dense, wanted)
            layout.check_module(module, ds.module.state_dict(), load_module_strict, folder)
            goes_on = (dense["processes"], dense["ranks"]) == (processes(), self._engine.collective.size)
            goes_on = goes_on and not load_module_only
            if goes_on:
                files = self._own_files(folder)
                balancing, generators = layout.read(files[0]), layout.read(files[1], others=["device"])
        # Everything is read and checked on all ranks, so nothing below can find a fault in a file.
        ds.module.load_state_dict(module, strict=load_module_strict)
        # DeepSpeed's optimizers keep 32-bit copies, which would write the old values back.
        if hasattr(ds.optimizer, "refresh_fp32_params"):
            ds.optimizer.refresh_fp32_params()
        if load_module_only:
            return str(folder), dense["client_state"]
        if values and states is not None:
            states.write(values, settings)
            states.set_scaler(dense["scaler"])
        if load_lr_scheduler_states and ds.lr_scheduler is not None and dense["scheduler"] is not None:
            ds.lr_scheduler.load_state_dict(dense["scheduler"])
        for name, value in dense["counters"].items():
            setattr(ds, name, value)
        # Accumulation may differ now, and a step must not begin in its middle.
        ds.micro_steps = layout.micro_steps(dense["counters"], ds.gradient_accumulation_steps())
        if goes_on:
            self._go_on(folder, balancing, generators)
        return str(folder), dense["client_state"]

    def _read(
        self, folder: Path, dense: dict[str, Any], states: States | None
    ) -> tuple[dict[str, Tensor], dict[int, Values], dict[int, Any]]:
        """Read the module's state, and by the parameters' ids their optimizer states and their groups' settings."""
        saved, expert_settings, experts = layout.read_experts(folder, dense["ranks"], self._expert_keys())
        values, settings, shares = {}, {}, shares_of(self._ds.module)
        for name, p in self._ds.module.named_parameters():
            if states is None or not states.holds(p):
                continue
            if _is_expert(p):
                one, own = _joined(name, p, shares[name], saved, expert_settings, folder)
            else:
                one, own = dense["values"].get(name), dense["settings"].get(name)
            values[id(p)] = layout.check_values(name, one, p.shape, folder)
            if not isinstance(own, dict) or not {"group", "state"} <= set(own):
                raise CheckpointError(f"{folder}: optimizer settings of {name} are missing")
            settings[id(p)] = own
        return {**dense["module"], **experts}, values, settings

    def _go_on(self, folder: Path, balancing: dict[str, Any], generators: dict[str, Any]) -> None:
        """Let random numbers and placements continue, on as many ranks as wrote the checkpoint."""
        paths = self._own_files(folder)
        layout.set_random_state(generators, paths[1])
        _accelerator().set_rng_state(generators["device"])
        try:
            self._engine.load_state_dict(balancing)
        # Configured differently now, as with fewer slots: plans are made anew.
        except SpecError as error:
            warnings.warn(f"{paths[0]}: {error}; the first step starts without replicas", stacklevel=3)


def _joined(
    name: str, p: nn.Parameter, shares: list[Share], saved: dict[str, Values], settings: dict[str, Any], folder: Path
) -> tuple[Values, Any]:
    """Join the values of a parameter's experts, and their settings, which must be the same."""
    for share in shares:
        if share.key not in saved:
            raise CheckpointError(f"{folder}: optimizer states of {share.key} are missing")
    own = [settings.get(share.key) for share in shares]
    # As text, since settings hold tensors, which have no truth value when compared.
    if any(str(one) != str(own[0]) for one in own):
        raise CheckpointError(f"{folder}: the experts of {name} have taken different steps, or have different settings")
    try:
        return join_state(name, p, shares, saved, on_device=False), own[0]
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _is_expert(p: nn.Parameter) -> bool:
    return bool(getattr(p, "prophet_expert", False))


def _accelerator() -> Any:
    module: Any = importlib.import_module("deepspeed.accelerator")
    return module.get_accelerator()
