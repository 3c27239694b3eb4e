"""Checks of `prophet gpu-check`: a pipeline with replicas, one in slices, and a job that changes its layout.

Each trains a small model, and compares its losses with those of one process on the same device. Attention over slices
is also compared with its definition, by every kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline_balance.elastic.data import Batches
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.slices import SliceOptions, attend
from pipeline_balance.slices.store import ChunkStore, Unit, active
from prophet.doctor.check import Check, finding, sound
from prophet.gpu_check.checks import Answer, Place
from prophet.gpu_check.kernels import compared

_DIM, _VOCABULARY, _BLOCKS, _ROWS, _MICROBATCHES, _STEPS, _SEED = 32, 64, 4, 64, 4, 3, 5
_HEADS, _TOKENS, _STARTS = 4, 96, (0, 20, 52, 96)
# Relative: sums in another order, in float32, over some updates
_TOLERANCE = 1e-4
_SLICES_MEND = "train without slices here; please send the JSON below"


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_DIM, 4 * _DIM), nn.Linear(4 * _DIM, _DIM)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


def pipeline(place: Place) -> Answer:
    """Train a pipeline of two stages, with two replicas where there are four ranks."""
    replicas = place.ranks // 2
    data = _batches()
    pipe = ElasticPipeline.from_modules(
        _model(),
        nn.functional.cross_entropy,
        make_optimizer=_optimizer,
        microbatches=_MICROBATCHES // replicas,
        replicas=replicas,
        seed=_SEED,
        device=torch.device(place.device),
        timeout_s=place.timeout_s,
    )
    losses = []
    for _ in range(_STEPS):
        inputs, labels = (part.chunk(replicas)[pipe.replica] for part in data.read(0, _ROWS))
        losses.append(pipe.step(inputs, labels))
        data.advance()
    copies = f"two stages, {replicas} replica{'s' * (replicas > 1)}"
    return _answer("pipeline", copies, losses, _plain(place, _STEPS))


def switch(place: Place) -> Answer:
    """Change the layout of a job between two steps: a pipeline, replicas with ZeRO 1, and the pipeline again."""
    layouts = (f"pp{place.ranks}", f"dp{place.ranks},zero1", f"pp{place.ranks}")
    job = Job(
        _model,
        _optimizer,
        Parallelism.parse(layouts[0]),
        data=_batches(),
        loss_fn=nn.functional.cross_entropy,
        microbatches=_MICROBATCHES,
        seed=_SEED,
        device=torch.device(place.device),
        timeout_s=place.timeout_s,
    )
    losses, seconds = [job.step() for _ in range(_STEPS)], []
    for text in layouts[1:]:
        seconds.append(job.switch(Parallelism.parse(text)).seconds)
        losses += [job.step() for _ in range(_STEPS)]
    job.close()
    took = f"{' to '.join(layouts)}, {' and '.join(f'{1e3 * s:.0f} ms' for s in seconds)}"
    answer = _answer("switch", took, losses, _plain(place, _STEPS * len(layouts)))
    answer.figures["seconds"] = seconds
    return answer


def slices(place: Place) -> Answer:
    """Attend over slices by all kernels of this rank's device; with two ranks, train a pipeline in slices as well."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16] if place.on_gpu else [torch.float32]
    cases = {"slices": None, "slices of packed documents": (torch.arange(_TOKENS) >= 30).long().expand(2, -1)}
    checks = [compared(name, partial(_attended, d), place.device, dtypes, _SLICES_MEND) for name, d in cases.items()]
    if place.ranks == 1:
        return Answer(checks=checks)
    model, (ids, labels) = _attending_model(), _sequences()
    pipe = ElasticPipeline.from_modules(
        model,
        _loss_of_tokens,
        make_optimizer=_optimizer,
        microbatches=2,
        slices=SliceOptions(4),
        seed=_SEED,
        device=torch.device(place.device),
        timeout_s=place.timeout_s,
    )
    losses = [pipe.step(ids, labels) for _ in range(_STEPS)]
    answer = _answer("pipeline in slices", "two stages, four slices", losses, _whole(place))
    return Answer(checks=[*checks, *answer.checks], figures=answer.figures)


