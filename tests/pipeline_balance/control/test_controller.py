"""When the controller moves layers and when it does not; values only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline_balance.control.controller import ControllerConfig, MoveCost, decide
from pipeline_balance.spec import LayerCost, PartitionError, RankLimits, StageMap
from prophet.errors import SpecError


def layers(*times_s: float, size: int = 1000) -> list[LayerCost]:
    return [
        LayerCost(forward_s=t / 3, backward_input_s=t / 3, backward_weight_s=t / 3, parameter_bytes=size)
        for t in times_s
    ]


LOPSIDED = layers(1, 1, 1, 1, 5, 5, 5, 5)
EVEN_COUNT = StageMap.contiguous((0, 4, 8))
FREE = ControllerConfig(move_cost=MoveCost(fixed_s=0.0, bytes_per_s=1e12))


def run(costs: list[LayerCost], current: StageMap, config: ControllerConfig = FREE, **options: object):  # type: ignore[no-untyped-def]
    settings: dict[str, object] = {"microbatches": 8, "horizon_steps": 50, "config": config}
    settings.update(options)
    limits = settings.pop("limits", RankLimits.uniform(2))
    return decide(costs, limits, current, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["partition", "diffusion"])
def test_moves_where_it_pays(policy: str) -> None:
    made = run(LOPSIDED, EVEN_COUNT, replace(FREE, policy=policy))
    assert made.move
    assert made.best.boundaries in {(0, 5, 8), (0, 6, 8)}
    assert made.gain_s > 0
    assert "gains" in made.reason


def test_by_parameters_does_not_see_time() -> None:
    assert not run(LOPSIDED, EVEN_COUNT, replace(FREE, policy="partition-by-parameters")).move
    heavy = [replace(c, parameter_bytes=10_000 if i == 0 else 1) for i, c in enumerate(LOPSIDED)]
    worse = run(heavy, EVEN_COUNT, replace(FREE, policy="diffusion-by-parameters"))
    assert not worse.move


def test_stays_where_nothing_is_to_gain() -> None:
    made = run(layers(1, 1, 1, 1), StageMap.contiguous((0, 2, 4)))
    assert (made.move, made.reason) == (False, "nothing to gain")


def test_noise_does_not_move_layers() -> None:
    noisy = layers(1.0, 1.01, 1.0, 0.99, 1.0, 1.0)
    assert not run(noisy, StageMap.contiguous((0, 3, 6))).move


def test_a_move_must_pay_within_the_horizon() -> None:
    slow = replace(FREE, move_cost=MoveCost(fixed_s=5000.0))
    made = run(LOPSIDED, EVEN_COUNT, slow)
    assert not made.move
    assert "would not pay" in made.reason
    assert run(LOPSIDED, EVEN_COUNT, slow, horizon_steps=1000).move


def test_what_waiting_has_lost_counts() -> None:
    slow = replace(FREE, move_cost=MoveCost(fixed_s=5000.0))
    still = run(LOPSIDED, EVEN_COUNT, slow)
    short_s = still.move_s - still.gain_s * 50
    assert not run(LOPSIDED, EVEN_COUNT, slow, missed_s=0.9 * short_s).move
    assert run(LOPSIDED, EVEN_COUNT, slow, missed_s=1.1 * short_s).move
    # but nothing is done where there is nothing to gain
    assert not run(layers(1, 1, 1, 1), StageMap.contiguous((0, 2, 4)), slow, missed_s=1e9).move


def test_the_cheaper_of_two_good_maps_is_taken() -> None:
    # 3 | 3 by time either way round; the layer that would move first is huge
    costs = layers(1, 1, 1, 1, 1, 1, 1)
    heavy = [replace(c, parameter_bytes=10**9 if i == 3 else 1) for i, c in enumerate(costs)]
    made = run(heavy, StageMap.contiguous((0, 2, 7)), replace(FREE, move_cost=MoveCost(fixed_s=0.0, bytes_per_s=1e9)))
    assert made.best.boundaries == (0, 3, 7)


def test_packs_when_the_slowdown_is_small_and_grows_back_when_it_is_not() -> None:
    limits = RankLimits.uniform(4)
    config = replace(FREE, repack_slowdown=0.1)
    # one layer dominates: three of four ranks mostly wait for it
    frozen = layers(10, 0.1, 0.1, 0.1)
    four = StageMap.contiguous((0, 1, 2, 3, 4))
    packed = run(frozen, four, config, limits=limits)
    assert packed.move
    assert len(packed.best.used_ranks) in {1, 2}
    again = run(frozen, packed.best, config, limits=limits)
    assert not again.move
    thawed = layers(10, 10, 10, 10)
    grown = run(thawed, packed.best, config, limits=limits)
    assert grown.move
    assert len(grown.best.used_ranks) == 4


def test_ranks_are_not_taken_back_for_noise() -> None:
    limits = RankLimits.uniform(3)
    config = replace(FREE, repack_slowdown=0.05)
    # two ranks take 4.6, 6.2 and 8 % longer than three
    packed = run(layers(10, 3.5, 3.5), StageMap.contiguous((0, 1, 2, 3)), config, limits=limits)
    assert len(packed.best.used_ranks) == 2
    assert not run(layers(10, 4.2, 4.2), packed.best, config, limits=limits).move
    assert run(layers(10, 5, 5), packed.best, config, limits=limits).move


def test_a_map_that_no_longer_fits_is_left_at_any_price() -> None:
    costs = layers(1, 1, 1, 1, size=10)
    limits = RankLimits.uniform(2, memory_bytes=20)
    made = run(costs, StageMap.contiguous((0, 3, 4)), replace(FREE, move_cost=MoveCost(fixed_s=1e9)), limits=limits)
    assert made.move
    assert made.best.boundaries == (0, 2, 4)
    with pytest.raises(PartitionError, match="in force included"):
        run(costs, StageMap.contiguous((0, 3, 4)), limits=RankLimits.uniform(2, memory_bytes=10))


def test_maps_in_any_shape_can_be_improved() -> None:
    for policy in ("partition", "diffusion"):
        made = run(LOPSIDED, StageMap.from_assignment([1, 0, 1, 1, 0, 0, 0, 1]), replace(FREE, policy=policy))
        assert made.best_makespan_s <= made.current_makespan_s


def test_configuration_is_checked() -> None:
    with pytest.raises(SpecError, match="measure_steps"):
        ControllerConfig(every_steps=2, measure_steps=3)
    with pytest.raises(SpecError, match="policy"):
        ControllerConfig(policy="luck")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="not be negative"):
        ControllerConfig(min_gain=-1.0)
    with pytest.raises(SpecError, match="fixed_s"):
        MoveCost(bytes_per_s=0.0)


def test_packing_again_and_again_is_no_slower_than_the_run_began() -> None:
    costs = [LayerCost(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)] * 12
    config = ControllerConfig(repack_slowdown=0.4)

    def packed(ranks: int, first_ranks: int) -> int:
        current = StageMap.even(12, ranks)
        limits = RankLimits.uniform(ranks)
        found = decide(costs, limits, current, microbatches=8, horizon_steps=50, config=config, first_ranks=first_ranks)
        return len((found.best if found.move else current).used_ranks)

    # (8 + 3) x 3 layers, (8 + 2) x 4, (8 + 1) x 6: three ranks take 1.21 times as long as four, two 1.64 times
    assert packed(4, 4) == 3
    assert packed(3, 4) == 3
    assert packed(3, 3) == 2
