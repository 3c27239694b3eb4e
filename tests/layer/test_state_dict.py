"""Invariant 3: a checkpoint knows neither the number of ranks nor whether balancing was on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import prophet
from prophet.ranks.collective import Collective
from prophet.ranks.threads import ThreadWorld
from tests.helpers.support import RandomPlanner, TinyModel, next_id_loss, on_threads, random_state
from tests.helpers.training import Case, average

EXPERTS = 8


def build(group: Collective, seed: int = 3) -> TinyModel:
    return TinyModel(num_experts=EXPERTS, group=group, seed=seed, gate=prophet.GateConfig(bias_update_rate=0.01))


def alone() -> Collective:
    return ThreadWorld(1).collective(0)


def union(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All ranks' entries; those that several ranks have must be equal."""
    whole: dict[str, Tensor] = {}
    for state in states:
        for name, value in state.items():
            if name in whole:
                assert torch.equal(whole[name], value), name
            whole[name] = value
    return whole


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert sorted(a) == sorted(b)
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def one_step(model: TinyModel, group: Collective, optimizer: torch.optim.Optimizer, step: int) -> None:
    ids = Case(ranks=group.size, shapes=((2, 3),) * group.size).ids(step, 0)[group.rank]
    optimizer.zero_grad()
    loss = next_id_loss(model(ids), ids, 0.2)
    loss.backward()
    average(model, group, loss.detach())
    optimizer.step()


@pytest.mark.parametrize("ranks", [2, 4])
def test_initial_values_are_the_same_at_every_ep_size(ranks: int) -> None:
    whole = union(on_threads(ranks, lambda group: build(group).state_dict()))
    assert_equal(whole, build(alone()).state_dict())


def test_experts_start_out_different_from_one_another() -> None:
    bank = build(alone()).moe(0).experts
    flat = bank.w_in.reshape(EXPERTS, -1)
    assert torch.pdist(flat).min() > 0.1


def test_rng_is_left_in_the_same_place_at_every_ep_size() -> None:
    def after(group: Collective) -> Tensor:
        # the read-out is built after the experts: its values show where they left the generator
        return build(group).head.weight.detach().clone()

    assert torch.equal(on_threads(4, after)[2], after(alone()))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_names_and_values_do_not_depend_on_balancing(ranks: int) -> None:
    def body(group: Collective) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
        model = build(group)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine = prophet.attach(
            model, optimizer, config=prophet.EngineConfig(planner=RandomPlanner(1, 1.0), slots_per_rank=8)
        )
        one_step(model, group, optimizer, 0)
        model(torch.zeros(2, 3, dtype=torch.int64))  # replicas are in place now
        if ranks > 1:
            assert engine.pool.in_use_bytes > 0
        during = {k: v.clone() for k, v in model.state_dict().items()}
        names = [n for n, _ in model.named_parameters()]
        engine.close()
        return before, during, names

    for before, during, names in on_threads(ranks, body):
        learned = {k: v for k, v in before.items() if not k.endswith("gate.bias")}
        assert_equal(learned, {k: during[k] for k in learned})
        assert sorted(during) == sorted(before)
        assert names == [n for n, _ in build(alone()).named_parameters()]


@pytest.mark.parametrize(("saved_at", "loaded_at"), [(1, 4), (4, 2), (2, 1), (4, 4)])
def test_loads_at_another_ep_size(saved_at: int, loaded_at: int) -> None:
    source = random_state(build(alone()), seed=9)

    def save(group: Collective) -> dict[str, Tensor]:
        model = build(group)
        model.load_state_dict(source)
        return model.state_dict()

    whole = union(on_threads(saved_at, save))
    assert_equal(whole, source)

    def load(group: Collective) -> dict[str, Tensor]:
        model = build(group, seed=4)
        assert str(model.load_state_dict(whole)) == "<All keys matched successfully>"
        return model.state_dict()

    assert_equal(union(on_threads(loaded_at, load)), source)


