"""From a configuration to images in three splits."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from normattn.errors import InputError
from normattn.files import expanded
from normattn.lab.data.images.config import ImageDataConfig
from normattn.lab.data.images.files import read_path
from normattn.lab.data.images.image_data import ImageData, ImageShape, ImageSplit
from normattn.lab.data.images.packages import PACKAGED
from normattn.lab.data.images.source import RawImages, RawPart
from normattn.lab.data.splits import SPLITS, SplitName, split_of


def prepare_images(config: ImageDataConfig) -> ImageData:
    """Read the source and split it: a part that is a split already stays one.

    What is not split is, image by image, by a hash of its name and the seed; a validation split
    that is missing beside a given test split is taken from the training part. Raises `InputError`
    for a source that is not there, not installed or damaged, and for a split that stays empty.
    """
    raw = _read(config.source)
    parts = {name: part for name, part in raw.parts.items() if name != "all"}
    rest = raw.parts.get("all")
    splits: dict[SplitName, ImageSplit] = {}
    source = parts["train"] if rest is None else rest
    given = tuple(name for name in SPLITS if name == "train" or name not in parts)
    chosen = _chosen(source, config, given)
    for name in SPLITS:
        part = _taken(source, chosen[name]) if name in chosen else parts[name]
        splits[name] = _split(name, part, config)
    return ImageData(
        splits["train"],
        splits["validation"],
        splits["test"],
        raw.class_names,
        _fingerprint(splits),
    )


def image_shape(config: ImageDataConfig) -> ImageShape:
    """Size and classes of a source's images; those of a package are known without reading."""
    if config.source in PACKAGED:
        return PACKAGED[config.source].shape
    return prepare_images(config).shape


@lru_cache(maxsize=2)
def _read_package(name: str) -> RawImages:
    return PACKAGED[name].read(name)


def _read(source: str) -> RawImages:
    return _read_package(source) if source in PACKAGED else read_path(expanded(source))


def _chosen(
    part: RawPart, config: ImageDataConfig, among: tuple[SplitName, ...]
) -> dict[SplitName, np.ndarray]:
    """Which images of `part` go to each of the splits `among`."""
    test = config.test_fraction if "test" in among else 0.0
    validation = config.validation_fraction if "validation" in among else 0.0
    drawn = np.array([split_of(name, config.seed, test, validation) for name in part.names])
    return {name: np.flatnonzero(drawn == name) for name in among}


def _taken(part: RawPart, chosen: np.ndarray) -> RawPart:
    names = tuple(part.names[index] for index in chosen)
    return RawPart(part.pixels[chosen], part.labels[chosen], names)


def _split(name: SplitName, part: RawPart, config: ImageDataConfig) -> ImageSplit:
    if not len(part.names):
        raise InputError(
            f"the {name} split of {config.source} has no image; raise its fraction or take a "
            "larger source"
        )
    most = slice(config.max_images)
    return ImageSplit(name, part.pixels[most], part.labels[most], part.names[most])


def _fingerprint(splits: dict[SplitName, ImageSplit]) -> str:
    digest = hashlib.sha256()
    for name, split in splits.items():
        digest.update(f"{name}|{split.pixels.shape}|{'|'.join(split.names)}|".encode())
        digest.update(np.ascontiguousarray(split.pixels).tobytes())
        digest.update(np.ascontiguousarray(split.labels).tobytes())
    return digest.hexdigest()
