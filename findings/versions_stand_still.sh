#!/usr/bin/env bash
# Guess: whatever changes a tensor in place raises its `_version`, so autograd refuses a backward pass through it.
# Fact (torch 2.13.0, CPU): `GradScaler.unscale_` divides gradients in place, and a fused optimizer changes weights in
# place, and both leave `_version` as it was. `clip_grad_norm_` and foreach optimizers raise it.
# If a weight is stepped between a forward and its backward pass, foreach optimizers lead to autograd's error. Fused
# ones lead to a gradient from the new weights, without an error.
# Why it matters: pipelines that step while micro-batches are under way get wrong gradients once `fused=True` is set,
# and caches of expert weights or gradients that watch `_version` keep old values.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
python3 -m venv "$work/venv"
timeout 900 "$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.0

cat >"$work/program.py" <<'PY'
import torch
from torch import nn

print("torch", torch.__version__)

weight = nn.Parameter(torch.ones(4))
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
scaler.scale(weight.sum()).backward()
values, versions = [weight.grad[0].item()], [weight.grad._version]
scaler.unscale_(torch.optim.SGD([weight]))
values.append(weight.grad[0].item())
versions.append(weight.grad._version)
nn.utils.clip_grad_norm_([weight], max_norm=1.0)
values.append(round(weight.grad[0].item(), 4))
versions.append(weight.grad._version)
print("gradient as scaled, after unscale_, after clip_grad_norm_:", values, "versions:", versions)
assert values == [8.0, 1.0, 0.5], "changed: other gradients"
assert versions[0] == versions[1] < versions[2], "changed: other versions"


def step_between(optimizer_class, **options):
    """Step between a forward and its backward pass. Returns how far the version went and the input's gradient."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = optimizer_class([weight], lr=0.5, **options)
    inputs = torch.ones(2, requires_grad=True)
    output = (weight * inputs).sum()  # d output / d inputs is the weight of this line: 1
    weight.grad = torch.full((2,), 3.0)
    before = weight._version
    optimizer.step()
    assert weight[0].item() != 1.0
    try:
        output.backward()
        result = round(inputs.grad[0].item(), 3)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        result = "RuntimeError"
    change = weight._version - before
    print(f"{optimizer_class.__name__:8} {options} version +{change}, gradient (1.0 is right): {result}")
    return change, result


for optimizer_class in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
    change, result = step_between(optimizer_class, foreach=True)
    assert change > 0 and result == "RuntimeError", "changed: foreach is not noticed"
    change, result = step_between(optimizer_class, fused=True)
    assert change == 0 and result not in (1.0, "RuntimeError"), "changed: fused is noticed"
print("Seen: unscale_ and fused steps leave versions alone, and gradients are silently wrong after a fused step.")
PY
timeout 120 "$work/venv/bin/python" "$work/program.py"
