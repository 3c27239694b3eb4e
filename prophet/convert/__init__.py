"""convert(model): a model's own Mixture-of-Experts blocks, on `prophet.MoE`; revert(model): back again.

Every block keeps its router and whatever else is in it; its experts move into a `RoutedExperts` layer, each rank of the
expert-parallel group keeping those it is home to. `prophet.attach` balances them as it does every MoE layer.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from prophet.convert import huggingface
from prophet.convert.base import Adapter, ExpertsSpec, FfnNames, child
from prophet.convert.checks import agree, check_model, check_no_optimizer, check_not_shared, describe_block, fingerprint
from prophet.convert.deepspeed import DeepSpeedMoE
from prophet.convert.optimizer import Carried, carry, digest
from prophet.convert.report import ConversionReport, Replaced
from prophet.convert.routed import Origin, RoutedExperts, converted
from prophet.convert.saving import write_as_before, write_original_layout
from prophet.convert.state import load_original_state_dict, original_state_dict, put_back
from prophet.convert.tutel import TutelMoE
from prophet.convert.verify import Trial
from prophet.engine.parallel import leave_out_of_ddp, put_back_into_ddp
from prophet.errors import ConversionError
from prophet.experts.feed_forward import FeedForwardBank
from prophet.kernels.choice import Impl
from prophet.kernels.grouped_ffn import ExpertWeights
from prophet.layer.moe import MoE
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective
from prophet.ranks.process_group import collective_for

__all__ = [
    "Adapter",
    "ConversionError",
    "ConversionReport",
    "ExpertWeights",
    "ExpertsSpec",
    "FfnNames",
    "Replaced",
    "RoutedExperts",
    "convert",
    "converted",
    "find",
    "load_original_state_dict",
    "original_state_dict",
    "revert",
    "standard_adapters",
]


def standard_adapters() -> tuple[Adapter, ...]:
    """The adapters that `convert` knows: Hugging Face's families, DeepSpeed, Tutel."""
    return (*huggingface.adapters(), DeepSpeedMoE(), TutelMoE())


def convert(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | Collective | None = None,
    adapters: Sequence[Adapter] = (),
    timeout_s: float = DEFAULT_TIMEOUT_S,
    impl: Impl = "auto",
    verify: bool = True,
) -> ConversionReport:
    """Replace the experts of every MoE block that an adapter knows, in place; collective over `group`.

    Every rank holds the whole model before, and of the experts only those it is home to afterwards. group, timeout_s,
    impl: as for `prophet.MoE`. adapters: for blocks of your own, asked before `standard_adapters()`. verify: run every
    block on a few random tokens, in evaluation mode, before and after its conversion, and compare.

    optimizer: one that was built before. Its states move with the experts, bit for bit, and number and order of its
    groups stay; it is refused where one stacked parameter cannot stand for the experts that it treats one by one.

    Convert before building any other optimizer and before wrapping the model in DistributedDataParallel. Raises
    `ConversionError`, the model unchanged, where something would not be kept, and where the ranks' models differ.

    Until `revert`, `model.save_pretrained(folder)` of a transformers model is a call for every rank, and writes the
    original layout; what would write one rank's experts raises `PartialStateError`.
    """
    collective = collective_for(group, timeout_s=timeout_s)
    found: list[tuple[str, nn.Module, Adapter, ExpertsSpec, nn.Module]] = []
    carried: list[Carried] = []
    prints = 0, 0, 0
    error: Exception | None = None
    try:
        check_model(model)
        for name, block, adapter in find(model, (*adapters, *standard_adapters())):
            spec = describe_block(name, adapter, block, collective.size)
            found.append((name, block, adapter, spec, child(block, adapter.experts_name)))
        if not found:
            raise ConversionError(_nothing_found(model))
        holders = [(name, experts) for name, *_, experts in found]
        check_not_shared(model, holders)
        check_no_optimizer((p for _, experts in holders for p in experts.parameters()), but=optimizer)
        carried = carry(optimizer, [(_within(name, adapter), adapter, spec, e) for name, _, adapter, spec, e in found])
        alike = fingerprint([(name, spec, experts) for name, _, _, spec, experts in found])
        prints = *alike, digest(optimizer, carried)
    except ConversionError as caught:
        error = caught
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    agree(collective, device, error, prints)

    replaced: list[Replaced] = []
    for name, block, adapter, spec, experts in found:
        trial = Trial(adapter, spec, block, collective) if verify and spec.held == spec.num_experts else None
        layer, methods = _replace(block, experts, adapter, spec, collective, impl)
        where = _within(name, adapter)
        problem = trial.problem() if trial else None
        if trial is not None and trial.anywhere(problem):
            # back to what it was: this block from what is still there, those before it from their homes
            setattr(block, adapter.experts_name, experts)
            if layer.origin.block_class is not None:
                block.__class__ = layer.origin.block_class
            if replaced:
                revert(model)
            for one in carried[: len(replaced)]:
                one.put_back(model.get_submodule(one.where))
            raise ConversionError(f"{name} ({adapter.family}): {problem or 'the check failed on another rank'}")
        before = sum(p.numel() for p in experts.parameters())
        experts.to("meta")
        bank = layer.experts
        replaced.append(
            Replaced(
                name=where,
                family=adapter.family,
                block=(layer.origin.block_class or type(block)).__name__,
                spec=spec,
                experts=range(bank.first_expert, bank.first_expert + bank.experts),
                methods=methods,
                dtype=str(bank.dtype).removeprefix("torch."),
                params=sum(p.numel() for p in bank.parameters()),
                params_before=before,
            )
        )
    for one in carried:
        one.move_to(model.get_submodule(f"{one.where}.experts"), f"{one.where}.experts")
    for *_, layer in converted(model):
        layer.origin.model = weakref.ref(model)
    write_original_layout(model)
    leave_out_of_ddp(model)
    return ConversionReport(tuple(replaced), collective.rank, collective.size)


