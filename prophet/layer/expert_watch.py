"""Has somebody treated the experts of different ranks as copies of one? The opposite of what ranks share.

An all-reduce of every gradient, a broadcast of every parameter and `ZeroRedundancyOptimizer` are right for a
data-parallel model. Here they overwrite the experts of all ranks but one, and the loss goes on looking well. So each
layer compares a sample of its home experts, position by position over the ranks of its group. Were they different, and
have they become equal? Has the optimizer used equal gradients for different experts? Experts that were equal when they
were made or loaded are left alone.

Digests travel with the layer's counts. A hook on all optimizers takes those of the gradients, whoever made them. It
also gives layers that nobody balances the watch on shared gradients that the engine has.

Shape legend: R ranks, W parameters that are watched, m experts of a rank, N numbers that a rank sends.
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

# steps from one comparison to the next; the first two steps are always compared
CHECK_EVERY = 50
# parameters of a layer's bank: a few are enough, as what treats experts as copies does it to all
_WATCHED = 4
# elements of each parameter, from all over it
_ELEMENTS = 256
# whose they are, whether a rank's experts are alike, and three digests of each
_NUMBERS = 2 + 3 * _WATCHED
# integers of a float's size: equal bits are compared, not equal values
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LEAVE_OUT = "Leave out what prophet.parallel.expert_parameters(model) lists"
_PLAIN_CLIP = "Call engine = prophet.attach(model, optimizer), and clip by engine.clip_grad_norm_(parameters, max_norm)"


class ExpertWatch:
    """What one layer knows of its experts, and of the gradients that optimizers use for them.

    Args:
        bank: The layer's home experts.
        initialised_here: Whether the layer drew the experts' values itself, one by one, so that they should differ.

    Attributes:
        every: Steps from one comparison to the next.
        plain: Whether nobody balances the layer.
    """

    def __init__(self, bank: Bank, *, initialised_here: bool) -> None:
        self.every, self.plain = CHECK_EVERY, True
        self._bank, self._initialised_here = bank, initialised_here
        self._begin()
        self.remember()

    def _begin(self) -> None:
        self._updates = self._at = 0
        self._looked, self._known, self._reporting = True, False, False
        self._used: Tensor | None = None
        self._used_of = 0
        # which parameters the last step looked at, and their mark
        self._seen: tuple[int, list[nn.Parameter]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # what refers to a step, an optimizer or a hook stays behind: a copied or loaded layer begins to watch anew
        return {n: vars(self)[n] for n in ("every", "plain", "_bank", "_initialised_here", "_made", "_made_of")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    # --- what is seen ---

    @property
    def device(self) -> torch.device:
        """The device where the experts are, and where ranks exchange tensors."""
        return self._bank.device

    @property
    def updates(self) -> int:
        """Steps of optimizers that hold the experts, so far."""
        return self._updates

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all of this rank's experts."""
        return list(self._bank.parameters())

    def _watched(self) -> tuple[int, list[nn.Parameter]]:
        """Return a mark of the watched parameters, and these: some from all over the bank, trained ones if any are."""
        every = self.parameters()
        params = [p for p in every if p.requires_grad] or every
        last = len(params) - 1
        # `_at` moves the sample on; parameters of one position are compared over ranks, so all must choose the same
        places = dict.fromkeys((self._at + i * last // (_WATCHED - 1)) % len(params) for i in range(_WATCHED))
        found = [params[i] for i in places]
        if any(p.is_meta or not p.is_floating_point() for p in found):
            return 0, []
        return mark_of([len(params), *((i, p.shape) for i, p in zip(places, found, strict=True))]), found

    @torch.no_grad()
    def remember(self) -> None:
        """Take the experts as they are now for right: they have been made, loaded or exchanged for others."""
        self._used = self._seen = None
        self._made_of, watched = self._watched()
        self._made = _digests(watched)

    def look(self) -> None:
        """Note what an optimizer is about to use; only the first optimizer since the last pass counts."""
        if self._looked:
            return
        self._looked = True
        if self._due:
            self._seen = self._used_of, watched = self._watched()
            with torch.no_grad():
                # a parameter without a gradient stands as zeros, which compare with nothing
                self._used = _digests([p.new_zeros(1) if p.grad is None else p.grad for p in watched])
        self._updates += 1

    @property
    def _due(self) -> bool:
        return self._updates < 2 or self._updates % self.every == 0

    # --- what is sent ---

    def report(self, device: torch.device, *, plain: bool) -> Tensor:
        """Return what this rank sends with a training pass's counts, [N].

        Args:
            device: Where the counts are exchanged.
            plain: Whether nobody balances the layer.

        Returns:
            A digest of the experts, or zeros where nothing is to be compared.
        """
        if not self._known or plain != self.plain:
            self.plain = plain
            _begin_to_watch(self)
        first, self._looked = self._updates == 0 and self._looked, False
        self._reporting = first or self._used is not None
        return self._digest_row(first).to(device, non_blocking=True) if self._reporting else nothing(_NUMBERS, device)

    @torch.no_grad()
    def _digest_row(self, first: bool) -> Tensor:
        """Return the mark, whether the experts are alike, and what they were, are and have used, [N]."""
        # digests of other parameters than these are dropped: positions would not correspond
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
        """Return whether this rank's first, middle and last expert are equal, as far as a sample shows it."""
        bank = self._bank
        some = [bank.flat_views(local, 0, bank.expert_numel) for local in (0, bank.experts // 2, bank.experts - 1)]
        # the largest part of each: small ones, as biases of zeros, may be equal in different experts
        found = _digests([max(views, key=Tensor.numel) for views in some])
        assert found is not None
        return (found == found[0]).all().long()

    # --- what is found ---

    def compare(self, table: IntArray, where: str) -> None:
        """Judge what all ranks have sent.

        Args:
            table: What `report` returned on every rank, [R, N].
            where: Layer and step, for messages.

        Raises:
            ExpertsMixed: Experts have become equal over ranks, or different ones have had equal gradients.
        """
        if not self._reporting or not comparable(table):
            return
        alike = table[:, 1]
        made, now, used = (table[:, 2 + i * _WATCHED : 2 + (i + 1) * _WATCHED] for i in range(3))
        for ranks in _equal(now):
            # experts that were equal from the start, or whose digest is zero, prove nothing
            before = made[ranks]
            if not ((before != before[0]) & (before != 0).all(axis=0) & (now[ranks[0]] != 0)).any():
                continue
            text = (
                f"{where}: the experts of rank(s) {ranks} have become equal bit for bit, and were different when they "
                f"were made, loaded or compared last"
            )
            if alike[ranks].all():
                # an engine compares experts of the first step by itself
                if self.plain:
                    warnings.warn(f"{text}; all of them are equal, so they may be copies on purpose", stacklevel=2)
                continue
            raise ExpertsMixed(
                f"{text}. Something takes them for copies of one, as a broadcast or an average of every parameter, "
                f"model.apply(init) and ZeroRedundancyOptimizer do. {_LEAVE_OUT}, and start again from before"
            )
        for ranks in _equal(used):
            # equal gradients of equal experts are no fault: copies on purpose have them
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

    def report_shared(self, device: torch.device) -> Tensor:
        """Return a digest of the shared gradients that the last optimizer step used, with the first counts after it."""
        _notice_wrapper(self)
        watch = _shared.get(self)
        return nothing(DIGEST_NUMBERS, device) if watch is None else watch.take(device)

    def compare_shared(self, table: IntArray) -> None:
        """Judge what all ranks have sent of shared gradients, as `GradientWatch.compare` does."""
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
    """Return an integer per tensor that stands for its bits: 0 for zeros and non-finite ones; None without tensors."""
    if not tensors:
        return None
    samples = [_sample(t) for t in tensors]
    if len({(s.numel(), s.dtype, s.device) for s in samples}) == 1:
        # one sum for all of them: on a device, each small kernel costs more than its work
        return _bits(torch.stack(samples))
    device = samples[-1].device
    return torch.cat([_bits(s.unsqueeze(0)).to(device) for s in samples])


def _sample(t: Tensor) -> Tensor:
    if t.is_sparse:
        return torch.zeros(1, device=t.device)
    flat = t.detach().reshape(-1)
    # a stride over the whole: what overwrites a part of a parameter is seen too
    return flat[:: max(1, flat.numel() // _ELEMENTS)][:_ELEMENTS]


def _bits(samples: Tensor) -> Tensor:
    """Return the sum of the bits of each of the samples [W, n], [W]."""
    if samples.is_floating_point():  # experts of several dtypes travel as bytes
        # adding zero takes the sign of a zero away, whose bits would not sum to zero; `nan_to_num` has made a copy
        samples = torch.nan_to_num(samples, nan=0.0, posinf=0.0, neginf=0.0).add_(0.0)
    return samples.view(_BITS[samples.element_size()]).sum(dim=1, dtype=torch.int64)


def _padded(digests: Tensor) -> Tensor:
    left = _WATCHED - digests.numel()
    return torch.cat([digests, nothing(left, digests.device)]) if left else digests


# --- optimizers, whoever made them ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class _Held:
    """What an optimizer holds of the layers that are watched.

    Attributes:
        version: State of `_layers` and number of the optimizer's parameters when this was found.
        layers: The layers of which it holds parameters.
        shared: What it holds beside the experts of layers that nobody balances.
    """

    version: tuple[int, int]
    layers: tuple[ref[ExpertWatch], ...]
    shared: GradientWatch | None


# ranks may be threads of one process
_lock = threading.Lock()
# all weak: a watch must not keep a model or an optimizer alive
_layers: WeakSet[ExpertWatch] = WeakSet()
# counts changes of `_layers` and `_wrappers`, so that a step sees at once whether what it found still holds
_changes = 0
_wrappers: WeakKeyDictionary[ExpertWatch, ref[nn.Module]] = WeakKeyDictionary()
_shared: WeakKeyDictionary[ExpertWatch, GradientWatch] = WeakKeyDictionary()
_held: WeakKeyDictionary[torch.optim.Optimizer, _Held] = WeakKeyDictionary()
_hooked: list[Any] = []


def _begin_to_watch(layer: ExpertWatch) -> None:
    """Watch a layer that trains on several ranks from now on, or is balanced, or not any more."""
    global _changes  # noqa: PLW0603
    with _lock:
        layer._known = True
        _layers.add(layer)
        _changes += 1
        if not _hooked:
            _hooked.append(register_optimizer_step_pre_hook(_before_any_step))


def _notice_wrapper(layer: ExpertWatch) -> None:
    """Remember the DistributedDataParallel in whose pass a layer runs: it knows names, and what is left alone."""
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
    # only the first optimizer since the last pass counts, as ZeroRedundancyOptimizer has another one inside
    if not any((watch := _shared.get(layer)) is not None and watch.pending for layer in plain):
        if not held.shared.look(max(layer._updates for layer in plain) - 1):
            # parameters were cut, frozen or moved: the next step finds what there is
            _held.pop(optimizer, None)
        for layer in plain:
            _shared[layer] = held.shared


def _find(optimizer: torch.optim.Optimizer, version: tuple[int, int]) -> _Held:
    """Return which layers the optimizer holds a part of, be it of their experts or of the model around them."""
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    layers: list[ExpertWatch] = []
    model: Any = None
    for layer in _layers:
        wrapper = _wrappers.get(layer)
        around = wrapper() if wrapper is not None else None
        # with a wrapper known, an optimizer that holds only other parameters of the model concerns the layer too
        own = layer.parameters() if around is None or not layer.plain else around.parameters()
        if any(id(p) in ids for p in own):
            layers.append(layer)
            if layer.plain and around is not None:
                model = around.module
    shared = GradientWatch(model, optimizer, _PLAIN_CLIP) if any(layer.plain for layer in layers) else None
    return _Held(version, tuple(map(ref, layers)), shared)
