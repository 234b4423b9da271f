"""Our attention under names of its own in transformers' two interfaces: nothing is replaced."""

from __future__ import annotations

from normattn.hf.attending import attention_function
from normattn.hf.masks import mask_function


def registered(before: str, pairs: bool = False) -> str:
    """The name of our attention for a model whose own is `before`.

    `pairs`: its layers get a mask of every pair, since they choose keys of their own.

    The name says what was there before, since the layers that are left alone still want the masks
    of that; it holds no "flash", which transformers would read as flash attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    name = ("normattn_pairs_" if pairs else "normattn_") + before.replace("flash", "fl").replace(
        "/", "_"
    ).replace("|", "_")
    over = ALL_MASK_ATTENTION_FUNCTIONS.get(before, sdpa_mask)
    AttentionInterface.register(name, attention_function)
    AttentionMaskInterface.register(name, mask_function(over, pairs))
    return name
