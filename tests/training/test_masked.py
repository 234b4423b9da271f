"""Training a masked language model: it learns, it resumes bit for bit, it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from normattn.errors import InputError, Interrupted
from normattn.lab.data import TrainingBatches, prepare_tokens
from normattn.lab.data.batches import Masking
from normattn.lab.runs import read_metrics
from normattn.lab.training import StepReport
from normattn.lab.training.task import derive_seed
from normattn.lab.training.tasks.text import MaskedConfig, MaskedWorkload, train_masked
from normattn.models.masked_lm import MaskedLM
from normattn.models.pretrained import load_as

from .settings import SMALL


def small(**changes: Any) -> MaskedConfig:
    model = {**SMALL["model"], "score": "Baseline", "placement": "PostLN", "exits": True}
    model |= changes.pop("model", {})
    return MaskedConfig.parse({**SMALL, "model": model, **changes})


def test_a_run_learns_and_leaves_its_model(tmp_path: Path) -> None:
    reports: list[StepReport] = []
    config = small(steps=80, batch_size=16, optimiser={"lr": 1e-2})
    result = train_masked(config, tmp_path / "run", on_step=reports.append, show_progress=False)
    assert reports[0].loss == pytest.approx(first_loss(config), rel=1e-5)
    assert result.loss < reports[0].loss - 0.2
    assert result.tokens == 80 * 16 * 16
    assert set(result.metrics) == {"accuracy", "accuracy_exit_1"}
    model = load_as(MaskedLM, tmp_path / "run" / "model")
    assert model.config == config.model
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 80


def first_loss(config: MaskedConfig) -> float:
    """The loss before any step, from whole logits and torch's own cross-entropy."""
    torch.manual_seed(derive_seed(config.seed, "initialisation"))
    model = MaskedLM(config.model)
    data = prepare_tokens(config.data)
    seed = derive_seed(config.seed, "batches")
    tokens = TrainingBatches(data.train, 15, 16, seed, config.data.tiling).batch(1)
    rows = Masking(config.model.vocab_size).rows(tokens, seed, 1)
    logits = model(torch.from_numpy(rows.ids))
    asked = torch.take_along_dim(logits, torch.from_numpy(rows.places)[..., None], 1)
    found = torch.nn.functional.cross_entropy(
        asked.flatten(0, 1), torch.from_numpy(rows.targets).flatten()
    )
    return float(found.detach())


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"dropout": 0.1}, "accumulate": 2},
        {"model": {"shared_layers": True, "placement": "ReZeroNoNorm", "exits": False}},
    ],
)
def test_interrupted_and_resumed_is_the_same_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    def stop_after(steps: int) -> Any:
        left = iter(range(steps - 1))
        return lambda: next(left, None) is None

    config = small(**changes)
    train_masked(config, tmp_path / "whole", show_progress=False)
    for _ in range(2):
        with pytest.raises(Interrupted):
            train_masked(config, tmp_path / "cut", should_stop=stop_after(5), show_progress=False)
    train_masked(config, tmp_path / "cut", show_progress=False)
    for name in ("metrics.jsonl", "model/model.safetensors", "model/config.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_exits_change_nothing_but_the_norm_that_gradients_are_clipped_by(tmp_path: Path) -> None:
    losses = []
    for exits in (True, False):
        config = small(model={"exits": exits}, clip=None)
        train_masked(config, tmp_path / f"{exits}", show_progress=False)
        losses.append([line["loss"] for line in read_metrics(tmp_path / f"{exits}/metrics.jsonl")])
    assert losses[0] == losses[1]


def test_the_cost_is_that_of_its_matrices() -> None:
    # 2 layers of 16 × (3 · 16 + 16) and SwiGLU's 3 · 16 · hidden; 2 of 16 tokens see the head.
    config = small(model={"exits": False, "hidden": 40}, steps=4, batch_size=4)
    matrices = 2 * (16 * 64 + 3 * 16 * 40)
    pairs = 2 * 2 * 16 * 16
    per_row = 16 * (2 * matrices + 2 * pairs) + 2 * 2 * 32 * 16
    cost = MaskedWorkload().cost(config)
    assert (cost.trained, cost.flops) == (4 * 4 * 16, 4 * 4 * 3 * per_row)


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="more than 1 together"):
        small(masking={"masked": 0.9, "random": 0.2})
    with pytest.raises(InputError, match="leave it out"):
        small(model={"vocab_size": 31})
    with pytest.raises(InputError, match="does not divide into 3"):
        small(accumulate=3)
