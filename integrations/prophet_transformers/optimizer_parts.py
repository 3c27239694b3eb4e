"""The optimizer's state as files that any number of ranks can read.

One file holds the settings, and the state of the parameters that all ranks share. Each rank of an expert-parallel
group adds a file with the state of its experts, each by itself. A reading rank takes the experts it has from
whichever files hold them. Parameters are told apart by name.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prophet.convert import converted
from prophet.engine.checkpoint.optimizer_by_expert import Share, join_state, split_state
from prophet.engine.checkpoint.training import NOT_SETTINGS, Training, settings_by_group
from prophet.errors import CheckpointError

# Trainer's name for the optimizer's file
SHARED = "optimizer.pt"
EXPERTS = "optimizer_experts_{rank}_of_{ranks}.pt"
FORMAT = 2


class OptimizerParts:
    """The state of an optimizer by the names of a converted model's parameters; see the module."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        # accelerate wraps it
        self._optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        self._training = Training(model, self._optimizer)
        group = next(layer.collective for *_, layer in converted(model))
        self.rank, self.ranks = group.rank, group.size
        self._shares = self._training.shares

    # --- writing ---

    def shared(self) -> dict[str, Any]:
        """Settings, and the state of the parameters that all ranks share."""
        groups = []
        for group in self._optimizer.param_groups:
            settings = {k: v for k, v in group.items() if k not in NOT_SETTINGS}
            groups.append({"settings": settings, "parameters": self._names(group)})
        states = {name: state for name, _, state in self._training.trained() if state and name not in self._shares}
        kind = type(self._optimizer).__name__
        return {"format": FORMAT, "optimizer": kind, "ranks": self.ranks, "groups": groups, "states": states}

    def experts(self) -> dict[str, Any]:
        """The state of this rank's experts, each by itself; state that they share stands under the parameter's name."""
        states: dict[str, Any] = {}
        shared: dict[str, Any] = {}
        for name, p, state in self._training.trained():
            if name in self._shares:
                try:
                    states |= split_state(name, p, self._shares[name], state)
                # This state cannot be cut by expert, so it is of use to the same number of ranks only.
                except ValueError:
                    shared[name] = {"experts": [s.key for s in self._shares[name]], "state": state}
        return {"format": FORMAT, "states": states, "shared": shared}

    def experts_file(self) -> str:
        """The name of the file for `experts()`."""
        return EXPERTS.format(rank=self.rank, ranks=self.ranks)

    # --- reading ---

    def read(self, shared: Any, folder: Path) -> dict[str, Any]:
        """Make what the optimizer's `load_state_dict` takes, for this rank's experts.

        Args:
            shared: The contents of the file with the shared state.
            folder: Where that file is, and those of the experts.

        Raises:
            CheckpointError: Where state is missing, is of another optimizer, or cannot be divided among this number of
                ranks.
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
            # torch numbers parameters over all groups in a state dict
            numbers = range(len(states), len(states) + len(group["params"]))
            kept = {key: group[key] for key in NOT_SETTINGS if key in group}
            # A group without parameters, as Trainer makes one where all are adapters, keeps its settings.
            groups.append({**(new or group), **kept, "params": list(numbers)})
            # Such optimizers keep even the step count in a tensor on the device.
            on_device = bool(group.get("capturable") or group.get("fused"))
            for number, p in zip(numbers, group["params"], strict=True):
                name = self._training.name_of(p)
                shares = self._shares.get(name)
                if shares is None:
                    states[number] = shared["states"].get(name)
                    continue
                try:
                    states[number] = files.shared(name, shares)
                    if states[number] is None:
                        states[number] = join_state(name, p, shares, files.states(shares), on_device=on_device)
                except ValueError as error:
                    raise CheckpointError(f"{folder}: {error}") from error
        return {"param_groups": groups, "state": {n: s for n, s in states.items() if s}}

    def _names(self, group: Mapping[str, Any]) -> list[str]:
        return [name for p in group["params"] for name in self._training.names_of(p)]


class _ExpertFiles:
    """The files of all ranks that wrote, opened when they are needed.

    Args:
        folder: Where they are.
        ranks: How many ranks wrote.
        likely: The rank whose file to try first.
    """

    def __init__(self, folder: Path, ranks: int, likely: int | None) -> None:
        self._folder, self._ranks = folder, ranks
        self._order = sorted(range(ranks), key=lambda rank: rank != likely)
        self._open: dict[int, Mapping[str, Any]] = {}

    def shared(self, name: str, shares: Sequence[Share]) -> dict[str, Any] | None:
        """State that experts share, for those that shared it; None where every expert has its own."""
        found = self._part(self._order[0])["shared"].get(name)
        if found is None:
            return None
        if found["experts"] != [s.key for s in shares]:
            fields = ", ".join(sorted(found["state"]))
            raise CheckpointError(
                f"{self._folder}: the optimizer's {fields} of {name} cannot be divided among another number of ranks: "
                f"resume with expert-parallel groups of {self._ranks}"
            )
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in found["state"].items()}

    def states(self, shares: Sequence[Share]) -> dict[str, Any]:
        """The states of these experts' shares, by key."""
        found: dict[str, Any] = {}
        for rank in self._order:
            if len(found) == len(shares):
                break
            there = self._part(rank)["states"]
            found |= {s.key: there[s.key] for s in shares if s.key in there}
        for share in shares:
            if share.key not in found:
                raise CheckpointError(f"{self._folder}: no file of {self._ranks} has {share.key}")
        return found

    def _part(self, rank: int) -> Mapping[str, Any]:
        if rank not in self._open:
            path = self._folder / EXPERTS.format(rank=rank, ranks=self._ranks)
            try:
                # mmap: a rank reads few of the experts in most files
                part = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise CheckpointError(
                    f"{path}: expected the optimizer's state of this rank's experts: {error}"
                ) from error
            if not isinstance(part, dict) or part.get("format") != FORMAT:
                raise CheckpointError(f"{path}: expected the state that ProphetCallback writes")
            self._open[rank] = part
        return self._open[rank]
