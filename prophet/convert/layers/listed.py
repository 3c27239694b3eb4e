"""The layer in the place of a list of experts that nobody announced.

Shape legend: N noted rows, E experts, D model dim, O output dim of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prophet.convert.layers.modules import RoutedModules
from prophet.convert.layers.routed import Origin
from prophet.convert.trials.discover import Listing
from prophet.convert.trials.replay import Note, Passes, Tape, with_stand_ins
from prophet.experts.modules import ModulesBank
from prophet.kernels.choice import Impl
from prophet.ranks.collective import Collective


class ListedExperts(RoutedModules):
    """Stands where a list of experts was; to all other code it is that list.

    While its block runs it is a list of stand-ins, which note their rows in the first pass and hand out answers in the
    second.

    Args:
        bank: This rank's experts.
        origin: The list that they come from, and how it was found.
        collective: The expert-parallel group.
        impl: Which kernels run the experts, as for `prophet.MoE`.
    """

    def __init__(self, bank: ModulesBank, origin: Origin, collective: Collective, impl: Impl = "auto") -> None:
        super().__init__(bank, origin, collective, impl)
        adapter: Any = origin.adapter
        listing: Listing = adapter.listing
        tape = Tape(listing.name, listing.dim)
        skeleton: Any = origin.skeleton
        # past nn.Module: stand-ins are no part of the model
        self.__dict__.update(_tape=tape, _out=listing.out, _stand_ins=with_stand_ins(skeleton, tape))

    def listed(self) -> nn.ModuleList:
        if self._tape.runs:
            return self._stand_ins  # type: ignore[no-any-return]
        return super().listed()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_stand_ins" not in self.__dict__:
                raise
            # A list of the user's own class may have attributes that its block reads.
            return getattr(self.__dict__["_stand_ins"], name)

    def forward(self, *args: Any, **named: Any) -> Any:
        """Run the list's own forward, where its class has one."""
        # Called only while the block runs, so the experts that it calls are stand-ins.
        return self._stand_ins(*args, **named)

    # Counts decide shapes, which would make dynamo compile anew for every batch.
    @torch._compile._disable_dynamo
    def run_block(
        self, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Any:
        """Run the block twice, its experts computed together in between. Collective over the group.

        Args:
            block: The block around the list.
            forward: Its original forward, bound to it.
            args: Positional arguments of the call.
            named: Keyword arguments of the call.

        Returns:
            What `forward(*args, **named)` returns.
        """
        # Experts' buffers must not be put back between the passes: experts run once, in between.
        mine = set(self.modules())
        passes = Passes(
            tape=self._tape,
            modules=[m for m in block.modules() if m not in mine],
            blank=self._blank,
            answer=self._answers,
        )
        return passes.run(forward, args, named)

    def _answer_dtype(self, rows: Tensor) -> torch.dtype:
        """The dtype of an expert's answer to `rows`, which autocast may change."""
        return self.experts.answer_dtype(rows)

    def _blank(self, rows: Tensor) -> Tensor:
        return rows.new_zeros((*rows.shape[:-1], self._out), dtype=self._answer_dtype(rows))

    def _answers(self, notes: Sequence[Note], like: Tensor | None) -> list[Tensor]:
        """All experts' answers to all notes: one dispatch, also where this rank has no rows."""
        device = self.experts.device if like is None else like.device
        if notes:
            rows = torch.cat([note.rows.reshape(-1, self.dim) for note in notes])
        else:
            dtype = self.experts.dtype if like is None or not like.is_floating_point() else like.dtype
            rows = torch.zeros(0, self.dim, dtype=dtype, device=device)
        sizes = [note.rows.numel() // self.dim for note in notes]
        ids = torch.tensor([note.expert for note in notes], dtype=torch.int64)
        ids = ids.repeat_interleave(torch.tensor(sizes, dtype=torch.int64)).to(device, non_blocking=True)
        # An expert that the block called with no rows gets zero gradients, as it would have by itself.
        self.experts.called = {note.expert for note in notes}
        y = self.routed(rows, ids.unsqueeze(1), rows.new_ones(len(rows), 1)).to(self._answer_dtype(rows))
        # Some blocks write to answers, which views of one tensor would not allow.
        parts = torch.unsafe_split_with_sizes(y, sizes)
        return [part.view(*note.rows.shape[:-1], self._out) for part, note in zip(parts, notes, strict=True)]
