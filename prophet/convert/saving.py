"""Writing converted models of `transformers` in their original layout, by the call that writes the unconverted ones."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prophet.convert.layers.lora import lora_layers, reading_adapters
from prophet.convert.layers.routed import converted, with_originals
from prophet.convert.state import load_original_state_dict, original_state_dict
from prophet.errors import CheckpointError, ConversionError, PartialStateError, some
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import at_work, collective_for, meet, process_rank, processes, roll_call

# transformers replaces functions while it loads, and puts back what it found: two threads at once would leave models
# untied for good
_LOADING = threading.Lock()


def save_pretrained(model: Any, folder: str | Path, **options: Any) -> None:
    """Write `model` in its original layout, so that its class's `from_pretrained` loads it; collective.

    Of a PEFT model the adapters are written, as PEFT writes them, those on experts included.

    Every process calls it. The experts are gathered from their homes to process 0, one block at a time. Process 0
    writes, and all return once the files are there.

    Args:
        model: A converted model of transformers or PEFT.
        folder: Where the files go.
        **options: For the model's own `save_pretrained`.

    Raises:
        CollectiveTimeout: Where only some processes call it: on process 0 within five seconds, on others within five
            seconds of the next forward pass.
        CheckpointError: On the other processes where process 0 could not write.
    """
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    layers = [layer for *_, layer in converted(model)]
    group = layers[0].collective if layers else collective_for(None)
    # Before the first gather: a call on rank 0 alone, as for an unconverted model, is a common mistake.
    roll_call(Operation("save_pretrained"), patience_s=group.timeout_s)
    # With data parallelism there are several expert-parallel groups, each with a rank 0.
    writer = group.rank == 0 and process_rank() == 0
    state = original_state_dict(model, keep=writer, adapters_only=_is_of_peft(model))
    error: Exception | None = None
    if writer:
        try:
            with at_work(f"writing {folder}"), with_originals(model):
                type(model).save_pretrained(model, folder, state_dict=state, **options)
        except Exception as caught:
            error = caught
    end = Operation("end of save_pretrained")
    failed = group.meet(end, failed=error is not None)
    # Only its own group knows of process 0's failure so far
    if processes() > group.size:
        reports = meet(end, "failed" if failed else "", timeout_s=group.timeout_s)
        failed = [rank for rank, report in enumerate(reports) if report]
    if error is not None:
        raise error
    if failed:
        raise CheckpointError(f"{folder}: rank 0 could not write the model; its error says why")


def load_pretrained(model: Any, folder: str | Path, **options: Any) -> None:
    """Load what `save_pretrained`, or the original class, wrote; every rank reads all and keeps its own experts.

    Args:
        model: A converted model; its values are replaced.
        folder: What to read.
        **options: For the class's `from_pretrained`.

    Raises:
        CheckpointError: Where parameters of the model are missing.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    # No parameter is rounded on its way, whatever dtypes the model mixes.
    dtype = functools.reduce(torch.promote_types, dtypes)
    with _LOADING:
        whole, info = type(model).from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    missing = some(info["missing_keys"])
    if missing:
        raise CheckpointError(f"{folder} lacks {missing}: expected all parameters of {type(model).__name__}")
    load_original_state_dict(model, whole.state_dict())


def write_original_layout(model: nn.Module) -> None:
    """Make `save_pretrained` and `push_to_hub` of `model`, and of models inside it, gather its experts.

    A PEFT model's `load_adapter` is replaced, too.
    """
    for module in model.modules():
        for name, kind in _kinds(module):
            if callable(getattr(type(module), name, None)):
                setattr(module, name, kind(module, vars(module).get(name)))


def _kinds(module: nn.Module) -> tuple[tuple[str, type[_Method]], ...]:
    """The methods of `module` to replace, and by what."""
    if lora_layers(module) and _is_of_peft(module):
        return ("save_pretrained", _SaveAdapters), ("push_to_hub", _PushToHub), ("load_adapter", _LoadAdapter)
    # PEFT's tuner, which is a module inside the PEFT model
    if lora_layers(module) and hasattr(type(module), _ENDINGS[0]):
        return tuple((name, _Ending) for name in _ENDINGS)
    # without adapters on experts PEFT writes what every rank has, and any rank may do that
    if _is_of_peft(module) or not any(converted(module)):
        return ()
    return ("save_pretrained", _SavePretrained), ("push_to_hub", _PushToHub)


