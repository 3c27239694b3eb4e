"""AutoEP on gloo processes for the tests: small transformers models, trained in three ways on the same batches.

With the "prophet" section and replicas placed at random; by plain AutoEP; and by one process without an engine.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

import gc
import importlib
import os
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from prophet.convert import original_state_dict
from prophet.engine.config import Experiment
from tests.helpers import deepspeed_support
from tests.helpers.moe_models import VOCAB, hugging_face
from tests.helpers.support import RandomPlanner

# skips every file of tests that imports this one
pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")
pytest.importorskip("transformers", reason="needs transformers: pip install '.[hf]'")

Array = npt.NDArray[Any]
ROWS, LENGTH = 8, 7  # sequences of one microbatch, on all ranks, and their tokens


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run. plain: AutoEP without prophet. optimizer: "config", or a client's "object". config: more of
    DeepSpeed's; expert_parallel, section: more of these.
    """

    family: str = "deepseek_v3"
    ep_size: int = 2
    stage: int = 0
    plain: bool = False
    optimizer: str = "config"
    lr: float = 0.05
    clip: float = 0.0
    microbatches: int = 2
    frozen: tuple[str, ...] = ()
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    expert_parallel: dict[str, Any] = field(default_factory=dict)
    section: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(repr(self))

    def plainly(self) -> Case:
        return replace(self, plain=True, optimizer="config")  # AutoEP wants experts in groups of an object apart

    def deepspeed_config(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "train_batch_size": ROWS * self.microbatches,
            "gradient_accumulation_steps": self.microbatches,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "SGD", "params": {"lr": self.lr}},
            "steps_per_print": 10_000,
            "expert_parallel": {"enabled": True, "autoep_size": self.ep_size, **self.expert_parallel},
            **self.config,
        }
        if self.optimizer == "object":
            del found["optimizer"]
        if not self.plain:
            found["prophet"] = {"planner": "pro-prophet", **self.section}
        return found

    def build(self) -> Any:
        model = hugging_face(self.family, **self.model)
        for name, p in model.named_parameters():
            if any(part in name for part in self.frozen):
                p.requires_grad_(False)
        return model


def batch(step: int, microbatch: int) -> Tensor:
    """All ranks' sequences of one microbatch, [ROWS, LENGTH]."""
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)


def prepare() -> Any:
    """Import deepspeed for CPUs, and let AutoEP replace Mixtral's blocks under the transformers that is installed."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    deepspeed: Any = importlib.import_module("deepspeed")
    importlib.import_module("prophet_deepspeed")  # deepspeed.initialize heeds the section
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes a minute
    importlib.import_module("logging").getLogger("DeepSpeed").setLevel("ERROR")
    deepspeed.init_distributed()
    let_autoep_read_the_registry()
    gc.freeze()  # converting a model looks through all objects that are not
    return deepspeed


def let_autoep_read_the_registry() -> None:
    """AutoEP 0.19.8 asks by a class's name, and with a default; transformers 5.23 asks by a model."""
    capturing: Any = importlib.import_module("transformers.utils.output_capturing")
    kind = type(capturing._CAN_RECORD_REGISTRY)
    if kind is dict:
        return
    own = kind.get

    def get(registry: Any, key: Any, *default: Any) -> Any:
        return dict.get(registry, key, *default) if isinstance(key, str) else own(registry, key)

    kind.get = get


def start(case: Case) -> Any:
    """The engine of a case, on this process."""
    deepspeed = prepare()
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr) if case.optimizer == "object" else None
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=case.deepspeed_config())
    if not case.plain:
        engine.prophet.experiment = Experiment(check_every=1)
        engine.prophet.planner = RandomPlanner(case.seed, 0.6)
    return engine


def train(engine: Any, steps: int) -> list[float]:
    """Go on for `steps` steps, as `deepspeed_support.train` does."""

    def loss_of(engine: Any, step: int, micro: int) -> Tensor:
        ids = batch(step, micro).chunk(dist.get_world_size())[dist.get_rank()]
        loss: Tensor = engine(input_ids=ids, labels=ids).loss
        return loss

    return deepspeed_support.train(engine, steps, loss_of)


def counts(engine: Any) -> Array:
    """What AutoEP counts of this rank's choices, layer by layer, [L, E]."""
    blocks = [m for m in engine.module.modules() if hasattr(m, "tokens_per_expert")]
    return torch.stack([m.tokens_per_expert for m in blocks]).numpy().copy()


def state(engine: Any) -> dict[str, Array]:
    """All parameters and buffers by their names in the model before AutoEP, on all ranks."""
    return {k: v.detach().float().numpy().copy() for k, v in original_state_dict(engine.module).items()}


def alone(case: Case, ranks: int, steps: int) -> tuple[list[float], dict[str, Array]]:
    """The oracle, in one process: transformers' own model, no engine, torch's SGD and clipping; losses, and its state.

    ranks: among how many the batches would be dealt out; the loss is the mean of theirs.
    """
    model = case.build()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=case.lr)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(case.microbatches):
            for ids in batch(step, micro).chunk(ranks):
                loss = model(input_ids=ids, labels=ids).loss / (ranks * case.microbatches)
                loss.backward()
                total += float(loss.detach())
        if case.clip:
            nn.utils.clip_grad_norm_(trained, case.clip)
        optimizer.step()
        losses.append(total)
    return losses, {k: v.detach().float().numpy().copy() for k, v in model.state_dict().items()}


def difference(wanted: dict[str, Array], got: dict[str, Array]) -> float:
    """The largest absolute difference of two states with the same names."""
    if set(wanted) != set(got):
        raise AssertionError(f"names differ: {sorted(set(wanted) ^ set(got))[:6]}")
    return max(float(np.abs(wanted[k] - got[k]).max()) for k in wanted)
