"""Collectives that stand for another one pass on everything that they do not look at."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from prophet.ranks.collective import Collective
from prophet.ranks.forwarding import ForwardingCollective
from prophet.ranks.operation import Operation
from prophet.ranks.threads import ThreadCollective, ThreadWorld

# made of the others, or about this object alone
OWN = {"decide", "all_reduce_mean_", "with_timeout", "close"}


class Plain(ForwardingCollective):
    def around(self, inner: Collective) -> Collective:
        return Plain(inner)


def test_every_call_is_passed_on() -> None:
    public = {n for n, f in inspect.getmembers(Collective, inspect.isfunction) if not n.startswith("_")}
    forwarded = {n for n in public if getattr(ForwardingCollective, n) is not getattr(Collective, n)}
    assert forwarded == public - OWN, "a collective of ours would answer for itself"


@pytest.mark.parametrize("limit_s", [None, 3.0])
def test_ranks_get_the_inner_ones_answers(limit_s: float | None) -> None:
    def body(inner: ThreadCollective) -> list[Any]:
        group: Collective = Plain(inner)
        if limit_s is not None:
            group = group.with_timeout(limit_s)
            assert isinstance(group, Plain)
            assert group.inner.timeout_s == limit_s
        op, x = Operation("test"), torch.full((2,), float(group.rank))
        pending = group.all_to_all(torch.arange(4.0) + 10 * group.rank, [2, 2], [2, 2], op=op)
        into = torch.zeros(2)
        sent = group.exchange([(1 - group.rank, x)], [(1 - group.rank, into)], op=op)
        sent.wait()
        return [
            pending.wait().tolist(),
            into.tolist(),
            group.all_gather(x, op=op).tolist(),
            group.meet(op, failed=True),
        ]

    found = ThreadWorld(2).run(body)
    assert found[0] == [[0.0, 1.0, 10.0, 11.0], [1.0, 1.0], [[0.0, 0.0], [1.0, 1.0]], [0, 1]]
    assert found[1] == [[2.0, 3.0, 12.0, 13.0], [0.0, 0.0], [[0.0, 0.0], [1.0, 1.0]], [0, 1]]
