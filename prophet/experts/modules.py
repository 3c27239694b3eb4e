"""A bank of anybody's experts: modules that are called, each once with all its rows.

Home experts are registered under their number among all, so that their parameters have the same names on every rank. Of
each other expert a rank keeps a skeleton: the module without its parameters. A replica is the expert's skeleton with
leaf views of the flat vector as parameters. `torch.func.functional_call` would not do: an expert that checkpoints
itself would compute again, in the backward pass, with parameters that have been put back.

Experts that are known to be plain feed-forward networks run on the grouped kernels instead, for as long as their
modules are what they were when the bank was made. One that was given a hook or another activation is called.

Shape legend: m experts of this rank, E experts, P parameters of one expert, G those of them that train, B rows, D model
dim, O output dim.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from prophet.experts.bank import Bank, Entry, gradient_of, overlaps
from prophet.experts.hooks import without_hooks
from prophet.experts.likeness import Part, check_alike, check_no_hooks, parts_of, strip
from prophet.experts.plain import (
    Network,
    RowOrder,
    lay_out,
    scale_gradient,
    stacked,
    unchanged_until_backward,
    with_zeros,
)
from prophet.experts.replica import Replica, ReplicaPool, leaves_in
from prophet.experts.structure import Structure, digest
from prophet.experts.trial import Trial, copy_of
from prophet.kernels.choice import Impl
from prophet.kernels.grouped_ffn import grouped_ffn
from prophet.spec import LayerShape, bias_of
from prophet.trials import trying


@dataclass(slots=True)
class _ModuleReplica(Replica):
    """A replica that computes by calling a module.

    Attributes:
        module: The expert's skeleton; it has the leaves as parameters from `enter` until `vanish`.
        entered: Whether it has them now.
    """

    module: nn.Module
    entered: bool = False

    def enter(self, parts: Sequence[Part]) -> nn.Module:
        """Return the module, with a leaf for each of `parts` as its parameters."""
        # only when it is called: on the kernels the leaves are the stacked fields
        if not self.entered:
            self.entered = True
            # a later training pass may use the same leaves
            with torch.inference_mode(False):
                self.leaves = leaves_in(
                    self.params, self.grads, {p.name: (p.shape, p.dtype, p.requires_grad) for p in parts}
                )
            for part in parts:
                for where, attribute in part.places:
                    setattr(self.module.get_submodule(where), attribute, self.leaves[part.name])
        return self.module

    def vanish(self) -> None:
        if self.entered:
            strip(self.module)


class ModulesBank(Bank):
    """The user's own expert modules.

    An expert without rows is not called, and its gradient stays None where no rank had rows for it; it becomes zero for
    those in `called`. Dropout draws from the rank's generator.

    Args:
        experts: All E by number, or fewer: the home experts must be among them, and the first of these is copied for
            those that are not. Home experts stay the objects that they are; the others lose their parameters.
        dim: D, of the rows.
        first_expert: Number of the first home expert.
        held: m, how many are at home here; None for E / ep_size.
        total_experts: E; None for as many as are given.
        ep_size: Ranks that share the experts.
        sample: Rows [n, D] on which to try an expert, of the kind that it will get; None for random ones of its
            parameters' dtype.
        network: What every expert computes, where that is known; `impl` of `run` has a meaning then alone.

    Attributes:
        called: Numbers of experts that count as called in this pass, with rows or without.

    Raises:
        ValueError: Experts differ in names, shapes or dtypes, or replicas of them would compute something else (see
            docs/experts.md). Everything is unchanged then.
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
        network: Network | None = None,
    ) -> None:
        given = dict(experts) if isinstance(experts, Mapping) else dict(enumerate(experts))
        total = len(given) if total_experts is None else total_experts
        m = total // ep_size if held is None else held
        home = range(first_expert, first_expert + m)
        # before anything is registered or stripped, so that a refusal leaves the user's modules as they were
        check_alike(given, home)
        first = given[first_expert]
        # a known network needs no trial: its answers and costs follow from its sizes
        if network is not None:
            dim_out, flops_per_row = first.get_parameter(network.names.w_out).shape[0], 0.0
        else:
            trial = Trial(first, dim, sample)
            dim_out, flops_per_row = trial.dim_out, trial.flops_per_row
        super().__init__(m, first_expert=first_expert, total_experts=total, ep_size=ep_size)
        self.dim, self.dim_out, self._flops_per_row = dim, dim_out, flops_per_row
        self.network = network
        # numbers of experts that count as called in this pass, rows or not
        self.called: Container[int] = ()
        skeletons: dict[int, nn.Module] = {}
        for e in range(total):
            if e in home:
                self.add_module(str(e), given[e])
            else:
                skeletons[e] = given[e] if e in given else copy_of(first)
        self._answer_dtypes: dict[tuple[Any, ...], torch.dtype] = {}
        # one expert's parameters in the flat vector's order
        self._parts: list[Part] = []
        self.take_skeletons(skeletons)
        self._mark()

    def take_skeletons(self, skeletons: Mapping[int, nn.Module]) -> None:
        """Use these modules for replicas of the experts that live elsewhere; they lose their parameters."""
        self._skeletons = dict(skeletons)
        for skeleton in self._skeletons.values():
            strip(skeleton)
        self._structures = {e: Structure(expert) for e, expert in enumerate(self.all_experts())}
        self._as_made, self._on_kernels = True, self.network is not None

    def home_experts(self) -> list[nn.Module]:
        """Return the m modules that live here, in order."""
        return list(self._modules.values())  # type: ignore[arg-type]

    def all_experts(self) -> list[nn.Module]:
        """Return E modules by number; those of experts that live elsewhere have no values."""
        found = {**self._skeletons, **dict(enumerate(self.home_experts(), self.first_expert))}
        return [found[e] for e in range(self.total_experts)]

    # --- computing ---

    def row_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype of `x`, as an expert casts by itself; on kernels the precision of the products."""
        if not self._on_kernels:
            return x.dtype
        device = x.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.dtype

    def run(
        self,
        rows: Tensor,
        sizes: Sequence[int],
        replicas: Sequence[Replica] = (),
        *,
        sizes_on_device: Tensor | None = None,
        impl: Impl = "auto",
    ) -> Tensor:
        for replica in replicas:
            replica.collect_grads()
        if self._on_kernels and all(self._is_as_made(replica) for replica in replicas):
            out = self._run_on_kernels(rows, sizes, replicas, sizes_on_device, impl)
            idle: list[nn.Parameter] = []
        else:
            out, idle = self._run_one_by_one(rows, sizes, replicas)
        # every rank's backward pass must have the same collectives, so the answers must depend on something in every
        # case
        if torch.is_grad_enabled() and not out.requires_grad:
            if rows.requires_grad:
                out = torch.cat([out, rows[:0, :1].to(out.dtype).expand(-1, self.dim_out)])
            elif self.grad_numel:
                out.requires_grad_()
        return with_zeros(out, idle)

    def _run_on_kernels(
        self,
        rows: Tensor,
        sizes: Sequence[int],
        replicas: Sequence[Replica],
        sizes_on_device: Tensor | None,
        impl: Impl,
    ) -> Tensor:
        assert self.network is not None
        # as if called one by one: the stacked product would give experts without rows a gradient of zeros
        called = [bool(n) or e in self.called for e, n in zip(self._home(), sizes, strict=False)]
        fields = {field: self._field(field) for field in self.network.names.by_field()}
        home = {field: stacked(parameters, called) for field, parameters in fields.items()}
        # gate and `up` in another order are copied for the kernels, so their gradients cannot be added in place
        in_order = self.network.names.rows == RowOrder()
        leaves = [self.network.weights(replica.leaves) for replica in replicas]
        grads = [self.network.weights({n: p.grad for n, p in r.leaves.items()}) for r in replicas] if in_order else ()
        out = grouped_ffn(
            rows,
            sizes,
            self.network.weights(home, dim=1),
            self.network.activation,
            replicas=leaves,
            replica_grads=grads,
            grad_scale=self.grad_scale,
            sizes_on_device=sizes_on_device,
            impl=impl,
        )
        matrices = [fields[field] for field in ("w_in", "w_out")]
        # what was used, so that a change in place before the backward pass is torch's usual error
        return unchanged_until_backward(
            out, [p for m in matrices for e, n in zip(m, sizes, strict=False) if n for p in e]
        )

    def _is_as_made(self, replica: Replica) -> bool:
        """Return whether kernels may take a replica, as they do its expert at home."""
        assert isinstance(replica, _ModuleReplica)
        return not replica.entered and self._structures[replica.expert].unchanged()

    def _run_one_by_one(
        self, rows: Tensor, sizes: Sequence[int], replicas: Sequence[Replica]
    ) -> tuple[Tensor, list[nn.Parameter]]:
        """Return the answers, and what trains in home experts that count as called without rows."""
        answers: list[Tensor] = []
        idle: list[nn.Parameter] = []
        parts = rows.split(list(sizes))
        for expert, module, part in zip(self._home(), self.home_experts(), parts, strict=False):
            if part.shape[0]:
                # scaled back and forth, so that the gradients of its parameters alone are scaled
                answer = self._answer(expert, module, scale_gradient(part, 1 / self.grad_scale))
                answers.append(scale_gradient(answer, self.grad_scale))
            elif expert in self.called:
                idle += [p for p in module.parameters() if p.requires_grad]
        for replica, part in zip(replicas, parts[self.experts :], strict=True):
            if part.shape[0]:
                module = replica.enter(self._parts)  # type: ignore[attr-defined]
                answers.append(self._answer(replica.expert, module, part))
        # no expert had rows: the result still needs the dtype that answers have on other ranks
        if not answers:
            answers.append(rows.new_zeros((0, self.dim_out), dtype=self.answer_dtype(rows)))
        return torch.cat(answers), idle

    def _home(self) -> range:
        """Return the home experts' numbers."""
        return range(self.first_expert, self.first_expert + self.experts)

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
        """Return the dtype of answers to such rows; an expert is asked once, where this rank has none to ask with."""
        device = rows.device
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        key = (rows.dtype, autocast)
        if key not in self._answer_dtypes:
            # asking must not move the generators, nor call a user's hooks
            with torch.no_grad(), trying(None), without_hooks(self.home_experts()[0]):
                answer = self.home_experts()[0](rows.new_zeros((1, self.dim)))
            self._answer_dtypes[key] = answer.dtype
        return self._answer_dtypes[key]

    def shape(self) -> LayerShape:
        params, size = sum(p.numel() for p in self._parts), self.dtype.itemsize
        if self.network is not None:
            names = self.network.names
            return LayerShape.feed_forward(
                dim=self.dim,
                hidden=self._fields()["w_out"][0][1],
                dim_out=self.dim_out,
                activation=self.network.activation,
                bias=bias_of(names.b_in, names.b_out),
                param_bytes=size,
                grad_bytes=size,
                token_element_bytes=size,
            )
        return LayerShape(
            expert_params=params,
            expert_bytes=self.expert_numel * self.flat_dtype.itemsize,
            expert_grad_bytes=self.grad_numel * self.grad_dtype.itemsize,
            token_bytes=(self.dim + self.dim_out) * size / 2,
            # at least a product per parameter: the counter knows nothing of some operations
            forward_flops_per_token=max(self._flops_per_row, 2.0 * params),
            half_gradients=self.sum_dtype != self.grad_dtype,
        )

    def signature(self) -> str:
        one = [f"{p.name} {list(p.shape)} {p.dtype}" for p in self._parts]
        # compared over ranks with the layer's signature: all have to change alike
        changed = "" if self._as_made else f" changed after it was made, to {self.structure_digest():x}"
        return (
            f"dim={self.dim} dim_out={self.dim_out} {type(self.home_experts()[0]).__name__} {'; '.join(one)}{changed}"
        )

    def structure_digest(self) -> int:
        """Return 56 bits of what makes all E experts compute as they do, as this rank has them, and of what trains.

        Must be equal on all ranks where there are replicas. Experts elsewhere are looked at only where a home one
        changed.
        """
        changed = () if self._as_made else self._structures.values()
        return digest(changed, [part.requires_grad for part in self._parts])

    # --- an expert as a flat vector ---

    @property
    def flat_dtype(self) -> torch.dtype:
        """Dtype of the parameters, or bytes where they have several."""
        found = {p.dtype for p in self._parts}
        return found.pop() if len(found) == 1 else torch.uint8

    @property
    def grad_dtype(self) -> torch.dtype:
        """Dtype of the parameters that train; the one that holds all where they have several."""
        found = self.dtype
        for at, dtype in enumerate(p.dtype for p in self._parts if p.requires_grad):
            found = torch.promote_types(found, dtype) if at else dtype
        return found

    def _sizes(self) -> list[tuple[int, bool]]:
        flat = self.flat_dtype
        return [(p.numel() * p.dtype.itemsize // flat.itemsize, p.requires_grad) for p in self._parts]

    @property
    def grad_numel(self) -> int:
        return sum(p.numel() for p in self._parts if p.requires_grad)

    def replica(self, expert: int, pool: ReplicaPool) -> Replica:
        self._follow_frozen()
        params, grads = pool.take(self.expert_numel, self.flat_dtype, self.device, self.grad_numel, self.grad_dtype)
        module = self._skeletons[expert]
        # modes set on single modules, as a frozen dropout, hold for replicas as well
        for own, other in zip(self.home_experts()[0].modules(), module.modules(), strict=False):
            other.training = own.training
        if not self._on_kernels:
            replica = _ModuleReplica(expert, params, grads, {}, module)
            replica.enter(self._parts)
            return replica
        return _ModuleReplica(expert, params, grads, leaves_in(params, grads, self._fields()), module)

    def _fields(self) -> dict[str, tuple[list[int], torch.dtype, bool]]:
        """Return shape, dtype and whether it trains of the kernels' tensors by field, in the flat vector's order."""
        assert self.network is not None
        parts = {part.name: part for part in self._parts}
        found = {}
        for field, names in self.network.names.by_field().items():
            first = parts[names[0]]
            found[field] = ([len(names) * first.shape[0], *first.shape[1:]], first.dtype, first.requires_grad)
        return found

    def _of(self, local: int) -> list[tuple[Part, nn.Parameter]]:
        """Return the parameters of home expert `local` in the flat vector's order."""
        module = self.home_experts()[local]
        return [(part, module.get_parameter(part.name)) for part in self._parts]

    def flat_views(self, local: int, start: int, stop: int) -> list[Tensor]:
        flat = self.flat_dtype
        vectors = [p.detach().reshape(-1).view(flat) for _, p in self._of(local)]
        return [v[a:b] for v, a, b in overlaps(vectors, start, stop)]

    def _under(self, local: int, start: int, stop: int, piece: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        offset = 0
        trained = [p for part, p in self._of(local) if part.requires_grad]
        for p, a, b in overlaps(trained, start, stop):
            # its replicas train as long as any expert's does, and what is frozen here is left alone
            if p.requires_grad:
                yield gradient_of(p).view(-1)[a:b], piece[offset : offset + b - a]
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
        """Load nothing itself, as home experts load as modules; entries of experts elsewhere are no surprise."""
        own = tuple(f"{prefix}{e}." for e in range(self.first_expert, self.first_expert + self.experts))
        if any(p.is_meta for p in self.parameters()):
            error_msgs.append(f"{prefix}*: the experts are on the meta device; call to_empty(device=...) first")
        if strict:
            expected = {prefix + key for key in self.all_keys()}
            # home experts report their unexpected keys themselves
            unexpected_keys += [
                k for k in state_dict if k.startswith(prefix) and not k.startswith(own) and k not in expected
            ]

    # --- what is checked, and marks ---

    def check_parameters(self) -> None:
        """Raise ValueError as any bank does, and unless replicas can have the same parameters as the experts.

        Their values and what is frozen may differ.
        """
        super().check_parameters()
        kinds = []
        for number, expert in zip(self._home(), self.home_experts(), strict=True):
            named = dict(expert.named_parameters())
            kinds.append([(p.shape, p.dtype) for p in named.values()])
            strange = next((n for n, p in named.items() if not hasattr(p, "prophet_expert")), None)
            if self.ep_size > 1:
                check_no_hooks(f"expert {number}", named)
            gone = next((part.name for part in self._parts if part.name not in named), None)
            if self.ep_size > 1 and (strange or gone):
                name = strange or gone
                what = "is not one that was there" if strange else "is gone, which was there"
                raise ValueError(
                    f"expert {number}: parameter {name} {what} when the layer was made, so replicas would not have "
                    f"it: put adapters, masks and norms on the experts before prophet.convert or prophet.MoE, and "
                    f"write new values into a parameter in place of replacing it"
                )
        alike = all(kind == kinds[0] for kind in kinds)
        if self.ep_size > 1 and not alike:
            check_alike(dict(zip(self._home(), self.home_experts(), strict=True)), tensors=False)
        self._as_made = all(self._structures[e].unchanged() for e in self._home())
        # hooks on all modules expect every one to be called, which kernels do not
        watched = _has_any_global_hook()
        self._on_kernels = self.network is not None and self._as_made and alike and not watched
        self._follow_frozen()

    def requires_grad(self) -> list[bool]:
        found = [any(q.requires_grad for q in self._held(part)) for part in self._parts]
        if self.network is not None:
            fields = {n: field for field, names in self.network.names.by_field().items() for n in names}
            alive = {fields[part.name] for part, on in zip(self._parts, found, strict=True) if on}
            found = [fields[part.name] in alive for part in self._parts]
        return found

    def settle(self, requires_grad: Sequence[bool]) -> None:
        self._parts = [replace(part, requires_grad=on) for part, on in zip(self._parts, requires_grad, strict=True)]

    def _follow_frozen(self) -> None:
        """Take note of what somebody may have frozen or thawed. What trains in one expert trains in all replicas.

        Once it does it goes on: other ranks cannot see which experts are frozen here, and gradients of one length are
        exchanged. At home those of frozen parameters are left out.
        """
        stays = self.ep_size > 1
        now = zip(self._parts, self.requires_grad(), strict=True)
        requires_grad = [on or (stays and part.requires_grad) for part, on in now]
        if requires_grad != [part.requires_grad for part in self._parts]:
            self.settle(requires_grad)

    def _held(self, part: Part) -> list[nn.Parameter]:
        """Return the home experts' parameters of this name that are still there, by expert."""
        where, attribute = part.places[0]
        found = (_parameter_at(home, where, attribute) for home in self.home_experts())
        return [p for p in found if p is not None]

    def _remember(self) -> None:
        """Take the parameters as they are now, and lay them where the kernels take them from."""
        parts = parts_of(self.home_experts()[0])
        there = [{name for name, _ in home.named_parameters()} for home in self.home_experts()]
        if self._parts and any(names != {part.name for part in self._parts} for names in there):
            # somebody has changed the modules: `check_parameters` reports what comes of it
            return
        self._parts = parts
        if self.network is not None:
            order = {name: at for at, name in enumerate(self.network.names.all())}
            self._parts.sort(key=lambda part: order[part.name])
            for field in self.network.names.by_field():
                lay_out(self._field(field))
        self._follow_frozen()

    def adopt(self) -> None:
        """Take over the home experts' parameters, which `load_state_dict` has replaced by others of the same shapes."""
        self._mark()

    def _field(self, field: str) -> list[list[nn.Parameter]]:
        """Return the home experts' parameters of one of the kernels' fields, by expert."""
        assert self.network is not None
        names = self.network.names.by_field()[field]
        places = [name.rpartition(".") for name in names]
        found = [[_parameter_at(home, where, name) for where, _, name in places] for home in self.home_experts()]
        return found  # type: ignore[return-value]  # none is missing as long as the modules are as they were made

    def _mark(self) -> None:
        super()._mark()
        self._remember()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        # skeletons are no submodules, or their stand-ins would be in the state dict: they follow by hand
        for skeleton in self._skeletons.values():
            skeleton.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # looked at before: afterwards every buffer is another tensor, and every expert would count as changed
        as_made = [e for e, structure in self._structures.items() if structure.unchanged()]
        super()._apply(fn, recurse)
        for skeleton in self._skeletons.values():
            strip(skeleton)
            for module in skeleton.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = fn(buffer)
        every = self.all_experts()
        # buffers are other tensors now
        self._structures |= {e: Structure(every[e]) for e in as_made}
        return self

    def let_go(self) -> dict[int, nn.Module]:
        """Return all experts by number, no longer this bank's; those that are not at home here have no values."""
        for p in self.parameters():
            # savers of files take tensors that share memory for one
            if p.untyped_storage().nbytes() > p.nbytes:
                p.data = p.data.clone()
            for name in ("allreduce", "group_name", "prophet_expert"):
                vars(p).pop(name, None)
        return dict(enumerate(self.all_experts()))


def _parameter_at(expert: nn.Module, where: str, attribute: str) -> nn.Parameter | None:
    """Return what `expert` holds there, if it still does."""
    module: nn.Module | None = expert
    for name in where.split(".") if where else ():
        module = None if module is None else module._modules.get(name)
    return None if module is None else module._parameters.get(attribute)
