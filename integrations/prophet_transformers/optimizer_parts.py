"""The optimizer's state as files that any number of ranks can read.

One file holds the settings, and the state of the parameters that all ranks share. Each rank of an expert-parallel
group adds a file with the state of its own experts, which says which experts these are. A reading rank takes the
experts it has from whichever files hold them. Parameters are told apart by name.

Shape legend: m experts per rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prophet.convert import converted
from prophet.engine.checkpoint import NOT_SETTINGS, Training, settings_by_group
from prophet.errors import CheckpointError

SHARED = "optimizer.pt"  # Trainer's name
EXPERTS = "optimizer_experts_{rank}_of_{ranks}.pt"
FORMAT = 1


class OptimizerParts:
    """The state of `optimizer` by the names of a converted model's parameters; see the module."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        self._training = Training(model, self._optimizer)
        group = next(layer.collective for *_, layer in converted(model))
        self.rank, self.ranks = group.rank, group.size
        # by parameter: the global number of the first of this rank's experts, and how many
        self._held = {name: (bank.first_expert, bank.experts) for name, bank in self._training.banks.items()}

    # --- writing ---

    def shared(self) -> dict[str, Any]:
        """Settings, and the state of the parameters that all ranks share."""
        groups = []
        for group in self._optimizer.param_groups:
            settings = {k: v for k, v in group.items() if k not in NOT_SETTINGS}
            groups.append({"settings": settings, "parameters": self._names(group)})
        states = {name: state for name, _, state in self._training.trained() if state and name not in self._held}
        kind = type(self._optimizer).__name__
        return {"format": FORMAT, "optimizer": kind, "ranks": self.ranks, "groups": groups, "states": states}

    def experts(self) -> dict[str, Any]:
        """The state of this rank's experts."""
        states = {name: state for name, _, state in self._training.trained() if state and name in self._held}
        return {"format": FORMAT, "held": dict(self._held), "states": states}

    def experts_file(self) -> str:
        """The name of the file for `experts()`."""
        return EXPERTS.format(rank=self.rank, ranks=self.ranks)

    # --- reading ---

    def read(self, shared: Any, folder: Path) -> dict[str, Any]:
        """What the optimizer's `load_state_dict` takes, for this rank's experts.

        shared: the contents of the file of that name in `folder`. Raises `CheckpointError` where state is missing, is
        of another optimizer, or cannot be divided among this number of ranks.
        """
        path = folder / SHARED
        if not isinstance(shared, dict) or shared.get("format") != FORMAT:
            raise CheckpointError(
                f"{path}: expected the state that ProphetCallback writes; to train on from the model alone, load it "
                f"by from_pretrained({str(folder)!r}) and do not resume"
            )
        wanted = type(self._optimizer).__name__
        if shared["optimizer"] != wanted:
            raise CheckpointError(f"{path}: expected the state of {wanted}, got that of {shared['optimizer']}")
        settings = settings_by_group(folder, shared["groups"], self._optimizer, self._training)
        files = _ExpertFiles(folder, shared["ranks"], self.rank if shared["ranks"] == self.ranks else None)
        groups: list[dict[str, Any]] = []
        states: dict[int, Any] = {}
        for group, new in zip(self._optimizer.param_groups, settings, strict=True):
            names = self._names(group)
            numbers = range(len(states), len(states) + len(names))
            kept = {key: group[key] for key in NOT_SETTINGS if key in group}
            # a group without parameters, as Trainer makes one where all are adapters, keeps its settings
            groups.append({**(new or group), **kept, "params": list(numbers)})
            for number, name in zip(numbers, names, strict=True):
                held = self._held.get(name)
                states[number] = shared["states"].get(name) if held is None else files.state(name, *held)
        return {"param_groups": groups, "state": {n: s for n, s in states.items() if s}}

    def _names(self, group: Mapping[str, Any]) -> list[str]:
        return [self._training.name_of(p) for p in group["params"]]


class _ExpertFiles:
    """The files of all ranks that wrote, opened when they are needed. likely: the rank whose file to try first."""

    def __init__(self, folder: Path, ranks: int, likely: int | None) -> None:
        self._folder, self._ranks = folder, ranks
        self._order = sorted(range(ranks), key=lambda rank: rank != likely)
        self._open: dict[int, Mapping[str, Any]] = {}

    def state(self, name: str, first: int, count: int) -> dict[str, Any]:
        """The state of the parameter `name` for experts first..first + count."""
        stop = first + count
        missing = set(range(first, stop))
        pieces: list[tuple[range, Mapping[str, Any]]] = []
        for rank in self._order:
            if not missing:
                break
            part = self._part(rank)
            start, size = part["held"].get(name, (0, 0))
            held = range(start, start + size)
            if missing.isdisjoint(held):
                continue
            missing.difference_update(held)
            pieces.append((held, part["states"].get(name, {})))
        if missing:
            raise CheckpointError(f"{self._folder}: no file of {self._ranks} has expert {min(missing)} of {name}")
        pieces.sort(key=lambda piece: piece[0].start)
        whole = pieces[0][0] == range(first, stop)
        joined: dict[str, Any] = {}
        for field in sorted({field for _, state in pieces for field in state}):
            values: list[tuple[Any, range]] = [(state.get(field), held) for held, state in pieces]
            one: Any = values[0][0]
            if whole or all(_equal(v, one) for v, _ in values):
                joined[field] = one.clone() if isinstance(one, Tensor) else one  # a mapped file may be written to later
            elif all(isinstance(v, Tensor) and v.shape[:1] == (len(held),) for v, held in values):
                joined[field] = torch.cat([v[max(first - held.start, 0) : stop - held.start] for v, held in values])
            else:
                raise CheckpointError(
                    f"{self._folder}: the optimizer's {field} of {name} cannot be divided among another number of "
                    f"ranks: resume with expert-parallel groups of {self._ranks}"
                )
        return joined

    def _part(self, rank: int) -> Mapping[str, Any]:
        if rank not in self._open:
            path = self._folder / EXPERTS.format(rank=rank, ranks=self._ranks)
            try:
                part = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise CheckpointError(
                    f"{path}: expected the optimizer's state of this rank's experts: {error}"
                ) from error
            if not isinstance(part, dict) or part.get("format") != FORMAT:
                raise CheckpointError(f"{path}: expected the state that ProphetCallback writes")
            self._open[rank] = part
        return self._open[rank]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dim() == b.dim() == 0 and torch.equal(a, b)
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b)
