"""Runs somebody's training script as one rank, and notes the value of every loss that goes backward.

    peer_program.py --out FOLDER [--lr FACTOR] SCRIPT [ARGUMENT ...]

The script is run as it is. `torchvision` is a stand-in with random pictures. Dropout is a function of its input, so
that runs which draw random numbers in another order can be compared; `--random-dropout` leaves it random. `--lr`
multiplies SGD's learning rate, which Tutel's examples have so small that nothing would be learnt. On a CPU,
what asks for CUDA gets the CPU's counterpart.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import TensorDataset

TRAIN, TEST, CLASSES = 160, 64, 10


def pictures(*shape: int) -> Any:
    """A class of data sets of pictures [*shape]: those of one class share a pattern."""

    def made(_: str, train: bool, **__: Any) -> TensorDataset:
        generator = torch.Generator().manual_seed(int(train))
        patterns = torch.randn(CLASSES, *shape, generator=torch.Generator().manual_seed(7))
        labels = torch.randint(CLASSES, (TRAIN if train else TEST,), generator=generator)
        noise = torch.randn(len(labels), *shape, generator=generator)
        return TensorDataset(patterns[labels] + noise, labels)

    return made


def stand_in_torchvision() -> None:
    """`from torchvision import datasets, transforms`, as far as Tutel's examples go."""
    vision = types.ModuleType("torchvision")
    vision.datasets = types.SimpleNamespace(MNIST=pictures(1, 28, 28), CIFAR10=pictures(3, 32, 32))  # type: ignore[attr-defined]
    nothing = staticmethod(lambda *_, **__: None)
    vision.transforms = type("transforms", (), dict.fromkeys(("Compose", "ToTensor", "Normalize"), nothing))  # type: ignore[attr-defined]
    sys.modules["torchvision"] = vision


def smooth_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """In training something else than its input, without drawing a number."""
    return input * (1 + p * torch.sin(3 * input)) if training else input


def without_cuda() -> None:
    """What scripts that were written for CUDA alone ask of torch and of Tutel, on a CPU."""
    from tutel import system  # type: ignore[import-not-found]

    parallel, joined = torch.nn.parallel.DistributedDataParallel, system.init_data_model_parallel
    wrap = parallel.__init__
    parallel.__init__ = lambda own, module, **_: wrap(own, module)  # type: ignore[assignment]  # no number of a device
    system.init_data_model_parallel = lambda **_: joined(backend="gloo")
    torch.cuda.amp.autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)  # type: ignore[assignment,misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--random-dropout", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()

    losses: list[float] = []
    backward, made = Tensor.backward, torch.optim.SGD.__init__

    def noting(loss: Tensor, *args: Any, **named: Any) -> None:
        if sys._getframe(1).f_code.co_filename == options.script:  # a conversion tries experts, backward too
            losses.append(float(loss.detach()))
        backward(loss, *args, **named)

    def faster(optimizer: Any, params: Any, lr: float, **named: Any) -> None:
        made(optimizer, params, lr=lr * options.lr, **named)

    Tensor.backward = noting  # type: ignore[assignment]
    torch.optim.SGD.__init__ = faster  # type: ignore[assignment]
    if not torch.cuda.is_available():
        without_cuda()
    if not options.random_dropout:
        torch.nn.functional.dropout = smooth_dropout
    stand_in_torchvision()

    sys.argv = [options.script, *options.arguments]
    found = runpy.run_path(options.script, run_name="__main__")
    # only a run to the end writes: torchrun calls a failure a success once Tutel has been loaded
    engine = getattr(found.get("balanced"), "engine", None)
    copies = int(engine.last_step.copies.sum()) if engine is not None and engine.last_step else 0
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"losses": losses, "copies": copies})
    (options.out / f"{os.environ['RANK']}.json").write_text(text)
    # Tutel's DDP scripts may abort as the interpreter ends, without this library too: end before that
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
