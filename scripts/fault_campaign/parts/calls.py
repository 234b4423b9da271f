"""Calls of the Python interface with invalid operands."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from fault_campaign.campaign import Campaign, Count
from fault_campaign.limits import SECONDS

MOST_CHARACTERS = 2500


def run(campaign: Campaign) -> Iterator[Count]:
    """Every call of `odd_calls`, then attention with three random operands."""
    from jaxtyping import config

    from fault_campaign.odd_calls import OPERANDS, calls
    from normattn.errors import InputError
    from normattn.layers.attention import attention

    refused = Count("an invalid call raises an InputError with a short message, within 20 s")
    config.update("jaxtyping_disable", True)
    try:
        cases = list(calls().items())
        random = campaign.random
        attend: Any = attention
        while len(cases) < (400 if campaign.full else 250):
            names = [random.choice(list(OPERANDS)) for _ in range(3)]
            args = [OPERANDS[name]() for name in names]
            cases.append((f"attention of {names}", partial(attend, *args, "Baseline", backend=3)))
        for name, call in cases:
            started = time.monotonic()
            try:
                call()
                found = "no refusal"
            except InputError as error:
                found = "" if len(str(error)) < MOST_CHARACTERS else "too many words"
            except Exception as error:
                found = f"{type(error).__name__}: {error}"[:300]
            if time.monotonic() - started > SECONDS:
                found = "too slow"
            refused.check(not found, f"{name}: {found}")
    finally:
        config.update("jaxtyping_disable", False)
    yield refused
