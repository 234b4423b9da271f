"""One vocabulary for a model and its data: said once, or twice alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normattn.lab.data import DataConfig


def fill_vocabulary(values: Any) -> Any:
    """Settings whose `model.vocab_size` is that of `data` where it is left out."""
    if not isinstance(values, Mapping) or not isinstance(values.get("model"), Mapping):
        return values
    model = dict(values["model"])
    data = values.get("data", {})
    if isinstance(data, Mapping):
        size = data.get("vocab_size", DataConfig.model_fields["vocab_size"].default)
    else:
        size = getattr(data, "vocab_size", None)
    model.setdefault("vocab_size", size)
    return {**values, "model": model}


def check_vocabulary(of_model: int, data: DataConfig) -> None:
    """Raise `ValueError`, for a validator, where the two differ."""
    if of_model != data.vocab_size:
        raise ValueError(
            f"model.vocab_size is {of_model} but data.vocab_size is {data.vocab_size}; "
            "leave the first one out"
        )


def check_batch(batch_size: int, accumulate: int) -> None:
    """Raise `ValueError`, for a validator, where a batch has no whole micro-batches."""
    if batch_size % accumulate:
        raise ValueError(
            f"batch_size {batch_size} does not divide into {accumulate} "
            "micro-batches; accumulate must divide it"
        )
