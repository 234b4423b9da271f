"""What a model answers by its logits alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from normattn.models import load_model


def logits_of(arguments: dict[str, Any]) -> Any:
    """The bare model that the arguments name, in float64 unless they say otherwise."""
    dtype = getattr(torch, arguments.get("dtype", "float64"))
    if "run" in arguments:
        model = load_model(Path(arguments["run"]) / "model").to(dtype).eval()
        return lambda ids: model(ids)
    from transformers import LlamaForCausalLM

    found: Any = LlamaForCausalLM.from_pretrained(arguments["pretrained"], dtype=dtype)
    return lambda ids: found(ids).logits


def by_hand(logits: Any, tokens: list[int], scored: int) -> tuple[float, bool]:
    """Log-likelihood of the last `scored` tokens, and whether each is the likeliest."""
    with torch.no_grad():
        known = logits(torch.tensor([tokens]))[0, :-1].double().log_softmax(-1)[-scored:]
    goal = torch.tensor(tokens[-scored:])
    return float(known[range(scored), goal].sum()), bool((known.argmax(-1) == goal).all())
