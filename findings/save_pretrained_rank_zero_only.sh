#!/usr/bin/env bash
# Guess: `model.save_pretrained(folder)` fills the folder that it is given, unless `is_main_process=False` is passed.
# Fact (transformers 5.24.0, torch 2.13.0): in an initialised process group only rank 0 writes. On any other rank the
# call makes the folder, leaves it empty and returns, even with `is_main_process=True` and a folder for each rank.
# `model.config.save_pretrained` writes on every rank.
# Why it matters: ranks may hold different weights: local SGD, experts split by hand, one seed or fold per process.
# All but rank 0's are lost, and the empty folder is found when somebody loads it.
# A way out: save before the group starts or after it ends, or write `model.state_dict()` yourself.
set -euo pipefail

work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
export CUDA_VISIBLE_DEVICES="" GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 HF_HOME="$work/home"
python3 -m venv "$work/venv"
timeout 900 "$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 numpy==2.4.0

cat >"$work/program.py" <<'PY'
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import transformers

rank, work = int(sys.argv[1]), sys.argv[2]
transformers.utils.logging.disable_progress_bar()
model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
)


def save(name, save_pretrained, **options):
    """The names of the files that the call has written into a folder that no other rank uses."""
    folder = f"{work}/{name}-{rank}"
    save_pretrained(folder, **options)
    return sorted(os.listdir(folder))


dist.init_process_group(
    "gloo", init_method=f"file://{work}/store", rank=rank, world_size=2, timeout=timedelta(seconds=100)
)
found = {
    "plain": save("plain", model.save_pretrained),
    "is_main_process=True": save("main", model.save_pretrained, is_main_process=True),
    "config alone": save("config", model.config.save_pretrained),
}
dist.barrier()
everybody = [None, None]
dist.all_gather_object(everybody, found)
dist.destroy_process_group()
found["group ended"] = save("ended", model.save_pretrained)

assert "model.safetensors" in found["group ended"], "changed: no files without a group"
if rank == 0:
    print("transformers", transformers.__version__, "torch", torch.__version__)
    for case in everybody[0]:
        print(f"{case:21} rank 0: {everybody[0][case]}  rank 1: {everybody[1][case]}")
    print(f"{'group ended':21} every rank: {found['group ended']}")
    for case in ("plain", "is_main_process=True"):
        assert "model.safetensors" in everybody[0][case], "changed: rank 0 does not write"
        assert everybody[1][case] == [], "changed: rank 1 writes too"
    assert everybody[1]["config alone"] == ["config.json"], "changed: rank 1 does not write its config"
    print("Seen: save_pretrained left rank 1's folder empty and said nothing.")
PY
timeout 200 "$work/venv/bin/python" "$work/program.py" 1 "$work" &
timeout 200 "$work/venv/bin/python" "$work/program.py" 0 "$work"
wait "$!"
