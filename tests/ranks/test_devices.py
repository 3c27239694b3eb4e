"""Starts the tests of ranks whose devices run behind their hosts, in a process that knows such a device."""

from __future__ import annotations

import pytest

from tests.helpers.own_process import passed
from tests.helpers.pretend_device import ALONE, SUPPORTED

FILES = (
    "tests/ranks/test_device_ranks.py",
    "tests/pipeline_balance/pipeline/test_replicas_on_a_device.py",
    "tests/pipeline_balance/pipeline/test_pipelines_on_a_device.py",
)


@pytest.mark.skipif(not SUPPORTED, reason="this torch knows no devices made in Python")
@pytest.mark.parametrize(
    "arguments",
    [
        # in one process: its start takes as long as the quick tests of one file
        (*FILES, "-m", "not slow"),
        # "queues" is of those that have one for each communicator
        pytest.param((*FILES, "-m", "slow", "-k", "queues"), marks=pytest.mark.slow),
        pytest.param((*FILES, "-m", "slow", "-k", "not queues"), marks=pytest.mark.slow),
    ],
    ids=lambda arguments: " ".join(arguments[len(FILES) :]),
)
def test_ranks_with_devices_that_run_behind_their_hosts(arguments: tuple[str, ...]) -> None:
    assert "skipped" not in passed(*arguments, told=ALONE)
