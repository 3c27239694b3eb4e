"""Whether this machine can emulate hosts, for the tests that need some."""

from __future__ import annotations

import pytest

from benchmarks.cluster import kernel_objects as kernel
from benchmarks.cluster.testbed import TestbedUnavailable


def _unavailable() -> str | None:
    try:
        kernel.check_available()
    except TestbedUnavailable as error:
        return str(error)
    return None


REASON = _unavailable()  # None where it can
needs_testbed = pytest.mark.skipif(REASON is not None, reason=REASON or "")
