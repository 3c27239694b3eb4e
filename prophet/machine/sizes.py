"""The sizes of a model: what every prediction has to know of it, from a name, a configuration, a trace or options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from prophet.errors import SpecError
from prophet.spec import Activation, Bias, LayerShape, Windows, parts_of

# Of any size: more is a mistake, and its products leave the range of numbers
MOST = 1 << 24


class Parameters(NamedTuple):
    """Weights of a model: all of them, and those of its routed experts."""

    total: int
    routed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """A decoder of `layers` blocks, each attention and a feed-forward network or experts; counts without units.

    Args:
        name: For people.
        dim: Width of a token (hidden_size).
        hidden: Inner width of one expert; of the feed-forward network where there are no experts.
        layers: Blocks of the model.
        experts: Routed experts of a block that has any; 0: a dense model.
        top_k: Experts that a token is routed to.
        moe_layers: Blocks with experts; None: all, or none in a dense model.
        dense_hidden: Inner width of the feed-forward network of blocks without experts; 0: there are none.
        shared_hidden: Inner width of all shared experts of a block together; 0: none.
        activation: The experts' activation, from which follows whether they are gated.
        bias: Which biases the experts have.
        heads: Attention heads.
        kv_heads: Heads of keys and values; None: as many.
        head_dim: Size of a head; None: dim / heads.
        attention_params: Weights of one block's attention; None: of its four projections.
        attention_dim: What attention costs per token and position; None: heads x head_dim.
        dense_params: Weights outside the experts that a token meets in a block with experts; None: attention and
            shared experts.
        vocabulary: Rows of the embedding and of the output head; 0: neither counts.
        tied: The head is the embedding.
        sequence: Tokens of one sequence.
        element_bytes: Bytes of a parameter, gradient or activation; None: what the machine usually has.
        assumed: Descriptions of what was assumed, one item each.

    Raises:
        SpecError: A size is not positive, or contradicts another.
    """

    name: str
    dim: int
    hidden: int
    layers: int = 1
    experts: int = 0
    top_k: int = 1
    moe_layers: int | None = None
    dense_hidden: int = 0
    shared_hidden: int = 0
    activation: Activation = "swiglu"
    bias: Bias = False
    heads: int = 1
    kv_heads: int | None = None
    head_dim: int | None = None
    attention_params: int | None = None
    attention_dim: int | None = None
    dense_params: int | None = None
    vocabulary: int = 0
    tied: bool = False
    sequence: int = 4096
    element_bytes: int | None = None
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("dim", "hidden", "layers", "top_k", "heads", "sequence"):
            if not 1 <= getattr(self, name) <= MOST:
                raise SpecError(f"{self.name}: {name}: expected from 1 to {MOST}, got {getattr(self, name)}")
        try:
            # Raises for an activation that is not known
            parts_of(self.activation)
        except SpecError as error:
            raise SpecError(f"{self.name}: {error}") from None
        if self.experts and self.top_k > self.experts:
            raise SpecError(f"{self.name}: top_k: expected at most the {self.experts} experts, got {self.top_k}")
        if not 0 <= self.blocks_with_experts <= self.layers:
            raise SpecError(
                f"{self.name}: moe_layers: expected at most the {self.layers} layers, got {self.blocks_with_experts}"
            )
        # Only a given head_dim may leave dim undivided
        if self.head_dim is None and self.dim % self.heads:
            raise SpecError(f"{self.name}: heads: expected a divisor of dim {self.dim}, got {self.heads}")
        if self.heads % (self.kv_heads or self.heads):
            raise SpecError(f"{self.name}: kv_heads: expected a divisor of {self.heads} heads, got {self.kv_heads}")

    @property
    def blocks_with_experts(self) -> int:
        """Blocks that have experts."""
        if self.moe_layers is None:
            return self.layers if self.experts else 0
        return self.moe_layers

    @property
    def size_of_head(self) -> int:
        """Elements of one attention head."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def attention(self) -> int:
        """Weights of one block's attention: queries and output, keys and values."""
        if self.attention_params is not None:
            return self.attention_params
        # Queries and output have `heads`, keys and values `kv_heads`
        return 2 * self.dim * self.size_of_head * (self.heads + (self.kv_heads or self.heads))

    @property
    def matrices(self) -> int:
        """Matrices of one feed-forward network."""
        return 3 if parts_of(self.activation).gated else 2

    @property
    def met_by_every_token(self) -> int:
        """Weights outside the routed experts that a token meets in a block with experts."""
        if self.dense_params is not None:
            return self.dense_params
        return self.attention + self.matrices * self.dim * self.shared_hidden

    @property
    def dense_block(self) -> int:
        """Weights of a block without experts."""
        return self.attention + self.matrices * self.dim * (self.dense_hidden or self.hidden)

    def parameters(self) -> Parameters:
        """Weights of the whole model: embeddings, attention, feed-forward networks, experts and their routers.

        Norms, and biases outside the experts, are left out.
        """
        sparse, feed_forward = self.blocks_with_experts, self.matrices * self.dim
        dense = (self.layers - sparse) * (self.dense_hidden if self.experts else self.hidden)
        routed = sparse * self.experts * self.shape(1).expert_params
        total = (
            # Embedding and head
            (1 if self.tied else 2) * self.vocabulary * self.dim
            + self.layers * self.attention
            + feed_forward * (dense + sparse * self.shared_hidden)
            # Routers
            + sparse * self.experts * self.dim
            + routed
        )
        return Parameters(total, routed)

    def shape(self, element_bytes: int) -> LayerShape:
        """The sizes of one MoE layer; `element_bytes` counts where these sizes have none."""
        n_bytes = self.element_bytes or element_bytes
        return LayerShape.feed_forward(
            dim=self.dim,
            hidden=self.hidden,
            activation=self.activation,
            bias=self.bias,
            param_bytes=n_bytes,
            grad_bytes=n_bytes,
            token_element_bytes=n_bytes,
        )

    def windows(self, tokens_per_rank: float, flops_per_s: float) -> Windows:
        """Predict the compute of a block outside its experts.

        The rules: 2 FLOP per weight and token, causal attention, twice that backward.

        Args:
            tokens_per_rank: Of a microbatch.
            flops_per_s: FLOP/s of a rank.
        """
        # Scores and weighted values cost 4 x sequence x width; the causal half of it counts.
        width = self.heads * self.size_of_head if self.attention_dim is None else self.attention_dim
        forward_s = tokens_per_rank * (2.0 * self.met_by_every_token + 2.0 * self.sequence * width) / flops_per_s
        return Windows(fnec_s=forward_s, bnec_s=2.0 * forward_s)

    def with_options(self, given: Mapping[str, Any]) -> ModelSizes:
        """The same model with other sizes; unknown names are an error.

        What followed from a size that changes follows from the new one. As large a share of the layers has experts, and
        attention is that of four projections.

        Args:
            given: Sizes by name; None leaves a size as it is.
        """
        known = {f.name for f in fields(self)}
        if unknown := sorted(given.keys() - known):
            raise SpecError(f"{self.name}: no sizes of a model: {', '.join(unknown)}")
        new = {name: value for name, value in given.items() if value is not None and value != getattr(self, name)}
        assumed = []
        if "layers" in new and "moe_layers" not in new and self.moe_layers:
            new["moe_layers"] = max(1, round(new["layers"] * self.moe_layers / self.layers))
            assumed.append(f"experts in {new['moe_layers']} of {new['layers']} layers: as many in a hundred as before")
        if new.keys() & {"dim", "heads"}:
            # One option must not make the model contradict itself
            if "heads" in new and self.kv_heads and new["heads"] % self.kv_heads:
                new.setdefault("kv_heads", new["heads"])
                assumed.append(f"{new['kv_heads']} heads of keys and values: {self.kv_heads} do not divide the heads")
            # Its ranks were chosen for the old width, so they cannot be scaled.
            if self.attention_params is not None:
                new |= {"attention_params": None, "attention_dim": None}
                assumed.append("attention of four projections: its ranks are of other sizes")
        return replace(self, **new | {"assumed": (*new.get("assumed", self.assumed), *assumed)})
