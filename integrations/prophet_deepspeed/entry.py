"""`deepspeed.initialize` heeds the "prophet" section: what it calls to make an engine asks for one first.

`DeepSpeedEngine.__init__` is what is replaced, so a script may have imported `initialize` by name before, and Trainer
and accelerate, which call it themselves, need to know nothing. An engine without a section is made as ever.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prophet.convert import converted
from prophet.errors import CheckpointError
from prophet_deepspeed import layout
from prophet_deepspeed.section import SECTION, ConfigError, ProphetSection, has_section, read_config
from prophet_deepspeed.start import Start, has_experts

# The section for configurations without one; one at most
_default: list[ProphetSection] = []


def install(section: Mapping[str, Any] | None = None) -> None:
    """Make `deepspeed.initialize` heed the "prophet" section of its configuration; importing the package does it.

    The latest call counts.

    Args:
        section: For configurations without one, as it would stand there; models without experts are left alone then.
            None leaves configurations without a section alone.

    Raises:
        ConfigError: For a wrong section.
    """
    _default[:] = [] if section is None else [ProphetSection.parse(section)]
    engine_class: Any = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
    plain = engine_class.__init__
    # Replaced already: a second wrapper would convert twice
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
    engine_class.load_checkpoint = _refusing_ours(engine_class.load_checkpoint)


def _refusing_ours(plain: Any) -> Any:
    """Wrap DeepSpeed's `load_checkpoint`, to name what is missing where a balanced engine wrote the folder."""

    @functools.wraps(plain)
    def load_checkpoint(ds: Any, load_dir: Any, tag: Any = None, *args: Any, **options: Any) -> Any:
        latest = Path(load_dir) / layout.LATEST
        name = latest.read_text(encoding="utf-8").strip() if tag is None and latest.is_file() else tag
        path = Path(load_dir) / str(name) / layout.DENSE
        if name is not None and path.is_file():
            raise CheckpointError(
                f"{SECTION}: {path.parent} was written with this section, and the configuration has none"
            )
        return plain(ds, load_dir, tag, *args, **options)

    return load_checkpoint


def _start(ds: Any, given: Mapping[str, Any]) -> Start | None:
    """How to make an engine with these arguments, or None if it is DeepSpeed's alone."""
    config, model = given.get("config"), given["model"]
    # A path, or none where arguments name it: DeepSpeed has read it by now.
    if not isinstance(config, Mapping):
        config = given["config_class"]._param_dict
    own = has_section(config)
    if not own and not (_default and has_experts(model)):
        if next(converted(model), None) is not None:
            # Converted experts hold one rank's share, and DeepSpeed alone would average them as one.
            raise ConfigError(
                f"{SECTION}: the model's experts are converted, and the configuration has no such section: add it, or "
                f"call prophet.revert(model) first"
            )
        return None
    plain, section = read_config(config)
    return Start(ds, plain, section if own else _default[0], given)
