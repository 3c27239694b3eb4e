"""Expert-parallel layers inside stages: the replicas of a stage share their experts, each holds a part of them.

Such a layer exchanges tokens over the column of its stage, so all replicas must run the same actions in the same order.
It has communicators that neither the gradients' means nor the stages' messages use. Its experts' gradients come out as
the mean over the column, so they stay out of the pipeline's means. A layer that moves takes its experts along within
each replica, and is balanced in its new column with what was remembered in the old one.

Shape legend: R replicas, which are the ranks of the expert-parallel group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from pipeline_balance.pipeline.measure.meter import Meter
from pipeline_balance.pipeline.model.expert_layers import expert_layers
from prophet.errors import CollectiveError, SpecError, in_a_line
from prophet.ranks.collective import Channel, Collective, Pending
from prophet.ranks.forwarding import ForwardingCollective, ForwardingPending
from prophet.ranks.json_messages import gather_json, reasons_text
from prophet.ranks.messages import gather_numbers
from prophet.ranks.operation import Operation
from prophet.state.json_values import from_json, to_json

MOST_BYTES = 1 << 28
"""The most bytes of one tensor that a balancer remembers, in a message."""


class Balancer(Protocol):
    """What balances a stage's expert-parallel layers, as far as a pipeline drives it; `prophet.attach` returns one.

    What it remembers moves with its layers where it has the `state_dict` and the `load_state_dict` of an engine. One
    that is `closed` is not made anew after a move.
    """

    def ensure_step(self) -> None:
        """Begin an update, unless one is under way."""

    def no_sync(self) -> AbstractContextManager[None]:
        """The context of backward passes that do not complete the update's gradients."""

    def complete_gradients(self) -> None:
        """Bring home gradients that are still away."""

    def finish_step(self) -> None:
        """End the update, whose gradients are home; where its layers move in a step, before the optimizers run."""

    def close(self) -> None:
        """Balance no more."""


