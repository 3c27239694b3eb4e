"""A vocabulary split over the ranks of a pipeline: which parameters are cut into rows, and what models may have it.

Every rank keeps the same `Parameter` objects as without the split. Of the embedding's and the head's it holds some
rows, and a mark on the parameter says which of how many.

Shape legend: V words, P ranks, H hidden size, B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prophet.errors import SpecError
from prophet.state.layout import slice_box

IGNORED = -100
_MARK = "vocabulary_rows"
# kinds of hooks, of modules and of parameters
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# optimizers whose update of a row depends on other rows
_OF_MATRICES = {"Adafactor", "Muon", "Shampoo", "SOAP", "Lamb", "LAMB", "LARS"}
# how many batches of labels a loss is tried on
_TRIALS = 16
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
        check_classes(embedding, head)
        assert isinstance(embedding, nn.Embedding)
        assert isinstance(head, nn.Linear)
        self.embedding, self.head = embedding, head
        self._made = [dict(module._parameters) for module in (embedding, head)]
        self._paths: list[tuple[str, nn.Module]] = []
        self.check_modules()

    def check_modules(self) -> None:
        """Raise `SpecError` where the modules do more by now than look up and multiply, or have other parameters."""
        check_classes(self.embedding, self.head)
        wrong = [n for n in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(self.embedding, n)]
        if wrong:
            raise SpecError(f"split_vocabulary does not go together with an embedding that has {wrong[0]}")
        for module, made in zip((self.embedding, self.head), self._made, strict=True):
            name = type(module).__name__
            now = module._parameters
            same = now.keys() == made.keys() and all(now[n] is made[n] for n in made)
            if not same or module._buffers or module._modules or "forward" in vars(module):
                raise SpecError(f"the {name} was changed, and split_vocabulary runs it by its rows: change it before")
            hooks = [hook for kind in _HOOKS for hook in getattr(module, kind).values()]
            every = [getattr(p, kind) for p in now.values() if p is not None for kind in _PARAMETER_HOOKS]
            hooks += [hook for kind in every if kind for hook in kind.values()]
            if not all(_marks_only(hook) for hook in hooks):
                raise SpecError(f"split_vocabulary runs no hooks: remove those of the {name} and its parameters")

    def look(self, root: nn.Module) -> None:
        """Raise `SpecError` where the modules of the unsplit model do something else by now, or were replaced."""
        self.check_modules()
        mine = {id(self.embedding), id(self.head)}
        if not self._paths:
            self._paths = [(path, m) for path, m in root.named_modules(remove_duplicate=False) if id(m) in mine]
        for path, module in self._paths:
            parent, _, attribute = path.rpartition(".")
            if _child(root, parent, attribute) is not module:
                raise SpecError(f"{path} was replaced, and split_vocabulary has split its rows: replace it before")

    def check_behind(self, root: nn.Module) -> None:
        """Raise `SpecError` where a hook would run behind the head, at which the forward of `root` ends."""
        for path in (path for path, module in self._paths if module is self.head):
            names = path.split(".")
            for above in (".".join(names[:n]) for n in range(len(names))):
                if root.get_submodule(above)._forward_hooks:
                    raise SpecError(
                        "split_vocabulary ends the forward at the head: remove the forward hooks of "
                        f"{above or 'the model'}, which would not run"
                    )

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
        return torch.empty((*ids.shape, weight.shape[1]), dtype=weight.dtype, device="meta")

    def check(self, ranks: int) -> None:
        """Raise `SpecError` unless every one of `ranks` gets a row of each parameter."""
        words = min(whole_shape(p)[0] for p in self.parameters)
        if words < ranks:
            raise SpecError(f"split_vocabulary: a vocabulary of {words} words cannot be split over {ranks} ranks")

    def check_optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Raise `SpecError` for an optimizer that computes with whole matrices, of which it would see rows.

        Args:
            optimizers: Those that update the model.
        """
        mine = {id(p) for p in self.parameters}
        for optimizer in optimizers:
            every = (p for group in optimizer.param_groups for p in group["params"])
            # by their names, as other packages have them too
            if any(kind.__name__ in _OF_MATRICES for kind in type(optimizer).__mro__) and any(
                id(p) in mine for p in every
            ):
                name = type(optimizer).__name__
                raise SpecError(f"{name} computes with whole matrices, and split_vocabulary would show it rows of them")

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


