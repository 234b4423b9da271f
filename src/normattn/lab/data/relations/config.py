"""The settings that decide what the relation data is."""

from __future__ import annotations

from pydantic import Field, model_validator

from normattn.lab.data.splits import check_fractions
from normattn.structured import Settings

PYTHON_IMPORTS = "python-imports"


class RelationConfig(Settings):
    """Which documents, how they become word pieces, and how they are split.

    - `corpus`: "python-imports" (default: the standard library's own code, see
      `data.relations.python_imports`), or a folder of train, dev and test files in the NYT24 form.
    - `vocabulary`: a WordPiece vocab.txt; None (default) learns one from the training split.
    - `vocab_size`: rows of the embedding (default 30,522, BERT's); a vocabulary may have fewer
      entries, not more.
    - `lower_case`: whether case and accents are dropped (default true).
    - `max_tokens`: a document is cut behind this many pieces (default 128).
    - python-imports alone: `modules`, the number of labels (default 24); `test_fraction` and
      `validation_fraction` of the files (default 0.15 each); `seed` of that split; `max_bytes`,
      the most text that is read (default: all).
    """

    corpus: str = PYTHON_IMPORTS
    vocabulary: str | None = None
    vocab_size: int = Field(default=30522, ge=3, le=1 << 20)
    lower_case: bool = True
    max_tokens: int = Field(default=128, ge=1, le=1 << 16)
    modules: int = Field(default=24, ge=1)
    test_fraction: float = Field(default=0.15, gt=0, lt=1)
    validation_fraction: float = Field(default=0.15, gt=0, lt=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    max_bytes: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> RelationConfig:
        check_fractions(self.test_fraction, self.validation_fraction, "training files")
        if not self.embedded:
            own = ("modules", "test_fraction", "validation_fraction", "seed", "max_bytes")
            fields = type(self).model_fields
            used = [name for name in own if getattr(self, name) != fields[name].default]
            if used:
                raise ValueError(
                    f"{used[0]} is a setting of {PYTHON_IMPORTS}; the folder {self.corpus} has its "
                    "own splits and labels"
                )
        return self

    @property
    def embedded(self) -> bool:
        """Whether the documents are the standard library's own code."""
        return self.corpus == PYTHON_IMPORTS
