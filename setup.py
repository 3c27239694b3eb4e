"""The compiled core of the planner; everything else about the distribution is in pyproject.toml.

Where it cannot be built, installing fails, and its last line says how to mend that. PROPHET_WITHOUT_CORE=1 goes on, and
leaves the reason in the package. PROPHET_CORE_FLAGS appends compiler flags, which win over those below: `-O0 -g`, or
sanitizers.
"""

import os
import runpy
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

NAME = "prophet.planner.core._core"
CORE = Path("prophet", "planner", "core")
library = Path(nanobind.source_dir())
# Run, not imported: at this time `prophet` and what it needs may not be installed.
made_of = runpy.run_path(str(CORE / "sources.py"))
files = [CORE / file.name for file in made_of["sources"]()]
flags = shlex.split(os.environ.get("PROPHET_CORE_FLAGS", ""))
go_on = os.environ.get("PROPHET_WITHOUT_CORE") == "1"


class BuildCore(build_ext):
    """Compiles as many sources at once as there are processors; where that fails, says how to mend it."""

    reason = ""

    def run(self) -> None:
        super().run()
        if self.inplace:
            self.note(Path(self.get_ext_fullpath(NAME)))

    def build_extensions(self) -> None:
        compile_all = self.compiler.compile

        def at_once(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: compile_all([source], **options), sources)
                return [path for paths in made for path in paths]

        self.compiler.compile = at_once
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError, CompileError):  # whose words are a whole command, in some releases
            program = self.compiler.compiler_so_cxx[0]
            self.reason = f"`{program}` failed" if shutil.which(program) else f"there is no `{program}`"
            if not go_on:  # an exit, since pip shows a traceback's last line only after the traceback
                raise SystemExit(
                    f"error: the planner's compiled core cannot be built ({self.reason}): install "
                    f"{made_of['COMPILER']} and run the same command again, or set PROPHET_WITHOUT_CORE=1 to install "
                    f"without balancing"
                ) from None
        self.note(Path(self.get_ext_fullpath(ext.name)))

    def note(self, core: Path) -> None:
        """Leave the reason where there is no core, and nothing of an earlier build: neither its core nor its reason."""
        reason = core.with_name(made_of["NOT_BUILT"])
        if self.reason:
            core.unlink(missing_ok=True)
            core.parent.mkdir(parents=True, exist_ok=True)
            reason.write_text(f"{self.reason}\n", encoding="utf-8")
        else:
            reason.unlink(missing_ok=True)


setup(
    cmdclass={"build_ext": BuildCore},
    ext_modules=[
        Extension(
            NAME,
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
            optional=go_on,
        )
    ],
)
