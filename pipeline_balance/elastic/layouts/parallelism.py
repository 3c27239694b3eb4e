"""A parallel layout as a value: how many ways along each axis, and which rank has which place.

Shape legend: P ranks have a place; others hold nothing. Places are numbered with tp fastest, then dp, then pp:
place = (pp index * dp + dp index) * tp + tp index. The ranks of one stage are cut for experts anew: of the stage's
dp * tp places, place q has ep index q mod ep and edp index q // ep. Experts with one ep index are copies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import numpy as np

from pipeline_balance.schedules.sliced import check_slices
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from prophet.spec import IntArray

Axis = Literal["pp", "dp", "tp", "ep", "edp"]
AXES: tuple[Axis, ...] = get_args(Axis)
FEWEST_BYTES: Literal["fewest-bytes"] = "fewest-bytes"
_SIZES = ("tp", "pp", "dp", "ep", "zero", "v", "slices")


def check_cut(tp: int, lengths: Mapping[str, int]) -> None:
    """Raise `SpecError` unless tp divides every length that it has to cut.

    Args:
        tp: Tensor shards.
        lengths: The lengths, by a description of each as the message names it.
    """
    for what, length in lengths.items():
        if length % tp:
            raise SpecError(f"tp{tp} does not divide the {what}")


class Place(NamedTuple):
    """A rank's index along every axis."""

    pp: int
    dp: int
    tp: int
    ep: int
    edp: int


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How a model is spread over ranks; prints as `tp4,pp8,dp2,zero1`, which `parse` reads back.

    Attributes:
        pp: Pipeline stages.
        tp: Tensor shards.
        dp: Copies; pp * tp * dp ranks have a place.
        ep: Expert shards, a divisor of tp * dp.
        zero: What is sharded over dp: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        v: Chunks of layers per stage; chunk c runs on stage c mod pp.
        slices: Parts of a sequence that pass the stages one by one, a multiple of pp where v > 1; 1: sequences pass
            whole.
        stages: Layers of every chunk [pp * v]; None: even.
        order: The rank of every place [P]; None: place k is rank k; "fewest-bytes": a switch chooses those that leave
            the least to move.

    Raises:
        SpecError: For sizes, stages or an order that do not fit together.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    ep: int = 1
    zero: int = 0
    v: int = 1
    slices: int = 1
    stages: tuple[int, ...] | None = None
    order: tuple[int, ...] | Literal["fewest-bytes"] | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            # bool is an int to Python: `pp=True` would be one stage
            value, least = getattr(self, name), 0 if name == "zero" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise SpecError(f"Parallelism.{name} must be a whole number of at least {least}, got {value!r}")
        if self.zero > 3:
            raise SpecError(f"Parallelism.zero must be 0, 1, 2 or 3, got {self.zero}")
        if self.tp * self.dp % self.ep:
            raise SpecError(f"Parallelism.ep must divide tp * dp = {self.tp * self.dp}, got {self.ep}")
        # all chunks would be on the same stage, which is v = 1 with more messages
        if self.v > 1 and self.pp == 1:
            raise SpecError(f"Parallelism.v = {self.v} needs several stages, got pp = 1")
        check_slices(self.pp, self.v, self.slices)
        self._check_stages()
        self._check_order()

    def _check_stages(self) -> None:
        if self.stages is None:
            return
        stages = tuple(int(n) for n in self.stages)
        if len(stages) != self.pp * self.v:
            raise SpecError(
                f"Parallelism.stages needs one number of layers per chunk ({self.pp * self.v}), got {stages}"
            )
        if min(stages) < 1:
            raise SpecError(f"Parallelism.stages: every chunk needs a layer, got {stages}")
        # the class is frozen; numpy integers become plain ones, so that equal layouts compare and print alike
        object.__setattr__(self, "stages", stages)

    def _check_order(self) -> None:
        if self.order is None:
            return
        if isinstance(self.order, str):
            if self.order == FEWEST_BYTES:
                return
            raise SpecError(f'Parallelism.order must be ranks, None or "{FEWEST_BYTES}", got {self.order!r}')
        order = tuple(int(r) for r in self.order)
        if len(order) != self.ranks or len(set(order)) != len(order) or min(order) < 0:
            raise SpecError(f"Parallelism.order needs {self.ranks} different ranks, one per place, got {list(order)}")
        # the order of place k on rank k is the default: one value for one layout
        object.__setattr__(self, "order", None if order == tuple(range(self.ranks)) else order)

    # ------------------------------------------------------------------------------------------------ ranks, places

    @property
    def ranks(self) -> int:
        """How many ranks have a place."""
        return self.pp * self.dp * self.tp

    @property
    def edp(self) -> int:
        """Copies of every expert."""
        return self.dp * self.tp // self.ep

    @property
    def rank_of_place(self) -> tuple[int, ...]:
        """The rank of every place, [P]; `SpecError` while the order is still to be chosen."""
        if isinstance(self.order, str):
            raise SpecError(f"{self}: the order of ranks is not chosen yet: ask for the places after that")
        return tuple(range(self.ranks)) if self.order is None else self.order

    @cached_property
    def _place_of_rank(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.rank_of_place)}

    @property
    def grid(self) -> IntArray:
        """The rank at every place, [pp, dp, tp]."""
        return np.array(self.rank_of_place, dtype=np.int64).reshape(self.pp, self.dp, self.tp)

    def place(self, rank: int) -> Place | None:
        """Where `rank` stands; None if it has no place and holds nothing."""
        number = self._place_of_rank.get(rank)
        if number is None:
            return None
        # tp is fastest; experts count the same places anew (see the top of the file)
        stage, within = divmod(number, self.dp * self.tp)
        return Place(stage, *divmod(within, self.tp), within % self.ep, within // self.ep)

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Ranks that differ along `axis` alone, by their index along it. Every rank with a place is in one group.

        Along "ep" and "edp" the two axes of experts stand in for dp and tp.
        """
        if axis not in AXES:
            raise SpecError(f"an axis must be one of {list(AXES)}, got {axis!r}")
        if axis in ("ep", "edp"):
            grid, at = self.grid.reshape(self.pp, self.edp, self.ep), {"edp": 1, "ep": 2}[axis]
        else:
            grid, at = self.grid, ("pp", "dp", "tp").index(axis)
        # the axis comes last, so each row is a group
        rows = np.moveaxis(grid, at, -1).reshape(-1, grid.shape[at])
        return tuple(tuple(int(r) for r in row) for row in rows)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The group of `rank` along `axis`; empty if the rank has no place."""
        return next((members for members in self.groups(axis) if rank in members), ())

    # ------------------------------------------------------------------------------------------------ layers

    def stage_map(self, layers: int) -> StageMap:
        """Which of the pp stages runs which layers; its ranks are pp indices. Without `stages`, as even as can be."""
        chunks = self.pp * self.v
        if self.stages is None and layers < chunks:
            raise SpecError(f"{self}: {chunks} chunks need at least as many layers, the model has {layers}")
        # chunks in front take the layers that are left over
        counts = self.stages or tuple(layers // chunks + (c < layers % chunks) for c in range(chunks))
        if sum(counts) != layers:
            raise SpecError(f"{self}: stages are of {sum(counts)} layers, the model has {layers}")
        return StageMap((0, *np.cumsum(counts).tolist()), tuple(c % self.pp for c in range(chunks)))

    # ------------------------------------------------------------------------------------------------ text

    def _parts(self) -> Iterator[str]:
        # only what differs from the defaults is written
        usual = Parallelism()
        for name in _SIZES:
            if getattr(self, name) != getattr(usual, name):
                yield f"{name}{getattr(self, name)}"
        if self.stages is not None:
            yield "stages" + ":".join(map(str, self.stages))
        if self.order is not None:
            yield "order" + (self.order if isinstance(self.order, str) else ":".join(map(str, self.order)))

    def __str__(self) -> str:
        return ",".join(self._parts()) or "dp1"

    @classmethod
    def parse(cls, text: str) -> Parallelism:
        """Read `tp4,pp8,dp2`: sizes that are not named are 1 (zero: 0). `SpecError` on anything else.

        `stages3:5` gives the layers of every chunk, `order2:0:3:1` the rank of every place, `orderfewest-bytes` leaves
        that to the switch.
        """
        found: dict[str, int | tuple[int, ...] | str] = {}
        for part in text.replace(" ", "").split(","):
            # a size, a row of numbers, or the one order that has a name
            size = re.fullmatch(rf"({'|'.join(_SIZES)})(\d+)", part)
            row = re.fullmatch(r"(stages|order)(\d+(?::\d+)*)", part)
            name = size[1] if size else row[1] if row else "order"
            if name in found or not (size or row or part == f"order{FEWEST_BYTES}"):
                wrong = "is given twice" if name in found else "is not understood"
                expected = f"{', '.join(f'{n}N' for n in _SIZES)}, stagesN:N, orderN:N or order{FEWEST_BYTES}"
                raise SpecError(f"{text!r}: {part!r} {wrong}; expected parts of {expected}")
            if size:
                found[name] = int(size[2])
            else:
                found[name] = tuple(map(int, row[2].split(":"))) if row else FEWEST_BYTES
        return cls(**found)  # type: ignore[arg-type]

    def check_trainable(self, *, experts: bool) -> None:
        """Raise `SpecError` for combinations that can be described but not trained.

        What can be: pp x tp x dp with zero 0 and 1, whole or in slices, also with ep over its processes, and tp x dp
        with zero 2 and 3 without experts, whole.

        Args:
            experts: Whether the model has experts.
        """
        faults = []
        # FSDP2 wants the root module called, so all layers are one stage, and see whole sequences
        if self.zero >= 2 and self.pp > 1:
            faults.append(f"zero{self.zero} with pp{self.pp}")
        if self.zero >= 2 and experts:
            faults.append(f"zero{self.zero} with experts")
        if self.ep > 1 and not experts:
            faults.append(f"ep{self.ep} with a model that has no experts")
        if self.slices > 1 and self.zero >= 2:
            faults.append(f"slices{self.slices} with zero{self.zero}")
        if faults:
            raise SpecError(
                f"{self}: {' and '.join(faults)} cannot be trained; expected pp x tp x dp with zero 0 or 1, with ep "
                "for a model with experts, whole or in slices; or tp x dp with zero 2 or 3 for one without, "
                "whole: FSDP2 wants the model called at once"
            )
