"""Model and Adam through a checkpoint to another expert-parallel size, with DDP, with FSDP, and on one process.

Every run gets the same four shards of tokens, however many ranks share them, so that the losses can be compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import prophet
from prophet.engine.checkpoint import training as checkpoint
from prophet.engine.config import Experiment
from prophet.experts.feed_forward import FeedForwardBank
from prophet.parallel import ExpertReplicas, expert_groups, expert_parameters
from prophet.ranks.collective import Collective
from prophet.ranks.process_group import processes
from prophet.ranks.threads import ThreadWorld
from tests.helpers.expert_lists import Net, net_loss
from tests.helpers.launch import on_processes
from tests.helpers.moe_models import batches
from tests.helpers.support import RandomPlanner, TinyModel, next_id_loss, on_threads
from tests.helpers.training import Case
from tests.helpers.training import Run as TrainingRun

SHARDS = 4
STEPS = 3
RELATIVE = 2e-5  # float32, sums in another order, for STEPS steps of Adam


def shard(step: int, at: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng([step, at]).integers(0, 11, 3 + at))


class Run:
    """A model cut `ep_size` ways over all processes, Adam, and the engine with random placements."""

    def __init__(self, ep_size: int, cut: str, *, seed: int, lr: float = 1e-2) -> None:
        ep, replicas = expert_groups(ep_size)
        self.rank = torch.distributed.get_rank() if processes() > 1 else 0
        gate = prophet.GateConfig(bias_update_rate=1e-4)
        self.model = TinyModel(num_experts=8, group=ep, seed=seed, gate=gate)
        self.wrapped: torch.nn.Module = self.model
        experts = {p for _, p in expert_parameters(self.model)}
        if cut == "fsdp":
            for mix in self.model.mixes:
                fully_shard(mix)
            fully_shard(self.model, ignored_params=experts)
        self.replicas = ExpertReplicas(self.model, replicas)
        dense = [p for p in self.model.parameters() if p.dim() > 1 and p not in experts]
        rest = [p for p in self.model.parameters() if p.dim() == 1 and p not in experts]
        # fused updates take either cut parameters or whole ones, hence the groups
        groups = [{"params": dense}, {"params": list(experts)}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.8, 0.9), fused=cut == "fsdp")
        config = prophet.EngineConfig(planner=RandomPlanner(seed, 0.7), slots_per_rank=4)
        experiment = Experiment(check_every=1)
        self.engine = prophet.attach(self.model, self.optimizer, config=config, experiment=experiment)
        if cut == "ddp":
            self.wrapped = DistributedDataParallel(self.model)

    def train(self, first: int) -> list[float]:
        """STEPS steps; the losses are those of all shards together."""
        mine = range(self.rank, SHARDS, processes())
        losses = []
        for step in range(first, first + STEPS):
            ids = [shard(step, at) for at in mine]
            self.optimizer.zero_grad()
            outs = self.wrapped(torch.cat(ids)).split([len(i) for i in ids])
            # ranks' losses are averaged, and should add up to the same for any number of them
            loss = sum((next_id_loss(o, i, 0.1 * processes()) for o, i in zip(outs, ids, strict=True)), torch.zeros(()))
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach() / processes())
        total = torch.stack(losses)
        if processes() > 1:
            torch.distributed.all_reduce(total)
        return [float(x) for x in total]

    def everything(self) -> dict[str, Any]:
        """Parameters, moments and steps by the names of single experts, whole; every rank has its own experts'."""
        found: dict[str, Any] = {}
        state = self.model.state_dict()  # FSDP gives its cut parameters back with this
        banks = {name: b for name, b in self.model.named_modules() if isinstance(b, FeedForwardBank)}
        experts = {f"{name}.{part}" for name, b in banks.items() for part, _ in b.named_parameters()}
        for name, p in self.model.named_parameters():
            for field, value in {"": p.detach(), **self.optimizer.state[p]}.items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                if name in experts:
                    bank = banks[name.rpartition(".")[0]]
                    for local, one in enumerate(whole.chunk(bank.experts) if whole.dim() else [whole] * bank.experts):
                        found[f"{name}.{bank.first_expert + local} {field}"] = one.flatten().numpy().copy()
                else:
                    found[f"{name} {field}"] = whole.numpy().copy()
        found |= {n: v.numpy().copy() for n, v in state.items() if n.endswith("gate.bias")}
        return found

    def settings(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in g.items() if k not in ("params", "fused")} for g in self.optimizer.param_groups]

    def close(self) -> None:
        self.engine.close()
        self.replicas.close()


