"""The dynamic models of the benchmark: a small GPT on real text each, and the life that its training goes through.

A life begins dense, whole and trainable, and ends pruned, frozen, sparse or routed. Rules change a copy of the model
between its steps, from what that copy has trained (see `Dynamism`); schedules follow the share of the run that is over.

Shape legend: L layers (embedding, blocks, head), M microbatches, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from pipeline_balance.dynamics.depths import MixtureOfDepths
from pipeline_balance.dynamics.early_exit import ConfidentExit, EarlyExit
from pipeline_balance.dynamics.experts import MixtureOfExperts
from pipeline_balance.dynamics.freezing import Freezer, FreezingRule, freeze_prefix, gradient_rates
from pipeline_balance.dynamics.gpt import Attention, Block, GPTShape, modules
from pipeline_balance.dynamics.pruning import PrunedLinear, PruningSchedule, prune_globally, pruned_modules
from pipeline_balance.dynamics.sparse_attention import HashAttention
from prophet.demo.text import VOCABULARY, Corpus, rank_batch
from prophet.experts.gate import GateConfig
from prophet.ranks.collective import Collective
from prophet.ranks.operation import Operation

MakeBlock = Callable[[int], nn.Module]
Age = Callable[[nn.Module, float, float], None]
"""Changes a module of a block: the module, how deep the block lies (0 to 1), and the share of the life that is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One dynamic model. `every_steps` is how often to decide on its stages: 1 where loads change with every batch.

    Tokens are chosen so that no message between stages has exactly 128 KiB: on emulated hosts such messages are now and
    then held up for a tenth of a second.

    `age`, `pruning` and `freezing` say what is done between steps. A step trains `microbatches` x `sequences` sequences
    of `tokens` tokens on every replica. `gain` is what balancing has to gain over a map that was the best at the start,
    or 0.9 of what an oracle gains, if that is less.
    """

    name: str
    shape: GPTShape
    make_block: MakeBlock
    every_steps: int
    microbatches: int = 6
    sequences: int = 1
    tokens: int = 124
    gain: float = 0.99
    age: Age | None = None
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


def _pruned_block(dim: int, number: int) -> Block:
    """Weights start smaller the deeper the block (depth-scaled initialisation, Zhang et al., 2019), so a threshold for
    all of them does not leave every block as many.
    """
    # below a tenth of the weights sparse products are the faster ones on a CPU, and the layer is stored sparse
    pruned = partial(PrunedLinear, sparse_below=0.1)
    block = Block(dim, 4, mlp=nn.Sequential(pruned(dim, 4 * dim), nn.ReLU(), pruned(4 * dim, dim)))
    mixing = block.attention
    assert isinstance(mixing, Attention)
    mixing.query, mixing.key_value, mixing.out = pruned(dim, dim), pruned(dim, 2 * dim), pruned(dim, dim)
    with torch.no_grad():
        for module in block.modules():
            if isinstance(module, PrunedLinear):
                module.weight.div_((1 + number) ** 0.5)
    return block


def _turned(over: float, depth: float) -> float:
    """How far a block has turned into what it becomes: the deepest begin, and each takes three tenths of the life."""
    return min(max((over - 0.7 * (1 - depth)) / 0.3, 0.0), 1.0)


def _leave(module: nn.Module, depth: float, over: float, *, never: float, last: float) -> None:
    """Tokens leave by a threshold that falls from `never` to `last`, by the same factor in every step."""
    if isinstance(module, EarlyExit):
        module.threshold = never * (last / never) ** over


def _sharpen(module: nn.Module, depth: float, over: float, *, bits: int) -> None:
    """Buckets become sharper, those of the deepest blocks first."""
    if isinstance(module, HashAttention):
        module.bits = round(bits * _turned(over, depth))


def _pass_by(module: nn.Module, depth: float, over: float, *, capacity: float) -> None:
    """Fewer tokens are worked on, in the deepest blocks first."""
    if isinstance(module, MixtureOfDepths):
        module.capacity = 1 + (capacity - 1) * _turned(over, depth)


def cases(steps: int, *, layers: int = 24, experts: Collective | None = None) -> dict[str, Case]:
    """All by name; their lives last `steps` steps, and balancing looks at slow ones twenty times.

    layers: L. experts: the ranks that share the experts of mixtures (None: every rank has all of its own).
    """
    every = max(2, steps // 20)

    def shape(dim: int, tokens: int = 124, channels: int = 0) -> GPTShape:
        blocks = layers - 2
        return GPTShape(vocabulary=VOCABULARY, dim=dim, heads=4, blocks=blocks, context=tokens, channels=channels)

    def mixture(number: int, gate: GateConfig, depths: bool = False) -> nn.Module:
        # every other block is a mixture, as in most such models
        if number % 2 == 0:
            return Block(96, 4)
        block = MixtureOfExperts(96, 4, 8, hidden=192, gate=gate, group=experts)
        return MixtureOfDepths(block, 96, 1.0) if depths else block

    found = (
        Case(
            name="moe",
            shape=shape(96),
            # what an expert has no room for is left out, so a router that comes to prefer some makes its layer lighter
            make_block=partial(mixture, gate=GateConfig(capacity_factor=1.0)),
            every_steps=1,
        ),
        Case(
            name="moe-sinkhorn",
            shape=shape(96),
            make_block=partial(mixture, gate=GateConfig(assignment="sinkhorn")),
            every_steps=1,
        ),
        Case(
            name="pruning",
            shape=shape(160, 60),
            make_block=partial(_pruned_block, 160),
            every_steps=every,
            gain=1.2,
            # with a larger one the first steps would level what depth has made unequal
            learning_rate=3e-4,
            microbatches=8,
            tokens=60,
            # over by the middle of the life
            pruning=PruningSchedule(final=0.95, prunings=8, every_steps=max(1, steps // 16)),
        ),
        Case(
            name="freezing",
            shape=shape(96),
            make_block=lambda _: Block(96, 4),
            every_steps=every,
            gain=1.15,
            # one after the other, over the first three quarters of the life
            freezing=FreezingRule(
                share=0.6, loss_rate=0.1, patience=max(1, steps // layers), most=3 * layers // 4, in_turn=True
            ),
        ),
        Case(
            name="sparse-attention",
            shape=shape(96, 128),
            make_block=lambda _: Block(96, 2, attention=HashAttention(96, 2, bits=4, tile=32)),
            every_steps=every,
            tokens=128,
            age=partial(_sharpen, bits=4),
        ),
        Case(
            name="early-exit",
            shape=shape(96, channels=1),
            make_block=lambda i: EarlyExit(Block(96, 4), 2.0, first=i < 4),
            every_steps=every,
            gain=1.2,
            age=partial(_leave, never=1.0, last=0.97),
        ),
        Case(
            name="early-exit-confidence",
            shape=shape(96, channels=2),
            # few exits, as in the paper: they cost something, too
            make_block=lambda i: ConfidentExit(Block(96, 4), 96, VOCABULARY, 1.0, first=i % 4 != 3, exit_weight=0.3),
            every_steps=every,
            gain=1.2,
            age=partial(_leave, never=1.0, last=0.09),
            learning_rate=2e-3,
        ),
        Case(
            name="mixture-of-depths",
            shape=shape(96),
            # every other block routes an eighth of the tokens in the end (Raposo et al., 2024)
            make_block=lambda i: MixtureOfDepths(Block(96, 4), 96, 1.0) if i % 2 else Block(96, 4),
            every_steps=1,
            age=partial(_pass_by, capacity=0.125),
        ),
        Case(
            name="depths-and-experts",
            shape=shape(96),
            # staged MoDE (Raposo et al., 2024): tokens pass a mixture of experts by
            make_block=partial(mixture, gate=GateConfig(), depths=True),
            every_steps=1,
            age=partial(_pass_by, capacity=0.125),
        ),
    )
    return {case.name: case for case in found}


@dataclass
class Dynamism:
    """What happens to one copy of the model between its steps, by what this copy has trained.

    Copies train alike, whatever their stages: so the same happens to all of them at the same steps, which `history`
    shows. Attributes:
        history: Every change as (step, what changed): the frozen prefix, or the weights left in every layer [L].
    """

    case: Case
    steps: int
    warm_up: int = 0
    history: list[tuple[int, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.freezer = Freezer(self.case.layers, self.case.freezing or FreezingRule(most=0))

    def before(
        self,
        layers: Sequence[nn.Module],
        here: Mapping[int, nn.Module],
        step: int,
        ranks: Collective,
        optimizer: torch.optim.Optimizer | tuple[()],
    ) -> None:
        """Change the model before `step`: `layers` are all of the model's, `here` those that run on this rank."""
        case, counted = self.case, step - self.warm_up
        # the last quarter of the run is the life's end
        over = min(max(counted / max(1, 3 * self.steps // 4), 0.0), 1.0)
        if case.age is not None:
            for number, layer in enumerate(layers):
                for module in layer.modules():
                    case.age(module, number / (case.layers - 1), over)
        if case.pruning is not None and counted > 0 and case.pruning.due(counted):
            prune_globally(list(here.values()), case.pruning.sparsity(counted), ranks, optimizer)
            left = torch.zeros(case.layers, dtype=torch.int64)
            for i, layer in here.items():
                left[i] = sum(int(m.mask.sum()) for m in pruned_modules([layer]))
            # replicas count alike
            every = ranks.all_gather(left, op=Operation("weights left")).amax(dim=0)
            self.history.append((step, every.tolist()))

    def after(
        self, layers: Sequence[nn.Module], here: Mapping[int, nn.Module], step: int, loss: float, ranks: Collective
    ) -> None:
        """Look at what `step` has left, gradients too, and freeze; arguments as for `before`."""
        if self.case.freezing is None:
            return
        before = self.freezer.frozen
        if self.freezer.update(gradient_rates(here, self.case.layers, ranks), loss) != before:
            freeze_prefix(dict(enumerate(layers)), self.freezer.frozen)
            self.history.append((step, [self.freezer.frozen]))