def test_training_goes_on_as_before_at_another_ep_size() -> None:
    """Two steps on 4 ranks equal one on 4, a checkpoint, and one on 2 with the same tokens."""
    ids = [Case(ranks=4, shapes=((2, 3),) * 4).ids(s, 0) for s in range(2)]

    def steps(group: Collective, state: dict[str, Tensor], which: list[int]) -> dict[str, Tensor]:
        model = build(group).double()
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = prophet.attach(model, optimizer, config=prophet.EngineConfig(planner=RandomPlanner(5)))
        for s in which:
            mine = torch.cat(ids[s]).chunk(group.size)[group.rank]
            optimizer.zero_grad()
            out = model(mine)
            loss = nn.functional.cross_entropy(out.flatten(0, -2), mine.reshape(-1))
            loss.backward()
            average(model, group, loss.detach())
            optimizer.step()
        engine.close()
        return model.state_dict()

    start = random_state(build(alone()).double(), seed=2)
    through = union(on_threads(4, lambda g: steps(g, start, [0, 1])))
    middle = union(on_threads(4, lambda g: steps(g, start, [0])))
    resumed = union(on_threads(2, lambda g: steps(g, middle, [1])))
    for name, value in through.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-12, msg=name)
    moved = sum(not torch.equal(value, start[name]) for name, value in through.items())
    assert moved > 0.8 * len(start), "an expert without tokens stands still, but hardly all of them"


def test_a_missing_expert_is_named() -> None:
    model = build(alone())
    state = model.state_dict()
    del state["moes.1.experts.w_out.5"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"moes\.1\.experts\.w_out\.5"'):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).missing_keys == ["moes.1.experts.w_out.5"]


def test_one_ranks_own_entries_are_not_enough_elsewhere() -> None:
    states = on_threads(2, lambda group: build(group).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*w_in\.4"):
        build(alone()).load_state_dict(states[0])


@pytest.mark.parametrize("name", ["w_in.8", "w_in", "w_up.0", "w_in.0.extra"])
def test_an_unexpected_expert_is_named(name: str) -> None:
    model = build(alone())
    state = model.state_dict()
    state[f"moes.0.experts.{name}"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=rf'Unexpected key.*"moes\.0\.experts\.{name}"'):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).unexpected_keys == [f"moes.0.experts.{name}"]


@pytest.mark.parametrize("wrong", [torch.zeros(3, 8), torch.zeros(12), torch.zeros(()), [1.0]])
def test_a_wrong_shape_says_what_was_expected(wrong: object) -> None:
    model = build(alone())
    state = model.state_dict()
    state["moes.0.experts.w_in.2"] = wrong
    with pytest.raises(RuntimeError, match=r"moes\.0\.experts\.w_in\.2: expected a tensor of shape \[12, 8\], got"):
        model.load_state_dict(state)


def test_values_are_copied_and_keep_their_dtype() -> None:
    model = build(alone())
    state = {k: v.double() if v.is_floating_point() else v for k, v in build(alone(), seed=5).state_dict().items()}
    model.load_state_dict(state)
    assert model.moe(0).experts.w_in.dtype == torch.float32
    state["moes.0.experts.w_in.0"].zero_()
    assert model.moe(0).experts.w_in[0].abs().sum() > 0


def test_a_saved_state_does_not_require_gradients() -> None:
    model = build(alone())
    assert not any(v.requires_grad for v in model.state_dict().values())
    assert model.state_dict(keep_vars=True)["moes.0.experts.w_in.0"].requires_grad


def test_a_layer_on_the_meta_device_does_not_swallow_a_checkpoint() -> None:
    state = build(alone()).state_dict()
    with torch.device("meta"):
        model = build(alone())
    with pytest.raises(RuntimeError, match="meta"):
        model.load_state_dict(state, assign=True)
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    assert_equal(model.state_dict(), state)


def test_a_copy_of_a_layer_is_a_layer() -> None:
    """Averaged copies of a model are made with deepcopy, before and after attach."""
    model = build(alone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ids = torch.arange(6).view(2, 3)
    wanted = model(ids)
    assert torch.equal(copy.deepcopy(model)(ids), wanted)
    engine = prophet.attach(model, optimizer, config=prophet.EngineConfig(planner=RandomPlanner()))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids), wanted)
    assert not engine.runtime.running, "the copy must not drive the original's engine"
    again = prophet.attach(twin, config=prophet.EngineConfig(planner=RandomPlanner()))
    again.close()
    engine.close()


def test_copied_and_materialised_experts_are_still_marked() -> None:
    """DDP and DeepSpeed read the marks; a parameter made anew must carry them too."""
    with torch.device("meta"):
        empty = build(alone())
    for model in (copy.deepcopy(build(alone())), empty.to_empty(device="cpu"), build(alone()).double()):
        marked = {n for n, p in model.named_parameters() if getattr(p, "prophet_expert", False)}
        assert marked == {n for n, _ in model.named_parameters() if ".experts." in n}
        assert all(not p.allreduce for n, p in model.named_parameters() if n in marked)  # type: ignore[attr-defined]
