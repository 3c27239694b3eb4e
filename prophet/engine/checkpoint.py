"""Checkpoints of model and optimizer that can be read at another size: of the expert-parallel group, of the world.

Every expert has entries of its own under its global number, for its parameters and for its optimizer state, so that
any rank can read any expert. The other parameters are entries as they are: whole, or a DTensor that FSDP has cut.
Tensors are in torch's distributed checkpoint format (`torch.distributed.checkpoint`, DCP): each is written once, by
one of the ranks that have it, and every rank reads only what it needs. `training.json` beside them says what they are.
It is written last: a folder without it holds no checkpoint.

Read only checkpoints of your own: torch keeps its index of the tensors as a pickle.

Shape legend: m experts per rank.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from prophet.errors import CheckpointError
from prophet.experts.bank import ExpertBank
from prophet.layer.moe import MoE
from prophet.ranks.collective import Operation
from prophet.ranks.process_group import collective_for, process_rank, processes
from prophet.spec import odd_ones_out

DESCRIPTION = "training.json"
TENSOR_INDEX = ".metadata"  # torch's
MAX_DESCRIPTION_BYTES = 1 << 28
FORMAT = 1
# how an optimizer computes is the reading one's own choice
_NOT_SETTINGS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
_SHOWN = 4  # names in a message
_BY_NUMBER = "entries by number"
_TENSOR = "tensor: dtype, shape, bytes in base 64"
_DTYPES = {f"torch.{name}": name for name in ("bool", "int8", "uint8", "int32", "int64", "float32", "float64")}
_MAX_TENSOR_BYTES = 1 << 24


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

    Raises ValueError where the optimizer holds parameters that are not the model's, or state that cannot be described;
    RuntimeError where processes disagree about the optimizer.
    """
    folder = Path(folder)
    described = _Training(model, optimizer)
    entries = described.model_entries()
    groups = []
    if optimizer is not None:
        for group in optimizer.param_groups:
            names = sorted(described.name_of(p) for p in group["params"])
            groups.append({"settings": _settings(group), "parameters": names})
    states = {}
    for name, p, state in described.trained():
        if state:
            states[name], found = described.state_entries(name, p, state)
            entries.update(found)
    text = json.dumps(
        {
            "format": FORMAT,
            "optimizer": None if optimizer is None else type(optimizer).__name__,
            "groups": groups,
            "states": states,
            "extra": _plain(dict(extra or {}), "extra"),
        },
        sort_keys=True,  # ranks may list parameters in another order
    )
    if len(text) > MAX_DESCRIPTION_BYTES:  # it is ASCII
        raise ValueError(
            f"the description takes {len(text)} bytes, {MAX_DESCRIPTION_BYTES} can be read: put less into `extra`"
        )
    _agree(text, described)
    if process_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (DESCRIPTION, TENSOR_INDEX):
            (folder / name).unlink(missing_ok=True)
    _meet("start of a checkpoint", described)
    save_tensors(entries, checkpoint_id=folder, no_dist=processes() == 1)
    if process_rank() == 0:
        part = folder / f"{DESCRIPTION}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(folder / DESCRIPTION)
    _meet("end of a checkpoint", described)


