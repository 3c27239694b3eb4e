"""The "prophet" section of a DeepSpeed config, and what else in the config would not work with it.

Nothing here imports deepspeed.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from prophet.engine.config import EngineConfig
from prophet.errors import TopologyError
from prophet.files import read_json, shown
from prophet.planner import PLANNER_NAMES
from prophet.spec import checked

SECTION = "prophet"
# Bytes of a config that are read at most
MAX_FILE_BYTES = 1 << 22
# Characters of a key that are compared and shown
_LONGEST_KEY = 64
# Optimizers that treat each element by itself: experts stacked in one tensor are updated as if they were apart.
ELEMENTWISE = ("adam", "adamw", "sgd", "adagrad", "lion", "rmsprop")
# Every backward pass brings its gradients home, as ZeRO-2 reduces them then. Windows are not for a config file.
_NOT_A_KEY = ("accumulation_steps", "windows")
# What JSON has for a field, by the first type of its annotation
_JSON: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "bool": ("true or false", bool),
    "int": ("an integer", int),
    "float": ("a number", (int, float)),
    "str": ("a string", str),
    "Topology": ("a string", str),
}


class ConfigError(ValueError):
    """The DeepSpeed config is wrong, or asks for what does not work with balanced experts; the key is named."""


@checked
@dataclass(frozen=True, kw_only=True, slots=True)
class ProphetSection:
    """The contents of `"prophet": {...}`; every key has a default.

    The fields of `engine` are keys of the section themselves: `planner` by name, `topology` as the path of a file that
    `prophet calibrate` wrote.

    Attributes:
        enabled: False leaves plain expert parallelism.
        ep_size: Ranks that share the experts; None takes what the layers were built for, all ranks where they were
            built whole.
        convert: Replace the MoE blocks that `prophet.convert` knows; False leaves a model of `prophet.MoE` layers as it
            is.
        verify: Compare every block before and after on a few tokens.
        engine: How to balance.
    """

    enabled: bool = True
    ep_size: int | None = None
    convert: bool = True
    verify: bool = True
    engine: EngineConfig = field(default_factory=EngineConfig)

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> ProphetSection:
        """Read the section as JSON has it; raises `ConfigError` that names the key."""
        own = [f for f in fields(cls) if f.name != "engine"]
        balancing = [f for f in fields(EngineConfig) if f.name not in _NOT_A_KEY]
        check_keys(SECTION, found, [f.name for f in (*own, *balancing)])
        for f in (*own, *balancing):
            if f.name in found:
                _check_kind(f, found[f.name])
        mine = {f.name: found[f.name] for f in own if f.name in found}
        if mine.get("ep_size") is not None and mine["ep_size"] < 1:
            raise ConfigError(f"{SECTION}.ep_size: expected at least 1, got {mine['ep_size']}")
        options = {f.name: found[f.name] for f in balancing if f.name in found}
        if not mine.get("enabled", True):
            # A static planner never makes replicas, so the engine only counts.
            options["planner"] = "static"
        return cls(**mine, engine=_engine_config(options))


def _check_kind(key: Field[Any], value: Any) -> None:
    first, *others = str(key.type).split(" | ")
    if value is None and "None" in others:
        return
    wanted, kind = _JSON[first]
    # In Python a bool is an int; in JSON true is no number
    if not isinstance(value, kind) or (isinstance(value, bool) and first != "bool"):
        raise ConfigError(f"{SECTION}.{key.name}: expected {wanted}, got {shown(value)}")


def _engine_config(options: dict[str, Any]) -> EngineConfig:
    planner = options.get("planner")
    if planner is not None and planner not in PLANNER_NAMES:
        raise ConfigError(f"{SECTION}.planner: expected one of {', '.join(PLANNER_NAMES)}, got {shown(planner)}")
    try:
        return EngineConfig(**options)
    except TopologyError as error:
        raise ConfigError(f"{SECTION}.topology: {error!s:.1000}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(_named(str(error))) from error


def _named(text: str) -> str:
    """Put the section's name of a field in front of an engine's message about it."""
    name = "EngineConfig."
    return f"{SECTION}.{text.removeprefix(name)}" if text.startswith(name) else f"{SECTION}: {text}"


def check_keys(name: str, found: Mapping[str, Any], known: list[str]) -> None:
    """Raise `ConfigError` for a key that is not known, with the nearest one that is.

    Args:
        name: The section's.
        found: Its contents.
        known: Keys that it may have.
    """
    for key in found:
        if key not in known:
            text = str(key)[:_LONGEST_KEY]
            like = difflib.get_close_matches(text, known, 1, 0.5)
            hint = f"did you mean {like[0]!r}?" if like else f"known are {', '.join(known)}"
            raise ConfigError(f"{name}.{text}: unknown key; {hint}")


def read_config(config: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], ProphetSection]:
    """Split a DeepSpeed config into the part without the "prophet" section, and that section.

    A missing section is all defaults.

    Args:
        config: A dictionary, which stays as it is, or the path of a JSON file.

    Raises:
        ConfigError: For an unknown key of the section, with the nearest known one, for a value of the wrong kind, and
            for what DeepSpeed is asked to do that does not work here.
    """
    if isinstance(config, str | Path):
        found = read_json(config, most_bytes=MAX_FILE_BYTES, expected="a DeepSpeed config", error=ConfigError)
        if not isinstance(found, dict):
            raise ConfigError(f"{config}: expected a JSON object, got {type(found).__name__}")
    elif isinstance(config, Mapping):
        found = copy.deepcopy(dict(config))
    else:
        raise ConfigError(f"config: expected a dictionary or the path of a JSON file, got {type(config).__name__}")
    has_section(found)
    section = found.pop(SECTION, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{SECTION}: expected an object, got {type(section).__name__}")
    parsed = ProphetSection.parse(section)
    check_deepspeed(found)
    return found, parsed


def has_section(config: Mapping[str, Any]) -> bool:
    """Whether a configuration has the section; raises `ConfigError` for one whose name is almost the same."""
    for key in config:
        # A misspelt section would leave the model unbalanced, and nobody would notice.
        if key != SECTION and difflib.get_close_matches(SECTION, [str(key).lower()[:_LONGEST_KEY]], 1, 0.8):
            raise ConfigError(f"{str(key)[:_LONGEST_KEY]}: unknown section; did you mean {SECTION!r}?")
    return SECTION in config


def check_deepspeed(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for what would fail, or silently be wrong, with balanced experts."""

    def part(name: str) -> Mapping[str, Any]:
        value = config.get(name)
        return value if isinstance(value, Mapping) else {}

    zero = part("zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2):
        raise ConfigError(
            f"zero_optimization.stage: {shown(stage)} is not supported, expected 0, 1 or 2. Stage 3 frees parameters "
            f"between uses, so there is no whole expert in memory at its home to send to replicas"
        )
    for key in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(key), Mapping) and zero[key].get("device", "none") != "none":
            raise ConfigError(f"zero_optimization.{key}: not supported: it reads experts' gradients too early")
    if zero.get("cpu_offload"):
        raise ConfigError("zero_optimization.cpu_offload: not supported: it reads experts' gradients too early")
    if "zenflow" in zero:
        raise ConfigError("zero_optimization.zenflow: not supported: it updates parameters while a step is under way")
    if stage > 0 and zero.get("contiguous_gradients") is False:
        raise ConfigError("zero_optimization.contiguous_gradients: DeepSpeed needs true with experts")
    model_dtype = next((name for name in ("bf16", "fp16") if part(name).get("enabled")), "fp32")
    # DeepSpeed's default is the model's dtype
    adds_in = part("data_types").get("grad_accum_dtype") or model_dtype
    if adds_in not in (model_dtype, "fp32"):
        known = " or ".join(repr(name) for name in dict.fromkeys((model_dtype, "fp32")))
        raise ConfigError(
            f"data_types.grad_accum_dtype: expected {known} for a {model_dtype} model, got {shown(adds_in)}"
        )
    if part("bf16").get("immediate_grad_update"):
        raise ConfigError("bf16.immediate_grad_update: not supported: it reads experts' gradients too early")
    for name, why in (
        ("amp", "apex changes the optimizer"),
        ("torch_autocast", "its gradient scaler does not know of experts"),
        ("hybrid_engine", "its engine replaces layers between steps"),
        ("data_efficiency", "what its samplers have drawn is not in a checkpoint here"),
        ("compile", "compiled hooks would not be this integration's"),
    ):
        if any(part(name).get(k) for k in ("enabled", "deepcompile")):
            raise ConfigError(f"{name}: not supported: {why}")
    if part("checkpoint").get("load_universal"):
        raise ConfigError(
            "checkpoint.load_universal: not supported: a checkpoint here fits any number of ranks as it is"
        )
    if part("tensor_parallel").get("autotp_size", 0) not in (0, 1):
        raise ConfigError("tensor_parallel.autotp_size: not supported: experts are not cut by tensor parallelism")
    if config.get("sequence_parallel_size", 1) not in (0, 1):
        raise ConfigError("sequence_parallel_size: not supported: gradients are averaged over other groups then")
    for key, wanted in (
        ("sparse_gradients", False),
        ("use_data_before_expert_parallelism", False),
        ("managed_gradient_accumulation", True),
    ):
        if config.get(key, wanted) != wanted:
            raise ConfigError(f"{key}: only {str(wanted).lower()} is supported")
    kind = part("optimizer").get("type")
    if kind is not None and str(kind).lower() not in ELEMENTWISE:
        raise ConfigError(
            f"optimizer.type: {shown(kind)} is not supported, expected one of {', '.join(ELEMENTWISE)}: experts are "
            f"stacked in one tensor, so an optimizer that looks at whole tensors would treat them as one"
        )
