"""Attention over slices under a name of its own among transformers' attention functions, and its mask function.

Shape legend: B sequences, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.slices.attention import attend
from prophet.errors import SpecError

NAME = "sliced"
_SAY_NOTHING = {  # arguments that change nothing about attention
    *("position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"),
    *("output_router_logits", "num_items_in_batch", "logits_to_keep", "layer_idx", "position_embeddings"),
}


@dataclass
class Seen:
    """What a forward has asked of attention: the documents [B, T] that its masks tell apart, and the calls.

    `width` is how many numbers of a key and of a value a query's token meets for each token before it, over its heads.
    """

    documents: Tensor | None = None
    calls: int = 0
    width: int = 0


@dataclass(frozen=True)
class Unfit:
    """Stands for a mask that attention over slices does not have, and `why`: models make masks that no layer uses."""

    why: str


_seeing: list[Seen] = []


@contextmanager
def seeing() -> Iterator[Seen]:
    """Within, documents and calls are noted in what this gives."""
    _seeing.append(Seen())
    try:
        yield _seeing[-1]
    finally:
        _seeing.pop()


@cache
def register() -> None:
    """Make both functions known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Unfit | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers' layers call: [B, T, H, D] of queries, keys and values [B, H, T, D].

    Raises `SpecError` that names every argument that would have to change something and does not.
    """
    if _seeing:
        _seeing[-1].calls += 1
        _seeing[-1].width += query.shape[1] * (query.shape[-1] + value.shape[-1])
    wrong = [name for name, value in others.items() if name not in _SAY_NOTHING and _says(value)]
    if _says(dropout):
        wrong.append(f"dropout={dropout:g}")
    if attention_mask is not None and not isinstance(attention_mask, Unfit):
        wrong.append("attention_mask")
    if getattr(module, "is_cross_attention", False) or key.shape[2] != query.shape[2]:
        wrong.append("cross-attention")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        wrong.append("is_causal=False")
    kind = type(module).__name__
    if wrong:
        raise SpecError(f"{kind} asks for {', '.join(wrong)}, which attention over slices does not have")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise SpecError(f"{kind} does not know which layer it is in (layer_idx), so its chunks cannot be found")
    if isinstance(attention_mask, Unfit):
        raise SpecError(f"{kind} of layer {layer} {attention_mask.why}")
    return attend(query, key, value, layer=layer, scale=scaling).transpose(1, 2), None


def _says(value: Any) -> bool:
    """Whether an argument has a value that is not neutral."""
    return isinstance(value, Tensor) or not (value is None or value is False or value == 0)


def mask(
    batch_size: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **others: Any,
) -> Unfit | None:
    """What transformers' models call for a mask: notes the documents for `seeing`, makes none.

    Outside of it nothing is read: what slices see is a part of what their whole sequences saw. Where tokens see others
    than those before them in their document, what it returns is refused by the attention that uses it. Raises
    `SpecError` for padding on the left.
    """
    if not _seeing:
        return None
    given = others["q_length"] if "q_length" in others else others["cache_position"].shape[0]
    tokens = int(given)
    if attention_mask is not None:
        device = attention_mask.device
        if attention_mask.dim() == 2 and bool((attention_mask[:, 1:].int() > attention_mask[:, :-1].int()).any()):
            raise SpecError("attention_mask hides tokens on the left of others: with slices, pad on the right")
    row_B1 = torch.arange(batch_size, device=device)[:, None]
    at_T = torch.arange(tokens, device=device)[None, :]
    head = torch.zeros((), dtype=torch.long, device=device)

    def sees(query: Tensor, key: Tensor) -> Tensor:
        return torch.as_tensor(mask_function(row_B1, head, query, key), device=device).expand(batch_size, tokens)

    before = (at_T - 1).clamp(min=0)
    new = ~sees(at_T, before)
    new[:, 0] = False
    first = torch.where(new, at_T, 0).cummax(dim=1).values
    after = (at_T + 1).clamp(max=tokens - 1)
    if not sees(at_T, first).all() or not sees(at_T, at_T).all():
        return Unfit("hides earlier tokens of a document (a sliding window or chunks): slices cannot")
    if sees(at_T, after)[:, : tokens - 1].any():
        return Unfit("lets tokens see later ones: slices need causal attention")
    across = sees(at_T, (first - 1).clamp(min=0)) & (first > 0)
    if across.any():
        return Unfit("lets tokens see a part of other documents: slices cannot")
    if new.any():
        _seeing[-1].documents = new.long().cumsum(dim=1)
    return None


def configs_of(model: nn.Module) -> list[Any]:
    """The configurations that say which attention the modules of `model` compute."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    return [*{id(c): c for c in found if hasattr(c, "_attn_implementation")}.values()]


@contextmanager
def attending(every: Sequence[Any]) -> Iterator[None]:
    """Within, modules with these configurations compute attention over slices."""
    register()
    before = [config._attn_implementation for config in every]
    try:
        for config in every:
            config._attn_implementation = NAME
        yield
    finally:
        for config, said in zip(every, before, strict=True):
            config._attn_implementation = said
