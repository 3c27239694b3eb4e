"""One model on one batch in a pipeline over slices, on real processes: loss and gradients are those of the whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline_balance.pipeline.model.vocabulary import Rows, rows_of
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.slices import attention
from pipeline_balance.slices.parts import Sliced
from pipeline_balance.slices.saved.offload import Offloader
from pipeline_balance.slices.sharing.exchange import Exchanger
from tests.helpers.sliced_models import (
    MICROBATCHES,
    TOKENS,
    alone,
    apart,
    batch_of,
    model_of,
    no_update,
    pipe_of,
    whole_loss,
)

EXACT, SINGLE = 1e-10, 1e-5
EXCHANGE: dict[str, Any] = {"order": "aligned", "balance": "exchange"}
# their router loss is computed in float32
_ROUTED = ("mixtral", "qwen3_moe")


class Case:
    """A model in float64, unless `model` says otherwise, and how its pipeline runs it.

    Args:
        family: Of the model.
        kind: Of the batch.
        tokens: Of a sequence.
        cut: The tokens from which on a slice's own triangle is cut into parts.
        pipeline: Options of `pipe_of`; four slices by default. With recompute="model" the model checkpoints itself.
        **model: Options of `model_of`.
    """

    def __init__(
        self,
        family: str,
        kind: str = "plain",
        *,
        tokens: int = TOKENS,
        cut: int = attention.CUT,
        pipeline: dict[str, Any] | None = None,
        **model: Any,
    ) -> None:
        self.family, self.kind, self.tokens, self.cut = family, kind, tokens, cut
        self.pipeline, self._model = {"slices": 4, **(pipeline or {})}, model

    def __str__(self) -> str:
        return f"{self.family} {self.kind} {self._model} {self.pipeline}"

    @property
    def allowed(self) -> float:
        routed = self.family in _ROUTED and self._model.get("output_router_logits", True)
        return SINGLE if routed or self._model.get("dtype") == torch.float32 else EXACT

    @property
    def replicas(self) -> int:
        return int(self.pipeline.get("replicas", 1))

    @property
    def exchanges(self) -> bool:
        return self.pipeline.get("balance") == "exchange"

    def model(self) -> Any:
        return model_of(self.family, recompute=self.pipeline.get("recompute") == "model", **self._model)

    def pipe(self, model: Any, **more: Any) -> ElasticPipeline:
        options = {**self.pipeline, **more}
        if options.get("recompute") == "model":
            del options["recompute"]
        # all groups of ranks that share slices have one batch together
        microbatches = MICROBATCHES * options.get("context", 1) // self.replicas
        return pipe_of(model, microbatches=microbatches, **options)

    def batch(self, replica: int, kind: str | None = None) -> tuple[dict[str, Tensor], Tensor]:
        """Rows of a group of ranks that share them; `kind` takes the place of the case's own."""
        inputs, labels = batch_of(kind or self.kind, tokens=self.tokens)
        context = self.pipeline.get("context", 1)
        groups, number = self.replicas // context, replica // context
        return {n: t.chunk(groups)[number] for n, t in inputs.items()}, labels.chunk(groups)[number]


class Found(NamedTuple):
    """What a rank has found of a case.

    Attributes:
        loss: Of a step.
        evaluated: Of an evaluation.
        grads: By name, of the parameters that are here.
        rows: Which rows they have of split ones.
        left: Chunks that are alive afterwards.
        moved: Bytes that this rank has exchanged with its helpers.
        sent: Bytes that have gone to the host.
    """

    loss: float
    evaluated: float
    grads: dict[str, Tensor]
    rows: dict[str, Rows]
    left: int
    moved: int
    sent: int


def exchangers(pipe: ElasticPipeline) -> list[Exchanger | None]:
    """What exchanges attention in each training pass from now on; filled as they begin."""
    model, found = pipe.model, list[Exchanger | None]()
    assert isinstance(model, Sliced)
    begin = model.begin_pass

    def watched(given: Any) -> None:
        begin(given)
        found.append(model._exchanger)

    model.begin_pass = watched  # type: ignore[method-assign]
    return found


def offloader_of(pipe: ElasticPipeline) -> Offloader:
    """What moves saved tensors to the host."""
    assert isinstance(pipe.model, Sliced)
    assert pipe.model.offloader is not None
    return pipe.model.offloader


def on_the_host(pipe: ElasticPipeline) -> tuple[int, int]:
    """Bytes that have gone to the host so far, and those that are there now; zeros without offload."""
    assert isinstance(pipe.model, Sliced)
    moved = pipe.model.offloader
    if moved is None or moved.host is None:
        return 0, 0
    return moved.host.sent_bytes, moved.host_bytes


def one_step(rank: int, size: int, cases: Sequence[Case]) -> list[Found]:
    """Two equal steps and an evaluation of every case."""
    found = []
    for case in cases:
        attention.CUT = case.cut
        pipe = case.pipe(model := case.model(), make_optimizer=no_update)
        assert isinstance(pipe.model, Sliced)
        passes, batch = exchangers(pipe), case.batch(pipe.replica)
        losses = [pipe.step(*batch)]
        here = {n: p for n, p in model.named_parameters() if not p.is_meta}
        # with zero=1, those of others are dropped
        grads = {n: p.grad.clone() for n, p in here.items() if p.grad is not None}
        losses.append(pipe.step(*batch))
        # sums are added in one order
        assert losses[0] == losses[1]
        last = passes[-1]
        assert last is None or not last.kept
        evaluated, (sent, there) = pipe.evaluate(*batch), on_the_host(pipe)
        assert there == 0
        rows = {n: some for n, p in here.items() if (some := rows_of(p)) is not None}
        moved = sum(last.moved_bytes) if last is not None else 0
        found.append(Found(losses[0], evaluated, grads, rows, len(pipe.model.store), moved, sent))
    return found


def check(cases: Sequence[Case], results: Sequence[Sequence[Found]]) -> None:
    """Compare what `one_step` has found, by rank, with each case's model whole in one process."""
    for number, case in enumerate(cases):
        every = [said[number] for said in results]
        losses, want, _ = alone(case.model(), [case.kind], make=no_update, tokens=case.tokens)
        evaluated = whole_loss(case.model(), case.kind, tokens=case.tokens)
        seen: dict[str, set[int]] = defaultdict(set)
        for found in every:
            mine = {n: want[n][r.start : r.stop] if (r := found.rows.get(n)) else want[n] for n in found.grads}
            difference = apart(found.grads, mine)
            print(case, found.loss / losses[0] - 1, found.evaluated / evaluated - 1, difference)
            assert found.left == 0
            assert abs(found.loss / losses[0] - 1) <= case.allowed, str(case)
            assert abs(found.evaluated / evaluated - 1) <= case.allowed, str(case)
            assert difference <= case.allowed, str(case)
            assert bool(found.rows) == bool(case.pipeline.get("split_vocabulary")), str(case)
            for name, grad in found.grads.items():
                start = found.rows[name].start if name in found.rows else 0
                seen[name] |= set(range(start, start + len(grad)))
        assert {n: len(rows) for n, rows in seen.items()} == {n: len(grad) for n, grad in want.items()}, str(case)
        ranks = len(every) // case.replicas
        for replica in (every[i : i + ranks] for i in range(0, len(every), ranks)):
            # some rank was helped, and something has left
            assert (sum(found.moved for found in replica) > 0) == (case.exchanges and ranks > 1), str(case)
            assert (sum(found.sent for found in replica) > 0) == bool(case.pipeline.get("offload")), str(case)
