"""Checkpoints of model and optimizer that can be read at another size: of the expert-parallel group, of the world.

Every expert has its own entries under its global number, for its parameters and for its optimizer state, so that any
rank can read any expert. The other parameters are entries as they are: whole, or a DTensor that FSDP has cut. Each
tensor is written once, by one of the ranks that have it, and every rank reads only what it needs
(`prophet.state.checkpoint.files`). `training.json` beside them describes them. A save that is interrupted leaves the
checkpoint that was in the folder before.

No code from a checkpoint is run: `prophet.state.checkpoint.tensor_index` reads torch's index, which is a pickle.

Shape legend: m experts per rank.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prophet.engine.checkpoint.description import FORMAT, description_from_json, misfit
from prophet.engine.checkpoint.experts import ExpertStates, counts_on_device, entries_of
from prophet.engine.checkpoint.fail_together import limit_of, together
from prophet.engine.checkpoint.optimizer_by_expert import banks_of, patterns, shares_of, split_state
from prophet.errors import CheckpointError, some
from prophet.layer.moe import moe_layers
from prophet.ranks.process_group import at_work
from prophet.spec import digest, odd_ones_out
from prophet.state.checkpoint.files import Agree, Files, write
from prophet.state.checkpoint.folder import DESCRIPTION, MAX_DESCRIPTION_BYTES, read_description, tensors_of
from prophet.state.json_values import to_json

# These choose how an optimizer computes, which is up to the program that loads
NOT_SETTINGS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write `model` and the state of `optimizer` to `folder`; collective over all processes, between two steps.

    The checkpoint that is in `folder`, if there is one, is replaced when the new one is whole, and not before. A write
    has no time limit: the others wait while a process is at it.

    Args:
        folder: Where to write; the same files on all processes.
        model: The model as it is trained, also wrapped in DistributedDataParallel or cut by `fully_shard`.
        optimizer: Its optimizer; None to save the model alone.
        extra: Numbers, strings, tensors of up to 16 MiB, and lists and dictionaries of them, the same on all processes:
            the step, or a scheduler's `state_dict()`. An engine's only with one expert-parallel group, as every group
            counts its own tokens.

    Raises:
        ValueError: Where the optimizer holds parameters that are not the model's, or state that cannot be described.
        RuntimeError: Where processes disagree about the optimizer.
        CheckpointError: On every process where one of them could not write; it names the ranks.
        PeerLost: Where another process has ended.
    """
    folder, limit_s = Path(folder), limit_of(model)
    agree = _agreement(folder, limit_s)
    described: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def describe() -> list[int]:
        described.append(_describe(model, optimizer, extra))
        # Sorted: ranks may list parameters in another order
        text = json.dumps(described[0][0], sort_keys=True)
        # JSON is ASCII here, so characters are bytes
        if len(text) > MAX_DESCRIPTION_BYTES:
            raise ValueError(
                f"the description takes {len(text)} bytes, {MAX_DESCRIPTION_BYTES} can be read: put less into `extra`"
            )
        # The random number of process 0 names this save for all of them
        return [int(digest(np.frombuffer(text.encode(), np.uint8))), secrets.randbits(48)]

    every = agree("comparison of optimizers", describe)
    differ = odd_ones_out(np.array([text for text, _ in every], dtype=np.int64))
    if differ:
        raise RuntimeError(
            f"the optimizer's settings or steps, or `extra`, of process(es) {differ} differ from the other processes': "
            f"the same parameters must have been trained on all of them"
        )
    write(folder, every[0][1], *described[0], agree)


def _agreement(folder: Path, limit_s: float) -> Agree:
    """Make the function by which processes agree; `folder` and the limit are those of `together`."""
    return lambda what, call: together(what, folder, call, timeout_s=limit_s)


