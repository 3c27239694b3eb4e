"""What a user gets: builds sdist and wheel, installs the wheel alone in an empty environment, and uses it there.

    python tests/wheel.py [--keep FOLDER]

The environment has the wheel and what it asks for, in the versions of this environment, and no extras. Programs run in
an empty folder, so that nothing of this checkout is on their path. A second wheel is built where no compiler works,
with PROPHET_WITHOUT_CORE=1: it has no core, says why, and trains without balancing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("prophet", "pipeline_balance", "integrations")
BUILD = (sys.executable, "-m", "build")
REINSTALL = "pip install --force-reinstall --no-deps ."
_LIMIT_S = 600

TRACE = """
import numpy as np
from prophet.traces import RoutingTrace, write_trace

counts = np.full((3, 2, 4, 8), 10)
counts[..., 0] = 4000
write_trace("trace.npz", RoutingTrace(counts, np.arange(3, dtype=np.int32), {"top_k": 1}))
"""

STEP = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import prophet
from prophet.planner import core

assert Path(prophet.__file__).is_relative_to(sys.prefix), prophet.__file__


def main(rank, ranks):
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{Path('meet').absolute()}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    layer = prophet.MoE(dim=16, hidden=32, num_experts=4, top_k=2)
    with torch.no_grad():
        layer.gate.weight[0] = 1.0  # a hot expert
    model = nn.Sequential(nn.Linear(8, 16), layer, nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    engine = prophet.attach(model, optimizer)
    assert engine.planner.name == ("static" if core.lacking() else "prophet"), engine.planner.name
    reports = []
    engine.on_step.append(reports.append)
    for _ in range(2):
        model(torch.rand(4, 64, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(reports) == 2, reports
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
    engine.close()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    if ranks == 1:
        main(0, 1)
    else:
        torch.multiprocessing.spawn(main, (ranks,), nprocs=ranks)
    print(f"{ranks} ranks: two steps", "without a core" if core.lacking() else "with the core")
"""