def save_in_the_middle(ep_size: int, cut: str, folder: str) -> tuple[dict[str, Any], list[Any], list[float]]:
    run = Run(ep_size, cut, seed=1)
    run.train(0)
    run.optimizer.param_groups[0]["lr"] = 3e-3  # as a scheduler would
    checkpoint.save(folder, run.wrapped, run.optimizer, extra={"step": STEPS, "note": [1, None]})
    saved = run.everything()
    losses = run.train(STEPS)
    run.close()
    return saved, run.settings(), losses


def go_on(ep_size: int, cut: str, folder: str) -> tuple[dict[str, Any], list[Any], list[float], Any]:
    run = Run(ep_size, cut, seed=2, lr=1.0)
    run.train(0)  # what was there before does not matter
    extra = checkpoint.load(folder, run.wrapped, run.optimizer)
    assert [g["fused"] for g in run.optimizer.param_groups] == [cut == "fsdp"] * 3
    loaded = run.everything()
    losses = run.train(extra["step"])
    run.close()
    return loaded, run.settings(), losses, extra


def union(states: list[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for state in states:
        for name, value in state.items():
            np.testing.assert_array_equal(whole.setdefault(name, value), value, err_msg=name)
    return whole


Size = tuple[int, int, str]
ONE: Size = (1, 1, "plain")
TWO: Size = (2, 2, "ddp")
FOUR: Size = (4, 2, "fsdp")
WHOLE: Size = (4, 4, "ddp")


@pytest.mark.parametrize(
    ("ep_size", "cut", "sizes"),
    [
        (4, "ddp", (FOUR, TWO)),
        (2, "fsdp", (WHOLE, ONE)),
        pytest.param(4, "ddp", (WHOLE, ONE), marks=pytest.mark.slow),
        pytest.param(2, "fsdp", (FOUR, TWO), marks=pytest.mark.slow),
    ],
)
def test_another_size_goes_on_as_if_nothing_had_happened(
    ep_size: int, cut: str, sizes: tuple[Size, ...], tmp_path: Path
) -> None:
    rows = on_processes(4, save_in_the_middle, ep_size, cut, str(tmp_path), timeout_s=90)
    saved, settings, losses = union([r[0] for r in rows]), rows[0][1], rows[0][2]
    assert sum(name.endswith(" exp_avg_sq") for name in saved) == sum(name.endswith(" ") for name in saved)
    assert settings[0]["lr"] == 3e-3
    for size, other, how in sizes:
        if size == 1:
            again = [go_on(other, how, str(tmp_path))]
        else:
            again = on_processes(size, go_on, other, how, str(tmp_path), timeout_s=90)
        loaded = union([r[0] for r in again])
        assert sorted(loaded) == sorted(saved)
        for name, value in saved.items():
            assert loaded[name].dtype == value.dtype
            np.testing.assert_array_equal(loaded[name], value, err_msg=f"{name} at {other} of {size}")
        assert again[0][1] == settings
        assert again[0][2] == pytest.approx(losses, rel=RELATIVE)
        assert again[0][3] == {"step": STEPS, "note": [1, None]}


def plain_dcp(folder: str, save: bool) -> dict[str, Any]:
    """The model alone, by torch's own functions."""
    model = TinyModel(num_experts=8, group=expert_groups(processes())[0], seed=0 if save else 1)
    if save:
        dcp.save(model.state_dict(), checkpoint_id=folder)
    else:
        dcp.load(model.state_dict(), checkpoint_id=folder)
    return {n: v.numpy().copy() for n, v in model.state_dict().items()}


def test_torchs_own_functions_read_the_model_at_another_size(tmp_path: Path) -> None:
    saved = union(on_processes(4, plain_dcp, str(tmp_path), True))
    loaded = union(on_processes(2, plain_dcp, str(tmp_path), False))
    assert union([saved, loaded, plain_dcp(str(tmp_path), False)]).keys() == saved.keys()


def saved_aside(folder: str) -> dict[str, bool]:
    """A converted model, by torch's functions that copy it and write the copy while training goes on."""
    model = Net()
    prophet.convert(model, group=expert_groups(processes())[0])
    want = {n: v.detach().clone() for n, v in model.state_dict().items()}
    same = {}
    for name, stager in (("default", None), ("blocking", BlockingAsyncStager())):
        place = f"{folder}/{name}"
        saving: Any = dcp.async_save({"model": model.state_dict()}, checkpoint_id=place, async_stager=stager)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        saving.result()
        dcp.load({"model": model.state_dict()}, checkpoint_id=place)
        same[name] = all(torch.equal(v.detach(), want[n]) for n, v in model.state_dict().items())
    return same


def test_torchs_asynchronous_save_of_a_converted_model(tmp_path: Path) -> None:
    assert on_processes(2, saved_aside, str(tmp_path)) == [{"default": True, "blocking": True}] * 2


def converted(ep_size: int, folder: str, save: bool) -> dict[str, Any]:
    """A converted model, of which every expert had parameters of its own before."""
    model = Net()
    prophet.convert(model, group=expert_groups(ep_size)[0])
    optimizer = torch.optim.AdamW(model.parameters())
    engine = prophet.attach(model, optimizer)
    # what the ranks share stays equal on all of them only where gradients are averaged
    wrapped = DistributedDataParallel(model) if processes() > 1 else model
    rank = torch.distributed.get_rank() if processes() > 1 else 0
    loss, _ = net_loss(wrapped, batches(processes(), seed=int(save))[rank])
    loss.backward()
    optimizer.step()
    (checkpoint.save if save else checkpoint.load)(folder, wrapped, optimizer)
    engine.close()
    prophet.revert(model)
    return {n: p.detach().numpy().copy() for n, p in model.named_parameters()}


def test_a_converted_model(tmp_path: Path) -> None:
    saved = union(on_processes(2, converted, 2, str(tmp_path), True))
    assert union([saved, converted(1, str(tmp_path), False)]).keys() == saved.keys()


# --- what does not fit, on one process ---


def small(experts: int = 4, **options: Any) -> TinyModel:
    return TinyModel(num_experts=experts, group=ThreadWorld(1).collective(0), **options)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    ids = torch.arange(6)
    next_id_loss(model(ids), ids, 1.0).backward()
    optimizer.step()
    return optimizer


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint was finished here"):
        checkpoint.load(tmp_path, small())
    for text in ("[", "[]", "{}", '{"format": 9}', '{"format": 1, "states": {"a": {"b": {"dtype": "load"}}}}'):
        (tmp_path / checkpoint.DESCRIPTION).write_text(text)
        with pytest.raises(checkpoint.CheckpointError, match=r"training\.json: expected a description"):
            checkpoint.load(tmp_path, small())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"experts": 8}, r"the checkpoint lacks moes\.0\.experts\.bias_in\.4, .* and 28 more"),
        ({"experts": 2, "top_k": 1}, r"holds, and the model does not: moes\.0\.experts\.bias_in\.2"),
        ({"hidden": 5}, r"model\.moes\.0\.experts\.w_in\.0 should have shape \[5, 8\], the checkpoint has \[12, 8\]"),
    ],
)
def test_another_model_is_refused_and_left_alone(other: dict[str, Any], message: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, small())
    model = small(**{"experts": 4, **other})
    before = {n: v.clone() for n, v in model.state_dict().items()}
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.load(tmp_path, model)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = small()
    checkpoint.save(tmp_path, model)
    with pytest.raises(checkpoint.CheckpointError, match="expected the state of Adam, the checkpoint has no optimizer"):
        checkpoint.load(tmp_path, model, torch.optim.Adam(model.parameters()))
    checkpoint.save(tmp_path, model, torch.optim.Adam(model.head.parameters()))
    with pytest.raises(checkpoint.CheckpointError, match="expected the state of SGD, the checkpoint has the state of"):
        checkpoint.load(tmp_path, model, torch.optim.SGD(model.parameters()))
    with pytest.raises(checkpoint.CheckpointError, match=r"did not hold embed\.weight, "):
        checkpoint.load(tmp_path, model, torch.optim.Adam(model.parameters()))
    groups = [{"params": [p], "lr": 0.1 * (1 + i)} for i, p in enumerate(model.head.parameters())]
    checkpoint.save(tmp_path, model, torch.optim.Adam(groups))
    with pytest.raises(checkpoint.CheckpointError, match=r"head\.weight and head\.bias were saved with different"):
        checkpoint.load(tmp_path, model, torch.optim.Adam(model.head.parameters()))
    with pytest.raises(ValueError, match=r"of shape \[11, 8\] that is not the model's"):
        checkpoint.save(tmp_path, model, torch.optim.Adam(small().parameters()))


