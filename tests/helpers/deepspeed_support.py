"""DeepSpeed on gloo processes for the tests: one small model of DeepSpeed's own MoE layers, trained in four ways.

With `prophet_deepspeed`, replicas placed at random; by plain DeepSpeed; and densely, by one process without an engine.
All see the same batches, whatever the number of ranks, so losses and parameters can be compared.

Shape legend: R ranks, E experts, m experts per rank.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import prophet_deepspeed  # noqa: F401  (deepspeed.initialize heeds the section)
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import prophet
from prophet.convert import original_state_dict
from prophet.engine.config import Experiment
from tests.helpers.support import RandomPlanner, seeded

# skips every file of tests that imports this one
pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")

Array = npt.NDArray[Any]
VOCAB, DIM, HIDDEN, LENGTH, ROWS = 23, 8, 12, 6, 8  # ROWS sequences per microbatch, on all ranks
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXPERTS_NAME = "deepspeed_experts."
IN_32 = {"data_types": {"grad_accum_dtype": "fp32"}}  # 16-bit gradients are added up in 32 bit


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run. ep_size: None is all ranks. plain: DeepSpeed without prophet. own: layers of prophet, built for
    all ranks, instead of DeepSpeed's. fused: an optimizer that DeepSpeed takes for its fused Adam, and keeps the values
    of in other tensors. config: more of DeepSpeed's.
    """

    ep_size: int | None = None
    plain: bool = False
    own: bool = False
    fused: bool = False
    stage: int = 0
    dtype: str = "fp32"
    optimizer: str = "AdamW"
    lr: float = 5e-3
    clip: float = 0.0
    microbatches: int = 2
    blocks: int = 2
    experts: int = 8
    sampling: bool = False
    checkpointing: str | None = None
    seed: int = 0
    scheduler: bool = True
    random: bool = True
    config: dict[str, Any] = field(default_factory=dict)
    section: dict[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(repr(self))

    def plainly(self) -> Case:
        return replace(self, plain=True)

    def deepspeed_config(self) -> dict[str, Any]:
        params: dict[str, Any] = {"lr": self.lr}
        if self.optimizer == "AdamW":
            params |= {"torch_adam": True, "weight_decay": 0.01, "betas": [0.8, 0.95]}
        found: dict[str, Any] = {
            "train_batch_size": ROWS * self.microbatches,
            "gradient_accumulation_steps": self.microbatches,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": self.optimizer, "params": params},
            "steps_per_print": 10_000,
        }
        if self.fused:
            del found["optimizer"]
        if self.scheduler:
            found["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": self.lr}}
        if self.dtype != "fp32":
            found[self.dtype] = {"enabled": True}
        for key, value in self.config.items():
            found[key] = {**found[key], **value} if isinstance(found.get(key), dict) else value
        if not self.plain:
            ours = {"ep_size": self.ep_size or dist.get_world_size(), "planner": "pro-prophet"}
            found["prophet"] = ours | self.section
        return found