def _within(name: str, adapter: Adapter) -> str:
    """The name in the model of what holds the experts of block `name`."""
    return f"{name}.{adapter.experts_name}" if name else adapter.experts_name


def revert(model: nn.Module) -> None:
    """Give every converted block its own experts back, with the values they have now; collective.

    Afterwards every rank holds what it held before the conversion: all experts, unless the model was built
    expert-parallel. The parameters are new objects, so build the optimizer again. Where an engine is attached, call
    `engine.close()` first: that ends balancing, and this undoes the conversion. Raises `ConversionError` where nothing
    is converted, or where an engine is attached.
    """
    found = list(converted(model))
    if not found:
        raise ConversionError("nothing in this model has been converted")
    if any(layer._port.index is not None for *_, layer in found):
        raise ConversionError(
            "an engine is attached to this model: call engine.close() first, which ends balancing and leaves the "
            "experts converted, then prophet.revert(model)"
        )
    names = [f"{name}.experts.{part}" for name, _, _, layer in found for part, _ in layer.experts.named_parameters()]
    for _, block, attribute, layer in found:
        put_back(block, attribute, layer)
    write_as_before(model)
    put_back_into_ddp(model, names)


def find(model: nn.Module, adapters: Sequence[Adapter]) -> list[tuple[str, nn.Module, Adapter]]:
    """Name, block and adapter of every block that an adapter knows; nothing inside a block is looked at."""
    found: list[tuple[str, nn.Module, Adapter]] = []
    for name, module in model.named_modules():
        if any(above == "" or name.startswith(above + ".") for above, *_ in found):
            continue
        adapter = next((a for a in adapters if a.matches(module)), None)
        if adapter is not None:
            found.append((name, module, adapter))
    return found


def _replace(
    block: nn.Module, experts: nn.Module, adapter: Adapter, spec: ExpertsSpec, collective: Collective, impl: Impl
) -> tuple[RoutedExperts, tuple[str, ...]]:
    """Put this rank's experts into a layer, and the layer into the block; the old experts are left untouched."""
    params = dict(experts.named_parameters())
    state = {name: p.detach() for name, p in params.items()}
    m = spec.num_experts // collective.size
    first = collective.rank * m
    offset = first if spec.held == spec.num_experts else 0
    bank = FeedForwardBank.from_weights(
        [adapter.unpack(spec, state, offset + i) for i in range(m)],
        spec.activation,
        first_expert=first,
        total_experts=spec.num_experts,
        ep_size=collective.size,
    )
    bank.requires_grad_(any(p.requires_grad for p in params.values()))
    methods = adapter.methods(block)
    origin = Origin(adapter, spec, experts, {n: dict(vars(p)) for n, p in params.items() if vars(p)})
    layer = RoutedExperts(bank, origin, collective, impl)
    layer.train(block.training)
    setattr(block, adapter.experts_name, layer)
    if methods:
        kind = origin.block_class = type(block)
        # a subclass, so that whoever asks for the block's class still finds it
        block.__class__ = type(f"Prophet{kind.__name__}", (kind,), {"__module__": kind.__module__, **methods})
    return layer, tuple(methods)


def _nothing_found(model: nn.Module) -> str:
    """The message for a model without a block that is known."""
    families = ", ".join(a.family for a in standard_adapters())
    if any(isinstance(m, MoE) for m in model.modules()):
        return "the model's MoE layers are prophet.MoE already: there is nothing to convert"
    suspects = _suspects(model)
    hint = f"; {', '.join(suspects)} may be one: write an Adapter for it (docs/convert.md)" if suspects else ""
    return f"no MoE block found that is one of {families}{hint}"


def _suspects(model: nn.Module) -> list[str]:
    """Classes of the modules that hold experts; where none does, of those that are named after them."""
    blocks = {
        type(m).__name__
        for m in model.modules()
        for part, inner in m.named_children()
        if "expert" in part.lower() or "experts" in type(inner).__name__.lower()
    }
    if not blocks:
        names = {type(m).__name__ for m in model.modules() if any(True for _ in m.children())}
        blocks = {n for n in names if ("moe" in n.lower() or "expert" in n.lower()) and not _NO_BLOCK.search(n)}
    return sorted(blocks)


# what families name after the model, or put around a block
_NO_BLOCK = re.compile(r"Norm|Attention|Rotary|Router|Layer$|Model$|For[A-Z]", re.ASCII)
