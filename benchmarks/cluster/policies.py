"""The policies that are compared, by name."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Literal

from prophet.engine.replan import EVERY_STEP, ReplanConfig
from prophet.errors import SpecError
from prophet.planner import Planner, get_planner

System = Literal["prophet", "deepspeed", "tutel"]
CAPACITY = 1.25  # as GShard and Switch train


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How a run is balanced.

    system: whose MoE layer runs. planner: of our engine, a name or "MODULE:FUNCTION" (see `planner_of`). schedule:
    how its transfers are laid out. even: the routing is replaced by a perfectly even one. capacity: a peer's capacity
    factor, beyond which it drops; None drops nothing. plain: our layer without the engine. use_windows: whether the
    planner knows of the compute under which transfers hide (Eq. 8). transfers: the form of Trans and Agg. topology:
    what the planner knows of the machine, the run's own calibration by default. refetch: replicas' parameters are
    fetched again for the backward pass. replan: when placements are planned anew, and for which load.
    """

    name: str
    system: System = "prophet"
    planner: str = "static"
    schedule: Literal["block-wise", "look-ahead", "operator", "blocking"] = "block-wise"
    transfers: Literal["auto", "direct", "two-phase"] = "auto"
    topology: Literal["calibrated", "auto", "uniform"] = "calibrated"
    refetch: bool = False
    even: bool = False
    capacity: float | None = None
    plain: bool = False
    use_windows: bool = True
    replan: ReplanConfig = EVERY_STEP

    @property
    def mode(self) -> str | None:
        """How a peer runs, in words; None for our layer."""
        if self.system == "prophet":
            return None
        dropless = "dropless, padded to the hottest expert"
        mode = dropless if self.capacity is None else f"capacity factor {self.capacity:g}"
        return f"{mode}, even routing" if self.even else mode


_ALL = (
    Policy(name="static"),
    Policy(name="top2", planner="top2"),
    Policy(name="top3", planner="top3"),
    Policy(name="fastermoe", planner="fastermoe"),
    Policy(name="pro-prophet", planner="pro-prophet"),
    Policy(name="pro-prophet-blocking", planner="pro-prophet", schedule="blocking", use_windows=False),
    Policy(name="pro-prophet-no-windows", planner="pro-prophet", use_windows=False),
    Policy(name="prophet", planner="prophet"),
    Policy(name="prophet-blocking", planner="prophet", schedule="blocking", use_windows=False),
    Policy(name="prophet-kept", planner="prophet", replan=ReplanConfig()),
    Policy(name="prophet-operator", planner="prophet", schedule="operator"),
    Policy(name="prophet-look-ahead", planner="prophet", schedule="look-ahead"),
    Policy(name="prophet-direct", planner="prophet", transfers="direct"),
    Policy(name="prophet-two-phase", planner="prophet", transfers="two-phase"),
    Policy(name="prophet-refetch", planner="prophet", refetch=True),
    Policy(name="prophet-no-windows", planner="prophet", use_windows=False),
    Policy(name="prophet-best-prediction", planner="prophet", replan=replace(EVERY_STEP, predict="best")),
    Policy(name="prophet-auto", planner="prophet", topology="auto", use_windows=False),
    Policy(name="prophet-uniform", planner="prophet", topology="uniform", use_windows=False),
    Policy(name="forced-balance", even=True, plain=True),
    Policy(name="forced-balance-prophet", planner="prophet", even=True),
    Policy(name="deepspeed", system="deepspeed"),
    Policy(name="deepspeed-capacity", system="deepspeed", capacity=CAPACITY),
    Policy(name="deepspeed-even", system="deepspeed", even=True),
    Policy(name="tutel", system="tutel"),
    Policy(name="tutel-capacity", system="tutel", capacity=CAPACITY),
    Policy(name="tutel-even", system="tutel", even=True),
)
POLICY_NAMES = tuple(p.name for p in _ALL)
DEFAULT_POLICIES = (
    "static",
    "top2",
    "fastermoe",
    "pro-prophet",
    "prophet",
    "prophet-blocking",
    "forced-balance",
    "forced-balance-prophet",
    "deepspeed",
    "deepspeed-capacity",
    "deepspeed-even",
    "tutel",
    "tutel-capacity",
    "tutel-even",
)
# What a listed policy needs of the others: ratios are taken within one run.
EVEN = "forced-balance"


class PolicyError(ValueError):
    """A policy that does not exist, or cannot run here."""


def policy(name: str) -> Policy:
    """The policy of that name; "MODULE:FUNCTION" is our engine with the planner that this function returns."""
    for p in _ALL:
        if p.name == name:
            return p
    if ":" in name:
        return Policy(name=name, planner=name)
    raise PolicyError(f"there is no policy {name!r}; there are {', '.join(POLICY_NAMES)}, and MODULE:FUNCTION")


def planner_of(p: Policy) -> Planner:
    """The policy's planner; `SpecError` where there is none of that name, or no such function."""
    module, _, function = p.planner.partition(":")
    if not function:
        return get_planner(p.planner)
    try:
        planner: Planner = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise SpecError(f"policy {p.name!r}: expected a module and its function ({error})") from error
    return planner
