"""Images in three splits: pixels, classes, and a name for each image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64, UInt8

from normattn.lab.data.splits import SplitName, Splits


@dataclass(frozen=True)
class ImageSplit:
    """The images of one split: `pixels` 0 … 255, the class of each, and what it is called."""

    name: SplitName
    pixels: UInt8[np.ndarray, "n h w c"]
    labels: Int64[np.ndarray, "n"]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def images(
        self, chosen: slice | Int64[np.ndarray, "m"] = slice(None)
    ) -> Float32[np.ndarray, "m c h w"]:
        """The chosen images, channels first, pixels scaled to −1 … 1 as the source of ViT does."""
        return scaled(self.pixels[chosen])


def scaled(pixels: UInt8[np.ndarray, "m h w c"]) -> Float32[np.ndarray, "m c h w"]:
    """Pixels 0 … 255 as numbers in −1 … 1, channels first."""
    channels_first = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2), dtype=np.float32)
    return np.asarray(channels_first / np.float32(127.5) - np.float32(1.0))


@dataclass(frozen=True)
class ImageShape:
    """What a model must know of the images: their size, and how many classes there are."""

    height: int
    width: int
    channels: int
    classes: int


@dataclass(frozen=True)
class ImageData(Splits[ImageSplit]):
    """Three splits that share no image; `class_names` in the order of the labels' numbers.

    `fingerprint` is a hash of all pixels, labels and splits.
    """

    class_names: tuple[str, ...]
    fingerprint: str

    @property
    def shape(self) -> ImageShape:
        """The size of every image, and the number of classes."""
        height, width, channels = self.train.pixels.shape[1:]
        return ImageShape(height, width, channels, len(self.class_names))
