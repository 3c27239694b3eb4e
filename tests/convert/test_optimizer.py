"""Optimizers that existed before the conversion: states move bit for bit, groups stay, schedulers and scalers go on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.convert import converted
from prophet.convert.trials.elementwise import is_elementwise
from prophet.convert.trials.verify import Trial
from prophet.errors import ArgumentError, ConversionError
from prophet.ranks.collective import Collective
from tests.helpers.expert_lists import EXPERTS, DeepseekV3MoE, Net, net_loss
from tests.helpers.hand_written import DIM, FloatSoftmax, HandWritten
from tests.helpers.hand_written import EXPERTS as EIGHT
from tests.helpers.moe_models import batches, hugging_face, loss_of
from tests.helpers.support import RandomPlanner, on_threads
from tests.helpers.training import average

Made = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Groups as trainers make them: some of a layer's parameters decay, others do not, and the embedding has a rate."""
    named = dict(model.named_parameters())
    slow = [p for n, p in named.items() if "embed" in n]
    plain = [p for n, p in named.items() if "w2" in n or "bias" in n]
    rest = [p for p in named.values() if not any(p is q for q in slow + plain)]
    return [
        {"params": rest, "weight_decay": 0.1},
        {"params": plain, "weight_decay": 0.0},
        {"params": slow, "lr": 0.001},
    ]


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, scaler: Any = None, group: Any = None
) -> float:
    optimizer.zero_grad()
    loss = net_loss(model, ids)[0]
    (loss if scaler is None else scaler.scale(loss)).backward()
    if group is not None:
        average(model, group, loss.detach())
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return float(loss.detach())


def adamw(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, **options)


KINDS: dict[str, Made] = {
    "AdamW": adamw,
    "AdamW foreach": lambda g: adamw(g, foreach=True),
    "AdamW fused": lambda g: adamw(g, fused=True),
    "AdamW amsgrad": lambda g: adamw(g, amsgrad=True),
    "SGD": lambda g: torch.optim.SGD(g, lr=0.1),
    "SGD momentum": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, nesterov=True),
    "NAdam": lambda g: torch.optim.NAdam(g, lr=0.01),
    "RMSprop": lambda g: torch.optim.RMSprop(g, lr=0.01, centered=True),
    "Adagrad": lambda g: torch.optim.Adagrad(g, lr=0.01),
}


USUAL = ("AdamW", "AdamW fused", "SGD momentum")


