"""Router losses of mixtures of experts over stages: each layer adds its sums, the last stage computes the loss.

transformers' router loss is a product of two means over the rows of all layers, so it is no sum over layers. Both means
come from sums that are, and these travel beside the hidden states: `[choices per expert, probabilities per expert,
rows]`, float32 [2 E + 1]. Legend: E experts, N rows of a microbatch (tokens), K choices per row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from prophet.errors import SpecError

_THEIRS = "load_balancing_loss_func"
TheirLoss = Callable[..., Tensor]


def router_sums(logits_NE: Tensor, top_k: int, mask_N: Tensor | None) -> Tensor:
    """Sum what one layer adds: choices and probabilities per expert over rows, and the rows, float32 [2 E + 1].

    Gradients flow through the probabilities.

    Args:
        logits_NE: Router logits [N, E].
        top_k: K experts that a row chooses.
        mask_N: Weights of the rows, 0 for padding (None: all rows count).
    """
    # in the logits' precision, as transformers' function does it
    probabilities = logits_NE.softmax(dim=-1)
    chosen = probabilities.topk(top_k, dim=-1).indices
    weight_N = torch.ones_like(logits_NE[:, 0], dtype=torch.float32) if mask_N is None else mask_N
    counts = torch.zeros(logits_NE.shape[-1], dtype=torch.float32, device=logits_NE.device)
    # the same as the sum over a one-hot mask, without a tensor [N, K, E]
    counts = counts.scatter_add(0, chosen.reshape(-1), weight_N.repeat_interleave(top_k))
    summed = probabilities.float() if mask_N is None else probabilities.float() * weight_N.unsqueeze(-1)
    return torch.cat([counts, summed.sum(dim=0), weight_N.sum().reshape(1)])


def loss_of_sums(sums: Tensor) -> Tensor:
    """The load-balancing loss of sums over all layers, a scalar (Fedus et al. 2021, Equations 4 to 6)."""
    experts = (sums.numel() - 1) // 2
    counts, probabilities, rows = sums[:experts], sums[experts:-1], sums[-1]
    return experts * (counts / rows * (probabilities / rows)).sum()


@dataclass(frozen=True)
class RouterLoss:
    """The router loss of one model: what layers add to it, and how the model's own forward gets it back.

    Attributes:
        experts: E.
        top_k: K.
        gates: [layers] of (gate, place of the logits in what it returns).
        home: Names that the model's forward reads, the loss function's among them.
    """

    experts: int
    top_k: int
    gates: tuple[tuple[tuple[nn.Module, int], ...], ...]
    home: dict[str, Any]

    @property
    def numbers(self) -> int:
        """Length of the tensor that travels."""
        return 2 * self.experts + 1

    def first(self) -> int:
        """The first layer that has a router."""
        return next(i for i, found in enumerate(self.gates) if found)

    @contextmanager
    def recording(self, layer: int, found: list[Tensor]) -> Iterator[None]:
        """Within, the logits [N, E] of this layer's gates are appended to `found`."""
        handles: list[RemovableHandle] = []

        def note(index: int) -> Callable[[nn.Module, Any, Any], None]:
            return lambda module, args, out: found.append(out[index] if isinstance(out, tuple) else out)

        try:
            handles += [gate.register_forward_hook(note(index)) for gate, index in self.gates[layer]]
            yield
        finally:
            for handle in handles:
                handle.remove()

    def add(self, sums: Tensor | None, logits: list[Tensor], attention_mask: Tensor | None) -> Tensor | None:
        """Add a layer's sums to those of the layers before it.

        Args:
            sums: Those of the layers before, float32 [2 E + 1]; None in front of the first router.
            logits: [N, E] of each of the layer's gates.
            attention_mask: 0 for padding, N elements in any shape; None where all rows count.
        """
        for logits_NE in logits:
            mask_N = None if attention_mask is None else attention_mask.reshape(-1).to(logits_NE.device, torch.float32)
            mine = router_sums(logits_NE, self.top_k, mask_N)
            sums = mine if sums is None else sums + mine
        return sums

    @contextmanager
    def given(self, sums: Tensor, mask: Tensor | None) -> Iterator[None]:
        """Within, the model's own forward finds the loss of `sums` where it would compute it from all routers."""
        theirs, asked = self.home[_THEIRS], 0

        def ours(logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Any = None) -> Tensor:
            nonlocal asked
            asked += 1
            if (num_experts, top_k) != (self.experts, self.top_k) or attention_mask is not mask:
                raise SpecError("the model computes its router loss from other experts, choices or masks than it names")
            return loss_of_sums(sums)

        # the forward looks its loss function up by name, so the model itself stays as it is
        self.home[_THEIRS] = ours
        try:
            yield
        finally:
            self.home[_THEIRS] = theirs
        # a forward that computes it twice, or not at all, has another loss than the one that was checked
        if asked != 1:
            raise SpecError(f"the model computes its router loss {asked} times in a forward, expected once")


