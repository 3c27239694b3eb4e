"""Checkpoints of model and optimizer that can be read at another size: of the expert-parallel group, of the world.

Every expert has entries of its own under its global number, for its parameters and for its optimizer state, so that
any rank can read any expert. The other parameters are entries as they are: whole, or a DTensor that FSDP has cut.
Tensors are in torch's distributed checkpoint format (`torch.distributed.checkpoint`, DCP): each is written once, by
one of the ranks that have it, and every rank reads only what it needs. `training.json` beside them says what they are.
A save that is interrupted leaves the checkpoint that was in the folder before (`prophet.engine.checkpoint_folder`).

Nothing that stands in a checkpoint is run: `prophet.state.tensor_index` reads torch's index, which is a pickle.

Shape legend: m experts per rank.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import WriteResult

from prophet.engine.checkpoint_experts import ExpertStates, counts_on_device, entries_of
from prophet.engine.checkpoint_folder import DESCRIPTION, Folder
from prophet.engine.checkpoint_json import FORMAT, as_given, misfit, plain
from prophet.engine.expert_state import banks_of, patterns, shares_of, split_state
from prophet.engine.shared_errors import failure_of, limit_of, short, together
from prophet.errors import CheckpointError
from prophet.files import read_bytes
from prophet.ranks.process_group import at_work, process_rank, processes
from prophet.spec import digest, odd_ones_out
from prophet.state.tensor_index import TensorReader

MAX_DESCRIPTION_BYTES = 1 << 28
# how an optimizer computes is the reading one's own choice
NOT_SETTINGS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
_SHOWN = 4  # names in a message


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write `model` and the state of `optimizer` to `folder`; collective over all processes, between two steps.

    model: as it is trained, also wrapped in DistributedDataParallel or cut by `fully_shard`. extra: numbers, strings,
    tensors of up to 16 MiB, and lists and dictionaries of them, the same on all processes (the step, a scheduler's
    `state_dict()`; an engine's with one expert-parallel group, as every group counts its own tokens).

    The checkpoint that is in `folder`, if there is one, is replaced when the new one is whole, and not before.

    Raises ValueError where the optimizer holds parameters that are not the model's, or state that cannot be described;
    RuntimeError where processes disagree about the optimizer; `CheckpointError`, which names the ranks, on every
    process where one of them could not write. A write takes as long as it takes: the others wait while a process is at
    it, and raise `PeerLost` where it has ended.
    """
    folder, limit_s = Path(folder), limit_of(model)
    text = ""
    entries: dict[str, Any] = {}
    error: Exception | None = None
    try:
        text, entries = _describe(model, optimizer, extra)
    except (ValueError, RuntimeError) as caught:
        error = caught
    numbers = (digest(np.frombuffer(text.encode(), np.uint8)), secrets.randbits(48))
    said = together("comparison of optimizers", folder, error, numbers, timeout_s=limit_s)
    differ = odd_ones_out(said[:, 0])
    if differ:
        raise RuntimeError(
            f"the optimizer's settings or steps, or `extra`, of process(es) {differ} differ from the other processes': "
            f"the same parameters must have been trained on all of them"
        )
    number = int(said[0, 1])
    target = Folder(folder, lambda: _current_tensors(folder))
    writer = process_rank() == 0
    with at_work(f"writing {folder}"):
        error = failure_of(lambda: target.begin(number), run=writer)
        together("start of a checkpoint", folder, error, timeout_s=limit_s)
        try:
            tensors = _Writer(target.tensors(number))
            _named(lambda: save_tensors(entries, storage_writer=tensors, no_dist=processes() == 1), folder)
        except (CheckpointError, RuntimeError, OSError) as caught:
            error = caught
        if error is None and writer:
            error = failure_of(lambda: _commit(target, number, text))
        if error is not None and writer:
            target.give_up()
        together("end of a checkpoint", folder, error, timeout_s=limit_s)


