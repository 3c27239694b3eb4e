"""DeepSpeed's universal checkpoint as a peer: saved by one number of processes, converted, loaded by another.

All of it runs on this machine: files lie on its tmpfs and DeepSpeed's messages go over loopback, so nothing crosses a
link. What is timed is `save_checkpoint`, the conversion by DeepSpeed's own script with its own number of workers, and
`load_checkpoint`; not imports, engines, or the step that makes moments. What is loaded is compared with what was saved.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.cluster.testbed import ROOT
from benchmarks.measure import slowest
from benchmarks.switch.cases import Case

UNIVERSAL = "DeepSpeed universal (crosses no link)"
LIMIT_S = 120.0  # of one case's phase
KEYS = ("exp_avg", "exp_avg_sq")


def reason(case: Case) -> str:
    """Why DeepSpeed's conversion does not cover a case; nothing where it does."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    before, after = case.layouts
    if case.experts:
        return "experts: only those of its AutoEP are converted, and this model is plain"
    if before.tp * after.tp > 1:
        return "tp: only weights that its AutoTP or Megatron has cut are converted, and this model is plain"
    if before.pp * after.pp > 1:
        return "pp: only layers of DeepSpeed's pipeline module are converted, and this model is plain"
    return _STAGES.get((before.zero, after.zero), "")


_STAGES = {  # tried with 0.19.8
    (0, 1): "stage 0 saves no *_optim_states.pt, which the conversion asks for",
    (1, 0): "the conversion writes no optimizer state that stage 0 loads",
    (1, 3): "stage 3 looks for model files under another name than the conversion of stage 1 gives them",
    (3, 1): "stage 1 looks for model files under another name than the conversion of stage 3 gives them",
}


def measured(cases: Sequence[Case], repetitions: int, folder: Path) -> list[dict[str, Any]]:
    """What came of every case: its figures, or the reason why there are none. `folder`: on tmpfs."""
    found: list[dict[str, Any]] = [{"reason": reason(case)} for case in cases]
    covered = [k for k, row in enumerate(found) if not row["reason"]]
    if covered:
        folder.mkdir(parents=True, exist_ok=True)
        words = {"cases": [asdict(cases[k]) for k in covered], "repetitions": repetitions}
        with tempfile.TemporaryDirectory(prefix="universal-", dir=folder) as scratch:
            out = Path(scratch) / "out.json"
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.switch.universal", scratch, str(out)],
                input=json.dumps(words),
                text=True,
                cwd=ROOT,
                capture_output=True,
                check=False,
                timeout=2 * LIMIT_S * len(covered) + 60.0,
            )
            if done.returncode:
                raise RuntimeError(f"DeepSpeed's universal checkpoint: {done.stderr[-2000:]}")
            for k, row in zip(covered, json.loads(out.read_text(encoding="utf-8")), strict=True):
                found[k] |= row
    return found


# --- in a process that has imported DeepSpeed, and in its forks ---


def main(folder: str, out: str) -> None:
    """All cases that are read from standard input, as JSON."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    words = json.loads(sys.stdin.read())
    for module in ("ops", "checkpoint.ds_to_universal", "runtime.zero.muon.muon_optimizer", "runtime.zero.stage3"):
        importlib.import_module(f"deepspeed.{module}")  # forks have them
    importlib.import_module("torch._dynamo")
    sys.modules["deepspeed.ops"].__compatible_ops__["deepspeed_shm_comm"] = False  # type: ignore[attr-defined]
    found = [_case(Case(**case), words["repetitions"], Path(folder) / str(k)) for k, case in enumerate(words["cases"])]
    Path(out).write_text(json.dumps(found), encoding="utf-8")


def _case(case: Case, repetitions: int, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    before, after = case.layouts
    shapes = [p.shape for p in case.model().parameters]
    job: dict[str, Any] = {"shapes": shapes, "zero": before.zero, "repetitions": repetitions, "folder": str(folder)}
    saved = _in_forks(before.ranks, job | {"load": False})
    convert_s = [_in_forks(1, job | {"tag": k})[0]["seconds"] for k in range(repetitions)]
    loaded = _in_forks(after.ranks, job | {"load": True, "zero": after.zero})
    sizes = {name: _bytes(folder / name) for name in ("0", "0-universal")}
    shutil.rmtree(folder)
    save_s, load_s = (slowest(r["seconds"] for r in rows) for rows in (saved, loaded))
    every = [sum(at) for at in zip(save_s, convert_s, load_s, strict=True)]
    medians = {n: statistics.median(s) for n, s in (("save_s", save_s), ("convert_s", convert_s), ("load_s", load_s))}
    read_bytes = max(r["read_bytes"] for r in loaded)
    return {
        **medians,
        "seconds": every,
        "saved_bytes": sizes["0"],
        "converted_bytes": sizes["0-universal"],
        "read_bytes": read_bytes,
        "peer_bytes": -(-sizes["0"] // before.ranks) + read_bytes,
    }


def _bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def _in_forks(size: int, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What `size` processes found; RuntimeError where one failed or took too long."""
    context = multiprocessing.get_context("fork")
    found: Any = context.Queue()
    store = tempfile.mktemp(dir=job["folder"])
    forks = [context.Process(target=_fork, args=(rank, size, job, store, found)) for rank in range(size)]
    rows: dict[int, Any] = {}
    try:
        for fork in forks:
            fork.start()
        deadline = time.monotonic() + LIMIT_S
        while len(rows) < size:
            with contextlib.suppress(queue.Empty):
                rank, row = found.get(timeout=1.0)
                if isinstance(row, str):
                    raise RuntimeError(f"process {rank} of {size}: {row}")
                rows[rank] = row
            if time.monotonic() > deadline:
                raise RuntimeError(f"{size} processes took more than {LIMIT_S:g} s")
    finally:
        for fork in forks:
            fork.kill()
            fork.join()
    return [rows[rank] for rank in range(size)]


