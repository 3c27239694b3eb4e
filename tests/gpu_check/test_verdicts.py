"""What the endings of checks mean, which checks run where, and the page: values in, values out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline_balance.elastic import gpu_checks
from prophet.doctor.check import Check, finding, sound, unseen
from prophet.errors import SpecError, UsageError
from prophet.gpu_check import calibration, engine, environment, kernels, layer, page
from prophet.gpu_check.checks import TASKS, Answer, Task, chosen, relevant
from prophet.gpu_check.process import Ending
from prophet.gpu_check.run import ALL_S
from prophet.gpu_check.verdict import Verdict, left_out, too_few, verdict
from prophet.spec import Topology

TASK = Task(name="engine", function="a:b", limit_s=60)
GOOD = Answer(checks=[sound("engine", "as on one rank")], paste=["a line"], figures={"copies": 3})


def ended(code: int | None = 0, *answers: str, **options: str) -> Ending:
    return Ending(code=code, seconds=1.5, answers=dict(enumerate(answers)), **options)  # type: ignore[arg-type]


def test_a_check_that_ended_well_is_its_answer() -> None:
    found = verdict(TASK, 1, ended(0, GOOD.to_json(), output="a warning"), 60)
    assert found == Verdict(
        name="engine", checks=GOOD.checks, seconds=1.5, paste=["a line"], figures={"copies": 3}, output=""
    )
    assert found.state == "sound"


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (ended(None), "no end within 60 s, and was ended"),
        (ended(None, output="step 1\nstep 2\n \n"), "no end within 60 s, and was ended; it last printed: step 2"),
        (ended(-11), "ended by SIGSEGV"),
        (ended(-9), "ended by SIGKILL (was memory short?)"),
        (ended(-200), "ended by signal 200"),
        (ended(1, failure="rank 1 failed: PeerLost: gone"), "rank 1 failed: PeerLost: gone"),
        (ended(7, output="oh"), "ended with exit code 7; it last printed: oh"),
        (ended(0), "1 of 1 ranks ended without an answer"),
        (ended(0, "garbage"), "rank 0: expected a check's answer, got 'garbage' (JSONDecodeError)"),
        (
            ended(0, '{"checks": [], "paste": [], "figures": {}}'),
            "expected a check's answer with lines of known states",
        ),
        (ended(-11, GOOD.to_json()), "ended by SIGSEGV"),  # what it had found by then stays on the page
    ],
)
def test_any_other_ending_is_a_finding(ending: Ending, message: str) -> None:
    found = verdict(TASK, 1, ending, 60)
    assert found.state == "finding"
    assert message in found.checks[0].message
    assert "`prophet gpu-check --checks engine`" in found.checks[0].mend
    assert found.output == ending.output
    assert len(found.checks) == 1 + (ending.code == -11 and bool(ending.answers))


def test_findings_of_some_ranks_name_them() -> None:
    wrong = Answer(checks=[finding("engine", "differs", "send it")])
    found = verdict(TASK, 3, ended(0, GOOD.to_json(), wrong.to_json(), wrong.to_json()), 60)
    assert [check.message for check in found.checks] == ["as on one rank", "ranks 1, 2: differs"]
    assert "1 of 3 ranks" in verdict(TASK, 3, ended(0, GOOD.to_json(), GOOD.to_json()), 60).checks[0].message


def test_of_a_lost_rank_no_answer_is_expected() -> None:
    lost = replace(TASK, ends_at_once=True)
    heard = [Answer(checks=[sound("lost-rank", f"heard after {s} s")]).to_json() for s in (1, 2)]
    assert verdict(lost, 3, ended(0, *heard), 60).checks == [sound("lost-rank", "heard after 1 s")]
    late = Answer(checks=[finding("lost-rank", "late", "send it")]).to_json()
    assert verdict(lost, 3, ended(0, heard[0], late), 60).state == "finding"
    assert verdict(lost, 2, ended(0), 60).state == "finding"


def test_an_answer_reads_back() -> None:
    assert Answer.from_json(GOOD.to_json()) == GOOD
    for text in ("", "[]", '{"checks": [{"name": "x"}], "paste": [], "figures": {}}'):
        with pytest.raises(SpecError):
            Answer.from_json(text)
    odd = json.loads(GOOD.to_json())
    odd["checks"][0]["state"] = "fine"
    with pytest.raises(SpecError):
        Answer.from_json(json.dumps(odd))


# --- which checks, on how many ranks ---


def test_the_checks_are_those_of_the_design() -> None:
    names = "environment kernels channels engine lost-rank pipeline slices switch calibration layer model"
    assert [task.name for task in TASKS] == names.split()
    assert ALL_S <= 600
    for task in TASKS:
        module, _, function = task.function.partition(":")
        assert f"\ndef {function}(place: Place) -> Answer:\n" in Path(f"{module.replace('.', '/')}.py").read_text()


def test_a_list_of_checks_keeps_their_order_and_the_first_of_them() -> None:
    assert [t.name for t in chosen("engine, kernels")] == ["environment", "kernels", "engine"]
    assert chosen(None) == list(TASKS)
    with pytest.raises(UsageError, match="--checks: there is no check 'kernel'; did you mean 'kernels'"):
        chosen("kernel")
    with pytest.raises(UsageError, match="--checks: expected names of checks"):
        chosen(",")


def test_ranks_follow_the_gpus() -> None:
    by_gpus = {gpus: {task.name: task.ranks_on(gpus) for task in TASKS} for gpus in (1, 2, 3, 8, None)}
    alone = ["environment", "kernels", "engine", "slices", "calibration"]
    assert [name for name, ranks in by_gpus[1].items() if ranks] == alone
    assert set(by_gpus[2].values()) == set(by_gpus[3].values()) == {1, 2}
    assert (by_gpus[8]["engine"], by_gpus[8]["pipeline"]) == (8, 4)
    assert all(by_gpus[None].values())
    pair = next(task for task in TASKS if task.name == "switch")
    assert left_out(pair, too_few(pair, 1)).checks == [unseen("switch", "one GPU, and it needs 2")]


def test_variables_that_matter_are_found_and_judged() -> None:
    given = {"NCCL_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "1", "HOME": "/", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    found = relevant(given)
    assert found == {k: v for k, v in sorted(given.items()) if k != "HOME"}
    wrong = environment.wrong(found)
    assert [check.message.partition(":")[0] for check in wrong] == ["CUDA_LAUNCH_BLOCKING=1"]
    assert environment.mends(wrong) == ["unset CUDA_LAUNCH_BLOCKING"]
    (one,) = environment.wrong({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert "replicas" in one.message


# --- what single checks make of their figures ---


def states(*checks: Check) -> list[str]:
    return [check.state for check in checks]


def test_kernels_are_judged_by_their_errors() -> None:
    nan = float("nan")
    assert states(*(kernels.judged("k", {"float32": e}) for e in (0.1, 1.1, nan, float("inf")))) == [
        "sound",
        "finding",
        "finding",
        "finding",
    ]


def test_an_engine_needs_replicas_and_small_errors() -> None:
    judged = engine.judged
    assert judged({"loss": 1e-7}, 3, "2 ranks").state == "sound"
    assert "no replica" in judged({"loss": 1e-7}, 0, "2 ranks").message
    assert "1.experts.w_in differs" in judged({"loss": 1e-3, "1.experts.w_in": 0.5}, 3, "2 ranks").message
    assert judged({"loss": float("nan")}, 3, "2 ranks").state == "finding"


def test_every_rank_and_what_is_no_number_count() -> None:
    nan = float("nan")
    by_rank = [{"errors": {"loss": 1e-7, "w": 0.1}, "copies": 3}, {"errors": {"loss": nan, "w": 0.5}, "copies": 3}]
    for order in (by_rank, by_rank[::-1]):
        errors = engine.of_all(order)["errors"]
        assert math.isnan(errors["loss"])
        assert errors["w"] == 0.5
        assert engine.judged(errors, 3, "2 ranks").state == "finding"


def test_a_lost_rank_is_heard_of_in_time() -> None:
    heard = "PeerLost: rank 0: combine of layer 1 failed: ranks [1] are gone ([gloo/x.cc] closed)"
    assert engine.told(heard, 1, 0.1, 20) == sound(
        "lost-rank", "heard after 0.1 s: PeerLost: rank 0: combine of layer 1 failed: ranks [1] are gone"
    )
    assert engine.told(heard.replace("[1]", "[0, 1]"), 1, 0.1, 20).state == "sound"
    assert engine.told(heard, 1, 60, 20).state == "finding"
    assert engine.told("", 1, 1, 20).state == "finding"
    assert "not that it was rank 3" in engine.told(heard, 3, 1, 20).message


def test_losses_are_compared_step_by_step() -> None:
    assert gpu_checks.judged("switch", "pp2 to dp2", [2.0, 1.0], [2.0, 1.00001]).state == "sound"
    for losses in ([2.0, 1.1], [2.0, float("nan")]):
        found = gpu_checks.judged("switch", "pp2 to dp2", losses, [2.0, 1.0])
        assert found.state == "finding"
        assert "the loss of step 1" in found.message


def test_a_calibration_without_a_rate_is_not_kept() -> None:
    good = Topology.uniform(2)
    assert calibration.judged(good).state == "sound"
    assert calibration.judged(replace(good, intra=replace(good.intra, bytes_per_s=1e15))).state == "not checked"
    assert calibration.judged(Topology.uniform(1)).state == "sound"


def test_a_layer_that_balancing_makes_slower_is_a_finding_on_a_gpu_alone() -> None:
    slower, faster = [1.2, 1.3, 1.25, 1.22], [0.7, 0.8, 1.2, 0.75]
    cases = [(slower, True), (faster, True), (slower, False)]
    found = [layer.judged("layer", compared(ratios), on_gpu=on_gpu)[0] for ratios, on_gpu in cases]
    assert states(*found) == ["finding", "sound", "sound"]
    assert "the times show nothing" in found[2].message
    assert "busiest rank 1.10 of the mean, 3.00 without; 2 replicas" in found[0].message


def test_a_layer_says_its_throughput_and_how_far_the_prediction_is_off() -> None:
    found = layer.judged("model", compared([0.7, 0.8, 0.9, 0.8]), on_gpu=True)
    assert [check.name for check in found] == ["model", "throughput", "prediction"]
    assert found[0].message.startswith("with balancing 0.80 of the time without (0.72 to 0.88, the middle half")
    assert found[1].message == "500 tokens/s without, 625 with"
    # 1 of the 2 seconds without balancing is saved in the performance model
    assert found[2] == sound("prediction", "0.50 of the time, off by -0.30")
    unknown = layer.judged("model", compared([0.8] * 4, calibrated=False), on_gpu=True)[2]
    assert unknown.state == "not checked"


def compared(ratios: list[float], *, calibrated: bool = True) -> layer.Compared:
    return layer.Compared(
        seconds=([2.0] * len(ratios), [2.0 * ratio for ratio in ratios]),
        predicted_s=([1.5] * len(ratios), [0.5] * len(ratios)),
        max_mean=(3.0, 1.1),
        replicas=2,
        tokens=1000,
        calibrated=calibrated,
    )


# --- the page ---

VERDICTS = [
    Verdict(name="environment", checks=[sound("core", "built"), sound("device", "the CPU")], seconds=2.0),
    Verdict(name="kernels", checks=[unseen("kernels", "Triton is not installed")]),
    Verdict(
        name="engine",
        checks=[finding("engine", "ended by SIGSEGV | a <b>", "run it alone")],
        seconds=7.0,
        paste=["unset IT"],
        output="a trace",
    ),
]


def test_what_is_wrong_comes_first() -> None:
    assert page.red_lines(VERDICTS) == ["!! engine: ended by SIGSEGV | a <b>  mend: run it alone"]
    one = Verdict(name="kernels", checks=[finding("route", "errors", "send it")])
    assert page.red_lines([one]) == ["!! kernels: route: errors  mend: send it"]
    assert [row[:3] for row in page.rows(VERDICTS)] == [
        ("engine", "!!", "7"),
        ("environment", "ok", "2"),
        ("kernels", "--", "0"),
    ]
    assert page.rows(VERDICTS)[1][3] == "core: built; device: the CPU"
    assert page.total(VERDICTS) == "1 finding, 1 not checked, 9 s."
    assert page.total(VERDICTS[:1]) == "No findings, 0 not checked, 2 s."


def test_the_files_hold_the_page_whole() -> None:
    measured = Verdict(
        name="calibration", checks=[sound("calibration", "fast")], figures={"topology": {"ranks": 2, "s": [math.nan]}}
    )
    found = page.answer([*VERDICTS, measured], "2 x H100", "topology-here.toml")
    assert not found["sound"]
    assert found["paste"][0] == "unset IT"
    assert "expert-parallel groups of 2;" in found["paste"][1]
    assert found["paste"][2] == 'config = prophet.EngineConfig(topology="topology-here.toml")'
    assert found["checks"][-1]["figures"]["topology"]["s"] == ["nan"]
    text = page.markdown(VERDICTS, found)
    assert text.index("!! engine: ended") < text.index("| check |") < text.index("unset IT") < text.index("```json")
    assert "SIGSEGV \\| a <b> |" in text
    assert json.loads(text.split("```json\n")[1].split("\n")[0]) == found
    html = page.html_page(VERDICTS, found)
    assert "ended by SIGSEGV | a &lt;b&gt;" in html
    assert html.index("Findings") < html.index("Checks") < html.index("Lines to paste") < html.index("JSON to send")