class StageExperts:
    """The expert-parallel layers of a pipeline, and what balances those of this rank.

    Collective over the column.

    Args:
        units: [L] the pipeline's units.
        process: This process's number.
        column: The processes with its pipeline rank, by replica. If empty, groups are right, and nothing is sent:
            whoever made them calls `read` after every change.
        meter: Times layers; their waits for others are none of a layer's work.

    Attributes:
        units: Numbers of the units with such layers.
        parameters: What replicas share of them.
        balancer: What balances those that run here; None without any.
        under_way: Whether it is in the middle of an update, with gradients of experts away.

    Raises:
        SpecError: A layer's expert-parallel group is not the column.
    """

    def __init__(self, units: Sequence[nn.Module], process: int, column: Sequence[int], meter: Meter) -> None:
        self._units, self._process, self._column, self._meter = units, process, column, meter
        self._attach: Callable[[nn.Module], Balancer] | None = None
        # the units that `balancer` has, in its order
        self._balanced: tuple[int, ...] = ()
        self.balancer: Balancer | None = None
        self.under_way = False
        self.parameters: set[nn.Parameter] = set()
        self.read()

    def read(self) -> None:
        """Find the layers that share experts now, and with whom."""
        for p in self.parameters:
            # marks are set anew below: parameters may have left these layers
            p.prophet_averaged = False  # type: ignore[attr-defined]
        layers = list(expert_layers(self._units))
        first: dict[int, int] = {}
        for unit, name, module in layers:
            if first.setdefault(id(module), unit) != unit:
                raise SpecError(
                    f"layer {unit} ({name}) is the same module as one of layer {first[id(module)]}, and shares experts "
                    "with other ranks: give each layer experts of its own"
                )
        self.units = tuple(dict.fromkeys(unit for unit, _, _ in layers))
        self.parameters = set()
        timed: dict[int, TimedCollective] = {}
        for unit, name, module in layers:
            inner: Collective = module.collective  # type: ignore[assignment]
            # layers that share a collective share its wrapper, so that it still is one object
            if id(inner) not in timed:
                if self._column:
                    self._check_group(f"layer {unit} ({name})", inner, self._process, self._column)
                timed[id(inner)] = TimedCollective(inner, self._meter)
            module.collective = timed[id(inner)]  # type: ignore[assignment]
            self.parameters |= {p for p in module.parameters() if getattr(p, "prophet_expert", False)}
        self.collectives = [t.inner for t in timed.values()]
        for p in self.parameters:
            # nobody else holds it, or the pipeline averages it
            p.prophet_averaged = True  # type: ignore[attr-defined]

    def _check_group(self, where: str, collective: Collective, process: int, column: Sequence[int]) -> None:
        op = Operation("comparing an expert-parallel group with its column")
        members = gather_numbers(collective, [process], op=op)[:, 0].tolist()
        if members != list(column):
            raise SpecError(
                f"{where} shares its experts over processes {members}, but the replicas of its stage are processes "
                f"{list(column)}: make it with group=prophet.parallel.expert_groups(pipeline_ranks)[1]"
            )

    @property
    def any(self) -> bool:
        """Whether any stage of the pipeline, here or elsewhere, has such layers."""
        return bool(self.units)

    def check_static(self, what: str) -> None:
        """Raise `SpecError` that a pipeline cannot do `what` while replicas share experts."""
        if self.any:
            raise SpecError(
                f"a pipeline cannot {what} while the replicas of layers {list(self.units)} share their experts"
            )

    def balance(
        self, attach: Callable[[nn.Module], Balancer], mine: Sequence[int], passes: int, world: Collective
    ) -> Balancer | None:
        """Have `attach` balance the layers of the units that run here.

        Args:
            attach: Attaches a balancer to a module.
            mine: Numbers of the units that run here.
            passes: Backward passes of a step, microbatches times slices.
            world: Over all ranks.

        Returns:
            What `attach` returned; None where the units share no experts.

        Raises:
            SpecError: On all ranks of `world`, with nothing balanced, where `attach` fails on all ranks of a column, or
                a balancer counts on another number of passes: gradients would come home at the wrong moment.
        """
        self._attach = attach
        problem = self._attempt(lambda: self._attach_to(self.shared(mine)))
        if self.any:
            steps = getattr(getattr(self.balancer, "config", None), "accumulation_steps", 1)
            told = self._gather(problem, [problem, steps], world, Operation("comparing accumulation_steps"))
            self._refuse([problem for problem, _ in told], "experts are not balanced")
            # with 1 a balancer takes every pass for the last, which is right, too
            # compared on all ranks, those without a balancer too, as the check is collective
            every = [steps for _, steps in told]
            wrong = [rank for rank, n in enumerate(every) if n not in (1, passes)]
            if wrong:
                # closed, so that another one can be attached
                self.release()
                raise SpecError(
                    f"ranks {wrong} balance experts with accumulation_steps={every[wrong[0]]}: a step of this pipeline "
                    f"has {passes} backward passes, its microbatches times their slices; give that number, or leave 1"
                )
        return self.balancer

    def release(self) -> None:
        """Have nobody balance the layers from now on; between two steps."""
        self._attach = None
        self._close()

    def _close(self) -> None:
        balancer, self.balancer, self.under_way = self.balancer, None, False
        if balancer is not None:
            balancer.close()

    def _attach_to(self, shared: tuple[int, ...]) -> None:
        self._balanced = shared
        if shared:
            assert self._attach is not None
            self.balancer = self._attach(nn.ModuleList(self._units[unit] for unit in shared))

    # --- around a move ----------------------------------------------------------------------------------------

    def shared(self, mine: Sequence[int]) -> tuple[int, ...]:
        """Those of these units that share experts."""
        return tuple(unit for unit in mine if unit in self.units)

    @property
    def balanced(self) -> bool:
        """Whether layers are balanced, on any rank."""
        return self.any and self._attach is not None

    def memory(self) -> dict[str, Any]:
        """What is remembered of each unit here, as JSON holds it, by its number; between two steps.

        All ranks of a column remember the same. None where the balancer has no `state_dict`; nothing where units are
        not balanced, or not any more.
        """
        if self.balancer is None or getattr(self.balancer, "closed", False):
            return {}
        state_dict = getattr(self.balancer, "state_dict", None)
        if state_dict is None:
            return {str(unit): None for unit in self._balanced}
        # without the machine: another column may be on other hosts, and its balancer knows its own
        state = {name: value for name, value in state_dict().items() if name != "topology"}
        found, first = dict[str, Any](), 0
        for unit in self._balanced:
            end = first + sum(1 for _ in expert_layers([self._units[unit]]))
            own = {**state, **{name: state[name][first:end] for name in ("plans", "histories")}}
            found[str(unit)], first = to_json(own, f"what is remembered of layer {unit}", most_bytes=MOST_BYTES), end
        return found

    def follow(
        self, before: Sequence[int], mine: Sequence[int], remembered: Mapping[str, Any], world: Collective
    ) -> None:
        """Balance the layers that run here after a move, if they were balanced before; collective over `world`.

        Where layers have come or gone, another balancer takes the place of the one from before.

        Args:
            before: Numbers of the units that ran here.
            mine: Numbers of the units that run here now.
            remembered: The `memory` of all units that ran where layers have come or gone.
            world: Over all ranks.

        Raises:
            SpecError: On all ranks, where all of a column cannot. Nothing is balanced then, and training goes on
                correctly.
        """
        if not self.balanced:
            return

        def attach() -> None:
            shared = self.shared(mine)
            if self.shared(before) != shared:
                self._close()
                # what was closed by hand stays so
                if all(str(unit) in remembered for unit in shared):
                    self._attach_to(shared)
                    self._remember([remembered[str(unit)] for unit in shared])

        problem = self._attempt(attach)
        every = self._gather(problem, problem, world, Operation("balancing experts that have moved"))
        self._refuse(every, "the layers have moved, but their experts are not balanced")

    def _attempt(self, attach: Callable[[], None]) -> str:
        """Return what went wrong: raised after all have reported, as balancers on some ranks would wait for others."""
        try:
            attach()
        except CollectiveError:
            raise
        except Exception as error:
            return in_a_line(error)
        return ""

    def _gather(self, problem: str, word: Any, world: Collective, op: Operation) -> list[Any]:
        """Gather every rank's word. Where that fails, a rank with a problem raises it: it is the cause."""
        try:
            return gather_json(word, world, op)
        except CollectiveError:
            if not problem:
                raise
            # the others of the column may wait for this rank in what failed here, and cannot know why
            raise RuntimeError(f"experts are not balanced: {problem}") from None

    def _refuse(self, problems: Sequence[str], what: str) -> None:
        """Raise `SpecError`, with nothing balanced, where a rank has a problem."""
        if any(problems):
            self.release()
            raise SpecError(f"{what}: {reasons_text(problems)}")

    def _remember(self, remembered: Sequence[Any]) -> None:
        load = getattr(self.balancer, "load_state_dict", None)
        if load is None or not remembered or None in remembered:
            return
        every = [from_json(one) for one in remembered]
        joined = {name: [one for state in every for one in state[name]] for name in ("plans", "histories")}
        # steps count up in traces, so all go on after the layer that is furthest
        load({**every[0], **joined, "step": max(state["step"] for state in every)})

    # --- around a step ----------------------------------------------------------------------------------------

    def passing(self, *, update: bool) -> AbstractContextManager[None]:
        """The context of a training pass; without `update`, gradients stay where they are."""
        if self.balancer is None:
            return nullcontext()
        self.under_way = True
        self.balancer.ensure_step()
        # gradients come home once per update, so passes before the last one must not send them
        return nullcontext() if update else self.balancer.no_sync()

    def complete(self) -> None:
        """Bring all gradients home."""
        if self.balancer is not None:
            self.balancer.complete_gradients()

    def finish(self) -> None:
        """End the update, unless it has ended: gradients are home, and the optimizers have run if its layers stay."""
        under_way, self.under_way = self.under_way, False
        if self.balancer is not None and under_way:
            self.balancer.finish_step()


class TimedCollective(ForwardingCollective):
    """Has `meter` learn how long calls have waited for other ranks."""

    def __init__(self, inner: Collective, meter: Meter) -> None:
        super().__init__(inner)
        self.meter = meter

    def around(self, inner: Collective) -> Collective:
        return TimedCollective(inner, self.meter)

    def transfer(self, launch: Callable[[], Pending], op: Operation, channel: Channel) -> Pending:
        return _Timed(launch(), self.meter)

    def gather(self, call: Callable[[], Tensor], op: Operation, channel: Channel) -> Tensor:
        with self.meter.waiting():
            return call()


class _Timed(ForwardingPending):
    """A transfer whose waits count as waits."""

    def __init__(self, inner: Pending, meter: Meter) -> None:
        super().__init__(inner)
        self.meter = meter

    def wait(self) -> Tensor:
        # only the time in here is a wait: work has gone on since the transfer began
        with self.meter.waiting():
            return super().wait()
