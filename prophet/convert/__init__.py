"""convert(model): a model's own Mixture-of-Experts blocks, on `prophet.MoE`; revert(model): back again.

Every block keeps its router and whatever else is in it; its experts move into a `RoutedExperts` layer, each rank of the
expert-parallel group keeping those it is home to. `prophet.attach` balances them as it does every MoE layer.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from prophet.convert.base import Adapter, ExpertsSpec
from prophet.convert.checks import agree, check_no_optimizer, check_not_shared, fingerprint, on_every_rank
from prophet.convert.find import Found, find, find_all, nothing_found, standard_adapters
from prophet.convert.layers.routed import RoutedExperts, check_model, converted
from prophet.convert.optimizer import Carried, Move, carry, digest
from prophet.convert.replace import replace
from prophet.convert.report import ConversionReport, Replaced, Trained, trained
from prophet.convert.saving import write_as_before, write_original_layout
from prophet.convert.state import load_original_state_dict, original_state_dict, put_back
from prophet.convert.trial import check_by_trying
from prophet.convert.trials.discover import LeftAlone
from prophet.convert.trials.verify import Trial
from prophet.engine.overflow import share_overflows
from prophet.engine.parallel import leave_out_of_ddp, put_back_into_ddp
from prophet.errors import CollectiveError, ConversionError, PlanMismatch
from prophet.experts.plain import FfnNames, RowOrder
from prophet.kernels.choice import Impl
from prophet.kernels.grouped_ffn import ExpertWeights
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective
from prophet.ranks.process_group import collective_for
from prophet.spec import checked

__all__ = [
    "Adapter",
    "ConversionError",
    "ConversionReport",
    "ExpertWeights",
    "ExpertsSpec",
    "FfnNames",
    "LeftAlone",
    "Replaced",
    "RoutedExperts",
    "RowOrder",
    "Trained",
    "convert",
    "converted",
    "find",
    "load_original_state_dict",
    "original_state_dict",
    "revert",
    "standard_adapters",
]

_log = logging.getLogger(__name__)


@checked
def convert(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    experts: str | Sequence[str] | None = None,
    group: dist.ProcessGroup | Collective | None = None,
    adapters: Sequence[Adapter] = (),
    timeout_s: float = DEFAULT_TIMEOUT_S,
    impl: Impl = "auto",
    verify: bool = True,
) -> ConversionReport:
    """Replace the experts of every MoE block, in place; collective over `group`.

    Blocks are those that an adapter knows, and lists of experts that are found by trying (docs/convert.md says how).

    Every rank holds the whole model before, and of the experts only those it is home to afterwards. Convert before
    building any other optimizer and before wrapping the model in DistributedDataParallel.

    Until `revert`, `model.save_pretrained(folder)` of a transformers model is a call for every rank, and writes the
    original layout. What would write one rank's experts raises `PartialStateError`.

    Args:
        model: Changed in place. All ranks pass the same model with the same values.
        optimizer: One that was built before. Its states move bit for bit; its groups keep number and order. It is
            refused where it treats stacked experts one by one.
        experts: Names of the lists to take instead of those that are found, patterns as of `fnmatch`
            ("blocks.*.experts").
        group: The expert-parallel ranks, as for `prophet.MoE`.
        adapters: For your own kinds of blocks, asked before `standard_adapters()`.
        timeout_s: Seconds to wait for other ranks, as for `prophet.MoE`.
        impl: Which kernels run the experts, as for `prophet.MoE`.
        verify: Run every block on a few random tokens, in evaluation mode, before and after its conversion, and
            compare.

    Returns:
        What was replaced on this rank, what was left alone and why, and what trains.

    Raises:
        ConversionError: Where something would not be kept, or the ranks' models differ; the model is unchanged. Also on
            the ranks that did not fail where another one did.
        Exception: A rank that fails for another reason, such as lack of memory, raises its own error; the model is
            unchanged then, too.
    """
    collective = collective_for(group, timeout_s=timeout_s)
    patterns = [experts] if isinstance(experts, str) else experts
    found: list[Found] = []
    left: list[LeftAlone] = []
    carried: list[Carried] = []
    prints = 0, 0, 0
    error: Exception | None = None
    try:
        check_model(model)
        # Everything that can refuse runs before the first change, so a refusal leaves the model whole.
        found, left = find_all(model, (*adapters, *standard_adapters()), patterns, collective.rank, collective.size)
        carried = _checked(model, optimizer, found, left)
        prints = *fingerprint([(f.name, f.spec, f.experts(model)) for f in found]), digest(optimizer, carried)
    except Exception as caught:
        error = caught
    # Outside the `try`: a rank that failed must still take part, or the others would wait for it until the timeout.
    agree(collective, error, prints)

    replaced: list[Replaced] = []
    moves: list[Move] = []
    try:
        for f in found:
            replaced.append(_convert_one(model, f, collective, impl, verify))
        with on_every_rank(collective):
            moves = [one.moved(model) for one in carried]
    # The group is broken, so experts cannot be gathered any more and nothing can be reverted.
    except CollectiveError as lost:
        if replaced:
            lost.add_note(f"the conversion ended after {replaced[-1].name}: build the model anew")
        raise
    except Exception:
        if replaced:
            revert(model)
        # `revert` makes new parameters; the optimizer still holds the old objects, which go back in.
        for one in carried[: len(replaced)]:
            one.put_back(model.get_submodule(one.where))
        raise
    # Last, and nothing in it can fail: an optimizer that was half changed could not be put back.
    for move in moves:
        move.make()
    _announce(model)
    report = ConversionReport(tuple(replaced), collective.rank, collective.size, tuple(left), trained(model))
    if collective.rank == 0:
        _log.info("%s", report)
    return report


def _announce(model: nn.Module) -> None:
    """Let savers, loss scalers and DDP know that the model's experts are spread over ranks now."""
    layers = [layer for *_, layer in converted(model)]
    for layer in layers:
        # Weak, as the model holds the layer
        layer.origin.model = weakref.ref(model)
    write_original_layout(model)
    share_overflows(layers)
    leave_out_of_ddp(model)


