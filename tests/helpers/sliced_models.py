"""Models in slices and the same models whole, with one cross entropy in the logits' type on both sides."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline_balance.pipeline.model.adapter import TransformersModel
from pipeline_balance.pipeline.model.layers import Activations
from pipeline_balance.pipeline.run.generators import seeded, unit_seed
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.exchange_times import ExchangeCosts, LayerSeconds
from pipeline_balance.slices.adapter import SlicedTransformers
from pipeline_balance.slices.options import Recompute, SliceOptions
from tests.helpers.transformers_models import VOCABULARY, small

TOKENS, MICROBATCHES = 16, 2
# transfers in no time: at the sizes of tests exchange would never pay
FREE = ExchangeCosts(
    forward=LayerSeconds(piece_s=1.0, diagonal_s=1.0), backward=LayerSeconds(piece_s=2.0, diagonal_s=2.0)
)


def own_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Tensor | None = None, **others: Any
) -> Tensor:
    """The mean cross entropy of the next token, in the logits' type."""
    if shift_labels is None:
        shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.reshape(-1, vocab_size), shift_labels.reshape(-1))


@cache
def exact_attention() -> str:
    """The name of transformers' eager attention with weights in the queries' type, and soft caps."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        scores = query @ key.mT * options["scaling"]
        if cap := options.get("softcap"):
            scores = torch.tanh(scores / cap) * cap
        return ((scores + attention_mask).softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("exact", attention)
    AttentionMaskInterface.register("exact", eager_mask)
    return "exact"


def model_of(
    family: str, dtype: torch.dtype = torch.float64, *, recompute: bool = False, frozen: int = 0, **options: Any
) -> Any:
    """A small model; its embedding and first `frozen` layers do not train."""
    model: Any = small(family, **options).to(dtype)
    if dtype == torch.float64:
        model.loss_function = own_loss
        if family in ("mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss"):
            model.set_experts_implementation("eager")
        if family == "gemma2":
            # its own computes weights in float32
            model.set_attn_implementation(exact_attention())
    if family == "gpt_oss":
        with torch.no_grad():
            # sinks that weigh as much as tokens do
            for layer in model.base_model.layers:
                layer.self_attn.sinks.uniform_(-2.0, 2.0)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if frozen:
        model.get_input_embeddings().requires_grad_(False)
        for layer in list(model.base_model.layers)[:frozen]:
            layer.requires_grad_(False)
    return model


def batch_of(
    kind: str = "plain", rows: int = 4, tokens: int = TOKENS, seed: int = 7
) -> tuple[dict[str, Tensor], Tensor]:
    """Ids and labels; labels of the second quarter of row 0 and of the first half of the last row do not count.

    `kind`: plain, packed (documents by position ids, another cut in every row), padded (on the right).
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[0, tokens // 4 : tokens // 2 + 1] = -100
    labels[-1, : tokens // 2] = -100
    inputs = {"input_ids": ids}
    if kind == "silent":
        labels[:, tokens // 4 : tokens // 2 + 1] = -100
    if kind == "packed":
        cuts = [(3 + 2 * row) % (tokens - 1) + 1 for row in range(rows)]
        inputs["position_ids"] = torch.stack([torch.cat([torch.arange(c), torch.arange(tokens - c)]) for c in cuts])
    if kind == "padded":
        mask = torch.ones(rows, tokens, dtype=torch.long)
        mask[1, tokens - 5 :] = 0
        inputs["attention_mask"] = mask
        labels = labels.masked_fill(mask == 0, -100)
    return inputs, labels


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for _, p in named), lr=1e-3)


def no_update(named: Any) -> torch.optim.Optimizer:
    """An optimizer that leaves weights as they are."""
    return torch.optim.SGD((p for _, p in named), lr=0.0)


def alone(
    model: nn.Module, kinds: list[str], *, max_norm: float | None = None, make: Any = adam, tokens: int = TOKENS
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The model's own loop, one step per kind: losses, the first step's gradients, and the weights at the end."""
    counting = TransformersModel(model)
    optimizer = make(list(model.named_parameters()))
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for kind in kinds:
        optimizer.zero_grad()
        losses.append(run_whole(model, counting, *batch_of(kind, tokens=tokens)))
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if not first:
            first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, first, {n: t.detach().clone() for n, t in model.state_dict().items()}


def run_whole(model: nn.Module, counting: TransformersModel, inputs: dict[str, Tensor], labels: Tensor) -> float:
    """Forward and backward of all microbatches, each loss weighted by the labels that count in it."""
    parts = counting.cut(inputs, labels, MICROBATCHES)
    count, total = sum(counting.counted(part) for part in parts), 0.0
    for part in parts:
        loss = model(**part.inputs, labels=part.labels, use_cache=False).loss * (counting.counted(part) / count)
        if torch.is_grad_enabled():
            loss.backward()
        total += float(loss.detach())
    return total


def whole_loss(model: nn.Module, kind: str, tokens: int = TOKENS) -> float:
    """The mean loss of a batch, without a backward pass, in evaluation mode."""
    with torch.no_grad():
        found = run_whole(model.eval(), TransformersModel(model), *batch_of(kind, tokens=tokens))
    model.train()
    return found


def pass_alone(run: SlicedTransformers, inputs: dict[str, Tensor], labels: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of all units in a row, every microbatch's slices forward in order and backward in reverse."""
    run.root.zero_grad()
    whole = run.cut(inputs, labels, MICROBATCHES)
    total, count = 0.0, sum(run.counted(part) for part in whole)
    for one in whole:
        kept = []
        for part in run.sliced(one):
            activations: Activations = ()
            with run.working(part):
                for unit in range(len(run.units)):
                    with seeded(unit_seed(5, unit, 0, part.number, part.slice), torch.device("cpu")):
                        activations = run.run(unit, activations, part)
            kept.append((part, run.loss(activations, part) / count))
            total += float(kept[-1][1])
        for part, loss in reversed(kept):
            with run.working(part):
                loss.backward()
        assert not len(run.store)
    return total, {n: p.grad.clone() for n, p in run.root.named_parameters() if p.grad is not None}


def pipe_of(
    model: nn.Module,
    slices: int,
    *,
    stages: int = 1,
    order: Any = "minimal",
    recompute: Recompute = "none",
    balance: Any = "none",
    keep_bytes: int = 0,
    offload: Any = 0.0,
    host_bytes_per_s: float | None = None,
    context: int = 1,
    **options: Any,
) -> ElasticPipeline:
    options = {"make_optimizer": adam, "microbatches": MICROBATCHES, "timeout_s": 60.0, **options}
    crossover = 4 if balance == "uneven" else None  # unlike the models' own, which would make nearly equal slices
    costs = FREE if balance == "exchange" else None
    made = SliceOptions(
        slices, stages, order, recompute, balance, crossover, keep_bytes, costs, offload, host_bytes_per_s, context
    )
    return ElasticPipeline.from_transformers(model, slices=made, **options)


def apart(mine: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference, relative to each tensor's largest entry."""
    assert mine.keys() <= want.keys()
    return max(
        (float((mine[n] - want[n]).abs().max() / want[n].abs().max().clamp(min=1e-30)) for n in mine), default=0.0
    )


def in_slices(model: Any, slices: int, kind: str, recompute: Recompute = "none") -> tuple[float, dict[str, Tensor]]:
    """`pass_alone` of a model in equal slices."""
    return pass_alone(SlicedTransformers(model, SliceOptions(slices, recompute=recompute)), *batch_of(kind))
