"""A training that cannot fit into memory is refused in a sentence, before anything is allocated."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from normattn.errors import InputError
from normattn.lab.training import TrainingConfig, train_causal
from normattn.lab.training.causal import CausalWorkload
from normattn.lab.training.cost import least_bytes, memory_of
from normattn.models import CausalLM

CPU = torch.device("cpu")


def _config(**changes: Any) -> TrainingConfig:
    fields = {
        "steps": 5,
        "batch_size": 4,
        "device": "cpu",
        "model": {"dim": 16, "layers": 2, "train_length": 8, **changes.pop("model", {})},
        "data": {"corpus": "nowhere.txt", "vocab_size": 300, **changes.pop("data", {})},
        "schedule": {"warmup_steps": 1},
    }
    return TrainingConfig.parse({**fields, **changes})


def test_the_estimate_is_what_weights_gradients_moments_and_inputs_of_blocks_take() -> None:
    config = _config()
    numbers = sum(each.numel() for each in CausalLM(config.model).parameters())
    cost = CausalWorkload().cost(config)
    assert least_bytes(cost, config) == numbers * 4 * 4 + 4 * 8 * 16 * 2 * 4
    tiger = _config(optimiser={"name": "tiger"}, precision="bf16", accumulate=2)
    assert least_bytes(cost, tiger) == numbers * 4 * 3 + 2 * 8 * 16 * 2 * 2


SIZES: dict[str, Callable[[], TrainingConfig]] = {
    "a wide model": lambda: _config(model={"dim": 1 << 24}),
    "many words": lambda: _config(model={"dim": 1 << 14}, data={"vocab_size": 1 << 20}),
    "many sequences": lambda: _config(model={"dim": 1 << 10, "train_length": 64}, batch_size=10**7),
}


@pytest.mark.parametrize("size", SIZES)
def test_a_training_beyond_the_machine_is_refused_before_its_data_is_looked_at(
    size: str, tmp_path: Path
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=r"at least [\d,.]+ GB .* cpu has [\d,.]+ GB"):
        train_causal(SIZES[size](), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # kB


def test_a_limit_of_the_process_counts_as_the_machine_s() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert memory_of(CPU) <= psutil.virtual_memory().total
    limit = memory_of(CPU) - (1 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        assert memory_of(CPU) == limit
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
