"""The encoder–decoder's settings, as one checked value."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, model_validator

from normattn.errors import InputError
from normattn.layers.cross_attention import refuse_across
from normattn.models.stack_config import Layers, Size, StackConfig, refuse_shared
from normattn.score import Score, ScoreSpec
from normattn.score.part import Slot
from normattn.score.registry import find

Id = Annotated[int, Field(ge=0, strict=True)]
# What a default cross attention takes over from the encoder's score: all that needs no place.
_PLACELESS = (Slot.VARIANT, Slot.LOGN, Slot.CARRY, Slot.CAP, Slot.SINK)


class DecoderConfig(StackConfig):
    """The decoder's stack: blocks of self-attention, cross attention and a feed-forward layer."""

    @property
    def sublayers(self) -> int:
        """Three for each block."""
        return 3 * self.layers

    @property
    def deepnorm(self) -> tuple[float, float]:
        """α = (3M)^¼ and β = (12M)^−¼ for M decoder blocks (arXiv 2203.00555, figure 2)."""
        return (3 * self.layers) ** 0.25, (12 * self.layers) ** -0.25


class TranslatorConfig(StackConfig):
    """Everything that decides a `Translator`'s shape; frozen, unknown fields refused.

    `layers` counts the encoder's blocks, `decoder_layers` the decoder's (None: as many). `score` is
    the encoder's self-attention, `decoder_score` the decoder's (None: the same), `cross_score` the
    cross attention's (None: what of `score` needs no place: variant, log-n, carry, cap and sink,
    with NoPE). A score that reads statistics across the queries is refused where these are the
    decoder's, which would see the future: beside such an encoder name a `decoder_score` and a
    `cross_score`, which may well take statistics over the source's keys. `shared_vocabulary`: one
    embedding for both languages; `target_vocab`, None for `source_vocab`, must then equal it.
    `pad_id`, `bos_id` and `eos_id` hold in both vocabularies. The other settings are those of
    `StackConfig`, for both stacks; blocks are "mha". Raises `InputError` with one sentence per
    value out of range.
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
        if self.block != "mha":
            raise InputError(f"block {self.block!r} has no cross attention; an encoder–decoder has")
        if self.score.documents is not None:
            raise InputError(f"{self.score.name} packs documents; a row is one sentence here")
        # The one moment when a frozen value may still be completed.
        object.__setattr__(self, "target_vocab", self.target_vocab or self.source_vocab)
        object.__setattr__(self, "decoder_layers", self.decoder_layers or self.layers)
        self._check_vocabulary()
        object.__setattr__(self, "decoder_score", self._resolved_decoder_score())
        object.__setattr__(self, "cross_score", self._resolved_cross_score())
        return self

    @property
    def decoder(self) -> DecoderConfig:
        """The decoder's stack."""
        shared = {name: getattr(self, name) for name in StackConfig.model_fields}
        return DecoderConfig(
            **{**shared, "layers": self.decoder_layers, "score": self.decoder_score}
        )

    @property
    def across(self) -> ScoreSpec:
        """The cross attention's score."""
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

    def _check_vocabulary(self) -> None:
        if self.shared_vocabulary and self.target_vocab != self.source_vocab:
            raise InputError(
                f"with shared_vocabulary both have source_vocab {self.source_vocab} words, but "
                f"target_vocab is {self.target_vocab}: leave it out, or shared_vocabulary=False"
            )
        ids = {"pad_id": self.pad_id, "bos_id": self.bos_id, "eos_id": self.eos_id}
        smallest = min(self.source_vocab, self.target_size)
        for name, value in ids.items():
            if value >= smallest:
                raise InputError(f"{name} {value} is outside a vocabulary of {smallest} words")
        if len(set(ids.values())) < len(ids):
            raise InputError(f"pad_id, bos_id and eos_id must differ, but they are {ids}")

    def _resolved_decoder_score(self) -> ScoreSpec:
        score = self.score if self.decoder_score is None else self.decoder_score
        if score.leaks_future:
            raise InputError(
                f"decoder_score: {score.name} reads statistics across the sequence, so the decoder "
                "would see the future; name another decoder_score"
            )
        if score.documents is not None:
            raise InputError(f"decoder_score: {score.name} packs documents; a row is one sentence")
        object.__setattr__(self, "decoder_score", score)
        return self.decoder.score

    def _resolved_cross_score(self) -> ScoreSpec:
        score = placeless(self.score) if self.cross_score is None else self.cross_score
        norm = score.variant.query_norm()
        if norm is not None and norm.leaks_future:
            raise InputError(
                f"cross_score: {score.name} reads statistics across the decoder's queries, which "
                "would see the future; name another cross_score (statistics over keys may stay)"
            )
        refuse_across(score)
        score = score.resolve(train_length=self.train_length)
        refuse_shared(score, self.decoder.layers, self.shared_layers)
        with torch.random.fork_rng(devices=[]):
            for spec in {score.layer(n, self.decoder.layers) for n in range(self.decoder.layers)}:
                Score(spec, self.heads, self.score_head_dim, self.kv_heads)
        return score


def placeless(score: ScoreSpec) -> ScoreSpec:
    """What of a score needs no place, with NoPE: what a cross attention takes over from it."""
    kept = [part for part in score.parts if part.slot in _PLACELESS]
    nope: Any = find("NoPE")()
    return ScoreSpec((*kept, nope), score.train_length)
