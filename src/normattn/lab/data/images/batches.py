"""Training batches of images: a pure function of seed and step; each image once an epoch."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64, UInt8

from normattn.errors import InputError
from normattn.lab.data.counter_random import below, uniforms
from normattn.lab.data.images.image_data import ImageSplit, scaled

# Two streams of random numbers from one seed.
_SHIFTS = 1 << 62


class ImageBatches:
    """Batches of `batch_size` images in an order that is new every epoch.

    With `shift` each image is moved by −shift … shift pixels down and to the right (drawn anew each
    time it is seen); what comes in from outside repeats the border's pixels. Raises `InputError`
    for an empty split and for a shift as large as the image.
    """

    def __init__(self, split: ImageSplit, batch_size: int, seed: int, shift: int = 0) -> None:
        if not len(split):
            raise InputError(f"the {split.name} split has no image; take a larger source")
        if shift >= min(split.pixels.shape[1:3]):
            height, width = split.pixels.shape[1:3]
            raise InputError(f"a shift of {shift} leaves nothing of images of {height} × {width}")
        self.split = split
        self.batch_size = batch_size
        self.seed = seed
        self.shift = shift
        self._epoch: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def batch(self, step: int, share: int = 0, shares: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Part `share` of `shares` of the batch of `step` (from 1): images and labels.

        Images are float32 (rows, C, H, W) in −1 … 1. The shares' rows, in order, are the rows of
        the one batch. Raises `InputError` when the batch does not divide into so many shares.
        """
        if self.batch_size % shares or not 0 <= share < shares:
            raise InputError(
                f"a batch of {self.batch_size} images does not divide into {shares} shares "
                f"(share {share}); take a multiple of {shares}"
            )
        rows = self.batch_size // shares
        chosen = self._chosen((step - 1) * self.batch_size + share * rows, rows)
        pixels = self.split.pixels[chosen]
        if self.shift:
            drawn = uniforms(self.seed ^ _SHIFTS, step, self.batch_size, 2)
            mine = drawn[share * rows : (share + 1) * rows]
            by = below(mine.reshape(-1), 2 * self.shift + 1).reshape(-1, 2) - self.shift
            pixels = shifted(pixels, by)
        return scaled(pixels), self.split.labels[chosen]

    def _chosen(self, first: int, count: int) -> Int64[np.ndarray, "count"]:
        """Which images come `first` and after, counted over all epochs."""
        parts, total = [], len(self.split)
        while count:
            epoch, position = divmod(first, total)
            part = self._order(epoch)[position : position + count]
            parts.append(part)
            first, count = first + len(part), count - len(part)
        return np.concatenate(parts)

    def _order(self, epoch: int) -> Int64[np.ndarray, "n"]:
        if self._epoch[0] != epoch:
            drawn = uniforms(self.seed, epoch, 1, len(self.split))[0]
            self._epoch = (epoch, np.argsort(drawn, kind="stable").astype(np.int64))
        return self._epoch[1]


def shifted(
    pixels: UInt8[np.ndarray, "n h w c"], by: Int64[np.ndarray, "n 2"]
) -> UInt8[np.ndarray, "n h w c"]:
    """Each image moved down and to the right by its own `by`; borders are repeated."""
    count, height, width, _ = pixels.shape
    down = np.clip(np.arange(height) - by[:, :1], 0, height - 1)
    right = np.clip(np.arange(width) - by[:, 1:], 0, width - 1)
    number = np.arange(count)[:, None, None]
    return np.asarray(pixels[number, down[:, :, None], right[:, None, :]])
