"""A recording holds what routers chose, to the token, and leaves no trace on the model; counted anew by oracles."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import re
import runpy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import prophet
from prophet.cli import OK, main
from prophet.convert.seen import Hook
from prophet.errors import ConversionError, TraceError
from prophet.machine.config_json import read_config
from prophet.machine.recorded import recorded_sizes
from prophet.machine.sizes import ModelSizes
from prophet.spec import IntArray
from prophet.traces import read_trace
from tests.helpers.hand_written import (
    DIM,
    EXPERTS,
    FOUND,
    NAMED,
    ExpertChoice,
    FloatSoftmax,
    HandWritten,
    SwitchCapacity,
)
from tests.helpers.launch import EXAMPLES
from tests.helpers.moe_models import FAMILIES, VOCAB, batches, hugging_face, loss_of, transformers
from tests.helpers.support import TinyModel, seeded

STEPS, RANKS = 3, 2
MODULE = importlib.import_module("prophet.convert.record")
Passes = list[list[Tensor]]  # [step][rank]


def small() -> Any:
    """A model whose blocks are known, so that nothing needs trying."""
    return hugging_face("mixtral")


def steps_of(ids: Callable[[int], list[Tensor]], steps: int = STEPS) -> Passes:
    return [ids(s) for s in range(steps)]


def recorded(model: nn.Module, path: Path, passes: Passes, run: Callable[[Tensor], Any], **options: Any) -> Any:
    """The trace of these passes."""
    with prophet.record(model, path, ranks=len(passes[0]), **options):
        for by_rank in passes:
            for x in by_rank:
                run(x)
    return read_trace(path)


def counted(passes: Passes, chosen: Callable[[Tensor], list[Tensor]], experts: int) -> IntArray:
    """The oracle's counts [T, L, R, E]. chosen: of a microbatch, by layer, the expert of every choice."""
    return np.array(
        [
            [
                [np.bincount(ids.flatten().numpy(), minlength=experts) for ids in layers]
                for layers in zip(*steps, strict=True)
            ]
            for steps in ([chosen(x) for x in by_rank] for by_rank in passes)
        ]
    )


# --- Hugging Face ---


