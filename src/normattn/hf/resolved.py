"""What an extension came to: every value that was given, found or left as it was."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Resolved:
    """The values of an extension.

    Attributes:
        method: the method with all its parameters, e.g. `ReRoPE(window=2048)-logn+`.
        train_length: how far the model was trained to read.
        train_length_from: `given`, or the field of the configuration that said so.
        parameters: the method's parameters by name.
        base: the rotary base, or None where the frequencies are not powers of one.
        scaled: the kind of scaling that the model's own frequencies were trained with, if any; a
            method scales what is there.
        head_dim: features of a head.
        rotated: how many of them turn.
        layout: `half` or `interleaved`.
        extended: the numbers of the layers that the method changes.
        without_positions: layers among the model's that have no rotary position.
        left: layers that attend within a window, and stay as trained.
        attention: `stock`, or `normattn` where the layers attend by our kernels.
        cached_keys: `rotated`, or `un-rotated` where a cache must hold them so.
    """

    method: str
    train_length: int
    train_length_from: str
    parameters: dict[str, Any]
    base: float | None
    scaled: str | None
    head_dim: int
    rotated: int
    layout: str
    extended: tuple[int, ...]
    without_positions: tuple[int, ...]
    left: tuple[int, ...]
    attention: str
    cached_keys: str

    def as_dict(self) -> dict[str, Any]:
        """The values by name."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        turned = f"{self.rotated} of {self.head_dim} features turn ({self.layout})"
        if self.scaled is not None:
            turned += f", on top of the model's own {self.scaled} scaling"
        lines = [
            f"{self.method}, trained to read {self.train_length} tokens ({self.train_length_from})",
            f"base {self.base:g}, {turned}" if self.base else turned,
            f"{len(self.extended)} layers extended; attention: {self.attention}; "
            f"cached keys: {self.cached_keys}",
        ]
        if self.without_positions:
            lines.append(f"layers without positions: {_numbers(self.without_positions)}")
        if self.left:
            lines.append(f"layers within a window, as trained: {_numbers(self.left)}")
        return "\n".join(lines)


def _numbers(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
