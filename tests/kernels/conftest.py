"""Runs the tests of the Triton kernels in Triton's interpreter, on the other core, while this one gets to them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 280.0

# By the test that waits for them. Whether a kernel is interpreted is settled when Triton is imported, so these need a
# process of their own.
INTERPRETED = {
    "test_kernels_agree_with_their_definitions_in_the_interpreter": ["tests/gpu/test_kernels_triton.py"],
    "test_the_layers_own_tests_pass_on_the_kernels_in_the_interpreter": ["tests/layer/test_moe.py", "-k", "triton"],
    "test_a_step_waits_for_its_device_once_per_layer": ["tests/engine/test_host_waits.py"],
}


class Interpreted:
    """Runs of pytest in Triton's interpreter, one after the other beside what else is tested."""

    def __init__(self, names: list[str]) -> None:
        self._now: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._runs: dict[str, Future[tuple[int, str]]] = {
            n: self._pool.submit(self._run, INTERPRETED[n]) for n in names
        }

    def _run(self, arguments: list[str]) -> tuple[int, str]:
        with tempfile.TemporaryFile("w+", errors="replace") as out:
            with self._lock:
                if self._ended:
                    return -1, ""
                self._now = subprocess.Popen(
                    [sys.executable, "-m", "pytest", "-q", "-x", *arguments],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            try:
                code = self._now.wait(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                self._now.kill()
                code = self._now.wait()
            out.seek(0)
            return code, out.read()

    def passed(self, name: str) -> str:
        """What the run of this test printed; fails unless all of its tests passed."""
        code, said = self._runs[name].result(timeout=LIMIT_S)
        assert code == 0, said[-4000:]
        assert " passed" in said
        return said

    def end(self) -> None:
        """Stop what nobody waited for."""
        with self._lock:
            self._ended = True
        if self._now is not None:
            self._now.kill()
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session", autouse=True)
def interpreted(request: pytest.FixtureRequest) -> Iterator[Interpreted]:
    """Begins with the first unit test; runs those above that are among the tests."""
    items = request.session.items
    chosen = {item.name for item in items if not any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif"))}
    runs = Interpreted([name for name in INTERPRETED if name in chosen])
    yield runs
    runs.end()
