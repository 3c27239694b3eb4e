"""A bank of anybody's experts: modules that are called, each once with all its rows.

Home experts are registered under their number among all, so that their parameters have the same names on every rank.
Of each other expert a rank keeps a skeleton: the module without its parameters. A replica is the expert's own skeleton
with leaf views of the flat vector as parameters. `torch.func.functional_call` would not do: an expert that checkpoints
itself would compute again, in the backward pass, with parameters that have been put back.

Shape legend: m experts of this rank, E experts, P parameters of one expert, G those of them that train, B rows, D model
dim.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from prophet.experts.bank import Bank, Entry, gradient_of, overlaps
from prophet.experts.likeness import Part, check_alike, parts_of, strip
from prophet.experts.replica import Replica, ReplicaPool
from prophet.experts.trial import Trial
from prophet.kernels.choice import Impl
from prophet.spec import LayerShape


@dataclass(slots=True)
class _ModuleReplica(Replica):
    """module: computes with the leaves until `vanish`."""

    module: nn.Module

    def vanish(self) -> None:
        strip(self.module)


class ModulesBank(Bank):
    """The user's own expert modules.

    experts: all E by number, or fewer: the home experts must be among them; the first of these is copied for those
    that are not. Home experts stay the objects that they are; the others lose their parameters. first_expert, held: the
    home experts' numbers. dim: D of the rows. sample: rows [n, D] on which to try an expert, of the kind that it will
    get; by default random ones of its parameters' dtype. impl of `run` has no meaning here.

    An expert without rows is not called, and its gradient stays None where no rank had rows for it. Dropout draws from
    the rank's generator. Raises ValueError, everything unchanged, for experts that differ in names, shapes, dtypes or
    in what is frozen, and for those whose replicas would compute something else; see docs/experts.md.
    """

    def __init__(
        self,
        experts: Mapping[int, nn.Module] | Sequence[nn.Module],
        *,
        dim: int,
        first_expert: int = 0,
        held: int | None = None,
        total_experts: int | None = None,
        ep_size: int = 1,
        sample: Tensor | None = None,
    ) -> None:
        given = dict(experts) if isinstance(experts, Mapping) else dict(enumerate(experts))
        total = len(given) if total_experts is None else total_experts
        m = total // ep_size if held is None else held
        home = range(first_expert, first_expert + m)
        check_alike(given, home)
        trial = Trial(given[first_expert], dim, sample)
        super().__init__(m, first_expert=first_expert, total_experts=total, ep_size=ep_size)
        self.dim, self.dim_out, self._flops_per_row = dim, trial.dim_out, trial.flops_per_row
        self._skeletons: dict[int, nn.Module] = {}
        for e in range(total):
            if e in home:
                self.add_module(str(e), given[e])
            elif e in given:
                self._skeletons[e] = given[e]
            else:
                self._skeletons[e] = trial.copy()
        for skeleton in self._skeletons.values():
            strip(skeleton)
        self._answer_dtypes: dict[tuple[Any, ...], torch.dtype] = {}
        self._parts: list[Part] = []  # one expert's parameters in the flat vector's order
        self._kinds: list[tuple[torch.dtype, bool]] = []  # and as it lists them
        self._mark()

    def home_experts(self) -> list[nn.Module]:
        """The m modules that live here, in order."""
        return list(self.children())

    # --- computing ---

    def row_dtype(self, x: Tensor) -> torch.dtype:
        """The given one: what an expert casts, it casts itself."""
        return x.dtype

    def run(
        self, rows: Tensor, sizes: Sequence[int], replicas: Sequence[Replica] = (), *, impl: Impl = "auto"
    ) -> Tensor:
        numbers = [*range(self.first_expert, self.first_expert + self.experts), *(r.expert for r in replicas)]
        modules = self.home_experts()
        for replica in replicas:
            replica.collect_grads()
            modules.append(self._skeletons[replica.expert])
        answers = [
            self._answer(expert, module, part)
            for expert, module, part in zip(numbers, modules, rows.split(list(sizes)), strict=True)
            if part.shape[0]
        ]
        if not answers:
            answers.append(rows.new_zeros((0, self.dim_out), dtype=self.answer_dtype(rows)))
        out = torch.cat(answers)
        if torch.is_grad_enabled() and not out.requires_grad:  # every rank's backward pass has the same collectives
            if rows.requires_grad:
                out = torch.cat([out, rows[:0, :1].to(out.dtype).expand(-1, self.dim_out)])
            elif self.grad_numel:
                out.requires_grad_()
        return out

    def _answer(self, expert: int, module: nn.Module, rows: Tensor) -> Tensor:
        found = module(rows)
        if not isinstance(found, Tensor) or found.shape != (rows.shape[0], self.dim_out):
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"expert {expert} ({type(module).__name__}): expected a tensor {[rows.shape[0], self.dim_out]} for "
                f"rows {list(rows.shape)}, got {got}"
            )
        return found

    def answer_dtype(self, rows: Tensor) -> torch.dtype:
        """Of answers to such rows; an expert is asked once, where this rank has none to ask with."""
        device = rows.device
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        key = (rows.dtype, autocast)
        if key not in self._answer_dtypes:
            devices = [device] if device.type == "cuda" else []
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                answer = self.home_experts()[0](rows.new_zeros((1, self.dim)))
            self._answer_dtypes[key] = answer.dtype
        return self._answer_dtypes[key]

    def shape(self) -> LayerShape:
        params, size = sum(p.numel() for p in self._parts), self.dtype.itemsize
        return LayerShape(
            expert_params=params,
            expert_bytes=self.expert_numel * self.flat_dtype.itemsize,
            expert_grad_bytes=self.grad_numel * self.grad_dtype.itemsize,
            token_bytes=(self.dim + self.dim_out) * size / 2,
            forward_flops_per_token=max(self._flops_per_row, 2.0 * params),
        )

    def signature(self) -> str:
        one = [f"{p.name} {list(p.shape)} {p.dtype} {p.trains}" for p in self._parts]
        return f"dim={self.dim} dim_out={self.dim_out} {type(self.home_experts()[0]).__name__} {'; '.join(one)}"

    # --- an expert as a flat vector ---

    @property
    def flat_dtype(self) -> torch.dtype:
        """The parameters', or bytes where they have several."""
        found = {p.dtype for p in self._parts}
        return found.pop() if len(found) == 1 else torch.uint8

    @property
    def grad_dtype(self) -> torch.dtype:
        """That of the parameters that train; the one that holds all where they have several."""
        found = self.dtype
        for at, dtype in enumerate(p.dtype for p in self._parts if p.trains):
            found = torch.promote_types(found, dtype) if at else dtype
        return found

    def _sizes(self) -> list[tuple[int, bool]]:
        flat = self.flat_dtype
        return [(p.numel() * p.dtype.itemsize // flat.itemsize, p.trains) for p in self._parts]

    @property
    def grad_numel(self) -> int:
        return sum(p.numel() for p in self._parts if p.trains)

    def replica(self, expert: int, pool: ReplicaPool) -> Replica:
        params, grads = pool.take(self.expert_numel, self.flat_dtype, self.device, self.grad_numel, self.grad_dtype)
        module = self._skeletons[expert]
        leaves: dict[str, Tensor] = {}
        base = grad_base = 0
        for part, (size, _) in zip(self._parts, self._sizes(), strict=True):
            leaf = nn.Parameter(params[base : base + size].view(part.dtype).view(part.shape), part.trains)
            base += size
            if part.trains:
                n = part.numel()
                if part.dtype == grads.dtype:
                    leaf.grad = grads[grad_base : grad_base + n].view(part.shape)
                grad_base += n
            leaves[part.name] = leaf
            for where, attribute in part.places:
                setattr(module.get_submodule(where), attribute, leaf)
        for own, other in zip(self.home_experts()[0].modules(), module.modules(), strict=True):
            other.training = own.training
        return _ModuleReplica(expert, params, grads, leaves, module)

    def _of(self, local: int) -> list[tuple[Part, nn.Parameter]]:
        """The parameters of home expert `local` in the flat vector's order."""
        module = self.home_experts()[local]
        return [(part, module.get_parameter(part.name)) for part in self._parts]

    def flat_views(self, local: int, start: int, stop: int) -> list[Tensor]:
        flat = self.flat_dtype
        vectors = [p.detach().reshape(-1).view(flat) for _, p in self._of(local)]
        return [v[a:b] for v, a, b in overlaps(vectors, start, stop)]

    @torch.no_grad()
    def add_flat_grad(self, local: int, start: int, stop: int, piece: Tensor) -> None:
        offset = 0
        trained = [p for part, p in self._of(local) if part.trains]
        for p, a, b in overlaps(trained, start, stop):
            gradient_of(p).view(-1)[a:b].add_(piece[offset : offset + b - a], alpha=self.grad_scale)
            offset += b - a

    # --- names ---

    def entries(self) -> Iterator[Entry]:
        for local in range(self.experts):
            expert = self.first_expert + local
            for name, _ in self.home_experts()[local].named_parameters():
                yield Entry(expert, f"*.{name}", f"{expert}.{name}", ())

    def all_keys(self) -> set[str]:
        one = self.home_experts()[0].state_dict(keep_vars=True)
        return {f"{e}.{name}" for e in range(self.total_experts) for name in one}

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Nothing of its own; entries of experts that live elsewhere are passed over."""
        own = tuple(f"{prefix}{e}." for e in range(self.first_expert, self.first_expert + self.experts))
        if any(p.is_meta for p in self.parameters()):
            error_msgs.append(f"{prefix}*: the experts are on the meta device; call to_empty(device=...) first")
        if strict:
            expected = {prefix + key for key in self.all_keys()}
            # home experts speak for themselves
            unexpected_keys += [
                k for k in state_dict if k.startswith(prefix) and not k.startswith(own) and k not in expected
            ]

    # --- what is checked, and marks ---

    def check_parameters(self) -> None:
        """As of any bank; and every parameter must be as it was when the bank was made, but for its values."""
        super().check_parameters()
        kinds: list[list[tuple[torch.dtype, bool]]] = []
        for number, expert in enumerate(self.home_experts(), self.first_expert):
            params = list(expert.parameters())
            if any(not hasattr(p, "prophet_expert") for p in params):
                name = next(n for n, p in expert.named_parameters() if not hasattr(p, "prophet_expert"))
                raise ValueError(
                    f"expert {number}: parameter {name} is not one that was there when the layer was made, so replicas "
                    f"would not have it: put adapters on the experts before prophet.convert or prophet.MoE"
                )
            kinds.append([(p.dtype, p.requires_grad) for p in params])
        if any(kind != kinds[0] for kind in kinds):
            check_alike(dict(enumerate(self.home_experts(), self.first_expert)), tensors=False)
        if kinds[0] != self._kinds:
            self._remember()  # somebody has frozen something, or thawed it

    def _remember(self) -> None:
        """What the parameters are like now; those that train have their gradients scaled."""
        first = self.home_experts()[0]
        self._parts = parts_of(first)
        self._kinds = [(p.dtype, p.requires_grad) for p in first.parameters()]
        for p in self.parameters():
            hooks = (p._backward_hooks or {}).values()
            if p.requires_grad and not any(isinstance(hook, _Scaled) for hook in hooks):
                p.register_hook(_Scaled(self))

    def _mark(self) -> None:
        super()._mark()
        self._remember()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for skeleton in self._skeletons.values():
            skeleton.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for skeleton in self._skeletons.values():
            strip(skeleton)
            for module in skeleton.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = fn(buffer)
        return self

    def let_go(self) -> dict[int, nn.Module]:
        """All experts by number, no longer this bank's: those that are not at home here have no values."""
        for p in self.parameters():
            for name in ("allreduce", "group_name", "prophet_expert"):
                vars(p).pop(name, None)
            for key, hook in list((p._backward_hooks or {}).items()):
                if isinstance(hook, _Scaled):
                    del p._backward_hooks[key]  # type: ignore[union-attr]
        found = {**self._skeletons, **dict(enumerate(self.home_experts(), self.first_expert))}
        return dict(sorted(found.items()))


class _Scaled:
    """Multiplies a home parameter's gradient by the bank's `grad_scale`, once per backward pass."""

    def __init__(self, bank: ModulesBank) -> None:
        self._bank = weakref.ref(bank)

    def __call__(self, grad: Tensor) -> Tensor | None:
        bank = self._bank()
        return None if bank is None or bank.grad_scale == 1.0 else grad * bank.grad_scale
