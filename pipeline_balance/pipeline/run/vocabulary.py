"""What a rank does with its rows of a split vocabulary: its parts of every unit's embedding, loss and gradients.

The head's logits exist in blocks alone, and its gradients are there once all ranks' sums are: nothing of it waits for a
backward but the hidden states' gradient. Blocks are gone through once for the sums, and backwards for the gradients, so
that those begin with the block that is still there.

Shape legend: N tokens of a unit, H hidden size, V words, R rows of a rank, C rows of a block, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model.vocabulary import IGNORED, Vocabulary, rows_of
from prophet.errors import SpecError
from prophet.ranks.collective import Collective, Pending
from prophet.ranks.operation import Operation

# of a block's logits at most
BLOCK_BYTES = 32 << 20


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which logits are compared and gradients are summed."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class Sums:
    """A rank's part of a unit's loss.

    Attributes:
        hidden: [N, H] what the head gets.
        labels: [N] words, or `IGNORED`.
        figures: [3, N] maximum of the logits, sum of their exponentials less it, the label's logit; zero elsewhere.
    """

    hidden: Tensor
    labels: Tensor
    figures: Tensor


class Head:
    """This rank's rows of a head.

    Args:
        head: The module.
        block_bytes: Most bytes of logits that exist at once.
    """

    def __init__(self, head: nn.Linear, block_bytes: int = BLOCK_BYTES) -> None:
        self.head, self.block_bytes = head, block_bytes
        # the last block of the sums that were found last: exponentials less the maximum
        self._left: tuple[Sums, int, Tensor] | None = None

    def rest(self) -> None:
        """Let go of the block that was kept for gradients."""
        self._left = None

    def blocks(self, tokens: int) -> list[tuple[int, int]]:
        """First rows of the blocks of N = `tokens`, and those behind their last."""
        rows = self.head.weight.shape[0]
        each = max(1, self.block_bytes // max(1, tokens * wide(self.head.weight.dtype).itemsize))
        return [(start, min(start + each, rows)) for start in range(0, rows, each)]

    def sums(self, hidden: Tensor, labels: Tensor) -> Sums:
        """Find this rank's figures of a unit.

        Args:
            hidden: [N, H].
            labels: [N].
        """
        weight, first, n = self.head.weight, self._first, hidden.shape[0]
        target = torch.zeros(n, dtype=wide(weight.dtype), device=hidden.device)
        most, total = torch.full_like(target, -torch.inf), torch.zeros_like(target)
        found = Sums(hidden, labels, target)
        for start, stop in self.blocks(n):
            # let go of the block before
            self._left = None
            logits = self._logits(hidden, start, stop)
            at = labels - (first + start)
            here = (at >= 0) & (at < stop - start)
            target[here] = logits[here, at[here]]
            new = torch.maximum(most, logits.amax(dim=1))
            # where a vocabulary is padded, a block's logits may all be -inf
            base = new.masked_fill(new == -torch.inf, 0.0)
            # in place: there is one block at a time
            total = total * (most - base).exp() + logits.sub_(base[:, None]).exp_().sum(dim=1)
            most = new
            self._left = found, start, logits
            del logits
        found.figures = torch.stack([most, total, target])
        return found

    def gradients(
        self, sums: Sums, log_sum: Tensor, scale: float, weight_grad: Tensor | None, bias_grad: Tensor | None
    ) -> Tensor:
        """Add this rank's gradients of the sum of losses times `scale`.

        Args:
            sums: Of the unit.
            log_sum: [N] logarithm of the sum of all exponentials of all ranks.
            scale: What the loss is multiplied by.
            weight_grad: [R, H] what the weight's is added to (None: it does not train).
            bias_grad: [R], likewise.

        Returns:
            This rank's part of the hidden states' gradient [N, H].
        """
        hidden, labels, weight, first = sums.hidden, sums.labels, self.head.weight.detach(), self._first
        counts = (labels != IGNORED).to(log_sum.dtype) * scale
        found = torch.zeros(hidden.shape, dtype=log_sum.dtype, device=hidden.device)
        for start, stop in reversed(self.blocks(hidden.shape[0])):
            kept, self._left = self._left, None
            # other sums have taken its place
            kept = kept if kept is not None and kept[0] is sums and kept[1] == start else None
            if kept is not None:
                # exponentials less the maximum already
                shares = kept[2].mul_((sums.figures[0] - log_sum).exp()[:, None])
            else:
                shares = self._logits(hidden, start, stop).sub_(log_sum[:, None]).exp_()
            del kept
            at = labels - (first + start)
            here = (at >= 0) & (at < stop - start)
            shares[here, at[here]] -= 1.0
            shares *= counts[:, None]
            if bias_grad is not None:
                bias_grad[start:stop] += shares.sum(dim=0)
            # products in the weights' type, as autograd would take them
            shares = shares.to(weight.dtype)
            found += shares @ weight[start:stop]
            if weight_grad is not None:
                _add_product(weight_grad[start:stop], shares.T, hidden)
            del shares
        return found

    def _logits(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        bias = self.head.bias
        rows = self.head.weight.detach()[start:stop]
        logits = nn.functional.linear(hidden, rows, bias.detach()[start:stop] if bias is not None else None)
        return logits.to(wide(logits.dtype))

    @property
    def _first(self) -> int:
        rows = rows_of(self.head.weight)
        return rows.start if rows is not None else 0


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


@dataclass
class _Coming:
    """Tensors of the other ranks on their way here, by rank [P], this one's among them."""

    tensors: list[Tensor]
    pending: Pending

    def total(self) -> Tensor:
        """Their sum in the order of the ranks; waits for them."""
        self.pending.wait()
        first, *others = self.tensors
        found = first.clone()
        for tensor in others:
            found += tensor
        return found


