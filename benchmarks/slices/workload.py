"""The model, the text and the oracle that all schedules share.

Shape legend: B sequences of a microbatch, M microbatches, T tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Row
from benchmarks.slices.by_hand import Dims

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A Llama in float32 and the batch that it trains on: `microbatches` of one sequence of `tokens` each."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    microbatches: int
    tokens: int

    def model(self) -> Any:
        """The same weights on every rank and in every schedule."""
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.tokens,
        )
        return transformers.LlamaForCausalLM(config).train()

    def batch(self) -> Tensor:
        """[M, T] bytes of real text; they are the labels too."""
        from prophet.demo.text import load_corpus

        text = load_corpus(max_bytes=1 << 18).train
        tokens = torch.tensor(text[: self.microbatches * self.tokens], dtype=torch.long)
        return tokens.view(self.microbatches, self.tokens)

    def layer(self) -> Dims:
        """One layer's sizes, to be counted by hand."""
        return Dims(
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            intermediate=self.intermediate,
        )

    def named(self, case: str, schedule: str, ranks: int) -> Row:
        """What a row says of its case, whatever was found."""
        sizes = asdict(self)
        row: Row = {"case": case, "schedule": schedule, "p": ranks, "m": sizes.pop("microbatches")}
        return row | {"T": sizes.pop("tokens"), "dims": sizes, "dtype": "float32", "threads": torch.get_num_threads()}


def no_update(named: Any) -> torch.optim.Optimizer:
    """An optimizer that leaves weights as they are, so that every step is the same one."""
    return torch.optim.SGD((p for _, p in named), lr=0.0)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those that this rank has."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and not p.is_meta}


def oracle(work: Work) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole model in one process, by its own forward."""
    model, ids = work.model(), work.batch()
    total = 0.0
    for row in ids.split(1):
        loss = model(input_ids=row, labels=row, use_cache=False).loss / work.microbatches
        loss.backward()
        total += float(loss.detach())
    return total, gradients(model)


def apart(mine: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference of gradients, relative to each tensor's largest entry."""
    return max(
        (float((mine[n] - want[n]).abs().max() / want[n].abs().max().clamp(min=1e-30)) for n in mine), default=0.0
    )