class Model(nn.Module):
    """Embedding, residual MoE layers of DeepSpeed with a linear mix between them, and a read-out."""

    def __init__(self, case: Case, ep_size: int = 1) -> None:
        super().__init__()
        self.case = case
        with seeded(case.seed):
            self.embed = nn.Embedding(VOCAB, DIM)
            self.mixes = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(case.blocks))
            self.head = nn.Linear(DIM, VOCAB)
            self.moes = nn.ModuleList(self._moe(case, ep_size) for _ in range(case.blocks))

    @staticmethod
    def _moe(case: Case, ep_size: int) -> nn.Module:
        if case.own:
            return prophet.MoE(DIM, HIDDEN, case.experts, 2, group=dist.group.WORLD)
        layers: Any = importlib.import_module("deepspeed.moe.layer")
        expert = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM))
        moe: nn.Module = layers.MoE(
            DIM,
            expert,
            num_experts=case.experts,
            ep_size=ep_size,
            k=2,
            drop_tokens=False,
            top2_2nd_expert_sampling=case.sampling,
        )
        seeds = torch.randint(0, 1 << 31, (case.experts,)).tolist()
        for name, p in moe.named_parameters():
            if EXPERTS_NAME not in name:
                nn.init.normal_(p, std=0.5)  # a router with favourites
        held: Any = moe.deepspeed_moe.experts.deepspeed_experts  # type: ignore[union-attr]
        first = len(held) * (dist.get_rank() % ep_size)
        for i, module in enumerate(held):
            generator = torch.Generator().manual_seed(seeds[first + i])
            for p in module.parameters():
                nn.init.normal_(p, std=0.3, generator=generator)
        return moe

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for mix, moe in zip(self.mixes, self.moes, strict=True):
            x = x + torch.tanh(mix(x))
            x = x + self._run(moe, x)
        logits = self.head(x[:, :-1]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def _run(self, moe: nn.Module, x: Tensor) -> Tensor:
        def run(tokens: Tensor) -> Tensor:
            out = moe(tokens)
            first: Tensor = out if self.case.own else out[0]
            return first

        kind = self.case.checkpointing
        if kind is None:
            return run(x)
        if kind == "deepspeed":
            module: Any = importlib.import_module("deepspeed")
            found: Tensor = module.checkpointing.checkpoint(run, x)
            return found
        out: Tensor = checkpoint(run, x, use_reentrant=kind == "reentrant")
        return out


def batch(step: int, microbatch: int) -> Tensor:
    """All ranks' sequences of one microbatch, [ROWS, LENGTH]."""
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    start = torch.randint(0, VOCAB, (ROWS, 1), generator=generator)
    stride = torch.randint(1, 4, (ROWS, 1), generator=generator)
    return (start + stride * torch.arange(LENGTH)) % VOCAB


def prepare() -> Any:
    """Import deepspeed for CPUs; it would compile an operation for processes of one machine, which takes a minute."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # torch computes fp16 on every processor; DeepSpeed asks whether this one does so natively, and few do
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    importlib.import_module("logging").getLogger("DeepSpeed").setLevel("WARNING")
    deepspeed.init_distributed()
    gc.freeze()  # converting a model looks through all objects that are not
    return deepspeed


def start(case: Case) -> Any:
    """The engine of a case, on this process."""
    deepspeed = prepare()
    ranks = dist.get_world_size()
    model = Model(case, (case.ep_size or ranks) if case.plain else 1)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=_fused(case) if case.fused else None,
        model_parameters=model.parameters(),
        config=case.deepspeed_config(),
    )
    if not case.plain:
        engine.prophet.experiment = Experiment(check_every=1)
    if not case.plain and case.random:
        engine.prophet.planner = RandomPlanner(case.seed, 0.6)
    return engine


def _fused(case: Case) -> Any:
    """torch's optimizer in the guise of the fused one, which has to be compiled for a device."""
    fused: Any = importlib.import_module("deepspeed.ops.adam").FusedAdam
    base: Any = torch.optim.SGD if case.optimizer == "SGD" else torch.optim.AdamW

    class Fused(fused, base):  # type: ignore[misc]
        def __init__(self, params: Any) -> None:
            base.__init__(self, params, lr=case.lr)

        step = base.step
        zero_grad = base.zero_grad

    return Fused


def train(engine: Any, steps: int, loss_of: Callable[[Any, int, int], Tensor] | None = None) -> list[float]:
    """Go on for `steps` steps; the mean loss over ranks and microbatches, by step. Data follows `global_steps`.

    loss_of: this rank's loss from the engine, step and microbatch; that of `Model` if None.
    """
    loss_of = loss_of or _loss_of
    losses = []
    for _ in range(steps):
        step, micros = engine.global_steps, engine.gradient_accumulation_steps()
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(micros):
            loss = loss_of(engine, step, micro)
            engine.backward(loss)
            engine.step()
            total += loss.detach().double()
        dist.all_reduce(total)
        losses.append(float(total) / (dist.get_world_size() * micros))
    return losses


def _loss_of(engine: Any, step: int, micro: int) -> Tensor:
    loss: Tensor = engine(batch(step, micro).chunk(dist.get_world_size())[dist.get_rank()])
    return loss


def raw_state(engine: Any) -> dict[str, Any]:
    """What this process holds between two steps, as DeepSpeed and torch hold it, flat and by name."""
    base = engine.basic_optimizer
    scaler = getattr(engine.optimizer, "loss_scaler", getattr(engine.optimizer, "loss_scale_config", None))
    found = {
        "module": engine.module.state_dict(),
        "optimizer": base.state_dict(),
        "updated": [list(group["params"]) for group in base.param_groups],
        "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler else None,
        "scaler": None if scaler is None else vars(scaler),
        "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps],
        "random": torch.get_rng_state(),
    }
    return _flat(found)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    items: Any = None
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    if items is None:
        return {prefix: value.detach().double().numpy().copy() if isinstance(value, Tensor) else value}
    found: dict[str, Any] = {}
    for key, one in items:
        found |= _flat(one, f"{prefix}/{key}" if prefix else str(key))
    return found


def values(engine: Any) -> dict[str, Array]:
    """The 32-bit value and the moments of this process's parameters, experts one by one, by name."""
    states: Any = importlib.import_module("prophet_deepspeed.zero_states").States(engine)
    found = {}
    for name, p in engine.module.named_parameters():
        for key, value in states.read(p).items():
            array = value.detach().numpy().copy()
            if not getattr(p, "prophet_expert", False):
                found[f"{name}/{key}"] = array
                continue
            bank = engine.module.get_submodule(name.rpartition(".")[0])
            by_expert = array.reshape(bank.experts, -1)  # stacked biases are flat
            found |= {f"{name}.{bank.first_expert + i}/{key}": one for i, one in enumerate(by_expert)}
    return found


def moved(engine: Any) -> int:
    """Replicas that the last step used on all ranks; the tests want some."""
    return int(engine.prophet.last_step.copies.sum())


def parameters(engine: Any) -> dict[str, Array]:
    """The 32-bit values of all parameters by their names in the unconverted model of one rank, on all ranks."""
    states: Any = importlib.import_module("prophet_deepspeed.zero_states").States(engine)
    params = list(engine.module.parameters())
    before = [p.data for p in params]
    for p in params:
        if states.holds(p):  # or frozen
            p.data = states.read(p)["fp32"]
    try:
        return _named(engine)
    finally:
        for p, data in zip(params, before, strict=True):
            p.data = data


def _named(engine: Any) -> dict[str, Array]:
    model = engine.module
    if hasattr(engine, "prophet"):
        found = _arrays(original_state_dict(model))
        if engine.prophet_report is None:  # nothing is converted: every rank has its own experts
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, found)
            found = {k: v for part in parts for k, v in part.items()}
        return found
    whole: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if EXPERTS_NAME not in name:
            whole[name] = value
            continue
        before, _, after = name.partition(EXPERTS_NAME)
        local, _, rest = after.partition(".")
        moe: Any = model.get_submodule(name.partition(".deepspeed_moe")[0])
        shares = [torch.zeros_like(value) for _ in range(moe.ep_size)]
        group: Any = importlib.import_module("deepspeed.utils.groups")
        dist.all_gather(shares, value.contiguous(), group=group._get_expert_parallel_group(moe.expert_group_name))
        for rank, part in enumerate(shares):
            whole[f"{before}{EXPERTS_NAME}{int(local) + rank * moe.num_local_experts}.{rest}"] = part
    return _arrays(whole)


