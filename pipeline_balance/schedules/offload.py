"""Which passes of a rank leave what they saved on the host, and before which action it comes back.

Of a microbatch the slice that goes forward first goes backward last. So the first slices wait longest, and theirs goes
to the host first (SlimPipe, Section 6.5, with PipeOffload's rule). All of it follows from the schedule's text.

Shape legend: A actions of a rank, N slices of a microbatch, U units.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from pipeline_balance.schedules.actions import Action, Schedule
from pipeline_balance.schedules.simulate import Durations, Simulation, simulate
from prophet.errors import SpecError

# A fetch has the time of so many backwards before its own, and of the forwards between
AHEAD = 1
# A share that is chosen is a multiple of one over this
STEPS = 16


@dataclass(frozen=True, slots=True)
class Offload:
    """What one rank leaves on the host.

    Attributes:
        row: The rank's actions [A].
        back: By forward whose saved tensors go to the host, the place in `row` of the action before which they begin
            to come back, and that of the backward that reads them.
        ahead: How many backwards lie between the two.
    """

    row: Sequence[Action]
    back: Mapping[Action, tuple[int, int]]
    ahead: int = AHEAD

    def due(self) -> dict[int, list[Action]]:
        """By place in `row`, the forwards whose tensors begin to come back before that action."""
        found: dict[int, list[Action]] = defaultdict(list)
        # what is needed first comes first
        for forward, (place, _) in sorted(self.back.items(), key=lambda item: item[1]):
            found[place].append(forward)
        return dict(found)

    def away_bytes(self, moved_bytes: Sequence[int]) -> list[int]:
        """Bytes on the host while each action runs [A], negative: what `peak_activation_bytes` takes as kept besides.

        Args:
            moved_bytes: Of every unit [U].
        """
        due, found, away = self.due(), [], 0
        for number, action in enumerate(self.row):
            away += sum(moved_bytes[forward.microbatch] for forward in due.get(number, ()))
            found.append(away)
            away -= moved_bytes[action.microbatch] if action in self.back else 0
        return found


def offload(
    row: Sequence[Action], slices: int, share: float, *, sizes: Sequence[float] = (), ahead: int = AHEAD
) -> Offload:
    """Choose what goes to the host: of each microbatch the passes that wait longest, up to a share.

    A pass that is needed again before anything could run without it stays.

    Args:
        row: A rank's actions [A].
        slices: N.
        share: Of what all passes of a microbatch save, from 0 to 1.
        sizes: How much every unit saves, in any measure [U]; empty: all alike.
        ahead: A pass's tensors begin to come back with the backward that is so many before its own.

    Raises:
        SpecError: For a share that is none.
    """
    if not 0 <= share <= 1:
        raise SpecError(f"a share must be from 0 to 1, got {share}")
    backwards = [number for number, a in enumerate(row) if a.kind in "BI"]
    needed = {(row[number].stage, row[number].microbatch): at for at, number in enumerate(backwards)}
    passes: dict[int, list[tuple[int, int, Action]]] = defaultdict(list)
    for number, action in enumerate(row):
        if action.kind == "F":
            wait = backwards[needed[action.stage, action.microbatch]] - number
            passes[action.microbatch // slices].append((-wait, number, action))
    back: dict[Action, tuple[int, int]] = {}
    for some in passes.values():
        left = share * sum(sizes[action.microbatch] if sizes else 1 for _, _, action in some)
        for _, number, action in sorted(some):
            left -= sizes[action.microbatch] if sizes else 1
            # rounding must not cost a share of exactly k passes its last one
            if left < -1e-9:
                break
            at = needed[action.stage, action.microbatch]
            # before the first backward there are forwards alone
            place = backwards[at - ahead] if at >= ahead else backwards[0] - (ahead - at)
            if place > number + 1:
                back[action] = place, backwards[at]
    return Offload(row, back, ahead)


def late_s(
    found: Offload, start_s: Mapping[Action, float], end_s: Mapping[Action, float], link_s: Sequence[float]
) -> float:
    """Seconds by which saved tensors come back after their backward could have begun, at most.

    The link carries one unit at a time each way, and both ways at once. A fetch begins once the action before it has
    ended, and its tensors have left.

    Args:
        found: What goes to the host.
        start_s: Of every action.
        end_s: Likewise.
        link_s: What the link takes for every unit, one way [U].
    """
    gone: dict[Action, float] = {}
    free = 0.0
    for action in found.row:
        if action in found.back:
            free = gone[action] = max(free, end_s[action]) + link_s[action.microbatch]
    late = free = 0.0
    for forward, (place, backward) in sorted(found.back.items(), key=lambda item: item[1]):
        free = max(free, end_s[found.row[place - 1]], gone[forward]) + link_s[forward.microbatch]
        late = max(late, free - start_s[found.row[backward]])
    return late


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a rank's schedule hides.

    Attributes:
        plan: What goes to the host.
        share: How much of all passes that is.
        more: The share with which a backward would wait least, of those that take less memory; None: there is none.
        late_s: By how much it would.
    """

    plan: Offload
    share: float
    more: float | None
    late_s: float


