"""Wrong kinds and misspelt names, drawn from the signatures: one sentence each, where they were written."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import prophet
from pipeline_balance.control.decide import ControllerConfig
from prophet.errors import ArgumentError, SpecError, TopologyError
from prophet.machine.topology import read_topology
from prophet.planner import get_planner
from prophet.spec import Topology, Windows, checked
from prophet.spec.checked import fits, type_text
from tests.helpers.support import TinyModel

ENGINE: prophet.Engine = object.__new__(prophet.Engine)  # nothing is asked of it
MODEL = nn.Linear(2, 2)
# each with arguments that are right
CALLS: dict[str, tuple[Any, ...]] = {
    "prophet.EngineConfig": (),
    "prophet.GateConfig": (),
    "prophet.Windows": (),
    "prophet.attach": (MODEL,),
    "prophet.convert": (MODEL,),
    "prophet.monitor": (ENGINE, "run"),
    "pipeline_balance.ControllerConfig": (),
    "prophet_deepspeed.section.ProphetSection": (),
    "prophet_transformers.ProphetCallback": (),
    "prophet_accelerate.balance": (object(),),
}
# each with the words of an annotation that allow it
WRONG: tuple[tuple[Any, set[str]], ...] = (
    (None, {"None", "object"}),
    (True, {"bool", "object"}),
    (3, {"int", "float", "object"}),
    (2.5, {"float", "object"}),
    ("yes", {"str", "object"}),
    (b"yes", {"object"}),
    ([object()], {"object"}),
    ({1: 2}, {"Mapping", "dict", "object"}),
    (torch.zeros(2), {"object", "Tensor"}),
    (nn.Linear, {"Callable", "object"}),
)


@dataclass(frozen=True)
class Draw:
    """One call that is wrong in one argument. words: all of which the message must have."""

    call: str
    given: Mapping[str, Any]
    words: tuple[str, ...] = field(default=())


def misspelt(name: str, rng: np.random.Generator) -> str:
    """Without one of its letters."""
    at = int(rng.integers(1, len(name)))
    return name[:at] + name[at + 1 :]


def draws(count: int, seed: int) -> list[Draw]:
    """Distinct ones; every call is in about as many."""
    rng = np.random.default_rng(seed)
    found: dict[tuple[str, str, str], Draw] = {}
    while len(found) < count:
        call = list(CALLS)[len(found) % len(CALLS)]
        parameters = inspect.signature(target(call)).parameters
        right = dict(zip(parameters, CALLS[call], strict=False))
        name = str(rng.choice(list(parameters)))
        if rng.random() < 0.3 and len(name) > 4 and name not in right:
            wrong = misspelt(name, rng)
            found[call, wrong, ""] = Draw(call, right | {wrong: parameters[name].default}, (wrong, "did you mean"))
            continue
        value, allowed = WRONG[int(rng.integers(len(WRONG)))]
        annotation = set(re.findall(r"\w+", str(parameters[name].annotation)))
        if not annotation & (allowed | {"Any"}):
            found[call, name, repr(value)] = Draw(call, right | {name: value}, (name, "must be ", ", got "))
    return list(found.values())


def target(call: str) -> Any:
    module, _, name = call.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("draw", draws(40, seed=41), ids=lambda d: f"{d.call}-{d.words[0]}")
def test_a_wrong_value_or_name_is_one_sentence(draw: Draw) -> None:
    with pytest.raises(ArgumentError) as caught:
        target(draw.call)(**draw.given)
    said = str(caught.value)
    assert all(word in said for word in draw.words), said
    assert "\n" not in said
    assert len(said) < 300
    assert caught.value.__cause__ is None
    assert isinstance(caught.value, SpecError)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: prophet.EngineConfig(planner="prophett"), "there is no planner 'prophett'; did you mean 'prophet'?"),
        (lambda: prophet.EngineConfig(slots_per_rnk=2), "EngineConfig.slots_per_rnk: there is no such argument; did"),
        (
            lambda: prophet.EngineConfig(topology=4),
            "EngineConfig.topology must be a prophet.Topology, a string or a pa",
        ),
        (lambda: prophet.GateConfig(score="sigmod"), "'softmax' or 'sigmoid', got 'sigmod'; did you mean 'sigmoid'?"),
        (lambda: prophet.attach(torch.optim.SGD(MODEL.parameters(), lr=0.1), MODEL), "; model and optimizer look swap"),
        (lambda: prophet.attach(TinyModel(), True), "optimizer must be a torch.optim.Optimizer, got True"),
        (lambda: prophet.convert([MODEL]), r"convert(): model must be a torch.nn.Module, got list [Linear(in"),
        (lambda: prophet.convert(MODEL, adapters=[3]), "adapters must be a sequence of prophet.Adapter, got list [3]"),
        (lambda: prophet.convert(MODEL, experts=3), "experts must be a string or a sequence of strings, got 3"),
        (lambda: prophet.monitor(None, "run"), "monitor(): engine must be a prophet.Engine, got None"),
        (lambda: prophet.monitor(ENGINE), "monitor(): missing a required argument: 'run'"),
        (lambda: prophet.monitor(ENGINE, "run", timeline=5), "timeline must be a sequence of integers, got 5"),
        (lambda: ControllerConfig(every_steps="5"), "ControllerConfig.every_steps must be an integer, got '5'"),
        (lambda: Windows(fnec_s="1"), "Windows.fnec_s must be a number, got '1'"),
    ],
)
def test_the_sentence(wrong: Callable[[], object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=re.escape(said)):
        wrong()
    assert not list(tmp_path.iterdir())


def test_what_is_right_stays_so(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text(
        'format = 1\nname = "two"\nranks = 2\nranks_per_node = 2\nexpert_overhead_s = 0.0\n'
        "intra = {bytes_per_s = 1e9, latency_s = 0.0}\ninter = {bytes_per_s = 1e9, latency_s = 0.0}\n"
        "rank = {flops_per_s = 1e12, free_bytes = 1e9}\n"
    )
    for topology in (file, str(file)):
        assert prophet.EngineConfig(topology=topology).topology == read_topology(file)
    with pytest.raises(TopologyError, match=r"no\.toml: expected a topology file"):
        prophet.EngineConfig(topology=tmp_path / "no.toml")
    right: list[dict[str, Any]] = [
        {"effort": 1},
        {"effort": np.float32(0.5)},
        {"slots_per_rank": np.int64(3)},
        {"timeout_s": 5, "refetch": np.True_},
        {"planner": get_planner("static"), "topology": Topology.uniform(2)},
        {"replica_memory_bytes": None},
    ]
    for given in right:
        config = prophet.EngineConfig(**given)
        assert all(getattr(config, name) == value for name, value in given.items())
    prophet.GateConfig(capacity_factor=np.float64(1.5), normalize=False)


def test_annotations() -> None:
    assert fits((1, np.int32(2)), Sequence[int])
    assert not fits("12", Sequence[str])
    assert not fits(("a", 1), tuple[str, ...])
    assert fits({"a": 1}, Mapping[str, int])
    assert not fits({"a": "b"}, Mapping[str, int])
    assert fits(1, Literal[1, "a"])
    assert not fits(True, Literal[1, "a"])
    assert fits(len, Callable[[Any], int])
    assert type_text(Callable[[Any], int] | None) == "a function"
    assert type_text(Literal["a", "b"] | None) == "'a' or 'b'"
    assert type_text(Path) == "a path"
    assert type_text(dict) == "a dict"


def test_a_call_stays_what_it_was() -> None:
    def call(a: int, *, b: str = "x") -> str:
        """Says b."""
        return b * a

    wrapped = checked(call)
    assert (wrapped(2), wrapped(a=1, b="y")) == ("xx", "y")
    assert (wrapped.__doc__, inspect.signature(wrapped)) == (call.__doc__, inspect.signature(call))
    for wrong in (partial(wrapped, 1, 2), partial(wrapped, b="y"), partial(wrapped, 1, a=2)):
        with pytest.raises(ArgumentError, match=r"call\(\): "):
            wrong()
