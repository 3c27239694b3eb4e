"""`prophet calibrate` with two samples per size: `python -m tests.helpers.calibrate_quickly OPTIONS`."""

from __future__ import annotations

import sys

from prophet.cli import main
from prophet.commands import calibrate

calibrate._REPEATS = 2

if __name__ == "__main__":
    raise SystemExit(main(["calibrate", *sys.argv[1:]]))
