"""The settings that decide what the data is."""

from __future__ import annotations

from pydantic import Field, model_validator

from normattn.lab.data.packing import Tiling
from normattn.lab.data.splits import check_fractions
from normattn.lab.data.synthetic import CopyTask
from normattn.structured import Settings


class DataConfig(Settings):
    """Which text, how it becomes tokens, how it is split, and how much of it is tiled.

    - `corpus`: "python-source" (default), "python-packages", a path, "hf:NAME" or
      "synthetic:copy".
    - `vocab_size`: entries of the byte-level BPE, separator included; at least 257 for text.
    - `test_fraction`, `validation_fraction`: shares of the documents (default 0.1 and 0.05).
    - `seed`: decides the split, and the tokens of a synthetic corpus (default 0).
    - `tiled_fraction`: share of the training sequences that are a random segment of
      `tiled_low` … `tiled_high` tokens repeated to the full length (default 0, 8, 32).
    - `max_bytes`: read at most this much text (default: all).
    """

    corpus: str = "python-source"
    vocab_size: int = Field(default=1024, ge=2, le=1 << 20)
    test_fraction: float = Field(default=0.1, ge=0, lt=1)
    validation_fraction: float = Field(default=0.05, ge=0, lt=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    tiled_fraction: float = Field(default=0.0, ge=0, le=1)
    tiled_low: int = Field(default=8, ge=1)
    tiled_high: int = Field(default=32, ge=1)
    max_bytes: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        check_fractions(self.test_fraction, self.validation_fraction, "training text")
        if self.tiled_low > self.tiled_high:
            raise ValueError(
                f"tiled_low ({self.tiled_low}) must not exceed tiled_high ({self.tiled_high})"
            )
        if not self.synthetic and self.vocab_size < 257:
            raise ValueError(
                f"vocab_size must be at least 257 (256 bytes and a separator), got "
                f"{self.vocab_size}"
            )
        return self

    @property
    def synthetic(self) -> bool:
        """Whether the corpus is generated tokens instead of text."""
        return CopyTask.claims(self.corpus)

    @property
    def tiling(self) -> Tiling | None:
        """What `TrainingBatches` takes; a synthetic corpus is tiled throughout, by its periods."""
        if self.synthetic:
            task = CopyTask.parse(self.corpus)
            return Tiling(1.0, task.low, task.high)
        if self.tiled_fraction == 0:
            return None
        return Tiling(self.tiled_fraction, self.tiled_low, self.tiled_high)
