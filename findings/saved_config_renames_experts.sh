#!/usr/bin/env bash
# Guess: a config.json that transformers has loaded and saved keeps the names of its fields.
# Fact (transformers 5.24.0): fields behind `attribute_map` come back under another name, without a word. A published
# Qwen3-MoE file says `num_experts`; saved again it says `num_local_experts`, and `num_experts` is gone. OLMoE's
# stays `num_experts`, and DeepSeek-V2's is `n_routed_experts` in both. So the name depends on the family and on who
# wrote the file last.
# Why it matters: whoever reads the file without transformers finds no experts in a fine-tuned Qwen3-MoE that they find
# in the published one. A reader has to know every name, and to refuse a file in which two of them differ.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
timeout 900 "$work/venv/bin/pip" install -q transformers==5.24.0

cat >"$work/program.py" <<'PY'
import json
import sys
from pathlib import Path

import transformers
from transformers import AutoConfig

folder = Path(sys.argv[1])
print("transformers", transformers.__version__)
NAMES = ("num_experts", "num_local_experts", "n_routed_experts")
seen = {}
for family, name in (("qwen3_moe", "num_experts"), ("olmoe", "num_experts"), ("deepseek_v2", "n_routed_experts")):
    place = folder / family
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"model_type": family, name: 32}))
    config = AutoConfig.from_pretrained(place)
    config.save_pretrained(place)
    saved = json.loads((place / "config.json").read_text())
    seen[family] = {key: saved[key] for key in NAMES if key in saved}
    print(f"{family}: {name}=32 was loaded; saved again: {seen[family]}")
expected = {
    "qwen3_moe": {"num_local_experts": 32},
    "olmoe": {"num_experts": 32},
    "deepseek_v2": {"n_routed_experts": 32},
}
assert seen == expected, "changed: other names are saved"
print("Seen: the field that a Qwen3-MoE file was loaded with is gone from the one that was saved.")
PY
HF_HUB_OFFLINE=1 timeout 120 "$work/venv/bin/python" "$work/program.py" "$work"
