"""A pipeline whose layers move while it trains, and that gives ranks back. Run it on four processes:

torchrun --standalone --nproc-per-node 4 examples/dynamic_pipeline.py --out out/pipeline

Layers are frozen from the input upwards while training goes on, so the first stages have less and less to do. The
controller notices (nobody tells it), moves layers there, and puts the model on fewer ranks where that costs little.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist

import pipeline_balance
from pipeline_balance import ControllerConfig, ElasticPipeline, Meter, StageMap
from pipeline_balance.dynamics.freezing import freeze_prefix
from pipeline_balance.dynamics.gpt import Block, GPTShape, loss, modules
from prophet.demo.text import VOCABULARY, load_corpus, rank_batch

SHAPE = GPTShape(vocabulary=VOCABULARY, dim=64, heads=4, blocks=10, context=128)
MICROBATCHES, SEQUENCES = 4, 2


def train(steps: int) -> list[StageMap]:
    """Train on all ranks; returns the stage map of every step."""
    pipeline = ElasticPipeline.from_modules(
        modules(SHAPE, lambda _: Block(SHAPE.dim, SHAPE.heads), seed=0),
        loss,
        make_optimizer=lambda named_parameters: torch.optim.Adam(named_parameters, lr=1e-3),
        microbatches=MICROBATCHES,
        # these processes share cores: count the processor's time, not the wall clock's
        meter=Meter(work_clock=time.thread_time),
    )
    balanced = pipeline_balance.attach(
        pipeline, config=ControllerConfig(every_steps=5, measure_steps=3, repack_slowdown=0.25, horizon_steps=50)
    )
    text = load_corpus(max_bytes=1 << 20).train
    maps = []
    for step in range(steps):
        frozen = min(9 * step // max(steps - 1, 1), 8)
        if frozen != 9 * (step - 1) // max(steps - 1, 1) and step:
            freeze_prefix(dict(enumerate(pipeline.model.units)), frozen)  # on every rank alike
        rows = torch.from_numpy(
            rank_batch(text, seed=0, step=step, sequences=MICROBATCHES * SEQUENCES, length=128, rank=0, ranks=1)
        )
        maps.append(pipeline.stage_map)
        value = balanced.step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        if dist.get_rank() == 0 and (step % 10 == 0 or step == steps - 1):
            used = len(maps[-1].used_ranks)
            print(f"step {step}: loss {value:.3f}, {frozen} layers frozen, stages {maps[-1].boundaries}, {used} ranks")
    spent = balanced.overhead()
    if dist.get_rank() == 0:
        print(f"moved {spent.moves} times; balancing took {100 * spent.fraction:.1f} % of the time")
    return maps


def draw(maps: list[StageMap], path: Path) -> None:
    """Which rank runs which layer, step by step, and how many ranks are in use."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    ranks = max(max(m.ranks) for m in maps) + 1
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7.5, 4.6), sharex=True, height_ratios=(3, 1))
    colours = plt.get_cmap("tab10")
    grid = [[colours(m.assignment()[layer]) for m in maps] for layer in range(maps[0].layers)]
    top.imshow(grid, aspect="auto", interpolation="nearest", origin="lower", extent=(0, len(maps), 0, maps[0].layers))
    top.set_ylabel("layer")
    top.set_title("Stages while the first layers freeze")
    top.legend(
        handles=[Patch(color=colours(r), label=f"rank {r}") for r in range(ranks)],
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        frameon=False,
    )
    bottom.step(range(len(maps)), [len(m.used_ranks) for m in maps], where="post", color="black")
    bottom.set_ylim(0, ranks + 0.5)
    bottom.set_ylabel("ranks in use")
    bottom.set_xlabel("step")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, default=Path("out/pipeline"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    maps = train(options.steps)
    if dist.get_rank() == 0:
        draw(maps, options.out / "stages.png")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
