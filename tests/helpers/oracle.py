"""The definition of a mixture-of-experts model, written straight from the formulas and in no hurry.

Every expert is applied to every token and weighted by the gate's combine matrix, which is zero where a token
does not
visit an expert. Nothing is imported from the library: agreement with this file is evidence.

Shape legend: N tokens of all ranks, D model dim, H hidden dim, O output dim, E experts, K top-k,
V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Params = dict[str, Tensor]
# the library's: with others, other experts would be chosen
SINKHORN_ROUNDS, SINKHORN_DAMPED = 12, 0.999


@dataclass(frozen=True, kw_only=True)
class OracleConfig:
    """What the formulas need to know of a `TinyModel`."""

    blocks: int = 2
    num_experts: int = 8
    top_k: int = 2
    activation: str = "gelu"
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    aux_loss: str = "none"
    aux_loss_weight: float = 0.01
    z_loss_weight: float = 0.0
    assignment: str = "top_k"
    capacity_factor: float | None = None
    residual_uses: int = 1


def _sigmoid(h: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-h))


def _positive(h: Tensor) -> Tensor:
    return torch.where(h > 0, h, torch.zeros_like(h))


def _bounded(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    gate = torch.where(gate > limit, torch.full_like(gate, limit), gate)
    return gate, torch.where(up.abs() > limit, limit * torch.sign(up).detach(), up)


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = _bounded(gate, up, 7.0)
    return gate * _sigmoid(1.702 * gate) * (up + 1)


PLAIN = {
    "identity": lambda h: h,
    "relu": _positive,
    "relu2": lambda h: _positive(h) ** 2,
    "gelu": lambda h: h * 0.5 * (1 + torch.erf(h / math.sqrt(2.0))),
    "gelu_tanh": lambda h: h * 0.5 * (1 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * h**3))),
    "silu": lambda h: h * _sigmoid(h),
    "quick_gelu": lambda h: h * _sigmoid(1.702 * h),
}
GATED = {
    "reglu": lambda gate, up: PLAIN["relu"](gate) * up,
    "geglu": lambda gate, up: PLAIN["gelu"](gate) * up,
    "geglu_tanh": lambda gate, up: PLAIN["gelu_tanh"](gate) * up,
    "swiglu": lambda gate, up: PLAIN["silu"](gate) * up,
    "quick_geglu": lambda gate, up: PLAIN["quick_gelu"](gate) * up,
    "swiglu_clamped": _clamped,
}
# gated ones with options, beside "swiglu_clamped"; at these limits no test's values round across a bound
LIMITED = ("swiglu(limit=10)", "swiglu(limit=0.5, plus_one)", "quick_geglu(limit=3)", "quick_geglu(plus_one)")


def activate(h: Tensor, activation: str) -> Tensor:
    """The activation of pre-activations `h` [N, H], or [N, 2H] with the gate in front.

    activation: also with a limit or with 1 added, as "swiglu(limit=10, plus_one)".
    """
    if activation in PLAIN:
        return PLAIN[activation](h)
    half = h.shape[1] // 2
    gate, up = h[:, :half], h[:, half:]
    name, _, options = activation.partition("(")
    for limit in re.findall(r"limit=([^,)]+)", options):
        gate, up = _bounded(gate, up, float(limit))
    return GATED[name](gate, up + 1 if "plus_one" in options else up)


def expert(x: Tensor, p: Params, name: str, e: int, activation: str) -> Tensor:
    """f_e(x) [N, O] for all rows of `x` [N, D]."""
    h = x @ p[f"{name}.experts.w_in.{e}"].T
    if f"{name}.experts.bias_in.{e}" in p:
        h = h + p[f"{name}.experts.bias_in.{e}"]
    y = activate(h, activation) @ p[f"{name}.experts.w_out.{e}"].T
    if f"{name}.experts.bias_out.{e}" in p:
        y = y + p[f"{name}.experts.bias_out.{e}"]
    return y


def _order(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda e: -values[e])


def within_capacity(ids: list[list[int]], rank_of: Sequence[int], c: OracleConfig) -> list[list[bool]]:
    """Which choices are kept: per rank and expert, first choices first, earlier tokens first."""
    kept = [[True] * c.top_k for _ in ids]
    if c.capacity_factor is None:
        return kept
    for rank in set(rank_of):
        mine = [n for n, r in enumerate(rank_of) if r == rank]
        room = math.ceil(c.capacity_factor * len(mine) * c.top_k / c.num_experts)
        used = [0] * c.num_experts
        for k in range(c.top_k):
            for n in mine:
                kept[n][k] = used[ids[n][k]] < room
                used[ids[n][k]] += 1
    return kept


def transport(logits: Tensor, rounds: int, damped: float = 1.0) -> Tensor:
    """The shares [N, E] of Sinkhorn's algorithm: rows of exp(logits) scaled to 1, then columns to N / E, in turns."""
    tokens, experts = logits.shape
    kernel = torch.exp(logits)
    row, column = torch.ones(tokens, dtype=logits.dtype), torch.ones(experts, dtype=logits.dtype)
    for _ in range(rounds):
        row = 1 / (kernel @ column)
        column = tokens / experts / (row @ kernel)
    return row[:, None] * kernel * column**damped


def _shares(logits: Tensor, rank_of: Sequence[int]) -> Tensor:
    """What tokens are assigned by, [N, E]: every rank's tokens among themselves."""
    shares = torch.zeros_like(logits)
    for rank in set(rank_of):
        mine = [n for n, r in enumerate(rank_of) if r == rank]
        most = logits[mine].max(dim=1, keepdim=True).values
        shares[mine] = transport(logits[mine] - most, SINKHORN_ROUNDS, SINKHORN_DAMPED)
    return shares


