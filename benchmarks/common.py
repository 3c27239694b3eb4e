"""What several benchmarks share: ranks to measure on, and the file that the rows go to."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from prophet.comm import collective_for
from prophet.processes import joined_group, run_ranks

Row = dict[str, Any]
Measure = Callable[..., list[Row]]
TIMEOUT_S = 60.0


def ranks_there() -> int | None:
    """How many ranks torchrun has started, this process among them; None where it has not."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def rows_on_ranks(measure: Measure, options: Mapping[str, Any], *, ranks: int, limit_s: float) -> list[Row] | None:
    """`measure(collective, device=..., **options)` on ranks that torchrun has started, or else on `ranks` gloo ones.

    measure: importable, collective, the same rows on all ranks. Under torchrun every rank that has a GPU uses it, by
    NCCL. None means that another rank speaks. Raises `RankFailed` where a started rank fails or takes too long.
    """
    if ranks_there() is not None:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        on_gpu = torch.cuda.device_count() > local
        if on_gpu:
            torch.cuda.set_device(local)
        with joined_group("nccl" if on_gpu else "gloo", timeout_s=TIMEOUT_S):
            collective = collective_for(None, timeout_s=TIMEOUT_S)
            rows = measure(collective, device=f"cuda:{local}" if on_gpu else "cpu", **options)
            return rows if collective.rank == 0 else None
    with tempfile.TemporaryDirectory(prefix="prophet-benchmark-") as scratch:
        folder = Path(scratch)
        run_ranks(
            _rank_body,
            (measure, dict(options), folder / "rows.json"),
            ranks=ranks,
            folder=folder,
            limit_s=limit_s,
            timeout_s=TIMEOUT_S,
            what="the benchmark",
        )
        found: list[Row] = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    return found


def _rank_body(rank: int, measure: Measure, options: dict[str, Any], answer: Path) -> None:
    """What every rank does that a benchmark has started; rank 0 writes the rows."""
    rows = measure(collective_for(None, timeout_s=TIMEOUT_S), device="cpu", **options)
    if rank == 0:
        answer.write_text(json.dumps(rows), encoding="utf-8")


def environment() -> dict[str, Any]:
    """When and on what something was measured."""
    gpu = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }


def write_rows(file: Path, benchmark: str, rows: Sequence[Row], **more: Any) -> None:
    """Write the rows as JSON, with the benchmark's name and the environment: what `prophet calibrate --from` reads."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": benchmark, "environment": {**environment(), **more}, "rows": list(rows)}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
