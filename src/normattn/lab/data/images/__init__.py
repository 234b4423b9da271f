"""Images with classes: sets that installed packages carry, files of the user's own, batches."""

from __future__ import annotations

from normattn.lab.data.images.batches import ImageBatches
from normattn.lab.data.images.config import ImageDataConfig
from normattn.lab.data.images.image_data import ImageData, ImageShape, ImageSplit
from normattn.lab.data.images.prepare import image_shape, prepare_images

__all__ = [
    "ImageBatches",
    "ImageData",
    "ImageDataConfig",
    "ImageShape",
    "ImageSplit",
    "image_shape",
    "prepare_images",
]