def _describe(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the description, equal on all processes unless they differ by mistake, and this process's entries."""
    described = Training(model, optimizer)
    entries: dict[str, Any] = dict(described.model_entries())
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        for group in optimizer.param_groups:
            # Experts appear by a pattern: the names must not depend on which experts live here
            names = sorted({name for p in group["params"] for name in described.names_of(p)})
            mixed = [n for g in groups for n in names if n in g["parameters"]]
            if mixed:
                raise ValueError(
                    f"{mixed[0]}: experts of one layer are in two of the optimizer's groups; expected one group for "
                    f"all experts of a layer"
                )
            groups.append({"settings": _settings(group), "parameters": names})
    states = {}
    for name, p, state in described.trained():
        if name in described.shares:
            entries |= entries_of(split_state(name, p, described.shares[name], state), p)
        elif state:
            states[name], found = described.state_entries(name, p, state)
            entries |= found
    text = {
        "format": FORMAT,
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "groups": groups,
        "states": states,
        "extra": to_json(dict(extra or {}), "extra"),
    }
    return text, entries


def load(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Read into `model` and `optimizer` what `save` has written, on any number of processes.

    Collective over all processes, between two steps. Parameters are written in place; the optimizer gets the state and
    the settings (learning rate, ...) of every parameter it holds, by the parameter's name; `fused`, `foreach` and the
    like stay as they are.

    Args:
        folder: The checkpoint.
        model: The model, wrapped or not.
        optimizer: Its optimizer; None to read the model alone.

    Returns:
        The `extra` that was saved.

    Raises:
        CheckpointError: Where the checkpoint does not fit; nothing is changed then.
    """
    folder = Path(folder)
    plan = _Reading()
    with at_work(f"reading {folder}"):
        agree = _agreement(folder, limit_of(model))
        agree("reading of a checkpoint", lambda: plan.prepare(folder, model, optimizer))
        if plan.experts is not None:
            plan.entries |= plan.experts.entries
            # Numbers before all else: they can still be refused, while the model is as it was
            plan.files.read(plan.experts.numbers, folder)
            agree("reading of experts' steps", plan.experts.settle)
        plan.files.read(plan.entries, folder)
    for layer in moe_layers(model):
        # The files may hold experts that are equal, which the watch would report
        layer.expert_watch.remember()
    if optimizer is not None:
        for group, new in zip(optimizer.param_groups, plan.settings, strict=True):
            _apply_settings(group, new)
        for p in plan.trained:
            optimizer.state.pop(p, None)
            if id(p) in plan.states:
                optimizer.state[p] = plan.states[id(p)]
    return plan.extra


class _Reading:
    """The tensors that `load` reads, and the state and settings that it gives to the optimizer."""

    files: Files

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        self.trained: list[Tensor] = []
        self.states: dict[int, dict[str, Any]] = {}
        self.settings: list[dict[str, Any]] = []
        self.experts: ExpertStates | None = None
        self.extra: dict[str, Any] = {}

    def prepare(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Check that the checkpoint fits, and make the optimizer state to read into."""
        description = _read_description(folder)
        described = Training(model, optimizer)
        self.entries.update(described.model_entries())
        self.extra = description["extra"]
        self.files = Files(tensors_of(folder, description))
        index = self.files.index
        _check_model(folder, index, self.entries, described)
        if optimizer is not None:
            self._prepare_optimizer(folder, description, optimizer, described)
        wanted = self.experts
        self.files.check([*self.entries, *(wanted.numbers if wanted else ()), *(wanted.entries if wanted else ())])

    def _prepare_optimizer(
        self, folder: Path, description: Mapping[str, Any], optimizer: torch.optim.Optimizer, described: Training
    ) -> None:
        index = self.files.index
        self.settings = _saved_settings(folder, description, optimizer, described)
        self.experts = ExpertStates(folder, index) if described.shares else None
        for name, p, _ in described.trained():
            self.trained.append(p)
            group = next(g for g in optimizer.param_groups if any(q is p for q in g["params"]))
            if self.experts is not None and name in described.shares:
                state = self.experts.expect(name, p, described.shares[name], group)
                if state:
                    self.states[id(p)] = state
            elif name in description["states"]:
                try:
                    state = _empty_state(p, description["states"][name], group)
                    _, found = described.state_entries(name, p, state)
                except (ValueError, RuntimeError, TypeError, MemoryError) as error:
                    raise CheckpointError(f"{folder / DESCRIPTION}: states.{name}: {error!s:.200}") from error
                _check_sizes(folder, index, found)
                self.entries.update(found)
                self.states[id(p)] = state


class Training:
    """A model and an optimizer by name: the entries of a checkpoint and their names."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        # Before parameters are named, since FSDP gives the cut parameters back only then
        self._values: dict[str, Any] = self.model.state_dict()
        self._optimizer = optimizer
        self._names = {id(p): n for n, p in self.model.named_parameters()}
        self.shares = shares_of(self.model)
        self._expert_keys = {keys + key for keys, _, bank in banks_of(self.model) for key in bank.all_keys()}

    def name_of(self, p: Tensor) -> str:
        """Return the name of a parameter; ValueError where it is not the model's."""
        name = self._names.get(id(p))
        if name is None:
            raise ValueError(
                f"the optimizer holds a parameter of shape {list(p.shape)} that is not the model's: build the "
                f"optimizer after prophet.convert() and fully_shard(), which make new parameters"
            )
        return name

    def names_of(self, p: Tensor) -> list[str]:
        """Return names that stand for a parameter on any rank and at any size: its own, or its experts' patterns."""
        name = self.name_of(p)
        return patterns(self.shares[name]) if name in self.shares else [name]

    def trained(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Yield name, parameter and state (empty before its first step) of every parameter of the optimizer."""
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                yield self.name_of(p), p, self._optimizer.state.get(p, {})

    def model_entries(self) -> dict[str, Tensor]:
        """Return the model's state dict as entries; ValueError for a value that is no tensor."""
        for name, value in self._values.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{name} of the state dict is a {type(value).__name__}; expected a tensor")
        return {f"model.{name}": value for name, value in self._values.items()}

    def all_model_names(self) -> set[str]:
        """Return the names of this rank's entries and of the experts that live on other ranks."""
        return {f"model.{n}" for n in (*self._values, *self._expert_keys)}

    def state_entries(self, name: str, p: Tensor, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Describe the optimizer state of a parameter that belongs to no experts.

        Args:
            name: The parameter's name.
            p: The parameter.
            state: The optimizer's state of it, by field.

        Returns:
            The description by field, and its tensors as entries.

        Raises:
            ValueError: For a tensor of another shape where FSDP has cut the parameter.
        """
        fields: dict[str, Any] = {}
        entries: dict[str, Tensor] = {}
        for field, value in state.items():
            key = f"optimizer.{name}"
            if not isinstance(value, Tensor):
                fields[field] = {"value": to_json(value, f"{field} of {name}")}
                continue
            dtype = str(value.dtype).removeprefix("torch.")
            # A step and the like go into the description: every rank reads it, and it may have another device there
            if value.dim() == 0 and p.dim() > 0:
                fields[field] = {"value": value.item(), "dtype": dtype}
                continue
            # A DTensor's state is saved in the parameter's parts, and other shapes cannot be cut in the same way
            if value.shape != p.shape and hasattr(p, "full_tensor"):
                raise ValueError(
                    f"the optimizer's {field} of {name} has shape {list(value.shape)}; of a parameter that is cut over "
                    f"ranks, {list(p.shape)}, only state of that shape can be saved"
                )
            fields[field] = {"shape": list(value.shape), "dtype": dtype}
            entries[f"{key}.{field}"] = value
        return fields, entries


# --- settings and states ---


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in group.items():
        if key not in NOT_SETTINGS:
            single = isinstance(value, Tensor) and value.numel() == 1
            found[key] = to_json(value.item() if single else value, f"the optimizer's setting {key}")
    return found


def _apply_settings(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        old = group.get(key)
        # In place: a compiled or captured step holds the tensor of the learning rate
        if isinstance(old, Tensor):
            with torch.no_grad():
                old.copy_(torch.as_tensor(value))
        else:
            group[key] = value


def _empty_state(p: Tensor, fields: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Make state of the described fields; tensors are zero."""
    state: dict[str, Any] = {}
    for field, saved in fields.items():
        if "dtype" not in saved:
            state[field] = saved["value"]
            continue
        dtype = getattr(torch, saved["dtype"])
        if "value" in saved:
            device = p.device if counts_on_device(group) else "cpu"
            state[field] = torch.tensor(saved["value"], dtype=dtype, device=device)
        else:
            shape = list(saved["shape"])
            # `zeros_like` keeps a DTensor's cut and the memory format
            alike = shape == list(p.shape)
            made = torch.zeros_like(p, dtype=dtype) if alike else torch.zeros(shape, dtype=dtype, device=p.device)
            state[field] = made.detach()
    return state


def _saved_settings(
    folder: Path, description: Mapping[str, Any], optimizer: torch.optim.Optimizer, described: Training
) -> list[dict[str, Any]]:
    """Return the settings to give to each of the optimizer's groups; `CheckpointError` for another optimizer's."""
    wanted = type(optimizer).__name__
    if description["optimizer"] != wanted:
        what = f"the state of {description['optimizer']}" if description["optimizer"] else "no optimizer state"
        raise CheckpointError(f"{folder}: expected the state of {wanted}, the checkpoint has {what}")
    return settings_by_group(folder, description["groups"], optimizer, described)


def settings_by_group(
    folder: Path, groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer, described: Training
) -> list[dict[str, Any]]:
    """Return the settings that the parameters of each of the optimizer's groups were saved with.

    Args:
        folder: The checkpoint, for errors.
        groups: The saved groups, with their parameters' names and settings.
        optimizer: The optimizer that is to get the settings.
        described: Names its parameters.

    Returns:
        Settings by group; empty for a group without parameters.

    Raises:
        CheckpointError: Where a parameter was not saved, where the parameters of a group had different settings, or
            where a setting is no number.
    """
    by_name = {name: g["settings"] for g in groups for name in g["parameters"]}
    found = []
    for at, group in enumerate(optimizer.param_groups):
        names = [name for p in group["params"] for name in described.names_of(p)]
        missing = [n for n in names if n not in by_name]
        if missing:
            raise CheckpointError(f"{folder}: the optimizer that was saved did not hold {some(missing)}")
        settings = [by_name[n] for n in names]
        differ = [n for n, s in zip(names, settings, strict=True) if s != settings[0]]
        if differ:
            raise CheckpointError(
                f"{folder}: {names[0]} and {differ[0]} were saved with different settings, and are both in group {at} "
                f"of the optimizer: build it with the groups it had"
            )
        new = settings[0] if settings else {}
        for key, value in new.items():
            # The file may come from anywhere: text in the place of a learning rate would fail in the next step only
            number = isinstance(group.get(key), Tensor) or type(group.get(key)) in (int, float)
            if number and not (type(value) is float or (type(value) is int and abs(value) < 1 << 63)):
                raise CheckpointError(f"{folder / DESCRIPTION}: groups: settings.{key!s:.100}: expected a number")
        found.append(new)
    return found


# --- reading and checking ---


def _read_description(folder: Path) -> dict[str, Any]:
    path, description = folder / DESCRIPTION, read_description(folder)
    wrong = misfit(description)
    if wrong is not None:
        raise CheckpointError(f"{path}: expected a description of format {FORMAT}: {wrong} is not as `save` writes it")
    try:
        return description_from_json(description)
    except ValueError as error:
        raise CheckpointError(f"{path}: expected a description: {error}") from error


def _check_model(folder: Path, index: Mapping[str, Any], entries: Mapping[str, Tensor], described: Training) -> None:
    """Raise `CheckpointError` unless the checkpoint holds this model; all ranks come to the same result."""
    names = described.all_model_names()
    saved = {n for n in index if n.startswith("model.")}
    for what, differ in (("lacks", names - saved), ("holds, and the model does not:", saved - names)):
        if differ:
            raise CheckpointError(f"{folder}: the checkpoint {what} {some(n.removeprefix('model.') for n in differ)}")
    _check_sizes(folder, index, entries)


def _check_sizes(folder: Path, index: Mapping[str, Any], entries: Mapping[str, Tensor]) -> None:
    for name, value in entries.items():
        size = getattr(index.get(name), "size", None)
        if size is None or tuple(size) != tuple(value.shape):
            got = "none" if size is None else str(list(size))
            raise CheckpointError(f"{folder}: {name} should have shape {list(value.shape)}, the checkpoint has {got}")
