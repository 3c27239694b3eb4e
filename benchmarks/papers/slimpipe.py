"""SlimPipe's Table 2 by simulated schedules, and bounds of its measured figures by closed forms.

Shape legend: P ranks, V stages per rank, M microbatches, N slices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from benchmarks.papers.rows import Assumption, Number, Value
from pipeline_balance.schedules.actions import Schedule
from pipeline_balance.schedules.classic import gpipe, interleaved, one_f_one_b
from pipeline_balance.schedules.closed_forms import (
    interleaved_idle_s,
    sliced_idle_over_work,
    sliced_idle_over_work_attention,
    zb_v_idle_s,
)
from pipeline_balance.schedules.simulate import Durations, peak_activation_bytes, simulate
from pipeline_balance.schedules.sliced import Order, sliced

PAPER = "SlimPipe"
ASSUMPTIONS: Mapping[str, Assumption] = {
    "exchange": Assumption(assumed="attention where its slice is", instead="attention exchanged between ranks"),
    "order": Assumption(assumed="the paper's order of slices", instead="the minimal one"),
}
# Sequences of a step: 4 million tokens at 512K; of Table 4, 16 million tokens
SEQUENCES, TOKENS_K = 8, 16 * 1024
# Full recomputation repeats the forward: four parts for three
RECOMPUTED = 4.0 / 3.0
CARD_BYTES = 80e9
# Layers, hidden size, and elements of keys and values of a token (Table 3)
MODELS: Mapping[str, tuple[int, int, int]] = {
    "Llama-70B": (80, 8192, 2 * 8 * 128),
    "Llama-149B": (96, 12288, 2 * 8 * 128),
    "Mixtral-8x7B": (32, 4096, 2 * 8 * 128),
    "Mixtral-8x22B": (56, 6144, 2 * 8 * 128),
}


class SlimPipe:
    """Ours for every number of the paper."""

    def __call__(self, number: Number, changed: str | None) -> Value:
        """Return ours for a number, with one assumption changed where a name is given."""
        of = {"Table 2": self.schemes, "Figure 12": self.speed_up, "Table 4": self.longest}
        return of[number.table](number.at, changed)

    def schemes(self, at: dict[str, str], changed: str | None) -> Value:
        """Table 2: idle time over work, or the most activations in microbatches of a whole model."""
        scheme, p, m, n, v = at["scheme"], int(at["p"]), int(at["m"]), int(at.get("n", 1)), int(at.get("v", 1))
        if scheme == "zb-v":
            # Where all three parts of a pass are alike; what the paper prints is the most at any lengths
            part_s = 1.0
            return zb_v_idle_s(p, part_s) / (6.0 * part_s * m)
        if scheme == "slimpipe-attention":
            exchanged = sliced_idle_over_work(p, v, m, n)
            return exchanged if changed == "exchange" else sliced_idle_over_work_attention(p, m, n)
        order: Order = "minimal" if changed == "order" else "aligned"
        schedules: Mapping[str, Schedule] = {
            "gpipe": gpipe(p, m),
            "1f1b": one_f_one_b(p, m),
            **({"interleaved": interleaved(p, v, m)} if scheme == "interleaved" else {}),
            **({"slimpipe": sliced(p, v, m, n, order)} if scheme == "slimpipe" else {}),
        }
        schedule = schedules[scheme]
        if at["what"] == "bubble":
            return simulate(schedule, Durations.uniform(schedule.stages)).idle_over_work
        return max(peak_activation_bytes(schedule, (1,) * schedule.stages)) / (p * n * v)

    def speed_up(self, at: dict[str, str], changed: str | None) -> Value:
        """Figure 12, whose layouts are not printed: from nothing to what bubbles and recomputation allow."""
        del at, changed
        p = SEQUENCES
        # Interleaved 1F1B needs as many microbatches as ranks; two stages per rank at least
        idle = interleaved_idle_s(p, 2, 1.0, 2.0) / (3.0 * p)
        return 1.0, RECOMPUTED * (1.0 + idle)

    def longest(self, at: dict[str, str], changed: str | None) -> Value:
        """Table 4: MFU at most what the bubble leaves, context at most what 80 GB hold of inputs and caches."""
        del changed
        p, n, m = int(at["p"]), int(at["n"]), TOKENS_K // int(at["context"].removesuffix("K"))
        if at["what"] == "mfu":
            return 0.0, 100.0 / (1.0 + sliced_idle_over_work(p, 1, m, n))
        layers, hidden, cache = MODELS[at["model"]]
        kept = 1.0 - int(at["offload"]) / 100.0
        # What stays of a layer, in bfloat16: its cache, and inputs and outputs of norms, attention and products but
        # those that are computed again, which are six vectors
        token_bytes = 2.0 * (6 * hidden + cache) * layers / p * (1.0 + 2.0 * (p - 1) / n)
        token_bytes *= kept / (int(at["t"]) * int(at["c"]))
        return 0.0, CARD_BYTES / token_bytes / 1024.0 if token_bytes else math.inf
