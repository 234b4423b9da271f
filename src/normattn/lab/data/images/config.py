"""The settings that decide which images a model sees."""

from __future__ import annotations

from pydantic import Field, model_validator

from normattn.lab.data.splits import check_fractions
from normattn.structured import Settings


class ImageDataConfig(Settings):
    """Which images, and how they are split.

    - `source`: "mnist5k" (default: 5,000 digits of 28 × 28), "digits" (1,797 of 8 × 8), or a path:
      an .npz file, a folder of IDX files, or a folder with one folder of images per class.
    - `test_fraction`, `validation_fraction`: shares of the images (default 0.2 and 0.1); a source
      that comes with a test or validation set of its own keeps it, and takes no fraction for it.
    - `seed`: decides the split (default 0).
    - `max_images`: of each split take only the first so many (default: all).
    """

    source: str = "mnist5k"
    test_fraction: float = Field(default=0.2, ge=0, lt=1)
    validation_fraction: float = Field(default=0.1, ge=0, lt=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    max_images: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> ImageDataConfig:
        check_fractions(self.test_fraction, self.validation_fraction, "image to train on")
        return self
