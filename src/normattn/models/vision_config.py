"""The Vision Transformer's settings, as one checked value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from normattn.models.stack_config import MOST_TOKENS, StackConfig
from normattn.score import ScoreSpec
from normattn.score.folded_parts import RotaryPosition

Side = Annotated[int, Field(ge=1, le=1 << 16, strict=True)]


class VisionConfig(StackConfig):
    """Everything that decides a `VisionTransformer`'s shape; frozen, unknown fields refused.

    As `StackConfig`, where norms are LayerNorms, feed-forward layers GELUs and the score
    `Baseline-NoPE` unless said, as in ViT. Images are `height` × `width` with `channels` and cut
    into squares of `patch`, which must divide both; there are `classes` of them. `pool`: the head
    reads a "class" token put before the patches, or the "mean" of all patches. `positions`:
    "learned" vectors are added to the embedding, or "none"; unless said they are learned where the
    score itself knows no place (NoPE and no bias), none where it does (RoPE over the patches, row
    by row). `train_length` is the number of tokens, and follows from the rest.
    """

    causal: ClassVar[bool] = False

    height: Side
    width: Side
    channels: Annotated[int, Field(ge=1, le=1 << 10, strict=True)] = 1
    patch: Annotated[int, Field(ge=1, le=1 << 10, strict=True)] = 4
    classes: Annotated[int, Field(ge=2, strict=True)]
    pool: Literal["class", "mean"] = "class"
    positions: Literal["learned", "none"] | None = None
    train_length: Annotated[int, Field(ge=1, le=MOST_TOKENS, strict=True)]
    score: Annotated[ScoreSpec, Field(validate_default=True)] = "Baseline-NoPE"  # type: ignore[assignment]
    norm: Literal["rms", "layer"] = "layer"
    feed_forward: Literal["swiglu", "gelu"] = "gelu"

    @model_validator(mode="before")
    @classmethod
    def _count_tokens(cls, values: Any) -> Any:
        """Fill in `train_length`; what else is wrong is said by the other fields' own checks."""
        if not isinstance(values, Mapping) or "train_length" in values:
            return values
        names = ("height", "width", "patch")
        sides = [values.get(name, 4 if name == "patch" else None) for name in names]
        if not all(type(side) is int and side > 0 for side in sides):
            return {**values, "train_length": 1}
        height, width, patch = sides
        tokens = (height // patch) * (width // patch) + (values.get("pool", "class") == "class")
        return {**values, "train_length": max(1, tokens)}

    @model_validator(mode="after")
    def _check_image(self) -> VisionConfig:
        if self.height % self.patch or self.width % self.patch:
            raise ValueError(
                f"images of {self.height} × {self.width} cannot be cut into patches of "
                f"{self.patch} × {self.patch}: patch must divide height and width"
            )
        if self.train_length != self.tokens:
            raise ValueError(
                f"train_length is {self.train_length}, but an image has {self.tokens} tokens; "
                "leave it out"
            )
        if self.positions is None:
            placed = isinstance(self.score.position, RotaryPosition) or self.score.bias is not None
            # The one moment when a frozen value may still be completed.
            object.__setattr__(self, "positions", "none" if placed else "learned")
        return self

    @property
    def patches(self) -> int:
        """How many patches an image has."""
        return (self.height // self.patch) * (self.width // self.patch)

    @property
    def tokens(self) -> int:
        """How many tokens the blocks read: patches, and the class token where there is one."""
        return self.patches + (self.pool == "class")

    @property
    def patch_size(self) -> int:
        """How many numbers a patch has."""
        return self.channels * self.patch * self.patch
