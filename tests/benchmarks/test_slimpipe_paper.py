"""SlimPipe beside ours: peers' schedules and bytes per card keep their forms, and every printed number has a row."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers import slimpipe
from benchmarks.papers.rows import Row, printed
from benchmarks.papers.slimpipe_memory import (
    CARD_BYTES,
    MODELS,
    VOCABULARY,
    Layout,
    Model,
    bytes_by_rank,
    kept_bytes,
    least_card_bytes,
    longest,
    state_bytes,
)
from benchmarks.slices.peers import terapipe, v_half, v_min, zb_v
from pipeline_balance.schedules.actions import Schedule
from pipeline_balance.schedules.classic import interleaved, one_f_one_b
from pipeline_balance.schedules.closed_forms import (
    exchange_last_rank_idle_over_work,
    interleaved_idle_s,
    sliced_idle_over_work,
    sliced_peak_units,
)
from pipeline_balance.schedules.exchange import slots_of
from pipeline_balance.schedules.simulate import Durations, peak_activation_bytes, simulate
from pipeline_balance.schedules.sliced import sliced

PAGE = Path(__file__).parents[2] / "docs" / "slimpipe_paper.md"
RANKS = st.integers(2, 9)


def held(schedule: Schedule) -> tuple[int, ...]:
    """Most units of a stage that ranks hold."""
    return peak_activation_bytes(schedule, (1,) * schedule.stages)


# --- peers ---


@given(p=st.integers(1, 6), m=st.integers(1, 5), n=st.integers(1, 8), backward=st.sampled_from([0.5, 1.0, 3.0]))
def test_terapipe_waits_as_slimpipe_and_holds_all(p: int, m: int, n: int, backward: float) -> None:
    schedule = terapipe(p, m, n)
    even = Durations.uniform(p, forward_s=1.0, input_s=backward, weight_s=backward)
    assert simulate(schedule, even).idle_over_work == pytest.approx(sliced_idle_over_work(p, 1, m, n))
    assert held(schedule) == (m * n,) * p


@given(p=RANKS, rounds=st.integers(2, 4))
def test_a_v_holds_half_or_a_third(p: int, rounds: int) -> None:
    # parts of stages, of which 1F1B's first rank holds 2P; (P + 2) // 2 and (P + 4) // 3 microbatches (Qi et al., 2024)
    m = rounds * p
    assert max(held(v_half(p, m))) == 2 * ((p + 2) // 2)
    assert max(held(v_min(p, m))) == 2 * ((p + 4) // 3)
    assert max(held(zb_v(p, m))) == 2 * p


@given(p=st.integers(3, 8), rounds=st.integers(1, 3))
def test_waits_of_a_v(p: int, rounds: int) -> None:
    m, even = rounds * p, Durations.uniform(2 * p)
    attention = Durations.uniform(2 * p, forward_s=1.0, input_s=2.0, weight_s=0.0)
    # SlimPipe's Table 2: exact from as many microbatches as ranks on, and shorter where all parts take as long
    assert simulate(zb_v(p, m), attention).idle_over_work == pytest.approx(2 * (p - 1) / (3 * m))
    assert simulate(zb_v(p, m), even).idle_over_work < 2 * (p - 1) / (3 * m)
    assert simulate(v_half(p, m), even).idle_over_work == pytest.approx(p / (2 * m), rel=0.4)
    # each further microbatch adds a third of its work, and the ends take longer than the printed p / (2m)
    few, many = (simulate(v_half(p, k), attention).idle_over_work * k for k in (4 * p, 8 * p))
    assert (many - few) / (4 * p) == pytest.approx(1 / 3)
    assert few > 4 * p / 3 + p / 2


# --- closed forms ---


@given(p=RANKS, m=st.integers(1, 4), chunks=st.integers(1, 3))
def test_the_printed_bubble_is_the_last_ranks_wait(p: int, m: int, chunks: int) -> None:
    n = chunks * p
    schedule = sliced(p, 1, m, n, "aligned", helped=True)
    waits = {True: 0, False: 0}
    for slots, forward in ((slots_of(schedule), True), (tuple(reversed(slots_of(schedule))), False)):
        for slot in slots:
            assert slot.forward == forward
            if slot.passes[-1] is not None:
                break
            # all ranks begin together, so the slot takes as long as its latest slice
            waits[forward] += max(one[1] % n + 1 for one in slot.passes if one is not None)
    work = m * n * (n + 1) / 2
    form = exchange_last_rank_idle_over_work(p, m, n)
    assert [wait / work for wait in waits.values()] == pytest.approx([form, form])


@given(p=st.integers(3, 8), v=st.integers(2, 4))
def test_interleaving_waits_longer_with_fewer_microbatches_than_ranks(p: int, v: int) -> None:
    even = Durations.uniform(p * v, forward_s=1 / v, input_s=1 / v, weight_s=1 / v)
    for m in range(1, p + 1):
        found, form = simulate(interleaved(p, v, m), even).idle_s, interleaved_idle_s(p, v, 1.0, 2.0)
        assert (found[0] == pytest.approx(form)) == (m == p), m


# --- bytes ---


@pytest.mark.parametrize("name", [name for name in MODELS if name != "Llama-7B"])
def test_parameters_are_those_of_table_three(name: str) -> None:
    (number,) = [n for n in printed() if n.table == "Table 3" and n.at["model"] == name]
    model = MODELS[name]
    assert (model.mixers + model.feed_forwards) / 1e9 == pytest.approx(number.printed, rel=4e-3)


def test_what_a_layer_keeps_by_hand() -> None:
    model = Model.of(2, 4, 2, 64, 100)
    q, k, h, f = 64, 32, 64, 100
    exact = 4 * 4  # log-sum-exp of four heads in float32
    selective = exact + 2 * (4 * h + 2 * q + 2 * k)
    assert kept_bytes(model, Layout(recompute="selective"), sliced=True) == selective
    assert kept_bytes(model, Layout(), sliced=False) == selective + 2 * 3 * f
    assert kept_bytes(model, Layout(inner=2), sliced=False) == selective + 2 * 2 * f
    assert kept_bytes(model, Layout(recompute="full"), sliced=False) == 2 * h
    assert kept_bytes(model, Layout(recompute="full"), sliced=True) == 2 * h + 2 * 2 * k
    assert kept_bytes(model, Layout(recompute="full", cached=False), sliced=True) == 2 * h
    experts = Model.of(2, 4, 2, 64, 100, 8)
    assert kept_bytes(experts, Layout(), sliced=False) == selective + 2 * 2 * 3 * f


@given(
    p=st.integers(1, 5), v=st.integers(1, 3), m=st.integers(1, 4), chunks=st.integers(1, 3), t=st.sampled_from([1, 8])
)
def test_bytes_of_ranks_are_the_closed_form(p: int, v: int, m: int, chunks: int, t: int) -> None:
    n, model = chunks * p, Model.of(6 * p * v, 4, 4, 64, 100)
    layout = Layout(t=t)
    found = bytes_by_rank(model, layout, sliced(p, v, m, n, "aligned"), split_head=True)
    unit = 6 * kept_bytes(model, layout, sliced=True) / (n * t)
    gradient = 6 * 2 * 64 * 2 / (n * t) if n > 1 else 0.0
    for rank, one in enumerate(found):
        least = sliced_peak_units(rank, p, v, m, n, "aligned") * unit + VOCABULARY * 4 / (n * t * p)
        # the last stage's gradients of N - 1 chunks at most for each stage that is open
        assert least <= one * (1 + 1e-6) <= (least + v * (n - 1) * gradient) * (1 + 1e-5)


def test_the_longest_sequence_fills_the_fullest_card() -> None:
    model, layout, schedule = MODELS["Llama-13B"], Layout(t=8), one_f_one_b(8, 8)
    tokens = longest(model, layout, schedule, split_head=False)
    worst = max(bytes_by_rank(model, layout, schedule, split_head=False))
    assert tokens * worst + state_bytes(model, layout, 8) == pytest.approx(CARD_BYTES)
    # twice the ranks hold half the states, and as many activations
    assert longest(model, layout, one_f_one_b(16, 16), split_head=False) == pytest.approx(tokens, rel=0.05)


def test_more_layouts_take_no_more_bytes() -> None:
    def least(name: str, tokens: int, cards: int, **options: Any) -> float:
        return least_card_bytes(MODELS[name], tokens, cards, 8, **options)

    for name, sliced_, recompute in product(
        ("Llama-70B", "Mixtral-8x7B"), (True, False), ("none", "selective", "full")
    ):
        near, far = (
            least(name, 1 << 19, 128, recompute=recompute, sliced=sliced_, spread=spread) for spread in (False, True)
        )
        assert far <= near
        # interleaving has too few microbatches within a node
        assert math.isinf(near) != sliced_
    few, many = (least("Llama-13B", 1 << k, 8, recompute="full", sliced=True, spread=False) for k in (15, 19))
    assert few < many


def test_the_best_layout_by_hand() -> None:
    # one card: no choice, and one rank that holds a whole microbatch in four slices
    model, tokens = Model.of(2, 3, 3, 48, 100), 1 << 10
    found = least_card_bytes(model, tokens, 1, 1, recompute="full", sliced=True, spread=False)
    inputs, whole = 2 * (48 + 2 * 48), kept_bytes(model, Layout(), sliced=True)
    each = 2 * inputs + whole / 4 + VOCABULARY * 4 / 4
    assert found == pytest.approx(state_bytes(model, Layout(), 1) + tokens * each)


def test_full_recomputation_leaves_slices_little_to_save() -> None:
    model, layout, tokens = MODELS["Llama-13B"], Layout(t=8, recompute="full"), 512 * 1024
    table = {2: (37.7, 66.0, 57.8, 61.9), 4: (37.7, 33.0, 51.1, 26.9)}
    for p, figures in table.items():
        whole = bytes_by_rank(model, layout, one_f_one_b(p, 4), split_head=False)
        cut = bytes_by_rank(model, layout, sliced(p, 5, 4, 4, "aligned"), split_head=True)
        found = [tokens * one / 1e9 for one in (whole[0], cut[0], whole[-1], cut[-1])]
        assert found == pytest.approx(figures, abs=0.05)
        assert f"| p = {p} | {' | '.join(map(str, figures))} |" in PAGE.read_text()


# --- rows ---


@pytest.fixture(scope="module")
def found() -> list[Row]:
    return slimpipe.rows()


def test_every_number_has_a_row(found: list[Row]) -> None:
    mine = [n for n in printed() if n.paper == slimpipe.PAPER]
    assert [(r["table"], r["cell"], r["paper"]) for r in found] == [
        (f"SlimPipe, {n.table}", n.cell, n.printed) for n in mine
    ]
    json.dumps(found, allow_nan=False)
    assert {r["verdict"].partition(":")[0] for r in found} == {"met", "beaten", "bounds", "missed", "not derivable"}


def test_misses_are_those_of_the_page_and_have_a_cause(found: list[Row]) -> None:
    missed = {(r["table"].removeprefix("SlimPipe, "), r["cell"].split()[0]): r["cause"] for r in found if "cause" in r}
    causes = {at: cause.partition(":")[0] for at, cause in missed.items()}
    assert causes == {
        ("Table 2", "scheme=zb-v"): "microbatches",
        ("Table 2", "scheme=v-half"): "microbatches",
        ("Table 2", "scheme=slimpipe-alone"): "mean",
        ("Figure 2", "model=Llama-13B"): "scheme",
        ("Figure 3", "scheme=interleaved"): "microbatches",
        ("Figure 3", "scheme=v-half"): "microbatches",
        ("Figure 12", "model=Llama-70B"): "layouts",
        ("Figure 12", "model=Mixtral-8x22B"): "layouts",
        ("Figure 14", "model=Llama-13B"): "logits",
    }
    assert sum(r["verdict"] == "missed" for r in found) == len(missed)


def test_the_pages_figures(found: list[Row]) -> None:
    ours, theirs = (
        {(r["table"].removeprefix("SlimPipe, "), r["cell"]): r[name] for r in found} for name in ("ours", "paper")
    )
    shown = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| ") and "`" in line]
    # each miss is on the page
    cells = {cell.strip().strip("`") for _, cell, *_ in shown}
    assert cells >= {r["cell"] for r in found if r["verdict"] in ("missed", "beaten")}
    for table, cell, figure, mine, *_ in shown:
        value = ours[table.strip(), cell.strip().strip("`")]
        assert float(mine) == pytest.approx(value, rel=6e-3), (table, cell)
        assert float(figure) == theirs[table.strip(), cell.strip().strip("`")], (table, cell)


def test_the_command_prints_and_writes_the_rows(
    found: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="the benchmark's other models are transformers'")
    from benchmarks.slices.__main__ import main

    assert main(["--paper", "--json", str(tmp_path / "rows.json")]) == 0
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["rows"] == found
    text = capsys.readouterr().out
    assert text.startswith(f"{len(written['rows'])} rows: ")
    assert text.count("\n| ") == len(written["rows"]) + 1
