"""What a controller has moved, when, and what it gained: values, and a line for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline_balance.spec import LayerMove


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Layers went to other ranks between two updates.

    Attributes:
        step: Updates made before it.
        layers: Which layers, from where and to where.
        predicted_gain_s: What it was to save per step.
        before_s: This rank's median step between the decision before and the move; None where there was no step.
        after_s: Its median step between the move and the next decision; None where there was no step.
        seconds: What the move took on the slowest rank; what travelled beside a step took none of it.
        early: The share of its bytes that did.
    """

    step: int
    layers: tuple[LayerMove, ...]
    predicted_gain_s: float
    before_s: float | None
    after_s: float | None
    seconds: float
    early: float = 0.0

    @property
    def measured_gain_s(self) -> float | None:
        """Seconds per step by the clock; a change of the loads counts, too. None until steps have run on both sides."""
        # medians of steps, in which a single slow one does not show
        return None if self.before_s is None or self.after_s is None else self.before_s - self.after_s

    def __str__(self) -> str:
        gain_s, before_s, after_s = self.measured_gain_s, self.before_s, self.after_s
        measured = "not measured yet"
        if gain_s is not None and before_s is not None and after_s is not None:
            measured = f"{1e3 * gain_s:.1f} ms measured ({1e3 * before_s:.1f} to {1e3 * after_s:.1f} ms)"
        beside = f", {self.early:.0%} of its bytes beside a step" if self.early else ""
        return (
            f"step {self.step}: {_moves_text(self.layers)}; gain per step {1e3 * self.predicted_gain_s:.1f} ms "
            f"predicted, {measured}; the move took {1e3 * self.seconds:.1f} ms{beside}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchChoice:
    """The number of microbatches was chosen again.

    Attributes:
        step: Updates made before it.
        before: The number in force until then.
        after: The number from then on.
        gain_s: What the best other number was predicted to save per step.
        error_s: By how much that may be wrong.
        step_s: The predicted step with `before`.
        reason: The choice in one phrase, for people.
    """

    step: int
    before: int
    after: int
    gain_s: float = 0.0
    error_s: float = 0.0
    step_s: float = 0.0
    reason: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceReport:
    """All moves so far, and numbers of microbatches that were chosen; prints as a line for each.

    Attributes:
        steps: Updates made so far.
        moves: The moves.
        reason: Of the last decision.
        microbatches: The choices.
    """

    steps: int
    moves: tuple[Move, ...]
    reason: str
    microbatches: tuple[MicrobatchChoice, ...] = ()

    def __str__(self) -> str:
        # a choice follows from the move of the same step
        made: list[Move | MicrobatchChoice] = [*self.moves, *self.microbatches]
        every = sorted(made, key=lambda one: one.step)
        return "\n".join(map(str, every)) or f"no layer has moved in {self.steps} steps: {self.reason}"


def _moves_text(moves: Sequence[LayerMove]) -> str:
    """Describe moves, with neighbouring layers that go together as "layers 4-5 from rank 0 to 1"."""
    runs: list[list[LayerMove]] = []
    for m in moves:
        # moves come by layer, so neighbours stand next to each other
        last = runs[-1][-1] if runs else None
        # a run continues only where source and destination are the same, too
        if last and (last.layer + 1, last.source, last.destination) == (m.layer, m.source, m.destination):
            runs[-1].append(m)
        else:
            runs.append([m])
    return ", ".join(
        f"layer{'s' if run[1:] else ''} {run[0].layer}{f'-{run[-1].layer}' if run[1:] else ''} "
        f"from rank {run[0].source} to {run[0].destination}"
        for run in runs
    )
