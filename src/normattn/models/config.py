"""The causal language model's settings, as one checked value."""

from __future__ import annotations

from normattn.models.stack_config import Size, StackConfig


class CausalLMConfig(StackConfig):
    """Everything that decides a `CausalLM`'s shape.

    `vocab_size` tokens; the head is the embedding unless `tie_head` is off; the rest is as in
    `StackConfig`. Raises `InputError` with one sentence per value out of range.
    """

    vocab_size: Size
    tie_head: bool = True
