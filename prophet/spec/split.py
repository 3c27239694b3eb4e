"""How many tokens go where: as one array of integers, or as flows, which are far fewer.

Shape legend: R ranks, E experts, D destination ranks (equal to R), M shared experts, F flows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from prophet.errors import SpecError
from prophet.spec.arrays import BoolArray, IntArray, digest, frozen
from prophet.spec.placement import Placement, check_load

_INT32_MOST = np.iinfo(np.int32).max


class Split:
    """How many tokens go where: `tokens[r, e, d]` of rank r's tokens for expert e are computed on rank d.

    Args:
        tokens: Integers [R, E, D].

    Raises:
        SpecError: For another shape, and for negative numbers.
    """

    __slots__ = ("_rank_load", "_tokens")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tokens: npt.NDArray[Any]) -> None:
        shape = np.shape(tokens)
        if len(shape) != 3 or shape[0] != shape[2]:
            raise SpecError(f"Split.tokens must have shape [ranks, experts, ranks], got {list(shape)}")
        self._tokens: IntArray = frozen(tokens, np.int64, (shape[0], shape[1], shape[2]), "Split.tokens")
        if self._tokens.size and self._tokens.min() < 0:
            raise SpecError("Split.tokens must not be negative")
        self._rank_load: IntArray | None = None

    @staticmethod
    def trusted(tokens: IntArray) -> Split:
        """Wrap an array that a tested kernel made, without copying or checking it; it becomes read-only."""
        split = Split.__new__(Split)
        tokens.setflags(write=False)
        split._tokens, split._rank_load = tokens, None
        return split

    @staticmethod
    def to_homes(load: IntArray, placement: Placement) -> Split:
        """Send every token of `load` [R, E] to its expert's home, whatever replicas there are."""
        load = check_load(load)
        if load.shape[1] != placement.experts:
            raise SpecError(f"load is of {load.shape[1]} experts, the placement of {placement.experts}")
        return Flows(load, placement.home)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.ranks} ranks, {self.experts} experts, {self.rank_load().sum()} tokens)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Split):
            return NotImplemented
        return np.array_equal(self.tokens, other.tokens)

    @property
    def tokens(self) -> IntArray:
        """Tokens by source rank, expert and destination rank, [R, E, D]."""
        return self._tokens

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return int(self._tokens.shape[0])

    @property
    def experts(self) -> int:
        """The number of experts."""
        return int(self._tokens.shape[1])

    def digest(self) -> int:
        """Return an integer that stands for the split in comparisons over ranks, which all have it in one form."""
        return digest(self._tokens)

    # --- sums ---

    def sent_by(self, rank: int) -> IntArray:
        """Return the tokens that `rank` sends, by expert and destination, [E, D]; a copy."""
        found: IntArray = self._tokens[rank].copy()
        return found

    def received_by(self, rank: int) -> IntArray:
        """Return the tokens that `rank` computes, by source and expert, [R, E]; a copy."""
        found: IntArray = self._tokens[:, :, rank].copy()
        return found

    def load(self) -> IntArray:
        """Count the tokens that go out, by source and expert, [R, E]."""
        found: IntArray = self._tokens.sum(axis=2, dtype=np.int64)
        return found

    def pairs(self) -> IntArray:
        """Count the tokens by source and destination, [R, D]."""
        found: IntArray = self._tokens.sum(axis=1, dtype=np.int64)
        return found

    def by_expert(self) -> IntArray:
        """Count the tokens by expert and destination, [E, D]."""
        found: IntArray = self._tokens.sum(axis=0, dtype=np.int64)
        return found

    def rank_load(self) -> IntArray:
        """Count the tokens computed by every rank, [R] (H of the paper); counted once."""
        if self._rank_load is None:
            self._rank_load = self._counted()
            self._rank_load.setflags(write=False)
        return self._rank_load

    def _counted(self) -> IntArray:
        found: IntArray = self._tokens.sum(axis=(0, 1), dtype=np.int64)
        return found

    def max_mean(self) -> float:
        """Return the largest rank load over the mean; 1.0 is perfect, and the value of an empty step."""
        load = self.rank_load()
        # One division of exact integers: equal loads give 1.0, not something near it
        total = int(load.sum())
        return float(load.max()) * self.ranks / total if total else 1.0

    # --- checks ---

    def check(self, load: IntArray, placement: Placement) -> None:
        """Raise `SpecError` unless the split conserves `load` [R, E] and uses only ranks that hold the expert."""
        if (self.ranks, self.experts) != (placement.ranks, placement.experts):
            raise SpecError(
                f"split is for {self.ranks} ranks x {self.experts} experts, "
                f"placement for {placement.ranks} x {placement.experts}"
            )
        sent = self.load()
        if not np.array_equal(sent, load):
            bad = np.argwhere(sent != load)[0]
            raise SpecError(f"split does not conserve the tokens of rank {bad[0]} for expert {bad[1]}")
        # Tokens by expert and destination, where the destination has no copy
        if self.by_expert()[~placement.holds].any():
            raise SpecError("split sends tokens to a rank that does not hold their expert")


