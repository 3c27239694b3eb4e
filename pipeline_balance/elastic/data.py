"""Global batches, and one global position: how many samples the job has consumed, whatever its layout.

A batch is of the whole job. Every layout cuts the same batches, so a switch neither repeats nor skips a sample. Loaders
that keep a position per rank cannot promise that: loaded at another size they do both.

Shape legend: B rows of a global batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, default_collate

from prophet.errors import SpecError


class GlobalBatches(ABC):
    """Batches of `(inputs, labels)`, each of the whole job; `position` counts the samples consumed so far."""

    position: int = 0

    @abstractmethod
    def rows(self) -> int:
        """B, the rows of the next batch."""

    @abstractmethod
    def read(self, first: int, last: int) -> tuple[Any, Any]:
        """Inputs and labels of rows first .. last-1 of the next batch."""

    @abstractmethod
    def advance(self) -> None:
        """Go on to the next batch: this one has been used."""

    def reach(self, position: int) -> Callable[[], None]:
        """What goes to the batch that begins at `position` when it is called, and cannot fail then.

        Raises:
            SpecError: If there is no such batch.
        """

        def go() -> None:
            self.position = position

        return go


class Batches(GlobalBatches):
    """Batches of B samples of a map-style dataset.

    A rest of fewer than B samples is left out. Each process reads the samples of its microbatches alone. Set
    `position` to go on from a saved one.

    Args:
        dataset: Its items are `(inputs, labels)`.
        batch_size: B.
        shuffle: Every epoch has another order, by `seed`.
        seed: Equal on all processes.
    """

    def __init__(self, dataset: Dataset[Any], batch_size: int, *, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self._samples = len(dataset)  # type: ignore[arg-type]
        if not 1 <= batch_size <= self._samples:
            raise SpecError(f"batch_size must be from 1 to the dataset's {self._samples} samples, got {batch_size}")
        # the epoch, and the samples in its order; made anew when the epoch changes
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    def rows(self) -> int:
        return self.batch_size

    def read(self, first: int, last: int) -> tuple[Any, Any]:
        chosen = [self._sample(self.position + row) for row in range(first, last)]
        inputs, labels = default_collate([self.dataset[i] for i in chosen])
        return inputs, labels

    def _sample(self, position: int) -> int:
        """The sample's number in the dataset.

        A batch that begins where another batch size has ended one may reach into two epochs.
        """
        # an epoch has whole batches only
        epoch, at = divmod(position, self._samples // self.batch_size * self.batch_size)
        if self._order[0] != epoch:
            # by epoch, so that any position is found without going through the epochs before
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            found = torch.randperm(self._samples, generator=generator) if self.shuffle else torch.arange(self._samples)
            self._order = epoch, found
        return int(self._order[1][at])

    def advance(self) -> None:
        self.position += self.batch_size


class Stream(GlobalBatches):
    """Batches as an iterable gives them, the same on every process, such as a DataLoader with a fixed seed.

    It is begun anew where it ends, and to go to another position: it must then give the same batches again.

    Args:
        batches: Gives `(inputs, labels)`.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        self._iterator: Iterator[Any] | None = None
        self._next: tuple[Any, Any] | None = None

    def _peek(self) -> tuple[Any, Any]:
        # the second turn begins the iterable anew; if that is empty, too, there is no data
        for _ in range(2):
            if self._next is None:
                self._iterator = self._iterator if self._iterator is not None else iter(self.batches)
                found = next(self._iterator, None)
                if found is None:
                    self._iterator = None
                    continue
                if not isinstance(found, Sequence) or len(found) != 2:
                    raise SpecError(f"data must give (inputs, labels), got a {type(found).__name__}")
                self._next = found[0], found[1]
        if self._next is None:
            raise SpecError("data has no batch")
        return self._next

    def reach(self, position: int) -> Callable[[], None]:
        # read on the side: this stream stays where it is unless the position exists
        other = Stream(self.batches)
        if position == self.position:
            return lambda: None
        # an iterator is its own iterator: what it has given is gone
        if position and iter(self.batches) is self.batches:
            raise SpecError(
                f"data is an iterator, which cannot begin anew to go to sample {position}: give the job what it is of"
            )
        while other.position < position:
            other.advance()
        if other.position > position:
            raise SpecError(f"no batch of data begins at sample {position}: one ends at {other.position}")
        return lambda: self.__dict__.update(vars(other))

    def rows(self) -> int:
        return rows_of(self._peek()[0])

    def read(self, first: int, last: int) -> tuple[Any, Any]:
        inputs, labels = self._peek()
        return rows_from(inputs, first, last), rows_from(labels, first, last)

    def advance(self) -> None:
        self.position += self.rows()
        self._next = None


def rows_of(batch: Any) -> int:
    """Rows of a tensor, or of the first of a dictionary of them."""
    tensor = batch if isinstance(batch, Tensor) else next(iter(batch.values()))
    return int(tensor.shape[0])


def rows_from(batch: Any, first: int, last: int) -> Any:
    """Rows first .. last-1 of a tensor or of a dictionary of them; None stays None.

    Args:
        batch: Inputs or labels [B, ...], or a tree of them.
        first: The first row.
        last: One after the last row.
    """
    return tree_map(lambda t: t[first:last] if isinstance(t, Tensor) else t, batch)


def microbatches_of(wanted: int, replicas: int) -> int:
    """How many microbatches a replica runs where the job wants so many in all: equally many on every replica."""
    return -(-wanted // replicas)


def cuts(rows: int, parts: int) -> list[tuple[int, int]]:
    """First and last row of every one of `parts`, whose rows differ by at most one; `SpecError` if there are fewer."""
    if rows < parts:
        raise SpecError(f"a global batch of {rows} rows cannot be cut into {parts} microbatches")
    size, more = divmod(rows, parts)
    # the first `more` parts have one row more
    ends = [k * size + min(k, more) for k in range(parts + 1)]
    return list(pairwise(ends))


def read_part(data: GlobalBatches, rows: int, each: int, replica: int, replicas: int) -> tuple[list[Any], list[Any]]:
    """A replica's part of the next batch.

    Args:
        data: Where it is read.
        rows: B, the rows of the batch.
        each: Microbatches of every replica.
        replica: This replica's number.
        replicas: How many there are.

    Returns:
        Inputs and labels of `each` microbatches.
    """
    # consecutive rows: which replica has which sample follows from B, M and dp alone
    mine = cuts(rows, each * replicas)[replica * each :][:each]
    parts = [data.read(a, b) for a, b in mine]
    return [inputs for inputs, _ in parts], [labels for _, labels in parts]


def shared_out(inputs: Any, labels: Any, each: int, replica: int, replicas: int) -> tuple[list[Any], list[Any]]:
    """A replica's microbatches of a batch.

    Every replica has as many: those that share shards or experts exchange them at the same times. Of fewer rows than
    replicas each takes all.

    Args:
        inputs, labels: The whole batch [B, ...].
        each: About how many rows a microbatch is to have.
        replica: This replica's number.
        replicas: How many there are.

    Returns:
        Inputs and labels of the microbatches.

    Raises:
        SpecError: For a batch without rows.
    """
    rows = rows_of(inputs)
    if not rows:
        raise SpecError("there is no row to evaluate")
    # no microbatch may be empty, on any replica
    many = min(-(-rows // (each * replicas)), rows // replicas)
    mine = cuts(rows, many * replicas)[replica * many :][:many] if many else [(0, rows)]
    return [rows_from(inputs, a, b) for a, b in mine], [rows_from(labels, a, b) for a, b in mine]
