"""What every source of images gives: parts with pixels, classes and names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int64, UInt8

from normattn.errors import InputError
from normattn.lab.data.splits import SplitName

PartName = Literal["all", "train", "validation", "test"]
"""A part that is a split already, or "all": what is still to be split."""


@dataclass(frozen=True)
class RawPart:
    """Some images, their classes 0 … classes − 1, and a name for each."""

    pixels: UInt8[np.ndarray, "n h w c"]
    labels: Int64[np.ndarray, "n"]
    names: tuple[str, ...]


@dataclass(frozen=True)
class RawImages:
    """The parts that a source came in, "all" or "train" among them, and its classes' names."""

    parts: Mapping[PartName | SplitName, RawPart]
    class_names: tuple[str, ...]


def part_of(pixels: np.ndarray, labels: np.ndarray, where: str, prefix: str = "") -> RawPart:
    """Check what a file of the user's own holds; images are named by their number.

    `pixels` (N, H, W), (N, H, W, C) or channels first with 1 or 3 of them, bytes, or numbers from
    0 to 1; `labels` whole numbers (N,) or (N, 1).
    """
    labels = np.asarray(labels)
    whole = labels.ndim > 0 and np.issubdtype(labels.dtype, np.integer)
    if not whole or labels.size != len(labels) or min(labels.flat, default=0) < 0:
        raise InputError(f"{where}: the labels must be one whole number of at least 0 per image")
    if pixels.ndim == 4 and pixels.shape[-1] not in (1, 3) and pixels.shape[1] in (1, 3):
        pixels = pixels.transpose(0, 2, 3, 1)
    pixels = pixels[..., None] if pixels.ndim == 3 else pixels
    if pixels.ndim != 4 or len(pixels) != len(labels):
        raise InputError(
            f"{where}: expected images (N, height, width) or (N, height, width, channels) and as "
            f"many labels, got {pixels.shape} and {len(labels)} labels"
        )
    if not pixels.size:
        raise InputError(f"{where} holds no image: its pixels are {pixels.shape}")
    names = tuple(f"{prefix}{number}" for number in range(len(labels)))
    return RawPart(_bytes(pixels, where), labels.reshape(-1).astype(np.int64), names)


def _bytes(pixels: np.ndarray, where: str) -> np.ndarray:
    if pixels.dtype == np.uint8:
        return pixels
    fits = np.issubdtype(pixels.dtype, np.floating) and pixels.size and np.isfinite(pixels).all()
    if not fits or pixels.min() < 0 or pixels.max() > 1:
        raise InputError(
            f"{where}: pixels must be bytes from 0 to 255, or numbers from 0 to 1, but they are "
            f"{pixels.dtype}"
        )
    whole: np.ndarray = np.rint(pixels * 255).astype(np.uint8)
    return whole
