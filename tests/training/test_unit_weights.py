"""nGPT's unit weights: the authors' lines, a training, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from normattn import CausalLM, CausalLMConfig, InputError
from normattn.lab.training import train_model
from normattn.lab.training.distributed import World
from normattn.lab.training.step import TrainStep
from normattn.lab.training.unit_weights import UnitWeights

from .settings import SMALL, small

NGPT: dict[str, Any] = {**SMALL["model"], "score": "NGPT-RotateFirst", "placement": "nGPT"}


@pytest.mark.parametrize("block", ["transformer", "gau"])
@pytest.mark.parametrize("tied", [True, False])
def test_each_matrix_is_normalised_along_the_width(block: str, tied: bool) -> None:
    """Rows of what reads the stream and columns of what writes to it, as the authors' function."""
    torch.manual_seed(0)
    more: dict[str, Any] = {"block": "gau", "key_size": 8} if block == "gau" else {"heads": 2}
    sizes: dict[str, Any] = {"vocab_size": 11, "dim": 16, "layers": 2, "train_length": 8, **more}
    model = CausalLM(CausalLMConfig(**sizes, placement="nGPT", tie_head=tied)).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    UnitWeights(model).normalise()
    matrices = set()
    for name, weight in model.named_parameters():
        if not name.endswith(".weight") or weight.ndim < 2:
            assert torch.equal(weight, before[name]), name
            continue
        matrices.add(name.split(".")[-2])
        axis = 0 if name.split(".")[-2] in ("out", "down") else 1
        vectors = before[name] if axis else before[name].t()
        by_hand = torch.stack([vector / sum(vector * vector) ** 0.5 for vector in vectors])
        torch.testing.assert_close(weight, by_hand if axis else by_hand.t())
    named = {"embedding", "expand", "out"} if block == "gau" else {"embedding", "qkv", "out"}
    named |= set() if block == "gau" else {"up", "down"}
    assert matrices == (named if tied else {*named, "head"})


def test_weights_have_length_1_before_the_first_step() -> None:
    settings, cpu = small(model=NGPT, unit_weights=True), torch.device("cpu")
    task = settings.task(settings.prepare(), cpu, 1)
    TrainStep(task, settings, World(0, 1, cpu), lambda: False)
    weight = task.model.get_parameter("embedding.weight")
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(len(weight)))


def test_a_training_keeps_weights_at_length_1(tmp_path: Path) -> None:
    """Its exact resume is tested in test_tasks.py."""
    train_model(small(model=NGPT, steps=5, unit_weights=True), tmp_path, show_progress=False)
    for name, weight in load_file(tmp_path / "model" / "model.safetensors").items():
        if weight.ndim == 2 and ".score." not in name:
            axis = 0 if ".out." in name or ".down." in name else 1
            torch.testing.assert_close(weight.norm(dim=axis), torch.ones(weight.shape[1 - axis]))


def test_what_has_no_meaning_is_refused_and_what_is_off_is_not_written() -> None:
    assert "unit_weights" not in small(model=NGPT).model_dump()
    with pytest.raises(InputError, match="placement nGPT"):
        small(unit_weights=True)
    for other in ({"parallel": "fsdp"}, {"qk_clip": 5.0}):
        model = {**NGPT, "score": "Baseline"}
        with pytest.raises(InputError, match="unit_weights"):
            small(unit_weights=True, model=model, **other)
