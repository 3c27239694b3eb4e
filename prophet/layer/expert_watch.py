"""Has somebody treated the experts of different ranks as copies of one? The opposite of what ranks share.

An all-reduce of every gradient, a broadcast of every parameter and `ZeroRedundancyOptimizer` are right for a
data-parallel model. They overwrite the experts of all ranks but one, and the loss goes on looking well. So each layer
compares a sample of its home experts, position by position over the ranks of its group: were they different, and have
they become equal? Has the optimizer used equal gradients for different experts? Experts that were equal when they were
made or loaded are left alone.

Digests travel with the layer's counts. A hook on all optimizers takes those of the gradients, whoever made them. It
also gives layers that nobody balances the watch on shared gradients that the engine has.

Shape legend: R ranks, W parameters that are watched, m experts of a rank.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prophet.errors import ExpertsMixed
from prophet.experts.bank import Bank
from prophet.layer.gradient_watch import DIGEST_NUMBERS, GradientWatch, comparable, mark_of, nothing
from prophet.spec import IntArray

CHECK_EVERY = 50  # steps from one comparison to the next; the first two steps are always compared
_WATCHED = 4  # parameters of a layer's bank; what treats experts as copies does it to all
_ELEMENTS = 256  # of each, from all over it
_NUMBERS = 2 + 3 * _WATCHED  # whose they are, whether a rank's experts are alike, and three digests of each
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LEAVE_OUT = "Leave out what prophet.parallel.expert_parameters(model) lists"
_PLAIN_CLIP = "Call engine = prophet.attach(model, optimizer), and clip by engine.clip_grad_norm_(parameters, max_norm)"


class ExpertWatch:
    """What one layer knows of its experts, and of the gradients that optimizers use for them.

    every: steps from one comparison to the next. plain: whether nobody balances the layer. made: digests of the experts
    as they were when they were made, loaded, or compared last.
    """

    def __init__(self, bank: Bank, *, initialised_here: bool) -> None:
        self.every, self.plain = CHECK_EVERY, True
        self._bank, self._initialised_here = bank, initialised_here
        self._begin()
        self.remember()

    def _begin(self) -> None:
        self._updates = self._at = 0
        self._looked, self._known, self._saying = True, False, False
        self._used: Tensor | None = None
        self._used_of = 0
        self._seen: tuple[int, list[nn.Parameter]] | None = None  # what the last step looked at

    def __getstate__(self) -> dict[str, Any]:
        return {n: vars(self)[n] for n in ("every", "plain", "_bank", "_initialised_here", "_made", "_made_of")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    # --- what is seen ---

    @property
    def device(self) -> torch.device:
        """Where the experts are, and ranks exchange tensors."""
        return self._bank.device

    @property
    def updates(self) -> int:
        """Steps of optimizers that hold the experts, so far."""
        return self._updates

    def parameters(self) -> list[nn.Parameter]:
        """All of this rank's experts."""
        return list(self._bank.parameters())

    def _watched(self) -> tuple[int, list[nn.Parameter]]:
        """Parameters from all over the bank, those that train if any does, and a mark of which they are."""
        every = self.parameters()
        params = [p for p in every if p.requires_grad] or every
        last = len(params) - 1
        places = dict.fromkeys((self._at + i * last // (_WATCHED - 1)) % len(params) for i in range(_WATCHED))
        found = [params[i] for i in places]
        if any(p.is_meta or not p.is_floating_point() for p in found):
            return 0, []
        return mark_of([len(params), *((i, p.shape) for i, p in zip(places, found, strict=True))]), found

    @torch.no_grad()
    def remember(self) -> None:
        """The experts are right as they are now: they have been made, loaded or exchanged for others."""
        self._used = self._seen = None
        self._made_of, watched = self._watched()
        self._made = _digests(watched)

    def look(self) -> None:
        """An optimizer is about to use the gradients; only the first to do so since the last pass is heard."""
        if self._looked:
            return
        self._looked = True
        if self._due:
            self._seen = self._used_of, watched = self._watched()
            with torch.no_grad():
                self._used = _digests([p.new_zeros(1) if p.grad is None else p.grad for p in watched])
        self._updates += 1

    @property
    def _due(self) -> bool:
        return self._updates < 2 or self._updates % self.every == 0

    # --- what is said ---

    def say(self, device: torch.device, *, plain: bool) -> Tensor:
        """With a training pass's counts, [N] on `device`; zeros where nothing is to be compared.

        plain: whether nobody balances the layer.
        """
        if not self._known or plain != self.plain:
            self.plain = plain
            _begin_to_watch(self)
        first, self._looked = self._updates == 0 and self._looked, False
        self._saying = first or self._used is not None
        return self._said(first).to(device, non_blocking=True) if self._saying else nothing(_NUMBERS, device)

    @torch.no_grad()
    def _said(self, first: bool) -> Tensor:
        """The mark, whether the experts are alike, and what they were, are and have used; [N]."""
        mark, watched = self._seen or self._watched()
        used, self._used, self._seen = self._used if self._used_of == mark else None, None, None
        now = _digests(watched)
        made, self._made, self._made_of = self._made if self._made_of == mark else None, now, mark
        if now is None:
            return nothing(_NUMBERS, self.device)
        head = now.new_zeros(2)
        head[0] = mark
        if first and self._initialised_here:
            head[1] = self._alike()
        no = nothing(_WATCHED, now.device)
        parts = [no if part is None else _padded(part.to(now.device)) for part in (made, now, used)]
        return torch.cat([head, *parts])

    def _alike(self) -> Tensor:
        """Whether this rank's first, middle and last expert are equal, as far as a sample of each shows it."""
        bank = self._bank
        some = [bank.flat_views(local, 0, bank.expert_numel) for local in (0, bank.experts // 2, bank.experts - 1)]
        found = _digests([max(views, key=Tensor.numel) for views in some])
        assert found is not None
        return (found == found[0]).all().long()

    # --- what is found ---

    def compare(self, table: IntArray, where: str) -> None:
        """Judge what all ranks said, [R, N]; where: layer and step, for messages.

        Raises `ExpertsMixed` where experts have become equal over ranks, or different ones have had equal gradients.
        """
        if not self._saying or not comparable(table):
            return
        alike = table[:, 1]
        made, now, used = (table[:, 2 + i * _WATCHED : 2 + (i + 1) * _WATCHED] for i in range(3))
        for ranks in _equal(now):
            before = made[ranks]
            if not ((before != before[0]) & (before != 0).all(axis=0) & (now[ranks[0]] != 0)).any():
                continue  # equal from the start
            text = (
                f"{where}: the experts of rank(s) {ranks} have become equal bit for bit, and were different when they "
                f"were made, loaded or compared last"
            )
            if alike[ranks].all():
                if self.plain:  # an engine compares experts of the first step by itself
                    warnings.warn(f"{text}; all of them are equal, so they may be copies on purpose", stacklevel=2)
                continue
            raise ExpertsMixed(
                f"{text}. Something takes them for copies of one, as a broadcast or an average of every parameter, "
                f"model.apply(init) and ZeroRedundancyOptimizer do. {_LEAVE_OUT}, and start again from before"
            )
        for ranks in _equal(used):
            if (now[ranks] != now[ranks[0]]).any():
                raise ExpertsMixed(
                    f"{where}: the last optimizer step has used the same gradients for different experts, those of "
                    f"rank(s) {ranks}. Something averages them over ranks, as `dist.all_reduce(p.grad)` for every "
                    f"parameter does: they are averages already when backward() returns. {_LEAVE_OUT}, and start again "
                    f"from the last checkpoint before"
                )
        if self._updates and not used.any():
            self._at += 1  # experts without rows make room for others
            self.remember()

    # --- layers that nobody balances: what ranks share ---

    def say_shared(self, device: torch.device) -> Tensor:
        """A digest of the shared gradients that the last optimizer step used, with the first counts after it."""
        _notice_wrapper(self)
        watch = _shared.get(self)
        return nothing(DIGEST_NUMBERS, device) if watch is None else watch.take(device)

    def compare_shared(self, table: IntArray) -> None:
        """Judge what all ranks said of shared gradients, as `GradientWatch.compare` does."""
        watch = _shared.get(self)
        if watch is not None:
            watch.compare(table)


def _equal(digests: IntArray) -> list[list[int]]:
    """Groups of ranks, two at least, whose digests [R, W] are equal and not all zero."""
    groups: dict[bytes, list[int]] = {}
    for rank, row in enumerate(digests):
        if row.any():
            groups.setdefault(row.tobytes(), []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


def _digests(tensors: Sequence[Tensor]) -> Tensor | None:
    """Of each tensor an integer that says its bits, zero for zeros and what is not finite; None without tensors."""
    if not tensors:
        return None
    samples = [_sample(t) for t in tensors]
    if len({(s.numel(), s.dtype, s.device) for s in samples}) == 1:
        return _bits(torch.stack(samples))
    device = samples[-1].device
    return torch.cat([_bits(s.unsqueeze(0)).to(device) for s in samples])


def _sample(t: Tensor) -> Tensor:
    if t.is_sparse:
        return torch.zeros(1, device=t.device)
    flat = t.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _ELEMENTS)][:_ELEMENTS]


def _bits(samples: Tensor) -> Tensor:
    """Of samples [W, n], [W]."""
    if samples.is_floating_point():  # experts of several dtypes travel as bytes
        # a copy, in which a zero has no sign
        samples = torch.nan_to_num(samples, nan=0.0, posinf=0.0, neginf=0.0).add_(0.0)
    return samples.view(_BITS[samples.element_size()]).sum(dim=1, dtype=torch.int64)


def _padded(digests: Tensor) -> Tensor:
    left = _WATCHED - digests.numel()
    return torch.cat([digests, nothing(left, digests.device)]) if left else digests


# --- optimizers, whoever made them ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class _Held:
    """What an optimizer holds of the layers that are watched.

    version: of `_layers` and of the optimizer's number of parameters. shared: what it holds beside the experts of
    layers that nobody balances.
    """

    version: tuple[int, int]
    layers: tuple[ref[ExpertWatch], ...]
    shared: GradientWatch | None


_lock = threading.Lock()  # ranks may be threads
_layers: WeakSet[ExpertWatch] = WeakSet()
_changes = 0  # of `_layers` and `_wrappers`
_wrappers: WeakKeyDictionary[ExpertWatch, ref[nn.Module]] = WeakKeyDictionary()
_shared: WeakKeyDictionary[ExpertWatch, GradientWatch] = WeakKeyDictionary()
_held: WeakKeyDictionary[torch.optim.Optimizer, _Held] = WeakKeyDictionary()
_hooked: list[Any] = []


def _begin_to_watch(layer: ExpertWatch) -> None:
    """The layer trains on several ranks from now on, or is balanced, or not any more."""
    global _changes  # noqa: PLW0603
    with _lock:
        layer._known = True
        _layers.add(layer)
        _changes += 1
        if not _hooked:
            _hooked.append(register_optimizer_step_pre_hook(_before_any_step))


def _notice_wrapper(layer: ExpertWatch) -> None:
    """The DistributedDataParallel inside whose pass a layer runs knows names, and what is left alone."""
    global _changes  # noqa: PLW0603
    wrapper = DistributedDataParallel._get_active_ddp_module()
    known = _wrappers.get(layer)
    if wrapper is not None and (known is None or known() is not wrapper):
        with _lock:
            _wrappers[layer] = ref(wrapper)
            _changes += 1


@torch._compile._disable_dynamo
def _before_any_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if not _layers:
        return
    version = _changes, sum(len(group["params"]) for group in optimizer.param_groups)
    held = _held.get(optimizer)
    if held is None or held.version != version:
        with _lock:
            held = _held[optimizer] = _find(optimizer, version)
    layers = [layer for found in held.layers if (layer := found()) is not None]
    for layer in layers:
        layer.look()
    plain = [layer for layer in layers if layer.plain]
    if held.shared is None or not plain:
        return
    # the first optimizer since the last pass is heard, as ZeroRedundancyOptimizer has one of its own inside
    if not any((watch := _shared.get(layer)) is not None and watch.pending for layer in plain):
        if not held.shared.look(max(layer._updates for layer in plain) - 1):
            _held.pop(optimizer, None)  # the next step finds what there is
        for layer in plain:
            _shared[layer] = held.shared


def _find(optimizer: torch.optim.Optimizer, version: tuple[int, int]) -> _Held:
    """Which layers the optimizer holds a part of, be it of their experts or of the model around them."""
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    layers: list[ExpertWatch] = []
    model: Any = None
    for layer in _layers:
        wrapper = _wrappers.get(layer)
        around = wrapper() if wrapper is not None else None
        own = layer.parameters() if around is None or not layer.plain else around.parameters()
        if any(id(p) in ids for p in own):
            layers.append(layer)
            if layer.plain and around is not None:
                model = around.module
    shared = GradientWatch(model, optimizer, _PLAIN_CLIP) if any(layer.plain for layer in layers) else None
    return _Held(version, tuple(map(ref, layers)), shared)