def judged(name: str, how: str, losses: Sequence[float], expected: Sequence[float]) -> Check:
    """Judge a check's losses by those of one process.

    Args:
        name: Of the check.
        how: What was trained, in words.
        losses: By step.
        expected: The same of one process.
    """
    errors = [abs(got - want) / abs(want) for got, want in zip(losses, expected, strict=True)]
    step = next((i for i, error in enumerate(errors) if not error <= _TOLERANCE), None)
    if step is not None:
        text = f"{how}: the loss of step {step} is {losses[step]:.6g}, and {expected[step]:.6g} in one process"
        return finding(name, text, "train without `pipeline_balance` here; please send the JSON below")
    return sound(name, f"{how}: {len(losses)} losses as in one process, to a relative {max(errors):.1g}")


def _answer(name: str, how: str, losses: Sequence[float], expected: Sequence[float]) -> Answer:
    figures: dict[str, Any] = {"losses": list(losses), "expected": list(expected)}
    return Answer(checks=[judged(name, how, losses, expected)], figures=figures)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [_Block() for _ in range(_BLOCKS)]
    return nn.Sequential(nn.Embedding(_VOCABULARY, _DIM), *blocks, nn.Linear(_DIM, _VOCABULARY))


def _optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def _batches() -> Batches:
    ids = torch.randint(_VOCABULARY, (4 * _ROWS,), generator=torch.Generator().manual_seed(1))
    return Batches(TensorDataset(ids, (ids * 3 + 1) % _VOCABULARY), _ROWS, seed=_SEED)


def _plain(place: Place, steps: int) -> list[float]:
    """The losses of one process on this rank's device."""
    model, data = _model().to(place.device), _batches()
    optimizer = _optimizer(list(model.named_parameters()))
    losses = []
    for _ in range(steps):
        inputs, labels = (part.to(place.device) for part in data.read(0, _ROWS))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        data.advance()
    return losses


# --- slices ----------------------------------------------------------------------------------------------------


def _attended(documents: Tensor | None, device: str, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Outputs and gradients of attention in slices, each with those of the definition in float64.

    Args:
        documents: Of every token [2, T].
        device: Where.
        dtype: Of the slices.
    """
    drawn = torch.randn(4, 2, _TOKENS, _HEADS, 64, generator=torch.Generator().manual_seed(3)).transpose(2, 3)
    query, key, value, grad = drawn.to(device, dtype)
    parts = [t.requires_grad_() for t in (query, key[:, :2], value[:, :2])]
    exact = [t.detach().double().requires_grad_() for t in parts]
    store, outs = ChunkStore(), []
    for number, (start, stop) in enumerate(pairwise(_STARTS)):
        with active(store, Unit(0, number, len(_STARTS) - 1, documents, _STARTS)):
            outs.append(attend(*(t[:, :, start:stop] for t in parts), layer=0))
    # slices go backward in reverse
    found = [torch.zeros_like(t) for t in parts]
    for out, (start, stop) in reversed([*zip(outs, pairwise(_STARTS), strict=True)]):
        more = torch.autograd.grad(out, parts, grad[:, :, start:stop])
        found = [a + b for a, b in zip(found, more, strict=True)]
    seen = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    keys, values = (t.repeat_interleave(2, 1) for t in exact[1:])
    scores = (exact[0] @ keys.mT * 64**-0.5).masked_fill(~seen.to(device), float("-inf"))
    whole = scores.softmax(-1) @ values
    wanted = [whole, *torch.autograd.grad(whole, exact, grad.double())]
    return list(zip([torch.cat(outs, 2), *found], wanted, strict=True))


class _Attention(nn.Module):
    """Causal attention over slices; over whole sequences by torch where it is told so."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.whole = layer, False
        self.heads, self.out = nn.Linear(_DIM, 3 * _DIM), nn.Linear(_DIM, _DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.whole:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = attend(q, k, v, layer=self.layer)
        y: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return y


def _attending_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(_VOCABULARY, _DIM), _Attention(0), _Attention(1), nn.Linear(_DIM, _VOCABULARY))


def _sequences() -> tuple[Tensor, Tensor]:
    """Words and labels [rows, tokens]; a label is the word before."""
    ids = torch.randint(_VOCABULARY, (4, _TOKENS), generator=torch.Generator().manual_seed(1))
    return ids, ids.roll(1, dims=1)


def _loss_of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _whole(place: Place) -> list[float]:
    """The losses of one process on this rank's device, with whole sequences."""
    model = _attending_model().to(place.device)
    for layer in model:
        if isinstance(layer, _Attention):
            layer.whole = True
    optimizer, losses = _optimizer(list(model.named_parameters())), []
    ids, labels = (t.to(place.device) for t in _sequences())
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss = _loss_of_tokens(model(ids), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
