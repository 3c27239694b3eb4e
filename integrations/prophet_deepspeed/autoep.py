"""DeepSpeed's AutoEP, with experts that stay balanced behind its routers.

AutoEP finds a model's MoE blocks by its own families and replaces each with a layer that has a router, this rank's
share of the experts, and the block's shared experts. Here these experts move into a bank of this library, and the
router's choices go there. Everything else of AutoEP's layer stays: scores, groups, correction biases, counts, shared
experts, and logits for the model's losses. Its token exchange and its grouped products drop out.

The model is exported under the names that it had before AutoEP, and with all experts.

Nothing of deepspeed is imported before it is needed.

Shape legend: N tokens, K top-k, E experts, m experts of this rank, D model dim, H hidden dim.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import prophet
from prophet.convert import Adapter, ConversionReport, ExpertsSpec, ExpertWeights, FfnNames, converted
from prophet.convert.checks import check_movable, check_stackable
from prophet.convert.layers.routed import check_model
from prophet.engine.checkpoint.fail_together import on_all_ranks
from prophet.errors import ConversionError
from prophet.files import shown
from prophet.kernels.grouped_ffn.naive import QUICK_SLOPE
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective
from prophet.ranks.process_group import collective_for
from prophet.spec import Activation, ActivationParts, activation_named
from prophet_deepspeed.section import SECTION, ConfigError, ProphetSection, check_keys

KEY = "expert_parallel"
# AutoEP's activations that the bank computes, by AutoEP's names. A block may have another limit.
_ACTIVATIONS = {
    "swiglu": ActivationParts(function="silu", gated=True),
    "geglu_tanh": ActivationParts(function="gelu_tanh", gated=True),
    "swiglu_clamped": ActivationParts(function="silu", gated=True, limit=10.0),
    "swiglu_oai": ActivationParts(function="quick_gelu", gated=True, limit=7.0, plus_one=True),
}
_STAYS = (
    "AutoEP has replaced this model's MoE blocks, and they cannot be put back: load what save_16bit_model writes into "
    "a new model"
)


# --- what the config says ---


def in_use(config: Mapping[str, Any]) -> bool:
    """Whether a DeepSpeed config asks for AutoEP."""
    found = config.get(KEY)
    return isinstance(found, Mapping) and bool(found.get("enabled"))


def check_config(config: Mapping[str, Any], section: ProphetSection) -> None:
    """Raise `ConfigError`, naming the key, for settings of AutoEP that do not work with balanced experts."""
    found = config[KEY]
    # DeepSpeed's own fields, so a release that adds a setting does not need one of this library.
    known = importlib.import_module("deepspeed.module_inject.auto_ep_config").AutoEPConfig
    check_keys(KEY, found, [f.name for f in dataclasses.fields(known) if f.init])
    size = found.get("autoep_size", 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"{KEY}.autoep_size: expected a number of ranks, got {shown(size)}")
    if section.ep_size not in (None, size):
        raise ConfigError(
            f"{SECTION}.ep_size: {section.ep_size}, but {KEY}.autoep_size is {size}; leave out {SECTION}.ep_size"
        )
    if not section.convert:
        raise ConfigError(f"{SECTION}.convert: only true is supported beside {KEY}, whose experts are to be balanced")
    for key, served, why in (
        ("comm_backend", ("comm",), "DeepEP sends tokens to experts' homes alone, and replicas are elsewhere"),
        ("score_apply", ("auto", "post"), "scores are applied to what experts answer"),
        ("async_split_plan", (False,), "AutoEP's token exchange, which it is part of, drops out"),
        ("expert_tensor_parallel_size", (1,), "experts are not cut by tensor parallelism"),
    ):
        value = found.get(key, served[0])
        if value not in served:
            wanted = " or ".join(shown(one) for one in served)
            raise ConfigError(f"{KEY}.{key}: expected {wanted}, got {shown(value)}: {why}")


# --- before AutoEP replaces anything ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Before:
    """One block before AutoEP replaces it.

    Attributes:
        detected: AutoEP's `MoELayerSpec`.
        experts: The experts' module, its parameters on the meta device.
        source: Reads and writes its parameters.
        names: The block's other parameters and persistent buffers, by the names that they get.
    """

    detected: Any
    experts: nn.Module
    source: SourceExperts
    names: Mapping[str, str]

    @classmethod
    def read(cls, model: nn.Module, detected: Any) -> Before:
        """Read one block; raises `ConversionError`, naming block and field, for what would not be kept."""
        name = detected.moe_module_name
        block = model.get_submodule(name)
        experts = getattr(block, detected.experts_name)
        try:
            check_movable(experts)
            check_stackable(experts)
            _activation(detected.expert_activation, detected.expert_activation_alpha, detected.expert_activation_limit)
            if detected.score_apply != "post":
                raise ConversionError(f"{KEY}.score_apply: expected 'post', got {detected.score_apply!r}")
            source = SourceExperts.of(detected, experts)
            inside = f"{detected.experts_name}."
            names = {_renamed(key, detected): key for key in block.state_dict() if not key.startswith(inside)}
        except ValueError as error:
            raise ConversionError(f"{name} (AutoEP): {error}") from error
        # The memo of `deepcopy`: the experts' values are never copied
        memo: dict[int, Any] = {
            id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in experts.parameters()
        }
        return cls(detected=detected, experts=copy.deepcopy(experts, memo), source=source, names=names)


def _activation(name: str, slope: float, limit: float) -> Activation:
    """The bank's name of AutoEP's activation; raises `ConversionError` for one that it does not compute."""
    parts = _ACTIVATIONS.get(name)
    if parts is None:
        raise ConversionError(
            f"{KEY}.expert_activation: {name!r} is not supported, expected one of {', '.join(_ACTIVATIONS)}"
        )
    # The bank knows this activation with one slope
    if name == "swiglu_oai" and slope != QUICK_SLOPE:
        raise ConversionError(f"{KEY}.expert_activation: swiglu_oai is supported with slope {QUICK_SLOPE}, got {slope}")
    return activation_named(parts if parts.limit is None else dataclasses.replace(parts, limit=limit))


def _renamed(key: str, detected: Any) -> str:
    """Name in AutoEP's layer of the block's `key`; raises `ConversionError` for what it has no place for."""
    router = detected.router_name
    if key in (f"{router}.weight", f"{router}.bias"):
        return f"router.gate.{key.removeprefix(router + '.')}"
    bias, path = "e_score_correction_bias", detected.e_score_correction_bias_path
    if path is not None and key == (f"{path}.{bias}" if path else bias):
        return f"router.{bias}"
    for here, there in (
        (detected.shared_experts_name if detected.has_shared_experts else "", "shared_experts."),
        (detected.shared_experts_gate_name, "shared_experts_gate."),
    ):
        if here and key.startswith(f"{here}."):
            return there + key.removeprefix(f"{here}.")
    raise ConversionError(f"{key}: AutoEP's layer has no place for it, and would compute without it")


class SourceExperts(Adapter):
    """The parameters of the experts' module that AutoEP replaced, in its layout.

    Args:
        names: Of an expert's parameters, where there is a module per expert.
        stacked: Where one parameter has all experts: names of the gate's matrix, with `up` below it or apart, and of
            the other one.
        turned: Matrices there are [in, out].
    """

    family = "AutoEP"

    def __init__(self, *, names: FfnNames | None, stacked: tuple[str, ...], turned: bool) -> None:
        self.names, self.stacked, self.turned = names, stacked, turned

    @classmethod
    def of(cls, detected: Any, experts: nn.Module) -> SourceExperts:
        """Read the layout of a module; raises `ConversionError` for parameters that AutoEP would leave out."""
        roles = [detected.expert_w1_name, detected.expert_w3_name, detected.expert_w2_name]
        params = {name: tuple(p.shape) for name, p in experts.named_parameters()}
        if detected.expert_storage == "module_list":
            full = [r if f"0.{r}" in params else f"{r}.weight" for r in roles if r is not None]
            names = FfnNames(w_in=tuple(full[:-1]), w_out=full[-1])
            wanted = {f"{e}.{name}" for e in range(detected.num_experts) for name in full}
            found = cls(names=names, stacked=(), turned=False)
        else:
            stacked = tuple(r for r in roles if r is not None)
            layouts: Any = importlib.import_module("deepspeed.moe.fused_expert_layout")
            layout = None
            if len(stacked) == 2 and set(stacked) <= set(params):
                # DeepSpeed's own rule, so that both read the same matrices in the same way.
                layout = layouts.classify_fused_gate_up_layout(params[stacked[0]], params[stacked[1]])
            wanted = set(stacked)
            found = cls(names=None, stacked=stacked, turned=layout is not None and layout.needs_transpose)
        if set(params) != wanted:
            raise ConversionError(f"experts: expected the parameters {sorted(wanted)}, got {sorted(params)}")
        return found

    def matches(self, block: nn.Module) -> bool:
        """False: it is chosen by what AutoEP detected."""
        return False

    def describe(self, block: nn.Module) -> ExpertsSpec:
        raise ConversionError(_STAYS)

    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        if self.names is not None:
            return self.names.unpack(state, f"{expert}.")
        *rows, out = (state[name][expert] for name in self.stacked)
        w_in = torch.cat(rows) if len(rows) > 1 else rows[0]
        return ExpertWeights(w_in.t(), out.t()) if self.turned else ExpertWeights(w_in, out)

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        if self.names is not None:
            return {n: t for e, w in enumerate(experts) for n, t in self.names.pack(w, f"{e}.").items()}
        parts = []
        for w in experts:
            rows = w.w_in.chunk(len(self.stacked) - 1) if len(self.stacked) > 2 else (w.w_in,)
            parts.append([t.t() if self.turned else t for t in (*rows, w.w_out)])
        return {name: torch.stack(own) for name, own in zip(self.stacked, zip(*parts, strict=True), strict=True)}


# --- AutoEP's layer ---


class AutoEPBlock(Adapter):
    """AutoEP's layer: this rank's experts in three parameters, w1 (the gate's) and w3 [m, H, D], w2 [m, D, H]."""

    family = "AutoEP"

    def matches(self, block: nn.Module) -> bool:
        return bool(getattr(block, "_is_autoep_layer", False))

    def describe(self, block: nn.Module) -> ExpertsSpec:
        layer: Any = block
        experts = layer.experts
        held, hidden, dim = experts.w1.shape
        return ExpertsSpec(
            num_experts=layer.num_experts,
            held=held,
            top_k=layer.top_k,
            dim=dim,
            hidden=hidden,
            activation=_activation(experts.activation, experts.activation_alpha, experts.activation_limit),
            form="stacked",
            router=type(layer.router).__name__,
        )

    def unpack(self, spec: ExpertsSpec, state: Mapping[str, Tensor], expert: int) -> ExpertWeights:
        return ExpertWeights(torch.cat([state["w1"][expert], state["w3"][expert]]), state["w2"][expert])

    def pack(self, spec: ExpertsSpec, experts: Sequence[ExpertWeights]) -> dict[str, Tensor]:
        gates, ups = zip(*(w.w_in.chunk(2) for w in experts), strict=True)
        return {"w1": torch.stack(gates), "w2": torch.stack([w.w_out for w in experts]), "w3": torch.stack(ups)}

    def methods(self, block: nn.Module) -> Mapping[str, Callable[..., Any]]:
        return {"_forward": _forward}


def _forward(block: Any, hidden_states: Tensor) -> Any:
    """Compute what AutoEP's layer does on `hidden_states` [B, S, D], with the experts of the bank."""
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, ids, counts = block.router(tokens, block.expert_bias)
    with torch.no_grad():
        # Counts that AutoEP's own forward keeps, too
        block.tokens_per_expert.add_(counts)
    y = block.experts(tokens, ids, scores)
    return block._finalize_output(y.view(hidden_states.shape), tokens, hidden_states, hidden_states.shape[-1])


# --- AutoEP runs, and its experts change places ---


def configure(
    config: Any,
    model: nn.Module,
    replace: Callable[[], Any],
    section: ProphetSection,
    *,
    group: Collective | None = None,
) -> tuple[Any, ConversionReport]:
    """Let AutoEP replace the blocks of `model`, and put balanced experts behind its routers; collective.

    Args:
        config: AutoEP's.
        model: Changed in place.
        replace: `_configure_expert_parallel` of the DeepSpeed engine that is being made, arguments given.
        section: How to balance.
        group: The ranks that share the experts; None takes DeepSpeed's group of AutoEP's size.

    Returns:
        What `replace` returns, the sources of new parameters, in which those of the bank have taken the place of
        AutoEP's; and what was converted.

    Raises:
        ConversionError: On every process and with the model unchanged, for what would not be kept.
    """
    timeout_s = section.engine.timeout_s or DEFAULT_TIMEOUT_S
    with on_all_ranks("check of the blocks for AutoEP", timeout_s=timeout_s):
        if any(layer.origin.stays == _STAYS for *_, layer in converted(model)):
            raise ConfigError(f"{KEY}: the model has been through initialize before, and cannot again: {_STAYS}")
        check_model(model)
        detection: Any = importlib.import_module("deepspeed.module_inject.auto_ep")
        # A copy, as the parser fills in fields
        detected = detection.AutoEP(model, copy.copy(config)).ep_parser()
        if not detected:
            raise ConfigError(f"{KEY}: AutoEP detects no MoE layer in this model")
        blocks = {one.moe_module_name: Before.read(model, one) for one in detected}
    # From here on the model is changed: all that can refuse has been asked.
    sources = replace()
    if group is None:
        groups: Any = importlib.import_module("deepspeed.utils.groups")
        own = groups._get_expert_parallel_group(f"ep_size_{config.autoep_size}")
        group = collective_for(own, timeout_s=timeout_s)
    experts = {name: dict(model.get_submodule(f"{name}.experts").named_parameters()) for name in blocks}
    report = prophet.convert(
        model,
        group=group,
        adapters=(AutoEPBlock(),),
        experts=[f"{name}.experts" for name in blocks],
        verify=section.verify,
    )
    _take_over(model, blocks, experts, sources)
    return sources, report


def _take_over(
    model: nn.Module, blocks: Mapping[str, Before], experts: Mapping[str, Mapping[str, nn.Parameter]], sources: Any
) -> None:
    """Lead converted layers back to the model before AutoEP, and mark their parameters as AutoEP marked its own."""
    for where, holder, _, layer in converted(model):
        name = where.rpartition(".")[0]
        before, old, bank = blocks[name], experts[name], layer.experts
        origin = layer.origin
        # AutoEP's layer holds one rank's share; the model before it held all.
        origin.spec = dataclasses.replace(origin.spec, held=origin.spec.num_experts)
        origin.adapter, origin.skeleton, origin.stays = before.source, before.experts, _STAYS
        origin.renamed = _renamed_in(holder, before.names)
        for new, parts in ((bank.w_in, ("w1", "w3")), (bank.w_out, ("w2",))):
            _mark(new, old[parts[0]], layer.num_experts)
            # The bank's first matrix comes from two of AutoEP's parameters: both lists of sources, each once.
            found = [one for part in parts for one in sources.sources.pop(id(old[part]), ())]
            if found:
                sources.sources[id(new)] = list({id(one): one for one in found}.values())


def _renamed_in(holder: nn.Module, names: Mapping[str, str]) -> dict[str, str]:
    """The former names of a layer's parameters and buffers, by the present ones, where these differ.

    AutoEP may have its router under a second name, for what records logits.
    """
    there = dict(holder.named_parameters(remove_duplicate=False)) | dict(holder.named_buffers(remove_duplicate=False))
    before = {id(there[now]): then for now, then in names.items()}
    return {now: before[id(one)] for now, one in there.items() if id(one) in before and before[id(one)] != now}


def _mark(new: nn.Parameter, old: nn.Parameter, num_experts: int) -> None:
    """Carry over what DeepSpeed reads on a parameter of AutoEP's experts; the sizes in it are those of `new`."""
    constants: Any = importlib.import_module("deepspeed.checkpoint.constants")
    affine: Any = importlib.import_module("deepspeed.checkpoint.autoep_affine")
    target: Any = new
    for key, value in vars(old).items():
        setattr(target, key, value)
    # DeepSpeed averages it over the groups that hold copies
    target.prophet_averaged = True
    found = dict(getattr(old, constants.DS_AUTOEP_UC_META))
    shape = [num_experts, *new.shape[1:]]
    placed = affine.autoep_placement_to_affine_map(found[constants.AUTOEP_EXPERT_PLACEMENT], shape)
    found |= {constants.AUTOEP_PARAM_LOGICAL_SHAPE: shape, constants.AFFINE_MAP: placed.to_dict()}
    setattr(target, constants.DS_AUTOEP_UC_META, found)
