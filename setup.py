"""The compiled core of the planner; everything else about the distribution is in pyproject.toml.

Where it cannot be built, installing goes on without it. PROPHET_REQUIRE_CORE=1 makes that an error. PROPHET_CORE_FLAGS
appends compiler flags, which win over those below: `-O0 -g`, or sanitizers.
"""

import os
import runpy
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CORE = Path("prophet", "planner", "core")
library = Path(nanobind.source_dir())
# Run, not imported: at this time `prophet` and what it needs may not be installed.
made_of = runpy.run_path(str(CORE / "sources.py"))
files = [CORE / file.name for file in made_of["sources"]()]
flags = shlex.split(os.environ.get("PROPHET_CORE_FLAGS", ""))


class BuildCore(build_ext):
    """Compiles as many sources at once as there are processors."""

    def build_extensions(self) -> None:
        compile_all = self.compiler.compile

        def at_once(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: compile_all([source], **options), sources)
                return [path for paths in made for path in paths]

        self.compiler.compile = at_once
        super().build_extensions()


setup(
    cmdclass={"build_ext": BuildCore},
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
    ],
)
