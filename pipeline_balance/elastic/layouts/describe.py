"""Descriptions of real modules: names, shapes and element types, cut by rules for the modules that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn

from pipeline_balance.elastic.layouts.boxes import ADAMW, Block, Entry, ModelDescription, Parameter
from prophet.errors import LayoutError
from prophet.state.space import StateKind

How = Literal["column", "row", "vocabulary", "experts", "whole"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How the parameters of a module are cut.

    Attributes:
        how: "column" and "vocabulary" cut along dimension 0, biases too. "row" cuts weights along dimension 1 and
            leaves biases whole. With "experts" dimension 0 counts them. "whole" cuts nothing.
        units: How many units stay whole (heads); None: every row or column is one.
        repeated: Shards may share a unit.
        fused: Lengths of the parts that are cut apart, as a share of the whole (q, k and v of 8, 2 and 2 heads: 8, 2,
            2), each in as many units.
    """

    how: How
    units: int | None = None
    repeated: bool = False
    fused: tuple[int, ...] = ()

    def cut(self, name: str, shape: tuple[int, ...]) -> tuple[int | None, tuple[Block, ...]]:
        """The dimension that tp cuts of a parameter of this shape, and its blocks."""
        dim = {"column": 0, "vocabulary": 0, "row": 1}.get(self.how)
        # a bias has no dimension 1: "row" leaves it whole
        if dim is None or dim >= len(shape):
            return None, ()
        length = shape[dim]
        if not self.fused:
            return dim, (Block(length=length, units=self.units, repeated=self.repeated),)
        total = sum(self.fused)
        if length % total:
            raise LayoutError(f"{name}: {length} rows cannot be in parts of {self.fused}")
        # the largest part is cut for good; smaller ones (keys, values) may have fewer units than there are shards
        most = max(self.fused)
        return dim, tuple(Block(length=length * n // total, units=n, repeated=n < most) for n in self.fused)


def describe(
    root: nn.Module,
    units: Sequence[nn.Module],
    rules: Mapping[str, Rule] | None = None,
    *,
    entries: Sequence[Entry] = ADAMW,
    name: str = "",
) -> ModelDescription:
    """`root` as a description; layer k of the pipeline is what `units[k]` owns, and tied parameters have several.

    Frozen parameters have no optimizer state.

    Args:
        root: The unsplit model.
        units: Its pipeline layers, in order.
        rules: How modules are cut, by the name of the module that holds a parameter or by the parameter's, with
            wildcards (`layers.*.q_proj`). The first that fits holds; what none fits is whole on every tp rank.
        entries: What the optimizer keeps.
        name: For reports; default: the class of `root`.

    Raises:
        LayoutError: For a parameter that no unit owns.
    """
    # by identity: a tied parameter is one object in several units
    owners: dict[int, list[int]] = {}
    for k, unit in enumerate(units):
        for tensor in (*unit.parameters(), *unit.buffers()):
            owners.setdefault(id(tensor), [])
            if k not in owners[id(tensor)]:
                owners[id(tensor)].append(k)
    found = [_described(n, p, owners, rules or {}, "parameter") for n, p in root.named_parameters()]
    found += [_described(n, b, owners, rules or {}, "buffer") for n, b in root.named_buffers()]
    return ModelDescription(
        name=name or type(root).__name__, layers=len(units), parameters=tuple(found), entries=tuple(entries)
    )


def _described(
    name: str, tensor: Tensor, owners: Mapping[int, list[int]], rules: Mapping[str, Rule], kind: StateKind
) -> Parameter:
    if id(tensor) not in owners:
        raise LayoutError(f"{name} belongs to none of the pipeline's layers")
    module = name.rpartition(".")[0]
    fits = (rule for pattern, rule in rules.items() if fnmatchcase(module, pattern) or fnmatchcase(name, pattern))
    rule = next(fits, Rule(how="whole")) if kind == "parameter" else Rule(how="whole")
    shape = tuple(tensor.shape)
    dim, blocks = rule.cut(name, shape)
    return Parameter(
        name=name,
        shape=shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        layers=tuple(owners[id(tensor)]),
        dim=dim,
        blocks=blocks,
        experts=rule.how == "experts",
        trained=kind == "parameter" and tensor.requires_grad,
        kind=kind,
    )


def rules_of(model: Any) -> dict[str, Rule]:
    """Rules of a transformers model: its own tensor-parallel plan, with heads that stay whole and stacked experts."""
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if not plan:
        raise LayoutError(f"a {type(model).__name__} has no tensor-parallel plan: give rules for its modules")
    heads = getattr(model.config, "num_attention_heads", None)
    kv_heads = getattr(model.config, "num_key_value_heads", None) or heads
    rules: dict[str, Rule] = {}
    for pattern, how in plan.items():
        # experts first: what lies within them is skipped below
        if "experts" in how:
            rules[pattern] = Rule(how="experts")
    for pattern, how in plan.items():
        part = pattern.rpartition(".")[2]
        # projections within an expert are part of its stack
        if pattern in rules or any(pattern.startswith(f"{e}.") for e in rules):
            continue
        if how.startswith("embedding"):
            rules[pattern] = Rule(how="vocabulary")
        elif how.startswith("colwise"):
            # with fewer kv heads than shards, neighbouring shards have the same one
            units = heads if part == "q_proj" else kv_heads if part in ("k_proj", "v_proj") else None
            rules[pattern] = Rule(how="column", units=units, repeated=part in ("k_proj", "v_proj"))
        elif how.startswith("rowwise"):
            rules[pattern] = Rule(how="row", units=heads if part == "o_proj" else None)
        elif not how.startswith("replicated"):
            raise LayoutError(f"{pattern} is cut {how!r}, which has no rule: give one")
    return rules
