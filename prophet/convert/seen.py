"""What a block's router chose, counted by hooks while the block runs as it is: by pass, on the block's device.

Shape legend: P passes between two looks at the device, E experts, N tokens, K top-k, D model dim.
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
    """A hook that a copy of its module does not have: there it does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

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
    return x.shape[:-1].numel() if x.is_floating_point() else x.numel()


@dataclass(slots=True)
class Pass:
    """The forward pass that is under way. row: its place among the P; tokens: the most that one block was given."""

    running: bool = False
    row: int = 0
    tokens: int = 0


class Seen:
    """The choices of one block, by pass. calls: how often it was seen to choose, in whole passes.

    Adapters feed it in `watch`; outside of a pass of the model all of it is ignored.
    """

    def __init__(self, name: str, experts: int, passes: int, now: Pass) -> None:
        self.name, self.experts, self.calls = name, experts, 0
        self.most_per_token = 0  # experts that a token had
        self._now = now
        self._here: IntArray = np.zeros((passes, experts), dtype=np.int64)
        self._there: Tensor | None = None
        self._calls = self._rows = self._tokens = 0  # of the pass that is under way
        self.hooks: list[RemovableHandle] = []

    # --- what adapters call ---

    def ids(self, ids: Tensor, tokens: int) -> None:
        """The experts of `tokens` tokens, integers of any shape; what is no expert's number was dropped."""
        if self._now.running:
            flat = ids.detach().reshape(-1).long()
            there = (flat >= 0) & (flat < self.experts)
            self.most_per_token = max(self.most_per_token, flat.numel() // max(tokens, 1))
            self.counts(tally(torch.where(there, flat, self.experts), self.experts + 1)[:-1], tokens)

    def counts(self, counts: Tensor, tokens: int) -> None:
        """How many of `tokens` tokens' choices were of each expert, [E] integers."""
        if self._now.running:
            self._on(counts.device)[self._now.row] += counts.detach()
            self._told(tokens)

    def rows(self, expert: int, rows: int) -> None:
        """One expert was given so many rows."""
        if self._now.running:
            self._here[self._now.row, expert] += rows
            self._rows += rows
            self._calls += 1

    def given(self, tokens: int) -> None:
        """The block was given so many tokens, whose choices `rows` counts."""
        if self._now.running:
            self._tokens += tokens
            self._now.tokens = max(self._now.tokens, tokens)

    def before(self, module: nn.Module, call: Callable[[nn.Module, Sequence[Any]], None]) -> None:
        """Have `call(module, values)` called before `module` runs; values: of its arguments, in order."""
        hook = Hook(lambda m, args, named: call(m, (*args, *named.values())))
        self.hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after(self, module: nn.Module, call: Callable[[nn.Module, Sequence[Any], Any], None]) -> None:
        """Have `call(module, values, answer)` called after `module` has run."""
        hook = Hook(lambda m, args, named, answer: call(m, (*args, *named.values()), answer))
        self.hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    # --- what a recording calls ---

    def end(self) -> None:
        """The pass under way is whole."""
        if self._tokens:
            self.most_per_token = max(self.most_per_token, -(-self._rows // self._tokens))
        self.calls += self._calls
        self._calls = self._rows = self._tokens = 0

    def forget(self) -> None:
        """The pass under way has failed."""
        self._here[self._now.row] = 0
        if self._there is not None:
            self._there[self._now.row] = 0
        self._calls = self._rows = self._tokens = 0

    def take(self) -> IntArray:
        """The counts [P, E], which begin again at zero; waits for the device."""
        found = self._here.copy()
        if self._there is not None:
            found += self._there.cpu().numpy()
            self._there.zero_()
        self._here[:] = 0
        return found

    def _told(self, tokens: int) -> None:
        self._calls += 1
        self._now.tokens = max(self._now.tokens, tokens)

    def _on(self, device: torch.device) -> Tensor:
        """The counts on the block's device, which may change between passes."""
        if self._there is None or self._there.device != device:
            if self._there is not None:
                self._here += self._there.cpu().numpy()
            with torch.inference_mode(False):  # what is made inside cannot be written to outside
                self._there = torch.zeros(self._here.shape, dtype=torch.int64, device=device)
        return self._there
