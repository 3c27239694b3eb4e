"""Four ranks that train and save, until one of them fails: what every rank then says, and what is left on disk.

The loop is a user's: DistributedDataParallel around a model of three MoE layers with different numbers of experts and
different gates, clipping, a checkpoint every few steps.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import prophet
from prophet import checkpoint
from prophet.ranks.collective import Collective
from prophet.ranks.process_group import collective_for
from prophet.ranks.threads import ThreadWorld

RANKS, ODD = 4, 2  # the odd one is the rank that fails
DIM, TOKENS = 8, 12
EXPERTS = (4, 16, 8)
GATES = (
    prophet.GateConfig(),
    prophet.GateConfig(aux_loss="gshard", capacity_factor=1.5),
    prophet.GateConfig(aux_loss="switch"),
)
GOOD_STEPS, STEPS = 3, 6
GRACE_S = 6.0  # beyond the limit: three seconds to hear of each other, the rest for a machine that is busy
Order = tuple[int, ...]


class Model(nn.Module):
    """Three MoE layers. order: which of them a pass runs."""

    def __init__(self, group: Collective, experts: tuple[int, ...] = EXPERTS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moes = nn.ModuleList(
            prophet.MoE(DIM, 6, n, group=group, gate=g) for n, g in zip(experts, GATES, strict=True)
        )
        self.mix = nn.Linear(DIM, DIM)
        self.order: Order = tuple(range(len(experts)))

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = x + self.moes[i](torch.tanh(self.mix(x)))
        return x


class Training:
    """One rank's model, optimizer and engine."""

    def __init__(self, limit_s: float, folder: Path, *, experts: tuple[int, ...] = EXPERTS, slots: int = 4) -> None:
        self.rank, self.limit_s, self.folder = dist.get_rank(), limit_s, folder
        self.model = Model(collective_for(None, timeout_s=limit_s), experts)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        config = prophet.EngineConfig(topology="uniform", slots_per_rank=slots)
        self.engine = prophet.attach(self.model, self.optimizer, config=config)
        self.wrapped = DistributedDataParallel(self.model)

    def loss(self, step: int, order: Order = (0, 1, 2), *, wrapped: bool = True) -> Tensor:
        self.model.order = order
        x = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(100 * step + self.rank))
        with prophet.collect_losses(self.model) as book:
            y = (self.wrapped if wrapped else self.model)(x)
        return y.square().mean() + book.total()

    def step(self, step: int, order: Order = (0, 1, 2), *, wrapped: bool = True) -> None:
        self.optimizer.zero_grad()
        self.loss(step, order, wrapped=wrapped).backward()
        self.update()

    def update(self) -> None:
        self.engine.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def save(self, name: str, step: int) -> None:
        checkpoint.save(self.folder / name, self.model, self.optimizer, extra={"step": step})


# --- the faults: what the odd rank does in a step instead ---


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill(t: Training, step: int) -> None:
    t.optimizer.zero_grad()
    t.loss(step)
    die()


def kill_later(t: Training, step: int) -> None:
    drop_after_backward(t, step)
    die()


def stop(t: Training, step: int) -> None:
    t.optimizer.zero_grad()
    loss = t.loss(step)
    # somebody has to wake this process
    wake = f"sleep {t.limit_s + 2 * GRACE_S}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", wake], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    loss.backward()
    t.update()


def nan(t: Training, step: int) -> None:
    gate: Any = t.model.moes[1]
    with torch.no_grad():
        gate.gate.weight[0] = torch.nan
    t.step(step)


def drop_after_backward(t: Training, step: int) -> None:
    t.optimizer.zero_grad()
    t.loss(step).backward()


def dense_step(t: Training, step: int) -> None:
    t.optimizer.zero_grad()
    t.model.mix(torch.ones(1, DIM)).sum().backward()
    t.optimizer.step()
    t.step(step)


def evaluate(t: Training, step: int) -> None:
    t.model.eval()
    with torch.no_grad():
        t.loss(step)


def fail(t: Training, step: int) -> None:
    t.optimizer.zero_grad()
    t.loss(step)
    raise KeyError("a user's mistake")


def save(t: Training, step: int) -> None:
    t.save("checkpoint", step)


def full_disk(t: Training, step: int) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(os, "fsync", side_effect=error):  # nothing more can be written to a file
        save(t, step)


