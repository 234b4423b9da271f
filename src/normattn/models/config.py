"""The configurations of all models, as validated values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, ValidationError, model_validator

from normattn.errors import InputError
from normattn.layers.checks import checked_head_dim
from normattn.layers.cross_attention import refuse_across
from normattn.layers.residual import deepnorm_factors
from normattn.score import Score, ScoreSpec
from normattn.score.parts import RotaryPosition, Slot, find
from normattn.score.spec import as_spec
from normattn.settings import Settings, explain


def _integer(least: int, most: int | None = None) -> Any:
    return Field(ge=least, le=most, strict=True)


# With these bounds a product of two sizes is within the limits of a tensor.
Size = Annotated[int, _integer(1, 1 << 24)]
Heads = Annotated[int, _integer(1, 1 << 16)]
Layers = Annotated[int, _integer(1, 2_000)]
Small = Annotated[int, _integer(1, 1 << 10)]
Id = Annotated[int, _integer(0)]
MOST_TOKENS = 1 << 31
Deviation = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ScoreField = Annotated[ScoreSpec, Field(validate_default=True)]
Placement = Literal[
    "PreLN", "PostLN", "DeepNorm", "ReZero", "ReZeroNoNorm", "FixedScale", "AttnRes", "nGPT"
]
NORMLESS: tuple[Placement, ...] = ("ReZeroNoNorm", "FixedScale")

# Fields added later are left out of a dump while they are off, so that older digests stay valid.
LaterSwitch = Annotated[bool, Field(exclude_if=lambda on: not on)]
LaterDeviation = Annotated[Deviation | None, Field(exclude_if=lambda deviation: deviation is None)]

BLOCK_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "mha": ("heads", "kv_heads", "head_dim", "feed_forward", "hidden", "qkv_bias"),
    "gau": ("key_size", "expansion", "gamma_std", "separate_qk"),
}
"""The fields that apply to one kind of block only."""
NORM_SETTINGS = ("norm", "norm_gain", "norm_eps", "eps_placement")


class StackConfig(Settings):
    """The architecture of a stack of blocks, as a frozen value; unknown fields are refused.

    Args:
        dim: width of the residual stream.
        layers: number of blocks.
        heads: query heads; kv_heads: key and value heads (None: as many); head_dim: their size
            (None: dim / heads).
        block: "mha" is attention and a feed-forward layer, "gau" one gated attention unit with one
            head. Fields of the other kind are refused.
        train_length: tokens of a training sequence (default: what the score states, as `@512`).
        score: a `ScoreSpec` or its text, resolved with `train_length`; `score.layer` gives
            each layer's.
        placement: where norm and residual are. Fields of a norm that is not used are refused.
        residual_block: the number of sub-layers whose outputs AttnRes sums before attending.
        eps_placement: whether an RMSNorm adds `norm_eps` inside or outside the square root.
        hidden: feed-forward width (None: 8/3 of `dim` for SwiGLU, 4 `dim` for GELU).
        key_size, expansion: a gated attention unit's head size, and its values' width over `dim`.
        dropout: probability of dropping attention weights and sub-layers' outputs in training.
        shared_layers: all layers share the weights of one block (ALBERT, arXiv 1909.11942).
        qkv_bias: queries, keys and values of self-attention have a bias (Qwen2), initially 0.
        separate_qk: a gated attention unit has separate projections of q and k.
        init_std: deviation of the weights (None: 1/√fan-in, see `initialise`).
        embedding_std: deviation of the embedding (None: that of the weights). With a normalised
            embedding that is also the head, an untrained model gives its input token a logit of
            embedding_std · dim; the first loss is near ln V if that is well below ln V.
        gamma_std: deviation of a gated attention unit's γ_q and γ_k (None: ones; a token then
            first attends mostly to itself).

    Raises `InputError` for the first setting that is out of range or has no effect.
    """

    causal: ClassVar[bool] = True

    dim: Size
    layers: Layers
    heads: Heads = 1
    kv_heads: Heads | None = None
    head_dim: Heads | None = None
    block: Literal["mha", "gau"] = "mha"
    train_length: Annotated[int, _integer(2, MOST_TOKENS)]
    score: ScoreField = "Baseline"  # type: ignore[assignment]
    placement: Placement = "PreLN"
    residual_block: Annotated[Heads, Field(exclude_if=lambda block: block == 1)] = 1
    norm: Literal["rms", "layer", "dyt", "derf"] = "rms"
    norm_gain: bool = True
    norm_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    eps_placement: Annotated[
        Literal["inside", "outside"], Field(exclude_if=lambda side: side == "inside")
    ] = "inside"
    feed_forward: Literal["swiglu", "gelu"] = "swiglu"
    hidden: Size | None = None
    key_size: Size = 128
    expansion: Small = 2
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    shared_layers: bool = False
    qkv_bias: LaterSwitch = False
    init_std: Deviation | None = None
    embedding_std: LaterDeviation = None
    gamma_std: LaterDeviation = None
    separate_qk: LaterSwitch = False

    if not TYPE_CHECKING:  # Type checkers see the signature of the fields.

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise InputError(f"{error.title}: {explain(error)}") from error

    @model_validator(mode="before")
    @classmethod
    def _fill_train_length(cls, values: Any) -> Any:
        """Take a missing `train_length` from a score that states it, as `CosA@512`."""
        if not isinstance(values, Mapping) or "train_length" in values:
            return values
        score = values.get("score")
        length = as_spec(score).train_length if isinstance(score, str | ScoreSpec) else None
        return values if length is None else {**values, "train_length": length}

    @model_validator(mode="after")
    def _check(self) -> StackConfig:
        gau = self.block == "gau"
        if gau and self.heads != 1:
            raise InputError(f"a gated attention unit has one head; heads is {self.heads}")
        for unused, reason, names in (
            (True, "block", BLOCK_SETTINGS["mha" if gau else "gau"]),
            (self.placement in NORMLESS, "placement", NORM_SETTINGS),
            (self.placement == "nGPT", "placement", ("norm", "norm_gain", "eps_placement")),
            (self.placement != "AttnRes", "placement", ("residual_block",)),
            (self.norm != "rms", "norm", ("eps_placement",)),
            (self.norm in ("dyt", "derf"), "norm", ("norm_eps",)),
        ):
            for name in names if unused else ():
                if getattr(self, name) != type(self).model_fields[name].default:
                    value = getattr(self, reason)
                    raise InputError(f"{name} has no meaning for {reason} {value!r}; leave it out")
        if self.separate_qk and self.gamma_std is not None:
            raise InputError("gamma_std draws γ; with separate_qk there is no γ: leave it out")
        if self.causal and self.score.leaks_future:
            raise InputError(
                f"{self.score.name} uses statistics across the sequence, so a causal language "
                "model with it would see the future"
            )
        if not self.causal and self.score.needs_causal:
            raise InputError(f"{self.score.name} is defined for causal attention only")
        self._set(score=self._resolved_score(self.score, self.layers))
        return self

    def _set(self, **values: Any) -> None:
        """Set derived fields of the frozen value; for validators only."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _resolved_score(self, score: ScoreSpec, layers: int) -> ScoreSpec:
        """The resolved score; `InputError` if a layer does not support it."""
        if score.train_length not in (None, self.train_length):
            raise InputError(
                f"the score {score} is for a train_length of {score.train_length}, "
                f"but the model's is {self.train_length}"
            )
        score = score.resolve(train_length=self.train_length)
        specs = {score.layer(layer, layers) for layer in range(layers)}
        if self.shared_layers and len(specs) > 1:
            raise InputError(
                f"{score.name} differs from layer to layer, but with shared_layers all are the same"
            )
        for spec in specs:
            _check_heads(spec, self.heads, self.score_head_dim, self.kv_heads)
        return score

    @property
    def sublayers(self) -> int:
        """The number of sub-layers of the whole stack, each with a residual connection."""
        return self.layers if self.block == "gau" else 2 * self.layers

    @property
    def deepnorm(self) -> tuple[float, float]:
        """DeepNorm's α and β of this stack."""
        return deepnorm_factors(self.layers, self.sublayers // self.layers)

    @property
    def score_head_dim(self) -> int:
        """The number of features of one query or key."""
        if self.block == "gau":
            return self.key_size
        return checked_head_dim(self.dim, self.heads, self.head_dim)


class CausalLMConfig(StackConfig):
    """The architecture of a `CausalLM`; with `tie_head` the embedding is also the head."""

    vocab_size: Size
    tie_head: bool = True


class MaskedLMConfig(StackConfig):
    """The architecture of a `MaskedLM`: a bidirectional `StackConfig` and a vocabulary.

    `vocab_size` counts tokens without the mask, whose id is `vocab_size`. `tie_head`: the head is
    the embedding (without the mask's row). `exits`: each layer below the last has an exit.
    """

    causal: ClassVar[bool] = False

    vocab_size: Size
    tie_head: bool = True
    exits: bool = False

    @model_validator(mode="after")
    def _check_exits(self) -> MaskedLMConfig:
        if self.exits and self.layers < 2:
            raise ValueError("exits are below the last layer, and there is only one layer")
        return self

    @property
    def mask_id(self) -> int:
        """The id of the mask."""
        return self.vocab_size


class ClassifierConfig(StackConfig):
    """The architecture of a `Classifier`: an encoder of `vocab_size` tokens, `labels` outputs."""

    causal: ClassVar[bool] = False

    vocab_size: Size
    labels: Size


class VisionConfig(StackConfig):
    """The architecture of a `VisionTransformer`, by default as in ViT.

    Images of `height` × `width` with `channels` are cut into squares of `patch`, which must divide
    both; there are `classes` of them. `pool`: the head reads a "class" token before the patches, or
    the "mean" of all patches. `positions`: "learned" vectors, added to the embedding, or "none";
    the default is learned if the score has no positions (NoPE and no bias). `train_length`, the
    number of tokens, is derived.
    """

    causal: ClassVar[bool] = False

    height: Heads
    width: Heads
    channels: Small = 1
    patch: Small = 4
    classes: Annotated[int, _integer(2)]
    pool: Literal["class", "mean"] = "class"
    positions: Literal["learned", "none"] | None = None
    train_length: Annotated[int, _integer(1, MOST_TOKENS)]
    score: ScoreField = "Baseline-NoPE"  # type: ignore[assignment]
    norm: Literal["rms", "layer"] = "layer"
    feed_forward: Literal["swiglu", "gelu"] = "gelu"

    @model_validator(mode="before")
    @classmethod
    def _count_tokens(cls, values: Any) -> Any:
        """Derive `train_length`; field checks refuse wrong sizes."""
        if not isinstance(values, Mapping) or "train_length" in values:
            return values
        height, width, patch = values.get("height"), values.get("width"), values.get("patch", 4)
        tokens = 1
        if all(type(side) is int and side > 0 for side in (height, width, patch)):
            patches = (height // patch) * (width // patch)
            tokens = max(1, patches + (values.get("pool", "class") == "class"))
        return {**values, "train_length": tokens}

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
            rotary = isinstance(self.score.position, RotaryPosition)
            self._set(positions="none" if rotary or self.score.bias is not None else "learned")
        return self

    @property
    def patches(self) -> int:
        """The number of patches of an image."""
        return (self.height // self.patch) * (self.width // self.patch)

    @property
    def tokens(self) -> int:
        """The number of tokens: patches, and with `pool` "class" the class token."""
        return self.patches + (self.pool == "class")

    @property
    def patch_size(self) -> int:
        """The number of values of a patch."""
        return self.channels * self.patch * self.patch


class DecoderConfig(StackConfig):
    """A translator's decoder: blocks of self-attention, cross-attention and feed-forward."""

    @property
    def sublayers(self) -> int:
        """Three for each block."""
        return 3 * self.layers


class TranslatorConfig(StackConfig):
    """The architecture of a `Translator`: a `StackConfig` for both stacks, whose blocks are "mha".

    `layers` are the encoder's, `decoder_layers` the decoder's (None: as many). `score` is that of
    the encoder's self-attention, `decoder_score` the decoder's (None: the same), `cross_score` that
    of cross-attention (None: the components of `score` that need no position: variant, log-n,
    residual, cap and sink, with NoPE). Statistics across the decoder's queries are refused, as they
    would see the future; `cross_score` may use statistics over the source's keys.
    `shared_vocabulary`: one embedding for both languages; `target_vocab` (None: `source_vocab`)
    must then equal it. `pad_id`, `bos_id` and `eos_id` are the same in both.
    """

    causal: ClassVar[bool] = False

    source_vocab: Size
    target_vocab: Size | None = None
    shared_vocabulary: bool = True
    decoder_layers: Layers | None = None
    decoder_score: ScoreSpec | None = None
    cross_score: ScoreSpec | None = None
    pad_id: Id = 0
    bos_id: Id = 1
    eos_id: Id = 2
    tie_head: bool = True

    @model_validator(mode="after")
    def _check_translator(self) -> TranslatorConfig:
        decoder_score = self.decoder_score or self.score
        cross_score = self.cross_score or without_position(self.score)
        self._set(
            target_vocab=self.target_vocab or self.source_vocab,
            decoder_layers=self.decoder_layers or self.layers,
        )
        smallest = min(self.source_vocab, self.target_size)
        ids = {"pad_id": self.pad_id, "bos_id": self.bos_id, "eos_id": self.eos_id}
        query_norm = cross_score.variant.query_norm()
        packs, future = "packs documents; a row is one sentence here", "which would see the future"
        for wrong, problem in (
            (self.block != "mha", f"block {self.block!r} has no cross attention"),
            (self.score.documents is not None, f"{self.score.name} {packs}"),
            (
                decoder_score.documents is not None,
                f"decoder_score: {decoder_score.name} {packs}",
            ),
            (
                self.shared_vocabulary and self.target_vocab != self.source_vocab,
                f"target_vocab is {self.target_vocab}, but with shared_vocabulary it is that "
                f"of source_vocab, {self.source_vocab}: leave it out, or shared_vocabulary=False",
            ),
            *(
                (value >= smallest, f"{name} {value} is outside a vocabulary of {smallest} words")
                for name, value in ids.items()
            ),
            (len(set(ids.values())) < 3, f"pad_id, bos_id and eos_id must differ: {ids}"),
            (
                decoder_score.leaks_future,
                f"decoder_score: {decoder_score.name} reads statistics across the sequence, "
                f"{future}; name another decoder_score",
            ),
            (
                query_norm is not None and query_norm.leaks_future,
                f"cross_score: {cross_score.name} reads statistics across the decoder's queries, "
                f"{future}; name another cross_score (statistics over keys may stay)",
            ),
        ):
            if wrong:
                raise InputError(problem)
        refuse_across(cross_score)
        self._set(decoder_score=decoder_score)
        cross_score = self._resolved_score(cross_score, self.decoder.layers)
        self._set(decoder_score=self.decoder.score, cross_score=cross_score)
        return self

    @property
    def decoder(self) -> DecoderConfig:
        """The decoder's stack."""
        fields = {name: getattr(self, name) for name in StackConfig.model_fields}
        fields |= {"layers": self.decoder_layers, "score": self.decoder_score}
        return DecoderConfig(**fields)

    @property
    def resolved_cross_score(self) -> ScoreSpec:
        """The score of cross-attention."""
        assert self.cross_score is not None
        return self.cross_score

    @property
    def target_size(self) -> int:
        """The number of target words."""
        assert self.target_vocab is not None
        return self.target_vocab

    @property
    def deepnorm(self) -> tuple[float, float]:
        """The encoder's α = 0.81·(N⁴M)^(1/16) and β = 0.87·(N⁴M)^(−1/16).

        N encoder and M decoder blocks (arXiv 2203.00555, figure 2).
        """
        assert self.decoder_layers is not None
        depth = self.layers**4 * self.decoder_layers
        return 0.81 * depth**0.0625, 0.87 * depth**-0.0625


def without_position(score: ScoreSpec) -> ScoreSpec:
    """The components of a score that need no position, and NoPE: the default of cross-attention."""
    slots = (Slot.VARIANT, Slot.LOGN, Slot.RESIDUAL, Slot.CAP, Slot.SINK)
    nope: Any = find("NoPE")()
    parts = [part for part in score.parts if part.slot in slots]
    return ScoreSpec((*parts, nope), score.train_length)


@lru_cache(maxsize=1024)
def _check_heads(score: ScoreSpec, heads: int, head_dim: int, kv_heads: int | None) -> None:
    """Raise `InputError` if the score does not support heads of this shape; cached for sweeps."""
    # Do not advance the global generator.
    with torch.random.fork_rng(devices=[]):
        Score(score, heads, head_dim, kv_heads)
