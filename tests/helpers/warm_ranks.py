"""What the server imports and loads from which the tests' ranks are forked: see `tests.helpers.launch`.

Only what starts no thread and keeps no state: a rank must find everything as in a process that has just imported it.
"""

from __future__ import annotations

import hypothesis  # noqa: F401  files of tests import it and pytest, and ranks import those files
import pytest  # noqa: F401

import prophet.planner
import tests.helpers.training  # noqa: F401

prophet.planner.warm()