def test_parameters_that_have_not_been_trained_yet_have_no_state(tmp_path: Path) -> None:
    model = small()
    for p in model.moe(1).parameters():
        p.requires_grad_(False)
    optimizer = adam(model)
    checkpoint.save(tmp_path, model, optimizer, extra={"scheduler": {"last_epoch": 3}})
    again = small(seed=5)
    fresh = adam(again)
    assert checkpoint.load(tmp_path, again, fresh) == {"scheduler": {"last_epoch": 3}}
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == fresh.state[q].keys()
        assert all(torch.equal(v, fresh.state[q][k]) for k, v in optimizer.state[p].items())


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adafactor", "RMSprop", "NAdam"])
def test_state_of_other_optimizers(name: str, tmp_path: Path) -> None:
    """Factored state of experts is cut by expert, too."""
    options = {"SGD": {"lr": 0.1, "momentum": 0.9}}.get(name, {})
    model, again = small(bias=False), small(bias=False, seed=3)
    optimizers = [getattr(torch.optim, name)(m.parameters(), **options) for m in (model, again)]
    ids = torch.arange(6)
    for step in range(4):
        for m, optimizer in zip((model, again), optimizers, strict=True):
            optimizer.zero_grad()
            next_id_loss(m(ids), ids, 1.0).backward()
            optimizer.step()
        if step == 1:
            checkpoint.save(tmp_path, model, optimizers[0])
            checkpoint.load(tmp_path, again, optimizers[1])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("name", ["NAdam", "ASGD"])