def hidden(
    schedule: Schedule,
    rank: int,
    sizes: Sequence[float],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    link_s: Sequence[float],
) -> Hidden:
    """Of shares in sixteenths, and of early and late fetches, what takes least memory while no backward waits.

    All stages are taken to be alike.

    Args:
        schedule: The order.
        rank: The row.
        sizes: How much every unit saves, in any measure [U].
        forward_s: Of every unit [U].
        backward_s: Likewise.
        link_s: What the link takes for every unit, one way [U].
    """
    forward, backward = (np.broadcast_to(np.asarray(s), (schedule.stages, len(s))) for s in (forward_s, backward_s))
    times = simulate(schedule, Durations(forward_s=forward, input_s=backward, weight_s=np.zeros(schedule.stages)))
    return hidden_in(times, schedule.actions[rank], schedule.slices, sizes, link_s)


def hidden_in(
    times: Simulation, row: Sequence[Action], slices: int, sizes: Sequence[float], link_s: Sequence[float]
) -> Hidden:
    """The same in a schedule of which it is known when every action runs.

    Args:
        times: When they do.
        row: The rank's actions [A].
        slices: N.
        sizes: As there.
        link_s: As there.
    """
    total = sum(sizes[action.microbatch] for action in row if action.kind == "F")
    # whole numbers: sums of shares in another order would be other amounts
    weights = [round(size / total * 2**40) for size in sizes]
    tried: list[tuple[int, float, float, Offload]] = []
    # more than a microbatch's backwards before its own, a fetch would come before its pass has left
    for step, ahead in product(range(STEPS + 1), (AHEAD << n for n in range(slices.bit_length()))):
        plan = offload(row, slices, step / STEPS, sizes=sizes, ahead=ahead)
        share = sum(sizes[action.microbatch] for action in plan.back) / total
        tried.append((_peak(plan, weights), late_s(plan, times.start_s, times.end_s, link_s), share, plan))
    # a plan that moves nothing is never late
    least, _, share, plan = min((one for one in tried if one[1] <= 0), key=lambda one: one[:3])
    late, more = min(((late, more) for peak, late, more, _ in tried if peak < least), default=(0.0, None))
    return Hidden(plan, share, more, late)


def _peak(plan: Offload, weights: Sequence[int]) -> int:
    """The most that is here at once of what passes save, in the measure of `weights` [U]."""
    held = peak = 0
    for action, away in zip(plan.row, plan.away_bytes(weights), strict=True):
        held += weights[action.microbatch] if action.kind == "F" else 0
        peak = max(peak, held + away)
        held -= weights[action.microbatch] if action.kind in "BW" else 0
    return peak
