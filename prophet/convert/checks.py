"""What must hold before a model is converted; everything is checked before anything is changed."""

from __future__ import annotations

import gc
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from prophet.convert.base import Adapter, ExpertsSpec, child
from prophet.errors import CollectiveError, ConversionError, PlanMismatch
from prophet.ranks.collective import Collective
from prophet.ranks.messages import gather_numbers
from prophet.ranks.operation import Operation
from prophet.sharing import held_by_several, places_of
from prophet.spec import check_experts_per_rank, odd_ones_out

# Numbers of an expert that are compared over ranks: all of them would take as long as a checkpoint
SAMPLE = 64
LORA_ADVICE = (
    "keep LoRA off the experts (target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj'], say, and no expert in "
    "target_parameters or modules_to_save)"
)

SPREAD = (
    "the ep_size, tp_size or fsdp_size of transformers' DistributedConfig, or by the expert parallelism of axolotl or "
    "LLaMA-Factory: switch that off to balance with prophet.convert, or keep it and do without prophet.convert"
)


def describe_block(name: str, adapter: Adapter, block: nn.Module, ranks: int) -> ExpertsSpec:
    """Describe a block, and check all that can be checked of it without trying it.

    Args:
        name: Of the block, for messages.
        adapter: The one that knows it.
        block: What the adapter reads.
        ranks: In the expert-parallel group.

    Raises:
        ConversionError: For what cannot be converted on so many ranks.
    """
    try:
        # PEFT keeps the original beside the copy that it trains; converting one would leave two sets of experts.
        if {"modules_to_save", "original_module"} & set(name.split(".")):
            raise ConversionError(f"PEFT has made a second block to train (modules_to_save): {LORA_ADVICE}")
        experts = child(block, adapter.experts_name)
        if not adapter.takes_lora:
            check_no_lora(experts)
        check_movable(experts)
        spec = adapter.describe(block)
        # Only the grouped kernels need one dtype and device; experts run as modules keep what they have.
        if spec.bank == "feed-forward":
            (check_stackable if spec.form == "stacked" else check_one_kind)(experts)
        if spec.form not in ("stacked", "modules"):
            raise ConversionError(f"form: expected 'stacked' or 'modules', got {spec.form!r}")
        if not 0 <= spec.top_k <= spec.num_experts:
            raise ConversionError(f"top_k: expected 1 to {spec.num_experts}, the number of experts, got {spec.top_k}")
        check_experts_per_rank(spec.num_experts, ranks)
        if spec.held not in (spec.num_experts, spec.num_experts // ranks):
            raise ConversionError(
                f"this rank holds {spec.held} of {spec.num_experts} experts, so the model was built for "
                f"{spec.num_experts // spec.held} expert-parallel ranks; the group has {ranks}"
            )
    except ValueError as error:
        raise ConversionError(f"{name} ({adapter.family}): {error}") from error
    return spec


def check_no_lora(experts: nn.Module) -> None:
    """Raise `ConversionError` for experts that PEFT has put adapters on."""
    # By the package's name, as PEFT may not be installed.
    adapters = [m for m in experts.modules() if type(m).__module__.split(".")[0] == "peft"]
    if adapters:
        raise ConversionError(f"PEFT has put {type(adapters[0]).__name__} on the experts: {LORA_ADVICE}")


def check_movable(experts: nn.Module) -> None:
    """Raise `ConversionError` for experts whose parameters cannot be moved without losing something."""
    params = dict(experts.named_parameters(remove_duplicate=False))
    for name, p in params.items():
        if p.is_meta:
            raise ConversionError(f"{name} is on the meta device: load the parameters before converting")
        check_plain(name, p)
        # Hooks hang on the parameter object, and the conversion makes new ones.
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ConversionError(f"{name} has a hook, as of an optimizer in backward, which would never be called")
        if p.grad is not None:
            raise ConversionError(f"{name} holds a gradient, which would be lost: optimizer.zero_grad() first")


def check_plain(name: str, p: nn.Parameter) -> None:
    """Raise `ConversionError` for a parameter that is quantised, sparse or sharded."""
    if not p.is_floating_point() or p.is_sparse:
        raise ConversionError(
            f"{name} has dtype {p.dtype}: quantised or sparse experts cannot be trained. Load the model without "
            f"quantization_config, as with from_pretrained(..., dtype=torch.bfloat16), then prophet.convert(model)"
        )
    # DTensor and quantised tensors are subclasses; their values are not all here, or are no plain numbers.
    if type(p.data) is not torch.Tensor:
        raise ConversionError(
            f"{name} is a {type(p.data).__name__}: convert before sharding or quantising; or it is spread over ranks "
            f"by {SPREAD}"
        )


def check_one_kind(experts: nn.Module) -> None:
    """Raise `ConversionError` for experts that have more than parameters of one dtype, on one device."""
    params = dict(experts.named_parameters(remove_duplicate=False))
    for what, found in (
        ("dtypes", {str(p.dtype) for p in params.values()}),
        ("devices", {str(p.device) for p in params.values()}),
    ):
        if len(found) > 1:
            raise ConversionError(f"experts of several {what}: {', '.join(sorted(found))}; expected one")
    check_bare(experts)


def check_stackable(experts: nn.Module) -> None:
    """Raise `ConversionError` for experts of more than one kind, of which one parameter cannot hold all."""
    check_one_kind(experts)
    params = dict(experts.named_parameters(remove_duplicate=False))
    frozen = sorted(name for name, p in params.items() if not p.requires_grad)
    if 0 < len(frozen) < len(params):
        raise ConversionError(
            f"some of the experts' parameters are frozen and some are not ({frozen[0]} is): expected all or none"
        )


def check_bare(experts: nn.Module) -> None:
    """Raise `ConversionError` for buffers and hooks, which a layer of other modules would not have."""
    buffers = [name for name, _ in experts.named_buffers()]
    if buffers:
        raise ConversionError(f"the experts have buffers, which have no place in the layer: {', '.join(buffers)}")
    for name, module in experts.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        # accelerate and others wrap a forward by setting it on the instance.
        if any(hooks) or "forward" in vars(module):
            who = f"experts.{name}" if name else "the experts' module"
            raise ConversionError(f"{who} has hooks or a forward of its own, which would not run any more")


def check_adapters(model: nn.Module, experts: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise `ConversionError` where PEFT was asked, after the conversion, to adapt the experts.

    PEFT finds nothing under the experts' old names any more, warns at most, and trains without.

    Args:
        model: Perhaps a PEFT model.
        experts: Name and original module of every block's experts.
    """
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        names: dict[str, list[str]] = {"target_parameters": [], "target_modules": []}
        for name, module in experts:
            names["target_parameters"] += [f"{name}.{part}" for part, _ in module.named_parameters()]
            names["target_modules"] += [f"{name}.{part}" for part, _ in module.named_modules() if part]
            if "modules_to_save" in name.split("."):
                raise ConversionError(f"PEFT trains a copy of {name} (modules_to_save): {LORA_ADVICE}")
        for setting, there in names.items():
            wanted = getattr(config, setting, None) or ()
            for full in there:
                if _is_named(full, wanted):
                    raise ConversionError(
                        f"PEFT was told to adapt {full} ({setting}), and the experts were converted before, so it "
                        f"would train without: {LORA_ADVICE}"
                    )


def _is_named(full: str, wanted: str | Iterable[str]) -> bool:
    """Whether PEFT takes `full` for one of its targets: a regular expression, or ends of names."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, full) is not None
    return any(full == end or full.endswith(f".{end}") for end in wanted)


def check_not_shared(model: nn.Module, experts: Sequence[tuple[str, nn.Module]], blocks: Sequence[str]) -> None:
    """Raise `ConversionError` where experts, or a part of one, have another place in the model.

    Layers may share a whole block; an expert may use one of its modules several times.

    Args:
        model: The model that holds them.
        experts: Names, and the modules that hold experts.
        blocks: Names of the modules whose code calls them, in the same order.
    """
    places = places_of(model)
    for (name, held), block in zip(experts, blocks, strict=True):
        # A list inside a sub-module of its block: the modules in between must not be shared either.
        inner = name.removeprefix(f"{block}." if block else "").split(".")
        between = [".".join(filter(None, (block, *inner[:depth]))) for depth in range(1, len(inner))]
        for module in (*map(model.get_submodule, between), *held.modules()):
            # Modules without parameters, such as one activation for all experts, may be shared freely.
            if any(True for _ in module.parameters()):
                here = held_by_several(places[id(module)])
                if len({_expert_of(p.name, name) for p in here}) > 1:
                    raise ConversionError(
                        f"{here[0].name} and {here[1].name} are one module, and only one of them would be converted: "
                        f"let every block have experts of its own (copy.deepcopy), or let the layers share the whole "
                        f"block that calls them"
                    )
        for p in held.parameters():
            here = held_by_several(places[id(p)])
            if len(here) > 1:
                raise ConversionError(
                    f"{here[0].name} and {here[1].name} are one parameter of {type(held).__name__}: tied experts "
                    f"cannot be converted"
                )


def _expert_of(place: str, experts: str) -> str:
    """Which of `experts`, by number, a place is in; the place itself where it is in none."""
    inside = place.removeprefix(f"{experts}.").split(".")
    number = next((at for at, part in enumerate(inside[:-1]) if part.isdigit()), None)
    return place if number is None or not place.startswith(f"{experts}.") else ".".join(inside[: number + 1])


def check_no_optimizer(experts: Sequence[nn.Module], but: object = None) -> None:
    """Raise `ConversionError` where a living optimizer holds a parameter of `experts`: it would go on with dead ones.

    Args:
        experts: The modules with experts before the conversion.
        but: An optimizer that is converted, too.
    """
    # The search goes through every object of the process, so it is made only where somebody may be found
    if not _held_outside(experts):
        return
    wanted = {id(p) for held in experts for p in held.parameters()}
    kinds: list[type] = [torch.optim.Optimizer]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())

    def holders() -> list[torch.optim.Optimizer]:
        # Objects refer to their class. `gc.get_objects` finds them, too, but also tuples that other threads are just
        # making, and these fail if anyone else holds what they make.
        return [
            o
            for o in gc.get_referrers(*kinds)
            if issubclass(type(o), torch.optim.Optimizer)
            and o is not but
            and any(id(p) in wanted for group in getattr(o, "param_groups", ()) for p in group["params"])
        ]

    if holders():
        # One that is merely waiting to be collected does no harm.
        gc.collect()
        found = holders()
        if found:
            raise ConversionError(
                f"{type(found[0]).__name__} was built before the conversion and would go on with the old experts: "
                f"prophet.convert(model, optimizer=optimizer) takes one along; or convert first, then build it"
            )


def _held_outside(modules: Sequence[nn.Module]) -> bool:
    """Whether anything but one module may refer to one of the parameters; a second module counts as well."""
    # What a single dictionary refers to counts as much as this, whatever this version of Python adds for the call
    once = {"": nn.Parameter(torch.empty(0))}
    fewest = sys.getrefcount(once[""])
    return any(
        held[name] is not None and sys.getrefcount(held[name]) > fewest
        for root in modules
        for held in (module._parameters for module in root.modules())
        for name in held
    )


def fingerprint(found: Sequence[tuple[str, ExpertsSpec, nn.Module]]) -> tuple[int, int]:
    """56-bit digests of the blocks' descriptions, and of a sample of every experts' module that is whole."""
    what = hashlib.blake2b(digest_size=7)
    values = hashlib.blake2b(digest_size=7)
    for name, spec, experts in found:
        what.update(f"{name}: {spec.signature()}; ".encode())
        if spec.held == spec.num_experts:
            for p in experts.parameters():
                # Only the sample leaves the device. A copy, as numpy's view would pin the memory of a float64 parameter
                sample = p.detach().reshape(-1)[-SAMPLE:].to("cpu", torch.float64, copy=True)
                values.update(sample.numpy().tobytes())
    return int.from_bytes(what.digest(), "little"), int.from_bytes(values.digest(), "little")


@contextmanager
def on_every_rank(collective: Collective) -> Iterator[None]:
    """Go on when every rank has done what stands under `with`; collective.

    A rank that fails raises its error, the others `ConversionError`. What goes wrong between ranks is raised as it is.

    Args:
        collective: The group that must agree.
    """
    error: Exception | None = None
    try:
        yield
    except (CollectiveError, PlanMismatch):
        # The exchange itself has failed: another one with the same group could not succeed.
        raise
    except Exception as caught:
        error = caught
    agree(collective, error, (0, 0, 0))


def agree(collective: Collective, error: Exception | None, digests: tuple[int, ...]) -> None:
    """Raise this rank's error; else say which ranks have one, or differ in what they convert. Collective.

    Args:
        collective: The group that must agree.
        error: What went wrong on this rank, if anything did.
        digests: Of the blocks, of the experts' parameters, and of what the optimizer holds of them.
    """
    # One exchange for both questions, so no rank raises before every other has learned of an error.
    row = [int(error is not None), *digests]
    table = gather_numbers(collective, row, op=Operation("comparison of models to convert"))
    if error is not None:
        raise error
    failed = table[:, 0].nonzero()[0].tolist()
    if failed:
        raise ConversionError(f"nothing was converted because of errors on rank(s) {failed}; theirs say why")
    for column, what, advice in (
        (1, "the MoE blocks", "all ranks must build the same model"),
        (2, "the experts' parameters", "seed all ranks alike, or load the same checkpoint"),
        (3, "the optimizers", "build them alike, and load the same checkpoint"),
    ):
        differ = odd_ones_out(table[:, column])
        if differ:
            raise ConversionError(f"{what} of rank(s) {differ} differ from the other ranks': {advice}")