def test_numbers_of_a_model_in_half_precision_keep_their_bits(name: str, tmp_path: Path) -> None:
    """torch's own `load_state_dict` rounds all numbers but the step to the type of the parameters."""
    model, again = small().bfloat16(), small(seed=3).bfloat16()
    optimizer, fresh = (getattr(torch.optim, name)(m.parameters(), lr=0.01) for m in (model, again))
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    checkpoint.save(tmp_path, model, optimizer)
    checkpoint.load(tmp_path, again, fresh)
    rounded = 0
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        for field, value in optimizer.state[p].items():
            assert fresh.state[q][field].dtype == value.dtype
            assert torch.equal(fresh.state[q][field], value)
            rounded += int(not torch.equal(value, value.bfloat16().to(value.dtype)))
    assert rounded


def test_schedulers_go_along(tmp_path: Path) -> None:
    model = small()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3, 3])  # its milestones are counted by number
    optimizer.param_groups[0]["rates"] = {10: 0.1, 20: 0.01}  # a setting of one's own
    checkpoint.save(tmp_path, model, optimizer, extra={"schedule": scheduler.state_dict()})
    optimizer.param_groups[0]["rates"] = None
    saved = checkpoint.load(tmp_path, model, optimizer)["schedule"]
    assert saved == scheduler.state_dict()
    assert saved["milestones"] == {2: 1, 3: 2}
    assert optimizer.param_groups[0]["rates"] == {10: 0.1, 20: 0.01}


def test_what_balancing_remembers_goes_along(tmp_path: Path) -> None:
    """Of two ranks, into another engine; what it does with its state: `test_engine_resume.py`."""
    case = Case(ranks=2, shapes=((2, 3), (4,)))

    def states(group: Collective) -> dict[str, Any]:
        run = TrainingRun(case, group)
        for step in range(2):
            run.whole_step(step)
        state = run.engine.state_dict()
        run.close()
        return state

    wanted = on_threads(2, states)[0]
    checkpoint.save(tmp_path, small(), extra={"engine": wanted})
    found = checkpoint.load(tmp_path, small())["engine"]

    def resumed(group: Collective) -> dict[str, Any]:
        run = TrainingRun(case, group)
        run.engine.load_state_dict(found)
        state = run.engine.state_dict()
        run.close()
        return state

    for state in on_threads(2, resumed):
        assert leaves(state).keys() == leaves(wanted).keys()
        for name, value in leaves(state).items():
            other = leaves(wanted)[name]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name
        assert any(plan is not None and plan["holds"].any() for plan in state["plans"])


