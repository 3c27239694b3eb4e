"""Descriptions of experts that are modules in a list: as feed-forward networks if all are, else one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from prophet.convert.base import ExpertsSpec, check_shapes
from prophet.convert.checks import check_one_kind
from prophet.convert.trials.probe import check_computes, identify
from prophet.errors import ConversionError
from prophet.experts.likeness import check_alike
from prophet.experts.trial import Trial
from prophet.kernels.grouped_ffn import ExpertWeights
from prophet.spec import bias_of
from prophet.trials import trying


def list_in(experts: nn.Module, prefix: str) -> nn.ModuleList:
    """The experts in the module that holds them.

    Args:
        experts: That module.
        prefix: What their names begin with, as `Adapter.list_prefix`.

    Raises:
        ConversionError: Where there is no list.
    """
    path, _, key = prefix.rpartition(".")
    found = experts.get_submodule(path)
    # Keys in the order of their numbers: position and number must be one thing.
    if isinstance(found, nn.ModuleDict) and list(found) == [f"{key}{e}" for e in range(len(found))]:
        # The same modules; the dictionary itself stays as it is
        return nn.ModuleList(found.values())
    if not isinstance(found, nn.ModuleList):
        raise ConversionError(f"form 'modules': expected a ModuleList of experts, got {type(found).__name__}")
    return found


def list_spec(experts: nn.ModuleList, *, total: int, top_k: int, dim: int, router: str, first: int = 0) -> ExpertsSpec:
    """Describe experts in a list: as feed-forward networks if all are, else as modules one by one.

    Args:
        experts: Those held here.
        total: E.
        top_k: K; 0 where it is unknown.
        dim: D.
        router: How the router is called in reports.
        first: Which of them is tried as a module: one that this rank keeps.
    """
    try:
        check_one_kind(experts)
        spec = modules_spec(experts, num_experts=total, top_k=top_k, router=router)
        names: Any = spec.names
        # Equal shapes do not mean equal code: each expert is compared with what the first computes.
        for expert in list(experts)[1:]:
            check_computes(expert, names, spec.activation)
        return spec
    # Not an error: the message becomes the report's reason for running them one by one.
    except ConversionError as no:
        return one_by_one(experts, first, total=total, top_k=top_k, dim=dim, router=router, why=str(no))


def one_by_one(
    experts: nn.ModuleList, first: int, *, total: int, top_k: int, dim: int, router: str, why: str
) -> ExpertsSpec:
    """Describe experts that no kernel computes.

    Args:
        experts: Those held here.
        first: Which of them is tried.
        total: E.
        top_k: K; 0 where it is unknown.
        dim: D.
        router: How the router is called in reports.
        why: Why no kernel computes them.

    Raises:
        ValueError: For experts that no bank can hold.
    """
    check_alike(dict(enumerate(experts)))
    with trying():
        Trial(experts[first], dim)
    return ExpertsSpec(
        num_experts=total,
        held=len(experts),
        top_k=top_k,
        dim=dim,
        form="modules",
        router=router,
        bank="modules",
        why=why,
    )


def modules_spec(experts: nn.ModuleList, *, num_experts: int, top_k: int, router: str) -> ExpertsSpec:
    """Describe experts that are feed-forward modules in a list.

    Args:
        experts: Those held here.
        num_experts: E.
        top_k: K; 0 where it is unknown.
        router: How the router is called in reports.

    Raises:
        ConversionError: Where there are none, or they are not alike.
    """
    if not len(experts):
        raise ConversionError("the list of experts is empty")
    names, activation = identify(experts[0])
    state = dict(experts[0].named_parameters())
    first = names.unpack(state, "")
    (out, hidden), dim = first.w_out.shape, first.w_in.shape[1]
    # Of all experts by what the first one has: only that one is identified by running it.
    check_shapes(
        experts, {f"{e}.{name}": tuple(state[name].shape) for e in range(len(experts)) for name in names.all()}
    )
    # Shapes are equal by now, but another class may compute something else.
    kinds = {type(e).__name__ for e in experts}
    if len(kinds) > 1:
        raise ConversionError(f"experts of several kinds in one block: {', '.join(sorted(kinds))}")
    return ExpertsSpec(
        num_experts=num_experts,
        held=len(experts),
        top_k=top_k,
        dim=dim,
        hidden=hidden,
        activation=activation,
        bias=bias_of(first.b_in, first.b_out),
        form="modules",
        router=router,
        names=names,
        dim_out=out,
    )


def pack_modules(spec: ExpertsSpec, experts: Sequence[ExpertWeights], prefix: str) -> dict[str, Tensor]:
    """The parameters of a list of expert modules.

    Args:
        spec: Their description.
        experts: All of them, in order.
        prefix: What their names begin with, as `Adapter.list_prefix`.
    """
    names: Any = spec.names
    return {n: t for e, weights in enumerate(experts) for n, t in names.pack(weights, f"{prefix}{e}.").items()}
