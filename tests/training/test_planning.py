"""A training that cannot fit into memory is refused in a sentence, before anything is allocated."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from normattn.errors import InputError
from normattn.lab.training import TrainingConfig, train_model
from normattn.lab.training.planning import GPU_MEMORY, describe_plan, make_plan, memory_of
from normattn.models import CausalLM

from .group import CURVE, hold, together
from .settings import small

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
    cost = config.cost()
    assert make_plan(config, cost).memory == numbers * 4 * 4 + 4 * 8 * 16 * 2 * 4
    tiger = _config(optimiser={"name": "tiger"}, precision="bf16", accumulate=2)
    assert make_plan(tiger, cost).memory == numbers * 4 * 3 + 2 * 8 * 16 * 2 * 2
    assert make_plan(config, cost, 4).flops * 4 * config.steps == pytest.approx(cost.flops)
    assert make_plan(config, cost, 2).checkpoint == numbers * 4 * 3


def test_the_state_is_what_processes_hold() -> None:
    whole, curve = together(1, hold, "ddp")[0]
    for parallel, size in (("ddp", 2), ("fsdp", 4)):
        settings = small(**CURVE, parallel=parallel)
        plan = make_plan(settings, settings.cost(), size)
        each = together(size, hold, parallel)
        assert all(ours == pytest.approx(curve, rel=1e-6) for _, ours in each)
        held = [held for held, _ in each]
        # Rows are dealt out by the largest share: vectors of two numbers leave two of four without.
        assert whole <= sum(held) <= 1.05 * whole * (size if parallel == "ddp" else 1)
        assert plan.state == pytest.approx(sum(held) / size, rel=0.03)
        # The first process holds most where rows do not divide.
        assert plan.state == pytest.approx(max(held), rel=0.15)


def test_a_plan_says_where_the_memory_is_too_small() -> None:
    large = _config(model={"dim": 8192, "layers": 80})
    cost = large.cost()
    gpu = make_plan(large, cost, 8).memory
    assert gpu > GPU_MEMORY["h100"]
    assert "more than it has" in describe_plan(large, cost, "h100", 1, 8)
    small_cost = _config().cost()
    assert "more than it has" not in describe_plan(_config(), small_cost, "here")
    with pytest.raises(InputError, match="h100"):
        describe_plan(large, cost, "abacus")


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"dim": 1 << 14}, "data": {"vocab_size": 1 << 20}},
        {"model": {"dim": 1 << 10, "train_length": 64}, "batch_size": 10**7},
    ],
    ids=["many words", "many sequences"],
)
def test_a_training_beyond_the_machine_is_refused_before_its_data_is_looked_at(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=r"at least [\d,.]+ GB .* cpu has [\d,.]+ GB"):
        train_model(_config(**changes), tmp_path / "run")
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