def moe(x: Tensor, p: Params, name: str, c: OracleConfig, rank_of: Sequence[int]) -> tuple[Tensor, Tensor, int]:
    """One layer on the tokens of all ranks: output [N, O], auxiliary loss (scalar), dropped choices."""
    tokens = x.shape[0]
    logits = x @ p[f"{name}.gate.weight"].T
    if c.score == "softmax":
        scores = torch.exp(logits - logits.max(dim=1, keepdim=True).values)
        scores = scores / scores.sum(dim=1, keepdim=True)
        probs = scores
    else:
        scores = 1 / (1 + torch.exp(-logits))
        probs = scores / scores.sum(dim=1, keepdim=True)
    preference = scores.detach() + p.get(f"{name}.gate.bias", torch.zeros(c.num_experts, dtype=x.dtype))
    if c.assignment == "sinkhorn":
        preference = _shares(logits.detach(), rank_of)
    ids = [_order(preference[n].tolist())[: c.top_k] for n in range(tokens)]
    kept = within_capacity(ids, rank_of, c)

    chosen = torch.zeros(tokens, c.num_experts, dtype=x.dtype)
    sent = torch.zeros(tokens, c.num_experts, dtype=x.dtype)
    first = torch.zeros(c.num_experts, dtype=x.dtype)
    for n in range(tokens):
        first[ids[n][0]] += 1
        for k in range(c.top_k):
            chosen[n, ids[n][k]] = 1
            sent[n, ids[n][k]] = float(kept[n][k])
    combine = scores * chosen
    if c.normalize:
        combine = combine / combine.sum(dim=1, keepdim=True)
    combine = combine * sent * c.scale
    y = torch.zeros(tokens, p[f"{name}.experts.w_out.0"].shape[0], dtype=x.dtype)
    for e in range(c.num_experts):
        y = y + combine[:, e : e + 1] * expert(x, p, name, e, c.activation)

    aux = torch.zeros((), dtype=x.dtype)
    if c.aux_loss != "none" and tokens:
        counts = chosen.sum(dim=0) if c.aux_loss == "switch" else first
        fraction = counts / counts.sum()
        aux = aux + c.aux_loss_weight * c.num_experts * (fraction * probs.mean(dim=0)).sum()
    if c.z_loss_weight and tokens:
        most = logits.detach().max(dim=1, keepdim=True).values  # some random models diverge
        log_sum = torch.log(torch.exp(logits - most).sum(dim=1)) + most.squeeze(1)
        aux = aux + c.z_loss_weight * log_sum.square().mean()
    return y, aux, int((chosen - sent).sum().item())


def tiny_model(p: Params, ids: Tensor, c: OracleConfig, rank_of: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
    """Logits [N, V], auxiliary loss and dropped choices by layer, of the tests' model on token `ids` [N]."""
    x = p["embed.weight"][ids]
    aux = torch.zeros((), dtype=x.dtype)
    dropped = []
    for b in range(c.blocks):
        x = x + torch.tanh(x @ p[f"mixes.{b}.weight"].T + p[f"mixes.{b}.bias"])
        for _ in range(c.residual_uses):
            y, extra, lost = moe(x, p, f"moes.{b}", c, rank_of)
            width = min(x.shape[1], y.shape[1])  # an output of another size is added as far as it goes
            x = torch.cat([x[:, :width] + y[:, :width], x[:, width:]], dim=1)
            aux = aux + extra
            dropped.append(lost)
    return x @ p["head.weight"].T + p["head.bias"], aux, dropped


def loss_of(p: Params, ids_by_rank: Sequence[Tensor], c: OracleConfig, scale: float) -> Tensor:
    """Mean over ranks of the summed next-id losses times `scale`, plus the auxiliary losses of the whole
    batch.

    A token's target is the id that follows it on its rank, in a circle.
    """
    ids = torch.cat([i.reshape(-1) for i in ids_by_rank])
    targets = torch.cat([i.reshape(-1).roll(-1) for i in ids_by_rank])
    rank_of = [r for r, i in enumerate(ids_by_rank) for _ in range(i.numel())]
    logits, aux, _ = tiny_model(p, ids, c, rank_of)
    shifted = logits - logits.detach().amax(dim=1, keepdim=True) if logits.numel() else logits
    log_probs = shifted - torch.log(torch.exp(shifted).sum(dim=1, keepdim=True))
    nll = -log_probs[torch.arange(ids.numel()), targets].sum()
    return nll * scale / len(ids_by_rank) + aux


def gradients(
    state: Params, microbatches: Sequence[Sequence[Tensor]], c: OracleConfig, scale: float
) -> tuple[Tensor, Params]:
    """Loss summed over `microbatches` (each a list of ids by rank), and its gradient for every parameter."""
    p = {k: v.detach().clone() for k, v in state.items()}
    learned = [k for k in p if not k.endswith("gate.bias")]
    for k in learned:
        p[k].requires_grad_()
    total = sum((loss_of(p, m, c, scale) for m in microbatches), start=torch.zeros((), dtype=torch.float64))
    grads = torch.autograd.grad(total, [p[k] for k in learned], allow_unused=True)
    return total.detach(), {k: torch.zeros_like(p[k]) if g is None else g for k, g in zip(learned, grads, strict=True)}
