"""The compiled core of the planner; everything else about the distribution is in pyproject.toml.

Where it cannot be built, installing goes on without it. PROPHET_REQUIRE_CORE=1 makes that an error. PROPHET_CORE_FLAGS
appends compiler flags, which win over those below: `-O0 -g`, or sanitizers.
"""

import os
import runpy
import shlex
from pathlib import Path

import nanobind
from setuptools import Extension, setup

CORE = Path("prophet", "planner", "core")
library = Path(nanobind.source_dir())
# Run, not imported: at this time `prophet` and what it needs may not be installed.
made_of = runpy.run_path(str(CORE / "sources.py"))
files = [CORE / file.name for file in made_of["sources"]()]
flags = shlex.split(os.environ.get("PROPHET_CORE_FLAGS", ""))
setup(
    ext_modules=[
        Extension(
            "prophet.planner.core._core",
            [str(file) for file in files if file.suffix == ".cpp"],
            depends=[str(file) for file in files if file.suffix == ".h"],
            include_dirs=[nanobind.include_dir(), str(library), str(library.parent / "ext" / "robin_map" / "include")],
            define_macros=[("PROPHET_SOURCES", f'"{made_of["digest"](files)}"')],
            # Two processors have to plan alike, bit by bit: no fused operations, and none that only some of them have.
            extra_compile_args=[
                *("-std=c++17", "-fvisibility=hidden", "-fno-strict-aliasing", "-fno-lto", "-g0", "-Wall", "-Wextra"),
                *("-O3", "-fno-fast-math", "-ffp-contract=off", *flags),
            ],
            extra_link_args=["-fno-lto", *flags],
            language="c++",
            optional=os.environ.get("PROPHET_REQUIRE_CORE") != "1",
        )
    ]
)
