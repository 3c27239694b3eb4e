"""A vocabulary split over the ranks of a pipeline, on real processes: everything is as with the whole one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

pytest.importorskip("transformers", reason="the models are transformers'")

import transformers

from pipeline_balance import init_empty_weights, load_pretrained
from pipeline_balance.control.controller import Controller
from pipeline_balance.elastic.adapters import Adapters
from pipeline_balance.pipeline.model.adapter import TransformersModel
from pipeline_balance.pipeline.model.vocabulary import IGNORED, Vocabulary, mark, rows_of
from pipeline_balance.pipeline.run.vocabulary import Head, VocabularyPasses
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.slices.options import SliceOptions
from pipeline_balance.spec import RankLimits, StageMap
from prophet.errors import SpecError
from prophet.ranks.process_group import ProcessGroupCollective
from tests.helpers.launch import run_gloo
from tests.helpers.sliced_models import FREE, adam, alone, apart, batch_of, model_of, no_update, whole_loss
from tests.helpers.transformers_models import LAYERS, VOCABULARY

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
UNITS, EXACT, SINGLE = LAYERS + 2, 1e-10, 1e-5
CPU = torch.device("cpu")
KINDS = ["plain", "packed", "padded", "plain"]


class Case:
    """One model, whose vocabulary is no multiple of the ranks, in slices if there are some."""

    def __init__(self, family: str, kind: str = "plain", *, slices: SliceOptions | None = None, **options: Any) -> None:
        self.family, self.kind, self.slices, self.options = family, kind, slices, options

    @property
    def allowed(self) -> float:
        return SINGLE if self.options.get("dtype") == torch.float32 else EXACT

    def model(self) -> Any:
        return model_of(self.family, **{"vocab_size": VOCABULARY + 1, **self.options})

    def pipe(self, model: Any, **more: Any) -> ElasticPipeline:
        given = {"make_optimizer": adam, "microbatches": 2, "timeout_s": 60.0, "slices": self.slices, **more}
        return ElasticPipeline.from_transformers(model, split_vocabulary=True, **given)


def rows(name: str, whole: dict[str, Tensor], model: nn.Module) -> Tensor:
    """What this rank has of a tensor."""
    found = rows_of(dict(model.named_parameters())[name])
    return whole[name] if found is None else whole[name][found.start : found.stop]


UNTIED = [
    Case("llama", "silent"),
    Case("gpt2", "packed"),
    Case("llama", "packed", dtype=torch.float32),
]
TIED = [Case("llama", "packed", tied=True), Case("gpt2", "padded", tied=True, dtype=torch.float32)]
EXCHANGE = SliceOptions(8, order="aligned", balance="exchange", exchange_costs=FREE)
SLICES = [
    Case("llama", "silent", slices=SliceOptions(4)),
    Case("qwen3", "packed", slices=EXCHANGE, tied=True),
]
MORE = [
    Case("llama", "packed", slices=SliceOptions(4, 2, recompute="full"), tied=True),
    Case("qwen2", "padded", slices=SliceOptions(4, order="aligned", recompute="selective"), dtype=torch.float32),
    Case("llama", "packed", slices=SliceOptions(3, balance="uneven", crossover_tokens=4)),
    Case("gpt2", "packed", slices=EXCHANGE),
    # no label is shifted, and the head has a bias
    Case("bert", "plain", dtype=torch.float32),
]


def _one_step(rank: int, size: int, cases: list[Case]) -> list[tuple[float, float, float, int]]:
    found = []
    for case in cases:
        losses, want, _ = alone(case.model(), [case.kind], make=no_update)
        pipe = case.pipe(model := case.model(), make_optimizer=no_update)
        batch = batch_of(case.kind)
        loss = pipe.step(*batch)
        assert pipe.step(*batch) == loss
        # softmax does not see a bias of all keys: what is left of its gradient is rounding
        named = [(n, p) for n, p in model.named_parameters() if not n.endswith("key.bias")]
        grads = {n: p.grad for n, p in named if p.grad is not None and not p.is_meta}
        evaluated = pipe.evaluate(*batch)
        # else it would be of equal slices alone
        if case.slices == EXCHANGE and size > 1:
            assert pipe.model.exchanging.verdict.pays  # type: ignore[attr-defined]
        mine = {n: g for n, g in want.items() if n in grads}
        cut = {n: rows(n, mine, model) for n in mine}
        other = whole_loss(case.model(), case.kind)
        # of every embedding and head some rows are here
        split = sum(rows_of(p) is not None for p in model.parameters())
        found.append((abs(loss / losses[0] - 1), abs(evaluated / other - 1), apart(grads, cut), split))
    return found


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, UNTIED),
        (2, [*TIED, *SLICES]),
        pytest.param(2, MORE, marks=pytest.mark.slow),
        pytest.param(1, [UNTIED[0], TIED[0], *SLICES], marks=pytest.mark.slow),
        pytest.param(4, [*UNTIED, *TIED, *SLICES, *MORE[1:]], marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_the_whole(size: int, cases: list[Case]) -> None:
    for said in run_gloo(_one_step, size, cases, timeout_s=300.0):
        for case, (loss, evaluated, grads, split) in zip(cases, said, strict=True):
            print(case.family, case.options, loss, evaluated, grads)
            assert max(loss, evaluated, grads) <= case.allowed
            assert split == (1 if case.options.get("tied") else 3 if case.family == "bert" else 2)


# --- the head alone ----------------------------------------------------------------------------------------------


def _beside_torchs(
    rank: int, size: int, dtype: torch.dtype, block_bytes: int, bias: bool
) -> tuple[float, float, float]:
    """Largest differences from torch's `loss_parallel` over the same rows: of the loss, of d(hidden), of d(weight)."""
    torch.manual_seed(0)
    tokens, hidden, words = 37, 16, 101
    x, head = torch.randn(tokens, hidden, dtype=dtype), nn.Linear(hidden, words, bias=bias).to(dtype)
    labels = torch.randint(words, (tokens,))
    labels[5:9] = IGNORED
    count = int((labels != IGNORED).sum())
    vocabulary = Vocabulary(nn.Embedding(words, hidden).to(dtype), head)
    mesh = init_device_mesh("cpu", (size,))
    theirs: list[Any] = []
    for p in head.parameters():
        part = p.detach().tensor_split(size)[rank].clone()
        one: Any = DTensor.from_local(part, mesh, [Shard(0)], shape=p.shape, stride=p.stride())
        theirs.append(one.requires_grad_())
    given: Any = DTensor.from_local(x.clone(), mesh, [Replicate()]).requires_grad_()
    with loss_parallel():
        loss: Any = F.cross_entropy(F.linear(given, *theirs), labels, ignore_index=IGNORED, reduction="sum") / count
        loss.backward()
    wanted, wanted_x = float(loss.detach().full_tensor()), given.grad.full_tensor()
    for p, some in vocabulary.rows_on(rank, size):
        p.data = p.data[some.start : some.stop].clone()
        mark(p, some)
    own = ProcessGroupCollective(None, timeout_s=30.0)
    passes = VocabularyPasses(vocabulary, lambda: own, 0, size - 1)
    passes.head = Head(head, block_bytes)
    last = rank == size - 1
    passes.add_up(0, x if last else None, labels, x)
    found = passes.loss(0, 1.0 / count, training=True)
    of_x = float((passes.hidden_gradient(0, x) - wanted_x).abs().max()) if last else 0.0
    passes.finish()
    pairs = [(p.grad, t.grad.to_local()) for p, t in zip(head.parameters(), theirs, strict=True)]
    of_weight = max(float((mine - other).abs().max()) for mine, other in pairs if mine is not None)
    return abs(float(found) / count - wanted) if found is not None else 0.0, of_x, of_weight


