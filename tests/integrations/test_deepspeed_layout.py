"""Checkpoint files of prophet_deepspeed: experts found again at any number of ranks; what is not a checkpoint, refused.

Nothing here needs deepspeed. Shape legend: E experts, m experts per rank.
"""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prophet_deepspeed import layout

from prophet.errors import CheckpointError

NAMES = ("moe.0.w_in", "moe.0.bias_out")


def whole(experts: int, seed: int = 0) -> dict[str, layout.Values]:
    """Every stacked parameter of all experts, with its moments, [E, ...]."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: {k: torch.randn(experts, *shape, generator=generator) for k in ("fp32", "exp_avg")}
        for name, shape in zip(NAMES, ((3, 2), (4,)), strict=True)
    }


def save(folder: Path, states: dict[str, layout.Values], ranks: int) -> None:
    """As the `ranks` of an expert-parallel group write them."""
    folder.mkdir(parents=True, exist_ok=True)
    layout.clear(folder)
    experts = len(next(iter(states[NAMES[0]].values())))
    m = experts // ranks
    for rank in range(ranks):
        first, values, module = rank * m, {}, {}
        for name, stacked in states.items():
            own = {k: v[first : first + m] for k, v in stacked.items()}
            values |= {f"{name}.{first + i}": {k: v[i].clone() for k, v in own.items()} for i in range(m)}
            module |= {f"{name}.{first + i}": own["fp32"][i].half() for i in range(m)}
        content = {"values": values, "settings": {n: {"group": {}, "state": {}} for n in values}, "module": module}
        layout.write(content, folder / layout.EXPERTS.format(rank, ranks))


def load(folder: Path, experts: int, written_by: int, ranks: int) -> dict[str, layout.Values]:
    """All ranks' shares, put together again."""
    m = experts // ranks
    shares: dict[str, list[layout.Values]] = {name: [] for name in NAMES}
    for rank in range(ranks):
        held = range(rank * m, rank * m + m)
        wanted = {f"{n}.{e}" for n in NAMES for e in held}
        values, settings, module = layout.read_experts(folder, written_by, wanted)
        assert set(values) == set(module) == wanted  # nothing of other ranks is kept
        assert set(settings) == wanted
        for name in NAMES:
            own = [values[f"{name}.{e}"] for e in held]
            shares[name].append({k: torch.stack([one[k] for one in own]) for k in own[0]})
    return {name: {k: torch.cat([part[k] for part in parts]) for k in parts[0]} for name, parts in shares.items()}


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([(12, 1), (12, 4), (12, 6), (8, 8), (1, 1)]), st.data())
def test_experts_are_found_again_at_any_size(
    tmp_path_factory: Any, written: tuple[int, int], data: st.DataObject
) -> None:
    experts, by = written
    read_by = data.draw(st.sampled_from([r for r in range(1, experts + 1) if experts % r == 0]))
    again = data.draw(st.sampled_from([r for r in range(1, experts + 1) if experts % r == 0]))
    folder = tmp_path_factory.mktemp("layout")
    states = whole(experts)
    save(folder, states, by)
    found = load(folder, experts, by, read_by)
    save(folder, found, again)
    back = load(folder, experts, again, by)
    for name, wanted in states.items():
        for key, value in wanted.items():
            assert torch.equal(found[name][key], value)
            assert torch.equal(back[name][key], value)
    # a checkpoint of the same name that more ranks wrote has left nothing behind
    assert len(list(folder.glob("experts_*"))) == again


def test_wrong_shapes_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"fp32 of head: expected a tensor \[3\], got \[2\]"):
        layout.check_values("head", {"fp32": torch.zeros(2)}, (3,), tmp_path)
    with pytest.raises(CheckpointError, match=r"fp32 of head: expected a tensor \[3\], got str"):
        layout.check_values("head", {"fp32": "x"}, (3,), tmp_path)
    with pytest.raises(CheckpointError, match="optimizer states of head are missing"):
        layout.check_values("head", None, (3,), tmp_path)


