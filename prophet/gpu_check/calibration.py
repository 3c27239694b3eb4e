"""The calibration of this machine, as a file for `EngineConfig(topology=...)`."""

from __future__ import annotations

from dataclasses import asdict

import torch

from prophet.doctor.check import Check, sound, unseen
from prophet.gpu_check.checks import TOPOLOGY, Answer, Place
from prophet.machine.calibrate import calibrate
from prophet.machine.measure import Ranges
from prophet.machine.memory import keep_memory
from prophet.machine.topology import write_topology
from prophet.ranks.process_group import collective_for
from prophet.spec import Topology

# No link is faster, or takes longer to begin
_MOST_BYTES_PER_S, _MOST_LATENCY_S = 1e13, 1.0


def calibration(place: Place) -> Answer:
    """Measure briefly, and write the topology file into the folder that checks share."""
    collective = collective_for(None, timeout_s=place.timeout_s)
    if place.on_gpu:
        kind = {"dim": 2048, "hidden": 2048}
        ranges, dtype, repeats = Ranges(rows=(1024, 16384), tokens=(1024, 16384), points=4), torch.bfloat16, 15
    else:
        keep_memory()
        kind = {"dim": 256, "hidden": 512}
        ranges, dtype, repeats = Ranges(groups=(1, 4), points=3), torch.float32, 5
    found = calibrate(
        collective,
        **kind,
        activation="swiglu" if place.on_gpu else "gelu",
        dtype=dtype,
        device=place.device,
        ranges=ranges,
        repeats=repeats,
        held_out=False,
        name="gpu-check" if place.on_gpu else "gpu-check-on-cpu",
    ).topology
    check = judged(found)
    # A file of noise would be worse than none
    if place.rank == 0 and check.state == "sound":
        write_topology(place.shared / TOPOLOGY, found)
    collective.close()
    return Answer(checks=[check], figures={"topology": asdict(found), **kind})


def judged(found: Topology) -> Check:
    """Judge a calibration: one without any time per byte has measured something else than the link."""
    rate = f"{min(found.flops_per_s) / 1e12:.3g} TFLOP/s for an expert's products"
    if found.ranks == 1:
        return sound("calibration", f"{rate}, and no link: one rank")
    if found.intra.bytes_per_s > _MOST_BYTES_PER_S or not found.intra.latency_s < _MOST_LATENCY_S:
        text = f"{rate}, but no rate for the link: is the machine busy? `prophet calibrate --out FILE` measures longer"
        return unseen("calibration", text)
    return sound("calibration", f"{rate}, {found.intra.bytes_per_s / 1e9:.3g} GB/s for the all-to-all")
