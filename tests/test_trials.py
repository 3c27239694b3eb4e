"""What runs a user's module and leaves no trace."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from prophet.trials import RandomState, seed_host, trying


def test_random_state_goes_back_to_where_it_was() -> None:
    before = RandomState(torch.device("cpu"), torch.device("meta"))
    assert len(before.states) == 1
    first = torch.rand(3)
    assert not before.is_now()
    before.put_back()
    assert before.is_now()
    assert torch.equal(torch.rand(3), first)


def test_random_state_is_put_back_after_an_error() -> None:
    def fail() -> None:
        with trying(7):
            torch.rand(3)
            raise ZeroDivisionError

    before = RandomState()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert before.is_now()


@pytest.mark.parametrize("touch", [RandomState, RandomState().put_back, lambda: seed_host(0)])
def test_threads_take_turns_at_the_generator(touch: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that reads the state while another one holds torch's lock of the generator can wait for ever."""
    holding, let_go = threading.Event(), threading.Event()
    read = torch.get_rng_state

    def slowly() -> torch.Tensor:
        holding.set()
        assert let_go.wait(20.0)
        return read()

    with ThreadPoolExecutor(2) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "get_rng_state", slowly)
            first = pool.submit(RandomState)
            assert holding.wait(20.0)
        second = pool.submit(touch)  # type: ignore[arg-type]
        try:
            with pytest.raises(TimeoutError):
                second.result(0.2)
        finally:
            let_go.set()
        first.result(20.0)
        second.result(20.0)


def test_a_trial_keeps_no_other_thread_from_the_generator() -> None:
    """On a GPU backward runs in autograd's thread, and a trial may wait for it."""
    with trying(None), ThreadPoolExecutor(1) as pool:
        pool.submit(RandomState).result(20.0)
        pool.submit(seed_host, 0).result(20.0)
