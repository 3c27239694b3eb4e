"""SlimPipe's tables and figures by simulated schedules, closed forms and bytes; no kernel's rate is known here.

Idle time is relative to a rank's work, as the paper's bubbles are, and memory to a microbatch's activations in all
layers (M_a). Shape legend: P ranks, V stages per rank, M microbatches, N slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.papers.rows import Assumption, Number, Row, Value, printed, row_of
from benchmarks.papers.slimpipe_memory import (
    CARD_BYTES,
    MODELS,
    VOCABULARY,
    K,
    Layout,
    bytes_by_rank,
    kept_bytes,
    least_card_bytes,
    longest,
    state_bytes,
)
from benchmarks.slices.by_hand import FLOAT
from benchmarks.slices.peers import terapipe, v_half, v_min, zb_v
from pipeline_balance.schedules.actions import Schedule
from pipeline_balance.schedules.classic import gpipe, interleaved, one_f_one_b
from pipeline_balance.schedules.closed_forms import (
    exchange_last_rank_idle_over_work,
    interleaved_idle_s,
)
from pipeline_balance.schedules.exchange import Exchange, plan
from pipeline_balance.schedules.exchange_times import ExchangeCosts, LayerSeconds, simulate_exchange
from pipeline_balance.schedules.simulate import Durations, peak_activation_bytes, simulate
from pipeline_balance.schedules.sliced import sliced
from pipeline_balance.schedules.vocabulary import sharing

PAPER = "SlimPipe"
ASSUMPTIONS: Mapping[str, Assumption] = {
    "exchange": Assumption(assumed="attention exchanged where the cell says so", instead="attention always exchanged"),
    "mean": Assumption(assumed="the mean of all ranks' waits", instead="the last rank's wait, all else even,"),
    "order": Assumption(assumed="the paper's order of slices", instead="the minimal one"),
    "microbatches": Assumption(assumed="the microbatches of the caption", instead="as many as ranks"),
    "scheme": Assumption(assumed="the scheme of the cell", instead="V-Half"),
    "inner": Assumption(assumed="gate, up and product kept", instead="the product computed again"),
    "logits": Assumption(assumed="logits kept once", instead="logits and their gradients kept"),
    "cache": Assumption(assumed="keys and values kept beside inputs", instead="inputs alone, as without slices,"),
    "layouts": Assumption(assumed="context parallelism across nodes", instead="all of it within a node"),
}
# Of Figure 12, tokens of a step in K
STEP_K = 4 * 1024
# Full recomputation repeats the forward: four parts for three
RECOMPUTED = 4.0 / 3.0
Form = Callable[[dict[str, str], str | None], Value]


class SlimPipe:
    """Ours for every number of the paper."""

    def __init__(self) -> None:
        self._forms: Mapping[str, Form] = {
            **dict.fromkeys(("Table 2", "Section 2.2", "Figure 1", "Figure 3", "Figure 6"), self.schemes),
            **dict.fromkeys(("Figure 4", "Figure 5", "Figure 7", "Figure 8", "Figure 9"), self.timelines),
            **dict.fromkeys(("Section 3", "Section 4.3", "Table 3"), self.sizes),
            "Equation 2": self.exchanged,
            "Figure 2": self.contexts,
            "Figure 14": self.contexts,
            "Table 4": self.contexts,
            "Figure 10": self.near_the_curve,
            "Figure 11": self.turns,
            "Figure 12": self.end_to_end,
            "Figure 13": self.schemes_in_turn,
        }

    def __call__(self, number: Number, changed: str | None) -> Value:
        """Return ours for a number, with one assumption changed where a name is given."""
        return self._forms[number.table](number.at, changed)

    def schemes(self, at: dict[str, str], changed: str | None) -> Value:
        """Table 2 and the figures of its forms: idle time over work, or the most activations that a rank holds."""
        scheme, (p, v, m, n) = at["scheme"], _shape(at)
        if changed == "microbatches":
            m = max(p, m)
        schedule = _schedule(scheme, p, v, m, n, minimal=changed == "order")
        if at["what"] == "memory":
            return max(peak_activation_bytes(schedule, (1,) * schedule.stages)) / (schedule.stages * schedule.slices)
        if changed == "mean" and n > 1:
            return exchange_last_rank_idle_over_work(p, m, n)
        return _idle(schedule, scheme, at.get("costs", "even"), exchanged=scheme == "slimpipe" or changed == "exchange")

    def timelines(self, at: dict[str, str], changed: str | None) -> Value:
        """Figures 4, 5, 7, 8 and 9: what their boxes show, counted in the schedule."""
        what, (p, v, m, n) = at["what"], _shape(at)
        if what in ("memory", "bubble"):
            return self.schemes(at, changed)
        if what == "least-microbatches":
            form = interleaved_idle_s(p, v, 1.0, 2.0)
            found = {k: simulate(interleaved(p, v, k), _even(p * v, v)).idle_s[0] for k in range(1, 2 * p)}
            return min(k for k, idle_s in found.items() if math.isclose(idle_s, form))
        if what == "ahead":
            row = _schedule("slimpipe", p, v, m, n, minimal=changed == "order").actions[0]
            return next(i for i, action in enumerate(row) if action.kind == "B")
        if what == "shorter":
            before, after = (
                simulate(_schedule(s, p, v, m, n), _even(p, p * k)) for s, k in (("1f1b", 1), ("slimpipe", n))
            )
            return before.idle_s[0] / after.idle_s[0]
        if what == "idle":
            return _with_head(at["head"], p, m, n) / ((p - 1) * 3.0)
        exchange = plan(sliced(p, 1, m, n, "aligned", helped=True))
        return _differences(exchange, helped=what == "difference-after")[what.removesuffix("-after")]

    def sizes(self, at: dict[str, str], changed: str | None) -> Value:
        """Table 3 in billions of parameters, and the two sums in GiB of Sections 3 and 4.3."""
        del changed
        model = MODELS[at["model"]]
        if at["what"] == "parameters":
            return (model.mixers + model.feed_forwards) / 1e9
        tokens = _context_k(at) * K / int(at["t"])
        if at["what"] == "logits":
            return tokens * VOCABULARY * FLOAT / 2**30
        return tokens * model.layers * kept_bytes(model, Layout(recompute="full"), sliced=False) / 2**30

    def exchanged(self, at: dict[str, str], changed: str | None) -> Value:
        """Equation 2: what the rank that sends most sends forward, in L M_h per microbatch."""
        del changed
        p, v, m, n = _shape(at)
        exchange = plan(sliced(p, v, m, n, "aligned", helped=True))
        return max(exchange.slices_moved()[0]) / (p * v * m * n)

    def contexts(self, at: dict[str, str], changed: str | None) -> Value:
        """Figures 2 and 14, Table 4: the longest sequence in K tokens that fits."""
        scheme, (p, v, m, n) = at["scheme"], _shape(at)
        if changed == "scheme":
            scheme, v = "v-half", 1
        layout = _layout(at, changed)
        schedule, model = _schedule(scheme, p, v, m, n), MODELS[at["model"]]
        split = scheme == "slimpipe"
        if "offload" in at:
            # what is left on the card; nothing is known of what else is there
            kept = (1.0 - int(at["offload"]) / 100.0) * max(bytes_by_rank(model, layout, schedule, split_head=split))
            free = CARD_BYTES - state_bytes(model, layout, p)
            return 0.0, free / kept / K if kept else math.inf
        found = longest(model, layout, schedule, split_head=split) / K
        # the figures' contexts double
        return 32.0 * 2 ** math.floor(math.log2(found / 32.0)) if at.get("of") == "drawn" else found

    def near_the_curve(self, at: dict[str, str], changed: str | None) -> Value:
        """Figure 10: a rank's bytes over M_t / P, or the gap between the first and the last rank in M_a."""
        p, v, m, n = _shape(at)
        if at["what"] == "gap":
            schedule = _schedule("slimpipe", p, v, m, n, minimal=changed == "order")
            held = peak_activation_bytes(schedule, (1,) * schedule.stages)
            return (held[0] - held[-1]) / (p * v * n)
        model, layout = MODELS["Llama-13B"], _layout(at, changed)
        tokens = _context_k(at) * K
        found = bytes_by_rank(model, layout, _schedule("slimpipe", p, v, m, n), split_head=True)
        whole = bytes_by_rank(model, layout, one_f_one_b(1, 1), split_head=True)[0]
        rank = 0 if at["rank"] == "first" else -1
        return (
            (state_bytes(model, layout, p) + tokens * found[rank])
            * p
            / (state_bytes(model, layout, 1) + tokens * whole)
        )

    def turns(self, at: dict[str, str], changed: str | None) -> Value:
        """Figure 11: the most slices as long as those at which the shorter context is fastest."""
        del changed
        slices, shorter = (float(word) for word in at["as"].removesuffix("K").split("of"))
        return slices * _context_k(at) / shorter

    def end_to_end(self, at: dict[str, str], changed: str | None) -> Value:
        """Figure 12, whose layouts are not printed: bounds of its speed-ups, or GB of the best layout."""
        if "system" in at:
            tokens, slices = _context_k(at), at["system"] == "slimpipe"
            model, cards, recompute = MODELS[at["model"]], int(at["gpus"]), "selective" if slices else "full"
            # SlimPipe is said to need neither full recomputation nor other nodes
            spread = not slices and changed != "layouts"
            options: Any = {"recompute": recompute, "sliced": slices, "spread": spread}
            return least_card_bytes(model, tokens * K, cards, STEP_K // tokens, **options) / 1e9
        p = STEP_K // _context_k(at)
        # Interleaved 1F1B needs as many microbatches as ranks; two stages per rank at least
        return 1.0, RECOMPUTED * (1.0 + interleaved_idle_s(p, 2, 1.0, 2.0) / (3.0 * p))

    def schemes_in_turn(self, at: dict[str, str], changed: str | None) -> Value:
        """Figure 13: a step of the other scheme over one of SlimPipe's, as far as waits make it."""
        del changed
        p, v, m, n = _shape(at)
        other, costs = at["over"], at["costs"]
        theirs = _idle(_schedule(other, p, v, m, 1), other, costs, exchanged=False)
        ours = _idle(_schedule("slimpipe", p, v, m, n), "slimpipe", costs, exchanged=True)
        return (1.0 + theirs) / (1.0 + ours)


def rows(*, causes: bool = True, done: Callable[[], object] = lambda: None) -> list[Row]:
    """A row for every printed number of the paper.

    Args:
        causes: Whether to look for the assumption behind every miss.
        done: Called after every row.
    """
    derive, found = SlimPipe(), []
    for number in printed():
        if number.paper == PAPER:
            found.append(row_of(number, derive, ASSUMPTIONS, causes=causes))
            done()
    return found


def _shape(at: Mapping[str, str]) -> tuple[int, int, int, int]:
    """P, V, M and N; two microbatches of slices hold as much as more."""
    return int(at["p"]), int(at.get("v", 1)), int(at.get("m", 2)), int(at.get("n", 1))


def _context_k(at: Mapping[str, str]) -> int:
    return int(at["context"].removesuffix("K"))


def _layout(at: Mapping[str, str], changed: str | None) -> Layout:
    sizes: dict[str, Any] = {name: int(at[name]) for name in "tce" if name in at}
    recompute: Any = at.get("recompute", "none")
    inner, logits = (2 if changed == "inner" else 3), (2 if changed == "logits" else 1)
    return Layout(**sizes, recompute=recompute, inner=inner, logits=logits, cached=changed != "cache")


def _schedule(scheme: str, p: int, v: int, m: int, n: int, *, minimal: bool = False) -> Schedule:
    makers: Mapping[str, Callable[[], Schedule]] = {
        "gpipe": lambda: gpipe(p, m),
        "terapipe": lambda: terapipe(p, m, n),
        "1f1b": lambda: one_f_one_b(p, m),
        "interleaved": lambda: interleaved(p, v, m),
        "zb-v": lambda: zb_v(p, m),
        "v-half": lambda: v_half(p, m),
        "v-min": lambda: v_min(p, m),
        "slimpipe": lambda: sliced(p, v, m, n, "minimal" if minimal else "aligned"),
    }
    return makers[scheme.removesuffix("-alone")]()


def _parts(costs: str) -> tuple[float, float]:
    """A microbatch's forward seconds in all layers: all but attention, and attention."""
    if costs in ("even", "attention"):
        return float(costs == "even"), float(costs == "attention")
    rest, attention = MODELS["Llama-13B"].forward_flops(int(costs.removesuffix("K")) * K)
    return rest / (rest + attention), attention / (rest + attention)


def _even(stages: int, units: int) -> Durations:
    """Equal stages and units, backward twice as long."""
    return Durations.uniform(stages, forward_s=1.0 / units, input_s=1.0 / units, weight_s=1.0 / units)


def _idle(schedule: Schedule, scheme: str, costs: str, *, exchanged: bool) -> float:
    """Idle time over work; backward takes twice as long, and attention has no weights."""
    rest, attention = _parts(costs)
    p, stages, n = schedule.ranks, schedule.stages, schedule.slices
    if exchanged and n > 1 and attention:
        again = sliced(p, stages // p, schedule.microbatches, n, "aligned", helped=True)
        # a sequence's attention is n ** 2 pieces, of which n are on the diagonal
        piece, other = attention / (stages * n**2), rest / (stages * n)
        forward = LayerSeconds(piece_s=piece, diagonal_s=piece, rest_s=other)
        backward = LayerSeconds(piece_s=2 * piece, diagonal_s=2 * piece, rest_s=2 * other)
        return simulate_exchange(plan(again), again, ExchangeCosts(forward=forward, backward=backward)).idle_over_work
    if scheme == "slimpipe-alone":
        # slice s costs s + 1 parts of attention, as in the paper's forms
        slices = rest / n + attention * 2 * (np.arange(n) + 1) / (n * (n + 1))
        cost = np.tile(slices / stages, (stages, schedule.microbatches))
        return simulate(schedule, Durations(forward_s=cost, input_s=cost, weight_s=cost)).idle_over_work
    each = {"forward_s": rest + attention, "input_s": rest + 2 * attention, "weight_s": rest}
    return simulate(schedule, Durations.uniform(stages, **{k: s / stages for k, s in each.items()})).idle_over_work


def _with_head(head: str, p: int, m: int, n: int) -> float:
    """Figure 9: idle seconds of a rank on average, where a slice's forward in a stage takes one without the head.

    Slices cost the same, as after exchange; the head is that of Llama 13B at 256K.
    """
    model = MODELS["Llama-13B"]
    part = 2.0 * VOCABULARY * model.dims.hidden / (sum(model.forward_flops(256 * K)) * model.layers / p)
    schedule, slices = sliced(p, 1, m, n, "aligned", helped=True), np.ones(p)
    if head == "all":
        each = Durations(forward_s=slices, input_s=slices, weight_s=slices, vocabulary_s=(part / p, 2 * part / p))
        schedule = sharing(schedule)
    else:
        uneven = slices + part * (np.arange(p) == p - 1)
        each = Durations(forward_s=uneven, input_s=uneven, weight_s=uneven)
    return float(np.mean(simulate(schedule, each).idle_s))


def _differences(exchange: Exchange, *, helped: bool) -> dict[str, float]:
    """Figures 7 and 8: chunks between the heaviest and the lightest rank where all have a pass, and such junctures."""
    found = {"difference": 0.0, "difference-at-juncture": 0.0, "juncture-passes": 0.0}
    for number, slot in enumerate(exchange.slots):
        units = [one[1] for one in slot.passes if one is not None]
        if not slot.forward or len(units) < exchange.ranks:
            continue
        pieces = [len(exchange.pieces[unit]) for unit in units]
        for one in exchange.at(number, 0) if helped else ():
            pieces[one.donor] -= len(one.pieces)
            pieces[one.helper] += len(one.pieces)
        juncture = len({unit // exchange.slices for unit in units}) > 1
        name = "difference-at-juncture" if juncture and not helped else "difference"
        # a chunk is two pieces
        found[name] = max(found[name], (max(pieces) - min(pieces)) / 2)
        found["juncture-passes"] += juncture
    return found
