"""The masked language model's settings, as one checked value."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from normattn.models.stack_config import Size, StackConfig


class MaskedLMConfig(StackConfig):
    """Everything that decides a `MaskedLM`'s shape; frozen, unknown fields refused.

    As `StackConfig`, and `vocab_size`: the tokens that can be predicted, without the mask, whose
    id is `vocab_size` itself. `tie_head`: the head is the embedding (without the mask's row).
    `exits`: every layer below the last has an exit of its own (see `MaskedLM`). Attention is not
    causal, so that scores which read across the sequence are allowed.
    """

    causal: ClassVar[bool] = False

    vocab_size: Size
    tie_head: bool = True
    exits: bool = False

    @model_validator(mode="after")
    def _check_exits(self) -> MaskedLMConfig:
        if self.exits and self.layers < 2:
            raise ValueError("exits stand below the last layer, and there is only one layer")
        return self

    @property
    def mask_id(self) -> int:
        """The id of the mask."""
        return self.vocab_size
