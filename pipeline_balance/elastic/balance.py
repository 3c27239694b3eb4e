"""What balances a job's experts through its switches: an engine in every layout, and what engines have remembered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.pipeline.run.experts import MOST_BYTES
from pipeline_balance.pipeline.trainer import ElasticPipeline
from prophet.engine.attach import attach
from prophet.engine.carry import carry, memories
from prophet.engine.config import EngineConfig
from prophet.engine.engine import Engine
from prophet.errors import SpecError
from prophet.ranks.json_messages import gather_json, reasons_text
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import process_rank
from prophet.spec import Topology
from prophet.state.json_values import from_json, to_json

_MEMORY = {"ranks", "step", "plan", "history"}

BalanceConfig = EngineConfig | Callable[[Parallelism], EngineConfig]


class Balance:
    """Balances the experts of a job, and keeps what engines remember while a layout shares no experts.

    `engine` is this process's, None where its stages share no experts.

    Args:
        config: How to balance, or a function that says so for a layout; None balances nothing.
    """

    def __init__(self, config: BalanceConfig | None) -> None:
        self.config = config
        self.engine: Engine | None = None
        # Names of the engine's layers, in its order
        self._layers: list[str] = []
        # By layer: what each group of ranks that share its experts remembers
        self._known: dict[str, list[Any]] = {}

    def config_for(self, layout: Parallelism, passes: int) -> EngineConfig:
        """How a layout is balanced.

        Args:
            layout: The layout.
            passes: Forward passes in a step, which its engine takes for `accumulation_steps`.

        Raises:
            SpecError: For a machine of another size, or a time limit of its own.
        """
        config = self.config(layout) if callable(self.config) else self.config
        if not isinstance(config, EngineConfig):
            raise SpecError(f"balance_experts: expected a prophet.EngineConfig, got {config!r:.100}")
        if isinstance(config.topology, Topology) and config.topology.ranks != layout.ep:
            raise SpecError(
                f"balance_experts: the topology has {config.topology.ranks} ranks, {layout} shares experts over "
                f"{layout.ep}: give a function from the layout to a configuration"
            )
        # it would need groups beside the job's, which nobody makes in one order on all processes
        if config.timeout_s is not None:
            raise SpecError(
                f"balance_experts: expected timeout_s=None, got {config.timeout_s:g}: experts have the job's limit, "
                f"so give it as Job(timeout_s={config.timeout_s:g})"
            )
        return replace(config, accumulation_steps=passes)

    def check(self, layout: Parallelism) -> None:
        """Raise `SpecError` where experts cannot be balanced in a layout."""
        if self.config is not None and layout.ep > 1:
            self.config_for(layout, 1)

    def export_memory(self, layout: Parallelism) -> dict[str, Any]:
        """What this process reports of its group's memory, if it is the group's first; between two steps."""
        place = layout.place(process_rank())
        # all ranks of a group remember the same: its first one speaks for it
        if self.engine is None or place is None or place.ep:
            return {}
        every = zip(self._layers, memories(self.engine), strict=True)
        return {name: [place.edp, to_json(memory, name, most_bytes=MOST_BYTES)] for name, memory in every}

    def learn(self, every: Sequence[Mapping[str, Any]]) -> None:
        """Keep what all processes have exported; `every` [N] is in the order of ranks."""
        found: dict[str, dict[int, Any]] = {}
        for row in every:
            for name, (group, memory) in row.items():
                found.setdefault(name, {})[group] = from_json(memory)
        # layers that no process exported keep what was known: their stages may have been without an engine
        self._known |= {name: [groups[g] for g in sorted(groups)] for name, groups in found.items()}

    def kept(self) -> dict[str, Any]:
        """All that is known, in the form that a checkpoint has."""
        return {name: [to_json(m, name, most_bytes=MOST_BYTES) for m in every] for name, every in self._known.items()}

    def keep(self, kept: Mapping[str, Any]) -> None:
        """Know this and nothing else. Raises `SpecError`, nothing changed, for what `kept` did not write."""
        known = {
            name: [from_json(memory) for memory in every] for name, every in kept.items() if isinstance(every, list)
        }
        for name, every in known.items():
            if not all(isinstance(m, dict) and set(m) == _MEMORY and type(m["step"]) is int for m in every):
                raise SpecError(f"what balancing remembers of {name}: expected {sorted(_MEMORY)} of every group")
        self._known = known

    def follow(self, pipeline: ElasticPipeline) -> None:
        """Note that layers have moved within the layout in force, whose engine the pipeline has made anew.

        Args:
            pipeline: Runs the job.
        """
        # `begin` has noted the new one; a process that has no such layers any more has none
        if pipeline.balancer is None:
            self.engine = None

    def begin(self, pipeline: ElasticPipeline, layout: Parallelism) -> None:
        """Balance the layers that share experts here in the layout in force; collective over all processes.

        Args:
            pipeline: Runs the job.
            layout: The layout in force.

        Raises:
            SpecError: On all processes where one cannot. Nothing is balanced then, and training goes on correctly.
            StageFailed: On all processes where one cannot attach while others wait for it in that.
        """
        # an engine of the old layout must not be asked for its memory again
        self.engine, problem = None, ""
        if self.config is None or layout.ep == 1:
            return
        config = self.config_for(layout, pipeline.config.microbatches * layout.slices)
        place = layout.place(process_rank())

        def attached(layers: nn.Module) -> Any:
            nonlocal problem
            # ranks of its column may wait in this one for a rank where it fails: the pipeline tells them why
            self.engine = attach(layers, config=config)
            try:
                names = {id(m): n for n, m in pipeline.module.named_modules()}
                self._layers = [names[id(layer)] for layer in self.engine.layers]
                assert place is not None
                # where the number of groups or of their ranks differs, it shares out what all have remembered
                carry(self.engine, [self._known.get(n, []) for n in self._layers], place.edp, layout.edp)
            # raised after all have reported: an engine on some ranks alone would wait for the others
            except Exception as error:
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
            return self.engine

        try:
            pipeline.balance_experts(attached)
        except SpecError as error:
            self.engine = None
            raise SpecError(f"the job is in {layout}, but {error}") from error
        op = Operation("beginning to balance experts")
        every = gather_json(problem, pipeline.collective, op)
        if any(every):
            pipeline.experts.release()
            self.engine = None
            raise SpecError(f"the job is in {layout}, but its experts are not balanced: {reasons_text(every)}")
