"""The classifier's settings, as one checked value."""

from __future__ import annotations

from typing import ClassVar

from normattn.models.stack_config import Size, StackConfig


class ClassifierConfig(StackConfig):
    """A `StackConfig` for a bidirectional encoder with `labels` outputs over `vocab_size` tokens.

    Every token sees every other; scores that read across the sequence are allowed.
    """

    causal: ClassVar[bool] = False

    vocab_size: Size
    labels: Size
