"""DynaTran's own rows (Tables 1 and 3, Figure 9), predicted at the bandwidths that the paper states.

State is bf16 parameters, float32 master weights and two moments, ZeRO-1 in flat ranges; HotSpa's rows move parameters
only. Seconds are of the port model: no latency, no packing. Of Figures 7 and 8 the text has only the largest ratios.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline_balance.elastic.layouts.parallelism import FEWEST_BYTES, Parallelism
from pipeline_balance.elastic.predict.models import description_of
from pipeline_balance.elastic.predict.switch import STATED, predict
from prophet.machine.models import model_named


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperRow:
    """One switch of the paper: DynaTran's seconds, and those of what it is compared with.

    MCP is Megatron's distributed checkpoint, saved and loaded. Of Tenplex the text has only the ratio, so its seconds
    are DynaTran's times that.
    """

    table: str
    model: str
    before: str
    after: str
    paper_s: float
    peers_s: Mapping[str, float]
    parameters_only: bool = False
    order: tuple[int, ...] | None = None


def _both(
    table: str,
    model: str,
    one: str,
    two: str,
    there_s: float,
    back_s: float,
    *peers: tuple[str, float, float],
    **more: Any,
) -> list[PaperRow]:
    """There and back; peers: a name, its seconds there, and back."""
    there, back = ({name: times[k] for name, *times in peers} for k in (0, 1))
    return [
        PaperRow(table=table, model=model, before=one, after=two, paper_s=there_s, peers_s=there, **more),
        PaperRow(table=table, model=model, before=two, after=one, paper_s=back_s, peers_s=back, **more),
    ]


def _hotspa(one: str, two: str, there_s: float, back_s: float, hotspa_s: tuple[float, float]) -> list[PaperRow]:
    return _both("1", "llama-32b", one, two, there_s, back_s, ("HotSpa", *hotspa_s), parameters_only=True)


ROWS: tuple[PaperRow, ...] = (
    *_both("1", "llama2-7b", "tp2,pp2,dp2", "tp4,pp4", 0.818, 0.874, ("MCP", 30.41, 30.55)),
    *_both("1", "llama2-13b", "tp4,pp4", "tp2,pp8,dp2", 0.57, 0.51, ("MCP", 30.02, 42.05)),
    *_both("1", "llama2-70b", "tp4,pp8,dp2", "tp8,pp16", 1.96, 1.62, ("MCP", 92.88, 85.99)),
    *_hotspa("tp4,pp4,dp2", "tp2,pp8,dp2", 0.526, 0.337, (0.669, 0.439)),
    *_hotspa("tp2,pp8,dp2", "pp16,dp2", 0.392, 0.299, (0.826, 0.253)),
    *_both("1", "qwen3-30b-a3b", "tp4,pp8,ep4", "tp2,pp4,dp4,ep2", 0.42, 0.42, ("MCP", 389.2, 383.1)),
    *_both("1", "qwen3-235b-a22b", "tp4,pp8,dp4,ep16", "tp8,pp16,ep8", 4.36, 4.36, ("MCP", 1456.4, 1519.2)),
    *_both(
        "3",
        "llama2-13b",
        "tp2,pp8",
        "tp2,pp2,dp4",
        0.67,
        0.64,
        ("one message per tensor", 3.24, 3.43),
        ("packed, in turn", 1.27, 1.25),
    ),
    *(
        PaperRow(
            table="Figure 9",
            model=name,
            before="tp4,dp2",
            after="tp4,dp2",
            paper_s=s,
            peers_s={"Tenplex": ratio * s},
            order=tuple(range(8, 16)),
        )
        for name, s, ratio in (("gpt3-1.3b", 0.43, 8.5), ("gpt3-2.7b", 0.69, 10.7), ("gpt3-6.7b", 1.13, 15.0))
    ),
)


def predicted(row: PaperRow) -> dict[str, Any]:
    """The paper's seconds beside what is predicted here, in the chosen order of ranks and in the order as given."""
    machine = STATED["a800"]
    model = description_of(model_named(row.model))
    if row.parameters_only:
        model = replace(model, entries=())
    before, after = Parallelism.parse(f"{row.before},zero1"), Parallelism.parse(f"{row.after},zero1")
    given = predict(model, before, replace(after, order=row.order), machine=machine, flat=True)
    chosen = given
    if row.order is None:
        fewest = replace(after, order=FEWEST_BYTES)
        chosen = predict(model, before, fewest, machine=machine, flat=True)
    return {
        "table": row.table,
        "model": row.model,
        "from": row.before,
        "to": row.after,
        "ranks": chosen.ranks,
        "paper_s": row.paper_s,
        "peers_s": dict(row.peers_s),
        "predicted_s": chosen.simulated.seconds,
        "as_given_s": given.simulated.seconds,
        "bound_s": chosen.least_s,
        "direct_bound_s": chosen.least_direct_s,
        "wire_bytes": chosen.wire_bytes,
        "given_bytes": given.wire_bytes,
        "paper_over_predicted": row.paper_s / chosen.simulated.seconds if chosen.simulated.seconds else None,
    }
