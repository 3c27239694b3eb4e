"""Starts the tests of ranks whose devices run behind their hosts, in a process that knows such a device."""

from __future__ import annotations

import pytest

from tests.helpers.own_process import passed
from tests.helpers.pretend_device import ALONE, SUPPORTED


@pytest.mark.skipif(not SUPPORTED, reason="this torch knows no devices made in Python")
@pytest.mark.parametrize(
    "file", ["ranks/test_device_ranks.py", "pipeline_balance/pipeline/test_replicas_on_a_device.py"]
)
def test_ranks_with_devices_that_run_behind_their_hosts(file: str) -> None:
    assert "skipped" not in passed(f"tests/{file}", told=ALONE)
