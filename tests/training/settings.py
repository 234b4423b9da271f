"""A tiny causal-LM training on generated tokens: no text, no tokeniser, no download."""

from __future__ import annotations

from typing import Any

from normattn.lab.training import TrainingConfig

SMALL: dict[str, Any] = {
    "steps": 12,
    "batch_size": 8,
    "device": "cpu",
    "model": {"dim": 16, "layers": 2, "heads": 2, "train_length": 16, "score": "KNA-logn"},
    "data": {"corpus": "synthetic:copy?low=3&high=6", "vocab_size": 32},
    "optimiser": {"lr": 3e-3},
    "schedule": {"warmup_steps": 4},
}


def small(**changes: Any) -> TrainingConfig:
    return TrainingConfig.parse({**SMALL, **changes})
