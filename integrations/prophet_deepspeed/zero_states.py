"""Full-precision values and optimizer states of single parameters, wherever DeepSpeed keeps them.

ZeRO keeps this process's part of a flat tensor, 16-bit training without it a flat tensor or one tensor per parameter,
and plain 32-bit training the parameter itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

FP32 = "fp32"
_KEPT_APART = ("params", "name", "moe")


class States:
    """The optimizer states of a DeepSpeed engine `ds`, by its parameters."""

    def __init__(self, ds: Any) -> None:
        self._optimizer, self._base, self._fp16 = ds.optimizer, ds.basic_optimizer, bool(ds.fp16_enabled())
        # This process's part of every group's 32-bit values, where they are divided over processes: by ZeRO, or with
        # bf16 and gradients added up in fp32.
        parts = _first_of(ds.optimizer, "fp32_groups_flat_partition", "single_partition_of_fp32_groups")
        self._zero = parts is not None
        flats = parts if self._zero else _first_of(ds.optimizer, "fp32_groups_flat")
        singles = _first_of(ds.optimizer, "fp32_groups")
        groups = _first_of(ds.optimizer, "bit16_groups", "bf16_groups", "fp16_groups")
        self._tools: Any = importlib.import_module("deepspeed.utils")
        # By parameter: its group, the tensor that the base optimizer updates for it, and its place in there
        self._where: dict[int, tuple[int, Tensor, int]] = {}
        self._groups: list[list[nn.Parameter]] = []
        for at, group in enumerate(self._base.param_groups):
            params = list(group["params"] if groups is None else groups[at])
            self._groups.append(params)
            offset = 0
            for i, p in enumerate(params):
                if flats is not None:
                    flat = flats[at]
                elif singles is not None:
                    flat = singles[at][i]
                else:
                    flat = p
                self._where[id(p)] = (at, flat, offset if flat.dim() == 1 and flat.numel() != p.numel() else 0)
                offset += p.numel()

    def holds(self, param: nn.Parameter) -> bool:
        """Whether the optimizer trains this parameter."""
        return id(param) in self._where

    def read(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Read the 32-bit value and all states of the parameter's shape; with ZeRO collective over its sharers."""
        _, flat, start = self._where[id(param)]
        keys = _of_shape(self._base.state.get(flat, {}), flat)
        if self._zero:
            if keys:
                # DeepSpeed links states to parameters once, perhaps before there were any.
                self._optimizer._hp_optimizer_states_linked = False
                self._optimizer._lazy_init_hp_params_optimizer_state()
            found = {FP32: self._tools.safe_get_full_fp32_param(param)}
            return found | {k: self._tools.safe_get_full_optimizer_state(param, k) for k in keys}
        values = {FP32: flat} | {k: self._base.state[flat][k] for k in keys}
        return {k: self._part(v, param, start).detach().clone() for k, v in values.items()}

    @staticmethod
    def _part(flat: Tensor, param: nn.Parameter, start: int) -> Tensor:
        return flat.reshape(-1)[start : start + param.numel()].view(param.shape)

    def settings(self, param: nn.Parameter) -> dict[str, Any]:
        """Read the settings of its group, and those states that are no tensors of its shape, the step among them."""
        at, flat, _ = self._where[id(param)]
        group = {k: v for k, v in self._base.param_groups[at].items() if k not in _KEPT_APART and _plain(v)}
        state = self._base.state.get(flat, {})
        wide = _of_shape(state, flat)
        rest = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items() if k not in wide}
        return {"group": group, "state": {k: v for k, v in rest.items() if isinstance(v, Tensor) or _plain(v)}}

    @torch.no_grad()
    def write(self, values: Mapping[int, dict[str, Tensor]], settings: Mapping[int, dict[str, Any]]) -> None:
        """Set everything, given by the parameters' `id`; the parameters themselves are left alone."""
        for at, params in enumerate(self._groups):
            first = settings[id(params[0])]
            self._base.param_groups[at].update(first["group"])
            for p in params:
                flat = self._where[id(p)][1]
                keys = [k for k in values[id(p)] if k != FP32]
                if not keys:
                    continue
                state = self._base.state[flat]
                # A new optimizer has no states before its first step
                state |= {k: torch.zeros_like(flat) for k in keys if k not in state}
                for k, v in settings[id(p)]["state"].items():
                    state[k] = v.clone() if isinstance(v, Tensor) else v
        if self._zero and any(len(v) > 1 for v in values.values()):
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()
        for params in self._groups:
            for p in params:
                self._set(p, values[id(p)])

    def _set(self, param: nn.Parameter, values: Mapping[str, Tensor]) -> None:
        _, flat, start = self._where[id(param)]
        for key, value in values.items():
            on_device = value.to(flat.device)
            if not self._zero:
                target = flat if key == FP32 else self._base.state[flat][key]
                self._part(target, param, start).copy_(on_device)
            elif key == FP32:
                self._tools.safe_set_full_fp32_param(param, on_device)
            else:
                self._tools.safe_set_full_optimizer_state(param, on_device, key)

    # --- the loss scale ---

    def scaler(self) -> dict[str, Any]:
        """Read what the loss scaling remembers, by attribute, and whether it is that of fp16."""
        return {k: v for k, v in vars(self._scaler()).items() if k in _SCALE and _plain(v)} | {"fp16": self._fp16}

    def set_scaler(self, values: Mapping[str, Any]) -> None:
        """Set what `scaler` has read; a scale moves only between runs that both use fp16, or both do not."""
        for k, v in values.items():
            if k in _SCALE and values.get("fp16") == self._fp16:
                setattr(self._scaler(), k, v)

    def _scaler(self) -> Any:
        return _first_of(self._optimizer, "loss_scaler", "loss_scale_config") or self._optimizer


_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _first_of(owner: Any, *names: str) -> Any:
    """The first of these attributes that `owner` has, or None."""
    return next((getattr(owner, name) for name in names if hasattr(owner, name)), None)


def _of_shape(state: Mapping[str, Any], flat: Tensor) -> list[str]:
    return [k for k, v in state.items() if isinstance(v, Tensor) and v.shape == flat.shape and k != "step"]


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_plain(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str)
