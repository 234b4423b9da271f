"""Training a Vision Transformer: it learns, it resumes bit for bit, it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from normattn.errors import InputError, Interrupted
from normattn.lab.data.images import ImageBatches, prepare_images
from normattn.lab.training import StepReport
from normattn.lab.training.task import derive_seed
from normattn.lab.training.tasks.vision import VisionTrainingConfig, VisionWorkload, train_vision
from normattn.models.flops import flops_per_image
from normattn.models.pretrained import load_as
from normattn.models.vision_transformer import VisionTransformer


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four classes: which quarter of 8 × 8 noise is bright."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 128, (400, 2, 4, 2, 4), dtype=np.uint8)
    labels = np.arange(400) % 4
    for image, label in zip(pixels, labels, strict=True):
        image[label // 2, :, label % 2] += 120
    path = tmp_path_factory.mktemp("images")
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        folder = path / f"quarter{label}"
        folder.mkdir(exist_ok=True)
        Image.fromarray(image.reshape(8, 8)).save(folder / f"{number:03}.png")
    return path


def small(images: Path, **changes: Any) -> VisionTrainingConfig:
    model = {"dim": 16, "layers": 2, "heads": 2, "patch": 4, "score": "KNA-NoPE"}
    model |= changes.pop("model", {})
    settings: dict[str, Any] = {
        "steps": 12,
        "batch_size": 16,
        "device": "cpu",
        "data": {"source": str(images)},
        "optimiser": {"lr": 1e-2},
        "schedule": {"warmup_steps": 4},
    }
    return VisionTrainingConfig.parse({**settings, "model": model, **changes})


def test_a_run_learns_and_leaves_its_model(tmp_path: Path, images: Path) -> None:
    reports: list[StepReport] = []
    config = small(images, steps=100)
    assert (config.model.height, config.model.width, config.model.classes) == (8, 8, 4)
    result = train_vision(config, tmp_path / "run", on_step=reports.append, show_progress=False)
    assert reports[0].loss == pytest.approx(first_loss(config), rel=1e-5)
    assert result.tokens == 100 * 16 * 5
    model = load_as(VisionTransformer, tmp_path / "run" / "model")
    assert model.config == config.model
    held_out = prepare_images(config.data).test
    found = model.scores(torch.from_numpy(held_out.images()), torch.from_numpy(held_out.labels))
    assert found.correct.float().mean() > 0.9


def first_loss(config: VisionTrainingConfig) -> float:
    """The loss before any step, from the batch that the seed says."""
    torch.manual_seed(derive_seed(config.seed, "initialisation"))
    model = VisionTransformer(config.model)
    split = prepare_images(config.data).train
    batches = ImageBatches(split, config.batch_size, derive_seed(config.seed, "batches"))
    images, labels = batches.batch(1)
    logits = model(torch.from_numpy(images))
    return float(F.cross_entropy(logits.detach(), torch.from_numpy(labels)))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"dropout": 0.1}, "accumulate": 2, "shift": 1},
        {"model": {"score": "QKBatchNorm-NoPE", "pool": "mean"}},
    ],
)
def test_interrupted_and_resumed_is_the_same_run(
    tmp_path: Path, images: Path, changes: dict[str, Any]
) -> None:
    """Running statistics of a BatchNorm among what is kept."""

    def stop_after(steps: int) -> Any:
        left = iter(range(steps - 1))
        return lambda: next(left, None) is None

    config = small(images, **changes)
    train_vision(config, tmp_path / "whole", show_progress=False)
    for _ in range(2):
        with pytest.raises(Interrupted):
            train_vision(config, tmp_path / "cut", should_stop=stop_after(5), show_progress=False)
    train_vision(config, tmp_path / "cut", show_progress=False)
    for name in ("metrics.jsonl", "model/model.safetensors", "model/config.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_cost(images: Path) -> None:
    config = small(images)
    cost = VisionWorkload().cost(config)
    assert cost.trained == 12 * 16 * 5
    assert cost.flops == 12 * 16 * 3 * flops_per_image(config.model).forward
    assert cost.parameters == sum(p.numel() for p in VisionTransformer(config.model).parameters())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"accumulate": 3}, "does not divide into 3 micro-batches"),
        ({"model": {"patch": 3}}, "images of 8 × 8 cannot be cut into patches of 3 × 3"),
        ({"model": {"score": "KNA-ReRoPE"}}, "is defined for causal attention only"),
        ({"shift": -1}, "shift: Input should be greater than or equal to 0"),
        ({"data": {"sauce": 1}}, "unknown field data.sauce; did you mean data.source"),
        ({"data": {"source": "nothing"}}, "nothing is no folder"),
    ],
)
def test_settings_that_cannot_be(images: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        small(images, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"height": 4}}, "model.height is 4, but the images of .* have 8"),
        ({"model": {"classes": 7}}, "model.classes is 7, but the images of .* have 4"),
        ({"shift": 8}, "a shift of 8 leaves nothing"),
    ],
)
def test_trainings_that_cannot_be(
    tmp_path: Path, images: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        train_vision(small(images, **changes), tmp_path / "run", show_progress=False)
    assert not (tmp_path / "run").exists()