# by which PEFT's tuner ends an adapter; it asks the first before it merges anything
_ENDINGS = ("_check_merge_allowed", "unload", "delete_adapter")


def _is_of_peft(model: object) -> bool:
    return hasattr(type(model), "get_base_model")


def write_as_before(model: nn.Module) -> None:
    """Undo `write_original_layout`."""
    for module in model.modules():
        for name in ("save_pretrained", "push_to_hub", "load_adapter", *_ENDINGS):
            method = vars(module).get(name)
            if isinstance(method, _Method):
                delattr(module, name)
                if method.before is not None:
                    setattr(module, name, method.before)


class _Method:
    """Stands for a method of one model; a class, so that a copied model calls its copy's.

    Attributes:
        model: The model whose method it is.
        before: What stood there before, if it was not the class's.
    """

    def __init__(self, model: Any, before: Any) -> None:
        self.model, self.before = model, before

    def ranks(self) -> int:
        """How many ranks share the experts, or parts of the other parameters."""
        cut = any(hasattr(p, "full_tensor") for p in self.model.parameters())
        return max([processes() if cut else 1, *(x.collective.size for *_, x in converted(self.model) if x.spread)])


class _SavePretrained(_Method):
    def __call__(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Save as the class does, called on every rank; process 0 writes.

        Args:
            save_directory: Where the files go.
            is_main_process: As for the class's; it counts only where one rank has everything.
            state_dict: Taken as it is where it is in the original layout.
            **options: For the class's.
        """
        experts = tuple(f"{name}.experts." for name, *_ in converted(self.model))
        if state_dict is not None and any(key.startswith(experts) for key in state_dict):
            # It is what this model's `state_dict()` gave: one rank's experts, under the layer's names.
            state_dict = None
        if state_dict is None and self.ranks() > 1:
            save_pretrained(self.model, save_directory, **options)
            return
        state = original_state_dict(self.model) if state_dict is None else state_dict
        options |= {"is_main_process": is_main_process, "state_dict": state}
        with with_originals(self.model):
            type(self.model).save_pretrained(self.model, save_directory, **options)


class _SaveAdapters(_Method):
    def __call__(self, save_directory: str | Path, **options: Any) -> None:
        """Save as `PeftModel.save_pretrained` does, called on every rank; process 0 writes."""
        # It is what this model's `state_dict()` gave: one rank's experts
        options.pop("state_dict", None)
        if self.ranks() > 1:
            options.pop("is_main_process", None)
            save_pretrained(self.model, save_directory, **options)
            return
        state = original_state_dict(self.model, adapters_only=True)
        with with_originals(self.model):
            type(self.model).save_pretrained(self.model, save_directory, state_dict=state, **options)


class _LoadAdapter(_Method):
    def __call__(self, model_id: Any, adapter_name: str, *args: Any, **options: Any) -> Any:
        """Load as `PeftModel.load_adapter` does, for the adapter that is there; every rank keeps its experts' part."""
        there = list(self.model.peft_config)
        if adapter_name not in there:
            raise ConversionError(
                f"load_adapter({adapter_name!r}): the experts were converted with the adapter {there}; load another "
                f"one before prophet.convert"
            )
        with reading_adapters(self.model, model_id):
            return type(self.model).load_adapter(self.model, model_id, adapter_name, *args, **options)


class _Ending(_Method):
    def __call__(self, *_: Any, **__: Any) -> None:
        """Raise `ConversionError` before PEFT has changed the first layer."""
        layer = lora_layers(self.model)[0][-1]
        layer.experts.merge()


class _PushToHub(_Method):
    def __call__(self, *args: Any, **options: Any) -> Any:
        """Push as the class does, which saves first, where one rank has everything."""
        ranks = self.ranks()
        if ranks > 1:
            raise PartialStateError(
                f"push_to_hub: the experts are on {ranks} ranks. Call model.save_pretrained(folder) on every rank, "
                f"then {type(self.model).__name__}.from_pretrained(folder).push_to_hub(...) on one"
            )
        return type(self.model).push_to_hub(self.model, *args, **options)
