#!/usr/bin/env bash
# Guess: `parameter.detach().numpy()` only looks, so a module is afterwards what it was before.
# Fact (torch 2.13.0): the memory is marked for good, also once the array is gone. `untyped_storage().resizable()` is
# False then, and `resize_(0)` raises "Trying to resize storage that is not resizable". `tolist()` marks nothing.
# Why it matters: FSDP and switches in place free and regain parameters by that call. One look at a parameter by numpy,
# as for a digest or a plot, keeps its memory for the life of the storage.
# A way out: look at a copy, `parameter.detach().clone().numpy()`, or `.to("cpu", copy=True)`.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
python3 -m venv "$work/venv"
timeout 900 "$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.0

cat >"$work/program.py" <<'PY'
import torch

print("torch", torch.__version__)


def after(look):
    """Whether a parameter's memory can be given back after `look`, and what giving it back says."""
    parameter = torch.nn.Parameter(torch.ones(4))
    look(parameter.detach())
    storage = parameter.untyped_storage()
    able = storage.resizable()
    try:
        storage.resize_(0)
        said = f"{storage.nbytes()} bytes left"
    except RuntimeError as error:
        said = str(error)
    print(f"resizable {able}: {said}")
    return able


print("looked at by tolist:")
assert after(torch.Tensor.tolist)
print("a copy looked at by numpy:")
assert after(lambda t: t.clone().numpy())
print("looked at by numpy, and the array dropped:")
assert not after(lambda t: t.numpy()), "changed: numpy no longer pins memory"
print("Seen: one call of numpy() keeps the memory for good.")
PY
timeout 120 "$work/venv/bin/python" "$work/program.py"
