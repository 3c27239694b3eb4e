"""The command line as its users see it."""

from __future__ import annotations

import contextlib
import io
import re
from functools import cache

from prophet.cli import main


@cache
def help_of(*arguments: str) -> str:
    """What `prophet ARGUMENTS --help` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*arguments, "--help"])
    return out.getvalue()


def command_names() -> set[str]:
    """Those that `prophet --help` lists, other packages' too."""
    return set(re.findall(r"^    ([\w-]+)(?:  |$)", help_of(), re.M))


def options_of(command: str) -> set[str]:
    """The options of a command, but for --help."""
    return set(re.findall(r"^  (--[a-z-]+)", help_of(command), re.M))
