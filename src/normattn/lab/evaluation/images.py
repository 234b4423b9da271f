"""Images named by a trained model: loss and correctness of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from normattn.lab.data.images import ImageSplit
from normattn.models.vision_transformer import VisionTransformer


@dataclass(frozen=True)
class ImageResults:
    """Loss in nats and correctness (0 or 1) of every image of a split, in its order."""

    loss: tuple[float, ...]
    correct: tuple[int, ...]


def score_images(
    model: VisionTransformer,
    split: ImageSplit,
    rows: int = 256,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ImageResults:
    """Loss and correctness of every image, `rows` at a time; the model's mode does not matter.

    `progress` is told how many images are done, of how many.
    """
    device = next(model.parameters()).device
    loss: list[float] = []
    correct: list[int] = []
    for first in range(0, len(split), rows):
        part = slice(first, first + rows)
        images = torch.from_numpy(split.images(part)).to(device)
        scores = model.scores(images, torch.from_numpy(split.labels[part]).to(device))
        loss += scores.loss.tolist()
        correct += scores.correct.int().tolist()
        progress(len(loss), len(split))
    return ImageResults(tuple(loss), tuple(correct))