def _arrays(state: dict[str, Tensor]) -> dict[str, Array]:
    return {k: v.detach().float().numpy().copy() for k, v in state.items()}


def dense(
    case: Case, ranks: int, steps: int, state: dict[str, Tensor] | None = None
) -> tuple[list[float], dict[str, Array]]:
    """The oracle, in one process of its own: no engine, no parallelism; torch's optimizer and clipping.

    ranks: among how many the batches would be dealt out; the loss is the mean of theirs. A 16-bit case is computed in
    32 bit, from the same rounded parameters. state: the model's parameters at the start.
    """
    prepare()
    model: Any = Model(case)
    if state is not None:
        model.load_state_dict(state)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(DTYPES[case.dtype]))  # what a 16-bit run starts from
    for moe in [] if case.own else model.moes:
        moe.set_deepspeed_parallelism()
    if case.optimizer == "AdamW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=case.lr, weight_decay=0.01, betas=(0.8, 0.95)
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
    schedules: Any = importlib.import_module("deepspeed.runtime.lr_schedules")
    scheduler = schedules.WarmupLR(optimizer, warmup_num_steps=4, warmup_max_lr=case.lr) if case.scheduler else None
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(case.microbatches):
            for ids in batch(step, micro).chunk(ranks):
                loss = model(ids) / (ranks * case.microbatches)
                loss.backward()
                total += float(loss.detach())
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(total)
    return losses, _arrays(model.state_dict())


def differences(wanted: dict[str, Array], got: dict[str, Array]) -> float:
    """The largest absolute difference of two states with the same names."""
    if set(wanted) != set(got):
        raise AssertionError(f"names differ: {sorted(set(wanted) ^ set(got))[:6]}")
    return max(float(np.abs(wanted[k] - got[k]).max()) for k in wanted)


def update_error(start: dict[str, Array], wanted: dict[str, Array], got: dict[str, Array]) -> float:
    """The largest, over parameters, of how far the update since `start` is from the wanted one, relative to it."""
    errors = []
    for name, before in start.items():
        update = np.linalg.norm(wanted[name] - before)
        errors.append(float(np.linalg.norm(got[name] - wanted[name]) / update) if update > 0 else 0.0)
    return max(errors)