def find_router_loss(model: nn.Module, layers: nn.Module) -> RouterLoss | None:
    """The router loss that `model` adds to its own, None if it adds none.

    Raises `SpecError` by name if `config.output_router_logits` asks for one that cannot be carried as sums.
    """
    # PEFT wraps the model that has the loss
    base: Any = getattr(model, "get_base_model", None)
    owner: nn.Module = model if base is None else base()
    if not getattr(getattr(owner, "config", None), "output_router_logits", False):
        return None
    name = type(owner).__name__
    advice = "set config.output_router_logits = False to train without it"
    home = getattr(inspect.unwrap(type(owner).forward), "__globals__", {})
    theirs = home.get(_THEIRS)
    experts, top_k = (getattr(owner, n, None) for n in ("num_experts", "num_experts_per_tok"))
    if theirs is None or not isinstance(experts, int) or not isinstance(top_k, int):
        raise SpecError(f"{name} has a router loss that is not transformers' {_THEIRS}; {advice}")
    gates = tuple(_gates_in(owner, layer) for layer in layers.children())
    if not any(gates):
        raise SpecError(f"{name} does not say which modules give its router logits (_can_record_outputs); {advice}")
    if not _same_loss(theirs, experts, top_k):
        raise SpecError(f"{name}'s {_THEIRS} is not the one that stages can carry as sums; {advice}")
    return RouterLoss(experts, top_k, gates, home)


def _gates_in(owner: nn.Module, layer: nn.Module) -> tuple[tuple[nn.Module, int], ...]:
    """A layer's gates, each with the place of its logits, as the model declares them for its own recording."""
    declared = (getattr(owner, "_can_record_outputs", None) or {}).get("router_logits", ())
    found = []
    for spec in declared if isinstance(declared, list | tuple) else (declared,):
        # a bare class means its second output, as transformers reads it; an `OutputRecorder` names the place
        kind = spec if isinstance(spec, type) else getattr(spec, "target_class", None)
        place = 1 if isinstance(spec, type) else getattr(spec, "index", 0)
        if kind is not None:
            found += [(m, place) for m in layer.modules() if isinstance(m, kind)]
    return tuple(found)


def _same_loss(theirs: TheirLoss, experts: int, top_k: int) -> bool:
    """Whether the model's function gives what the sums give, with and without a mask, on two made-up layers."""
    generator = torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(12, experts, generator=generator) for _ in range(2))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]])
    for given in (None, mask):
        rows = None if given is None else given.reshape(-1).float()
        ours = loss_of_sums(router_sums(layers[0], top_k, rows) + router_sums(layers[1], top_k, rows))
        try:
            want = theirs(layers, experts, top_k, given)
        except Exception:
            # another signature is another loss
            return False
        if not isinstance(want, Tensor) or not torch.allclose(ours, want, rtol=1e-5, atol=1e-6):
            return False
    return True
