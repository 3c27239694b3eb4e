"""Descriptions of models from their sizes: what `prophet switch` and the benchmark of plans lay out.

Training keeps bf16 parameters, float32 master weights and two moments: 14 bytes a parameter.
"""

from __future__ import annotations

from pipeline_balance.elastic.layouts.boxes import MIXED_ADAMW, Block, ModelDescription, Parameter
from pipeline_balance.elastic.layouts.parallelism import Parallelism, check_cut
from prophet.machine.sizes import ModelSizes
from prophet.spec.feed_forward import parts_of
from prophet.spec.placement import check_shared


def description_of(sizes: ModelSizes) -> ModelDescription:
    """The model as a description: projections of attention, feed-forward networks, each block's experts stacked.

    Blocks without experts come first. Biases and positions are left out. Attention that is not four projections is one
    tensor, which tp does not cut.
    """
    dim, last = sizes.dim, sizes.layers - 1
    inner: list[Parameter] = []
    for n in range(sizes.layers):
        at = f"layers.{n}"
        # norms are whole on every tp rank
        norms = [_whole(f"{at}.{norm}", (dim,), n) for norm in ("input_norm", "post_norm")]
        if n < sizes.layers - sizes.blocks_with_experts:
            # `before`: how many parameters of the network stand in front of the norms
            hidden, before = sizes.dense_hidden if sizes.experts else sizes.hidden, 2
            more = _feed_forward(sizes, f"{at}.mlp", hidden, n)
        else:
            more, before = _with_experts(sizes, at, n), 1
        # the order decides between equal routes, and pages have figures of this one
        inner += [*_attention(sizes, f"{at}.attention", n), *more[:before], *norms, *more[before:]]
    ends = []
    if sizes.vocabulary:
        # tied embeddings are used by the first and the last layer, which may be on different stages
        places = [("embed", (0, last))] if sizes.tied else [("embed", (0,)), ("head", (last,))]
        ends = [_cut(name, (sizes.vocabulary, dim), tuple(dict.fromkeys(where))) for name, where in places]
    parameters = (*ends[:1], *inner, _whole("norm", (dim,), last), *ends[1:])
    return ModelDescription(name=sizes.name, layers=sizes.layers, parameters=parameters, entries=MIXED_ADAMW)


def check_trainable(sizes: ModelSizes, layout: Parallelism) -> None:
    """Raise `SpecError` unless a `Job` could train a model of these sizes in this layout: by the job's own checks."""
    layout.check_trainable(experts=sizes.experts > 0)
    layout.stage_map(sizes.layers)
    check_shared(sizes.name, sizes.experts, layout.ep)
    cut = {
        "attention heads": sizes.heads,
        "heads of keys and values": sizes.kv_heads or sizes.heads,
        "rows of feed-forward networks": sizes.hidden,
    }
    check_cut(layout.tp, {f"{length} {what} of {sizes.name}": length for what, length in cut.items()})


def _attention(sizes: ModelSizes, prefix: str, layer: int) -> list[Parameter]:
    if sizes.attention_params is not None:
        return [_whole(prefix, (sizes.attention_params,), layer)]
    heads, kv_heads = sizes.heads, sizes.kv_heads or sizes.heads
    # the head dimension need not be dim / heads
    query, key = heads * sizes.size_of_head, kv_heads * sizes.size_of_head
    return [
        _cut(f"{prefix}.q_proj", (query, sizes.dim), (layer,), units=heads),
        _cut(f"{prefix}.k_proj", (key, sizes.dim), (layer,), units=kv_heads, repeated=True),
        _cut(f"{prefix}.v_proj", (key, sizes.dim), (layer,), units=kv_heads, repeated=True),
        _cut(f"{prefix}.o_proj", (sizes.dim, query), (layer,), dim=1, units=heads),
    ]


def _feed_forward(sizes: ModelSizes, prefix: str, hidden: int, layer: int) -> list[Parameter]:
    up, down, gate = (
        _cut(f"{prefix}.up", (hidden, sizes.dim), (layer,)),
        _cut(f"{prefix}.down", (sizes.dim, hidden), (layer,), dim=1),
        _cut(f"{prefix}.gate", (hidden, sizes.dim), (layer,)),
    )
    return [up, down, gate] if parts_of(sizes.activation).gated else [up, down]


def _with_experts(sizes: ModelSizes, prefix: str, layer: int) -> list[Parameter]:
    up = 2 if parts_of(sizes.activation).gated else 1
    stacks = {"gate_up": (up * sizes.hidden, sizes.dim), "down": (sizes.dim, sizes.hidden)}
    # every rank routes its tokens itself
    found = [_whole(f"{prefix}.router", (sizes.experts, sizes.dim), layer)]
    for part, shape in stacks.items():
        name = f"{prefix}.experts.{part}"
        found.append(Parameter(name=name, shape=(sizes.experts, *shape), layers=(layer,), experts=True))
    return found + (_feed_forward(sizes, f"{prefix}.shared", sizes.shared_hidden, layer) if sizes.shared_hidden else [])


def _cut(
    name: str,
    shape: tuple[int, int],
    layers: tuple[int, ...],
    *,
    dim: int = 0,
    units: int | None = None,
    repeated: bool = False,
) -> Parameter:
    """A matrix that tp cuts along `dim`."""
    blocks = (Block(length=shape[dim], units=units, repeated=repeated),)
    return Parameter(name=name, shape=shape, layers=layers, dim=dim, blocks=blocks)


def _whole(name: str, shape: tuple[int, ...], layer: int) -> Parameter:
    return Parameter(name=name, shape=shape, layers=(layer,))
