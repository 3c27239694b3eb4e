"""Checkpoints that do not depend on the number of ranks, nor on which of them are home to an expert.

`dense.pt` holds what all ranks share, and `experts_<rank>_of_<ranks>.pt` the experts of one rank, every expert by
itself: value, 32-bit value and optimizer states. Any number of ranks reads them. Files are read without running code.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import prophet
from prophet.comm import Operation, collective_for, process_rank
from prophet_deepspeed.states import States

FORMAT = 1
DENSE, EXPERTS, LATEST = "dense.pt", "experts_{rank}_of_{ranks}.pt", "latest"
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


class CheckpointError(ValueError):
    """A folder does not hold what was expected; the message names the file."""


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
        """Write a checkpoint; collective over all processes, between two steps. As `save_checkpoint` of DeepSpeed.

        client_state: numbers, strings, tensors, and lists and dictionaries of them.
        """
        ds, model = self._ds, self._ds.module
        if exclude_frozen_parameters:
            raise CheckpointError("exclude_frozen_parameters: only False is supported")
        folder = Path(save_dir) / (f"global_step{ds.global_steps}" if tag is None else str(tag))
        states, ep = self._states(), self._engine.collective
        dense_writer, expert_writer = process_rank() == 0, process_rank() < ep.size
        dense: dict[str, Any] = {"values": {}, "settings": {}}
        experts: dict[str, Any] = {"values": {}, "settings": {}, "module": {}}
        for name, p in model.named_parameters():
            if states is None or not states.holds(p):
                continue
            found = {k: v.cpu() for k, v in states.read(p).items()}  # with ZeRO on all ranks
            if not _is_expert(p):
                if dense_writer:
                    dense["values"][name] = found
                    dense["settings"][name] = states.settings(p)
            elif expert_writer:
                first = self._first(name)
                for local in range(p.shape[0]):
                    experts["values"][f"{name}.{first + local}"] = {k: v[local].clone() for k, v in found.items()}
                experts["settings"][name] = states.settings(p)
        keys = {
            f"{n}.{self._first(n) + i}" for n, p in model.named_parameters() if _is_expert(p) for i in range(len(p))
        }
        module = {k: v.detach().cpu() for k, v in model.state_dict().items()}
        experts["module"] = {k: v.clone() for k, v in module.items() if k in keys}
        if process_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for old in (DENSE, *(p.name for p in folder.glob(EXPERTS.format(rank="*", ranks="*")))):
                (folder / old).unlink(missing_ok=True)
        self._meet("start of save_checkpoint")
        if expert_writer:
            _write(experts, folder / EXPERTS.format(rank=ep.rank, ranks=ep.size))
        if dense_writer:
            dense |= {
                "format": FORMAT,
                "ranks": ep.size,
                "module": {k: v for k, v in module.items() if k not in keys},
                "counters": {k: int(getattr(ds, k)) for k in COUNTERS},
                "scaler": {} if states is None else states.scaler(),
                "scheduler": None if ds.lr_scheduler is None else ds.lr_scheduler.state_dict(),
                "client_state": client_state or {},
            }
            _write(dense, folder / DENSE)
        self._meet("end of save_checkpoint")
        if save_latest and process_rank() == 0:
            (Path(save_dir) / LATEST).write_text(folder.name, encoding="utf-8")
        self._meet("end of save_checkpoint")
        return True

    def _states(self) -> States | None:
        if self._engine.runtime.running:
            raise CheckpointError("a checkpoint belongs between two steps, and one is under way: call engine.step()")
        return None if self._ds.optimizer is None else States(self._ds)

    def _first(self, name: str) -> int:
        bank: Any = self._ds.module.get_submodule(name.rpartition(".")[0])
        return int(bank.first_expert)

    def _meet(self, what: str) -> None:
        like = next(self._ds.module.parameters())
        collective_for(None).all_gather(torch.zeros(1, device=like.device), op=Operation(what))

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
        """Read a checkpoint on every process: its folder and client state, (None, None) where there is none.

        As `load_checkpoint` of DeepSpeed; the number of ranks, the expert-parallel size and the ZeRO stage may differ
        from those that wrote it. Raises `CheckpointError` for a file that is missing or another's.
        """
        if custom_load_fn is not None:
            raise CheckpointError("custom_load_fn is not supported")
        ds, model = self._ds, self._ds.module
        latest = Path(load_dir) / LATEST
        if tag is None:
            if not latest.exists():
                return None, None
            tag = latest.read_text(encoding="utf-8").strip()
        folder = Path(load_dir) / str(tag)
        dense = _read(folder / DENSE)
        if dense.get("format") != FORMAT:
            raise CheckpointError(f"{folder / DENSE}: expected format {FORMAT}, got {dense.get('format')!r}")
        parts = [_read(folder / EXPERTS.format(rank=r, ranks=dense["ranks"])) for r in range(dense["ranks"])]
        module = dict(dense["module"])
        for part in parts:
            module |= part["module"]
        states = self._states()
        model.load_state_dict(module, strict=load_module_strict)
        if hasattr(ds.optimizer, "refresh_fp32_params"):
            ds.optimizer.refresh_fp32_params()
        if load_module_only:
            return str(folder), dense["client_state"]
        if load_optimizer_states and states is not None:
            self._write_states(states, folder, dense, parts)
            states.set_scaler(dense["scaler"])
        if load_lr_scheduler_states and ds.lr_scheduler is not None and dense["scheduler"] is not None:
            ds.lr_scheduler.load_state_dict(dense["scheduler"])
        for name, value in dense["counters"].items():
            setattr(ds, name, value)
        return str(folder), dense["client_state"]

    def _write_states(self, states: States, folder: Path, dense: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        values, settings = {}, {}
        saved: dict[str, dict[str, Tensor]] = {k: v for part in parts for k, v in part["values"].items()}
        for name, p in self._ds.module.named_parameters():
            if not states.holds(p):
                continue
            if _is_expert(p):
                keys = [f"{name}.{self._first(name) + i}" for i in range(len(p))]
                from_, own = saved, parts[0]["settings"].get(name)
            else:
                keys, from_, own = [name], dense["values"], dense["settings"].get(name)
            missing = [k for k in keys if k not in from_]
            if missing or own is None:
                raise CheckpointError(f"{folder}: optimizer states of {(missing or [name])[0]} are missing")
            if _is_expert(p):
                values[id(p)] = {s: torch.stack([from_[k][s] for k in keys]) for s in from_[keys[0]]}
            else:
                values[id(p)] = from_[name]
            settings[id(p)] = own
        states.write(values, settings)


def _is_expert(p: nn.Parameter) -> bool:
    return bool(getattr(p, "prophet_expert", False))


def _write(content: dict[str, Any], path: Path) -> None:
    """To a file of another name first: what is there under the right one is whole."""
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    os.replace(partial, path)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        found = sorted(p.name for p in path.parent.glob("*")) if path.parent.exists() else []
        raise CheckpointError(f"{path} is missing; expected a checkpoint of prophet_deepspeed, found {found[:6]}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, ValueError, ImportError) as error:
        raise CheckpointError(f"{path}: {re.split(r'[.!]', str(error))[0]}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a dictionary, got {type(content).__name__}")
    return content
