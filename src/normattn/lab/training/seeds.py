"""Randomness without state: every draw at step t is a function of the seed and t."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from `parts`, e.g. (seed, step, micro, rank); other parts, other seed."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
