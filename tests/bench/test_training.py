"""The step of a preset that is measured is that of the preset."""

from __future__ import annotations

from typing import Any

import pytest

from normattn.bench.settings import Settings
from normattn.bench.suites.preset_step import SUITE
from normattn.bench.training import BATCHES, MODELS, PresetName, PresetStep, Products
from normattn.lab.sweep.presets import load
from normattn.lab.training.loop_config import LoopConfig


@pytest.mark.parametrize("name", MODELS)
def test_model_batch_and_loop_are_the_presets(name: PresetName) -> None:
    training: dict[str, Any] = load(name).training
    config = MODELS[name]
    preset = {"vocab_size": training["data"]["vocab_size"], **training["model"]}
    assert config == type(config).model_validate({**preset, "score": str(config.score)})
    assert BATCHES[name] == training["batch_size"]
    loop = LoopConfig()
    assert (training["clip"], training["optimiser"]["name"]) == (loop.clip, loop.optimiser.name)
    assert training["threads"] == Settings().threads


def test_products_have_the_operations_of_the_step() -> None:
    step = PresetStep("laptop", batch=2)
    assert Products(step).work().flops == step.work().flops
    assert step.work().flops == 2 * PresetStep("laptop", batch=1).work().flops
    out = Products(step).build()()
    rows, width = out.shape  # type: ignore[attr-defined]
    assert 2 * rows * width * width == pytest.approx(step.work().flops, rel=0.05)


def test_both_precisions_take_a_step() -> None:
    for case in SUITE.cases(Settings(quick=True)):
        losses = [case.entries["step"].build()() for _ in range(2)]
        assert all(values.finite for values in losses)  # type: ignore[attr-defined]