class Evil:
    """Runs code where it is unpickled without care."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("code ran",))


DENSE: dict[str, Any] = {
    "format": layout.FORMAT,
    "ranks": 2,
    "processes": 4,
    "module": {},
    "values": {},
    "settings": {},
    "counters": dict.fromkeys(layout.COUNTERS, 3),
    "scaler": {},
    "scheduler": None,
    "frozen": True,
    "made_with": {"optimizer.type": "AdamW", "scheduler.type": "WarmupLR"},
}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([1, 2], "expected a dictionary, got list"),
        ({**DENSE, "format": 1}, "expected format 4, got 1"),
        ({k: v for k, v in DENSE.items() if k != "scaler"}, "scaler is missing"),
        ({**DENSE, "ranks": 0}, "ranks: expected a number of processes, got 0"),
        ({**DENSE, "processes": 10**9}, "processes: expected a number of processes"),
        ({**DENSE, "module": []}, "module: expected a dictionary, got list"),
        ({**DENSE, "counters": {"global_steps": 1}}, "counters: expected global_steps, global_samples"),
    ],
)
def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path, content: Any, text: str) -> None:
    torch.save(content, tmp_path / layout.DENSE)
    with pytest.raises(CheckpointError, match=text) as caught:
        layout.read_dense(tmp_path)
    assert str(tmp_path / layout.DENSE) in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"optimizer.type": "SGD"}, r"optimizer\.type: .*written with AdamW, and this run has SGD"),
        ({"scheduler.type": None}, r"scheduler\.type: .*written with WarmupLR, and this run has None"),
    ],
)
def test_a_run_of_other_parts_is_named(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        layout.check_made_with(DENSE["made_with"], DENSE["made_with"] | changed, tmp_path)
    layout.check_made_with(DENSE["made_with"], {"optimizer.type": "FusedAdam"}, tmp_path)  # another make


def test_files_run_no_code(tmp_path: Path) -> None:
    torch.save({"x": Evil()}, tmp_path / layout.DENSE)
    with pytest.raises(CheckpointError, match=r"dense\.pt: "):
        layout.read_dense(tmp_path)
    (tmp_path / layout.DENSE).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"dense\.pt: "):
        layout.read_dense(tmp_path)
    (tmp_path / layout.DENSE).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"dense\.pt: "):
        layout.read_dense(tmp_path)
    with pytest.raises(CheckpointError, match=r"dense\.pt is missing; .* found \[\]"):
        layout.read_dense(tmp_path / "nowhere")


def test_a_half_written_file_is_never_in_the_place_of_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    layout.write({"a": 1}, path)
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError)):
        layout.write({"a": lambda: 0}, path)
    assert layout.read(path, others=["a"]) == {"a": 1}


def test_microbatches_so_far_end_a_step() -> None:
    counters = {"global_steps": 3, "micro_steps": 6}
    assert layout.micro_steps(counters, 2) == 6
    assert layout.micro_steps(counters, 4) == 12  # a resumed run may have more of them in a step
    assert layout.micro_steps({"global_steps": 3, "micro_steps": 3}, 1) == 3


def test_random_generators_continue(tmp_path: Path) -> None:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002

    def draw() -> tuple[float, float, float]:
        return random.gauss(0, 1), float(np.random.standard_normal()), float(torch.randn(()))  # noqa: NPY002

    try:
        random.seed(1)
        np.random.seed(2)  # noqa: NPY002
        torch.manual_seed(3)
        draw()
        path = tmp_path / layout.RANDOM.format(0, 1)
        layout.write(layout.random_state(), path)
        wanted = [draw() for _ in range(3)]
        draw()
        layout.set_random_state(layout.read(path), path)
        assert [draw() for _ in range(3)] == wanted
        with pytest.raises(CheckpointError, match=r"random_0_of_1\.pt: expected states of random generators"):
            layout.set_random_state({"numpy": [1]}, path)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


@pytest.mark.parametrize("content", [{"best": np.float64(1)}, {"folder": Path("x")}, [{"f": print}]])
def test_what_could_not_be_read_again_is_not_written(content: Any) -> None:
    layout.check_readable(client_state={"step": 3, "loss": torch.ones(2), "names": ["a"]}, lr_scheduler=None)
    with pytest.raises(CheckpointError, match=r"^client_state: expected numbers, strings.*: it holds "):
        layout.check_readable(lr_scheduler={}, client_state=content)


def test_a_state_of_another_model_is_refused_before_it_is_copied(tmp_path: Path) -> None:
    own = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    layout.check_module({"a": torch.ones(2, 3)}, own, False, tmp_path)
    with pytest.raises(CheckpointError, match=r"a: expected a tensor \[2, 3\], got \[3, 2\]"):
        layout.check_module({"a": torch.ones(3, 2)}, own, False, tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks \['b'\], and has \['c'\] besides"):
        layout.check_module({"a": torch.ones(2, 3), "c": torch.ones(1)}, own, True, tmp_path)
