"""Experts in the state dict of a converted model: tensors that refuse to be written to a file.

A rank's state dict holds its own experts only. Everybody lets one rank write a state dict, and such a file would lose
the other ranks' experts without a word.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from prophet.errors import PartialStateError

WAYS = (
    "On every rank call prophet.checkpoint.save(folder, model, optimizer), to resume, or model.save_pretrained(folder) "
    "of a transformers model. Or let one rank write what prophet.convert.original_state_dict(model) returns, which "
    "every rank calls"
)


class PartOfExperts(Tensor):
    """One expert's parameter on its home rank, while other ranks hold other experts.

    It computes as every tensor does, and what comes out is a plain tensor. `torch.save`, `pickle` and safetensors raise
    `PartialStateError`; torch's distributed checkpoints, `load_state_dict` and copies work. `detach()` is the way
    round, for one file per rank.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    message: str

    @classmethod
    def of(cls, value: Tensor, message: str) -> Self:
        part = value.as_subclass(cls)
        part.message = message
        return part

    def _refuse(self, *_: Any) -> NoReturn:
        raise PartialStateError(self.message)

    __reduce_ex__ = _refuse

    def untyped_storage(self) -> torch.UntypedStorage:
        """What safetensors, accelerate and transformers ask for before they write one rank's file.

        `async_save` of torch's distributed checkpoints asks for it, too, to copy it: there every rank writes its own.
        """
        if sys._getframe(1).f_globals["__name__"].startswith("torch.distributed.checkpoint."):
            return super().untyped_storage()
        return self._refuse()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self).of(self.detach().clone(), self.message)


def mark_part(layer: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """A hook of `state_dict`: this rank's experts are parts, where other ranks have the rest."""
    collective: Any = layer.collective
    if not layer.spread:
        return
    for key in [k for k in state if k.startswith(prefix)]:
        value = state[key]
        if isinstance(value, Tensor) and not value.requires_grad:  # keep_vars=True asks for the graph
            message = (
                f"{key} is an expert of rank {collective.rank} of {collective.size}: this file would lose the experts "
                f"of the other ranks. {WAYS}"
            )
            state[key] = PartOfExperts.of(value, message)
