"""`deepspeed.initialize` heeds the "prophet" section: what it calls to make an engine asks for one first.

`DeepSpeedEngine.__init__` is what is replaced, so a script may have imported `initialize` by name before, and Trainer
and accelerate, which call it themselves, need to know nothing. An engine without a section is made as ever.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from prophet_deepspeed.section import ProphetSection, has_section, read_config
from prophet_deepspeed.start import Start, has_experts

_default: list[ProphetSection] = []  # one at most


def install(section: Mapping[str, Any] | None = None) -> None:
    """Make `deepspeed.initialize` heed the "prophet" section of its configuration; importing the package does it.

    section: for configurations without one, as it would stand there; models without experts are left alone then. None
    leaves configurations without a section alone. The latest call counts. Raises `ConfigError` for a wrong section.
    """
    _default[:] = [] if section is None else [ProphetSection.parse(section)]
    engine_class: Any = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
    plain = engine_class.__init__
    if hasattr(plain, "of_prophet_deepspeed"):
        return
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def __init__(ds: Any, *args: Any, **options: Any) -> None:
        given = signature.bind(ds, *args, **options).arguments
        start = _start(ds, given)
        if start is None:
            plain(ds, *args, **options)
        else:
            with start:
                plain(ds, *args, **options)

    __init__.of_prophet_deepspeed = True  # type: ignore[attr-defined]
    engine_class.__init__ = __init__


def _start(ds: Any, given: Mapping[str, Any]) -> Start | None:
    """How an engine with these arguments is made, or None if it is DeepSpeed's alone."""
    config, model = given.get("config"), given["model"]
    if not isinstance(config, Mapping):
        config = given["config_class"]._param_dict
    own = has_section(config)
    if not own and not (_default and has_experts(model)):
        return None
    plain, section = read_config(config)
    return Start(ds, plain, section if own else _default[0], given)
