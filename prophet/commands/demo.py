"""`prophet demo`: trains a small MoE model, without and with balancing, and compares the two."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from prophet.commands.arguments import add_json, check_can_write, positive, say_torch_is_imported
from prophet.errors import TextError, UsageError

# Limits on the whole demo, ten times what it takes on two cores
_LIMIT_S, _LIMIT_S_PER_STEP = 1200.0, 48.0


def add(commands: Any) -> None:
    """Register the command."""
    demo = commands.add_parser(
        "demo",
        description="Train byte-level MoE language models on real text with several expert-parallel ranks "
        "(processes of this machine), without and with balancing in turns, and compare the two. This takes about "
        "two minutes on two cores. With --device cuda each rank has a GPU, and the model is larger.",
        epilog="Writes report.html, routing.npz, metrics.jsonl, step.json (a trace of the last step, for "
        "Perfetto) and summary.json into the output folder.",
    )
    add = demo.add_argument
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where ranks train, cuda over NCCL (default: %(default)s)",
    )
    add(
        "--ranks", type=positive, metavar="N", help="expert-parallel ranks (default: one per core or GPU, two to eight)"
    )
    add("--steps", type=positive, default=40, metavar="N", help="steps of each run and seed (default: %(default)s)")
    add(
        "--text",
        type=Path,
        metavar="PATH",
        help="a file or folder to train on (default: Python's own standard library)",
    )
    add("--out", type=Path, default=Path("out/demo"), metavar="FOLDER", help="output folder (default: %(default)s)")
    add_json(demo)
    demo.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train, and print the comparison."""
    if arguments.ranks == 1:
        raise UsageError("--ranks: expected at least 2: one rank computes all tokens, so balancing can show nothing")
    # What can be refused is refused before torch is imported, which takes seconds
    check_can_write("--out", arguments.out, folder=True)
    say_torch_is_imported()
    import torch

    from prophet.demo.launch import LaunchConfig, default_ranks
    from prophet.demo.main import run_demo
    from prophet.demo.train import TrainConfig, sizes_for_gpus
    from prophet.ranks.cores import usable_cores
    from prophet.ranks.launch import check_gpus
    from prophet.terminal import console

    # Found once, since the output names the number that decided on the ranks
    cores, on_gpus = usable_cores(), arguments.device == "cuda"
    ranks = arguments.ranks or default_ranks(torch.cuda.device_count() if on_gpus else cores)
    if on_gpus:
        check_gpus(ranks)
    train = TrainConfig(steps=arguments.steps)
    config = LaunchConfig(
        out=arguments.out,
        train=sizes_for_gpus(train) if on_gpus else train,
        ranks=ranks,
        text=arguments.text,
        limit_s=max(_LIMIT_S, _LIMIT_S_PER_STEP * arguments.steps),
        on_gpus=on_gpus,
    )
    try:
        summary = run_demo(config, None if arguments.json else console(), cores=cores)
    except TextError as error:
        raise UsageError(f"--text: {error}") from None
    if arguments.json:
        print(json.dumps(summary, indent=2))
    return 0
