"""What a block's router chose, counted by hooks while the block runs as it is: by pass, on the block's device.

Shape legend: P passes between two copies from the device, E experts, N tokens, K top-k, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from prophet.kernels.route import tally
from prophet.spec import IntArray


class Hook:
    """A hook that does nothing in a copy of its module: copies are not recorded."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    # Counting changes this process's state, which a traced graph would do once only.
    @torch._compile._disable_dynamo
    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


def tokens_in(values: object) -> int:
    """Tokens of the first tensor among a module's arguments: rows [..., D] of numbers, or ids of any shape."""
    x = next((x for x in tree_leaves(values) if isinstance(x, Tensor)), None)
    if x is None or not x.ndim:
        return 0
    # Ids have no last dimension of features
    return x.shape[:-1].numel() if x.is_floating_point() else x.numel()


@dataclass(slots=True)
class Pass:
    """The forward pass that is under way.

    Attributes:
        running: Whether one is.
        row: Its place among the P.
        tokens: The most that one block was given in it.
    """

    running: bool = False
    row: int = 0
    tokens: int = 0


class Seen:
    """The choices of one block, by pass.

    Adapters feed it in `watch`; outside of a pass of the model all of it is ignored.

    Attributes:
        name: Of the block.
        experts: E.
        calls: How often it was seen to choose, in whole passes.
        most_per_token: The most experts that a token had.
        hooks: Those that feed it, to be removed at the end.

    Args:
        name: Of the block.
        experts: E.
        passes: P.
        now: The pass under way, which all blocks share.
    """

    def __init__(self, name: str, experts: int, passes: int, now: Pass) -> None:
        self.name, self.experts, self.calls = name, experts, 0
        self.most_per_token = 0
        self._now = now
        self._here: IntArray = np.zeros((passes, experts), dtype=np.int64)
        self._there: Tensor | None = None
        # Of the pass that is under way; they count only once it is whole
        self._calls = self._rows = self._tokens = 0
        self.hooks: list[RemovableHandle] = []

    # --- what adapters call ---

    def ids(self, ids: Tensor, tokens: int) -> None:
        """Count the experts of `tokens` tokens, integers of any shape; a number of no expert is a dropped choice."""
        if self._now.running:
            flat = ids.detach().reshape(-1).long()
            there = (flat >= 0) & (flat < self.experts)
            self.most_per_token = max(self.most_per_token, flat.numel() // max(tokens, 1))
            # Everything else goes into one bin more, E, which is cut off: no mask, and no wait for the device.
            self.counts(tally(torch.where(there, flat, self.experts), self.experts + 1)[:-1], tokens)

    def counts(self, counts: Tensor, tokens: int) -> None:
        """Add how many of `tokens` tokens' choices were of each expert, [E] integers."""
        if self._now.running:
            self._on(counts.device)[self._now.row] += counts.detach()
            self._count_call(tokens)

    def rows(self, expert: int, rows: int) -> None:
        """Note that one expert was called with so many rows."""
        if self._now.running:
            self._here[self._now.row, expert] += rows
            self._rows += rows
            self._calls += 1

    def given(self, tokens: int) -> None:
        """Note that the block was called with so many tokens, whose choices `rows` counts."""
        if self._now.running:
            self._tokens += tokens
            self._now.tokens = max(self._now.tokens, tokens)

    def before(self, module: nn.Module, call: Callable[[nn.Module, Sequence[Any]], None]) -> None:
        """Have `call(module, values)` called before `module` runs; `values` are its arguments in order."""
        hook = Hook(lambda m, args, named: call(m, (*args, *named.values())))
        self.hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after(self, module: nn.Module, call: Callable[[nn.Module, Sequence[Any], Any], None]) -> None:
        """Have `call(module, values, answer)` called after `module` has run; `values` are its arguments in order."""
        hook = Hook(lambda m, args, named, answer: call(m, (*args, *named.values()), answer))
        self.hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    # --- what a recording calls ---

    def end(self) -> None:
        """End the pass under way: it is whole."""
        if self._tokens:
            # Rounded up, as a capacity may have dropped some choices
            self.most_per_token = max(self.most_per_token, -(-self._rows // self._tokens))
        self.calls += self._calls
        self._calls = self._rows = self._tokens = 0

    def forget(self) -> None:
        """Drop the pass under way, which has failed."""
        self._here[self._now.row] = 0
        if self._there is not None:
            self._there[self._now.row] = 0
        self._calls = self._rows = self._tokens = 0

    def take(self) -> IntArray:
        """Return the counts [P, E] and begin again at zero; waits for the device."""
        found = self._here.copy()
        if self._there is not None:
            found += self._there.cpu().numpy()
            self._there.zero_()
        self._here[:] = 0
        return found

    def _count_call(self, tokens: int) -> None:
        self._calls += 1
        self._now.tokens = max(self._now.tokens, tokens)

    def _on(self, device: torch.device) -> Tensor:
        """The counts on the block's device, which may change between passes."""
        if self._there is None or self._there.device != device:
            # Counts on the old device are kept on the host
            if self._there is not None:
                self._here += self._there.cpu().numpy()
            # A tensor made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                self._there = torch.zeros(self._here.shape, dtype=torch.int64, device=device)
        return self._there
