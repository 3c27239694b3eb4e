"""Steps of real ranks: a Llama whose head is most of its work, whole on the best map and split.

Shape legend: P ranks, M microbatches, B sequences, T tokens.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import Row
from benchmarks.measure import rotated
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.machine.memory import keep_memory
from prophet.ranks.collective import Collective


def _model(words: int, hidden: int, layers: int, tokens: int) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 8 * hidden // 3, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=words, num_hidden_layers=layers, max_position_embeddings=tokens, num_key_value_heads=4, **sizes
        )
    ).train()


def _still(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for _, p in named), lr=0.0)


def measure(
    collective: Collective,
    *,
    device: str,
    words: int,
    hidden: int,
    layers: int,
    microbatches: int,
    tokens: int,
    repeats: int,
) -> list[Row]:
    """A row per map of whole layers whose last stage has the head and few layers, and one of the split vocabulary.

    Every round runs all of them once, another one first each time; the first round does not count.
    """
    keep_memory()
    ranks, units = collective.size, layers + 2
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(words, (microbatches, tokens), generator=generator)
    # most of the work is behind the layers, so that none of them need be beside the head
    maps = [_last_with(k, units, ranks) for k in range(min(3, layers + 2 - ranks))]
    pipes: dict[str, ElasticPipeline] = {}
    for stage_map in maps:
        pipes[f"whole {stage_map.boundaries}"] = _pipe(_model(words, hidden, layers, tokens), stage_map, microbatches)
    split_map = StageMap.even(layers, ranks)
    inner = [b + 1 for b in split_map.boundaries[1:-1]]
    even = StageMap((0, *inner, units), tuple(range(ranks)))
    pipes["split"] = _pipe(_model(words, hidden, layers, tokens), even, microbatches, split=True)
    taken: dict[str, list[float]] = {name: [] for name in pipes}
    worked: dict[str, list[float]] = {name: [] for name in pipes}
    losses: dict[str, float] = {}
    for turn in range(repeats + 1):
        for name in rotated(list(pipes), turn):
            step_s, cpu_s, losses[name] = _timed(pipes[name], ids)
            if turn:
                taken[name].append(step_s)
                worked[name].append(cpu_s)
    best = min(statistics.median(t) for name, t in taken.items() if name != "split")
    least = min(statistics.median(t) for name, t in worked.items() if name != "split")
    each = layers * (4 * hidden**2 + 3 * hidden * (8 * hidden // 3) + tokens * hidden)
    head = words * hidden
    return [
        {
            "case": "measured",
            "p": ranks,
            "m": microbatches,
            "layers": layers,
            "hidden": hidden,
            "words": words,
            "tokens": tokens,
            "head_share": head / (head + each),
            "schedule": name,
            "loss": losses[name],
            "step_s": statistics.median(seconds),
            "step_s_all": seconds,
            "ratio": statistics.median(seconds) / best,
            # of the rank that works most: no wait counts, nor what else the machine does
            "cpu_s": statistics.median(worked[name]),
            "cpu_ratio": statistics.median(worked[name]) / least,
        }
        for name, seconds in taken.items()
    ]


def _last_with(layers: int, units: int, ranks: int) -> StageMap:
    """The head with so many layers on the last rank, and the others spread evenly."""
    rest = units - 1 - layers
    inner = [round(k * rest / (ranks - 1)) for k in range(1, ranks)]
    return StageMap((0, *inner, units), tuple(range(ranks)))


def _pipe(model: Any, stage_map: StageMap, microbatches: int, *, split: bool = False) -> ElasticPipeline:
    given: dict[str, Any] = {"make_optimizer": _still, "microbatches": microbatches, "split_vocabulary": split}
    return ElasticPipeline.from_transformers(model, stage_map, **given)


def _timed(pipe: ElasticPipeline, ids: Tensor) -> tuple[float, float, float]:
    """Seconds of the slowest rank and of the processor that works most, and the loss."""
    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    loss = pipe.step(ids, ids)
    found = torch.tensor([time.perf_counter() - began, time.process_time() - worked])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found[0]), float(found[1]), loss
