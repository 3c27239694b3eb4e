"""The "prophet" section of a DeepSpeed config: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prophet_deepspeed.section import ConfigError, read_config
from prophet_deepspeed.start import check_biases

import prophet
from prophet.ranks.threads import ThreadCollective
from tests.helpers.support import on_threads


def test_the_section_is_taken_out_and_the_config_left_alone(tmp_path: Path) -> None:
    config: dict[str, Any] = {"train_batch_size": 8, "prophet": {"ep_size": 2, "slots_per_rank": 3}}
    plain, section = read_config(config)
    assert plain == {"train_batch_size": 8}
    assert "prophet" in config
    assert (section.ep_size, section.engine.slots_per_rank) == (2, 3)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    assert read_config(path) == (plain, section)
    assert read_config({"prophet": {"effort": 0.02}})[1].engine == prophet.EngineConfig(effort=0.02)
    assert read_config({"prophet": {"enabled": False}})[1].engine.planner == "static"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"prophet": {"slots_per_rnk": 2}}, r"prophet\.slots_per_rnk: unknown key; did you mean 'slots_per_rank'"),
        ({"prophett": {}}, "did you mean 'prophet'"),
        ({"prophet": []}, "prophet: expected an object, got list"),
        ({"prophet": {"ep_size": 0}}, r"prophet\.ep_size: expected at least 1"),
        ({"prophet": {"ep_size": "4"}}, r"prophet\.ep_size: expected an integer, got '4'"),
        ({"prophet": {"enabled": 1}}, r"prophet\.enabled: expected true or false"),
        ({"prophet": {"planner": "best"}}, r"prophet\.planner: expected one of"),
        (
            {"prophet": {"topology": "none.toml"}},
            r"prophet\.topology: none\.toml: expected a topology file \(TOML\): No such file",
        ),
        (
            {"prophet": {"topology": "pyproject.toml"}},
            r"prophet\.topology: pyproject\.toml: build-system: unknown field",
        ),
        ({"prophet": {"topology": "\0"}}, r"prophet\.topology: "),
        ({"prophet": {"topology": "a" * 500}}, r"prophet\.topology: a+: expected a topology file"),
        ({"prophet": {"slots_per_rank": -1}}, r"prophet\.slots_per_rank must not be negative"),
        ({"prophet": {"replica_memory_bytes": -1}}, r"prophet\.replica_memory_bytes must not be negative"),
        ({"prophet": {"timeout_s": 0}}, r"prophet\.timeout_s must be positive"),
        ({"prophet": {"effort": "much"}}, r"prophet\.effort: expected a number, got 'much'"),
        ({"prophet": {"effort": None}}, r"prophet\.effort: expected a number, got None"),
        ({"prophet": {"effort": 3}}, r"prophet\.effort must be a share of the step, from 0 to 1, got 3"),
        ({"prophet": {"refetch": "always"}}, r"prophet\.refetch: expected true or false, got 'always'"),
        ({"prophet": {"accumulation_steps": 2}}, r"prophet\.accumulation_steps: unknown key"),
        ({"zero_optimization": {"stage": 3}}, r"zero_optimization\.stage: 3 is not supported.*no whole expert"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, "'fp16' or 'fp32' for a fp16 model"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, r"data_types\.grad_accum_dtype: expected 'fp32'"),
        ({"bf16": {"enabled": True, "immediate_grad_update": True}}, r"bf16\.immediate_grad_update: not supported"),
        ({"optimizer": {"type": "Muon"}}, r"optimizer\.type: 'Muon' is not supported"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency: not supported: what its samplers have drawn"),
        ({"checkpoint": {"load_universal": True}}, r"checkpoint\.load_universal: not supported"),
        ({"prophet": {"autoep_size": 2}}, r"prophet\.autoep_size: unknown key; did you mean 'ep_size'"),
        ({"amp": {"enabled": True}}, "amp: not supported"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation: only true"),
        ({"tensor_parallel": {"autotp_size": 2}}, r"tensor_parallel\.autotp_size"),
        ({"tensor_parallel": {"autotp_size": "two"}}, r"tensor_parallel\.autotp_size"),
        ({"sequence_parallel_size": "two"}, "sequence_parallel_size: not supported"),
        ({"prophet": {}, "Prophet": {"ep_size": 2}}, "Prophet: unknown section; did you mean 'prophet'"),
    ],
)
def test_refused_by_name(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_config(config)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{", "ds.json: expected JSON"),
        (b"[" * 100_000, "ds.json: expected JSON"),
        (b"\xff\xfe", "ds.json: expected JSON"),
        (b"[]", "ds.json: expected a JSON object, got list"),
    ],
)
def test_a_file_that_holds_no_config_is_named(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "ds.json").write_bytes(text)
    with pytest.raises(ConfigError, match=said):
        read_config(tmp_path / "ds.json")
    with pytest.raises(ConfigError, match=r"absent\.json: expected a DeepSpeed config"):
        read_config(tmp_path / "absent.json")


def test_groups_whose_balancing_biases_would_differ_are_refused() -> None:
    def body(group: ThreadCollective) -> None:
        biased, plain = (
            prophet.MoE(4, 6, 4, 2, group=group, gate=prophet.GateConfig(bias_update_rate=rate)) for rate in (0.1, 0.0)
        )
        check_biases([plain], 4)
        check_biases([plain, biased], 2)
        with pytest.raises(
            ConfigError, match=r"ep_size: 2 with 4 processes is not supported for gates with a balancing"
        ):
            check_biases([plain, biased], 4)

    on_threads(2, body)


@pytest.mark.parametrize(
    "config",
    [
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}},
        {"fp16": {"enabled": True, "initial_scale_power": 8}, "gradient_clipping": 1.0},
        {"data_types": {"grad_accum_dtype": "fp32"}, "gradient_accumulation_steps": 4},
        {"zero_optimization": {"stage": 2, "overlap_comm": True, "round_robin_gradients": True}},
        {"prophet": {"ep_size": 2}, "activation_checkpointing": {"partition_activations": False}},
    ],
)
def test_accepted(config: dict[str, Any]) -> None:
    assert read_config(config)[0] == {k: v for k, v in config.items() if k != "prophet"}