def _fork(rank: int, size: int, job: Mapping[str, Any], store: str, found: Any) -> None:
    try:
        row: Any = _converted(job) if "tag" in job else _engine(rank, size, job, store)
    except BaseException as error:
        row = f"{type(error).__name__}: {error}"
    found.put((rank, row))
    found.close()
    found.join_thread()
    time.sleep(LIMIT_S)  # until it is killed: peers may still need this end


def _converted(job: Mapping[str, Any]) -> dict[str, Any]:
    from argparse import Namespace

    from deepspeed.checkpoint import ds_to_universal

    folder = Path(job["folder"])
    asked = Namespace(  # the script's own defaults, but that a model without tp needs no client's words
        input_folder=str(folder / str(job["tag"])),
        output_folder=str(folder / f"{job['tag']}-universal"),
        num_extract_workers=4,
        num_merge_workers=2,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    began = time.perf_counter()
    ds_to_universal.main(asked)
    return {"seconds": time.perf_counter() - began}


def _engine(rank: int, size: int, job: Mapping[str, Any], store: str) -> dict[str, Any]:
    """One of the processes that save or load: seconds of every repetition."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)

    class Model(nn.Module):
        """The case's parameters; every one has a gradient."""

        def __init__(self) -> None:
            super().__init__()
            drawn = (torch.randn(shape, generator=generator) for shape in job["shapes"])
            self.weights = nn.ParameterList([nn.Parameter(p) for p in drawn])

        def forward(self) -> torch.Tensor:
            return torch.stack([w.float().square().sum() for w in self.weights]).sum()

    generator = torch.Generator().manual_seed(int(job["load"]))  # what is loaded replaces other values
    model, folder = Model(), Path(job["folder"])
    config = {
        "train_batch_size": size,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": job["zero"]},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "checkpoint": {"load_universal": job["load"]},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine())
    engine.step()
    seconds = []
    with _counting() as read:
        for tag in range(job["repetitions"]):
            dist.barrier()
            began = time.perf_counter()
            if job["load"]:
                engine.load_checkpoint(str(folder), tag=f"{tag}-universal")
            else:
                engine.save_checkpoint(str(folder), tag=str(tag))
            seconds.append(time.perf_counter() - began)
    _compare(model, folder / "truth.pt", rank, load=job["load"])
    return {"seconds": seconds, "read_bytes": sum(read) // job["repetitions"]}


@contextlib.contextmanager
def _counting() -> Iterator[list[int]]:
    """Inside, the sizes of files that `torch.load` is given are noted."""
    import torch

    load, sizes = torch.load, [0]

    def noted(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | os.PathLike):
            sizes.append(os.path.getsize(file))
        return load(file, *args, **kwargs)

    torch.load = noted
    try:
        yield sizes
    finally:
        torch.load = load


def _compare(model: Any, file: Path, rank: int, *, load: bool) -> None:
    """Whole master weights and moments: kept by rank 0, or compared with what was kept. Collective."""
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    whole = []
    for p in model.parameters():
        whole += [safe_get_full_fp32_param(p).clone(), *(safe_get_full_optimizer_state(p, k).clone() for k in KEYS)]
    if not load and rank == 0:
        torch.save(whole, file)
    if load and rank == 0:
        kept = torch.load(file, weights_only=True)
        wrong = [k for k, (a, b) in enumerate(zip(kept, whole, strict=True)) if not torch.equal(a, b)]
        if wrong:
            raise RuntimeError(f"{len(wrong)} of {len(kept)} tensors are not as they were saved")


if __name__ == "__main__":
    main(*sys.argv[1:])