@dataclass
class _Pass:
    """What one pass of a batch has under way, by unit.

    Attributes:
        embedded: What ranks have found of the embedding.
        sums: This rank's sums, and those of all.
        hidden: Parts of the hidden states' gradient.
        going: What was sent.
        grads: Gradients of this pass, in a type that sums keep their bits in.
    """

    embedded: dict[int, _Coming] = field(default_factory=dict)
    sums: dict[int, tuple[Sums, _Coming]] = field(default_factory=dict)
    hidden: dict[int, _Coming] = field(default_factory=dict)
    going: list[Pending] = field(default_factory=list)
    grads: dict[Tensor, Tensor] = field(default_factory=dict)


class VocabularyPasses:
    """This rank's parts in a pass of a batch.

    Args:
        vocabulary: What is split.
        collective: Returns the communicator of the replica's ranks, for this alone.
        first: The rank of the first stage.
        last: The rank of the last stage.
    """

    def __init__(self, vocabulary: Vocabulary, collective: Callable[[], Collective], first: int, last: int) -> None:
        self.vocabulary, self._collective, self.first, self.last = vocabulary, collective, first, last
        self.head = Head(vocabulary.head)
        self._now = _Pass()

    def begin(self) -> None:
        """A pass begins: forget what a failed one has left."""
        self._now = _Pass()
        self.head.rest()

    def finish(self) -> None:
        """Wait until all that was sent has left, and put gradients where optimizers read them."""
        for pending in self._now.going:
            pending.wait()
        for parameter, grad in self._now.grads.items():
            if parameter.grad is None:
                parameter.grad = grad.to(parameter.dtype)
            elif parameter.grad is not grad:
                parameter.grad = grad.add_(parameter.grad).to(parameter.dtype)
        self._now = _Pass()
        # an evaluation asks for no gradients
        self.head.rest()

    # --- messages --------------------------------------------------------------------------------------------------

    def _send(self, to: list[int], tensor: Tensor, op: Operation) -> None:
        if to:
            self._now.going = [pending for pending in self._now.going if not pending.ended()]
            self._now.going.append(self._collective().exchange([(rank, tensor) for rank in to], [], op=op))

    def _gather(self, mine: Tensor, op: Operation, *, send: bool = False) -> _Coming:
        """Begin to receive what is like `mine` from all others, and to send it to them."""
        collective = self._collective()
        tensors = [mine if r == collective.rank else torch.empty_like(mine) for r in range(collective.size)]
        others = [(r, t) for r, t in enumerate(tensors) if r != collective.rank]
        sends = [(r, mine) for r, _ in others] if send else []
        return _Coming(tensors, collective.exchange(sends, others, op=op))

    def _from(self, rank: int, tensor: Tensor | None, like: Tensor, op: Operation) -> Tensor:
        """Send `tensor` from `rank` to all others, which receive it; waits for it there."""
        collective = self._collective()
        if collective.rank == rank:
            assert tensor is not None
            self._send([r for r in range(collective.size) if r != rank], tensor, op)
            return tensor
        found = torch.empty(like.shape, dtype=like.dtype, device=self.vocabulary.head.weight.device)
        collective.exchange([], [(rank, found)], op=op).wait()
        return found

    # --- the embedding -----------------------------------------------------------------------------------------------

    def look_up(self, unit: int, ids: Tensor) -> None:
        """Look up a unit's tokens among this rank's rows (E).

        Args:
            unit: Its number.
            ids: [...] words.
        """
        weight = self.vocabulary.embedding.weight.detach()
        at, here = self._own(ids)
        found = nn.functional.embedding(at, weight).masked_fill_(~here[..., None], 0.0)
        op = Operation(f"embedding of {unit}")
        if self._collective().rank == self.first:
            self._now.embedded[unit] = self._gather(found, op)
        else:
            self._send([self.first], found, op)

    def _own(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of this rank, zero where the word is elsewhere, and where it is here."""
        weight = self.vocabulary.embedding.weight
        rows = rows_of(weight)
        whole = rows.whole if rows is not None else weight.shape[0]
        if bool(((ids < 0) | (ids >= whole)).any()):
            raise SpecError(f"inputs have a word outside 0 to {whole - 1}: {int(ids.min())} to {int(ids.max())}")
        at = ids - (rows.start if rows is not None else 0)
        here = (at >= 0) & (at < weight.shape[0])
        return at.where(here, 0), here

    def embedded(self, unit: int) -> Tensor:
        """The embedding of a unit on the first stage's rank; waits for all others."""
        found = self._now.embedded.pop(unit).total()
        return found.requires_grad_(self.vocabulary.embedding.weight.requires_grad and torch.is_grad_enabled())

    def add_embedding_gradient(self, unit: int, ids: Tensor, grad: Tensor | None, like: Tensor) -> None:
        """Add the embedding's gradient to this rank's rows (G).

        Args:
            unit: Its number.
            ids: [...] words.
            grad: [..., H] on the first stage's rank; None elsewhere.
            like: Its shape and type.
        """
        embedding = self.vocabulary.embedding
        if not embedding.weight.requires_grad:
            return
        grad = grad.contiguous() if grad is not None else None
        came = self._from(self.first, grad, like, Operation(f"gradient of the embedding of {unit}"))
        at, here = self._own(ids)
        if embedding.padding_idx is not None:
            here &= ids != embedding.padding_idx
        total = self._grad(embedding.weight)
        total.index_add_(0, at[here], came[here].to(total.dtype))

    # --- the head ----------------------------------------------------------------------------------------------------

    def add_up(self, unit: int, hidden: Tensor | None, labels: Tensor, like: Tensor) -> None:
        """Find this rank's sums of a unit, and begin to exchange them (S).

        Args:
            unit: Its number.
            hidden: [..., H] on the last stage's rank; None elsewhere.
            labels: [...] words, or `IGNORED`.
            like: The shape and type of `hidden`.
        """
        op = Operation(f"hidden states of {unit}")
        if hidden is not None and (hidden.shape, hidden.dtype) != (like.shape, like.dtype):
            got, planned = (f"{list(t.shape)} of {t.dtype}" for t in (hidden, like))
            raise SpecError(f"the head gets {got}, the ranks had agreed on {planned}")
        came = self._from(self.last, hidden.detach().contiguous() if hidden is not None else None, like, op)
        words = self.vocabulary.words
        # nobody has such a row, and the loss would be wrong in silence
        if bool(((labels != IGNORED) & ((labels < 0) | (labels >= words))).any()):
            raise SpecError(f"labels are outside 0 to {words - 1}: {int(labels.min())} to {int(labels.max())}")
        sums = self.head.sums(came.flatten(0, -2), labels.flatten())
        self._now.sums[unit] = sums, self._gather(sums.figures, Operation(f"sums of the head of {unit}"), send=True)

    def loss(self, unit: int, scale: float, *, training: bool) -> Tensor | None:
        """Find the gradients of a unit from all ranks' sums, and send those of the hidden states on (T).

        Args:
            unit: Its number.
            scale: What the sum of losses is multiplied by.
            training: Whether there are gradients.

        Returns:
            The sum of the losses on the last stage's rank; None elsewhere.
        """
        sums, coming = self._now.sums.pop(unit)
        coming.pending.wait()
        most, total, target = torch.stack(coming.tensors).unbind(dim=1)
        log_sum = (most + total.log()).logsumexp(dim=0)
        weight, bias = self.vocabulary.head.weight, self.vocabulary.head.bias
        if training:
            of_bias = self._grad(bias) if bias is not None and bias.requires_grad else None
            of_weight = self._grad(weight) if weight.requires_grad else None
            part = self.head.gradients(sums, log_sum, scale, of_weight, of_bias)
            op = Operation(f"gradient of the hidden states of {unit}")
            if self._collective().rank == self.last:
                self._now.hidden[unit] = self._gather(part, op)
            else:
                self._send([self.last], part, op)
        if self._collective().rank != self.last:
            return None
        return (log_sum - target.sum(dim=0))[sums.labels != IGNORED].sum()

    def hidden_gradient(self, unit: int, like: Tensor) -> Tensor:
        """The gradient of a unit's hidden states on the last stage's rank; waits for all others.

        Args:
            unit: Its number.
            like: The hidden states.
        """
        return self._now.hidden.pop(unit).total().to(like.dtype).view(like.shape)

    def _grad(self, parameter: Tensor) -> Tensor:
        """What this pass adds a parameter's gradients to."""
        if parameter not in self._now.grads:
            like, grad = wide(parameter.dtype), parameter.grad
            # a second buffer only where sums would lose bits in the first
            if grad is None or grad.dtype != like:
                grad = torch.zeros(parameter.shape, dtype=like, device=parameter.device)
            self._now.grads[parameter] = grad
        return self._now.grads[parameter]
