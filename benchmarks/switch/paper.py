"""DynaTran's own rows (Tables 1 and 3, Figure 9), predicted at the bandwidths that the paper states.

State is bf16 parameters, float32 master weights and two moments, ZeRO-1 in flat ranges; HotSpa's rows move parameters
only. Seconds are of the port model: no latency, no packing. Figures 7 and 8 have no figures in the text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pipeline_balance.elastic.models import model_named, parameters_only
from pipeline_balance.elastic.parallelism import FEWEST_BYTES, Parallelism
from pipeline_balance.elastic.switch import STATED, predict


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperRow:
    """One switch of the paper and its seconds; `peer_s` is HotSpa's, or Tenplex's, or of the slower variants."""

    table: str
    model: str
    before: str
    after: str
    paper_s: float
    parameters_only: bool = False
    order: tuple[int, ...] | None = None


def _both(table: str, model: str, one: str, two: str, there_s: float, back_s: float, **more: Any) -> list[PaperRow]:
    return [
        PaperRow(table=table, model=model, before=one, after=two, paper_s=there_s, **more),
        PaperRow(table=table, model=model, before=two, after=one, paper_s=back_s, **more),
    ]


ROWS: tuple[PaperRow, ...] = (
    *_both("1", "llama2-7b", "tp2,pp2,dp2", "tp4,pp4", 0.818, 0.874),
    *_both("1", "llama2-13b", "tp4,pp4", "tp2,pp8,dp2", 0.57, 0.51),
    *_both("1", "llama2-70b", "tp4,pp8,dp2", "tp8,pp16", 1.96, 1.62),
    *_both("1", "llama-32b", "tp4,pp4,dp2", "tp2,pp8,dp2", 0.526, 0.337, parameters_only=True),
    *_both("1", "llama-32b", "tp2,pp8,dp2", "pp16,dp2", 0.392, 0.299, parameters_only=True),
    *_both("1", "qwen3-30b-a3b", "tp4,pp8,ep4", "tp2,pp4,dp4,ep2", 0.42, 0.42),
    *_both("1", "qwen3-235b-a22b", "tp4,pp8,dp4,ep16", "tp8,pp16,ep8", 4.36, 4.36),
    *_both("3", "llama2-13b", "tp2,pp8", "tp2,pp2,dp4", 0.67, 0.64),
    *(
        PaperRow(table="Figure 9", model=name, before="tp4,dp2", after="tp4,dp2", paper_s=s, order=tuple(range(8, 16)))
        for name, s in (("gpt3-1.3b", 0.43), ("gpt3-2.7b", 0.69), ("gpt3-6.7b", 1.13))
    ),
)


def predicted(row: PaperRow) -> dict[str, Any]:
    """The paper's seconds beside what is predicted here, in the chosen order of ranks and in the order as given."""
    rates, per_node = STATED["a800"]
    model = model_named(row.model)
    if row.parameters_only:
        model = parameters_only(model)
    before, after = Parallelism.parse(f"{row.before},zero1"), Parallelism.parse(f"{row.after},zero1")
    given = predict(
        model, before, replace(after, order=row.order), rates=rates, ranks_per_node=per_node, machine="a800", flat=True
    )
    chosen = given
    if row.order is None:
        fewest = replace(after, order=FEWEST_BYTES)
        chosen = predict(model, before, fewest, rates=rates, ranks_per_node=per_node, machine="a800", flat=True)
    return {
        "table": row.table,
        "model": row.model,
        "from": row.before,
        "to": row.after,
        "ranks": chosen.ranks,
        "paper_s": row.paper_s,
        "predicted_s": chosen.simulated.seconds,
        "as_given_s": given.simulated.seconds,
        "bound_s": chosen.least_s,
        "direct_bound_s": chosen.least_direct_s,
        "wire_bytes": chosen.wire_bytes,
        "given_bytes": given.wire_bytes,
        "paper_over_predicted": row.paper_s / chosen.simulated.seconds if chosen.simulated.seconds else None,
    }