def run(*command: str | Path, cwd: Path, expect: int = 0, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a command that sees neither this checkout nor the user's packages; fail with what it has said."""
    hidden = ("PYTHON", "VIRTUAL_ENV", "PROPHET_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    environment |= {"PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"} | settings
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    if done.returncode != expect:
        raise SystemExit(f"{shlex.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def expected_files() -> set[str]:
    """What has to be in the wheel beside the core itself."""
    found = {"prophet/py.typed", "prophet/planner/core/_core.pyi"}
    for package in PACKAGES:
        base = ROOT / package if package == "integrations" else ROOT
        found |= {p.relative_to(base).as_posix() for p in (ROOT / package).rglob("*.py")}
    return found


def build(folder: Path) -> tuple[Path, Path]:
    """Two wheels, with the core and, where no compiler works, without, in folders of these names.

    They are built from the sdist, which is built from a copy of the sources: what lies around takes no part.
    """
    sources = folder / "sources"
    sources.mkdir()
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, sources / name, ignore=leave)
    for name in ("pyproject.toml", "setup.cfg", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    run(*BUILD, "--no-isolation", "--sdist", "--outdir", folder, sources, cwd=folder)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        for where in ("with", "none", "without"):  # each its own copy: nothing that one has compiled serves another
            archive.extractall(folder / where, filter="data")
    needed = {"LICENSE", "README.md", "pyproject.toml", "setup.py"}
    needed |= {p.relative_to(ROOT).as_posix() for suffix in ("h", "cpp") for p in ROOT.glob(f"prophet/*/*/*.{suffix}")}
    assert not needed - names, f"the sdist lacks {sorted(needed - names)}"

    def make(where: str, *options: str, expect: int = 0, **settings: str) -> str:
        command = (*BUILD, *options, "--wheel", "--outdir", folder / where)
        done = run(*command, folder / where / sdist.name.removesuffix(".tar.gz"), cwd=folder, expect=expect, **settings)
        return done.stdout + done.stderr

    none = {"CC": "no-compiler-here", "CXX": "no-compiler-here"}
    make("with")  # with nothing but what it asks for, in an environment of its own
    refused = make("none", "--no-isolation", expect=1, **none)
    assert "error: the planner's compiled core cannot be built" in refused, refused
    make("without", "--no-isolation", PROPHET_WITHOUT_CORE="1", **none)
    wheels = []
    for where, cores in ((folder / "with", 1), (folder / "without", 0)):
        (wheel,) = where.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            held = {name for name in archive.namelist() if ".dist-info/" not in name}
        compiled = {name for name in held if name.startswith("prophet/planner/core/_core.") and name.endswith(".so")}
        assert len(compiled) == cores, held
        noted = set() if cores else {"prophet/planner/core/not_built.txt"}
        other = (held - compiled) ^ (expected_files() | noted)
        assert not other, f"only in one of wheel and sources: {sorted(other)}"
        wheels.append(wheel)
    return wheels[0], wheels[1]


def asked_for(requirements: Iterable[str]) -> dict[str, Distribution]:
    """The distributions of this environment that meet requirements, and those that these ask for, by name."""
    found: dict[str, Distribution] = {}
    todo = [(text, "") for text in requirements]
    done = set()
    while todo:
        text, extra = todo.pop()
        requirement = Requirement(text)
        if (text, extra) in done or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        done.add((text, extra))
        one = distribution(requirement.name)
        found[one.name] = one
        todo += [(more, wanted) for more in one.requires or () for wanted in ("", *requirement.extras)]
    return found


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel alone; its programs' folder.

    pip installs the wheel, and says that nothing it asks for is missing. What it asks for is not unpacked anew: its
    files are links to those of this environment, that pip has chosen by the same metadata.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    put(wheel, folder / "bin")
    (metadata,) = folder.glob("lib/python*/site-packages/moe_prophet-*.dist-info")
    for one in asked_for(Distribution.at(metadata).requires or ()).values():
        for file in one.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:  # neither programs nor bytecode
                target = metadata.parent / file
                target.parent.mkdir(parents=True, exist_ok=True)
                link(Path(str(one.locate_file(file))), target)
    run(*pip(folder / "bin"), "check", cwd=folder.parent)
    return folder / "bin"


def pip(programs: Path) -> tuple[str | Path, ...]:
    """This environment's pip, for another one, which has none."""
    return (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", programs / "python")


def put(wheel: Path, programs: Path) -> None:
    """Install a wheel and nothing else, also over the other one of the same version."""
    run(*pip(programs), "install", "-q", "--no-deps", "--no-index", "--force-reinstall", wheel, cwd=wheel.parent)


def link(source: Path, target: Path) -> None:
    """The same file at another place; a copy where the places are on different disks."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def use(programs: Path, folder: Path) -> None:
    """The version, a plan, balanced steps, and a report that asks for its packages."""
    python, command = programs / "python", programs / "prophet"
    version = run(command, "--version", cwd=folder)
    assert version.stdout.startswith("moe-prophet "), version.stdout
    assert not version.stderr, version.stderr
    (folder / "make_trace.py").write_text(TRACE)
    run(python, "make_trace.py", cwd=folder)
    shown = run(command, "plan", "trace.npz", "--planner", "prophet", cwd=folder).stdout
    assert "'prophet' is predicted to make a step" in shown, shown
    refused = run(command, "plan", "trace.npz", "--html", "page.html", cwd=folder, expect=1).stderr
    assert "pip install '.[report]'" in refused, refused
    (folder / "step.py").write_text(STEP)
    for ranks in (1, 2):
        print(run(python, "step.py", str(ranks), cwd=folder).stdout, end="")
    run(python, "-c", "import pipeline_balance.dynamics, prophet_deepspeed", cwd=folder)


def use_without(programs: Path, wheel: Path, folder: Path) -> None:
    """The same environment with the wheel that has no core: one warning, steps without balancing, and no plan."""
    python, command = programs / "python", programs / "prophet"
    put(wheel, programs)
    for ranks in (1, 2):
        done = run(python, "step.py", str(ranks), cwd=folder)
        assert done.stderr.count(REINSTALL) == 1, done.stderr
        assert done.stderr.count("no-compiler-here") == 1, done.stderr
        print(done.stdout, end="")
    refused = run(command, "plan", "trace.npz", "--planner", "prophet", cwd=folder, expect=1).stderr
    assert REINSTALL in refused, refused
    run(command, "plan", "trace.npz", "--planner", "pro-prophet", cwd=folder)


def clash(programs: Path, folder: Path) -> None:
    """The forecasting library, installed beside ours and then over it; last, since the environment is broken then."""
    where = run(programs / "python", "-c", "import prophet; print(prophet.__path__[0])", cwd=folder).stdout.strip()
    package = Path(where)
    other = package.parent / "prophet-1.1.7.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: prophet\nVersion: 1.1.7\n")
    beside = run(programs / "prophet", "--version", cwd=folder)
    assert "the distribution `prophet` (forecasting) is installed too" in beside.stderr, beside.stderr
    (package / "__init__.py").write_text("class Prophet: ...\n__version__ = '1.1.7'\n")
    over = run(programs / "prophet", "--version", cwd=folder, expect=3)
    assert "the forecasting library of the same import name was installed over it" in over.stderr, over.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="put sdist and wheel here")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="prophet-wheel-") as scratch:
        work = Path(scratch)
        for name in ("dist", "empty"):
            (work / name).mkdir()
        wheel, without = build(work / "dist")
        print(f"{wheel.name}: built in {time.monotonic() - began:.0f} s")
        programs = install(wheel, work / "alone")
        print(f"installed after {time.monotonic() - began:.0f} s")
        use(programs, work / "empty")
        use_without(programs, without, work / "empty")
        clash(programs, work / "empty")
        if arguments.keep:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            for file in (wheel, *(work / "dist").glob("*.tar.gz")):
                shutil.copy(file, arguments.keep)
    print(f"The wheel works alone, {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
