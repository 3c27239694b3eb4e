"""A backward pass in two halves: gradients of a stage's inputs first, those of its weights once there is time.

The first half goes through the nodes of autograd's graph that lead to an input. A node that leads to weights beside is
a site: what comes to it is kept, and there the second half begins. Torch has private functions that do this
(`torch.distributed.pipelining._backward`); they differ by release, lose gradients of outputs without an input, and fail
where a stage ends in a view or two weights are used in turns. Only what torch documents is used here.

Shape legend: W weights of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = tuple[Tensor | None, ...]


@dataclass(eq=False)
class _Site:
    """Where the second half begins.

    Attributes:
        node: The node of autograd's graph.
        weights: [W] bits of the weights that it leads to.
        came: The gradients that the first half has brought.
        passed: Whether the first half goes on from here, so that other sites' second half may pass it too.
    """

    node: Node
    weights: int
    came: Grads = ()
    passed: bool = True

    def note(self, grads: Grads) -> None:
        self.came = grads

    def again(self, grads: Grads) -> Grads:
        """Put back what came in the first half: that was all there is."""
        return self.came


@dataclass
class _Group:
    """Sites that share weights."""

    weights: int = 0
    sites: list[_Site] = field(default_factory=list)


class SecondHalf:
    """The weights' gradients of a pass whose inputs' gradients are there."""

    def __init__(self, weights: Sequence[Tensor], sites: Sequence[_Site]) -> None:
        self.weights = weights
        self.groups: list[_Group] = []
        for site in sites:
            # A backward pass that begins at one site may pass through another one that leads to the same weight, whose
            # part would then be counted twice. Such sites run together.
            apart = [g for g in self.groups if not g.weights & site.weights]
            joined = _Group(site.weights, [site])
            for group in self.groups:
                if group.weights & site.weights:
                    joined.weights |= group.weights
                    joined.sites += group.sites
            self.groups = [*apart, joined]

    def run(self) -> None:
        """Add them to the weights' `grad`, as a whole backward pass would; once."""
        groups, self.groups = self.groups, []
        for group in groups:
            came = [(GradientEdge(s.node, i), g) for s in group.sites for i, g in enumerate(s.came) if g is not None]
            if not came:
                continue
            # what flows from one site of a group to another has arrived there in the first half already
            passed = [s for s in group.sites if s.passed] if len(group.sites) > 1 else []
            handles = [site.node.register_prehook(site.again) for site in passed]
            try:
                # another group's path may lead through these nodes, so they stay until all groups are done
                torch.autograd.backward(
                    [edge for edge, _ in came],
                    [grad for _, grad in came],
                    retain_graph=True,
                    inputs=[w for i, w in enumerate(self.weights) if group.weights >> i & 1],
                )
            finally:
                for handle in handles:
                    handle.remove()


def first_half(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Grads, SecondHalf]:
    """Compute the gradients of a stage's inputs, and keep what is left to do for those of its weights.

    Args:
        outputs: The stage's outputs that require grad.
        grads: Their gradients, in the same order.
        inputs: The stage's inputs that require grad; leaves of the graph.
        weights: [W] its trainable parameters.

    Returns:
        The gradients of `inputs` (None for one that no output depends on), and the second half.
    """
    roots = [get_gradient_edge(t) for t in outputs]
    leads, beside = _paths([r.node for r in roots], inputs, weights)
    sites = [_Site(node, bits) for node, bits in beside.items() if bits and node in leads]
    for root, grad in zip(roots, grads, strict=True):
        if root.node not in leads and beside[root.node]:
            # the first half never reaches an output that depends on weights alone, so its gradient is put there by hand
            came = (*(None,) * root.output_nr, grad)
            sites.append(_Site(root.node, beside[root.node], came, passed=False))
    handles = [site.node.register_prehook(site.note) for site in sites if site.passed]
    try:
        found: Grads = torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return found, SecondHalf(weights, sites)


def _paths(
    roots: Sequence[Node], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[set[Node], dict[Node, int]]:
    """The nodes that lead to an input; and of every node, which weights it reaches through nodes that do not."""
    leads = {get_gradient_edge(t).node for t in inputs}
    beside = {get_gradient_edge(w).node: 1 << i for i, w in enumerate(weights)}
    ends = leads | beside.keys()
    done: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    # depth first and without recursion, as graphs of deep stages exceed Python's limit
    while stack:
        node, known = stack.pop()
        if node in done:
            continue
        below = [n for n, _ in node.next_functions if n is not None]
        if not known:
            stack.append((node, True))
            stack += [(n, False) for n in below if n not in done]
            continue
        done.add(node)
        if node in ends:
            beside.setdefault(node, 0)
            continue
        bits = 0
        for n in below:
            bits |= 0 if n in leads else beside[n]
        beside[node] = bits
        if any(n in leads for n in below):
            leads.add(node)
    return leads, beside
