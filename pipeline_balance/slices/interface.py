"""Attention over slices as one of transformers' attention functions, under a separate name, and its mask function.

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
# The same without a mask function: transformers then makes none. A slice's layers get what whole sequences have shown.
WITHOUT_MASKS = "sliced_without_masks"
# arguments that change nothing about attention
_NEUTRAL = {
    *("position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"),
    *("output_router_logits", "num_items_in_batch", "logits_to_keep", "layer_idx", "position_embeddings"),
}


@dataclass
class Seen:
    """What a forward has asked of attention.

    Attributes:
        documents: Those that its masks tell apart [B, T]; None: one per sequence.
        masks: How many masks have told which tokens see which.
        calls: How many attentions were called.
        width: How many numbers of a key and of a value a query's token meets for each token before it, over its heads.
    """

    documents: Tensor | None = None
    masks: int = 0
    calls: int = 0
    width: int = 0

    def note(self, documents: Tensor | None) -> bool:
        """Note which documents a mask tells apart; whether they are those of the masks before it."""
        before, self.masks = self.documents, self.masks + 1
        if self.masks == 1:
            self.documents = documents
            return True
        if before is None or documents is None:
            return before is documents
        return torch.equal(before, documents)


@dataclass(frozen=True)
class Unfit:
    """Stands for a mask that attention over slices does not have, with the reason.

    It is an error only where a layer uses it: models make masks that no layer uses.
    """

    why: str


class Window(int):
    """Stands for a mask with a sliding window: how many tokens a token sees, up to itself."""


# a stack: shapes are traced while a forward is recorded
_seeing: list[Seen] = []


@contextmanager
def seeing() -> Iterator[Seen]:
    """Within this context documents and calls are noted in what it yields."""
    _seeing.append(Seen())
    try:
        yield _seeing[-1]
    finally:
        _seeing.pop()


@cache
def register() -> None:
    """Make both functions known to transformers, once."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionInterface.register(WITHOUT_MASKS, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Unfit | Window | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention over slices, as transformers' layers call it.

    Args:
        module: The attention module.
        query: [B, Hq, T, D].
        key: [B, Hkv, T, D].
        value: [B, Hkv, T, D].
        attention_mask: What `mask` returned.
        scaling: Of scores; None: D ** -0.5.
        dropout: Must be 0.
        is_causal: Must not be False.
        sliding_window: Must be that of the mask, which counts, as in the attention functions that make one.
        softcap: Of scores.
        s_aux: The heads' sinks [Hq].
        **others: Must be neutral, or change nothing.

    Returns:
        [B, T, H, D], and None for attention weights.

    Raises:
        SpecError: Names every argument that would have to change something and does not.
    """
    if _seeing:
        _seeing[-1].calls += 1
        _seeing[-1].width += query.shape[1] * (query.shape[-1] + value.shape[-1])
    # an argument that is ignored would train another model without a word
    wrong = [name for name, value in others.items() if name not in _NEUTRAL and _is_set(value)]
    if _is_set(dropout):
        wrong.append(f"dropout={dropout:g}")
    if attention_mask is not None and not isinstance(attention_mask, Unfit | Window):
        wrong.append("attention_mask")
    window = attention_mask if isinstance(attention_mask, Window) else None
    if sliding_window and not isinstance(attention_mask, Unfit):
        # a mask for whole sequences hides what the window does, unless documents are shorter
        packed = any(seen.documents is not None for seen in _seeing)
        expected = bool(_seeing) and not packed and key.shape[2] > sliding_window
        if window != sliding_window if window is not None else expected:
            wrong.append(f"sliding_window={sliding_window}, unlike its mask")
    if getattr(module, "is_cross_attention", False) or key.shape[2] != query.shape[2]:
        wrong.append("cross-attention")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        wrong.append("is_causal=False")
    kind = type(module).__name__
    if wrong:
        raise SpecError(f"{kind} asks for {', '.join(wrong)}, which attention over slices does not have")
    # transformers numbers attentions for its caches; chunks go by the same number
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise SpecError(f"{kind} does not know which layer it is in (layer_idx), so its chunks cannot be found")
    if isinstance(attention_mask, Unfit):
        raise SpecError(f"{kind} of layer {layer} {attention_mask.why}")
    out = attend(query, key, value, layer=layer, scale=scaling, window=window, sinks=s_aux, soft_cap=softcap or None)
    return out.transpose(1, 2), None


def _is_set(value: Any) -> bool:
    """Whether an argument has a value that is not neutral."""
    return isinstance(value, Tensor) or not (value is None or value is False or value == 0)


def mask(
    batch_size: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **others: Any,
) -> Unfit | Window | None:
    """What transformers' models call for a mask: notes the documents for `seeing`, and makes none.

    Outside of `seeing` nothing is read: what slices see is a part of what their whole sequences saw.

    Args:
        batch_size: B.
        mask_function: Whether a query's token sees a key's, by (batch, head, query, key).
        attention_mask: [B, T], 0 where there is padding.
        device: Where positions are made, without `attention_mask`.
        **others: Has `q_length`, or `cache_position` in older versions.

    Returns:
        None; `Window` where a sliding window hides any token of a document; `Unfit` where tokens see others than those
        before them in their document and in the window.

    Raises:
        SpecError: For padding on the left.
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

    # a document begins where a token does not see the one before it; a few probes per token then suffice
    before = (at_T - 1).clamp(min=0)
    new = ~sees(at_T, before)
    new[:, 0] = False
    # first token of each token's document
    first = torch.where(new, at_T, 0).cummax(dim=1).values
    # the last token has none after it
    after = (at_T + 1).clamp(max=tokens - 1)
    if not sees(at_T, at_T).all():
        return Unfit("hides tokens from themselves: slices cannot")
    window: Window | None = None
    # by token, the first one that it should see
    earliest = first
    if not (seen := sees(at_T, first)).all():
        # the first token that does not see its document's first one has a whole window before it
        row, token = (~seen).nonzero()[0].tolist()
        window = Window(token - int(first[row, token]))
        earliest = torch.maximum(first, at_T - window + 1)
    hidden = sees(at_T, (earliest - 1).clamp(min=0)) & (earliest > first)
    if not sees(at_T, earliest).all() or not sees(at_T, (earliest + at_T) // 2).all() or hidden.any():
        return Unfit("hides earlier tokens of a document otherwise than by a sliding window: slices cannot")
    if sees(at_T, after)[:, : tokens - 1].any():
        return Unfit("lets tokens see later ones: slices need causal attention")
    # the last token of the document before
    across = sees(at_T, (first - 1).clamp(min=0)) & (first > 0)
    if across.any():
        return Unfit("lets tokens see a part of other documents: slices cannot")
    if others.get("use_vmap") and not _is_as_probed(mask_function, first, window):
        return Unfit("has a mask of its own, neither causal nor a sliding window: slices cannot")
    if not _seeing[-1].note(new.long().cumsum(dim=1) if new.any() else None):
        return Unfit("tells other documents apart than another mask of the model: slices cannot")
    return window


def _is_as_probed(mask_function: Callable[..., Tensor], first: Tensor, window: int | None) -> bool:
    """Whether every token sees what a few probes of each say; a model's own masks may tell apart what these do not.

    Args:
        mask_function: As in `mask`.
        first: [B, T] the first token of each token's document.
        window: How many tokens a token sees, up to itself (None: all of its document).
    """
    rows, tokens = first.shape
    row, head = torch.arange(rows, device=first.device)[:, None, None], first.new_zeros(())
    key = torch.arange(tokens, device=first.device)
    # in strips, as all pairs of tokens are many
    for query in key.split(256):
        from_first = torch.maximum(first[:, query], query - window + 1) if window is not None else first[:, query]
        expected = (key <= query[:, None]) & (key >= from_first[:, :, None])
        found = torch.as_tensor(mask_function(row, head, query[:, None], key), device=first.device)
        if not torch.equal(found.expand_as(expected), expected):
            return False
    return True


def configs_of(model: nn.Module) -> list[Any]:
    """The configurations that say which attention the modules of `model` compute."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    return [*{id(c): c for c in found if hasattr(c, "_attn_implementation")}.values()]


@contextmanager
def attending(every: Sequence[Any], name: str = NAME) -> Iterator[None]:
    """Within this context modules with these configurations compute attention over slices."""
    register()
    before = [config._attn_implementation for config in every]
    try:
        for config in every:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in zip(every, before, strict=True):
            config._attn_implementation = implementation
