"""The direction of imports, held by reading the sources (never importing them), and the weight of `import prophet`.

The tables below are the design: a room that is in none of them fails until somebody decides where it belongs.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.house import (
    PACKAGES,
    ROOT,
    Import,
    arrows,
    circles,
    file_arrows,
    imports_in,
    imports_of,
    module_name,
    room_of,
    rooms,
    sources,
    text_of,
    too_long,
    tree_of,
)

# What each room may import (`a: {b}` reads "a may import b"); a room may always import itself. `prophet` stands for
# the package's front: its `__init__` and its doors, modules that only pass on what others define.
_VALUES = {"prophet.spec", "prophet.errors"}
_LAYER = _VALUES | {"prophet.ranks", "prophet.kernels", "prophet.experts", "prophet.scheduler"}
_SHOWN = _VALUES | {"prophet.planner", "prophet.scheduler", "prophet.traces", "prophet.engine"}
_PIPELINE = {"prophet.errors", "pipeline_balance.spec", "prophet.ranks"}
_MAY_IMPORT: dict[str, set[str]] = {
    "prophet.errors": set(),
    "prophet.files": set(),
    "prophet.sharing": set(),
    "prophet.trials": set(),
    "prophet.terminal": set(),
    "prophet.spec": {"prophet.errors"},
    "prophet.kernels": {"prophet.spec", "prophet.files"},  # the table of activations
    "prophet.ranks": {"prophet.errors"},
    "prophet.experts": _VALUES | {"prophet.kernels", "prophet.trials"},
    "prophet.planner": _VALUES,
    "prophet.scheduler": _VALUES | {"prophet.ranks", "prophet.experts"},
    "prophet.layer": _LAYER,
    "prophet.engine": _LAYER - {"prophet.kernels"}
    | {"prophet.layer", "prophet.planner", "prophet.state", "prophet.machine"},
    "prophet.machine": _VALUES
    | {"prophet.files", "prophet.trials", "prophet.terminal", "prophet.ranks", "prophet.experts"},
    "prophet.traces": _VALUES | {"prophet.files", "prophet.planner", "prophet.scheduler"},
    "prophet.state": _VALUES | {"prophet.files", "prophet.ranks"},
    "prophet.convert": _LAYER - {"prophet.scheduler"}
    | {"prophet.sharing", "prophet.trials", "prophet.layer", "prophet.engine", "prophet.traces", "prophet.terminal"},
    "prophet.report": _SHOWN - {"prophet.planner"},
    "prophet.monitor": _VALUES
    | {"prophet.files", "prophet.ranks", "prophet.experts", "prophet.planner", "prophet.scheduler", "prophet.traces"}
    | {"prophet.engine", "prophet.report", "prophet.terminal"},
    "prophet.demo": _SHOWN
    | {"prophet.ranks", "prophet.layer", "prophet.machine", "prophet.report", "prophet.terminal"},
    "prophet.doctor": {"prophet.errors", "prophet.ranks", "prophet.kernels", "prophet.planner", "prophet.machine"},
    # what `prophet gpu-check` tries: anything of this half may be among it
    "prophet.gpu_check": _VALUES
    | {"prophet.ranks", "prophet.kernels", "prophet.experts", "prophet.layer", "prophet.engine", "prophet.machine"}
    | {"prophet.doctor", "prophet.report"},
    "prophet.commands": _SHOWN - {"prophet.engine", "prophet.scheduler"}
    | {"prophet.ranks", "prophet.machine", "prophet.report", "prophet.monitor", "prophet.demo", "prophet.terminal"}
    | {"prophet.doctor", "prophet.gpu_check"},
    "prophet.cli": {"prophet", "prophet.errors"},  # and the command that is asked for, by its name
    "prophet.__main__": {"prophet.cli"},
    "prophet": {"prophet.errors", "prophet.ranks", "prophet.engine", "prophet.machine", "prophet.state"},  # its doors
    "pipeline_balance.spec": _VALUES,
    "pipeline_balance.schedules": _VALUES | {"pipeline_balance.spec"},
    "pipeline_balance.maps": _VALUES | {"pipeline_balance.spec", "pipeline_balance.schedules"},
    "pipeline_balance.pipeline": _PIPELINE
    | {"prophet.state", "prophet.sharing", "prophet.trials"}
    | {"pipeline_balance.maps", "pipeline_balance.schedules"},
    "pipeline_balance.control": _PIPELINE
    | {"prophet.spec", "pipeline_balance.maps", "pipeline_balance.schedules", "pipeline_balance.pipeline"},
    "pipeline_balance.slices": {
        "prophet.errors",
        "prophet.ranks",  # ranks exchange attention
        "prophet.trials",
        "pipeline_balance.pipeline",
        "pipeline_balance.schedules",
    },
    "pipeline_balance.release": {"prophet.errors", "prophet.ranks", "pipeline_balance.pipeline"},
    "pipeline_balance.elastic": _PIPELINE
    | {
        "prophet.spec",
        "prophet.machine",
        "prophet.state",
        "prophet.engine",
        "prophet.convert",
        "prophet.trials",
        "pipeline_balance.pipeline",
    }
    | {"pipeline_balance.schedules", "pipeline_balance.maps", "pipeline_balance.control", "pipeline_balance.slices"}
    | {"prophet.terminal", "prophet.doctor", "prophet.gpu_check"},  # its checks of a machine with GPUs
    # its mixture of experts is made of the other half's layer
    "pipeline_balance.dynamics": {
        "prophet.errors",
        "prophet.spec",  # a digest of places
        "prophet.ranks",
        "prophet.experts",
        "prophet.layer",
        "prophet.trials",
    },
    "pipeline_balance": {"pipeline_balance.control"},
}

# The same for rooms within a room, from bottom to top; its modules that are in none of them are there for all. What is
# imported for typing alone counts as well, but in the planner.
_INNER: dict[str, dict[str, set[str]]] = {
    "prophet.planner": {
        "model": set(),
        "oracle": set(),
        "core": set(),
        "split": {"core"},
        "search": {"model", "split", "core"},
        "policies": {"model", "split"},
    },
    "prophet.convert": {
        "trials": set(),
        "sources": {"trials"},
        "layers": {"trials", "sources"},
    },
    "prophet.engine": {"checkpoint": set()},
    "pipeline_balance.pipeline": {
        "measure": set(),
        "model": set(),
        "run": {"measure", "model"},
        "move": {"model", "run"},
    },
    "pipeline_balance.elastic": {
        "layouts": set(),
        "predict": {"layouts"},
        "shards": {"layouts"},
    },
}

# A room that may import a part of another one, and nothing else of it.
_MAY_IMPORT_A_PART = {
    "pipeline_balance.maps": "prophet.planner.core",  # one compiled module serves both halves
    "pipeline_balance.dynamics": "pipeline_balance.pipeline.model.added_loss",  # its layers have losses
    "pipeline_balance.elastic": "prophet.commands.arguments",  # its command's options are those of the others
}

# A reader finds a file by its name among so many; where there are more, rooms stand between.
_FILES_IN_A_FOLDER = 16

# Third-party packages a room may import. Rooms that are not listed may import torch, numpy and rich.
_NUMERIC = {"numpy"}
_PACKAGES: dict[str, set[str]] = {
    "prophet.errors": set(),
    "prophet.files": set(),
    "prophet.spec": _NUMERIC,
    "prophet.planner": _NUMERIC | {"scipy"},
    "prophet.traces": _NUMERIC,
    "prophet.kernels": _NUMERIC | {"torch", "triton"},
    "prophet.report": _NUMERIC | {"matplotlib"},
    "prophet.cli": set(),
    "prophet.terminal": {"rich"},
    "prophet.monitor": _NUMERIC | {"rich", "torch"},  # torch for its writer of TensorBoard files
    "pipeline_balance.spec": _NUMERIC,
    "pipeline_balance.maps": _NUMERIC,
    "pipeline_balance.schedules": _NUMERIC,
    "pipeline_balance.control": _NUMERIC | {"torch"},
    "pipeline_balance.release": _NUMERIC | {"torch", "kubernetes"},
    "pipeline_balance.elastic": _NUMERIC | {"torch", "rich", "scipy"},
    "pipeline_balance.slices": _NUMERIC | {"torch", "transformers"},  # to register its attention
}
_DEFAULT_PACKAGES = _NUMERIC | {"torch", "rich"}

# Pure modules of rooms that know devices: functions from values to values.
_PURE_MODULES = {
    "prophet.engine.history",
    "prophet.engine.replan",
    "prophet.machine.sizes",
    "prophet.machine.models",
    "prophet.machine.config_json",
    "prophet.state.space",
    "prophet.state.layout",
    "prophet.state.route",
    "pipeline_balance.elastic.layouts.parallelism",
    "prophet.state.table",
    "prophet.state.atoms",
    "prophet.state.sources",
    "prophet.scheduler.actions",
    "prophet.scheduler.schedules",
    "prophet.scheduler.pieces",
    "prophet.scheduler.forms",
    "prophet.scheduler.budget",
    "prophet.scheduler.simulate",
}

_MAY_COMMUNICATE = {
    "prophet/ranks/process_group.py",
    "prophet/ranks/works.py",
    "prophet/state/checkpoint/files.py",  # torch's distributed checkpoint format
    "prophet/state/checkpoint/tensor_index.py",  # the same
    "pipeline_balance/pipeline/run/stages.py",
    "pipeline_balance/elastic/groups.py",
    "pipeline_balance/elastic/shards/fully_sharded.py",  # reads what FSDP2 keeps; sends nothing
    "pipeline_balance/elastic/shards/sharded.py",  # torch's tensor parallelism and FSDP2 send what they must
    "pipeline_balance/elastic/shards/held_shards.py",  # reads shards off tensors; sends nothing
    "pipeline_balance/release/membership.py",
}
# Commands that start ranks play the user's program: one file starts and ends their process group, and everything in
# between talks through a Collective.
_MAY_START_A_GROUP = {"prophet/ranks/launch.py"}
# Under torchrun ranks are there already: the same file finds that out, and the environment is how it is told.
_MAY_READ_THE_ENVIRONMENT = {
    "prophet/ranks/launch.py",
    "prophet/commands/doctor.py",  # which says what is wrong with it
    "prophet/commands/gpu_check.py",  # the same; and what its checks' processes are started with
}
# torch keeps the index of its checkpoints as a pickle: one file reads it, and knows every class that may be in it.
_READS_A_PICKLE = "prophet/state/checkpoint/tensor_index.py"
# a group has started when all of its ranks are connected
_STARTING = {"init_process_group", "barrier", "destroy_process_group", "is_initialized"}
# and in which store its ranks meet
_STARTING |= {"FileStore", "TCPStore"}

_SHIPPED = ("prophet", "pipeline_balance", "integrations")
_NEVER_IMPORTED = {"tests", "benchmarks", "examples", "conftest"}
_FORBIDDEN_NAMES = {"types.py", "profile.py", "triton.py"}
_LAZY = ("torch", "numpy", "rich", "tensorboard", "wandb", "deepspeed", "tutel", "transformers", "matplotlib", "scipy")


def wrong_rooms(imports: list[Import]) -> list[str]:
    found = []
    for i in imports:
        if i.module.split(".")[0] not in PACKAGES or i.typing_only:
            continue
        here, there = room_of(module_name(i.path), _MAY_IMPORT), room_of(i.module, _MAY_IMPORT)
        part = _MAY_IMPORT_A_PART.get(here)
        if here != there and there not in _MAY_IMPORT[here] and not (part and f"{i.module}.".startswith(f"{part}.")):
            found.append(f"{i.where}: room {here} may not import {i.module}")
    return found


def wrong_inner_rooms(imports: list[Import], outer: str) -> list[str]:
    """Imports against the order of the rooms within one."""
    inner = _INNER[outer]

    def room(module: str) -> str:
        return next((r for r in inner if f"{module}.".startswith(f"{outer}.{r}.")), "")

    found = []
    for i in imports:
        here, there = room(module_name(i.path)), room(i.module)
        counts = not (i.typing_only and outer == "prophet.planner")
        if here and there and here != there and there not in inner[here] and counts:
            found.append(f"{i.where}: room {here} of {outer} may not import {i.module}")
    return found


def wrong_packages(imports: list[Import]) -> list[str]:
    found = []
    for i in imports:
        top = i.module.split(".")[0]
        if top in sys.stdlib_module_names or top in (*PACKAGES, "__future__") or i.typing_only:
            continue
        module = module_name(i.path)
        allowed = _PACKAGES.get(room_of(module, _MAY_IMPORT), _DEFAULT_PACKAGES)
        if module in _PURE_MODULES:
            allowed = _NUMERIC
        if top not in allowed:
            found.append(f"{i.where}: {module} may not import {top}, only {sorted(allowed)}")
    return found


def wrong_communication(source: str, path: Path) -> list[str]:
    """Uses of `torch.distributed` that are not for typing, in a file that may not communicate."""
    if path.as_posix() in _MAY_COMMUNICATE or "distributed" not in source:
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
    tree = tree_of(source)
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
    assert Path("prophet/spec/placement.py") in sources("prophet")


def test_every_room_has_a_place() -> None:
    assert not rooms() - _MAY_IMPORT.keys(), "say in test_architecture.py what these may import"


def test_the_tables_name_nothing_that_is_gone() -> None:
    there = {p.as_posix() for p in sources(*PACKAGES)}
    assert rooms() >= _MAY_IMPORT.keys() | _PACKAGES.keys()
    assert {module_name(Path(p)) for p in there} >= _PURE_MODULES
    assert there >= _MAY_COMMUNICATE | _MAY_START_A_GROUP | _MAY_READ_THE_ENVIRONMENT
    unused = {(a, b) for a, needs in _MAY_IMPORT.items() for b in needs} - arrows(imports_in(*PACKAGES), rooms())
    assert not unused, "the table allows what nobody needs"


def test_the_table_itself_points_one_way() -> None:
    assert not circles({(room, needed) for room, needs in _MAY_IMPORT.items() for needed in needs})


def test_no_files_import_each_other() -> None:
    """Not even for typing: what two files need of each other belongs below both, or behind a Protocol."""
    files = {module_name(p) for p in sources(*_SHIPPED)}
    found = file_arrows(imports_in(*_SHIPPED), files)
    assert not circles(found)
    engine, layer = Path("prophet/engine/engine.py"), Path("prophet/engine/balanced_layer.py")
    breach = "if TYPE_CHECKING:\n    from prophet.engine.engine import Engine"
    back = file_arrows(imports_of(breach, layer), files)
    assert circles(found | back) == [{module_name(engine), module_name(layer)}]


def test_the_halves_import_one_way() -> None:
    assert not [
        room for room in _MAY_IMPORT if room.startswith("prophet") and any("_balance" in n for n in _MAY_IMPORT[room])
    ]
    assert not [i.where for i in imports_in(*PACKAGES) if i.module.startswith("prophet_")]


def test_rooms_import_one_way() -> None:
    assert not wrong_rooms(imports_in(*PACKAGES))


@pytest.mark.parametrize("outer", _INNER)
def test_rooms_within_a_room_import_one_way(outer: str) -> None:
    where = outer.replace(".", "/")
    folders = {p.parts[2] for p in sources(where) if len(p.parts) > 3}
    assert folders == _INNER[outer].keys(), "say in test_architecture.py what these may import"
    assert not wrong_inner_rooms(imports_in(where), outer)
    low, high = next(iter(_INNER[outer])), list(_INNER[outer])[-1]
    breach = f"from {outer}.{high}.something import Thing"
    assert low == high or wrong_inner_rooms(list(imports_of(breach, Path(f"{where}/{low}/x.py"))), outer)


def test_nothing_is_too_long() -> None:
    assert not too_long(*PACKAGES, "integrations")


def test_no_folder_holds_many_files() -> None:
    flat = Counter(path.parent for path in sources(*PACKAGES, "integrations"))
    assert not {folder: files for folder, files in flat.items() if files > _FILES_IN_A_FOLDER}


def test_rooms_import_their_packages_only() -> None:
    assert not wrong_packages(imports_in(*PACKAGES))


def test_only_the_listed_files_communicate() -> None:
    found = [line for path in sources(*PACKAGES) for line in wrong_communication(text_of(path), path)]
    assert not found, "take a Collective instead"


def test_nothing_imports_tests_or_benchmarks() -> None:
    wrong = [f"{i.where}: {i.module}" for i in imports_in(*_SHIPPED) if i.module.split(".")[0] in _NEVER_IMPORTED]
    assert not wrong


def wrong_test_imports(imports: list[Import]) -> list[str]:
    """What tests share is in `tests.helpers`: a file that imports another file of tests moves and breaks with it."""
    return [
        f"{i.where}: {i.module}"
        for i in imports
        if i.module.startswith("tests.") and not i.module.startswith("tests.helpers")
    ]


def test_no_test_imports_another() -> None:
    assert not wrong_test_imports(imports_in("tests"))
    breach = "from tests.layer.test_moe import layer"
    assert wrong_test_imports(list(imports_of(breach, Path("tests/engine/test_x.py"))))


def test_no_module_hides_a_library() -> None:
    assert not [p.as_posix() for p in sources(*_SHIPPED, "benchmarks", "examples") if p.name in _FORBIDDEN_NAMES]


def test_what_others_have_to_write_is_abstract() -> None:
    """A method that only raises is missed when it runs, an abstract one when its class is made."""
    wrong = [
        f"{path.as_posix()}:{node.lineno}"
        for path in sources(*_SHIPPED)
        for node in ast.walk(tree_of(text_of(path)))
        if isinstance(node, ast.Raise) and node.exc is not None and "NotImplemented" in ast.unparse(node.exc)
    ]
    assert not wrong


def test_libraries_read_no_environment_and_no_pickle() -> None:
    wrong = []
    for path in sources(*PACKAGES):
        source = text_of(path)
        for node in ast.walk(tree_of(source)):
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
            if i.module.split(".")[0] in ("pickle", "dill", "cloudpickle") and path.as_posix() != _READS_A_PICKLE
        ]
        if "FileSystemReader(" in source:  # torch's would run what an index says
            wrong.append(f"{path.as_posix()}: FileSystemReader")
    assert not wrong


def test_importing_prophet_is_light() -> None:
    """`import prophet` alone brings in no package at all: its names load when they are used."""
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
        ("prophet/planner/x.py", "import prophet.layer.moe"),
        ("prophet/spec.py", "import scipy"),
        ("prophet/spec.py", "from prophet.planner import base"),
        ("prophet/kernels/a/kernel.py", "import rich"),
        ("prophet/kernels/a/kernel.py", "from prophet.ranks import collective"),
        ("prophet/scheduler/actions.py", "import torch"),
        ("prophet/scheduler/x.py", "from prophet.layer.moe import MoE"),
        ("prophet/layer/moe.py", "from prophet.engine.engine import attach"),
        ("prophet/layer/moe.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("prophet/layer/moe.py", "from torch import distributed\ndistributed.get_rank()"),
        ("prophet/layer/moe.py", "import torch\ntorch.distributed.barrier()"),
        ("prophet/layer/moe.py", "from torch.distributed import all_reduce"),
        ("prophet/ranks/launch.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("prophet/demo/launch.py", "import torch.distributed as dist\ndist.init_process_group('gloo')"),
        ("prophet/engine/engine.py", "import matplotlib.pyplot"),
        ("prophet/report/x.py", "from prophet.demo import model"),
    ],
)
def test_a_breach_is_seen(path: str, text: str) -> None:
    assert check(text, path)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("prophet/planner/x.py", "import scipy, numpy\nfrom prophet.spec import Link\nfrom . import base"),
        (
            "prophet/layer/moe.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch.distributed",
        ),
        ("prophet/ranks/process_group.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("prophet/ranks/launch.py", "import torch.distributed as dist\ndist.init_process_group('gloo')"),
        ("prophet/report/x.py", "def f():\n    import matplotlib"),
        ("prophet/engine/engine.py", "from prophet.layer.moe import MoE\nimport torch"),
    ],
)
def test_what_is_allowed_passes(path: str, text: str) -> None:
    assert not check(text, path)
