"""The direction of imports, held by reading the sources (never importing them), and the weight of `import
prophet`.

The tables below are the design: a module that is in none of them fails until somebody decides where it
belongs.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Which rooms of `prophet` a room may import (`a: {b}` reads "a may import b"); a room may always import
# itself.
_VALUES = {"spec"}
_RANKS = _VALUES | {"comm", "kernels", "gate", "experts"}
_MAY_IMPORT: dict[str, set[str]] = {
    "spec": set(),
    "planner": _VALUES,
    "history": _VALUES,
    "replan": _VALUES | {"planner", "history"},
    "resume": _VALUES | {"history", "replan"},
    "traces": _VALUES,
    "importers": _VALUES | {"traces"},
    "kernels": set(),
    "waiting": set(),
    "collective": _VALUES,
    "thread_ranks": _VALUES | {"collective"},
    "comm": _VALUES | {"collective", "thread_ranks", "waiting"},
    "recorder": _VALUES | {"collective"},
    "gate": _VALUES | {"comm", "kernels"},
    "experts": _VALUES | {"comm", "kernels"},
    "scheduler": _RANKS | {"planner", "history"},
    "dispatch": _RANKS | {"scheduler"},
    "layer": _RANKS | {"planner", "history", "scheduler", "dispatch"},
    "config": _RANKS | {"planner", "history", "replan", "scheduler", "layer"},
    "parallel": _RANKS | {"layer"},
    "checkpoint": _RANKS | {"layer"},
    "step_report": _VALUES | {"scheduler"},
    "agreement": _RANKS | {"layer"},
    "engine": _RANKS
    | {"planner", "history", "replan", "resume", "scheduler", "layer", "config", "parallel", "agreement"}
    | {"step_report"},
    "start": _RANKS | {"layer", "config", "parallel", "engine"},
    "convert": _RANKS | {"layer", "parallel"},
    "topology": _VALUES,
    "memory": set(),
    "lines": _VALUES,
    "calibrate": _RANKS | {"topology", "lines"},
    "calibrate_files": _VALUES | {"calibrate", "lines"},
    "processes": _VALUES | {"comm"},
    "replay": _VALUES | {"planner", "traces"},
    "picture": _VALUES | {"scheduler"},
    "extrapolate": _VALUES | {"planner", "scheduler"},
    "report": _VALUES | {"planner", "history", "traces", "scheduler", "replay", "picture"},
    "monitor": _RANKS | {"planner", "engine", "step_report", "report"},
    "demo": _RANKS
    | {"planner", "history", "traces", "scheduler", "layer", "config", "engine", "start", "convert", "replay", "report"}
    | {"processes", "step_report", ""},
    "commands": _RANKS
    | {"planner", "history", "traces", "scheduler", "replay", "report", "demo", "topology", "calibrate", "processes"}
    | {"importers", "extrapolate", "monitor", "calibrate_files", "lines", "memory"},
    "cli": _VALUES | {"traces", "topology", "report", "processes", "demo", "monitor", "commands", ""},
    "__main__": {"cli"},
    "": _RANKS
    | {
        "planner",
        "history",
        "replan",
        "traces",
        "scheduler",
        "layer",
        "config",
        "engine",
        "start",
        "convert",
        "monitor",
        "step_report",
    },  # __init__.py
}

# Third-party packages a room may import. Rooms that are not listed may import torch, numpy and rich.
_NUMERIC = {"numpy"}
_PACKAGES: dict[str, set[str]] = {
    "spec": _NUMERIC,
    "planner": _NUMERIC | {"numba", "scipy"},
    "history": _NUMERIC,
    "replan": _NUMERIC,
    "traces": _NUMERIC,
    "importers": _NUMERIC,
    "replay": _NUMERIC,
    "kernels": _NUMERIC | {"torch", "triton"},
    "report": _NUMERIC | {"matplotlib"},
    "cli": _NUMERIC | {"rich"},
    "extrapolate": _NUMERIC,
    "picture": _NUMERIC | {"matplotlib"},
    "monitor": _NUMERIC | {"rich", "torch"},  # torch for its writer of TensorBoard files
}
_DEFAULT_PACKAGES = _NUMERIC | {"torch", "rich"}

# Pure halves of the scheduler: functions from values to values, without devices.
_PURE_MODULES = {
    "prophet.scheduler.actions",
    "prophet.scheduler.blockwise",
    "prophet.scheduler.pieces",
    "prophet.scheduler.forms",
    "prophet.scheduler.memory",
    "prophet.scheduler.notes",
    "prophet.scheduler.simulate",
}

_MAY_COMMUNICATE = {
    "prophet/comm.py",
    "prophet/checkpoint.py",  # torch's distributed checkpoint format
    "pipeline_balance/runtime.py",
    "pipeline_balance/release.py",
}
# Commands that start ranks play the user's program: one file starts and ends their process group, and everything in
# between talks through a Collective.
_MAY_START_A_GROUP = {"prophet/processes.py"}
# Under torchrun ranks are there already: the same file finds that out, and the environment is how it is told.
_MAY_READ_THE_ENVIRONMENT = {"prophet/processes.py"}
_STARTING = {"init_process_group", "destroy_process_group", "is_initialized"}

_SHIPPED = ("prophet", "pipeline_balance", "integrations")
_NEVER_IMPORTED = {"tests", "benchmarks", "examples", "conftest"}
_FORBIDDEN_NAMES = {"types.py", "profile.py", "triton.py"}
_LAZY = ("tensorboard", "wandb", "deepspeed", "tutel", "transformers", "matplotlib", "scipy", "numba")


@dataclass(frozen=True)
class Import:
    """One import statement: where it stands, what it names, and whether it runs."""

    path: Path
    line: int
    module: str  # absolute dotted name; for `from a import b` this is "a.b"
    typing_only: bool

    @property
    def where(self) -> str:
        return f"{self.path.as_posix()}:{self.line}"


def module_name(path: Path) -> str:
    """Dotted name of a source file given relative to the repository."""
    parts = list(path.with_suffix("").parts)
    if parts[0] == "integrations":
        parts = parts[1:]
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def imports_of(source: str, path: Path) -> Iterator[Import]:
    """All imports of a file, inside functions too, with relative ones made absolute."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]

    def visit(node: ast.AST, typing_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name, typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(path, node.lineno, f"{stem}.{alias.name}", typing_only)
        elif isinstance(node, ast.If):
            guarded = typing_only or "TYPE_CHECKING" in ast.unparse(node.test)
            for child in node.body:
                yield from visit(child, guarded)
            for child in node.orelse:
                yield from visit(child, typing_only)
        else:
            for child in ast.iter_child_nodes(node):
                yield from visit(child, typing_only)

    yield from visit(ast.parse(source), False)


def sources(*folders: str) -> list[Path]:
    """Python files under `folders`, relative to the repository; folders that are not there yet have none."""
    return sorted(p.relative_to(ROOT) for f in folders for p in (ROOT / f).rglob("*.py"))


def imports_in(*folders: str) -> list[Import]:
    return [i for p in sources(*folders) for i in imports_of((ROOT / p).read_text(encoding="utf-8"), p)]


def room_of(module: str) -> str:
    """Room of a `prophet` module: its first name below the package, "" for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def internal_room(module: str) -> str:
    """Room that `import prophet.x.y` or `from prophet import x` reaches; "" for a mere name."""
    room = room_of(module)
    return room if room in _MAY_IMPORT else ""


def wrong_rooms(imports: list[Import]) -> list[str]:
    found = []
    for i in imports:
        if i.module.split(".")[0] != "prophet" or i.typing_only:
            continue
        here, there = room_of(module_name(i.path)), internal_room(i.module)
        if here != there and there not in _MAY_IMPORT.get(here, set()):
            found.append(f"{i.where}: prophet room {here!r} may not import {i.module}")
    return found


def wrong_packages(imports: list[Import]) -> list[str]:
    found = []
    for i in imports:
        top = i.module.split(".")[0]
        if top in sys.stdlib_module_names or top in ("prophet", "__future__") or i.typing_only:
            continue
        module = module_name(i.path)
        allowed = _PACKAGES.get(room_of(module), _DEFAULT_PACKAGES)
        if module in _PURE_MODULES:
            allowed = _NUMERIC
        if top not in allowed:
            found.append(f"{i.where}: {module} may not import {top}, only {sorted(allowed)}")
    return found


def wrong_communication(source: str, path: Path) -> list[str]:
    """Uses of `torch.distributed` that are not for typing, in a file that may not communicate."""
    if path.as_posix() in _MAY_COMMUNICATE:
        return []
    allowed = _STARTING if path.as_posix() in _MAY_START_A_GROUP else set()
    aliases = {"torch.distributed"}
    found = []
    for i in imports_of(source, path):
        if not i.module.startswith("torch.distributed") or i.typing_only:
            continue
        name = i.module.removeprefix("torch.distributed").lstrip(".")
        if name and name.split(".")[0] not in allowed:
            found.append(f"{path.as_posix()}:{i.line}: imports {i.module}")
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.name == "torch.distributed" and a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases |= {a.asname or a.name for a in node.names if a.name == "distributed"}
    for node in ast.walk(tree):
        is_use = isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases
        if is_use and node.attr not in allowed | {"ProcessGroup"}:
            found.append(f"{path.as_posix()}:{node.lineno}: uses torch.distributed.{node.attr}")
    return found


# --------------------------------------------------------------------------------------------- the repository


def test_there_is_something_to_check() -> None:
    assert Path("prophet/spec.py") in sources("prophet")


def test_every_room_has_a_place() -> None:
    homeless = {p.as_posix() for p in sources("prophet") if room_of(module_name(p)) not in _MAY_IMPORT}
    assert not homeless, "say in test_architecture.py what these may import"


def test_the_tables_name_nothing_that_is_gone() -> None:
    there = {p.as_posix() for p in sources("prophet", "pipeline_balance")}
    rooms = {room_of(module_name(Path(p))) for p in there if p.startswith("prophet/")}
    modules = {module_name(Path(p)) for p in there}
    assert rooms >= _MAY_IMPORT.keys() | _PACKAGES.keys()
    assert modules >= _PURE_MODULES
    assert there >= _MAY_COMMUNICATE | _MAY_START_A_GROUP | _MAY_READ_THE_ENVIRONMENT


def test_the_table_itself_points_one_way() -> None:
    done: set[str] = set()
    while True:
        free = {room for room, needs in _MAY_IMPORT.items() if room not in done and needs - {room} <= done}
        if not free:
            break
        done |= free
    assert done == set(_MAY_IMPORT), "these rooms import each other in a circle"


def test_rooms_import_one_way() -> None:
    assert not wrong_rooms(imports_in("prophet"))


def test_rooms_import_their_packages_only() -> None:
    assert not wrong_packages(imports_in("prophet"))


def test_only_the_listed_files_communicate() -> None:
    found = [
        line
        for path in sources("prophet", "pipeline_balance")
        for line in wrong_communication((ROOT / path).read_text(encoding="utf-8"), path)
    ]
    assert not found, "take a Collective instead"


def test_the_two_halves_share_values_and_collectives_only() -> None:
    """`pipeline_balance` takes the values and the Collective; its MoE model alone is made of the other half's layer."""
    wrong = [i.where for i in imports_in("prophet") if i.module.startswith(("pipeline_balance", "prophet_"))]
    for i in imports_in("pipeline_balance"):
        allowed = {"spec", "comm"}
        if i.path.as_posix() == "pipeline_balance/dynamics/experts.py":
            allowed |= {"layer", "gate"}
        reaches_prophet = i.module == "prophet" or i.module.startswith("prophet.")
        if i.module.startswith("prophet_") or (reaches_prophet and room_of(i.module) not in allowed):
            wrong.append(f"{i.where}: {i.module}")
    assert not wrong


def test_nothing_imports_tests_or_benchmarks() -> None:
    wrong = [f"{i.where}: {i.module}" for i in imports_in(*_SHIPPED) if i.module.split(".")[0] in _NEVER_IMPORTED]
    assert not wrong


def test_no_module_hides_a_library() -> None:
    assert not [p.as_posix() for p in sources(*_SHIPPED, "benchmarks", "examples") if p.name in _FORBIDDEN_NAMES]


def test_libraries_read_no_environment_and_no_pickle() -> None:
    wrong = []
    for path in sources("prophet", "pipeline_balance"):
        source = (ROOT / path).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            reads = isinstance(node, ast.Attribute) and path.as_posix() not in _MAY_READ_THE_ENVIRONMENT
            if reads and ast.unparse(node) in (
                "os.environ",
                "os.getenv",
                "os.putenv",
            ):
                wrong.append(f"{path.as_posix()}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                wrong.append(f"{path.as_posix()}:{node.value.lineno}: allow_pickle")
        wrong += [
            f"{i.where}: {i.module}"
            for i in imports_of(source, path)
            if i.module.split(".")[0] in ("pickle", "dill", "cloudpickle")
        ]
    assert not wrong


def test_importing_prophet_is_light() -> None:
    """`import prophet` brings in none of the optional packages, nor what only some planners need."""
    code = f"import sys, prophet; print([m for m in {_LAZY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


# -------------------------------------------------------------------------------------- the checks themselves


def check(text: str, path: str) -> list[str]:
    where = Path(path)
    imports = list(imports_of(text, where))
    return wrong_rooms(imports) + wrong_packages(imports) + wrong_communication(text, where)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("prophet/planner/x.py", "import torch"),
        ("prophet/planner/x.py", "def f():\n    from torch import nn"),
        ("prophet/planner/x.py", "from prophet import engine"),
        ("prophet/planner/x.py", "from ..scheduler import actions"),
        ("prophet/planner/x.py", "import prophet.layer"),
        ("prophet/spec.py", "import numba"),
        ("prophet/spec.py", "from prophet.planner import base"),
        ("prophet/kernels/a/kernel.py", "import rich"),
        ("prophet/kernels/a/kernel.py", "from prophet.spec import Link"),
        ("prophet/scheduler/actions.py", "import torch"),
        ("prophet/scheduler/x.py", "from prophet.layer import MoE"),
        ("prophet/layer.py", "from prophet.engine import attach"),
        ("prophet/layer.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("prophet/layer.py", "from torch import distributed\ndistributed.get_rank()"),
        ("prophet/layer.py", "import torch\ntorch.distributed.barrier()"),
        ("prophet/layer.py", "from torch.distributed import all_reduce"),
        ("prophet/processes.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("prophet/demo/launch.py", "import torch.distributed as dist\ndist.init_process_group('gloo')"),
        ("prophet/engine.py", "import matplotlib.pyplot"),
        ("prophet/report/x.py", "from prophet.demo import model"),
    ],
)
def test_a_breach_is_seen(path: str, text: str) -> None:
    assert check(text, path)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("prophet/planner/x.py", "import numba, numpy\nfrom prophet.spec import Link\nfrom . import base"),
        (
            "prophet/layer.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch.distributed",
        ),
        ("prophet/comm.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("prophet/processes.py", "import torch.distributed as dist\ndist.init_process_group('gloo')"),
        ("prophet/report/x.py", "def f():\n    import matplotlib"),
        ("prophet/engine.py", "from prophet.layer import MoE\nimport torch"),
    ],
)
def test_what_is_allowed_passes(path: str, text: str) -> None:
    assert not check(text, path)
