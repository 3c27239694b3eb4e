"""Converting without any framework: the old form with lists of experts, adapters of one's own, and users' mistakes."""

from __future__ import annotations

import copy
import dataclasses
import gc
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import prophet
from prophet.convert import (
    Adapter,
    ExpertsSpec,
    ExpertWeights,
    converted,
    load_original_state_dict,
    original_state_dict,
)
from prophet.convert.checks import check_no_optimizer
from prophet.convert.trials import verify
from prophet.errors import ConversionError, RoutingError
from prophet.ranks.threads import ThreadWorld
from tests.helpers.expert_lists import (
    DIM,
    EXPERTS,
    HIDDEN,
    DeepseekV3MoE,
    Expert,
    MixtralSparseMoeBlock,
    Net,
    Qwen2MoeSparseMoeBlock,
    net_loss,
)
from tests.helpers.launch import on_processes
from tests.helpers.moe_models import alone, batches, compare, hugging_face, layers_of, together
from tests.helpers.support import on_threads


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("block", [MixtralSparseMoeBlock, Qwen2MoeSparseMoeBlock, DeepseekV3MoE])
def test_lists_of_experts(block: type[nn.Module], ranks: int) -> None:
    model = Net(block)
    steps = [batches(ranks, s) for s in range(3)]
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    found = on_threads(ranks, lambda group: together(copies[group.rank], steps, group, net_loss))
    compare(alone(model, steps, net_loss), found)


@pytest.mark.parametrize("block", [MixtralSparseMoeBlock, Qwen2MoeSparseMoeBlock, DeepseekV3MoE])
def test_revert_and_state_dicts_are_exact(block: type[nn.Module]) -> None:
    model = Net(block)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    copies = [Net(block) for _ in range(2)]

    def body(group: Any) -> None:
        mine = copies[group.rank]
        before = type(mine.blocks[0])
        report = prophet.convert(mine, group=group)
        assert report.replaced[0].block == block.__name__
        assert isinstance(mine.blocks[0], before)  # whoever asks for the class still finds it
        with torch.no_grad():
            for p in mine.parameters():
                p.add_(1.0)
        load_original_state_dict(mine, state)
        found = original_state_dict(mine)
        assert set(found) == set(state)
        assert all(torch.equal(found[n], t) for n, t in state.items())
        prophet.revert(mine)
        assert type(mine.blocks[0]) is before

    on_threads(2, body)
    for mine in copies:
        now = mine.state_dict()
        assert list(now) == list(state)
        assert all(torch.equal(now[n], t) for n, t in state.items())


def test_a_converted_model_can_be_copied() -> None:
    model = Net()
    prophet.convert(model)
    twin = copy.deepcopy(model)
    ids = batches(1)[0]
    assert torch.equal(net_loss(model, ids)[1], net_loss(twin, ids)[1])
    prophet.revert(twin)
    assert len(list(converted(model))) == 2


# --- an adapter of one's own: the example of docs/convert.md ---


