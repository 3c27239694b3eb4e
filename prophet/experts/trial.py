"""An expert tried on a few rows: what it answers, what it costs, and whether a replica of it would do the same.

Shape legend: n rows, D model dim.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from prophet.experts.hooks import without_hooks
from prophet.experts.likeness import parts_of, strip
from prophet.trials import seed_all, trying

# rows of a trial: few, as only equality is asked
_ROWS = 3
# any, but the same on all ranks: what is refused is refused on all of them
_SEED = 20
# of the largest element: other weights are further off, another order of sums is nearer
_NEAR = 1e-3


class Trial:
    """Tries `expert` on rows [n, D]; raises ValueError, naming what is wrong, where its replica would differ.

    The expert, its gradients and the random generators are left as they are, and its hooks are not called.

    Args:
        expert: The module to try.
        dim: D, of the rows.
        sample: Rows to try it on; None for random ones of a dtype that it takes.

    Attributes:
        dim_out: Size of its answers.
        flops_per_row: Operations of a forward pass as the performance model counts them, a third of those counted
            forward and backward. 0 where the counter knows none of them, as those of recurrent layers.
    """

    def __init__(self, expert: nn.Module, dim: int, sample: Tensor | None = None) -> None:
        self._expert = expert
        self._who = _who(expert)
        like = next(expert.parameters())
        self.flops_per_row = 0.0
        grads = [p.grad for p in expert.parameters()]
        with trying(None), without_hooks(expert):
            try:
                self._sample = self._accepted(dim, like) if sample is None else sample.detach()
                if like.is_meta:
                    self.dim_out = self._answer(copy_of(self._expert)).shape[1]
                else:
                    self._try()
            finally:
                for p, grad in zip(expert.parameters(), grads, strict=True):
                    p.grad = grad

    def _accepted(self, dim: int, like: Tensor) -> Tensor:
        """Return random rows of the first of the parameters' dtypes that the expert takes."""
        rows = torch.empty((_ROWS, dim), dtype=torch.float64, device=like.device)
        if not like.is_meta:
            rows.normal_(generator=torch.Generator(like.device).manual_seed(_SEED))
        first: ValueError | None = None
        for dtype in dict.fromkeys(p.dtype for p in self._expert.parameters()):
            self._sample = rows.to(dtype)
            try:
                with torch.no_grad():
                    self._answer(copy_of(self._expert))
            except ValueError as error:
                first = first or error
            else:
                return self._sample
        raise first or ValueError(f"{self._who} has no parameters")

    def _try(self) -> None:
        # imported here: it takes a second, of those who have modules only
        from torch.utils.flop_counter import FlopCounterMode

        # copies: buffers, modes and gradients of the user's expert must not change
        home, replica = copy_of(self._expert).train(), copy_of(self._expert).train()
        generator = torch.Generator(self._sample.device).manual_seed(_SEED)
        with torch.no_grad():
            for p in home.parameters():
                # drawn anew: zeros, as of a LoRA factor, would hide what depends on them
                bound = p.shape[-1] ** -0.5 if p.dim() else 1.0
                p.uniform_(-bound, bound, generator=generator)
        before = {name: b.clone() for name, b in home.named_buffers()}
        counter = FlopCounterMode(display=False)
        with counter:
            self._run(home)
        for p in home.parameters():
            p.grad = None
        # once more without the counter, which takes some operations apart: in bfloat16 each part rounds
        expected, grads = self._run(home)
        self.dim_out = expected.shape[1]
        self.flops_per_row = counter.get_total_flops() / (3.0 * self._sample.shape[0])
        for name, buffer in home.named_buffers():
            if name not in before or not torch.equal(buffer, before[name]):
                raise ValueError(
                    f"{self._who}: its buffer {name} changes while it trains, as batch norm's do; every rank would "
                    f"have another: expected constant buffers"
                )
        strip(replica)
        leaves: dict[str, nn.Parameter] = {}
        # as a replica: the copy stripped, then new leaves set by attribute, as `modules` does
        values = dict(home.named_parameters())
        for part in parts_of(home):
            leaf = leaves[part.name] = nn.Parameter(values[part.name].detach().clone(), part.requires_grad)
            for where, attribute in part.places:
                setattr(replica.get_submodule(where), attribute, leaf)
        got, found = self._run(replica)
        unused = [name for name, grad in grads.items() if grad is None and values[name].requires_grad]
        # a copy's closure still reads the original's parameters, so those are asked for gradients as well
        used = self._used(unused)
        for name in grads:
            if (grads[name] is None) != (found[name] is None) or name in used:
                raise ValueError(
                    f"{self._who}: its parameter {name} is also read from elsewhere (a list, a closure), where a "
                    f"replica cannot set it: expected parameters that are read as attributes of their modules"
                )
        pairs: list[tuple[str, Tensor | None, Tensor | None]] = [("answer", expected, got)]
        pairs += [(f"gradient of {n}", g, found[n]) for n, g in grads.items()]
        for what, a, b in pairs:
            if not _near(a, b):
                raise ValueError(
                    f"{self._who}: with other parameters in place of its own its {what} is not that of these "
                    f"parameters: expected one that computes with its parameters alone"
                )

    def _used(self, names: list[str]) -> set[str]:
        """Return those of the expert's parameters `names` that get a gradient from the expert itself."""
        if not names:
            return set()
        modes = {m: m.training for m in self._expert.modules()}
        buffers = {name: b.clone() for name, b in self._expert.named_buffers()}
        try:
            for p in self._expert.parameters():
                p.grad = None
            grads = self._run(self._expert.train())[1]
            return {name for name in names if grads[name] is not None}
        finally:
            for module, mode in modes.items():
                module.training = mode
            with torch.no_grad():
                for name, b in self._expert.named_buffers():
                    if not torch.equal(b, buffers[name]):
                        b.copy_(buffers[name])

    def _run(self, expert: nn.Module) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Return answer and gradients, from one random state."""
        with torch.enable_grad():
            seed_all(_SEED)
            answer = self._answer(expert)
            # unequal weights: a plain sum would give norms and softmax a gradient of zero
            weights = torch.linspace(-1.0, 1.0, answer.numel(), device=answer.device, dtype=answer.dtype)
            if answer.requires_grad:
                (answer * weights.view_as(answer)).sum().backward()
        return answer.detach(), {name: p.grad for name, p in expert.named_parameters()}

    def _answer(self, expert: nn.Module) -> Tensor:
        rows = self._sample.clone().requires_grad_(self._sample.is_floating_point())
        try:
            answer = expert(rows)
        except Exception as error:  # somebody else's module may raise anything
            text = f"{type(error).__name__}: {error!s:.300}"
            raise ValueError(f"{self._who} fails on rows {list(rows.shape)} {rows.dtype}: {text}") from error
        if not isinstance(answer, Tensor) or answer.dim() != 2 or answer.shape[0] != rows.shape[0]:
            got = list(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
            raise ValueError(
                f"{self._who}: expected a tensor [{rows.shape[0]}, any] for rows {list(rows.shape)}, got {got}"
            )
        return answer


def _who(expert: nn.Module) -> str:
    return f"an expert ({type(expert).__name__})"


def copy_of(expert: nn.Module) -> nn.Module:
    """Return a copy of the expert with copied parameters and buffers; ValueError where there cannot be one."""
    try:
        return copy.deepcopy(expert)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"{_who(expert)} cannot be copied, so it cannot have replicas: {error}") from error


def _near(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or not a.numel():
        return True
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return bool(torch.allclose(a, b, rtol=0, atol=_NEAR * float(a.abs().max())))
