"""Which sentence pairs, and how they become tokens."""

from __future__ import annotations

from pydantic import Field, model_validator

from normattn.lab.data.splits import check_fractions
from normattn.structured import Settings

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
SPECIALS = ("<pad>", "<bos>", "<eos>")
LEAST_VOCABULARY = 256 + len(SPECIALS)


class PairsConfig(Settings):
    """The sentence pairs of a translation model.

    - `corpus`: "catalogues" (default), a folder of train/val/test files by language, two aligned
      files as "FILE,FILE", or a .jsonl file.
    - `source`, `target`: the languages (default en and de).
    - `vocab_size`: entries of the byte-level BPE, the three special ones included: of the shared
      vocabulary, or of the source's where `target_vocab_size` gives the target its own.
    - `test_fraction`, `validation_fraction`: shares of the pairs where the corpus has no such split
      of its own (default 0.1 and 0.05); `seed` decides which.
    - `max_length`: training pairs with more tokens on a side (its end included) are left out.
    - `max_pairs`: train on the first so many pairs (default: all).
    """

    corpus: str = "catalogues"
    source: str = "en"
    target: str = "de"
    vocab_size: int = Field(default=4000, ge=LEAST_VOCABULARY, le=1 << 16)
    target_vocab_size: int | None = Field(default=None, ge=LEAST_VOCABULARY, le=1 << 16)
    test_fraction: float = Field(default=0.1, ge=0, lt=1)
    validation_fraction: float = Field(default=0.05, ge=0, lt=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    max_length: int = Field(default=100, ge=2)
    max_pairs: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _leaves_training_pairs(self) -> PairsConfig:
        check_fractions(self.test_fraction, self.validation_fraction, "training pairs")
        return self

    @property
    def shared_vocabulary(self) -> bool:
        """Whether both languages use one vocabulary."""
        return self.target_vocab_size is None
