"""Images with classes: sets that installed packages carry, files of the user's own, batches."""

from __future__ import annotations

from normattn.data.images.batches import ImageBatches
from normattn.data.images.config import ImageDataConfig
from normattn.data.images.image_data import ImageData, ImageShape, ImageSplit
from normattn.data.images.prepare import image_shape, prepare_images

__all__ = [
    "ImageBatches",
    "ImageData",
    "ImageDataConfig",
    "ImageShape",
    "ImageSplit",
    "image_shape",
    "prepare_images",
]