class Flows(Split):
    """A split as flows: experts that several ranks share have rows, all tokens of any other expert go to its home.

    In a group of 256 ranks with 256 experts `tokens` has 16 million integers, and a step needs few of them.

    Args:
        load: The counts [R, E]; arrays are copied, but for `home`.
        home: The homes [E].
        shared: The experts [M] whose tokens follow `rows`.
        rows: Source rank, expert, destination rank and tokens, [F, 4], each way once.
        rank_load: Tokens [R] that every rank computes, where they are known.
        bottleneck: The lowest bottleneck of any split: tokens over relative speed. NaN where nobody looked for it.
    """

    __slots__ = ("_alone", "_load", "bottleneck", "home", "rows", "shared")

    def __init__(
        self,
        load: IntArray,
        home: IntArray,
        shared: IntArray | None = None,
        rows: IntArray | None = None,
        rank_load: IntArray | None = None,
        bottleneck: float = float("nan"),
    ) -> None:
        # Copies, since a planner may go on writing to its own
        self._load, self.home = load.copy(), home
        self.shared = np.empty(0, dtype=np.int64) if shared is None else shared.copy()
        self.rows = np.empty((0, 4), dtype=np.int64) if rows is None else rows.copy()
        self._rank_load, self.bottleneck = None if rank_load is None else rank_load.copy(), bottleneck
        self._alone: BoolArray = np.ones(load.shape[1], dtype=np.bool_)
        self._alone[self.shared] = False
        for array in (self._load, self.shared, self.rows, self._rank_load):
            if array is not None:
                array.setflags(write=False)

    @property
    def tokens(self) -> IntArray:
        """Tokens by source rank, expert and destination rank, [R, E, D]: made anew with every call."""
        tokens = np.zeros((self.ranks, self.experts, self.ranks), dtype=np.int64)
        tokens[:, self._alone, self.home[self._alone]] = self._load[:, self._alone]
        source, expert, rank, amount = self.rows.T
        tokens[source, expert, rank] = amount
        tokens.setflags(write=False)
        return tokens

    @property
    def ranks(self) -> int:
        return int(self._load.shape[0])

    @property
    def experts(self) -> int:
        return int(self._load.shape[1])

    def digest(self) -> int:
        # Where the experts without rows go to is the home's affair, how many go there is not in the rows
        return digest(_short(self.rows), _short(self._load), self.shared, self.home)

    def sent_by(self, rank: int) -> IntArray:
        found = np.zeros((self.experts, self.ranks), dtype=np.int64)
        alone = self._alone
        found[alone, self.home[alone]] = self._load[rank, alone]
        _, expert, target, amount = self.rows[self.rows[:, 0] == rank].T
        found[expert, target] = amount
        return found

    def received_by(self, rank: int) -> IntArray:
        found = np.zeros((self.ranks, self.experts), dtype=np.int64)
        own = self._alone & (self.home == rank)
        found[:, own] = self._load[:, own]
        source, expert, _, amount = self.rows[self.rows[:, 2] == rank].T
        found[source, expert] = amount
        return found

    def load(self) -> IntArray:
        found = np.where(self._alone, self._load, 0)
        _add(found, self.rows[:, 0] * self.experts + self.rows[:, 1], self.rows[:, 3])
        return found

    def pairs(self) -> IntArray:
        found = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        alone = self._alone
        ways = np.arange(self.ranks)[:, None] * self.ranks + self.home[alone]
        _add(found, ways.reshape(-1), self._load[:, alone].reshape(-1))
        _add(found, self.rows[:, 0] * self.ranks + self.rows[:, 2], self.rows[:, 3])
        return found

    def by_expert(self) -> IntArray:
        found = np.zeros((self.experts, self.ranks), dtype=np.int64)
        alone = self._alone
        found[alone, self.home[alone]] = self._load[:, alone].sum(axis=0)
        _add(found, self.rows[:, 1] * self.ranks + self.rows[:, 2], self.rows[:, 3])
        return found

    def _counted(self) -> IntArray:
        found: IntArray = self.by_expert().sum(axis=0)
        return found

    def check(self, load: IntArray, placement: Placement) -> None:
        super().check(load, placement)
        # `tokens` shows none of these
        source, expert, rank, amount = self.rows.T
        if (amount < 0).any():
            raise SpecError(f"Flows.rows must not have negative numbers of tokens, got {amount.min()}")
        if len(np.unique((source * self.experts + expert) * self.ranks + rank)) < len(self.rows):
            raise SpecError("Flows.rows must have each way from a rank over an expert to a rank once")
        if not np.array_equal(self.rank_load(), self._counted()):
            raise SpecError("Flows.rank_load does not add up from the rows and the load")


def _add(found: IntArray, at: IntArray, amount: IntArray) -> None:
    """Add to elements of `found`, which are numbered through and may come several times."""
    np.add.at(found.reshape(-1), at, amount)


def _short(numbers: IntArray) -> npt.NDArray[Any]:
    """Return the numbers with half of the bytes where they fit, which are hashed in half of the time."""
    return numbers.astype(np.int32) if numbers.size and numbers.max() <= _INT32_MOST else numbers
