"""Where experts are: load and placement.

Shape legend: R ranks, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prophet.errors import SpecError
from prophet.spec.arrays import BoolArray, IntArray, OfArrays, frozen


def check_experts_per_rank(experts: int, ranks: int) -> int:
    """Return m = experts / ranks: every rank is home to the same number of experts.

    Raises:
        SpecError: Where the experts do not divide among the ranks.
    """
    if experts < 1 or ranks < 1:
        raise SpecError(f"experts and ranks must be at least 1, got {experts} experts on {ranks} ranks")
    if experts % ranks:
        raise SpecError(
            f"{experts} experts cannot be divided among {ranks} expert-parallel ranks: num_experts must be a multiple "
            f"of the group's size. Make smaller groups: ep, replicas = "
            f"prophet.parallel.expert_groups({math.gcd(experts, ranks)}), then pass group=ep, and before attach "
            f"prophet.parallel.ExpertReplicas(model, replicas)"
        )
    return experts // ranks


def check_shared(where: object, experts: int, ranks: int) -> None:
    """Check that an expert-parallel group can share the experts of a layer.

    Args:
        where: The layer, for errors.
        experts: Its number of experts.
        ranks: The size of the group.

    Raises:
        SpecError: Where the experts do not divide among the ranks.
    """
    if experts % ranks:
        raise SpecError(f"{where}: {experts} experts cannot be shared by ep{ranks}")


@dataclass(frozen=True, eq=False, slots=True)
class Placement(OfArrays):
    """Which ranks hold which experts during one step.

    Attributes:
        home: The rank [E] that owns each expert.
        holds: Whether [E, R] a rank holds an expert's parameters, as home or as replica.

    Raises:
        SpecError: For other shapes, homes that are no ranks, and homes that do not hold their expert.
    """

    home: IntArray
    holds: BoolArray

    def __post_init__(self) -> None:
        # -1 for any other number of dimensions, which the next check refuses
        experts, ranks = np.shape(self.holds) if np.ndim(self.holds) == 2 else (-1, -1)
        if experts < 1 or ranks < 1:
            raise SpecError(f"Placement.holds must have shape [experts, ranks], got {list(np.shape(self.holds))}")
        home = frozen(self.home, np.int64, (experts,), "Placement.home")
        holds = frozen(self.holds, np.bool_, (experts, ranks), "Placement.holds")
        if home.min() < 0 or home.max() >= ranks:
            raise SpecError(f"Placement.home must name ranks 0..{ranks - 1}, got {home.min()}..{home.max()}")
        missing = np.flatnonzero(~holds[np.arange(experts), home])
        if missing.size:
            raise SpecError(f"the home rank must hold its expert; it does not for experts {missing[:8].tolist()}")
        # The dataclass is frozen; the copies are read-only
        object.__setattr__(self, "home", home)
        object.__setattr__(self, "holds", holds)

    @classmethod
    def homes_only(cls, experts: int, ranks: int) -> Placement:
        """Make the placement of plain expert parallelism: expert e lives on rank e // m and nowhere else."""
        return cls.with_replicas(np.arange(experts) // check_experts_per_rank(experts, ranks), ranks, ())

    @classmethod
    def with_replicas(
        cls, home: Sequence[int] | IntArray, ranks: int, replicas: Iterable[tuple[int, int]]
    ) -> Placement:
        """Build a placement from its replicas.

        Args:
            home: Homes [E].
            ranks: The number of ranks.
            replicas: Pairs of expert and rank.

        Raises:
            SpecError: For a pair outside, or homes that are no ranks.
        """
        home_array = np.asarray(home, dtype=np.int64)
        holds = np.zeros((home_array.size, ranks), dtype=np.bool_)
        # Homes outside are left to the constructor, whose error names them; numpy would raise another, or wrap around
        if home_array.size and home_array.min() >= 0 and home_array.max() < ranks:
            holds[np.arange(home_array.size), home_array] = True
        for expert, rank in replicas:
            if not (0 <= expert < home_array.size and 0 <= rank < ranks):
                raise SpecError(f"replica ({expert}, {rank}) is outside {home_array.size} experts x {ranks} ranks")
            holds[expert, rank] = True
        return cls(home_array, holds)

    @property
    def experts(self) -> int:
        """The number of experts."""
        return int(self.holds.shape[0])

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return int(self.holds.shape[1])

    @property
    def is_static(self) -> bool:
        """Whether there is no replica at all."""
        # Every expert has one holder at least, its home
        return int(self.holds.sum()) == self.experts

    def replica_mask(self) -> BoolArray:
        """Return whether [E, R] a rank holds an expert as a replica."""
        mask: BoolArray = self.holds.copy()
        mask[np.arange(self.experts), self.home] = False
        return mask

    def receivers(self) -> dict[int, list[int]]:
        """Return the ranks that hold a replica of every replicated expert, ascending."""
        mask = self.replica_mask()
        return {int(e): np.flatnonzero(mask[e]).tolist() for e in np.flatnonzero(mask.any(axis=1))}

    def replicas(self) -> list[tuple[int, int]]:
        """List all replicas as (expert, rank), ordered by expert, then rank."""
        return [(int(e), int(r)) for e, r in np.argwhere(self.replica_mask())]

    def replicas_on(self, rank: int) -> list[int]:
        """List the experts of which `rank` holds a replica, ascending: the order of its replica slots."""
        found: list[int] = np.flatnonzero(self.holds[:, rank] & (self.home != rank)).tolist()
        return found

    def copies_per_rank(self) -> IntArray:
        """Count the replicas held by every rank, [R]."""
        counts: IntArray = self.replica_mask().sum(axis=0, dtype=np.int64)
        return counts


def check_load(load: npt.NDArray[Any]) -> IntArray:
    """Validate `load_RE` ([ranks, experts] non-negative integers) and return it as contiguous int64."""
    array = np.asarray(load)
    # By kind: unsigned and shorter integers are converted, floats are refused even where they are whole
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise SpecError(f"load must be integers [ranks, experts], got {array.dtype} {list(array.shape)}")
    if array.size and array.min() < 0:
        raise SpecError("load must not be negative")
    return np.ascontiguousarray(array, dtype=np.int64)
