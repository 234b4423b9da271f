"""A request to stop, and the same request handed on."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from normattn.lab.training import signals
from normattn.lab.training.signals import stop_on_signals


@pytest.fixture
def others() -> Iterator[list[int]]:
    """The signals that come to whoever handled them before."""
    came: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, lambda n, _: came.append(n)) for kind in kinds}
    yield came
    for kind, handler in before.items():
        signal.signal(kind, handler)


def test_a_scheduler_and_a_parent_that_both_say_it_said_it_once(others: list[int]) -> None:
    with stop_on_signals() as request:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert request.by == "SIGTERM"
    assert others == []


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_who_asks_again_does_not_want_to_wait(
    kind: signal.Signals, others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "SAME_SECONDS", -1.0)
    with stop_on_signals() as request:
        signal.raise_signal(kind)
        assert (request.by, others) == (kind.name, [])
        signal.raise_signal(kind)
        signal.raise_signal(kind)
    assert others == [kind, kind]


def test_ctrl_c_twice_is_not_the_same_request(others: list[int]) -> None:
    with stop_on_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert others == [signal.SIGINT]
