"""How a pipeline cuts sequences into slices, and in which order these pass the stages.

Shape legend: P ranks, S stages, V stages per rank, M microbatches, N slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Literal, get_args

from pipeline_balance.schedules.actions import Schedule, build
from pipeline_balance.schedules.exchange_times import ExchangeCosts
from pipeline_balance.schedules.sliced import Order, sliced
from prophet.errors import SpecError

Recompute = Literal["none", "selective", "full"]
Balance = Literal["none", "uneven", "exchange"]


@dataclass(frozen=True, slots=True)
class SliceOptions:
    """Every sequence is cut into parts, which pass the stages one by one (SlimPipe, Section 4).

    With one slice everything but `recompute` is as without these options.

    Attributes:
        slices: N, parts of every sequence.
        stages_per_rank: V. Stage s runs on the rank of stage s - P. With several, the ranks in use must divide
            `slices`.
        order: The "aligned" order holds P - 1 - r more slices on rank r than the "minimal" one, and hides transfers.
        recompute: What layers of a transformers model compute again instead of keeping it, with one slice too:
            "selective" all but attention's products, "full" all but attention itself.
        balance: With "none" slices are of equal length, and must divide the tokens. With "uneven" they are of equal
            cost: the first are the longest, as attention costs more the more tokens came before. With "exchange" they
            are of equal length, and ranks compute parts of each other's attention; it needs the aligned order.
        crossover_tokens: For "uneven" ones: the tokens before one where attention costs a layer as much as all else.
            None takes the count of multiplications in a transformers model's layers; a fit of measured times may know
            better (`pipeline_balance.pipeline.measure.meter.slice_fit`).

        keep_bytes: For "exchange": most bytes of others' keys, values and their gradients that a rank keeps for later
            slices of a microbatch, so that they need not be sent again.
        exchange_costs: For "exchange": what attention and transfers cost, which says whether it pays. None measures
            them on all ranks at the first batch of a length, and after a move to other ranks.
        offload: Share of what layers save that goes to the host, from 0 to 1: of each microbatch, what backward needs
            last. From the third step on, "auto" takes what needs least memory of what a rank's schedule hides. With
            one slice nothing goes.
        host_bytes_per_s: For `offload`: of the link to the host, each way. None measures it.
        context_parallel: c, how many replicas in a row share the tokens of every slice (SlimPipe, Section 5). They are
            given the same batch, and c must divide the replicas.

    Raises:
        SpecError: For values that do not exist, or do not fit together.
    """

    slices: int
    stages_per_rank: int = 1
    order: Order = "minimal"
    recompute: Recompute = "none"
    balance: Balance = "none"
    crossover_tokens: int | None = None
    keep_bytes: int = 0
    exchange_costs: ExchangeCosts | None = None
    offload: float | Literal["auto"] = 0.0
    host_bytes_per_s: float | None = None
    context_parallel: int = 1

    # by name: these options are a value, which the modules that run by it import
    models: ClassVar[str] = "pipeline_balance.slices.models"

    def __post_init__(self) -> None:
        for name in ("slices", "stages_per_rank", "context_parallel"):
            value = getattr(self, name)
            # bool is an int to Python: `slices=True` would be one slice
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SpecError(f"{name} must be a number from 1 on, got {value!r}")
        if self.order not in get_args(Order):
            raise SpecError(f"order must be one of {', '.join(get_args(Order))}, got {self.order!r}")
        if self.recompute not in get_args(Recompute):
            raise SpecError(f"recompute must be one of {', '.join(get_args(Recompute))}, got {self.recompute!r}")
        if self.balance not in get_args(Balance):
            raise SpecError(f"balance must be one of {', '.join(get_args(Balance))}, got {self.balance!r}")
        if self.balance == "exchange" and self.order != "aligned":
            raise SpecError(
                'balance="exchange" needs order="aligned": in the minimal order some ranks run forwards while others '
                "run backwards, and cannot help each other"
            )
        keep = self.keep_bytes
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
            raise SpecError(f"keep_bytes must be a number of bytes, got {keep!r}")
        if keep and self.balance != "exchange":
            raise SpecError('keep_bytes needs balance="exchange": other slices keep nothing of other ranks')
        if self.exchange_costs is not None and self.balance != "exchange":
            raise SpecError('exchange_costs needs balance="exchange"')
        if self.context_parallel > 1 and self.slices == 1:
            raise SpecError("context_parallel needs 2 slices or more: it shares the tokens of slices")
        crossover = self.crossover_tokens
        if crossover is not None and (not isinstance(crossover, int) or isinstance(crossover, bool) or crossover < 0):
            raise SpecError(f"crossover_tokens must be a number of tokens, got {crossover!r}")
        if crossover is not None and self.balance != "uneven":
            raise SpecError('crossover_tokens needs balance="uneven": slices of equal length do not depend on costs')
        share, link = self.offload, self.host_bytes_per_s
        if share != "auto" and not (_is_number(share) and 0 <= share <= 1):
            raise SpecError(f'offload must be a share from 0 to 1, or "auto", got {share!r}')
        if link is not None and not (_is_number(link) and 0 < link < inf):
            raise SpecError(f"host_bytes_per_s must be a number of bytes above 0, got {link!r}")
        if link is not None and not share:
            raise SpecError("host_bytes_per_s needs offload: nothing else goes to the host")

    @property
    def offloads(self) -> bool:
        """Whether saved tensors go to the host; with one slice none do."""
        return bool(self.offload) and self.slices > 1

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange attention; with one slice there is nothing to exchange."""
        return self.balance == "exchange" and self.slices > 1

    def check(self, ranks: Sequence[int]) -> None:
        """Raise `SpecError` unless stages on these ranks [S], which are 0 to P - 1, can run in slices."""
        used = len(set(ranks))
        if len(ranks) != used * self.stages_per_rank or list(ranks) != [*ranks[:used]] * self.stages_per_rank:
            raise SpecError(
                f"with slices, {self.stages_per_rank} stages per rank must take the ranks in turn, each once; "
                f"this map has its {len(ranks)} stages on ranks {list(ranks)}"
            )
        # raises where several stages per rank and slices do not fit; one microbatch suffices for that
        sliced(used, self.stages_per_rank, 1, self.slices, self.order)

    def schedule(self, ranks: Sequence[int], microbatches: int) -> Schedule:
        """The order of all slices over stages on `ranks` [S]; [P] rows."""
        used = len(set(ranks))
        helped = self.exchanges and used > 1
        found = sliced(used, self.stages_per_rank, microbatches, self.slices, self.order, helped=helped)
        # stage s < P is on row s there, and on the rank that the map says here
        rows = [found.actions[list(ranks).index(rank)] for rank in range(used)]
        return build(rows, found.stages, found.microbatches, found.slices)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
