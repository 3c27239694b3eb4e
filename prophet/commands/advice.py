"""Predictions as sentences: the gain, what it costs, and one piece of advice.

The sentences that `prophet plan` alone has are built from its answer; `prophet simulate` shares the others.
"""

from __future__ import annotations

import math
from typing import Any

# busiest rank over the mean, from which on nothing is left to gain
EVEN = 1.05
# times as fast: below, a run would not show it
WORTH = 1.01
NO_ROOM = "Without room for replicas nothing can be gained: leave --slots out."
TOO_EVEN = "Routing this even leaves nothing to gain: is the router trained?"
TOO_DEAR = "A replica takes longer to send than it saves: try more tokens per rank (--tokens) or fewer --slots."
_STATIC = "static"


def sentences(answer: dict[str, Any]) -> list[str]:
    """The lines below the table, a sentence or two each."""
    return [gain(answer), parts(answer), cost(answer), planning(answer), answer["advice"]]


def best_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The planner with the shortest predicted step; no balancing where none is shorter."""
    best: dict[str, Any] = min(answer["planners"], key=lambda p: (p["predicted_step_s"], p["planner"] != _STATIC))
    return best


def gain(answer: dict[str, Any]) -> str:
    """Say what balancing gains of a step."""
    best = best_of(answer)
    if answer["trace"]["ranks"] == 1:
        return "One rank has nobody to share with: every gain is 1.00."
    if best["predicted_step_speed_up"] < WORTH:
        return "No planner is predicted to gain 1 % of a step here."
    return (
        f"{best['planner']!r} is predicted to make a step {best['predicted_step_speed_up']:.2f} times as fast as no "
        f"balancing, and its MoE layers {best['predicted_speed_up']:.2f} times."
    )


def parts(answer: dict[str, Any]) -> str:
    """Say what the predicted step without balancing is made of."""
    step, static = answer["step"], answer["planners"][0]
    # The first planner is `static`; its step holds the MoE layers, which the answer does not list, and all of these
    rest = step["blocks_s"] + step["dense_s"] + step["head_s"]
    several = "" if step["microbatches"] == 1 else f", {step['microbatches']:.3g} microbatches"
    other = f" and {step['layers'] - step['moe_layers']} without experts" if step["layers"] > step["moe_layers"] else ""
    layers_s = static["predicted_step_s"] - step["microbatches"] * rest - step["average_s"]
    return (
        f"A step without balancing{several}: {milliseconds(layers_s)} ms in {step['moe_layers']} MoE layers, "
        f"{milliseconds(step['microbatches'] * (rest - step['head_s']))} in the rest of their blocks{other}, "
        f"{milliseconds(step['microbatches'] * step['head_s'])} in the output head, "
        f"{milliseconds(step['average_s'])} in the average of gradients."
    )


def cost(answer: dict[str, Any]) -> str:
    """Say what the best planner costs in memory."""
    best, memory = best_of(answer), answer["memory_bytes"]
    if not best["replicas_on_fullest_rank"]:
        return "It costs no memory: there are no replicas."
    of = binary(memory) if memory else "memory"
    return (
        f"It costs at most {binary(best['replica_bytes_on_fullest_rank'])} of a rank's {of}: "
        f"{best['replicas_on_fullest_rank']} replicas of {binary(answer['replica_bytes'])} each, with their gradients."
    )


def planning(answer: dict[str, Any]) -> str:
    """Say what the planner takes of the host. It is the only measured line, so tests of pages leave it out."""
    best = best_of(answer)
    plan, split = (milliseconds(best[f"{what}_s"]) for what in ("planning", "splitting"))
    return f"Measured on this machine: {plan} ms to plan beside a step, {split} ms to split in it; both are extra."


def advice(answer: dict[str, Any]) -> str:
    """Say what to do next, in one sentence."""
    static, best, trace = answer["planners"][0], best_of(answer), answer["trace"]
    memory, slots = answer["memory_bytes"], answer["slots_per_rank"]
    if trace["ranks"] == 1:
        return "The trace has one rank, so there is nothing to balance: record with ranks=8, or give --ranks 8."
    # Causes in the order in which a user can do something about them: only the first one is named
    if slots == 0:
        return NO_ROOM
    if too_large := too_much_memory(best["replica_bytes_on_fullest_rank"], memory):
        return too_large
    if best["predicted_step_speed_up"] >= WORTH:
        return lines_to_add(best["planner"])
    if static["max_mean_median"] <= EVEN:
        return TOO_EVEN
    if best["predicted_speed_up"] >= WORTH:
        return (
            "The MoE layers are too small a part of this step: try more tokens per rank (--tokens) or larger experts."
        )
    # Balancing shortens experts, not the bytes of the all-to-all
    if static["predicted_a2a_s"] > static["predicted_expert_s"]:
        share = static["predicted_a2a_s"] / static["predicted_layer_s"]
        return (
            f"The all-to-all takes {share:.0%} of a layer, and balancing cannot mend that: try more tokens per rank "
            "(--tokens), groups within a node (--ep) or a faster network (--machine)."
        )
    return TOO_DEAR


def too_much_memory(replica_bytes: int, memory_bytes: int | None) -> str:
    """Say what to do where replicas take over a quarter of a device, which also holds the model; else nothing."""
    if not memory_bytes or replica_bytes <= memory_bytes // 4:
        return ""
    mend = "give fewer --slots, and set replica_memory_bytes in EngineConfig."
    if replica_bytes > memory_bytes:
        return f"The replicas do not fit into {binary(memory_bytes)}: {mend}"
    return f"Replicas take {binary(replica_bytes)} of a rank's {binary(memory_bytes)}: {mend}"


def lines_to_add(planner: str) -> str:
    """Name the lines by which a training loop gets what `planner` gains."""
    named = "" if planner == "prophet" else f", config=prophet.EngineConfig(planner={planner!r})"
    return (
        f"To gain it, add to your loop: prophet.convert(model), then prophet.attach(model, optimizer{named}); "
        "docs/engine.md has the rest."
    )


def milliseconds(seconds: float) -> str:
    """Milliseconds in three digits, without an exponent."""
    ms = 1e3 * seconds
    if 0 < ms < 0.001:
        return "<0.001"
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def binary(n: float) -> str:
    """Bytes in the largest binary unit of which there is at least one."""
    power = min(int(math.log2(max(n, 1))) // 10, 4)
    return f"{n / 1024**power:.3g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
