"""A vocabulary split over the ranks of a pipeline: which parameters are cut into rows, and what models may have it.

Every rank keeps the same `Parameter` objects as without the split. Of the embedding's and the head's it holds some
rows, and a mark on the parameter says which of how many.

Shape legend: V words, P ranks, H hidden size, B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prophet.errors import SpecError
from prophet.state.layout import slice_box

IGNORED = -100
_MARK = "vocabulary_rows"
# logits on which another loss than the plain one shows: large, so that soft caps and scales count
_TRIED_LOGITS = 20.0
_CLOSE = 1e-4


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of a parameter this rank holds: `start` to `stop` of `whole`."""

    start: int
    stop: int
    whole: int


def rows_of(tensor: Tensor) -> Rows | None:
    """The rows that this rank holds of a parameter; None: it is not split."""
    found: Rows | None = getattr(tensor, _MARK, None)
    return found


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """A tensor's shape in the unsplit model."""
    rows = rows_of(tensor)
    return tuple(tensor.shape) if rows is None else (rows.whole, *tensor.shape[1:])


class Vocabulary:
    """The embedding and the head of a model, of which every rank of a pipeline has some rows.

    Args:
        embedding: The model's first module, a plain `nn.Embedding`.
        head: Its last one, a plain `nn.Linear`.

    Raises:
        SpecError: They are others, or do more than look up and multiply.
    """

    def __init__(self, embedding: object, head: object) -> None:
        # exactly these classes: another forward than theirs would be left out in silence
        if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
            got = f"{type(embedding).__name__} and {type(head).__name__}"
            raise SpecError(
                f"split_vocabulary needs an nn.Embedding in front of the layers and an nn.Linear behind them, got {got}"
            )
        wrong = [n for n in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(embedding, n)]
        if wrong:
            raise SpecError(f"split_vocabulary does not go together with an embedding that has {wrong[0]}")
        hooked = [m for m in (embedding, head) if m._forward_hooks or m._forward_pre_hooks]
        if hooked:
            raise SpecError(f"split_vocabulary runs no hooks: remove those of the {type(hooked[0]).__name__}")
        self.embedding, self.head = embedding, head

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is cut into rows; a tied weight comes once."""
        every = (*self.embedding.parameters(), *self.head.parameters())
        return list(dict.fromkeys(every))

    @property
    def words(self) -> int:
        """V, of the head."""
        return whole_shape(self.head.weight)[0]

    def embedded_like(self, ids: Tensor) -> Tensor:
        """What the embedding finds for words, without memory."""
        weight = self.embedding.weight
        found = torch.empty((*ids.shape, weight.shape[1]), dtype=weight.dtype, device="meta")
        return found.requires_grad_(weight.requires_grad and torch.is_grad_enabled())

    def check(self, ranks: int) -> None:
        """Raise `SpecError` unless every one of `ranks` gets a row of each parameter."""
        words = min(whole_shape(p)[0] for p in self.parameters)
        if words < ranks:
            raise SpecError(f"split_vocabulary: a vocabulary of {words} words cannot be split over {ranks} ranks")

    def check_autocast(self, device: torch.device) -> None:
        """Raise `SpecError` under autocast, where no rank would know the type of what another one sends."""
        if torch.is_autocast_enabled(device.type):
            raise SpecError("split_vocabulary does not run under autocast: give the model the type to compute in")

    def rows_on(self, rank: int, ranks: int) -> list[tuple[nn.Parameter, Rows]]:
        """What a rank is to hold of each parameter.

        Args:
            rank: The pipeline rank.
            ranks: P.
        """
        found = []
        for p in self.parameters:
            box = slice_box(whole_shape(p), 0, ranks, rank)
            found.append((p, Rows(box.start[0], box.stop[0], whole_shape(p)[0])))
        return found


def mark(parameter: nn.Parameter, rows: Rows) -> None:
    """Note which rows of a parameter are here."""
    setattr(parameter, _MARK, rows)


def unsplit(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those that no vocabulary splits."""
    return [p for p in parameters if rows_of(p) is None]


def check_plain(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    logits: Tensor,
    labels: Tensor,
    name: str,
    wanted: Tensor | None = None,
) -> None:
    """Raise `SpecError` unless a loss is the mean cross entropy of logits.

    Args:
        loss_of: The loss of logits [..., V] and labels, tried on made-up ones.
        logits: Their shape and type, without memory; [..., V].
        labels: As the loss takes them, on the device where it runs.
        wanted: Labels of the logits, if these are others.
        name: What the error calls it.
    """
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(logits.shape, generator=generator, dtype=torch.float32) * _TRIED_LOGITS
    made = made.to(labels.device, logits.dtype)
    try:
        found = loss_of(made, labels)
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(f"split_vocabulary cannot try the loss of {name}: {str(error)[:200]}") from error
    of_logits = (labels if wanted is None else wanted).flatten()
    plain = F.cross_entropy(made.flatten(0, -2).double(), of_logits, ignore_index=IGNORED)
    if found.numel() != 1 or not torch.isclose(found.double().reshape(()), plain, rtol=_CLOSE):
        raise SpecError(
            f"split_vocabulary needs the plain cross entropy of the head's logits, the loss of {name} is another one"
        )


def made_up_labels(shape: Sequence[int], words: int, device: torch.device) -> Tensor:
    """Labels of some tokens, a third of which do not count.

    Args:
        shape: Of the labels.
        words: V.
        device: Where they are to be.
    """
    found = torch.randint(words, tuple(shape), generator=torch.Generator().manual_seed(1))
    found.view(-1)[1::3] = IGNORED
    return found.to(device)
