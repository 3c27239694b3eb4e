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

ADVICE = (
    "On every rank call prophet.checkpoint.save(folder, model, optimizer), to resume, or model.save_pretrained(folder) "
    "of a transformers model. Or let one rank write what prophet.convert.original_state_dict(model) returns, which "
    "every rank calls"
)


class PartOfExperts(Tensor):
    """One expert's parameter on its home rank, while other ranks hold other experts.

    It computes as every tensor does, and what comes out is a plain tensor. `torch.save`, `pickle` and safetensors raise
    `PartialStateError`; torch's distributed checkpoints, `load_state_dict` and copies work. For one file per rank,
    `detach()` returns a plain tensor.
    """

    # Without this, results of operations would be of this class, and refuse to be saved as well.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    message: str

    @classmethod
    def of(cls, value: Tensor, message: str) -> Self:
        """View `value` as a part, whose refusal says `message`."""
        part = value.as_subclass(cls)
        part.message = message
        return part

    def _refuse(self, *_: Any) -> NoReturn:
        raise PartialStateError(self.message)

    # pickle and `torch.save` both ask for this first.
    __reduce_ex__ = _refuse

    def untyped_storage(self) -> torch.UntypedStorage:
        """What safetensors, accelerate and transformers ask for before they write one rank's file.

        `async_save` of torch's distributed checkpoints asks for it, too, to copy it: there every rank writes its own.
        """
        # Both callers use the same public method, so only the calling module tells them apart.
        if sys._getframe(1).f_globals["__name__"].startswith("torch.distributed.checkpoint."):
            return super().untyped_storage()
        return self._refuse()

    # Tensor's own asks for the storage, which refuses.
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self).of(self.detach().clone(), self.message)


def mark_part(layer: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """Hook of `state_dict`: mark this rank's experts as parts, where other ranks have the rest.

    Args:
        layer: The converted layer that the hook is registered on.
        state: The state dict so far; changed in place.
        prefix: Of the layer's keys.
        local_metadata: torch passes it; it is not used.
    """
    collective: Any = layer.collective
    if not layer.spread:
        return
    for key in [k for k in state if k.startswith(prefix)]:
        value = state[key]
        # keep_vars=True asks for the parameters themselves, which must keep their graph.
        if isinstance(value, Tensor) and not value.requires_grad:
            message = (
                f"{key} is an expert of rank {collective.rank} of {collective.size}: this file would lose the experts "
                f"of the other ranks. {ADVICE}"
            )
            state[key] = PartOfExperts.of(value, message)