def check_classes(embedding: object, head: object) -> None:
    """Raise `SpecError` unless these are a plain `nn.Embedding` and a plain `nn.Linear`."""
    # exactly these classes: another forward than theirs would be left out in silence
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        got = f"{type(embedding).__name__} and {type(head).__name__}"
        raise SpecError(
            f"split_vocabulary needs an nn.Embedding in front of the layers and an nn.Linear behind them, got {got}"
        )


def _marks_only(hook: Any) -> bool:
    """Whether a hook is the one by which transformers has the embedding's output require grad, as it does here."""
    names = getattr(hook, "__name__", ""), getattr(hook, "__module__", "")
    return names == ("make_inputs_require_grads", "transformers.modeling_utils")


def _child(root: nn.Module, parent: str, attribute: str) -> nn.Module | None:
    try:
        return root.get_submodule(parent)._modules.get(attribute)
    except AttributeError:
        return None


def check_plain(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    logits: Tensor,
    labels: Iterable[Tensor],
    name: str,
    wanted: Callable[[Tensor], Tensor] = lambda labels: labels,
) -> None:
    """Raise `SpecError` unless a loss is the mean cross entropy of logits.

    Args:
        loss_of: The loss of logits [..., V] and labels, tried on made-up ones.
        logits: Their shape and type, without memory; [..., V].
        labels: All that it is tried on, as the loss takes them, on the device where it runs.
        name: What the error calls it.
        wanted: From labels to those of the logits.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(logits.shape, generator=generator, dtype=torch.float32) * _TRIED_LOGITS
    for tried in labels:
        made = drawn.to(tried.device, logits.dtype)
        try:
            # a copy, as a loss may change its logits
            found = loss_of(made.clone(), tried)
        except SpecError:
            raise
        except Exception as error:
            raise SpecError(f"split_vocabulary cannot try the loss of {name}: {str(error)[:200]}") from error
        of_logits = wanted(tried).flatten()
        plain = F.cross_entropy(made.flatten(0, -2).double(), of_logits, ignore_index=IGNORED)
        if found.numel() != 1 or not torch.isclose(found.double().reshape(()), plain, rtol=_CLOSE):
            raise SpecError(not_plain(name))


def not_plain(name: str) -> str:
    """What is said of a loss that is another one."""
    return f"split_vocabulary needs the plain cross entropy of the head's logits, the loss of {name} is another one"


def made_up_labels(
    shape: Sequence[int], words: int, device: torch.device, first: Sequence[int] = ()
) -> Iterator[Tensor]:
    """Labels of some tokens, a third of which do not count; all words that there is time for come up.

    Args:
        shape: Of the labels.
        words: V.
        device: Where they are to be.
        first: Words that losses may treat apart, such as that of padding.
    """
    order = torch.randperm(words, generator=torch.Generator().manual_seed(1))
    known = torch.tensor([word for word in first if 0 <= word < words], dtype=order.dtype)
    order = torch.cat([known, order])
    found = torch.full(tuple(shape), IGNORED).view(-1)
    counts = [i for i in range(len(found)) if i % 3 != 1]
    for start in range(0, min(len(order), _TRIALS * len(counts)), len(counts)):
        # the first token of a row may have no label, so they go around
        places = torch.tensor(counts).roll(start)
        found[places] = order[(start + torch.arange(len(counts))) % len(order)]
        yield found.clone().view(tuple(shape)).to(device)
