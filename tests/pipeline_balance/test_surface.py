"""What users import from `pipeline_balance`, and what its reference shows."""

from __future__ import annotations

import pkgutil
import re

import pytest

import pipeline_balance
from pipeline_balance.pipeline.run.stages import PipelineConfig
from pipeline_balance.pipeline.trainer import ElasticPipeline
from prophet.errors import SpecError
from tests.helpers.house import ROOT


def test_the_package_offers_what_it_lists() -> None:
    assert pipeline_balance.ElasticPipeline is ElasticPipeline
    assert all(getattr(pipeline_balance, name).__name__ == name for name in pipeline_balance.__all__)
    with pytest.raises(AttributeError, match="Elastic"):
        _ = pipeline_balance.Elastic


def test_the_reference_has_what_the_package_offers() -> None:
    page = (ROOT / "docs" / "api" / "pipeline_balance.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: (\S+)$", page, re.M)
    for name in pipeline_balance.__all__:
        assert f"pipeline_balance.{name}" in shown or getattr(pipeline_balance, name).__module__ in shown
    for name in shown:
        assert pkgutil.resolve_name(name).__doc__


def test_a_pipeline_needs_microbatches() -> None:
    with pytest.raises(SpecError, match="microbatches must be positive, got 0"):
        PipelineConfig(microbatches=0)
