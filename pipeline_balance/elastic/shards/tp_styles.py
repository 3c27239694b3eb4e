"""How tensor parallelism cuts each module of a transformers model: its own plan, checked against the modules.

A module's parameters are cut along rows ("column", "vocabulary") or columns ("row"), or every tp rank has them whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from pipeline_balance.elastic.layouts.boxes import How
from pipeline_balance.elastic.layouts.parallelism import check_cut
from pipeline_balance.elastic.shards.module_copies import sharded_of
from prophet.errors import SpecError

# By transformers' names in `tp_plan`: how the module is cut, whether its output is gathered, whether its gradients
# are parts of a sum.
_KNOWN: dict[str, tuple[How, bool, bool]] = {
    "colwise": ("column", False, False),
    "colwise_gather_output": ("column", True, False),
    "colwise_rep": ("column", True, False),
    "rowwise": ("row", False, False),
    "embedding_rowwise": ("vocabulary", True, False),
    "replicated_with_grad_allreduce": ("whole", False, True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """How a module with parameters is cut.

    Attributes:
        how: Along rows, columns, or not at all.
        gathered: Its output is put together on every tp rank.
        partial: Its parameters are whole, but each rank runs it on its own heads, so that their gradients are parts of
            a sum.
    """

    how: How = "whole"
    gathered: bool = False
    partial: bool = False


def styles_of(root: nn.Module, tp: int) -> dict[str, Style]:
    """The style of every module of `root` that has parameters, by name; layers of experts have none.

    Raises `SpecError` for what cannot be cut.
    """
    plan: Mapping[str, str] = getattr(root, "tp_plan", None) or {}
    kind = type(root).__name__
    if not plan:
        raise SpecError(f"tp{tp}: a {kind} has no tensor-parallel plan (transformers' tp_plan)")
    config: Any = getattr(root, "config", None)
    heads = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    # attention computes with whole heads on each rank
    check_cut(tp, {f"{name} = {n} of a {kind}": n for name, n in heads.items() if n is not None})
    found: dict[str, Style] = {}
    for name, module in sharded_of(root):
        # what holds no parameter has nothing to cut
        if not any(p is not None for p in module._parameters.values()):
            continue
        word = next((how for pattern, how in plan.items() if fnmatchcase(name, pattern)), None)
        if word is not None and word not in _KNOWN:
            raise SpecError(f"tp{tp}: {name} is cut {word!r} by its plan, which a job cannot do")
        found[name] = _checked(name, module, Style() if word is None else _style(word), tp)
    _tie(root, found, tp)
    return found


def rules_for(tp_styles: Mapping[str, Style]) -> dict[str, How]:
    """Rules for `describe` that cut modules in the same way."""
    return {name: style.how for name, style in tp_styles.items() if style.how != "whole"}


def _style(word: str) -> Style:
    how, gathered, partial = _KNOWN[word]
    return Style(how=how, gathered=gathered, partial=partial)


def _checked(name: str, module: nn.Module, style: Style, tp: int) -> Style:
    """The style; whole where the output is gathered and tp does not divide the length."""
    if style.how == "whole":
        return style
    wanted = nn.Embedding if style.how == "vocabulary" else nn.Linear
    if not isinstance(module, wanted):
        raise SpecError(f"tp{tp}: {name} is a {type(module).__name__}, only a {wanted.__name__} can be cut this way")
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        # torch would look for the padding row in every shard
        return Style()
    length = module.weight.shape[1 if style.how == "row" else 0]
    # no rank needs it cut; a vocabulary is often no multiple of tp
    if style.gathered and length % tp:
        return Style()
    check_cut(tp, {f"{length} {'columns' if style.how == 'row' else 'rows'} of {name}": length})
    return style


def _tie(root: nn.Module, tp_styles: dict[str, Style], tp: int) -> None:
    """Have modules that share a weight cut it alike: whole where one has it whole and the other gathers."""
    sharing: dict[int, list[str]] = {}
    for name in tp_styles:
        for parameter in root.get_submodule(name)._parameters.values():
            if parameter is not None:
                sharing.setdefault(id(parameter), []).append(name)
    for names in sharing.values():
        hows = {tp_styles[name].how for name in names}
        # both cut dimension 0
        if hows <= {"column", "vocabulary"} or len(hows) == 1:
            continue
        if not all(tp_styles[name].gathered or tp_styles[name].how == "whole" for name in names):
            raise SpecError(f"tp{tp}: {' and '.join(names)} share a weight, but are cut in different ways")
        tp_styles.update({name: Style() for name in names})