def _checked(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, found: Sequence[Found], left: Sequence[LeftAlone]
) -> list[Carried]:
    """What `optimizer` holds of what is converted; raises `ConversionError` for what would not be kept."""
    if not found:
        raise ConversionError(nothing_found(model, left))
    holders = [(f.where, f.experts(model)) for f in found]
    check_not_shared(model, holders, [f.block_name for f in found])
    check_no_optimizer([held for _, held in holders], but=optimizer)
    carried = carry(optimizer, model, found)
    check_by_trying(model, found)
    return carried


def _convert_one(model: nn.Module, f: Found, collective: Collective, impl: Impl, verify: bool) -> Replaced:
    """Convert one block, or raise an error on all ranks and leave it as it was; collective."""
    block, held = f.block(model), f.experts(model)
    trial: Trial | None = None
    layer: RoutedExperts | None = None
    methods: tuple[str, ...] = ()
    problem: str | None = None
    try:
        with on_every_rank(collective):
            # Built expert-parallel, the block's own forward is collective: a rank that failed in it would leave the
            # others waiting.
            if verify and f.spec.held == f.spec.num_experts:
                trial = Trial(partial(f.run, model), f.input_shape, block, model, next(held.parameters()), collective)
            layer, methods = replace(model, f, collective, impl)
        with on_every_rank(collective):
            problem = trial.problem() if trial else None
            if problem:
                raise ConversionError(f"{f.name} ({f.adapter.family}): {problem}")
    except Exception as error:
        # Back to what the block was, from the originals, which are let go of only after the comparison.
        if layer is not None:
            layer.undo()
            setattr(f.holder(model), f.where.rpartition(".")[2], held)
            if layer.origin.block_class is not None:
                block.__class__ = layer.origin.block_class
        # The others are still trying the block, so this rank's own finding says more than the broken exchange.
        if problem and isinstance(error, CollectiveError | PlanMismatch):
            raise ConversionError(f"{f.name} ({f.adapter.family}): {problem}") from error
        raise
    assert layer is not None
    before = sum(p.numel() for p in held.parameters())
    # From here the originals' values are gone: undoing takes a gather, which `revert` does.
    layer.let_go_of_originals()
    bank = layer.experts
    shape = bank.shape()
    return Replaced(
        name=f.where,
        family=f.adapter.family,
        block=(layer.origin.block_class or type(block)).__name__,
        spec=f.spec,
        experts=range(bank.first_expert, bank.first_expert + bank.experts),
        methods=methods,
        dtype=str(bank.dtype).removeprefix("torch."),
        params=sum(p.numel() for p in bank.parameters()),
        params_before=before,
        flops_per_row=shape.forward_flops_per_token,
        expert_bytes=shape.expert_bytes,
    )


def revert(model: nn.Module) -> None:
    """Give every converted block its own experts back, with the values they have now; collective.

    Afterwards every rank holds what it held before the conversion: all experts, unless the model was built
    expert-parallel. The parameters are new objects, so build the optimizer again. Where an engine is attached, call
    `engine.close()` first: that ends balancing, and this undoes the conversion.

    Raises:
        ConversionError: Where nothing is converted, where an engine is attached, and for blocks that DeepSpeed's AutoEP
            has replaced.
    """
    found = list(converted(model))
    if not found:
        raise ConversionError("nothing in this model has been converted")
    staying = [layer.origin.stays for *_, layer in found if layer.origin.stays]
    if staying:
        raise ConversionError(staying[0])
    if any(layer.port.index is not None for *_, layer in found):
        raise ConversionError(
            "an engine is attached to this model: call engine.close() first, which ends balancing and leaves the "
            "experts converted, then prophet.revert(model)"
        )
    # Before the layers are gone: DDP was told to leave out the parameters under these names.
    names = [
        layer.names_prefix(f"{name}.") + part
        for name, *_, layer in found
        for part, _ in layer.experts.named_parameters()
    ]
    for name, _, _, layer in found:
        put_back(model, name, layer)
    write_as_before(model)
    put_back_into_ddp(model, names)
