"""`python -m tests.gpu [-n 8]`: the kernels' and the layer's tests in several processes side by side.

On a GPU; or in Triton's interpreter, where TRITON_INTERPRET=1 is set. 1 if any test failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = ["-p", "no:cacheprovider"]  # they run side by side in one folder
SOURCES = (["tests/gpu"], ["tests/layer/test_moe.py", "-k", "triton"])


def collected(arguments: list[str]) -> list[str]:
    """Names of the tests that pytest finds."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *OWN, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode != 0 or not names:
        raise RuntimeError(f"no tests were collected: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return names


def main(arguments: list[str] | None = None) -> int:
    """Deal the tests out to processes and wait for all."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument(
        "-n", type=int, default=min(8, os.cpu_count() or 1), help="processes (default: cores, at most 8)"
    )
    count = max(1, parser.parse_args(arguments).n)
    names = [name for source in SOURCES for name in collected(source)]
    command = [sys.executable, "-m", "pytest", "-q", *OWN]
    running = [
        subprocess.Popen(
            [*command, *names[i::count]], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for i in range(min(count, len(names)))
    ]
    failed = 0
    for process in running:
        said, _ = process.communicate()
        print("\n".join(said.splitlines()[-40 if process.returncode else -1 :]), flush=True)
        failed += process.returncode != 0
    print(f"{len(names)} tests, {failed} of {len(running)} processes failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
