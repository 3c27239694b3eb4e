"""One run: stages follow freezing, dp, slices and ep change, experts are balanced, and it goes on from files.

    torchrun --standalone --nproc-per-node 4 examples/elastic_whole_run.py

The model is a small Mixtral of transformers, the text this repository's documentation. With --fixed the job stays in
the first layout, and balances nothing: the losses are the same, but for rounding.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from transformers import MixtralConfig, MixtralForCausalLM

import prophet
from pipeline_balance import ControllerConfig, elastic

LAYOUTS = ("pp2,dp2", "pp4", "pp2,dp2,slices4", "pp2,dp2,ep2,slices4", "dp4,ep2")
FROZEN, CONTEXT, ROWS = 4, 64, 16


def build() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_local_experts": 4, "num_hidden_layers": 8}
    config = MixtralConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=4, **sizes)
    model = MixtralForCausalLM(config)
    prophet.convert(model, group=elastic.one_rank())
    return model


def start(layout: elastic.Parallelism, rows: torch.Tensor, balanced: bool) -> elastic.Job:
    return elastic.Job(
        build,
        lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-3),
        layout,
        data=elastic.Batches(TensorDataset(rows, rows), ROWS),
        microbatches=4,
        balance_stages=ControllerConfig(every_steps=4, measure_steps=2) if balanced else None,
        balance_experts=prophet.EngineConfig() if balanced else None,
    )


def freeze(model: Any) -> None:
    """The embedding and the first layers train no more, so the first stage has less to do."""
    model.get_input_embeddings().requires_grad_(False)
    for layer in model.model.layers[:FROZEN]:
        layer.requires_grad_(False)


def draw(losses: list[float], seen: list[elastic.Parallelism], path: Path) -> None:
    """Losses over the steps, and below how many of the layers each stage has."""
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 4.5), height_ratios=(2, 1))
    above.plot(range(1, len(losses) + 1), losses, color="black")
    above.set_ylabel("loss")
    kinds = [str(layout).split(",stages")[0].split(",order")[0] for layout in seen]
    starts = [k for k in range(len(kinds)) if k == 0 or kinds[k] != kinds[k - 1]]
    for k in starts:
        above.axvline(k + 0.5, color="grey", linewidth=0.5)
        above.text(k + 1, max(losses), kinds[k], fontsize=8, va="top")
    units = 2 + build().config.num_hidden_layers  # what is before and behind the layers counts, too
    for k, layout in enumerate(seen):
        ends = layout.stage_map(units).boundaries
        for stage, (start, end) in enumerate(itertools.pairwise(ends)):
            below.bar(k + 1, end - start, bottom=start, width=1.0, color=f"C{stage}", edgecolor="white", linewidth=0.3)
    below.set_ylabel("layers by stage")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="in each layout")
    parser.add_argument("--fixed", action="store_true", help="stay in the first layout")
    parser.add_argument("--picture", type=Path, help="draw losses, layouts and stages to this file")
    args = parser.parse_args()
    dist.init_process_group("gloo")

    pages = sorted((Path(__file__).resolve().parents[1] / "docs").glob("*.md"))
    text = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()
    rows = text[: text.numel() // CONTEXT * CONTEXT].view(-1, CONTEXT)
    layouts = [elastic.Parallelism.parse(words) for words in LAYOUTS]
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)  # one folder that all processes see
    job = start(layouts[0], rows, not args.fixed)
    losses: list[float] = []
    seen: list[elastic.Parallelism] = []
    for number, layout in enumerate(layouts):
        if number == len(layouts) - 1 and not args.fixed:  # the last layout goes on from files
            job.save(folder[0])
            job.close()
            job = start(layout, rows, balanced=True)
            job.load(folder[0])
        elif number and not args.fixed:
            report = job.switch(layout)
            if dist.get_rank() == 0:
                print(f"to {job.layout}: {sum(report.link_bytes.values()):,} bytes, {report.seconds:.3f} s")
        for step in range(args.steps):
            if (number, step) == (0, 2):
                freeze(job.model)
            losses.append(job.step(max_norm=1.0))
            seen.append(job.layout)
        if dist.get_rank() == 0:
            print(f"step {job.steps} in {job.layout}: loss {losses[-1]:.5f}", flush=True)
            if job.controller is not None:
                print(job.controller.report, flush=True)
    job.close()
    if args.picture is not None and dist.get_rank() == 0:
        draw(losses, seen, args.picture)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
