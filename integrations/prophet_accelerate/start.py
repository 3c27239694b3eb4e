"""`balance`: one call after `Accelerator()`, and what `accelerator.prepare` and its other methods do afterwards.

accelerate's own methods are right where every rank holds the same parameters. Those that are not so with experts on
several ranks are replaced on the instance; each still calls what it stands for.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

import prophet
from prophet.convert import ConversionReport, RoutedExperts, original_state_dict, standard_adapters
from prophet.convert.find import find_all
from prophet.engine.checkpoint.fail_together import on_all_ranks
from prophet.engine.parallel import ExpertReplicas, clip_grad_norm_, expert_parameters, leave_out_of_ddp
from prophet.errors import PartialStateError
from prophet.layer.moe import moe_layers
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import expert_groups, roll_call
from prophet.spec import checked
from prophet_accelerate.checkpoints import States
from prophet_accelerate.checks import check_accelerator, check_optimizers, check_unwrapped

# An accelerator's lists of what it has prepared
_KNOWN = ("_models", "_optimizers", "_schedulers", "_dataloaders")


@checked
def balance(
    accelerator: Any,
    *,
    config: prophet.EngineConfig | None = None,
    ep_size: int | None = None,
    experts: str | Sequence[str] | None = None,
    adapters: Sequence[prophet.Adapter] = (),
    timeout_s: float = DEFAULT_TIMEOUT_S,
    verify: bool = True,
) -> Balanced:
    """Let `accelerator.prepare(model, optimizer, ...)` convert the model and balance it; nothing else changes.

    Call it right after `Accelerator()`, on every rank.

    These are right afterwards: DistributedDataParallel and FSDP2, mixed precision, `accumulate`, `no_sync`,
    `clip_grad_norm_` (by the norm over all ranks' experts), `save_state` and `load_state` at any number of ranks,
    `free_memory`, `end_training`. So are `get_state_dict` and `save_model` (the original layout; called on every rank).
    `join_uneven_inputs` is refused.

    Args:
        accelerator: Its methods are replaced on this instance.
        config: How to balance. Its `accumulation_steps` stays 1, as the engine follows `accelerator.accumulate`.
        ep_size: Ranks that share the experts, None for all. With fewer, expert gradients are averaged over the groups.
        experts: Names of lists of experts, as for `prophet.convert`.
        adapters: For your own kinds of blocks, as for `prophet.convert`.
        timeout_s: Seconds to wait for other ranks.
        verify: Compare blocks before and after on a few tokens, as for `prophet.convert`.

    Raises:
        TypeError: For something else than an Accelerator.
        ValueError: For a setting that cannot train experts; the message names it. Nothing is changed.
    """
    check_accelerator(accelerator, config)
    return Balanced(
        accelerator,
        config=config,
        ep_size=ep_size,
        convert={"experts": experts, "adapters": tuple(adapters), "timeout_s": timeout_s, "verify": verify},
    )


class Balanced:
    """What `balance` has set up.

    Attributes:
        report: What `prepare` has converted; None before, or where the model had `prophet.MoE` layers.
        engine: The running engine; None before `prepare` has seen model and optimizer.

    Args:
        accelerator: Its methods are replaced on this instance.
        config: How to balance.
        ep_size: Ranks that share the experts, None for all.
        convert: Further arguments for `prophet.convert`.
    """

    def __init__(
        self, accelerator: Any, *, config: prophet.EngineConfig | None, ep_size: int | None, convert: dict[str, Any]
    ) -> None:
        self.report: ConversionReport | None = None
        self.engine: prophet.Engine | None = None
        self._accelerator, self._config, self._ep_size, self._convert = accelerator, config, ep_size, convert
        self._timeout_s: float = convert["timeout_s"]
        self._groups: tuple[Collective, Collective] | None = None
        self._model: nn.Module | None = None
        # The model, until accelerate has prepared it without an error
        self._waiting: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._replicas: ExpertReplicas | None = None
        self._closed = self._preparing = False
        self._keep = True
        for name, around in (
            ("prepare", self._prepare),
            ("prepare_model", self._prepare_model),
            ("prepare_optimizer", self._prepare_optimizer),
            ("clip_grad_norm_", self._clip),
            ("no_sync", self._no_sync),
            ("join_uneven_inputs", self._join),
            ("reduce", self._reduce),
            ("save_state", self._save_state),
            ("load_state", self._load_state),
            ("get_state_dict", self._get_state_dict),
            ("save_model", self._save_model),
            ("free_memory", self._free_memory),
            ("end_training", self._end_training),
        ):
            stand_for(accelerator, name, around)

    def close(self) -> None:
        """Stop balancing; calling it again is harmless.

        The model stays converted, with plain expert parallelism, and can be trained and saved.
        """
        self._closed = True
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    # --- preparing ---

    def _prepare(self, inner: Callable[..., Any], *args: Any, **options: Any) -> Any:
        placement = options.get("device_placement") or [None] * len(args)
        moved = {id(obj): place for obj, place in zip(args, placement, strict=False)}
        optimizers = [o for o in args if isinstance(o, torch.optim.Optimizer)]
        self._adopt([o for o in args if isinstance(o, nn.Module)], optimizers, moved)
        known = {name: list(getattr(self._accelerator, name)) for name in _KNOWN}
        self._preparing = True
        try:
            result = inner(*args, **options)
        except Exception:
            # A second attempt adds them again
            for name, before in known.items():
                getattr(self._accelerator, name)[:] = before
            raise
        finally:
            self._preparing = False
        self._waiting = None
        self._attach()
        return result

    def _prepare_model(
        self, inner: Any, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        if not self._preparing and not evaluation_mode:
            self._adopt([model], [], {id(model): device_placement})
        result = inner(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        if not self._preparing:
            self._waiting = None
        return result

    def _prepare_optimizer(self, inner: Any, optimizer: Any, device_placement: bool | None = None) -> Any:
        result = inner(optimizer, device_placement=device_placement)
        if not self._preparing:
            self._attach()
        return result

    def _adopt(self, models: Sequence[nn.Module], optimizers: Sequence[Any], moved: dict[int, bool | None]) -> None:
        """Convert the model with experts, and have its experts left alone by what will wrap it.

        Args:
            models: Those that accelerate is about to prepare.
            optimizers: Those that come with them.
            moved: By id, whether the caller wants them on the device; None leaves it to the accelerator.
        """
        for model in models:
            # After `free_memory()` this object has forgotten a model that accelerate has prepared.
            again = getattr(model, "_is_accelerate_prepared", False) and self._model is None
            if again and moe_layers(self._unwrapped(model)):
                self._model = self._unwrapped(model)
                self._average(self._model)
        new = [m for m in models if not getattr(m, "_is_accelerate_prepared", False)]
        # A model without gradients is evaluated only
        found = [m for m in new if any(p.requires_grad for p in m.parameters())]
        # A model whose preparation failed may come again
        has_one = self._model is not None and self._model is not self._waiting
        if has_one or len(found) > 1:
            found = [m for m in found if self._has_experts(self._unwrapped(m))]
        if len(found) + has_one > 1:
            raise ValueError(
                "accelerator.prepare() got a second model with experts: one Accelerator balances one; freeze a model "
                "that is evaluated only, or do not prepare it"
            )
        for model in found:
            check_unwrapped(model)
            self._make_ready(self._unwrapped(model), optimizers, place=moved.get(id(model)))

    def _make_ready(self, model: nn.Module, optimizers: Sequence[Any], place: bool | None) -> None:
        a = self._accelerator
        held = [getattr(o, "optimizer", o) for o in (*optimizers, *a._optimizers)]
        built, cut = moe_layers(model), a.distributed_type == DistributedType.FSDP
        if built and self._ep_size is not None and built[0].collective.size != self._ep_size:
            raise ValueError(
                f"ep_size: expected {built[0].collective.size}, for which the model's layers were built, got "
                f"{self._ep_size}"
            )
        if cut:
            check_optimizers(held, {id(p) for part in self._experts_of(model) for p in part.parameters()})
        holder = None if built else self._holder(model, held)
        if a.device_placement if place is None else place:
            # Ranks compare what they are about to convert, on the device where they exchange tensors.
            model.to(a.device)
        if self._ep_size is not None and self._groups is None:
            self._groups = expert_groups(self._ep_size, timeout_s=self._timeout_s)
        if not built:
            group = self._groups[0] if self._groups else None
            self.report = prophet.convert(model, optimizer=holder, group=group, **self._convert)
        self._model = self._waiting = model
        self._average(model)
        leave_out_of_ddp(model)
        if cut:
            self._leave_out_of_fsdp(model)

    def _average(self, model: nn.Module) -> None:
        """Average the gradients of experts that several groups hold."""
        if self._replicas is not None:
            self._replicas.close()
        if self._groups is not None:
            self._replicas = ExpertReplicas(model, self._groups[1])

    def _leave_out_of_fsdp(self, model: nn.Module) -> None:
        plugin = self._accelerator.state.fsdp_plugin
        ignored = plugin.ignored_modules or []
        # A pattern of names, as accelerate reads it
        if isinstance(ignored, str):
            ignored = [m for name, m in model.named_modules() if re.fullmatch(ignored, name)]
        layers = [layer for layer in moe_layers(model) if all(layer.experts is not m for m in ignored)]
        plugin.ignored_modules = [*ignored, *(layer.experts for layer in layers)]
        policy = plugin.mixed_precision_policy
        if policy is not None and policy.param_dtype is not None:
            for layer in layers:
                _compute_in(layer, policy.param_dtype, self._accelerator.device.type)

    def _attach(self) -> None:
        """Attach the engine, once model and optimizer are what they will be."""
        if self._model is None:
            return
        mine = {id(p): getattr(p, "prophet_expert", False) for p in self._model.parameters()}
        # Optimizers of the model, and whether they hold experts
        found: list[tuple[bool, Any]] = []
        for accelerated in self._accelerator._optimizers:
            optimizer = accelerated.optimizer
            held = [mine[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in mine]
            if held:
                found.append((any(held), optimizer))
        experts = [optimizer for has, optimizer in found if has]
        if len(experts) > 1:
            raise ValueError(
                f"accelerator.prepare(): {len(experts)} optimizers hold experts; expected one for all of them"
            )
        # The engine hooks one optimizer's step; frozen experts leave the choice open.
        best = experts or [optimizer for _, optimizer in found]
        if not best or self._optimizer in best:
            return
        if self._optimizer is not None:
            raise ValueError(
                "accelerator.prepare(): the optimizer that holds the experts came after another one of the same model; "
                "prepare it first, or both in one call"
            )
        if self.engine is None and not self._closed:
            self.engine = prophet.attach(self._model, best[0], config=self._config)
        self._optimizer = best[0]

    def _unwrapped(self, model: nn.Module) -> nn.Module:
        found: nn.Module = self._accelerator.unwrap_model(model, keep_torch_compile=False)
        return found

    def _has_experts(self, model: nn.Module) -> bool:
        return bool(self._experts_of(model))

    def _experts_of(self, model: nn.Module) -> list[nn.Module]:
        """Modules that hold experts, converted or not."""
        if layers := moe_layers(model):
            return [layer.experts for layer in layers]
        names = self._convert["experts"]
        patterns = [names] if isinstance(names, str) else names
        found, _ = find_all(model, (*self._convert["adapters"], *standard_adapters()), patterns, 0, 1)
        return [f.experts(model) for f in found]

    def _holder(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
        """The optimizer that holds the experts of a model that is not converted yet, if one does."""
        if len(optimizers) < 2:
            return optimizers[0] if optimizers else None
        experts = {id(p) for held in self._experts_of(model) for p in held.parameters()}
        found = [o for o in optimizers if any(id(p) in experts for g in o.param_groups for p in g["params"])]
        if len(found) > 1:
            raise ValueError(
                f"accelerator.prepare(): {len(found)} optimizers hold experts; expected one for all of them"
            )
        return found[0] if found else None

    # --- training ---

    def _clip(self, inner: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip by the norm over all ranks' experts, in float64, the same on every rank."""
        held: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._model is None or not any(getattr(p, "prophet_expert", False) for p in held):
            return inner(held, max_norm, norm_type)
        # For fp16, as accelerate's own clipping does
        self._accelerator.unscale_gradients()
        layer = moe_layers(self._model)[0]
        return clip_grad_norm_(held, max_norm, layer.collective, layer.experts.device, norm_type)

    @contextmanager
    def _no_sync(self, inner: Any, model: Any) -> Iterator[None]:
        """Do as accelerate's method, which `accumulate` uses, and keep replicas' gradients where they are."""
        with ExitStack() as stack:
            stack.enter_context(inner(model))
            if self._unwrapped(model) is self._model:
                stack.enter_context(self.engine.no_sync() if self.engine is not None else nullcontext())
                stack.enter_context(_not_averaged(self._replicas))
            yield

    def _join(self, inner: Any, joinables: Any, even_batches: bool | None = None) -> Any:
        if self._model is None:
            return inner(joinables, even_batches=even_batches)
        raise ValueError(
            "join_uneven_inputs: a rank without batches would run no experts, which the other ranks' tokens need; "
            "leave it out, and even_batches=True"
        )

    def _reduce(self, inner: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self._model is not None and isinstance(tensor, Tensor):
            for name, p in expert_parameters(self._model):
                # LocalSGD passes `p.data`, a new object with the same memory
                if p.numel() and p.data_ptr() == tensor.data_ptr():
                    raise ValueError(
                        f"accelerator.reduce() of {name}: ranks hold different experts under one name, so they cannot "
                        f"be averaged; LocalSGD does not work with balanced experts"
                    )
        return inner(tensor, *args, **kwargs)

    # --- saving ---

    def _states(self) -> States:
        assert self._model is not None
        return States(self._accelerator, self._model, self._optimizer, self.engine, self._timeout_s)

    def _save_state(self, inner: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        named = output_dir is not None or self._accelerator.project_configuration.automatic_checkpoint_naming
        if self._model is None or not named:
            return inner(output_dir, *args, **kwargs)
        return self._states().save(inner, output_dir, *args, **kwargs)

    def _load_state(self, inner: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self._model is None:
            return inner(input_dir, *args, **kwargs)
        return self._states().load(inner, input_dir, *args, **kwargs)

    def _get_state_dict(self, inner: Any, model: Any, unwrap: bool = True) -> Any:
        """Of the balanced model, return all parameters in their original layout, on every rank. Collective."""
        if self._model is None or self._unwrapped(model) is not self._model:
            return inner(model, unwrap=unwrap)
        made = [x for x in moe_layers(self._model) if not isinstance(x, RoutedExperts) and x.collective.size > 1]
        if made:
            raise PartialStateError(
                f"get_state_dict: the experts of prophet.MoE layers are on {made[0].collective.size} ranks. Call "
                f"accelerator.save_state(folder), or prophet.checkpoint.save(folder, model), on every rank"
            )
        return original_state_dict(self._model, keep=self._keep)

    def _save_model(self, inner: Any, model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save as accelerate does; collective, and only the ranks that write hold all parameters for it."""
        if self._model is None or self._unwrapped(model) is not self._model:
            inner(model, save_directory, *args, **kwargs)
            return
        a = self._accelerator
        each = a.project_configuration.save_on_each_node
        roll_call(Operation("save_model"), patience_s=self._timeout_s)
        # `inner` calls `get_state_dict`, which reads this
        self._keep = a.is_local_main_process if each else a.is_main_process
        try:
            with on_all_ranks("save_model", save_directory, timeout_s=self._timeout_s):
                inner(model, save_directory, *args, **kwargs)
        finally:
            self._keep = True

    # --- the end ---

    def _free_memory(self, inner: Any, *objects: Any) -> Any:
        self._let_go()
        return inner(*objects)

    def _end_training(self, inner: Any) -> None:
        self._let_go()
        inner()

    def _let_go(self) -> None:
        self.close()
        if self._replicas is not None:
            self._replicas.close()
        self._model = self._waiting = self._optimizer = self._replicas = None
        self._closed = False


def stand_for(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method on one object, so that it can do more.

    Args:
        owner: The object.
        name: Of the method.
        around: Called as `around(inner, ...)`, where `inner` is the method as it was.
    """
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(inner, *args, **kwargs)

    setattr(owner, name, call)


@contextmanager
def _not_averaged(replicas: ExpertReplicas | None) -> Iterator[None]:
    if replicas is None:
        yield
        return
    replicas.enabled, before = False, replicas.enabled
    try:
        yield
    finally:
        replicas.enabled = before


def _compute_in(layer: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    """Have a layer compute in `dtype` by autocast.

    FSDP2 casts what it gathers. Experts are not gathered, so they compute by autocast and stay as precise as they are.

    Args:
        layer: Of experts.
        dtype: That of FSDP2's mixed precision.
        device_type: Of the model.
    """
    entered: list[Any] = []

    def enter(*_: Any) -> None:
        context = torch.autocast(device_type, dtype=dtype)
        context.__enter__()
        entered.append(context)

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    layer.register_forward_pre_hook(enter, prepend=True)
    # always_call: an error in the layer must not leave autocast on
    layer.register_forward_hook(leave, always_call=True)
