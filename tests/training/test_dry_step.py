"""A step without numbers holds what the real step holds: torch's profiler of memory says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normattn.errors import InputError
from normattn.kernels.place import as_on_gpu, on_cpu
from normattn.lab.training import TrainingConfig
from normattn.lab.training.dry_step import dry_step
from normattn.lab.training.measured_step import measured_peak

from .settings import small

MODEL: dict[str, Any] = {
    "dim": 64,
    "layers": 3,
    "heads": 4,
    "train_length": 64,
    "score": "KNA-logn",
}
GAU: dict[str, Any] = {
    "dim": 64,
    "layers": 3,
    "block": "gau",
    "key_size": 32,
    "placement": "DeepNorm",
    "norm": "rms",
    "train_length": 64,
    "score": "KNA",
}


def _config(changes: dict[str, Any] | None = None, **model: Any) -> TrainingConfig:
    base = GAU if model.get("block") == "gau" else MODEL
    return small(**{"model": {**base, **model}, **(changes or {})})


SETTINGS: dict[str, TrainingConfig] = {
    "as it is": _config(),
    "more rows": _config({"batch_size": 32}),
    "longer": _config(train_length=320),
    "deeper, more heads": _config(layers=6, heads=8),
    "in half precision": _config({"precision": "bf16"}),
    "in four parts": _config({"batch_size": 32, "accumulate": 4}),
    "gated units": _config(block="gau"),
    "two regimes": _config({"batch_size": 2}, train_length=320, score="Baseline-ReRoPE(window=64)"),
    "a bias": _config(score="Baseline-NoPE-ALiBi"),
    "carried scores": _config(score="Baseline-RealFormer"),
    "many words": _config({"data": {"corpus": "synthetic:copy?low=3&high=6", "vocab_size": 4096}}),
    "another optimiser": _config({"optimiser": {"name": "tiger"}}),
    "wide": _config({"batch_size": 2}, dim=256, heads=4, train_length=32),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_peak_is_that_of_the_real_step(name: str) -> None:
    config = SETTINGS[name]
    assert dry_step(config).peak == pytest.approx(measured_peak(config), rel=0.1)


def test_the_real_step_is_the_same_after_one_without_numbers() -> None:
    """No table without numbers is left to it."""
    config = _config()
    before = measured_peak(config)
    dry_step(config)
    assert measured_peak(config) == pytest.approx(before, rel=0.01)


def _within(config: TrainingConfig) -> int:
    found = dry_step(config)
    return found.peak - found.lasting


def test_what_a_step_adds_grows_with_rows_layers_and_length() -> None:
    """Activations by themselves: rows and length double them, so do the layers but for the ends."""
    one = _within(_config({"batch_size": 8}))
    assert _within(_config({"batch_size": 16})) == pytest.approx(2 * one, rel=0.1)
    assert _within(_config({"batch_size": 16, "accumulate": 2})) == pytest.approx(one, rel=0.15)
    assert _within(_config(train_length=128)) == pytest.approx(2 * one, rel=0.1)
    assert 1.8 * one < _within(_config(layers=6)) < 2 * one
    assert _within(_config({"precision": "bf16"})) < 0.75 * one


def test_work_is_the_model_s_products() -> None:
    """The products with weights are as counted by hand; attention's are more, in whole tiles."""
    config = _config()
    from normattn.models.flops import flops_per_token

    flops = sum(work.flops * times for work, times in dry_step(config).work.items())
    tokens = config.batch_size * config.sequence_length
    by_hand = flops_per_token(config.model, config.sequence_length)
    assert flops / tokens > 3 * by_hand.weights
    assert flops / tokens < 3 * by_hand.weights + 4 * 3 * by_hand.attention


def test_a_model_of_billions_takes_no_memory_and_chooses_as_on_a_gpu() -> None:
    model = {"dim": 4096, "layers": 4, "heads": 32, "train_length": 4096, "score": "KNA"}
    found = dry_step(small(model=model, batch_size=1, precision="bf16"), gpu=True)
    assert found.lasting == pytest.approx(4 * 4 * (12 * 4096**2) * 3, rel=0.35)
    assert found.peak > 1.2e10
    # Hand-written tiles would take many operations for each layer.
    assert found.operations < 2000


def test_what_is_best_on_a_gpu_is_asked_for_inside_only() -> None:
    x = torch.zeros(1)
    with as_on_gpu():
        assert not on_cpu(x)
    with as_on_gpu(False):
        assert on_cpu(x)
    assert on_cpu(x)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match="batch_size 8 does not divide into 3"):
        dry_step(small(), processes=3)
