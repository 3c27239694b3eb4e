#!/usr/bin/env bash
# Guess: `once_differentiable` makes every second derivative through a custom autograd Function an error.
# Fact (torch 2.13.0): the error needs two things: the gradient that comes in requires a gradient itself, and the
# second pass is `.backward()` without `inputs=`. Otherwise, as with `torch.autograd.grad` or `.backward(inputs=...)`,
# the Function's second derivative is left out, and what remains comes back as if it were whole.
# Why it matters: fused kernels and all-to-alls of MoE layers are such Functions. Gradient penalties and
# Hessian-vector products through them are wrong without an error as soon as another path reaches the same tensor.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
python3 -m venv "$work/venv"
timeout 900 "$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.0

cat >"$work/program.py" <<'PY'
import torch
from torch.autograd.function import once_differentiable

print("torch", torch.__version__)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def constant_gradient(x):  # the gradient that comes into Cube is 1
    return Cube.apply(x) + x**2


def gradient_with_graph(x):  # the gradient that comes into Cube is x
    return Cube.apply(x) * x


def second(function, how):
    """The second derivative at x = 2, as autograd says."""
    x = torch.tensor(2.0, dtype=torch.double, requires_grad=True)
    (first,) = torch.autograd.grad(function(x), x, create_graph=True)
    try:
        if how == "autograd.grad":
            return torch.autograd.grad(first, x)[0].item()
        first.backward(inputs=[x] if how == "backward(inputs=)" else None)
        return x.grad.item()
    except RuntimeError as error:
        assert "marked with @once_differentiable" in str(error), error
        return "RuntimeError"


def finite_difference(function, step=1e-4):
    """The second derivative at x = 2, from values alone."""
    low, middle, high = (function(torch.tensor(2.0 + d, dtype=torch.double)).item() for d in (-step, 0, step))
    return round((low - 2 * middle + high) / step**2, 3)


expected = {
    constant_gradient: (14.0, {"autograd.grad": 2.0, "backward(inputs=)": 2.0, "backward()": 2.0}),
    gradient_with_graph: (48.0, {"autograd.grad": 12.0, "backward(inputs=)": 12.0, "backward()": "RuntimeError"}),
}
for function, (right, answers) in expected.items():
    assert abs(finite_difference(function) - right) < 0.01
    for how, answer in answers.items():
        found = second(function, how)
        print(f"{function.__name__:20} {how:18} finite differences: {finite_difference(function)}  autograd: {found}")
        assert found == answer, "changed: another second derivative"
print("Seen: terms of the second derivative are dropped, and one of six calls raises.")
PY
timeout 120 "$work/venv/bin/python" "$work/program.py"
