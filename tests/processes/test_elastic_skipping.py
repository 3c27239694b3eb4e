"""Replicas that leave out different modules train as one process does, also where FSDP2 cuts the model (zero 2 and 3).

What one process does is written out here: autograd adds up the microbatches, and a parameter that no microbatch uses
has no gradient. All weights have one size, as experts do: where ranks mix them up, nothing fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline_balance import elastic
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from tests.helpers.launch import run_gloo
from tests.helpers.own_loops import gathered
from tests.helpers.sliced_models import batch_of, own_loss
from tests.helpers.transformers_models import small

DIM, EXPERTS, MICROBATCHES, STEPS, CODES = 3, 3, 4, 8, 72
Batch = tuple[Tensor, Tensor]
State = dict[str, Tensor]


class _Coded(nn.Module):
    """An embedding that hands its ids on in front: later layers choose by the first row's."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CODES, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([ids[:, None].double(), self.words(ids)], 1)


def _residual(x: Tensor, inner: nn.Module) -> Tensor:
    return x + F.pad(inner(x[:, 1:].tanh()), (1, 0))


class _Chosen(nn.Module):
    """The expert that the first row names, computed again in the backward if asked."""

    def __init__(self, place: int, recompute: bool) -> None:
        super().__init__()
        self.place, self.recompute = place, recompute
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        expert = self.experts[int(x[0, 0]) // self.place % EXPERTS]
        if not self.recompute:
            return _residual(x, expert)
        found: Tensor = checkpoint(_residual, x, expert, use_reentrant=False)
        return found


class _Dropped(nn.Module):
    """A layer that is left out where the first row says so."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.inner = place, nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x if int(x[0, 0]) // self.place % 2 else _residual(x, self.inner)


class _Head(nn.Module):
    """Where the first row says so, no gradient comes back: this loss trains nothing."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.inner = place, nn.Linear(DIM, DIM + 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x[:, 1:])
        return out.detach() if int(x[0, 0]) // self.place % 2 else out


def _build(frozen: tuple[int, ...] = (), recompute: bool = False) -> nn.Sequential:
    """Two layers that may be left out, one before and one behind two layers of experts; 72 codes choose among all."""
    torch.manual_seed(0)
    layers = (_Coded(), _Dropped(1), _Chosen(2, recompute), _Chosen(6, recompute), _Dropped(18), _Head(36))
    made = nn.Sequential(*layers).double()
    for layer in frozen:
        made[layer].requires_grad_(False)
    return made


def _batch(step: int) -> Batch:
    """Of two rows per microbatch, which need not agree: the first one chooses."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(CODES, (2 * MICROBATCHES,), generator=generator)
    # in some steps all microbatches leave out the same: nobody has a gradient, and nothing may move
    if step % 3 == 1:
        ids = ids // 6 * 6 + ids[0] % 6
    if step % 4 == 2:
        # the loss of the first replica trains nothing
        ids[: 2 * MICROBATCHES // 2] = ids[: 2 * MICROBATCHES // 2] % 36 + 36
    return ids, ids % DIM


def _momentum(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.3, momentum=0.9, weight_decay=0.1)


def _adam(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.03, weight_decay=0.1)


Make = Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def _before(model: nn.Module, step: int, thaws: bool) -> None:
    """Freezes an expert for two steps."""
    if thaws and step in (3, 5):
        model.get_submodule("2.experts.1").requires_grad_(step == 5)


def _one_process(make: Make, batches_each: int, thaws: bool, **options: Any) -> list[State]:
    """The weights after every step."""
    model = _build(**options)
    optimizer = make(list(model.named_parameters()))
    states = []
    for step in range(STEPS):
        _before(model, step, thaws)
        optimizer.zero_grad()
        for number in range(batches_each):
            ids, labels = _batch(step * batches_each + number)
            for given, wanted in zip(ids.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
                loss = F.cross_entropy(model(given), wanted) / MICROBATCHES / batches_each
                if loss.requires_grad:
                    loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        states.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return states


def _job(
    rank: int, size: int, layouts: list[str], make: Make, batches_each: int, thaws: bool, options: dict[str, Any]
) -> list[State]:
    """The same in a job, which goes from layout to layout."""
    data = [_batch(number) for number in range(STEPS * batches_each)]
    given: dict[str, Any] = {"loss_fn": F.cross_entropy, "microbatches": MICROBATCHES, "timeout_s": 40.0}
    job = elastic.Job(lambda: _build(**options), make, Parallelism.parse(layouts[0]), data=data, **given)
    states = []
    for step in range(STEPS):
        wanted = Parallelism.parse(layouts[step * len(layouts) // STEPS])
        if wanted != job.layout:
            job.switch(wanted)
        _before(job.model, step, thaws)
        for _ in range(batches_each - 1):
            job.step(update=False)
        job.step(max_norm=0.5)
        # nobody's parameters are whole here: all processes put them together
        states.append(gathered({n: p.detach() for n, p in job.model.named_parameters()}))
    seen = job.evaluate(*_batch(0))
    with torch.no_grad():
        model = _build(**options)
        model.load_state_dict(states[-1])
        parts = zip(*(t.chunk(MICROBATCHES) for t in _batch(0)), strict=True)
        assert seen == pytest.approx(sum(float(F.cross_entropy(model(i), w)) for i, w in parts) / MICROBATCHES)
    job.close()
    return states


def _check(states: list[State], expected: list[State]) -> None:
    for step, (mine, wanted) in enumerate(zip(states, expected, strict=True)):
        assert mine.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.allclose(mine[name], value, rtol=0.0, atol=1e-12), f"step {step}: {name}"


CASES = [
    (2, ["dp2,zero2"], _momentum, 1, False, {}),
    (2, ["dp2,zero3"], _adam, 1, False, {}),
    # a layer that is left out is the first that trains: what follows it gets no gradient to pass on, or does
    (2, ["dp2,zero3"], _momentum, 1, False, {"frozen": (0,)}),
    (2, ["dp2,zero2"], _momentum, 1, True, {"frozen": (0, 1)}),
    (2, ["dp2,zero3"], _momentum, 2, True, {"recompute": True}),
    (2, ["dp2", "dp2,zero3", "dp2", "dp2,zero2"], _adam, 1, True, {}),
    (4, ["dp4,zero3", "dp4", "dp4,zero2", "dp2,zero3"], _momentum, 2, False, {"frozen": (0,)}),
]


@pytest.mark.parametrize(("ranks", "layouts", "make", "batches_each", "thaws", "options"), CASES)
def test_ranks_that_skip_different_modules_train_as_one_process(
    ranks: int, layouts: list[str], make: Make, batches_each: int, thaws: bool, options: dict[str, Any]
) -> None:
    expected = _one_process(make, batches_each, thaws, **options)
    arguments = (layouts, make, batches_each, thaws, options)
    for states in run_gloo(_job, ranks, *arguments, timeout_s=150.0):
        _check(states, expected)


def test_the_steps_are_such_that_some_parameters_stay() -> None:
    states = [{n: p.detach() for n, p in _build().named_parameters()}, *_one_process(_momentum, 1, False)]
    stay = [n for a, b in pairwise(states) for n in a if torch.equal(a[n], b[n])]
    assert {n.split(".")[0] for n in stay} >= {"2", "3"}
    assert any(n.startswith(("1.", "4.")) for n in stay)


# --- layers of a transformers model, which FSDP2 gathers one by one ---


class _Skipping(nn.ModuleList):
    """Layers of which a forward leaves out some, as those with layer drop do."""

    skips: tuple[int, ...] = ()

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if not isinstance(key, slice):
            return found
        return [layer for number, layer in enumerate(found._modules.values()) if number not in self.skips]


@cache
def _kind() -> type[nn.Module]:
    import transformers

    class Dropping(transformers.LlamaForCausalLM):
        """The first token of a microbatch says which of three layers run, none to all."""

        def forward(self, input_ids: Tensor, **given: Any) -> Any:
            self.model.layers.skips = tuple(n for n in range(3) if not int(input_ids[0, 0]) >> n & 1)
            return super().forward(input_ids, **given)

    return Dropping


def _whole_layers(**options: Any) -> Any:
    model: Any = small("llama", **options).double()
    model.__class__, model.loss_function = _kind(), own_loss
    model.model.layers.__class__ = _Skipping
    if options.get("attention_bias"):
        model.get_input_embeddings().requires_grad_(False)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _words(step: int) -> tuple[State, Tensor]:
    inputs, labels = batch_of(rows=2 * MICROBATCHES, seed=step)
    # all eight ways, in other places in every step
    inputs["input_ids"][::2, 0] = (torch.arange(MICROBATCHES) * 3 + step * step) % 8 + 8
    return inputs, labels


def _llama(rank: int, size: int, layouts: list[str], options: dict[str, Any]) -> list[State]:
    data = [_words(step) for step in range(STEPS)]
    given: dict[str, Any] = {"microbatches": MICROBATCHES, "timeout_s": 40.0}
    job = elastic.Job(lambda: _whole_layers(**options), _adam, Parallelism.parse(layouts[0]), data=data, **given)
    states = []
    for step in range(STEPS):
        wanted = Parallelism.parse(layouts[step * len(layouts) // STEPS])
        if wanted != job.layout:
            job.switch(wanted)
        job.step(max_norm=0.5)
        states.append(gathered({n: p.detach() for n, p in job.model.named_parameters()}))
    job.evaluate(*_words(0))
    job.close()
    return states


def _llama_alone(options: dict[str, Any]) -> list[State]:
    model = _whole_layers(**options)
    optimizer = _adam(list(model.named_parameters()))
    states = []
    for step in range(STEPS):
        inputs, labels = _words(step)
        optimizer.zero_grad()
        count = int((labels[:, 1:] != -100).sum())
        for ids, wanted in zip(inputs["input_ids"].chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
            loss = model(ids, labels=wanted, use_cache=False).loss
            (loss * int((wanted[:, 1:] != -100).sum()) / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        states.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return states


@pytest.mark.parametrize(
    ("ranks", "layouts", "options"),
    [
        (2, ["dp2,zero2"], {}),
        (2, ["dp2,zero3"], {}),
        # computed again in the backward, behind an embedding that does not train
        (2, ["dp2,zero3", "dp2,zero2"], {"attention_bias": True}),
        (4, ["dp2,tp2,zero3", "dp2,tp2,zero2", "dp4,zero3"], {}),
    ],
)
def test_ranks_that_skip_whole_layers_train_as_one_process(
    ranks: int, layouts: list[str], options: dict[str, Any]
) -> None:
    expected = _llama_alone(options)
    for states in run_gloo(_llama, ranks, layouts, options, timeout_s=150.0):
        _check(states, expected)