@pytest.mark.parametrize("block_bytes", [1, 37 * 8 * 7, 1 << 20])
def test_loss_and_gradients_are_those_of_torchs_loss_parallel(block_bytes: int) -> None:
    """One row, seven or all in a block; in float64 and float32, with a bias and without."""
    for dtype, allowed, bias in ((torch.float64, 1e-12, True), (torch.float32, 1e-6, False)):
        for said in run_gloo(_beside_torchs, 2, dtype, block_bytes, bias):
            print(dtype, said)
            assert max(said) <= allowed


# --- training --------------------------------------------------------------------------------------------------

MAPS: dict[int, tuple[StageMap, StageMap]] = {
    2: (StageMap((0, 2, UNITS), (0, 1)), StageMap((0, 4, UNITS), (1, 0))),
    4: (StageMap((0, 1, 2, 4, UNITS), (0, 1, 2, 3)), StageMap((0, 2, 3, 4, UNITS), (3, 1, 0, 2))),
}


def _twenty(rank: int, size: int, case: Case, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """20 steps of Adam over stages that move, with clipping; after ten the run goes on in another pipeline."""
    losses: list[float] = []
    for half in range(2):
        first, second = MAPS.get(size, (None, None))
        pipe = case.pipe(case.model(), stage_map=first)
        if half:
            pipe.load(folder)
        for step in range(10):
            if step == 5 and second is not None:
                pipe.rebuild(second)
            losses.append(pipe.step(*batch_of(KINDS[step % 4]), max_norm=0.5))
        pipe.save(folder)
    return losses, pipe.state_dict()


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (2, Case("llama")),
        pytest.param(1, Case("llama", tied=True), marks=pytest.mark.slow),
        pytest.param(4, Case("llama"), marks=pytest.mark.slow),
        # without a bias of keys, whose gradient is rounding that Adam makes steps of
        pytest.param(2, Case("llama", dtype=torch.float32), marks=pytest.mark.slow),
        pytest.param(4, Case("gpt2", tied=True, slices=SliceOptions(4)), marks=pytest.mark.slow),
        pytest.param(2, Case("qwen3", tied=True, slices=EXCHANGE), marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_of_adam_are_those_of_the_whole(size: int, case: Case, tmp_path: Path) -> None:
    said = run_gloo(_twenty, size, case, str(tmp_path), timeout_s=300.0)
    kinds = [KINDS[step % 4] for step in range(10)] * 2
    losses, _, state = alone(case.model(), kinds, max_norm=0.5)
    for mine, _ in said:
        assert mine == pytest.approx(losses, rel=case.allowed)
    found = said[0][1]
    assert found.keys() == state.keys()
    assert apart(found, state) <= 10 * case.allowed


def _held(rank: int, size: int) -> tuple[int, int, int]:
    """Bytes of the head here, logits included; of the unsplit weights and gradients; of a block."""
    case = Case("llama", vocab_size=4001)
    pipe = case.pipe(model := case.model(), make_optimizer=no_update)
    executor = pipe.stages.executor
    assert executor is not None
    assert executor.vocabulary is not None
    head, most = executor.vocabulary.head, [0]
    head.block_bytes = 1 << 14
    logits = head._logits

    def watched(hidden: Tensor, start: int, stop: int) -> Tensor:
        found = logits(hidden, start, stop)
        most[0] = max(most[0], found.numel() * found.element_size())
        return found

    head._logits = watched  # type: ignore[method-assign]
    pipe.step(*batch_of())
    weight = model.lm_head.weight
    assert weight.grad is not None
    here = sum(t.untyped_storage().nbytes() for t in (weight, weight.grad))
    return here + most[0], 2 * 4001 * weight.shape[1] * weight.element_size(), head.block_bytes


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_rank_holds_more_of_the_head_than_its_part_and_a_block(size: int) -> None:
    for here, whole, block in run_gloo(_held, size):
        print(here, whole / size, block)
        assert here <= 1.1 / size * whole + block


# --- modules, replicas, accumulation -------------------------------------------------------------------------------

WORDS, DIM, ROWS = 11, 8, 16


def _layers(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Embedding(WORDS, DIM, padding_idx=2), *blocks, nn.Linear(DIM, WORDS, bias=bias)).double()


def _words(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(WORDS, (ROWS,), generator=generator)
    labels = (ids * 3 + 1) % WORDS
    labels[::5] = IGNORED
    return ids, labels


def _chain(rank: int, size: int, replicas: int, more: dict[str, Any], folder: str) -> tuple[list[float], Any, int]:
    pipe = ElasticPipeline.from_modules(
        _layers(), nn.functional.cross_entropy, split_vocabulary=True, make_optimizer=adam, microbatches=2,
        replicas=replicas, timeout_s=60.0, **more,
    )  # fmt: skip
    losses = []
    for step in range(6):
        if step == 3:
            # every rank has a stage, and another one than before
            pipe.rebuild(StageMap((*range(pipe.ranks), pipe.stage_map.layers), tuple(reversed(range(pipe.ranks)))))
        ids, labels = (t.chunk(replicas)[pipe.replica] for t in _words(step))
        half = len(ids) // 2
        pipe.step(ids[:half], labels[:half], update=False)
        losses.append(pipe.step(ids[half:], labels[half:], max_norm=0.1))
    pipe.save(folder)
    return losses, pipe.state_dict(), pipe.progress.updates


def _plain_chain() -> tuple[list[float], dict[str, Tensor]]:
    layers = _layers()
    optimizer, losses = adam(list(layers.named_parameters())), []
    for step in range(6):
        optimizer.zero_grad()
        ids, labels = _words(step)
        loss = F.cross_entropy(layers(ids), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(layers.parameters(), 0.1)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, layers.state_dict()


def _resumed(rank: int, size: int, folder: str) -> tuple[dict[str, Tensor], list[str]]:
    """The checkpoint in a pipeline without the split, and its tensors."""
    pipe = ElasticPipeline.from_modules(
        _layers(), nn.functional.cross_entropy, make_optimizer=adam, microbatches=2, timeout_s=60.0
    )
    saved = pipe.load(folder)
    return pipe.state_dict(), sorted(f"{t.name} {list(t.shape)}" for t in saved.space.tensors)


def _unsplit(rank: int, size: int, folder: str) -> None:
    pipe = ElasticPipeline.from_modules(
        _layers(), nn.functional.cross_entropy, make_optimizer=adam, microbatches=2, timeout_s=60.0
    )
    pipe.step(*_words(0))
    pipe.save(folder)


@pytest.mark.parametrize(
    ("size", "replicas", "more"),
    [
        (2, 1, {"split_backward": True}),
        pytest.param(4, 2, {"zero": 1}, marks=pytest.mark.slow),
        pytest.param(4, 1, {"schedule": "gpipe"}, marks=pytest.mark.slow),
    ],
)
def test_modules_train_as_whole_and_their_files_are_the_unsplit_models(
    size: int, replicas: int, more: dict[str, Any], tmp_path: Path
) -> None:
    """Gradients are added up over two calls, and clipped; the embedding has a word that does not train."""
    losses, state = _plain_chain()
    said = run_gloo(_chain, size, replicas, more, str(tmp_path / "split"))
    for mine, _, updates in said:
        assert updates == 6
        assert mine == pytest.approx(losses, rel=1e-10)
    assert apart(said[0][1], state) <= 1e-9
    loaded = run_gloo(_resumed, 1, str(tmp_path / "split"))[0]
    assert apart(loaded[0], said[0][1]) == 0.0
    run_gloo(_unsplit, 2, str(tmp_path / "whole"))
    assert loaded[1] == run_gloo(_resumed, 1, str(tmp_path / "whole"))[0][1]


# --- what is refused -------------------------------------------------------------------------------------------------


def _reasons(rank: int, size: int) -> dict[str, str]:
    """What every attempt raises on this rank."""
    found: dict[str, str] = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
            found[name] = "nothing"
        except SpecError as error:
            found[name] = str(error)

    given: dict[str, Any] = {"make_optimizer": adam, "microbatches": 2, "timeout_s": 20.0, "split_vocabulary": True}

    def modules(layers: nn.Sequential, loss: Any = nn.functional.cross_entropy, **more: Any) -> ElasticPipeline:
        return ElasticPipeline.from_modules(layers, loss, **{**given, **more})

    few = nn.Sequential(nn.Embedding(2, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 2))
    attempt("few words", lambda: modules(few))
    attempt("other modules", lambda: modules(nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))))
    attempt("one rank alone", lambda: modules(_layers(), split_vocabulary=rank == 0))
    attempt("idle", lambda: modules(_layers(), stage_map=StageMap((0, 5), (1,))))
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    attempt("smoothed", lambda: modules(_layers(), smooth).step(*_words(0)))
    attempt("autocast", lambda: _under_autocast(modules(_layers())))
    attempt("labels", lambda: modules(_layers()).step(_words(0)[0], None))
    for family in ("gemma", "mixtral"):
        model = model_of(family, torch.float32)
        attempt(family, lambda model=model: ElasticPipeline.from_transformers(model, **given))
    scaled = model_of("llama")
    own = scaled.loss_function
    scaled.loss_function = lambda *a, **b: 2.0 * own(*a, **b)
    attempt("scaled loss", lambda: ElasticPipeline.from_transformers(scaled, **given))
    attempt("job", lambda: Adapters(TransformersModel(model_of("llama"), split_vocabulary=True), None, None, None, CPU))
    pipe = modules(_layers())
    attempt("memory", lambda: Controller(pipe, RankLimits.uniform(size, memory_bytes=1 << 30)))
    attempt("group", lambda: pipe.change_group(None, {}))
    before = pipe.step(*_words(0))
    attempt("map", lambda: pipe.rebuild(StageMap((0, 5), (0,))))
    found["after"] = str(pipe.step(*_words(0)) < before)
    return found


def _under_autocast(pipe: ElasticPipeline) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe.step(*_words(0))


def test_what_cannot_be_split_is_refused_by_name_on_all_ranks() -> None:
    first, *others = run_gloo(_reasons, 3, timeout_s=200.0)
    for name, reason in first.items():
        print(name, reason)
    assert all(said == first for said in others)
    assert first.pop("after") == "True"
    wanted = {
        "few words": "a vocabulary of 2 words cannot be split over 3 ranks",
        "other modules": "needs an nn.Embedding in front of the layers",
        "one rank alone": "split_vocabulary",
        "idle": r"\[0, 2\] have none",
        "smoothed": "the loss of CrossEntropyLoss is another one",
        "autocast": "does not run under autocast",
        "labels": "a label for each of them",
        "gemma": "got GemmaTextScaledWordEmbedding and Linear",
        "mixtral": "MixtralForCausalLM adds its routers' loss",
        "scaled loss": "the loss of LlamaForCausalLM is another one",
        "job": "a job cannot split the vocabulary",
        "memory": "knows no limits of memory",
        "group": "rows stay on their ranks",
        "map": r"\[1, 2\] have none",
    }
    for name, reason in wanted.items():
        assert re.search(reason, first[name]), (name, first[name])
    assert "nothing" not in first.values()


# --- weights of a folder ---------------------------------------------------------------------------------------------


def _loaded(rank: int, size: int, folder: str) -> tuple[float, bool]:
    with init_empty_weights():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder)).double()
    pipe = Case("llama").pipe(model)
    load_pretrained(pipe, folder)
    loss = pipe.step(*batch_of())
    pipe.save_pretrained(Path(folder) / "after")
    return loss, model.lm_head.weight.shape[0] < VOCABULARY


def test_each_rank_reads_its_rows_of_a_folder(tmp_path: Path) -> None:
    whole = model_of("llama")
    whole.save_pretrained(tmp_path)
    said = run_gloo(_loaded, 2, str(tmp_path))
    (loss,), _, state = alone(transformers.LlamaForCausalLM.from_pretrained(tmp_path).double(), ["plain"])
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "after").state_dict()
    for mine, part in said:
        assert part
        assert abs(mine / loss - 1) <= SINGLE
    assert apart(found, state) <= SINGLE