def choices_of(family: str, block: Any, logits: Tensor) -> Tensor:
    """What a family's paper says that a router with these logits [N, E] chooses, [N, K]."""
    config = block.config if hasattr(block, "config") else None
    top_k: int = getattr(block, "top_k", None) or getattr(block, "router", None or getattr(block, "gate", None)).top_k
    if not family.startswith("deepseek"):
        return logits.topk(top_k).indices
    assert config is not None
    if family == "deepseek_v2":
        scores = logits.softmax(dim=-1)
        by_group = scores.unflatten(1, (config.n_group, -1)).amax(dim=-1)
    else:
        scores = logits.sigmoid() + block.gate.e_score_correction_bias
        by_group = scores.unflatten(1, (config.n_group, -1)).topk(2).values.sum(dim=-1)
    allowed = torch.zeros_like(by_group).scatter(1, by_group.topk(config.topk_group).indices, 1.0)
    return scores.masked_fill(allowed.repeat_interleave(8 // config.n_group, dim=1) == 0, 0.0).topk(top_k).indices


@contextmanager
def noted_logits(model: Any) -> Iterator[list[tuple[Any, Tensor]]]:
    """(block, logits) of every router, in the order in which they ran."""
    found: list[tuple[Any, Tensor]] = []
    hooks = []
    for layer in model.model.layers:
        router = getattr(layer.mlp, "gate", None) or layer.mlp.router

        def note(_: Any, __: Any, answer: Any, block: Any = layer.mlp) -> None:
            found.append((block, answer[0].detach().float()))

        hooks.append(router.register_forward_hook(note))
    yield found
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face(family: str, tmp_path: Path) -> None:
    model = hugging_face(family)
    passes = steps_of(lambda s: batches(RANKS, s))
    trace = recorded(model, tmp_path / "r.npz", passes, lambda ids: loss_of(model, ids)[0].backward())

    def chosen(ids: Tensor) -> list[Tensor]:
        with noted_logits(model) as found, torch.no_grad():
            loss_of(model, ids)
        return [choices_of(family, block, logits) for block, logits in found]

    assert np.array_equal(trace.counts, counted(passes, chosen, 8))
    assert trace.iteration.tolist() == [0, 1, 2]
    if family.startswith("deepseek"):
        assert trace.meta["head_dim"] == (8 + 4 + 8) // 2  # queries and keys; values


def test_sizes_of_a_config(tmp_path: Path) -> None:
    model = hugging_face("qwen3")
    trace = recorded(model, tmp_path / "r.npz", steps_of(lambda s: batches(RANKS, s)), lambda ids: model(input_ids=ids))
    model.config.save_pretrained(tmp_path)
    assert dict(trace.meta) == {
        "model": "Qwen3MoeForCausalLM",
        "source": "prophet.record",
        "dim": 16,
        "hidden": 12,
        "experts": 8,
        "top_k": 2,
        "activation": "swiglu",
        "bias": False,
        "dtype": "float32",
        "tokens": 14,
        "layers": 2,
        "moe_layers": 2,
        "dense_params": read_config(tmp_path).met_by_every_token,
        "sequence": 7,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "vocabulary": VOCAB,
    }


def test_sizes_of_a_model_with_dense_blocks(tmp_path: Path) -> None:
    """Every fourth block has experts: what the others have is not charged to those."""
    model: Any = hugging_face("qwen3", num_hidden_layers=8, decoder_sparse_step=4)
    run = steps_of(lambda s: batches(RANKS, s), 1)
    sizes = ModelSizes(**recorded_sizes(recorded(model, tmp_path / "r.npz", run, model).meta, "r.npz"))
    model.config.save_pretrained(tmp_path)
    want = read_config(tmp_path)
    assert (sizes.layers, sizes.blocks_with_experts, sizes.dense_hidden) == (8, 2, 20)
    assert (want.layers, want.blocks_with_experts, want.dense_hidden) == (8, 2, 20)
    assert sizes.met_by_every_token == want.met_by_every_token
    model.model.layers = model.model.layers[:4]  # a part of the model that the config describes
    part = recorded(model, tmp_path / "r.npz", run, model).meta
    assert (part["layers"], part["moe_layers"]) == (4, 1)
    assert part["dense_params"] == want.met_by_every_token


# --- lists ---


def tokens(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return list(torch.randn(RANKS, 2, 6, DIM, generator=generator, dtype=torch.float64))


def rows_called(twin: nn.Module, x: Tensor) -> list[list[int]]:
    """The rows that each expert of each layer computes for `x`; the experts count for themselves from then on."""
    lists = [m for m in twin.modules() if isinstance(m, nn.ModuleList) and len(m) == EXPERTS]
    found = [[0] * EXPERTS for _ in lists]
    for rows, experts in zip(found, lists, strict=True):
        for e, expert in enumerate(experts):

            def count(x: Tensor, e: int = e, rows: list[int] = rows, own: Any = expert.forward) -> Any:
                rows[e] += x.numel() // x.shape[-1]
                return own(x)

            expert.forward = count  # type: ignore[method-assign]
    twin(x)
    return found


QUICK = (SwitchCapacity, ExpertChoice)
KINDS = [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in (*FOUND, *NAMED)]


@pytest.mark.parametrize("kind", KINDS)
def test_lists_of_experts(kind: type[nn.Module], tmp_path: Path) -> None:
    model = HandWritten(kind)
    passes = steps_of(tokens)
    options = {"experts": "blocks.*.experts"} if kind in NAMED else {}

    def run(x: Tensor) -> None:
        with seeded(int(1000 * x.abs().sum())):
            model(x)[0].sum().backward()

    def rows(x: Tensor) -> list[list[int]]:
        twin = HandWritten(kind)
        with seeded(int(1000 * x.abs().sum())):
            return rows_called(twin, x)

    trace = recorded(model, tmp_path / "r.npz", passes, run, **options)
    wanted = np.array([[rows(x) for x in by_rank] for by_rank in passes]).swapaxes(1, 2)
    assert np.array_equal(trace.counts, wanted)
    assert trace.meta["tokens"] == 12


def test_a_list_against_its_routers_logits(tmp_path: Path) -> None:
    """Not by rows: the two largest of the softmax, in the block as FloatSoftmax writes it down."""
    model = HandWritten(FloatSoftmax)
    passes = steps_of(tokens)
    trace = recorded(model, tmp_path / "r.npz", passes, lambda x: model(x)[0].sum().backward())

    def chosen(x: Tensor) -> list[Tensor]:
        logits: list[Tensor] = []
        hooks = [b.gate.register_forward_hook(lambda _, __, y: logits.append(y.detach())) for b in model.blocks]
        model(x)
        for hook in hooks:
            hook.remove()
        return [found.topk(2).indices for found in logits]

    assert np.array_equal(trace.counts, counted(passes, chosen, EXPERTS))
    assert trace.meta["top_k"] == 2
    assert not {"heads", "vocabulary", "sequence"} & set(trace.meta)


# --- DeepSpeed ---


def deepspeed_net(**options: Any) -> nn.Module:
    layers = pytest.importorskip("deepspeed.moe.layer", reason="needs deepspeed: pip install '.[deepspeed]'")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            expert = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
            self.embed = nn.Embedding(VOCAB, 8)
            self.layers = nn.ModuleList(layers.MoE(8, expert, num_experts=4, **options) for _ in range(2))
            for p in self.parameters():
                nn.init.normal_(p, std=0.5)
            self.chosen: list[Tensor] = []

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            self.chosen = []
            for layer in self.layers:
                y, _, counts = layer(x)  # of all choices
                x = x + y
                self.chosen.append(counts.detach().long())
            return x

    with seeded(3):
        return Net()


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({"k": 2, "drop_tokens": False}, 14),
        ({"k": 1, "capacity_factor": 0.7, "min_capacity": 1}, 3),  # 14 tokens, 4 experts
        ({"k": 3, "capacity_factor": 0.8, "min_capacity": 1}, 9),
    ],
)
def test_deepspeed(options: dict[str, Any], room: int | None, tmp_path: Path) -> None:
    """What found no room is not there, and what fills up a buffer neither."""
    model: Any = deepspeed_net(**options)
    passes = steps_of(lambda s: batches(RANKS, s))
    wanted = []

    def run(ids: Tensor) -> None:
        model(ids).sum().backward()
        wanted.append(torch.stack(model.chosen).clamp(max=room).numpy())

    trace = recorded(model, tmp_path / "r.npz", passes, run)
    assert np.array_equal(trace.counts, np.array(wanted).reshape(STEPS, RANKS, 2, 4).swapaxes(1, 2))
    assert (trace.meta["top_k"], trace.meta["hidden"], trace.meta["tokens"]) == (options["k"], 12, 14)


@pytest.mark.parametrize("kind", ["hugging face", "list", "deepspeed"])
def test_two_lines_and_a_command(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "routing.npz"
    model: Any = {
        "hugging face": lambda: hugging_face("mixtral"),
        "list": lambda: HandWritten(FloatSoftmax),
        "deepspeed": lambda: deepspeed_net(k=2),
    }[kind]()
    with prophet.record(model, file, ranks=4):
        for step in range(12):
            model(tokens(step)[0] if kind == "list" else batches(1, step)[0])
    capsys.readouterr()  # DeepSpeed prints
    assert main(["plan", str(file), "--json"]) == OK
    answer = json.loads(capsys.readouterr().out)
    assert answer["trace"]["ranks"] == 4
    assert answer["trace"]["top_k"] == 2
    assert all(p["predicted_layer_s"] > 0 for p in answer["planners"])


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It names a command, which runs."""
    transformers()
    monkeypatch.setattr("sys.argv", ["record_trace.py", "--out", str(tmp_path / "r.npz"), "--steps", "5"])
    runpy.run_path(str(EXAMPLES / "record_trace.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(r"step 5: loss \d", said)
    words = said.split("Now run: prophet ")[1].split()
    assert main([*words, "--json"]) == OK
    assert json.loads(capsys.readouterr().out)["trace"]["ranks"] == 8


def test_what_is_said_of_sizes_makes_a_models_sizes(tmp_path: Path) -> None:
    """`prophet plan` builds them from the fields of the same names."""
    names = {f.name for f in fields(ModelSizes)}
    for model, run in ((small(), batches(1)[0]), (HandWritten(FloatSoftmax), tokens(0)[0])):
        trace = recorded(model, tmp_path / "r.npz", [[run]], model)
        sizes = ModelSizes(name=trace.meta["model"], **{k: v for k, v in trace.meta.items() if k in names})
        assert {*trace.meta} - names == {"model", "source", "dtype", "tokens"}
        assert sizes.met_by_every_token == trace.meta["dense_params"]
        assert sizes.blocks_with_experts == 2


# --- what a recording leaves alone ---


def everything(model: nn.Module, path: Path | None, passes: Passes) -> list[Any]:
    """Logits, gradients, buffers, random state and hooks after some training."""
    torch.manual_seed(5)
    found: list[Any] = []
    with prophet.record(model, path, ranks=RANKS) if path else seeded(5):
        torch.manual_seed(6)
        for by_rank in passes:
            for ids in by_rank:
                loss, logits = loss_of(model, ids)
                loss.backward()
                found += [logits.detach(), torch.rand(3)]
        found += [list(model.state_dict()), *model.state_dict().values(), torch.get_rng_state()]
    found += [p.grad for p in model.parameters()]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    found.append([len(getattr(m, kind)) for m in model.modules() for kind in hooks])
    return found


def test_a_recording_changes_nothing(tmp_path: Path) -> None:
    passes = steps_of(lambda s: batches(RANKS, s))
    options = {"attention_dropout": 0.2, "router_jitter_noise": 0.1}
    plain, watched = (
        everything(hugging_face("mixtral", **options), path, passes) for path in (None, tmp_path / "r.npz")
    )
    for want, got in zip(plain, watched, strict=True):
        assert torch.equal(want, got) if isinstance(want, Tensor) else want == got


def test_the_random_state_stays_where_blocks_are_tried(tmp_path: Path) -> None:
    model = HandWritten(FloatSoftmax)
    before = torch.get_rng_state()
    with prophet.record(model, tmp_path / "r.npz", ranks=1):
        assert torch.equal(torch.get_rng_state(), before)
        model(tokens(0)[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_computes_again_does_not_count(reentrant: bool, tmp_path: Path) -> None:
    passes = steps_of(lambda s: batches(RANKS, s))
    plain = hugging_face("mixtral")
    want = recorded(plain, tmp_path / "a.npz", passes, lambda ids: loss_of(plain, ids)[0].backward())
    model: Any = hugging_face("mixtral")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    hook = model.model.layers[0].mlp.experts.register_forward_pre_hook(count)
    got = recorded(model, tmp_path / "b.npz", passes, lambda ids: loss_of(model, ids)[0].backward())
    hook.remove()
    assert runs == 2 * STEPS * RANKS, "nothing was computed again"
    assert np.array_equal(got.counts, want.counts)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_whole_model_that_is_checkpointed(reentrant: bool, tmp_path: Path) -> None:
    model = HandWritten(FloatSoftmax)
    passes = steps_of(tokens)
    want = recorded(model, tmp_path / "a.npz", passes, lambda x: model(x)[0].sum().backward())

    def run(x: Tensor) -> None:
        y: Any = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
        y[0].sum().backward()

    assert np.array_equal(recorded(model, tmp_path / "b.npz", passes, run).counts, want.counts)


def test_only_whole_passes_of_the_model_count(tmp_path: Path) -> None:
    """Neither blocks that run by themselves, nor a pass that fails half-way, nor passes of a copy."""
    model = HandWritten(FloatSoftmax)
    passes = steps_of(tokens)
    want = recorded(model, tmp_path / "a.npz", passes, model)

    def run(x: Tensor) -> None:
        model.blocks[0](x)
        first, model.blocks[1].forward = model.blocks[1].forward, None  # type: ignore[method-assign, assignment]
        with pytest.raises(TypeError):
            model(x)
        model.blocks[1].forward = first  # type: ignore[method-assign]
        with torch.inference_mode():
            model(x)
        copy.deepcopy(model)(x)
        pickle.loads(pickle.dumps(Hook(print)))(x)

    assert np.array_equal(recorded(model, tmp_path / "b.npz", passes, run).counts, want.counts)


def test_evaluation_can_be_left_out(tmp_path: Path) -> None:
    model = small()
    passes = steps_of(lambda s: batches(RANKS, s))

    def run(x: Tensor) -> None:
        model.eval()(x.flip(0))
        model.train()(x)

    want = recorded(model, tmp_path / "a.npz", passes, model)
    got = recorded(model, tmp_path / "b.npz", passes, run, training_only=True)
    assert np.array_equal(got.counts, want.counts)


def test_memory_is_bounded_and_looked_at_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for three passes of four ranks, counts come to the host four times in twelve, and are the same."""
    from prophet.convert import seen

    model = small()
    passes = steps_of(lambda s: batches(4, s))
    want = recorded(model, tmp_path / "a.npz", passes, model)
    monkeypatch.setattr(MODULE, "MOST_BYTES", 3 * 8 * 2 * EXPERTS)
    looks = []
    take = seen.Seen.take
    monkeypatch.setattr(seen.Seen, "take", lambda self: (looks.append(self.name), take(self))[1])
    got = recorded(model, tmp_path / "b.npz", passes, model)
    assert np.array_equal(got.counts, want.counts)
    assert looks == 4 * ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


# --- how it ends ---


def test_an_incomplete_step_is_left_out(tmp_path: Path) -> None:
    model, x = small(), batches(1)[0]

    def train() -> None:
        with prophet.record(model, tmp_path / "r.npz", ranks=4):
            for _ in range(7):
                model(x)

    with pytest.warns(UserWarning, match=r"r\.npz: 3 of 4 passes of the last step came, so it was left out"):
        train()
    assert read_trace(tmp_path / "r.npz").steps == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_keeps_what_was_whole(error: type[BaseException], tmp_path: Path) -> None:
    model, x = small(), batches(1)[0]

    def train(passes: int) -> None:
        with prophet.record(model, tmp_path / "r.npz", ranks=2):
            for _ in range(passes):
                model(x)
            raise error

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error):
            train(1)
    assert not list(tmp_path.iterdir())
    with pytest.raises(error):
        train(5)
    assert read_trace(tmp_path / "r.npz").steps == 2


def test_too_few_passes_write_nothing(tmp_path: Path) -> None:
    model = small()
    text = (
        r"r\.npz: expected at least 8 forward passes of MixtralForCausalLM, one for each of ranks=8, got 1: nothing was"
    )
    with pytest.raises(TraceError, match=text), prophet.record(model, tmp_path / "r.npz"):
        model(batches(1)[0])
    assert not list(tmp_path.iterdir())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_model_whose_blocks_are_not_seen(tmp_path: Path) -> None:
    model: Any = hugging_face("deepseek_v3")

    def run() -> None:
        with prophet.record(model, tmp_path / "r.npz", ranks=2):
            model.model.layers = nn.ModuleList()
            for x in batches(2):
                model(x)

    with pytest.raises(
        TraceError, match=r"in 2 passes model\.layers\.0\.mlp\.experts was never seen to choose an expert"
    ):
        run()
    assert not list(tmp_path.iterdir())


def test_only_process_0_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others hang nothing on the blocks, and end with the same error if there are too few passes."""
    monkeypatch.setattr(MODULE, "process_rank", lambda: 1)
    model = small()
    with prophet.record(model, tmp_path / "r.npz", ranks=2):
        assert not any(m._forward_pre_hooks for layer in model.model.layers for m in layer.modules())
        for x in batches(2):
            model(x)
    with pytest.raises(TraceError, match="got 0"), prophet.record(model, tmp_path / "r.npz", ranks=2):
        pass
    assert not list(tmp_path.iterdir())


# --- refusals, before anything is written ---


class Top1(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, experts), nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens, y = x.reshape(-1, DIM), torch.zeros_like(x).view(-1, DIM)
        chosen = self.gate(tokens).argmax(dim=-1)
        for e, expert in enumerate(self.experts):
            y[chosen == e] = expert(tokens[chosen == e])
        return y.view(x.shape)


def two_sizes() -> nn.Module:
    return nn.Sequential(Top1(8), Top1(4))


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (lambda: nn.Linear(2, 2), {}, "no MoE block found: neither experts of"),
        (lambda: 3, {}, r"record\(\): model must be a torch\.nn\.Module, got 3"),
        (small, {"adapters": 3}, r"record\(\): adapters must be a sequence of .*Adapter.*, got 3"),
        (small, {"experts": 3}, r"record\(\): experts must be .*, got 3"),
        (small, {"training_only": "no"}, r"record\(\): training_only must be .*, got 'no'"),
        (TinyModel, {}, r"prophet\.MoE already: prophet\.monitor\(engine, folder\) writes what they route"),
        (two_sizes, {}, r"expected MoE blocks of one size, .*: 0\.experts has 8 experts.*; 1\.experts has 4 experts"),
        (small, {"ranks": 3}, r"ranks: expected a divisor of the 8 experts \(1, 2, 4, 8\)"),
        (small, {"ranks": 0}, "ranks: expected a whole number of at least 1, got 0"),
        (small, {"ranks": "8"}, r"record\(\): ranks must be .*, got '8'"),
        (small, {"experts": "x"}, "experts='x' names no list of at least two modules"),
    ],
)
def test_refusals(make: Callable[[], Any], options: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text), prophet.record(make(), tmp_path / "r.npz", **options):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("r.json", r"expected a file whose name ends in \.npz, got a name that ends in \.json"),
        (".", r"expected a file whose name ends in \.npz, got a folder"),
        ("file/r.npz", "expected a place to write to: "),
    ],
)
def test_a_file_that_cannot_be_written(name: str, text: str, tmp_path: Path) -> None:
    """Said before the first pass."""
    (tmp_path / "file").write_text("")
    model = small()
    with pytest.raises(TraceError, match=text), prophet.record(model, tmp_path / name, ranks=2):
        raise AssertionError("a pass could begin")
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_recording_is_made_once(tmp_path: Path) -> None:
    model = small()
    recording = prophet.record(model, tmp_path / "r.npz", ranks=1)
    with recording:
        model(batches(1)[0])
    with pytest.raises(RuntimeError, match=r"call prophet\.record again"), recording:
        pass


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model(family: str, tmp_path: Path) -> None:
    model = hugging_face(family)
    prophet.convert(model, verify=False)
    with pytest.raises(ConversionError, match=r"prophet\.MoE already: prophet\.monitor\(engine, folder\) writes what"):
        prophet.record(model, tmp_path / "r.npz")


def test_a_path_is_checked() -> None:
    path: Any = 123
    with pytest.raises(ValueError, match=r"record\(\): path must be .*, got 123"):
        prophet.record(small(), path)


def test_a_file_is_recorded_once_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever name; the first recording stays what it is, and its file is where it began."""
    model, x = small(), batches(1)[0]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with prophet.record(model, "r.npz", ranks=1):
        monkeypatch.chdir(tmp_path / "elsewhere")
        text = r"r\.npz: expected a file of its own, got that of a recording that has not ended"
        with pytest.raises(TraceError, match=text), prophet.record(model, "../r.npz", ranks=1):
            raise AssertionError("a pass could begin")
        model(x)
    assert read_trace(tmp_path / "r.npz").steps == 1
    assert not list((tmp_path / "elsewhere").iterdir())

    def train(passes: int) -> None:
        with prophet.record(model, tmp_path / "r.npz", ranks=1):
            for _ in range(passes):
                model(x)
            raise KeyError

    for passes in (0, 2):  # free again, whether something was written or not
        with pytest.raises(KeyError):
            train(passes)
    assert read_trace(tmp_path / "r.npz").steps == 2
