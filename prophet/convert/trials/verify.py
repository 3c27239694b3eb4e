"""A block on a few tokens, before and after its conversion.

Shape legend: N tokens, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prophet.convert.trials.module_copies import ROUNDED, Rounding
from prophet.convert.trials.replay import Buffers
from prophet.errors import CollectiveError, PlanMismatch
from prophet.experts.hooks import without_hooks
from prophet.ranks.collective import Collective
from prophet.trials import RandomState, evaluating, seed_all

# Tokens of a trial, which runs the block in its full size
TOKENS = 16
# of the largest output: what a re-ordered sum may differ by, products included
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


class Trial:
    """Remembers what a block answers to random tokens; `problem()` asks again.

    Args:
        run: Runs the block.
        shape: Of its input.
        block: What is converted.
        model: What the block is part of.
        like: A parameter of its experts, whose device and dtype the input has.
        collective: The expert-parallel group.
    """

    def __init__(
        self,
        run: Callable[[Tensor], Any],
        shape: Sequence[int],
        block: nn.Module,
        model: nn.Module,
        like: Tensor,
        collective: Collective,
    ) -> None:
        self._run, self._block, self._model = run, block, model
        # Different tokens on every rank, as in training
        generator = torch.Generator().manual_seed(collective.rank)
        self._x = torch.randn(*shape, generator=generator).to(like.device, like.dtype)
        with Rounding() as rounding:
            self._before = self._answer()
        self._rounded = rounding.happens

    def _answer(self) -> list[Any]:
        block = self._block
        # Some blocks count, or follow the load, in evaluation, too
        buffers, random = Buffers(block.modules()), RandomState(self._x.device)
        # Not by `trying`, which lets one thread in: ranks that are threads of a test run the block together
        try:
            with torch.no_grad(), evaluating(self._model), without_hooks(self._model):
                seed_all(0)
                found = self._run(self._x.clone())
        finally:
            random.put_back()
        buffers.put_back()
        return list(found) if isinstance(found, tuple) else [found]

    def problem(self) -> str | None:
        """What differs from before, or None; raises what goes wrong between the ranks. Collective once converted."""
        try:
            after = self._answer()
        except (CollectiveError, PlanMismatch):
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError, MemoryError) as error:
            return f"the converted block fails: {error}"
        if len(after) != len(self._before):
            return f"the block returned {len(self._before)} values and returns {len(after)} now"
        for at, (old, new) in enumerate(zip(self._before, after, strict=True)):
            if not isinstance(old, Tensor):
                continue
            if not isinstance(new, Tensor) or old.shape != new.shape or old.dtype != new.dtype:
                return f"value {at} of the block's answer was {_text(old)} and is {_text(new)} now"
            # Some blocks compute in float32 inside, whatever their input is
            tolerance = ROUNDED if self._rounded and old.dtype == torch.float64 else TOLERANCE.get(old.dtype, 0.0)
            limit = tolerance * max(float(old.abs().max()), 1e-30) if old.numel() else 0.0
            gap = float((old.double() - new.double()).abs().max()) if old.numel() else 0.0
            # Written so that a gap of NaN is a difference
            if not gap <= limit:
                return f"value {at} of the block's answer differs by {gap:.3g}, more than a re-ordered sum may"
        return None


def _text(x: object) -> str:
    return f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