class MyBlock(nn.Module):
    """Top-1 routing; all experts in two tensors; ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(DIM, EXPERTS)
        self.store = nn.ParameterDict(
            {"up": torch.randn(DIM, EXPERTS, HIDDEN) / 3, "down": torch.randn(EXPERTS, HIDDEN, DIM) / 3}
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        tokens = x.reshape(-1, DIM)
        weights, ids = self.score(tokens).softmax(dim=1).max(dim=1)
        y = torch.stack(
            [F.relu(t @ self.store["up"][:, e]) @ self.store["down"][e] for t, e in zip(tokens, ids, strict=True)]
        )
        return (weights[:, None] * y).view(x.shape), None


class MyAdapter(Adapter):
    family = "my blocks"
    experts_name = "store"

    def matches(self, block: nn.Module) -> bool:
        return isinstance(block, MyBlock)

    def describe(self, block: nn.Module) -> ExpertsSpec:
        return ExpertsSpec(
            num_experts=EXPERTS,
            held=EXPERTS,
            top_k=1,
            dim=DIM,
            hidden=HIDDEN,
            activation="relu",
            bias=False,
            form="stacked",
            router="Linear",
        )

    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        return ExpertWeights(state["up"][:, expert].t(), state["down"][expert].t())

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        return {
            "up": torch.stack([w.w_in.t() for w in experts], dim=1),
            "down": torch.stack([w.w_out.t() for w in experts]),
        }

    def methods(self, block: nn.Module) -> Mapping[str, Any]:
        def forward(block: Any, x: Tensor) -> tuple[Tensor, None]:
            tokens = x.reshape(-1, DIM)
            weights, ids = block.score(tokens).softmax(dim=1).topk(1)
            return block.store(tokens, ids, weights).view(x.shape), None

        return {"forward": forward}


class OneWay(MyAdapter):
    """Takes rows in an order of its own, and gives them back as they are."""

    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        right = super().unpack(spec, state, expert)
        return ExpertWeights(right.w_in.flip(0), right.w_out)


class BothWays(OneWay):
    """Takes rows in an order of its own, and gives them back in the right one."""

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        return super().pack(spec, [ExpertWeights(e.w_in.flip(0), e.w_out) for e in experts])


class Forgetful(MyAdapter):
    """Does not know of a parameter."""

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        return {"up": super().pack(spec, experts)["up"]}


class OneTooMany(MyAdapter):
    def describe(self, block: nn.Module) -> ExpertsSpec:
        return dataclasses.replace(super().describe(block), top_k=EXPERTS + 1)


class NoForm(MyAdapter):
    def describe(self, block: nn.Module) -> ExpertsSpec:
        return dataclasses.replace(super().describe(block), form="list")


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_adapter_of_ones_own(ranks: int) -> None:
    model = Net(MyBlock)
    steps = [batches(ranks, s) for s in range(2)]
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    found = on_threads(
        ranks, lambda group: together(copies[group.rank], steps, group, net_loss, adapters=(MyAdapter(),))
    )
    compare(alone(model, steps, net_loss), found)


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        (OneWay, r"up: pack\(\) does not give back what unpack\(\) has taken"),
        (BothWays, r"tried in evaluation on \[1, 16, 8\]: once converted it differs: its answer"),
        (Forgetful, r"the experts' parameter down is lost: pack\(\) does not return it"),
        (OneTooMany, r"top_k: expected 1 to 4, the number of experts, got 5"),
        (NoForm, r"form: expected 'stacked' or 'modules', got 'list'"),
    ],
)
def test_an_adapter_that_is_wrong_is_found_out_and_nothing_has_changed(adapter: type[MyAdapter], text: str) -> None:
    model = Net(MyBlock)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ConversionError, match=rf"blocks.0 \(my blocks\): {text}"):
        prophet.convert(model, adapters=(adapter(),))
    assert type(model.blocks[0]) is MyBlock
    assert all(torch.equal(model.state_dict()[n], t) for n, t in state.items())


# --- the mistakes of users ---


def refuses(model: nn.Module, text: str, **options: Any) -> None:
    """Converting fails with `text`, and leaves the model as it was."""
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ConversionError, match=text):
        prophet.convert(model, **options)
    assert [type(m) for m in model.modules()] == kinds


def first_expert(model: Net) -> Expert:
    found: Any = model.blocks[0]
    expert: Expert = found.experts[0]
    return expert


def test_wrong_group_size() -> None:
    models = [Net() for _ in range(3)]

    def body(group: Any) -> None:
        text = r"blocks.0 \(Mixtral\): 4 experts cannot be divided among 3.*expert_groups\(1\), then pass group=ep"
        refuses(models[group.rank], text, group=group)

    on_threads(3, body)


def test_after_the_optimizer_was_built() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refuses(model, "SGD was built before the conversion")
    del optimizer
    prophet.convert(model)


def test_the_search_for_optimizers_leaves_other_threads_alone() -> None:
    """One that holds a tuple that another thread is making breaks that thread."""
    failed: list[BaseException] = []
    done = threading.Event()

    def make_tuples() -> None:
        try:
            while not done.is_set():
                tuple(i for i in range(300))
        except SystemError as error:
            failed.append(error)

    thread = threading.Thread(target=make_tuples)
    gc.freeze()  # earlier tests' objects are not searched: it would take most of the time
    heap: list[list[int]] = [[] for _ in range(20_000)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # the threads take turns within a search
    thread.start()
    try:
        for _ in range(400):
            expert = nn.Linear(3, 3)
            held = expert.weight  # somebody may hold it for an optimizer, so all objects are searched
            check_no_optimizer([expert])
            assert held is expert.weight
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()
        done.set()
        thread.join(timeout=60)
    assert heap
    assert not failed


def test_nothing_is_searched_where_only_the_model_holds_its_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Searched(Exception):
        pass

    def get_referrers(*_: object) -> list[object]:
        raise Searched

    monkeypatch.setattr(gc, "get_referrers", get_referrers)
    model = Net()
    check_no_optimizer([model])
    groups = [{"params": [model.head.weight]}]
    with pytest.raises(Searched):
        check_no_optimizer([model])
    del groups
    prophet.convert(model)


def test_an_optimizer_of_other_parameters_is_no_obstacle() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    prophet.convert(model)
    assert optimizer.param_groups


def test_mixed_dtypes() -> None:
    model = Net()
    first_expert(model).w1.to(torch.bfloat16)
    refuses(model, r"experts of several dtypes: torch.bfloat16, torch.float32")


def test_tied_experts() -> None:
    model = Net()
    other: Any = model.blocks[1]
    other.experts[2].w3.weight = first_expert(model).w1.weight
    refuses(model, r"are one parameter of \w+: tied experts cannot be converted")


def test_a_block_used_twice_is_one_block() -> None:
    model = Net()
    model.blocks[1] = model.blocks[0]
    ids = batches(1)[0]
    before = net_loss(model, ids)[1]
    assert len(prophet.convert(model).replaced) == 1
    torch.testing.assert_close(net_loss(model, ids)[1], before, rtol=1e-4, atol=1e-5)


def test_converting_twice() -> None:
    model = Net()
    prophet.convert(model)
    refuses(model, r"blocks.0.experts has been converted already")
    prophet.revert(model)
    prophet.convert(model)


def test_reverting_what_is_not_converted_or_is_attached() -> None:
    model = Net()
    with pytest.raises(ConversionError, match="nothing in this model has been converted"):
        prophet.revert(model)
    prophet.convert(model)
    engine = prophet.attach(model)
    with pytest.raises(ConversionError, match=r"engine.close\(\) first.* then prophet.revert\(model\)"):
        prophet.revert(model)
    engine.close()
    prophet.revert(model)


def test_nothing_to_convert() -> None:
    refuses(nn.Linear(2, 2), "no MoE block found")
    refuses(nn.Sequential(MyBlock()), r"no MoE block found: neither experts of transformers, .*")
    refuses(nn.Sequential(Expert()), r"Expert may be one: write an Adapter")
    refuses(nn.Sequential(prophet.MoE(4, 4, 2)), "are prophet.MoE already")


class Glm4MoeRMSNorm(nn.LayerNorm): ...


class Glm4MoeAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(DIM, DIM)


class Glm4MoeMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, EXPERTS), nn.ModuleList([Expert()])


class Glm4MoeDecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.self_attn, self.mlp = Glm4MoeRMSNorm(DIM), Glm4MoeAttention(), Glm4MoeMoE()


def test_what_may_be_a_block_is_no_norm_and_no_attention() -> None:
    refuses(nn.Sequential(Glm4MoeDecoderLayer()), r"experts; Glm4MoeMoE may be one: write an Adapter")
    layer = Glm4MoeDecoderLayer()
    layer.mlp = nn.Identity()  # type: ignore[assignment]
    refuses(nn.Sequential(layer), r"list of experts$")


def test_partly_frozen_experts() -> None:
    """A stacked parameter trains as one; in a list each keeps what it is."""
    stacked = hugging_face("mixtral")
    stacked.get_parameter("model.layers.0.mlp.experts.down_proj").requires_grad_(False)
    refuses(stacked, "some of the experts' parameters are frozen and some are not")
    model = Net()
    first_expert(model).w2.weight.requires_grad_(False)
    prophet.convert(model)
    net_loss(model, batches(1)[0])[0].backward()
    without = [n for n, p in model.named_parameters() if "experts" in n and p.grad is None]
    assert without == ["blocks.0.experts.0.w2.weight"]


def test_gradients_and_hooks_that_would_be_lost() -> None:
    model = Net()
    net_loss(model, batches(1)[0])[0].backward()
    refuses(model, "holds a gradient, which would be lost")
    model.zero_grad()
    hook = first_expert(model).register_forward_hook(lambda *_: None)
    refuses(model, r"experts.0 has hooks")
    hook.remove()
    prophet.convert(model)


def test_meta_buffers_dropout_and_quantised_experts() -> None:
    with torch.device("meta"):
        lazy = Net()
    refuses(lazy, "is on the meta device: load the parameters before converting")
    buffered = Net()
    first_expert(buffered).register_buffer("scale", torch.ones(1))
    refuses(buffered, r"the experts have buffers.*0.scale")
    whole = Net()
    first_expert(whole).w1.weight = nn.Parameter(torch.zeros(HIDDEN, DIM, dtype=torch.int8), requires_grad=False)
    refuses(whole, r"0.w1.weight has dtype torch.int8: quantised")
    uneven = Net()
    block: Any = uneven.blocks[0]
    block.experts[1].w1 = nn.Linear(DIM, HIDDEN + 1, bias=False)
    refuses(uneven, r"1.w1.weight: expected shape \[10, 8\], got \[11, 8\]")


def test_ranks_with_different_models() -> None:
    models = [Net() for _ in range(3)]
    with torch.no_grad():
        first_expert(models[1]).w2.weight.add_(1.0)

    def body(group: Any) -> None:
        text = r"the experts' parameters of rank\(s\) \[1\] differ.*seed all ranks alike"
        with pytest.raises(ConversionError, match=text):
            prophet.convert(models[group.rank], group=group)

    for net in models:  # four experts do not divide by three
        for block in net.blocks:
            blocks: Any = block
            blocks.experts = blocks.experts[:3]
            blocks.gate = nn.Linear(DIM, 3, bias=False)
    on_threads(3, body)


def test_an_error_on_one_rank_is_heard_on_all() -> None:
    models = [Net() for _ in range(2)]
    first_expert(models[1]).w1.to(torch.bfloat16)

    def body(group: Any) -> None:
        text = "several dtypes" if group.rank else r"because of errors on rank\(s\) \[1\]"
        refuses(models[group.rank], text, group=group)

    on_threads(2, body)


def after_ddp() -> None:
    model = Net(DeepseekV3MoE)
    refuses(DistributedDataParallel(model), "wrapped in DistributedDataParallel: convert it first")
    prophet.convert(model)
    ddp = DistributedDataParallel(model)
    averaged = {n for n, _ in ddp.module.named_parameters()} - set(ddp.parameters_to_ignore)
    if any("blocks.0.experts" in n for n in averaged):
        raise RuntimeError("DDP must leave the experts alone")
    net_loss(ddp, batches(2)[torch.distributed.get_rank()])[0].backward()


def test_ddp_before_and_after() -> None:
    on_processes(2, after_ddp)


def test_routing_that_cannot_be() -> None:
    model = Net()
    prophet.convert(model)
    layer = layers_of(model)[0]
    x, ids, weights = torch.randn(3, DIM), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"of one shape \[tokens, top_k\]"):
        layer(x, ids, weights[:, :1])
    with pytest.raises(RoutingError, match="NaN or infinite"):
        layer(x, ids + EXPERTS, weights)
    with pytest.raises(RoutingError, match="NaN or infinite"):
        layer(x, ids, weights * float("nan"))


def test_without_verification_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    runs: list[object] = []

    def answer(trial: verify.Trial) -> list[object]:
        runs.append(trial)
        return []

    monkeypatch.setattr(verify.Trial, "_answer", answer)
    monkeypatch.setattr(verify.Trial, "problem", lambda _: None)
    prophet.convert(model, group=ThreadWorld(1).collective(0), verify=False)
    assert not runs
    prophet.revert(model)
    prophet.convert(model)
    assert len(runs) == len(model.blocks)


# --- what an expert does beside its products is not lost in silence ---


class ListBlock(nn.Module):
    """Top-1 routing over a list of experts, as most people have it."""

    def __init__(self, *after: nn.Module) -> None:
        super().__init__()
        self.score = nn.Linear(DIM, EXPERTS)
        self.store = nn.ModuleList(
            nn.Sequential(
                nn.Linear(DIM, HIDDEN, bias=False),
                nn.ReLU(),
                nn.Linear(HIDDEN, DIM, bias=False),
                *(copy.deepcopy(one) for one in after),
            )
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        tokens = x.reshape(-1, DIM)
        weights, ids = self.score(tokens).softmax(dim=1).max(dim=1)
        y = torch.zeros_like(tokens)
        for e, expert in enumerate(self.store):
            y[ids == e] = weights[ids == e, None] * expert(tokens[ids == e])
        return y.view(x.shape), None


class ListAdapter(MyAdapter):
    """As `MyAdapter`, for the list; it looks at nothing but the two linear layers."""

    def matches(self, block: nn.Module) -> bool:
        return isinstance(block, ListBlock)

    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        return ExpertWeights(state[f"{expert}.0.weight"], state[f"{expert}.2.weight"])

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        return {f"{e}.{n}.weight": w for e, x in enumerate(experts) for n, w in ((0, x.w_in), (2, x.w_out))}


class Scaled(nn.Module):
    """A factor that is no parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * x


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("after", "text"),
    [
        (nn.Dropout(0.1), r"its experts compute something else in training, which would be lost \(Dropout\(p=0.1"),
        (nn.LayerNorm(DIM), r"the experts' parameter \d.3.(weight|bias) is lost"),
        (Scaled(), "once converted it differs: its answer"),
        (nn.ReLU(), "once converted it differs: its answer"),
    ],
)
def test_what_an_adapter_would_lose_is_an_error(after: nn.Module, text: str, training: bool) -> None:
    model = nn.Sequential(ListBlock(after)).train(training)
    refuses(model, rf"0 \(my blocks\): .*{text}", adapters=(ListAdapter(),))


def test_an_adapter_that_loses_nothing_passes() -> None:
    prophet.convert(nn.Sequential(ListBlock(nn.Dropout(0.0))), adapters=(ListAdapter(),))


def test_hooks_on_parameters_are_refused() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = Net()
        hook = getattr(first_expert(model).w1.weight, register)(lambda *_: None)
        refuses(model, r"0.w1.weight has a hook, as of an optimizer in backward")
        hook.remove()
        prophet.convert(model)
