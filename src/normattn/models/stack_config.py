"""What every stack of blocks is made of, as one checked value; each model adds its own settings."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, ValidationError, model_validator

from normattn.errors import InputError
from normattn.layers.placement import deepnorm_factors
from normattn.models.block_settings import OWN_SETTINGS
from normattn.score import Score, ScoreSpec
from normattn.structured import Settings

# What no product of two of them brings beyond what a tensor can have: refused by name instead.
Size = Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
Heads = Annotated[int, Field(ge=1, le=1 << 16, strict=True)]
Layers = Annotated[int, Field(ge=1, le=2_000, strict=True)]
MOST_TOKENS = 1 << 31
Placement = Literal["PreLN", "PostLN", "DeepNorm", "ReZero", "ReZeroNoNorm", "FixedScale"]
NORMLESS: tuple[Placement, ...] = ("ReZeroNoNorm", "FixedScale")


class StackConfig(Settings):
    """Everything that decides the shape of a stack of blocks; frozen, unknown fields refused.

    `score` is a `ScoreSpec` or its text; it is resolved with `train_length`, the number of tokens
    that the model is trained to read, and `score.layer` says what each layer's is. `block="mha"` is
    attention and a feed-forward layer, `block="gau"` one gated attention unit with one head. A
    setting of the other kind of block is refused, not ignored, and so is one of a norm where the
    placement has none. `hidden` is the feed-forward width (None: 8/3 of `dim` for SwiGLU, 4 `dim`
    for GELU). `shared_layers`: all layers are one block with one set of weights (ALBERT, arXiv
    1909.11942). `eps_placement`: where an RMSNorm adds `norm_eps`, inside or outside the square
    root (`layers.norms.RMSNorm`). `qkv_bias`: queries, keys and values of self-attention have a
    bias (Qwen2), which starts at 0. `init_std` is the weights' standard deviation (None:
    1/√fan-in, see `models.initialisation`), `embedding_std` the embedding's (None: as the
    weights'), `gamma_std` that of a gated attention unit's γ_q and γ_k (None: ones, so that every
    query starts as its own key and a token attends to itself first of all). Where the embedding is
    normalised and is the head too, a model that has learned nothing gives its own input token a
    logit of embedding_std · dim: the first loss is near ln V while that is well below ln V. A dump
    leaves out what came later and is off: `eps_placement`, `qkv_bias`, `embedding_std`,
    `gamma_std`, `separate_qk` (a gated attention unit with linear W_q and W_k of their own).
    Raises `InputError` with one sentence per value out of range.
    """

    causal: ClassVar[bool] = True

    dim: Size
    layers: Layers
    heads: Heads = 1
    kv_heads: Heads | None = None
    head_dim: Heads | None = None
    block: Literal["mha", "gau"] = "mha"
    train_length: Annotated[int, Field(ge=2, le=MOST_TOKENS, strict=True)]
    score: Annotated[ScoreSpec, Field(validate_default=True)] = "Baseline"  # type: ignore[assignment]
    placement: Placement = "PreLN"
    norm: Literal["rms", "layer"] = "rms"
    norm_gain: bool = True
    norm_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    # Left out of a dump where it is off: runs that were made before it stay the same.
    eps_placement: Annotated[
        Literal["inside", "outside"], Field(exclude_if=lambda side: side == "inside")
    ] = "inside"
    feed_forward: Literal["swiglu", "gelu"] = "swiglu"
    hidden: Size | None = None
    key_size: Size = 128
    expansion: Annotated[int, Field(ge=1, le=1 << 10, strict=True)] = 2
    separate_qk: Annotated[bool, Field(exclude_if=lambda on: not on)] = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    shared_layers: bool = False
    qkv_bias: Annotated[bool, Field(exclude_if=lambda on: not on)] = False
    init_std: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    embedding_std: Annotated[
        Annotated[float, Field(gt=0, allow_inf_nan=False)] | None,
        Field(exclude_if=lambda deviation: deviation is None),
    ] = None
    gamma_std: Annotated[
        Annotated[float, Field(gt=0, allow_inf_nan=False)] | None,
        Field(exclude_if=lambda deviation: deviation is None),
    ] = None

    if not TYPE_CHECKING:  # The checker keeps the fields' own signature.

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise InputError(explain(error)) from error

    @model_validator(mode="after")
    def _check(self) -> StackConfig:
        self._check_block()
        self._check_norm()
        # The one moment when a frozen value may still be completed.
        object.__setattr__(self, "score", self._resolved_score())
        return self

    def _resolved_score(self) -> ScoreSpec:
        score = self.score
        if score.train_length not in (None, self.train_length):
            raise InputError(
                f"the score {score} is for a train_length of {score.train_length}, "
                f"but the model's is {self.train_length}"
            )
        if self.causal and score.leaks_future:
            raise InputError(
                f"{score.name} reads statistics across the sequence, so a causal language model "
                "with it would see the future"
            )
        if not self.causal and score.needs_causal:
            raise InputError(f"{score.name} is defined for causal attention only")
        score = score.resolve(train_length=self.train_length)
        refuse_shared(score, self.layers, self.shared_layers)
        # A score refuses some shapes of heads; better now than when the model is built.
        for spec in {score.layer(layer, self.layers) for layer in range(self.layers)}:
            _check_heads(spec, self.heads, self.score_head_dim, self.kv_heads)
        return score

    def _check_block(self) -> None:
        if self.block == "gau":
            if self.heads != 1:
                raise InputError(f"a gated attention unit has one head; heads is {self.heads}")
            self._refuse_unused("gau", OWN_SETTINGS["mha"])
            if self.separate_qk and self.gamma_std is not None:
                raise InputError("gamma_std draws γ; with separate_qk there is no γ: leave it out")
            return
        self._refuse_unused("mha", OWN_SETTINGS["gau"])
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise InputError(f"{self.heads} heads cannot share {self.kv_heads} kv_heads evenly")
        if self.head_dim is None and self.dim % self.heads:
            raise InputError(
                f"dim {self.dim} does not divide into {self.heads} heads; give head_dim, "
                "or choose a number of heads that divides dim"
            )

    def _check_norm(self) -> None:
        if self.placement not in NORMLESS:
            if self.norm == "layer" and self.eps_placement != "inside":
                raise InputError(
                    "eps_placement has no meaning for norm 'layer', whose eps is added to the "
                    "variance; leave it out, or choose norm 'rms'"
                )
            return
        for name in ("norm", "norm_gain", "norm_eps", "eps_placement"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise InputError(
                    f"{name} has no meaning for placement {self.placement!r}; leave it out"
                )

    @property
    def sublayers(self) -> int:
        """The number of sub-layers, each with a residual of its own, in the whole stack."""
        return self.layers if self.block == "gau" else 2 * self.layers

    @property
    def deepnorm(self) -> tuple[float, float]:
        """DeepNorm's α and β of this stack."""
        return deepnorm_factors(self.layers, self.sublayers // self.layers)

    @property
    def ends_in_norm(self) -> bool:
        """Whether a block's output is normalised; the embedding then is too, the stack's not."""
        return self.placement in ("PostLN", "DeepNorm")

    @property
    def has_norms(self) -> bool:
        """Whether there is any norm at all."""
        return self.placement not in NORMLESS

    def _refuse_unused(self, block: str, names: tuple[str, ...]) -> None:
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise InputError(f"{name} has no meaning for block {block!r}; leave it out")

    @property
    def score_head_dim(self) -> int:
        """The number of features of one query or key."""
        if self.block == "gau":
            return self.key_size
        return self.dim // self.heads if self.head_dim is None else self.head_dim


@lru_cache(maxsize=1024)
def _check_heads(score: ScoreSpec, heads: int, head_dim: int, kv_heads: int | None) -> None:
    """Raise `InputError` where the score cannot have heads of this shape.

    A sweep checks the same few shapes in thousands of cells: what is fine is remembered.
    """
    # What the score draws at random is thrown away with it.
    with torch.random.fork_rng(devices=[]):
        Score(score, heads, head_dim, kv_heads)


def refuse_shared(score: ScoreSpec, layers: int, shared: bool) -> None:
    """Raise `InputError` where layers are one, but the score is another in some of them."""
    if shared and len({score.layer(layer, layers) for layer in range(layers)}) > 1:
        raise InputError(
            f"{score.name} differs from layer to layer, but with shared_layers all are one"
        )


def explain(error: ValidationError) -> str:
    """A validation error as one sentence: each field, what is wrong, and the value given."""
    parts = []
    for item in error.errors(include_url=False):
        field = ".".join(str(key) for key in item["loc"])
        if item["type"] == "value_error":
            message = str(item["ctx"]["error"])
            parts.append(f"{field}: {message}" if field else message)
        elif item["type"] == "extra_forbidden":
            parts.append(f"{field}: there is no such setting")
        elif item["type"] == "missing":
            parts.append(f"{field}: this setting is required")
        else:
            message = item["msg"][0].lower() + item["msg"][1:]
            parts.append(f"{field}: {message}, but it is {item['input']!r}")
    return f"{error.title}: " + "; ".join(parts)
