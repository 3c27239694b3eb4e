"""A Hugging Face model whose MoE blocks DeepSpeed's AutoEP spreads over ranks, balanced. Run it on four processes:

torchrun --standalone --nproc-per-node 4 examples/deepspeed_autoep.py --out out/autoep --steps 6 --save-at 3

Two things differ from a plain script, and `--plain` takes both away: the import, and the "prophet" section. With
`--resume` it goes on from the newest checkpoint in `--out`, at another `--ep-size` if you like. At the end
`OUT/model/pytorch_model.bin` has all experts, under the names that transformers knows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import prophet_deepspeed  # noqa: F401  (deepspeed.initialize heeds the "prophet" section)
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

VOCAB, ROWS, LENGTH = 64, 8, 12  # ROWS sequences of one step, on all ranks


def build() -> Any:
    """A small DeepSeek-V3: a router with groups and a correction bias, a shared expert, eight others."""
    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        first_k_dense_replace=0,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        max_position_embeddings=32,
        initializer_range=0.3,
    )
    torch.manual_seed(0)  # the same model on every rank
    return DeepseekV3ForCausalLM(config)


def batch(step: int) -> torch.Tensor:
    """This rank's sequences of one step."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCAB, (ROWS, 1), generator=generator)
    ids = (start + 3 * torch.arange(LENGTH)) % VOCAB
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    return ids.chunk(ranks)[rank].to(deepspeed.accelerator.get_accelerator().current_device_name())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/autoep"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-at", type=int, default=3)
    parser.add_argument("--ep-size", type=int, default=2)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--planner", default="prophet")
    parser.add_argument("--plain", action="store_true", help="AutoEP without balancing, to compare")
    options = parser.parse_args()

    deepspeed.init_distributed()
    config: dict[str, Any] = {
        "train_batch_size": ROWS,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}},
        "expert_parallel": {"enabled": True, "autoep_size": options.ep_size},
    }
    if not options.plain:
        config["prophet"] = {"planner": options.planner}
    model = build()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)

    if options.resume:
        folder, _ = engine.load_checkpoint(options.out)
        if folder is None:
            raise SystemExit(f"no checkpoint in {options.out}")

    losses = []
    for step in range(engine.global_steps, options.steps):
        ids = batch(step)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        deepspeed.comm.all_reduce(total)
        losses.append(float(total) / deepspeed.comm.get_world_size())
        if step + 1 == options.save_at:
            engine.save_checkpoint(options.out)
    if not options.plain:
        engine.save_16bit_model(options.out / "model")
    if deepspeed.comm.get_rank() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "losses.json").write_text(json.dumps(losses))
        if not options.plain:
            last = engine.prophet.last_step
            print(engine.prophet_report)
            print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; rank max/mean {last.max_mean:.3f}", end=" ")
            print(f"(without balancing {last.max_mean_static:.3f})")
    deepspeed.comm.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
