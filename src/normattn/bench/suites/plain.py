"""Plain causal attention in half precision against the stock kernel."""

from __future__ import annotations

import torch

from normattn.bench.attending import Causal, Scored
from normattn.bench.case import Case, Entry, Goal, Suite
from normattn.bench.peers import Flex, Stock
from normattn.bench.settings import Settings

# What SDPA can do is never done slower than it does by more than a tenth, on any processor.
_AT_MOST = 1.1


def cases(settings: Settings) -> list[Case]:
    """Both passes at every length; on a GPU ours is the stock kernel, and nothing is claimed."""
    return [
        _case(length, backward, settings)
        for length in settings.lengths
        for backward in (False, True)
    ]


def _case(length: int, backward: bool, settings: Settings) -> Case:
    causal = Causal(length, torch.bfloat16, backward, settings.device)
    entries: dict[str, Entry] = {
        "normattn": Scored(causal, "Baseline-NoPE"),
        "SDPA": Stock(causal),
    }
    limit = None if settings.on_gpu else _AT_MOST
    goals = [Goal("normattn", "SDPA", at_most=limit)]
    if settings.on_gpu:
        entries["flex_attention"] = Flex(causal)
        goals.append(Goal("normattn", "flex_attention"))
    passes = "f+b" if backward else "f"
    return Case(f"plain causal bf16 {passes}, N {length}", entries, tuple(goals), torch.bfloat16)


SUITE = Suite("plain", "plain causal attention in bf16 against SDPA", cases)
