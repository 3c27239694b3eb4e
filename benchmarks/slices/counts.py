"""Counted bytes: of units beside the count by hand, of ranks beside form 4, and the longest T that 1F1B's bytes allow.

Shape legend: P ranks, M microbatches, N slices, T tokens of a sequence.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import Any, get_args

import torch

from benchmarks.common import Row
from benchmarks.slices.by_hand import Dims, kept_per_token, unit_bytes
from benchmarks.slices.contenders import Ours
from benchmarks.slices.live_bytes import LiveBytes
from benchmarks.slices.steps import all_of, crossing, held, unit_and_gradients
from benchmarks.slices.workload import Work, apart, oracle
from pipeline_balance.schedules.classic import one_f_one_b
from pipeline_balance.schedules.simulate import peak_activation_bytes
from pipeline_balance.schedules.sliced import Order, sliced
from pipeline_balance.slices.adapter import SlicedTransformers
from pipeline_balance.slices.options import Recompute, SliceOptions
from prophet.ranks.collective import Collective

OVER_FORM = 1.02  # the target
LEAST = {"aligned": 2.6, "minimal": 3.0}
ORDERS: tuple[Order, ...] = ("aligned", "minimal")


def ranks_beside_form(collective: Collective, *, device: str, work: dict[str, int], slices: int) -> list[Row]:
    """A row per order: bytes that each rank's layers really hold at most, over form 4 with the count by hand."""
    job, ranks, rows = Work(**work), collective.size, []
    for order in ORDERS:
        found = _ran(Ours(order, job, SliceOptions(slices, order=order), ranks), job, ranks)
        row = {**_named("bytes", job, ranks, slices, order), **found}
        rows.append({**row, "target": f"<= {OVER_FORM}", "met": row["over_form"] <= OVER_FORM})
    return rows


def longest_simulated(work: dict[str, int], *, ranks: int, slices: int) -> list[Row]:
    """A row per order: T over 1F1B's at the bytes of 1F1B's fullest rank, from the schedules and the count by hand."""
    job, rows = Work(**work), []
    whole = max(
        peak_activation_bytes(one_f_one_b(ranks, job.microbatches), [unit_and_gradients(job, ranks, 1)[0]] * ranks)
    )
    for order in ORDERS:
        schedule = sliced(ranks, 1, job.microbatches, slices, order)
        a, g = unit_and_gradients(job, ranks, slices)
        peak = max(peak_activation_bytes(schedule, [a] * ranks, [g] * ranks))
        rows.append({**_named("longest-simulated", job, ranks, slices, order), **_against(whole / peak, order)})
    return rows


def longest_real(collective: Collective, *, device: str, work: dict[str, int], slices: int) -> list[Row]:
    """The same from counted runs: 1F1B at T, then each order at the longest T that its bytes at T promise.

    Activations are proportional to T, and boundaries, which count here too. Those at the longer T are counted as well,
    and together must not be more than 1F1B's.
    """
    job, ranks = Work(**work), collective.size
    whole = _ran(Ours("own-1f1b", job, SliceOptions(1), ranks), job, ranks)
    limit, rows = _most(whole), [{**_named("longest-real", job, ranks, 1, None), **whole}]
    for order in ORDERS:
        options = SliceOptions(slices, order=order)
        at_first = _most(_ran(Ours(order, job, options, ranks), job, ranks))
        # T is a multiple of the slices
        longer = replace(job, tokens=job.tokens * limit // at_first // slices * slices)
        found = _ran(Ours(order, longer, options, ranks), longer, ranks)
        row = {**_named("longest-real", longer, ranks, slices, order), **_against(longer.tokens / job.tokens, order)}
        row |= {**found, "limit_bytes": limit}
        rows.append({**row, "met": row["met"] and _most(found) <= limit})
    return rows


def _ran(one: Ours, job: Work, ranks: int) -> Row:
    """What a step holds and sends, and its loss and gradients beside one process's."""
    alone, want = oracle(job)
    row = held(job, ranks, one) | crossing(job, ranks, one) | {"loss_alone": alone}
    return row | {"worst_gradient_error": max(all_of(apart(one.gradients(), want)))}


def _most(row: Row) -> int:
    """Bytes of layers and of boundaries on the rank that holds most."""
    return max(a + b for a, b in zip(row["activation_bytes"], row["boundary_bytes"], strict=True))


def _against(ratio: float, order: Order) -> Row:
    return {"longest_over_1f1b": ratio, "target": f">= {LEAST[order]}", "met": ratio >= LEAST[order]}


def _named(case: str, work: Work, ranks: int, slices: int, order: str | None) -> Row:
    schedule = f"{order}-n{slices}" if order else "own-1f1b"
    return work.named(case, schedule, ranks) | {"n": slices, "v": 1, "order": order, "balance": "none"}


def recomputed() -> list[Row]:
    """A row per layer and way to recompute: a unit's counted bytes beside the count by hand, in one process."""
    rows = []
    layers, tokens, slices = 2, 32, 4
    for experts, kv_heads, how in itertools.product((0, 4), (8, 2), get_args(Recompute)):
        model = _small(experts, kv_heads, layers)
        run = SlicedTransformers(model, SliceOptions(slices, recompute=how))
        dims = Dims.of(model.config)
        by_hand = unit_bytes(dims, 1, tokens // slices, layers, how)
        counted, loss = _units_of(run, torch.arange(tokens)[None] % 48, layers)
        row: Row = {"case": "recompute", "layer": "experts" if experts else "dense", "recompute": how, "n": slices}
        row |= {"T": tokens, "dims": {**asdict(dims), "layers": layers}, "dtype": "float32"}
        row |= {"p": 1, "v": 1, "m": 1, "threads": torch.get_num_threads(), "loss": loss}
        row |= {"messages": {"activations": 0, "gradients": 0}, "unit_bytes": counted}
        row |= {"by_hand_bytes": by_hand, "by_hand_per_token": kept_per_token(dims, how)}
        rows.append({**row, "target": "equal", "met": counted == [by_hand] * slices})
    return rows


def _small(experts: int, kv_heads: int, layers: int) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": kv_heads}
    if not experts:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()
    config = transformers.MixtralConfig(**sizes, num_local_experts=experts, num_experts_per_tok=2)
    model = transformers.MixtralForCausalLM(config).train()
    model.set_experts_implementation("eager")
    return model


def _units_of(run: SlicedTransformers, ids: torch.Tensor, layers: int) -> tuple[list[int], float]:
    """What each slice adds to the bytes that all layers hold, and the loss."""
    count, kept, found, total = LiveBytes(run), [], [], 0.0
    (whole,) = run.cut(ids, ids, 1)
    for part in run.sliced(whole):
        before, boundary = count.now(), ()
        with run.working(part):
            for unit in range(layers + 1):
                boundary = run.run(unit, boundary, part)
            found.append(count.now() - before)
            total += float(run.loss(run.run(layers + 1, boundary, part), part).detach())
        kept.append(boundary)
    return found, total / run.counted(whole)
