"""What is installed, by metadata alone: nothing heavy is imported."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

from prophet.doctor.check import Check, finding, named, sound
from prophet.errors import CoreError

PACKAGES = ("moe-prophet", "torch", "transformers", "deepspeed", "tutel", "accelerate")
NOT_INSTALLED = "none"


def versions() -> dict[str, str]:
    """Python's version, those of `PACKAGES`, and the digest of the core's sources; "none" for what is not there."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = NOT_INSTALLED
    try:
        from prophet.planner import core

        found["core"] = core.version()
    except CoreError:
        found["core"] = "of other sources"
    return found


def core() -> list[Check]:
    """Check that the planner's compiled core is there, and was built from these sources."""
    try:
        from prophet.planner import core as built

        lacking = built.lacking()
    except CoreError as error:
        lacking = str(error)
    if lacking:
        message, _, mend = lacking.partition(": ")
        return [finding("core", message, mend)]
    return [sound("core", f"built, and of this version's sources ({built.version()[:8]})")]


def clash() -> list[Check]:
    """Check that PyPI's `prophet`, a forecasting library, is not installed beside this one."""
    # Importing it would show nothing: both own the same import name
    others = [d for d in metadata.distributions() if (d.metadata["Name"] or "").lower() == "prophet"]
    if not others:
        return [sound("import name", "no other distribution owns `prophet`")]
    return [
        finding(
            "import name",
            f"the forecasting library `prophet` {others[0].version} is installed too and owns the same import name",
            "`pip uninstall prophet`, and then `pip install --force-reinstall --no-deps .` in the checkout",
        )
    ]


def equal(by_rank: list[Mapping[str, str]]) -> list[Check]:
    """Check that all ranks have the same versions; [R] mappings of `versions`."""
    checks = []
    for name in by_rank[0]:
        ranks: dict[str, list[int]] = {}
        for rank, found in enumerate(by_rank):
            ranks.setdefault(found.get(name, NOT_INSTALLED), []).append(rank)
        if len(ranks) == 1:
            continue
        # What most ranks have is taken for right, so that the fewest machines have to change
        usual = max(ranks, key=lambda version: len(ranks[version]))
        message = "; ".join(f"{version} on {named(which)}" for version, which in ranks.items())
        others = [rank for version, which in ranks.items() if version != usual for rank in which]
        how = "the same checkout and core" if name in ("moe-prophet", "core") else f"{name} {usual}"
        where = "all" if usual == NOT_INSTALLED else f"the machine of {named(sorted(others))}"
        # Python, the core and a checkout are not installed by a version from PyPI
        pip = f"`pip install {name}=={usual}`" if name in PACKAGES[1:] and usual != NOT_INSTALLED else f"install {how}"
        checks.append(finding("versions", f"{name} differs: {message}", f"{pip} on {where}"))
    return checks or [sound("versions", f"equal on all {len(by_rank)} ranks")]