@pytest.mark.parametrize("kind", [k if k in USUAL else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_states_move_bit_for_bit_and_the_run_goes_on(kind: str) -> None:
    """On two ranks for the states, on one for the steps that follow, in float64 against a run that is not converted."""
    ids = [batches(1, s)[0] for s in range(5)]

    def trained() -> tuple[Net, torch.optim.Optimizer, Any]:
        model = Net(DeepseekV3MoE).double()
        optimizer = KINDS[kind](grouped(model))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (s + 1))
        for x in ids[:2]:
            step(model, optimizer, x)
            scheduler.step()
        optimizer.zero_grad()
        return model, optimizer, scheduler

    runs = [trained() for _ in range(2)]  # before there are threads, which share the random state

    def body(group: Collective) -> list[float]:
        model, optimizer, scheduler = runs[group.rank]
        before = {n: (p, dict(optimizer.state.get(p, {}))) for n, p in model.named_parameters()}
        settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        prophet.convert(model, optimizer=optimizer, group=group)
        assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == settings
        alive = {id(p) for p in model.parameters()}
        held = [id(p) for g in optimizer.param_groups for p in g["params"]]
        assert sorted(held) == sorted(alive)
        assert {id(p) for p in optimizer.state} <= alive
        for block, (_, _, _, layer) in enumerate(converted(model)):
            bank: Any = layer.experts
            for local in range(bank.experts):
                for name in ("w1", "w2", "w3"):
                    where = f"blocks.{block}.experts.{bank.first_expert + local}.{name}.weight"
                    state = optimizer.state[bank.get_parameter(f"{bank.first_expert + local}.{name}.weight")]
                    assert set(state) == set(before[where][1])
                    for key, value in before[where][1].items():
                        assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key
            # where the optimizer had what an expert decays by, and what does not decay
            for home in bank.home_experts():
                assert any(home.w1.weight is p for p in optimizer.param_groups[0]["params"])
                assert any(home.w2.weight is p for p in optimizer.param_groups[1]["params"])
        if group.size > 1:
            return []
        found = []
        for x in ids[2:]:
            found.append(step(model, optimizer, x))
            scheduler.step()
        return found

    on_threads(2, body)
    runs[0] = trained()
    model, optimizer, scheduler = trained()
    wanted = []
    for x in ids[2:]:
        wanted.append(step(model, optimizer, x))
        scheduler.step()
    assert on_threads(1, body)[0] == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize(
    "case",
    ["OneCycleLR", "GradScaler", "fused", *(pytest.param(c, marks=pytest.mark.slow) for c in ("LambdaLR", "foreach"))],
)
def test_losses_are_those_of_an_optimizer_that_is_built_afterwards(case: str) -> None:
    """On two ranks that are balanced, but for the scaler, whose overflows thread ranks do not share."""
    ranks = 1 if case == "GradScaler" else 2

    def run(model: nn.Module, after: bool, group: Collective) -> list[float]:
        def built() -> tuple[torch.optim.Optimizer, Any, Any]:
            optimizer = adamw([{"params": list(model.parameters())}], **({case: True} if case.islower() else {}))
            scheduler: Any = None
            if case == "LambdaLR":
                scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, s / 3))
            if case == "OneCycleLR":
                scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8)
            return optimizer, scheduler, torch.amp.GradScaler("cpu", 64.0) if case == "GradScaler" else None

        optimizer, scheduler, scaler = (None, None, None) if after else built()
        prophet.convert(model, optimizer=optimizer, group=group)
        if optimizer is None:
            optimizer, scheduler, scaler = built()
        engine = prophet.attach(model, optimizer, config=prophet.EngineConfig(planner=RandomPlanner(0, 0.6)))
        found = []
        for s in range(6):
            found.append(step(model, optimizer, batches(ranks, s)[group.rank], scaler, group))
            if scheduler is not None:
                scheduler.step()
        engine.close()
        return found

    before, after = (
        on_threads(ranks, lambda group, m=models, a=a: run(m[group.rank], a, group))
        for a, models in ((a, [Net() for _ in range(ranks)]) for a in (False, True))
    )
    assert before == after


def test_a_stacked_form_that_is_transposed_and_interleaved() -> None:
    """GPT-OSS: an expert's state is that of its rows, whichever way they lie; a state in another dtype keeps it."""
    model = hugging_face("gpt_oss")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of(model, batches(1)[0])[0].backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {n: optimizer.state[p] for n, p in model.named_parameters()}
    for state in before.values():
        state["exp_avg"] = state["exp_avg"].double()
    prophet.convert(model, optimizer=optimizer)
    for name, _, _, layer in converted(model):
        bank: Any = layer.experts
        for part, whole in (("w_in", "gate_up_proj"), ("bias_in", "gate_up_proj_bias")):
            moved, was = optimizer.state[bank.get_parameter(part)], before[f"{name}.{whole}"]
            for key in ("exp_avg", "exp_avg_sq"):
                rows = was[key].transpose(1, 2) if part == "w_in" else was[key]
                assert moved[key].dtype == was[key].dtype
                wanted = torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)
                assert torch.equal(moved[key].view_as(wanted), wanted)
            assert torch.equal(moved["step"], was["step"])


def test_parameters_keep_their_names_in_an_optimizer_that_has_names() -> None:
    model = Net(DeepseekV3MoE)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    prophet.convert(model, optimizer=optimizer)
    (group,) = optimizer.param_groups
    names = {id(p): n for n, p in model.named_parameters()}
    assert group["param_names"] == [names[id(p)] for p in group["params"]]
    assert "blocks.0.experts.0.w1.weight" in group["param_names"]


