"""`prophet demo`: trains a small MoE model, without and with balancing, and compares the two."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from prophet.commands.arguments import UsageError, not_negative, positive


def add(commands: Any) -> None:
    """Register the command."""
    demo = commands.add_parser(
        "demo",
        help="train a small MoE language model, without and with balancing",
        description="Train a byte-level MoE language model on real text with several expert-parallel ranks "
        "(processes of this machine), once without and once with balancing, and compare the two. About two minutes "
        "on two cores.",
        epilog="Writes report.html, routing.npz, metrics.jsonl, step.json (a trace of the last step, for\n"
        "Perfetto) and summary.json into the output folder.",
    )
    add = demo.add_argument
    add("--out", type=Path, default=Path("out/demo"), metavar="FOLDER", help="output folder (default: %(default)s)")
    add(
        "--text",
        type=Path,
        metavar="PATH",
        help="a file or folder to train on (default: Python's own standard library)",
    )
    add("--steps", type=positive, default=150, metavar="N", help="steps of each run (default: %(default)s)")
    add("--ranks", type=positive, default=4, metavar="N", help="expert-parallel ranks (default: %(default)s)")
    add("--seed", type=not_negative, default=0, metavar="N", help="of parameters and data (default: %(default)s)")
    add(
        "--slots",
        type=not_negative,
        default=2,
        metavar="N",
        help="replicas a rank may hold per layer (default: %(default)s)",
    )
    add(
        "--limit",
        type=positive,
        default=1200,
        metavar="SECONDS",
        help="give up after this long (default: %(default)s)",
    )
    add("--json", action="store_true", help="print summary.json instead of tables")
    demo.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train, and print the comparison."""
    from rich.console import Console

    from prophet.demo.launch import LaunchConfig
    from prophet.demo.main import run_demo
    from prophet.demo.text import TextError
    from prophet.demo.train import TrainConfig

    config = LaunchConfig(
        out=arguments.out,
        train=TrainConfig(steps=arguments.steps, seed=arguments.seed, slots_per_rank=arguments.slots),
        ranks=arguments.ranks,
        text=arguments.text,
        limit_s=float(arguments.limit),
    )
    try:
        summary = run_demo(config, Console(stderr=arguments.json))
    except TextError as error:
        raise UsageError(f"--text: {error}") from None
    if arguments.json:
        print(json.dumps(summary, indent=2))
    return 0