def _describe(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """The description, the same on all processes but for what differs by mistake, and this process's entries."""
    described = Training(model, optimizer)
    entries: dict[str, Any] = dict(described.model_entries())
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        for group in optimizer.param_groups:
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
    text = json.dumps(
        {
            "format": FORMAT,
            "optimizer": None if optimizer is None else type(optimizer).__name__,
            "groups": groups,
            "states": states,
            "extra": plain(dict(extra or {}), "extra"),
        },
        sort_keys=True,  # ranks may list parameters in another order
    )
    if len(text) > MAX_DESCRIPTION_BYTES:  # it is ASCII
        raise ValueError(
            f"the description takes {len(text)} bytes, {MAX_DESCRIPTION_BYTES} can be read: put less into `extra`"
        )
    return text, entries


class _Writer(FileSystemWriter):
    """Torch's, which says "unexpected pos" where a disk is full."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from error


def _commit(target: Folder, number: int, text: str) -> None:
    """Write torch's index a second time, with names as they are from outside of the tensors' folder; then switch."""
    tensors = target.tensors(number)
    index = TensorReader(tensors).read_metadata()
    places = [
        WriteResult(key, at.length, dataclasses.replace(at, relative_path=f"{tensors.name}/{at.relative_path}"))
        for key, at in index.storage_data.items()
    ]
    FileSystemWriter(target.index_from_outside(number)).finish(index, [places])
    target.commit(number, json.dumps({**json.loads(text), "tensors": tensors.name}, sort_keys=True).encode())


def load(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Read into `model` and `optimizer` what `save` has written, on any number of processes; returns its `extra`.

    Collective over all processes, between two steps. Parameters are written in place; the optimizer gets the state and
    the settings (learning rate, ...) of every parameter it holds, by the parameter's name; `fused`, `foreach` and the
    like stay as they are. Without an optimizer only the model is read. Nothing is changed where the checkpoint does
    not fit: CheckpointError then.
    """
    folder = Path(folder)
    plan = _Reading()
    with at_work(f"reading {folder}"):
        error = failure_of(lambda: plan.prepare(folder, model, optimizer))
        limit_s = limit_of(model)
        together("reading of a checkpoint", folder, error, timeout_s=limit_s)
        alone = processes() == 1
        if plan.experts is not None:
            experts = plan.experts
            plan.entries |= experts.entries
            _named(lambda: load_tensors(experts.numbers, storage_reader=plan.reader, no_dist=alone), folder)
            together("reading of experts' steps", folder, failure_of(experts.settle), timeout_s=limit_s)
        _named(lambda: load_tensors(plan.entries, storage_reader=plan.reader, no_dist=alone), folder)
    if optimizer is not None:
        for group, new in zip(optimizer.param_groups, plan.settings, strict=True):
            _apply_settings(group, new)
        for p in plan.trained:
            optimizer.state.pop(p, None)
            if id(p) in plan.states:
                optimizer.state[p] = plan.states[id(p)]
    return plan.extra


class _Reading:
    """What `load` reads, and where it goes."""

    def __init__(self) -> None:
        self.tensors = Path()
        self.entries: dict[str, Any] = {}
        self.trained: list[Tensor] = []
        self.states: dict[int, dict[str, Any]] = {}
        self.settings: list[dict[str, Any]] = []
        self.experts: ExpertStates | None = None
        self.extra: dict[str, Any] = {}

    def prepare(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Check that the checkpoint fits, and make the optimizer state to read into."""
        said = _read_description(folder)
        described = Training(model, optimizer)
        self.entries.update(described.model_entries())
        self.tensors, self.extra = folder / said["tensors"], said["extra"]
        self.reader = TensorReader(self.tensors)
        metadata = self.reader.read_metadata()
        _check_files(self.tensors, metadata.storage_data)
        index = metadata.state_dict_metadata
        _check_model(folder, index, self.entries, described)
        if optimizer is None:
            return
        self.settings = _saved_settings(folder, said, optimizer, described)
        self.experts = ExpertStates(folder, index) if described.shares else None
        for name, p, _ in described.trained():
            self.trained.append(p)
            group = next(g for g in optimizer.param_groups if any(q is p for q in g["params"]))
            if self.experts is not None and name in described.shares:
                state = self.experts.expect(name, p, described.shares[name], group)
                if state:
                    self.states[id(p)] = state
            elif name in said["states"]:
                try:
                    state = _empty_state(p, said["states"][name], group)
                    _, found = described.state_entries(name, p, state)
                except (ValueError, RuntimeError, TypeError, MemoryError) as error:
                    raise CheckpointError(f"{folder / DESCRIPTION}: states.{name}: {error!s:.200}") from error
                _check_sizes(folder, index, found)
                self.entries.update(found)
                self.states[id(p)] = state


class Training:
    """A model and an optimizer by name: what is an entry of a checkpoint, and under which name."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        # first of all, since FSDP gives the cut parameters back only then
        self._values: dict[str, Any] = self.model.state_dict()
        self._optimizer = optimizer
        self._names = {id(p): n for n, p in self.model.named_parameters()}
        self.shares = shares_of(self.model)
        self._expert_keys = {keys + key for keys, _, bank in banks_of(self.model) for key in bank.all_keys()}

    def name_of(self, p: Tensor) -> str:
        name = self._names.get(id(p))
        if name is None:
            raise ValueError(
                f"the optimizer holds a parameter of shape {list(p.shape)} that is not the model's: build the "
                f"optimizer after prophet.convert() and fully_shard(), which make new parameters"
            )
        return name

    def names_of(self, p: Tensor) -> list[str]:
        """What stands for a parameter on any rank and at any size: its name, or those of all experts' shares."""
        name = self.name_of(p)
        return patterns(self.shares[name]) if name in self.shares else [name]

    def trained(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Name, parameter and state (empty before its first step) of every parameter of the optimizer."""
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                yield self.name_of(p), p, self._optimizer.state.get(p, {})

    def model_entries(self) -> dict[str, Tensor]:
        for name, value in self._values.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{name} of the state dict is a {type(value).__name__}; expected a tensor")
        return {f"model.{name}": value for name, value in self._values.items()}

    def all_model_names(self) -> set[str]:
        """The names of this rank's entries and of the experts that live on other ranks."""
        return {f"model.{n}" for n in (*self._values, *self._expert_keys)}

    def state_entries(self, name: str, p: Tensor, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """How to describe the optimizer state of a parameter that is no experts', and its tensors as entries."""
        fields: dict[str, Any] = {}
        entries: dict[str, Tensor] = {}
        for field, value in state.items():
            key = f"optimizer.{name}"
            if not isinstance(value, Tensor):
                fields[field] = {"value": plain(value, f"{field} of {name}")}
                continue
            dtype = str(value.dtype).removeprefix("torch.")
            if value.dim() == 0 and p.dim() > 0:
                fields[field] = {"value": value.item(), "dtype": dtype}
                continue
            if value.shape != p.shape and hasattr(p, "full_tensor"):  # a DTensor
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
            found[key] = plain(value.item() if single else value, f"the optimizer's setting {key}")
    return found


def _apply_settings(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        old = group.get(key)
        if isinstance(old, Tensor):
            with torch.no_grad():
                old.copy_(torch.as_tensor(value))
        else:
            group[key] = tuple(value) if isinstance(value, list) and isinstance(old, tuple) else value


def _empty_state(p: Tensor, fields: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """State of the described fields; tensors are zero."""
    state: dict[str, Any] = {}
    for field, said in fields.items():
        if "dtype" not in said:
            state[field] = said["value"]
            continue
        dtype = getattr(torch, said["dtype"])
        if "value" in said:
            device = p.device if counts_on_device(group) else "cpu"
            state[field] = torch.tensor(said["value"], dtype=dtype, device=device)
        else:
            shape = list(said["shape"])
            alike = shape == list(p.shape)
            made = torch.zeros_like(p, dtype=dtype) if alike else torch.zeros(shape, dtype=dtype, device=p.device)
            state[field] = made.detach()
    return state


def _saved_settings(
    folder: Path, said: Mapping[str, Any], optimizer: torch.optim.Optimizer, described: Training
) -> list[dict[str, Any]]:
    """The settings to give to each of the optimizer's groups."""
    wanted = type(optimizer).__name__
    if said["optimizer"] != wanted:
        what = f"the state of {said['optimizer']}" if said["optimizer"] else "no optimizer state"
        raise CheckpointError(f"{folder}: expected the state of {wanted}, the checkpoint has {what}")
    return settings_by_group(folder, said["groups"], optimizer, described)


def settings_by_group(
    folder: Path, groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer, described: Training
) -> list[dict[str, Any]]:
    """The settings that the parameters of each of the optimizer's groups were saved with; `{}` without parameters."""
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
            number = isinstance(group.get(key), Tensor) or type(group.get(key)) in (int, float)
            if number and not (type(value) is float or (type(value) is int and abs(value) < 1 << 63)):
                raise CheckpointError(f"{folder / DESCRIPTION}: groups: settings.{key!s:.100}: expected a number")
        found.append(new)
    return found


# --- reading and checking ---


def _read_description(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION
    needed = "a description, as no checkpoint was finished here"
    text = read_bytes(path, most_bytes=MAX_DESCRIPTION_BYTES, expected=needed, error=CheckpointError)
    try:
        said: dict[str, Any] = json.loads(text, object_hook=as_given)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{path}: expected a description ({type(error).__name__}: {error!s:.200})") from error
    wrong = misfit(said)
    if wrong is not None:
        raise CheckpointError(f"{path}: expected a description of format {FORMAT}: {wrong} is not as `save` writes it")
    return said


def _current_tensors(folder: Path) -> str | None:
    """Which tensors belong to the checkpoint that is in `folder` now; None where there is none."""
    if not (folder / DESCRIPTION).exists():
        return None
    return str(_read_description(folder)["tensors"])


def _check_files(folder: Path, parts: Mapping[Any, Any]) -> None:
    """Raise CheckpointError where a file of tensors is missing or shorter than the index says."""
    needed: dict[str, int] = {}
    for part in parts.values():
        needed[part.relative_path] = max(needed.get(part.relative_path, 0), part.offset + part.length)
    for name, size in sorted(needed.items()):
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder / name}: cannot be read ({error.strerror})") from error
        if found < size:
            where = folder / name
            raise CheckpointError(f"{where}: expected at least {size} bytes, got {found}: the copy is incomplete")


def _check_model(folder: Path, index: Mapping[str, Any], entries: Mapping[str, Tensor], described: Training) -> None:
    """Raise `CheckpointError` unless the checkpoint holds this model; the same on all ranks."""
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


def some(names: Any) -> str:
    """The first names, and how many more there are."""
    listed = sorted(names)
    return ", ".join(listed[:_SHOWN]) + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")


def _named(call: Callable[[], object], folder: Path) -> None:
    """Call a function of torch's checkpoints, which tells all processes what happened to one; in an Exception."""
    try:
        call()
    except CheckpointException as error:
        if not all(isinstance(caught, Exception) for caught, _ in error.failures.values()):
            raise  # somebody wants to end the program
        found = [f"rank {rank}: {short(caught)}" for rank, (caught, _) in sorted(error.failures.items())]
        raise CheckpointError(f"{folder}: {'; '.join(found)}") from error