def test_a_group_that_is_left_without_parameters_stays() -> None:
    models = [Net() for _ in range(2)]

    def body(group: Collective) -> list[int]:
        model = models[group.rank]
        mine = [[p for n, p in model.named_parameters() if f".experts.{e}." in n] for e in range(EXPERTS)]
        rest = [p for n, p in model.named_parameters() if ".experts." not in n]
        optimizer = torch.optim.SGD([{"params": p} for p in (rest, *mine, [])], lr=0.1)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5**s)
        prophet.convert(model, optimizer=optimizer, group=group)
        return [len(g["params"]) for g in optimizer.param_groups[1:]]

    assert on_threads(2, body) == [[6, 6, 0, 0, 0], [0, 0, 6, 6, 0]]


# --- what is refused, everything unchanged ---


class ZeroRedundancyOptimizer(torch.optim.SGD):
    pass


class Wrapper(torch.optim.SGD):
    @property
    def param_groups(self) -> Any:
        return self.inner

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.inner = groups


class Lamb(torch.optim.SGD):
    """A trust ratio per parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.norm() / p.grad.norm().clamp(min=1e-6) * p.grad)


def expert_parameter(model: Net, expert: int, name: str) -> nn.Parameter:
    return model.get_parameter(f"blocks.0.experts.{expert}.{name}.weight")


def of_another_shape(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        optimizer.state[p]["rows"] = torch.zeros(p.shape[0])
    return optimizer


def in_backward(model: Net) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expert_parameter(model, 1, "w1").register_post_accumulate_grad_hook(lambda p: None)
    return optimizer


REFUSED: dict[str, tuple[Callable[[Net], Any], str]] = {
    "LBFGS": (lambda m: torch.optim.LBFGS(m.parameters()), "optimizer: LBFGS keeps one flat history"),
    "Zero": (lambda m: ZeroRedundancyOptimizer(m.parameters(), 0.1), "ZeroRedundancyOptimizer keeps each state on one"),
    "wrapper": (lambda m: Wrapper(m.parameters(), 0.1), "Wrapper stands for another one: pass that one"),
    "another kind": (lambda m: "adam", "optimizer must be a torch.optim.Optimizer, got 'adam'"),
    "backward": (in_backward, "1.w1.weight has a hook, as of an optimizer in backward"),
}
REFUSED_OF_STACKED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "Lamb": (lambda m: Lamb(m.parameters(), 0.1), "Lamb treats a stacked parameter otherwise than its parts"),
    "Adafactor": (lambda m: torch.optim.Adafactor(m.parameters()), "Adafactor treats a stacked parameter otherwise"),
    "shape": (of_another_shape, r"the state 'rows' of gate_up_proj has shape \[8\]"),
}


@pytest.mark.parametrize("case", [*REFUSED, *REFUSED_OF_STACKED])
def test_what_cannot_go_along_is_refused(case: str) -> None:
    make, text = (REFUSED | REFUSED_OF_STACKED)[case]
    model: Any = Net() if case in REFUSED else hugging_face("mixtral")
    optimizer = make(model)
    before = dict(model.named_parameters())
    held = [list(g["params"]) for g in getattr(optimizer, "param_groups", ())]
    with pytest.raises((ConversionError, ArgumentError), match=text):
        prophet.convert(model, optimizer=optimizer)
    assert not list(converted(model))
    assert all(p is before[n] for n, p in model.named_parameters())
    for group, was in zip(getattr(optimizer, "param_groups", ()), held, strict=True):
        assert all(p is q for p, q in zip(group["params"], was, strict=True))


# --- experts in a list keep their parameters, whatever the optimizer does with each ---


def own_code_loss(model: nn.Module, x: Tensor) -> Tensor:
    y, extra = model(x)
    return (y - 1).square().mean() + 0.1 * extra


def tokens(seed: int) -> Tensor:
    return torch.randn(4, 100, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own_code(case: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after two steps; a loop might have left out two of the experts in one of these."""
    model = HandWritten(FloatSoftmax)
    kind: Any = Lamb if case == "Lamb" else torch.optim.AdamW
    gates = [p for n, p in model.named_parameters() if "w1" in n]
    rest = [p for n, p in model.named_parameters() if "w1" not in n]
    optimizer = kind([{"params": gates if case == "groups" else []}, {"params": rest}], lr=0.01)
    if case != "groups":
        optimizer.param_groups[1]["params"][:] = list(model.parameters())
    for s in range(2):
        optimizer.zero_grad()
        own_code_loss(model, tokens(s)).backward()
        if case == "steps" and s == 1:
            for n, p in model.named_parameters():
                p.grad = None if ".experts.2." in n or ".experts.5." in n else p.grad
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def on_and_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for s in range(2, 5):
        optimizer.zero_grad()
        loss = own_code_loss(model, tokens(s))
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("case", ["equal", "Lamb", "groups", "steps"])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_experts_of_a_list_may_be_kept_apart(case: str, ranks: int) -> None:
    runs = [own_code(case) for _ in range(ranks)]

    def body(group: Collective) -> list[float]:
        model, optimizer = runs[group.rank]
        before = {n: (p, dict(optimizer.state.get(p, {}))) for n, p in model.named_parameters()}
        report = prophet.convert(model, optimizer=optimizer, group=group)
        assert [r.spec.bank for r in report.replaced] == ["feed-forward"] * 2
        assert len(optimizer.param_groups) == 2
        held = [p for g in optimizer.param_groups for p in g["params"]]
        assert {id(p) for p in held} == {id(p) for p in model.parameters()}
        assert {id(p) for p in optimizer.state} <= {id(p) for p in held}
        for n, (p, state) in before.items():
            own = ".experts." not in n or int(n.split(".")[3]) // (EIGHT // group.size) == group.rank
            assert any(p is q for q in held) == own  # the very objects, with what the optimizer knows of them
            assert not own or optimizer.state.get(p, {}) == state
        return on_and_on(model, optimizer) if group.size == 1 else []

    found = on_threads(ranks, body)
    if ranks == 1:
        assert found[0] == pytest.approx(on_and_on(*own_code(case)), rel=1e-10)


