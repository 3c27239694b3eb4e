"""What balances a job's experts through its switches: an engine in every layout, and what engines have remembered."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.elastic.parallelism import Parallelism
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.pipeline.training_state import gather_json, in_words
from prophet.engine.attach import attach
from prophet.engine.carry import carry, memories
from prophet.engine.config import EngineConfig
from prophet.engine.engine import Engine
from prophet.errors import SpecError
from prophet.ranks.collective import Operation
from prophet.ranks.process_group import process_rank

BalanceConfig = EngineConfig | Callable[[Parallelism], EngineConfig]


class Balance:
    """Balances the experts of a job by `config`, or by what that says of a layout; None balances nothing.

    engine: this process's, None where its stages share no experts. What engines remember is kept while a layout shares
    none.
    """

    def __init__(self, config: BalanceConfig | None) -> None:
        self.config = config
        self.engine: Engine | None = None
        self._layers: list[str] = []  # of the engine
        self._known: dict[str, list[Any]] = {}  # by layer: what every group remembers

    def config_for(self, layout: Parallelism, microbatches: int) -> EngineConfig:
        """How a layout is balanced. Raises `SpecError` for a machine of another size."""
        config = self.config(layout) if callable(self.config) else self.config
        if not isinstance(config, EngineConfig):
            raise SpecError(f"balance: expected a prophet.EngineConfig, got {config!r:.100}")
        if config.topology is not None and config.topology.ranks != layout.ep:
            raise SpecError(
                f"balance: the topology has {config.topology.ranks} ranks, {layout} shares experts over {layout.ep}: "
                "give a function from the layout to a configuration"
            )
        return replace(config, accumulation_steps=microbatches)

    def check(self, layout: Parallelism) -> None:
        """Raise `SpecError` where experts cannot be balanced in a layout."""
        if self.config is not None and layout.ep > 1:
            self.config_for(layout, 1)

    def told(self, layout: Parallelism) -> dict[str, Any]:
        """What this process tells all others of its group's memory, where it is the first of it; between two steps."""
        place = layout.place(process_rank())
        if self.engine is None or place is None or place.ep:
            return {}
        every = zip(self._layers, memories(self.engine), strict=True)
        return {name: [place.edp, _packed(memory)] for name, memory in every}

    def learn(self, every: Sequence[Mapping[str, Any]]) -> None:
        """Keep what all processes have `told`."""
        found: dict[str, dict[int, Any]] = {}
        for said in every:
            for name, (group, memory) in said.items():
                found.setdefault(name, {})[group] = _unpacked(memory)
        self._known |= {name: [groups[g] for g in sorted(groups)] for name, groups in found.items()}

    def begin(self, pipeline: ElasticPipeline, layout: Parallelism) -> None:
        """Balance the layers that share experts here in the layout in force; collective over all processes.

        Raises `SpecError` on all of them where one cannot; nothing is balanced then, and training goes on right.
        """
        self.engine, problem = None, ""
        if self.config is None or layout.ep == 1:
            return
        config = self.config_for(layout, pipeline.config.microbatches)
        place = layout.place(process_rank())

        def attached(layers: nn.Module) -> Any:
            nonlocal problem
            try:
                self.engine = attach(layers, config=config)
                names = {id(m): n for n, m in pipeline.module.named_modules()}
                self._layers = [names[id(layer)] for layer in self.engine.layers]
                assert place is not None
                carry(self.engine, [self._known.get(n, []) for n in self._layers], place.edp, layout.edp)
            except (RuntimeError, ValueError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
            return self.engine

        pipeline.balance_experts(attached)
        op = Operation("beginning to balance experts")
        every = gather_json(problem, pipeline.collective, pipeline.config.device, op)
        if any(every):
            pipeline.experts.release()
            self.engine = None
            raise SpecError(f"the job is in {layout}, but its experts are not balanced: {in_words(every)}")


def _packed(value: Any) -> Any:
    """What JSON can say of numbers and tensors in dictionaries."""
    if isinstance(value, Tensor):
        data = base64.b64encode(value.contiguous().numpy().tobytes()).decode()
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "data": data}
    return {k: _packed(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _unpacked(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"dtype", "shape", "data"}:
        data = bytearray(base64.b64decode(value["data"]))
        return torch.frombuffer(data, dtype=getattr(torch, value["dtype"])).reshape(value["shape"])
    return {k: _unpacked(v) for k, v in value.items()}
