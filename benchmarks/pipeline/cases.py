"""The six dynamic models of the benchmark: a small GPT on real text each, and what changes between its steps.

Shape legend: L layers (embedding, blocks, head), M microbatches, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from pipeline_balance.dynamics.depths import MixtureOfDepths
from pipeline_balance.dynamics.early_exit import EarlyExit
from pipeline_balance.dynamics.experts import MixtureOfExperts
from pipeline_balance.dynamics.freezing import Freezer, FreezingRule, freeze_prefix, gradient_rates
from pipeline_balance.dynamics.gpt import Block, GPTShape, modules
from pipeline_balance.dynamics.pruning import PrunedLinear, PruningSchedule, prune_globally
from pipeline_balance.dynamics.sparse_attention import HashAttention
from prophet.demo.text import VOCABULARY, Corpus, rank_batch
from prophet.experts.gate import GateConfig
from prophet.ranks.collective import Collective

MakeBlock = Callable[[int], nn.Module]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One dynamic model. `every_steps` is how often to decide on its stages: 1 where loads change with every batch.

    Tokens are chosen so that no message between stages has exactly 128 KiB: on emulated hosts such messages are now and
    then held up for a tenth of a second.

    `pruning` and `freezing` say what is done between steps; the other mechanisms live in the blocks. A step trains
    `microbatches` x `sequences` sequences of `tokens` tokens on every replica.
    """

    name: str
    shape: GPTShape
    make_block: MakeBlock
    every_steps: int
    microbatches: int = 6
    sequences: int = 1
    tokens: int = 256
    pruning: PruningSchedule | None = None
    freezing: FreezingRule | None = None
    learning_rate: float = 1e-3
    seed: int = 0

    @property
    def layers(self) -> int:
        return self.shape.layers

    @property
    def tokens_per_step(self) -> int:
        return self.microbatches * self.sequences * self.tokens

    def modules(self) -> list[nn.Module]:
        return modules(self.shape, self.make_block, seed=self.seed)

    @property
    def activation_bytes(self) -> int:
        """Bytes that one microbatch takes between two layers."""
        return self.sequences * self.tokens * (self.shape.dim + self.shape.channels) * 4

    def optimizer(self, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.Adam(named, lr=self.learning_rate)

    def batch(self, corpus: Corpus, step: int, replica: int = 0, replicas: int = 1) -> tuple[Tensor, Tensor]:
        """(input, target) of a step, [M * sequences, T] each, a replica's own; the same for every policy."""
        rows = rank_batch(
            corpus.train,
            seed=self.seed,
            step=step,
            sequences=replicas * self.microbatches * self.sequences,
            length=self.tokens,
            rank=replica,
            ranks=replicas,
        )
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def _dense(dim: int, blocks: int, tokens: int, channels: int = 0) -> GPTShape:
    return GPTShape(vocabulary=VOCABULARY, dim=dim, heads=4, blocks=blocks, context=tokens, channels=channels)


def _pruned_block(dim: int, number: int) -> Block:
    """Weights start smaller the deeper the block (depth-scaled initialisation, Zhang et al., 2019), so a threshold for
    all of them does not leave every block as many.
    """
    # below a tenth of the weights sparse products are the faster ones on a CPU
    wide, narrow = (PrunedLinear(*size, sparse_below=0.08) for size in ((dim, 4 * dim), (4 * dim, dim)))
    with torch.no_grad():
        for layer in (wide, narrow):
            layer.weight.div_((1 + number) ** 0.5)
    return Block(dim, 4, mlp=nn.Sequential(wide, nn.ReLU(), narrow))


def _mixture(dim: int) -> MixtureOfExperts:
    return MixtureOfExperts(dim, 4, 4, hidden=2 * dim, gate=GateConfig(aux_loss_weight=0.01))


def cases(steps: int) -> dict[str, Case]:
    """All six by name; slow dynamism is spread over `steps` steps."""
    small = _dense(128, 10, 256)
    prune_every = max(1, steps // 8)
    slow = max(2, steps // 6)
    return {
        c.name: c
        for c in (
            Case(
                name="moe",
                shape=_dense(96, 10, 128),
                tokens=128,
                # every other block is a mixture, as in most such models
                make_block=lambda i: _mixture(96) if i % 2 else Block(96, 4),
                every_steps=1,
            ),
            Case(
                name="pruning",
                shape=_dense(256, 8, 128),
                make_block=lambda i: _pruned_block(256, i),
                every_steps=slow,
                tokens=124,
                pruning=PruningSchedule(final=0.98, first_step=2, prunings=5, every_steps=prune_every),
            ),
            Case(
                name="freezing",
                shape=small,
                tokens=248,
                make_block=lambda _: Block(128, 4),
                every_steps=slow,
                freezing=FreezingRule(share=0.5, loss_rate=0.1, patience=max(2, steps // 20), most=8),
            ),
            Case(
                name="sparse-attention",
                shape=_dense(96, 8, 128),
                tokens=128,
                make_block=lambda _: Block(96, 2, attention=HashAttention(96, 2, bits=3, tile=32)),
                every_steps=slow,
            ),
            Case(
                name="early-exit",
                shape=replace(small, channels=1),
                make_block=lambda i: EarlyExit(Block(128, 4), 0.985, first=i < 2),
                every_steps=slow,
            ),
            Case(
                name="mixture-of-depths",
                shape=small,
                tokens=248,
                # every other block routes an eighth of the tokens (Raposo et al., 2024)
                make_block=lambda i: MixtureOfDepths(Block(128, 4), 128, 0.125) if i % 2 else Block(128, 4),
                every_steps=1,
            ),
        )
    }


@dataclass
class Dynamism:
    """What happens to one copy of the model between steps. Every copy gets the same, as they train alike."""

    case: Case
    freezer: Freezer | None = None
    frozen: int = 0
    kept: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.case.freezing is not None:
            self.freezer = Freezer(self.case.layers, self.case.freezing)

    def decide_frozen(self, layers: Mapping[int, nn.Module], loss: float, collective: Collective) -> int:
        """Look at the gradients that a step left; the length of the frozen prefix from now on."""
        if self.freezer is None:
            return 0
        return self.freezer.update(gradient_rates(layers, self.case.layers, collective), loss)

    def change(
        self, layers: Mapping[int, nn.Module], here: Mapping[int, nn.Module], step: int, frozen: int, ranks: Collective
    ) -> None:
        """Prune or freeze before `step`: `layers` are all of the model's, `here` those that run on this rank."""
        if self.case.pruning is not None and self.case.pruning.due(step):
            self.kept.append(prune_globally(list(here.values()), self.case.pruning.sparsity(step), ranks))
        if frozen != self.frozen:
            freeze_prefix(layers, frozen)
            self.frozen = frozen