def test_a_second_optimizer_is_an_obstacle_still() -> None:
    model = Net()
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(ConversionError, match=r"prophet.convert\(model, optimizer=optimizer\) takes one along"):
        prophet.convert(model, optimizer=optimizer)
    assert other.param_groups


def test_ranks_whose_optimizers_differ_are_named() -> None:
    models = [Net() for _ in range(4)]

    def body(group: Collective) -> str:
        model = models[group.rank]
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer, batches(1)[0])
        for state in optimizer.state.values():
            state["exp_avg"] += group.rank == 1
        optimizer.zero_grad()
        with pytest.raises(ConversionError) as caught:
            prophet.convert(model, optimizer=optimizer, group=group)
        return str(caught.value)

    for text in on_threads(4, body):
        assert text.startswith("the optimizers of rank(s) [1] differ from the other ranks'")


def test_a_check_that_fails_leaves_the_optimizer_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second block fails; the first has its experts back, the very parameters that the optimizer has."""
    asked: list[str | None] = [None, "the second differs"]
    monkeypatch.setattr(Trial, "problem", lambda self: asked.pop(0))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, batches(1)[0])
    optimizer.zero_grad()
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    with pytest.raises(ConversionError, match="the second differs"):
        prophet.convert(model, optimizer=optimizer)
    held = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert held == {id(p) for p in model.parameters()}
    ids = batches(1, 1)[0]
    assert [step(model, optimizer, ids) for _ in range(2)] == [step(twin, twin_optimizer, ids) for _ in range(2)]


# --- by trying ---


def test_trying_an_optimizer_leaves_it_and_its_scheduler_alone() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    torch.optim.lr_scheduler.LambdaLR(optimizer, float)  # a warm-up that begins at 0
    before, random = [p.clone() for p in model.parameters()], torch.get_rng_state()
    assert is_elementwise(optimizer, 0, before[0])
    assert not calls
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [(torch.optim.Muon, False), (torch.optim.Adafactor, False), (Lamb, False), (torch.optim.RAdam, True)],
)
@pytest.mark.parametrize("warm_up", [False, True])
def test_an_optimizer_that_treats_matrices_as_a_whole_is_told_by_trying(kind: Any, wanted: bool, warm_up: bool) -> None:
    p = nn.Parameter(torch.randn(4, 3))
    optimizer = kind([p], lr=0.01)
    if warm_up:
        torch.optim.lr_scheduler.LambdaLR(optimizer, float)  # begins at 0
    assert is_elementwise(optimizer, 0, p) == wanted
