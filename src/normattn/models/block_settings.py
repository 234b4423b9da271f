"""Which settings of a stack belong to one kind of block, and so go when another kind is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OWN_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "mha": ("heads", "kv_heads", "head_dim", "feed_forward", "hidden", "qkv_bias"),
    "gau": ("key_size", "expansion", "gamma_std", "separate_qk"),
}
"""The settings that only this block has; a gated attention unit has one head, which says itself."""


def without_foreign(base: Mapping[str, Any], block: str | None) -> dict[str, Any]:
    """The model's settings `base` without those of the block that it names, if `block` is another.

    A preset's heads say nothing of the gated attention unit that is asked for instead of its own
    blocks: what the asked block then needs comes from its defaults. None leaves `base` as it is.
    """
    own = str(base.get("block", "mha"))
    foreign = OWN_SETTINGS.get(own, ()) if block not in (None, own) else ()
    return {name: value for name, value in base.items() if name not in foreign}