def load(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Read into `model` and `optimizer` what `save` has written, on any number of processes; returns its `extra`.

    Collective over all processes, between two steps. Parameters are written in place; the optimizer gets the state and
    the settings (learning rate, ...) of every parameter it holds, by the parameter's name; `fused`, `foreach` and the
    like stay as they are. Without an optimizer only the model is read. Nothing is changed where the checkpoint does
    not fit: CheckpointError then.
    """
    folder = Path(folder)
    said = _read_description(folder)
    described = _Training(model, optimizer)
    entries = described.model_entries()
    metadata = FileSystemReader(folder).read_metadata()
    _check_files(folder, metadata.storage_data)
    index = metadata.state_dict_metadata
    _check_model(folder, index, entries, described)
    states: dict[int, dict[str, Any]] = {}
    settings: list[dict[str, Any]] = []
    if optimizer is not None:
        settings = _saved_settings(folder, said, optimizer, described)
        for name, p, _ in described.trained():
            if name in said["states"]:
                group = next(g for g in optimizer.param_groups if any(q is p for q in g["params"]))
                state = _empty_state(p, said["states"][name], group, expert=name in described.banks)
                _, found = described.state_entries(name, p, state)
                _check_sizes(folder, index, found)
                entries.update(found)
                states[id(p)] = state
    load_tensors(entries, checkpoint_id=folder, no_dist=processes() == 1)
    if optimizer is not None:
        for group, new in zip(optimizer.param_groups, settings, strict=True):
            _apply_settings(group, new)
        for _, p, _ in described.trained():
            optimizer.state.pop(p, None)
            if id(p) in states:
                optimizer.state[p] = states[id(p)]
    extra: dict[str, Any] = said["extra"]
    return extra


class _Training:
    """A model and an optimizer by name: what is an entry of a checkpoint, and under which name."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        # first of all, since FSDP gives the cut parameters back only then
        self._values: dict[str, Any] = self.model.state_dict()
        self._optimizer = optimizer
        self._names = {id(p): n for n, p in self.model.named_parameters()}
        self.banks: dict[str, ExpertBank] = {}
        for name, layer in self.model.named_modules():
            if isinstance(layer, MoE):
                prefix = f"{name}.experts" if name else "experts"
                self.banks |= {f"{prefix}.{part}": layer.experts for part, _ in layer.experts.stacked()}
        self.device = next(iter(self.model.parameters())).device

    def name_of(self, p: Tensor) -> str:
        name = self._names.get(id(p))
        if name is None:
            raise ValueError(
                f"the optimizer holds a parameter of shape {list(p.shape)} that is not the model's: build the "
                f"optimizer after prophet.convert() and fully_shard(), which make new parameters"
            )
        return name

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
        names = {f"model.{n}" for n in self._values}
        for name, bank in self.banks.items():
            names |= {f"model.{name}.{e}" for e in range(bank.total_experts)}
        return names

    def state_entries(self, name: str, p: Tensor, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """How to describe a parameter's optimizer state, and its tensors as entries.

        A tensor of an expert parameter [m, ...] has an entry for every expert, which is a view of it.
        """
        fields: dict[str, Any] = {}
        entries: dict[str, Tensor] = {}
        bank = self.banks.get(name)
        for field, value in state.items():
            key = f"optimizer.{name}"
            if not isinstance(value, Tensor):
                fields[field] = {"value": _plain(value, f"{field} of {name}")}
                continue
            dtype = str(value.dtype).removeprefix("torch.")
            if value.dim() == 0 and p.dim() > 0:
                fields[field] = {"value": value.item(), "dtype": dtype}
                continue
            if bank is not None:
                if value.shape[0] != bank.experts:
                    raise ValueError(
                        f"the optimizer's {field} of {name} has shape {list(value.shape)}, which cannot be cut into "
                        f"{bank.experts} experts"
                    )
                fields[field] = {"shape": list(value.shape[1:]), "dtype": dtype}
                for local in range(bank.experts):
                    entries[f"{key}.{bank.first_expert + local}.{field}"] = value[local]
                continue
            if value.shape != p.shape and _is_cut(p):
                raise ValueError(
                    f"the optimizer's {field} of {name} has shape {list(value.shape)}; of a parameter that is cut over "
                    f"ranks, {list(p.shape)}, only state of that shape can be saved"
                )
            fields[field] = {"shape": list(value.shape), "dtype": dtype}
            entries[f"{key}.{field}"] = value
        return fields, entries


# --- settings and states ---


def _is_cut(p: Tensor) -> bool:
    """Whether it is a DTensor, as `fully_shard` makes them."""
    return hasattr(p, "full_tensor")


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in group.items():
        if key not in _NOT_SETTINGS:
            single = isinstance(value, Tensor) and value.numel() == 1
            found[key] = _plain(value.item() if single else value, f"the optimizer's setting {key}")
    return found


def _apply_settings(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        old = group.get(key)
        if isinstance(old, Tensor):
            with torch.no_grad():
                old.copy_(torch.as_tensor(value))
        else:
            group[key] = tuple(value) if isinstance(value, list) and isinstance(old, tuple) else value


def _empty_state(p: Tensor, fields: Mapping[str, Any], group: Mapping[str, Any], *, expert: bool) -> dict[str, Any]:
    """State of the described fields; tensors are zero."""
    state: dict[str, Any] = {}
    for field, said in fields.items():
        if "dtype" not in said:
            state[field] = said["value"]
            continue
        dtype = getattr(torch, said["dtype"])
        if "value" in said:
            # torch's optimizers keep their step on the host unless they count on the device
            on_device = group.get("capturable") or group.get("fused")
            state[field] = torch.tensor(said["value"], dtype=dtype, device=p.device if on_device else "cpu")
        else:
            shape = [p.shape[0], *said["shape"]] if expert else list(said["shape"])
            alike = shape == list(p.shape)
            made = torch.zeros_like(p, dtype=dtype) if alike else torch.zeros(shape, dtype=dtype, device=p.device)
            state[field] = made.detach()
    return state


def _saved_settings(
    folder: Path, said: Mapping[str, Any], optimizer: torch.optim.Optimizer, described: _Training
) -> list[dict[str, Any]]:
    """The settings to give to each of the optimizer's groups."""
    wanted = type(optimizer).__name__
    if said["optimizer"] != wanted:
        what = f"the state of {said['optimizer']}" if said["optimizer"] else "no optimizer state"
        raise CheckpointError(f"{folder}: expected the state of {wanted}, the checkpoint has {what}")
    by_name = {name: g["settings"] for g in said["groups"] for name in g["parameters"]}
    found = []
    for at, group in enumerate(optimizer.param_groups):
        names = [described.name_of(p) for p in group["params"]]
        missing = [n for n in names if n not in by_name]
        if missing:
            raise CheckpointError(f"{folder}: the optimizer that was saved did not hold {_some(missing)}")
        settings = [by_name[n] for n in names]
        differ = [n for n, s in zip(names, settings, strict=True) if s != settings[0]]
        if differ:
            raise CheckpointError(
                f"{folder}: {names[0]} and {differ[0]} were saved with different settings, and are both in group {at} "
                f"of the optimizer: build it with the groups it had"
            )
        found.append(settings[0] if settings else {})
    return found


# --- reading and checking ---


def _read_description(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION
    try:
        with path.open("rb") as f:
            text = f.read(MAX_DESCRIPTION_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}): no checkpoint was finished here") from error
    if len(text) > MAX_DESCRIPTION_BYTES:
        raise CheckpointError(f"{path}: expected at most {MAX_DESCRIPTION_BYTES} bytes")
    try:
        said = json.loads(text, object_hook=_as_given)
        fits = said["format"] == FORMAT and isinstance(said["states"], dict) and isinstance(said["extra"], dict)
        fits = fits and all({"settings", "parameters"} <= set(g) for g in said["groups"])
        for field in (f for fields in said["states"].values() for f in fields.values()):
            fits = fits and ("value" in field or {"shape", "dtype"} <= set(field))
            fits = fits and isinstance(getattr(torch, field.get("dtype", "float32"), None), torch.dtype)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: expected a description written by prophet.engine.checkpoint ({error!r})"
        ) from error
    if not fits:
        raise CheckpointError(f"{path}: expected a description of format {FORMAT} written by prophet.engine.checkpoint")
    found: dict[str, Any] = said
    return found


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
            raise CheckpointError(
                f"{folder / name}: expected at least {size} bytes, got {found}: the copy is incomplete"
            )


def _check_model(folder: Path, index: Mapping[str, Any], entries: Mapping[str, Tensor], described: _Training) -> None:
    """Raise `CheckpointError` unless the checkpoint holds this model; the same on all ranks."""
    names = described.all_model_names()
    saved = {n for n in index if n.startswith("model.")}
    for what, differ in (("lacks", names - saved), ("holds, and the model does not:", saved - names)):
        if differ:
            raise CheckpointError(f"{folder}: the checkpoint {what} {_some(n.removeprefix('model.') for n in differ)}")
    _check_sizes(folder, index, entries)


def _check_sizes(folder: Path, index: Mapping[str, Any], entries: Mapping[str, Tensor]) -> None:
    for name, value in entries.items():
        size = getattr(index.get(name), "size", None)
        if size is None or tuple(size) != tuple(value.shape):
            got = "none" if size is None else str(list(size))
            raise CheckpointError(f"{folder}: {name} should have shape {list(value.shape)}, the checkpoint has {got}")


def _some(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:_SHOWN]) + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")


def _plain(value: Any, what: str) -> Any:
    """`value` where JSON can hold it; `_as_given` is the inverse."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(v, what) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: _plain(v, f"{what}[{k!r}]") for k, v in value.items()}
    if isinstance(value, dict) and all(type(k) is int for k in value):  # JSON's keys are strings
        return {_BY_NUMBER: [[k, _plain(v, f"{what}[{k}]")] for k, v in sorted(value.items())]}
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{what} is a {type(value).__name__}; expected numbers, strings, small tensors, and lists and dictionaries "
            "of them"
        )
    if str(value.dtype) not in _DTYPES or value.numel() * value.itemsize > _MAX_TENSOR_BYTES:
        raise ValueError(
            f"{what} is a tensor of {value.dtype} {list(value.shape)}; expected at most {_MAX_TENSOR_BYTES} bytes of "
            f"{', '.join(_DTYPES)}"
        )
    data = value.detach().resolve_neg().cpu().numpy().tobytes()
    return {_TENSOR: [str(value.dtype), list(value.shape), base64.b64encode(data).decode()]}


def _as_given(found: dict[str, Any]) -> Any:
    """What an object in the text stands for; JSON's reader calls it, inner objects first."""
    if found.keys() == {_BY_NUMBER}:
        return dict(found[_BY_NUMBER])
    if found.keys() == {_TENSOR}:
        dtype, shape, data = found[_TENSOR]
        array = np.frombuffer(base64.b64decode(data, validate=True), dtype=_DTYPES[dtype])
        return torch.from_numpy(array.reshape(shape).copy())
    return found


# --- together ---


def _agree(text: str, described: _Training) -> None:
    """Raise RuntimeError unless all processes describe the same optimizer."""
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    mine = torch.tensor([digest], dtype=torch.int64, device=described.device)
    found = collective_for(None).all_gather(mine, op=Operation("comparison of optimizers")).cpu().flatten()
    differ = odd_ones_out(found.numpy())
    if differ:
        raise RuntimeError(
            f"the optimizer's settings or steps, or `extra`, of process(es) {differ} differ from the other processes': "
            f"the same parameters must have been trained on all of them"
        )


def _meet(why: str, described: _Training) -> None:
    collective_for(None).all_gather(torch.zeros(1, device=described.device), op=Operation(why))
