"""The Python interface refuses what it cannot use as every other door does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from jaxtyping import config

from normattn.errors import InputError
from normattn.models import generate

from .calls import calls, small_model

CALLS = calls()


@pytest.fixture(autouse=True)
def _as_users_have_it() -> Iterator[None]:
    """Without the tests' own checks of types: it is the library's sentence that must come."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_without_sense_is_refused(name: str) -> None:
    call: Callable[[], Any] = CALLS[name]
    with pytest.raises(InputError) as caught:
        call()
    assert len(str(caught.value)) < 1000


def test_prompts_of_every_whole_kind_are_read_alike() -> None:
    model = small_model()
    expected = generate(model, [[1, 2]], 3)
    every: list[Any] = [[(1, 2)], torch.tensor([[1, 2]]), torch.tensor([[1, 2]], dtype=torch.int32)]
    for prompts in every:
        assert generate(model, prompts, 3) == expected