def kill_in_save(t: Training, step: int) -> None:
    with mock.patch.object(os, "fsync", side_effect=lambda _: die()):
        save(t, step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What goes wrong. odd: what the odd ranks do in the step after the good ones; others: what the others do.

    says: what the error of every rank that survives is, one of these. named: what the others' errors name. setup: what
    the odd rank's model is made of instead. survives: whether the odd rank says something. waits: whether the others
    wait for the limit.
    """

    text: str
    says: tuple[str, ...]
    named: str
    odd: Callable[[Training, int], object] = Training.step
    others: Callable[[Training, int], object] = Training.step
    ranks: tuple[int, ...] = (ODD,)
    setup: dict[str, Any] = field(default_factory=dict)
    survives: bool = True
    waits: bool = False


_LOST = ("PeerLost",)
_WAITED = ("CollectiveTimeout", "PeerLost")  # the first rank to give up closes its connections
FAULTS: dict[str, Fault] = {
    "kill": Fault(
        text="killed between forward and backward",
        odd=kill, says=_LOST, named="rank(s) [2] are gone", survives=False,
    ),
    "kill later": Fault(
        text="killed after its backward pass",
        odd=kill_later, says=_LOST, named="rank(s) [2] are gone", survives=False,
    ),
    "kill two": Fault(
        text="two are killed between forward and backward",
        odd=kill, ranks=(1, 2), says=_LOST, named="rank(s) [1, 2] are gone", survives=False,
    ),
    "stop": Fault(
        text="stopped for longer than the limit, then woken",
        odd=stop, says=_WAITED, named="rank(s) [2] give no sign of life", waits=True,
    ),
    "NaN": Fault(text="NaN in a gate", odd=nan, says=("RoutingError",), named="MoE layer 1, step 3"),
    "drop after forward": Fault(
        text="a step skipped by `continue` after the forward pass",
        odd=Training.loss, says=_WAITED, named="rank(s) [2] in exchange of counts of layer 0", waits=True,
    ),
    "drop after backward": Fault(
        text="a step skipped by `continue` after the backward pass",
        odd=drop_after_backward, says=("OutOfStep",), named="rank(s) [2]",
    ),
    "drop before forward": Fault(
        text="a step skipped by `continue` before the model is called; noticed when its loop ends",
        odd=lambda t, step: None, says=_WAITED, named="rank(s) [2]", waits=True,
    ),
    "dense step": Fault(
        text="a step of the optimizer without the experts",
        odd=dense_step, says=("OutOfStep",), named="the number of optimizer steps of rank(s) [2]",
    ),
    "outside DDP": Fault(
        text="a step outside DDP", odd=partial(Training.step, wrapped=False), says=("OutOfStep",),
        named="MoE layer 0, step 3: rank(s) [2] differ",
    ),
    "skip layer": Fault(
        text="one MoE layer of three skipped", odd=partial(Training.step, order=(0, 2)), says=("OutOfStep",),
        named="rank(s) [2] at MoE layer 2 of forward pass 4",
    ),
    "repeat layer": Fault(
        text="an MoE layer run twice", odd=partial(Training.step, order=(0, 1, 1, 2)), says=("OutOfStep",),
        named="rank(s) [2] at MoE layer 1 of forward pass 5",
    ),
    "repeat last layer": Fault(
        text="the last MoE layer run twice", odd=partial(Training.step, order=(0, 1, 2, 2)), says=_WAITED,
        named="rank(s) [2] in exchange of counts of layer 2", waits=True,
    ),
    "evaluate": Fault(
        text="evaluates while the others train", odd=evaluate, says=("OutOfStep",),
        named="rank(s) [2] at MoE layer 0 of forward pass 4 (evaluation)",
    ),
    "exception": Fault(text="an exception", odd=fail, says=_LOST, named="rank(s) [2] are gone"),
    "other model": Fault(
        text="another number of experts", setup={"experts": (4, 32, 8)}, says=("ConfigMismatch",),
        named="the MoE layers of rank(s) [2]",
    ),
    "other configuration": Fault(
        text="another configuration", setup={"slots": 2}, says=("ConfigMismatch",),
        named="the engine configuration of rank(s) [2]",
    ),
    "disk full": Fault(
        text="disk full while it saves", odd=full_disk, others=save, says=("CheckpointError",),
        named="rank 2: OSError: [Errno 28] No space left",
    ),
    "kill in save": Fault(
        text="killed while it saves", odd=kill_in_save, others=save, says=_LOST, named="rank(s) [2] are gone",
        survives=False,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What a rank said, and how many seconds after it met the fault; nothing where it ran to its end."""

    kind: str
    text: str
    seconds: float

    @classmethod
    def read(cls, folder: Path, rank: int) -> Said | None:
        """What that rank said; None where it said nothing."""
        path = _words(folder, rank)
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _words(folder: Path, rank: int) -> Path:
    return folder / f"said-{rank}.json"


def run(name: str, folder: str, limit_s: float) -> None:
    """One rank of four: good steps, a checkpoint, the fault, and then as many good steps as it gets.

    An error ends it, as it ends a user's program, once it is written down.
    """
    fault, path = FAULTS[name], Path(folder)
    odd = dist.get_rank() in fault.ranks
    dist.barrier()
    began = time.monotonic()
    kind = text = ""
    try:
        t = Training(limit_s, path, **(fault.setup if odd else {}))
        for step in range(GOOD_STEPS):
            t.step(step)
        for target in ("checkpoint", "reference"):
            t.save(target, GOOD_STEPS)
        began = time.monotonic()
        (fault.odd if odd else fault.others)(t, GOOD_STEPS)
        for step in range(GOOD_STEPS + 1, STEPS):
            t.step(step)
    except Exception as error:
        kind, text = type(error).__name__, str(error)
        raise
    finally:
        said = Said(kind=kind, text=text, seconds=time.monotonic() - began)
        _words(path, dist.get_rank()).write_text(json.dumps(asdict(said)), encoding="utf-8")


def whole(folder: Path) -> bool:
    """Whether the checkpoint that was there before the fault loads, bit by bit as the other one that was written then.

    True as well where the fault came before any was written.
    """
    if not (folder / "reference").exists():
        return not (folder / "checkpoint").exists()
    found = []
    for name in ("checkpoint", "reference"):
        model = Model(ThreadWorld(1).collective(0))
        optimizer = torch.optim.AdamW(model.parameters())
        extra = checkpoint.load(folder / name, model, optimizer)
        moments = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
        found.append((extra, [*(v.detach() for v in model.state_dict().values()), *moments]))
    (extra, here), (wanted, there) = found
    return extra == wanted == {"step": GOOD_STEPS} and all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