def leaves(tree: Any, name: str = "") -> dict[str, Any]:
    """Numbers and tensors of nested dictionaries and lists, by their path."""
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in leaves(value, f"{name}.{key}").items()}
    if isinstance(tree, list):
        return {k: v for at, value in enumerate(tree) for k, v in leaves(value, f"{name}.{at}").items()}
    return {name: tree}


def test_tensors_of_every_shape_come_back(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(1 / 3, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "none of them": torch.empty(0, dtype=torch.bool),
        "strided": torch.arange(6.0).view(3, 2)[:1, 0],
        "turned": torch.arange(6, dtype=torch.int32).view(2, 3).t(),
        "odd": torch.tensor([float("nan"), -0.0, float("inf")]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "bytes": torch.tensor([0, 255], dtype=torch.uint8),
    }
    checkpoint.save(tmp_path, small(), extra=tensors)
    found = checkpoint.load(tmp_path, small())
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name].nan_to_num(7.0), value.detach().nan_to_num(7.0)), name


def test_extra_that_cannot_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, again = small(), small(seed=5)
    checkpoint.save(tmp_path, model, extra={"seen": torch.ones(2)})
    before = [p.detach().clone() for p in again.parameters()]
    text = (tmp_path / "training.json").read_text()
    for old, new in (("float32", "float99"), ("AACAPw", "A CAPw"), ("[2]", "[3]")):
        (tmp_path / "training.json").write_text(text.replace(old, new, 1))
        with pytest.raises(checkpoint.CheckpointError, match=r"training\.json: expected a description"):
            checkpoint.load(tmp_path, again)
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), before, strict=True))
    monkeypatch.setattr(checkpoint, "MAX_DESCRIPTION_BYTES", 1000)
    with pytest.raises(ValueError, match="1000 can be read: put less into `extra`"):
        checkpoint.save(tmp_path / "new", model, extra={"seen": torch.ones(1000)})
    assert not (tmp_path / "new").exists()


def test_a_tensor_file_that_was_cut_short_changes_nothing(tmp_path: Path) -> None:
    model, again = small(), small(seed=5)
    checkpoint.save(tmp_path, model)
    before = [p.detach().clone() for p in again.parameters()]
    (file,) = tmp_path.rglob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(
        checkpoint.CheckpointError, match=rf"{file.name}: expected at least {len(data)} bytes, got {len(data) - 1}"
    ):
        checkpoint.load(tmp_path, again)
    file.unlink()
    with pytest.raises(checkpoint.CheckpointError, match=rf"{file.name}: cannot be read"):
        checkpoint.load(tmp_path, again)
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), before, strict=True))


def test_what_cannot_be_described_is_said(tmp_path: Path) -> None:
    model = small()
    optimizer = adam(model)
    with pytest.raises(ValueError, match=r"extra\['seen'\] is a set; expected numbers"):
        checkpoint.save(tmp_path, model, extra={"seen": {1}})
    with pytest.raises(ValueError, match=r"extra\['all'\] is a tensor of torch.float32 \[8388608\]; expected at most"):
        checkpoint.save(tmp_path, model, extra={"all": torch.empty(1 << 23)})
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(ValueError, match="setting hook is a builtin_function"):
        checkpoint.save(tmp_path, model, optimizer)
    del optimizer.param_groups[0]["hook"]
    optimizer.state[model.moe(0).experts.w_in]["wide"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"wide of moes\.0\.experts\.w_in has shape \[7\], which cannot be cut into 4"):
        checkpoint.save(tmp_path, model, optimizer)
    del optimizer.state[model.moe(0).experts.w_in]["wide"]
    optimizer.state[model.moe(0).experts.bias_in]["col"] = torch.zeros(4, 12)
    with pytest.raises(ValueError, match=r"col of moes\.0\.experts\.bias_in has shape \[4, 12\], which cannot be cut"):
        checkpoint.save(tmp_path, model, optimizer)
    assert not list(tmp_path.iterdir())


def other_steps() -> str:
    model = TinyModel(num_experts=4, group=ThreadWorld(1).collective(0))
    optimizer = adam(model)
    if torch.distributed.get_rank() == 1:
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"of process\(es\) \[1\] differ") as caught:
        checkpoint.save("unused", model, optimizer)
    return str(caught.value)


def test_processes_that_trained_other_parameters() -> None:
    assert len(set(on_processes(3, other_steps))) == 1
