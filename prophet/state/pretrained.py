"""Models too large for one process: modules without memory, and weights that are read for some of them alone."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prophet.errors import CheckpointError, some

# transformers replaces functions while it loads, and puts back what it found: two threads at once would leave models
# untied for good
LOADING = threading.Lock()


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Inside, modules are made with their parameters on `meta`: shape and type, but no memory. Buffers are real.

    As accelerate's function of this name, but tied parameters stay one. `torch.device("meta")` would leave buffers
    without values too, and no checkpoint has those of rotary embeddings.
    """
    register = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # one that is on meta already may be tied, so it stays the same object
        if type(param) is nn.Parameter and not param.is_meta:
            empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            vars(empty).update(vars(param))
            param = empty
        register(self, name, param)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def read_pretrained(model: Any, folder: str | Path, dtype: torch.dtype, without: Collection[str] = ()) -> nn.Module:
    """Read what the class's `from_pretrained(folder)` gives, but for some modules.

    Args:
        model: A transformers model, whose class and configuration are used.
        folder: Folder with the checkpoint's files.
        dtype: Element type of the parameters.
        without: Names of modules that are not read; each is an empty module in the result.

    Raises:
        CheckpointError: The folder lacks parameters.
    """
    kind: Any = type(model)

    def init(self: Any, config: Any, *args: Any, **options: Any) -> None:
        kind.__init__(self, config, *args, **options)
        for name in without:
            holder, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(holder), attribute, nn.Module())

    partial: Any = kind
    if without:
        # the class's own loader leaves alone what the model does not have, so all its conversions of names hold
        every = {"_keys_to_ignore_on_load_unexpected": [".*"]}
        partial = type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__, **every})
    with LOADING:
        read, report = partial.from_pretrained(folder, config=model.config, dtype=dtype, output_loading_info=True)
    # transformers initialises what it does not find and goes on with a warning
    missing = some(report["missing_keys"])
    if missing:
        raise CheckpointError(f"{folder} lacks {missing}: expected all parameters of {kind.__name__}")
    whole: nn.Module = read
    return whole
