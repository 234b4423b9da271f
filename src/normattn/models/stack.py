"""The blocks of a model: attention and feed-forward sub-layers in a placement, one after another.

Legend: B batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from normattn.layers.attention import Attention
from normattn.layers.cache import KeyValueCache
from normattn.layers.feed_forward import GELU, SwiGLU
from normattn.layers.gated_attention_unit import GatedAttentionUnit
from normattn.layers.norms import LayerNorm, RMSNorm
from normattn.layers.placement import DeepNorm, FixedScale, PostLN, PreLN, ReZero
from normattn.layers.residual_scores import residual_layers
from normattn.models.reading import Reading
from normattn.models.stack_config import StackConfig
from normattn.score import Score, ScoreSpec

After = Callable[[int, Tensor], None]
"""Told each layer's number, from 0, and its output (B, T, D)."""


class Block(nn.Module):
    """An attention sub-layer, then, if there is one, a feed-forward sub-layer."""

    def __init__(self, mixer: nn.Module, feed_forward: nn.Module | None) -> None:
        super().__init__()
        self.mixer = mixer
        self.feed_forward = feed_forward

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        reading: Reading | None = None,
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Apply the block to tokens of which `reading` says more; `cache` is its layer's."""
        reading = Reading() if reading is None else reading
        context: dict[str, Any] = {}
        if reading.residual is not None:
            context["residual"] = reading.residual
        if reading.backend != "auto":
            context["backend"] = reading.backend
        x = self.mixer(
            x,
            causal=reading.causal,
            key_padding=reading.key_padding,
            positions=reading.positions,
            documents=reading.documents,
            cache=cache,
            **context,
        )
        return x if self.feed_forward is None else self.feed_forward(x)


class Blocks(nn.ModuleList):
    """The blocks of a `StackConfig`, bottom first; with `shared_layers` one block, used again.

    `blocks(x, reading)` runs them all; x and the result are (B, T, D). Residual scores live
    for one call.
    """

    def __init__(self, config: StackConfig) -> None:
        own = 1 if config.shared_layers else config.layers
        super().__init__(_block(config, layer) for layer in range(own))
        self.layers = config.layers
        self._score = config.score

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        reading: Reading | None = None,
        caches: Sequence[KeyValueCache | None] | None = None,
        after: After | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Every layer in turn; `caches` has one for each layer, `after` is told every output."""
        reading = Reading() if reading is None else reading
        residual = residual_layers(self._score, self.layers)
        for layer in range(self.layers):
            cache = None if caches is None else caches[layer]
            if residual is not None:
                reading = replace(reading, residual=residual[layer])
            x = self[layer % len(self)](x, reading, cache)
            if after is not None:
                after(layer, x)
        return x

    @property
    def specs(self) -> list[ScoreSpec]:
        """The active score of every layer."""
        specs = [module.spec for module in self.modules() if isinstance(module, Score)]
        return specs * (self.layers // len(specs))


def make_norm(config: StackConfig) -> LayerNorm | RMSNorm:
    """One norm over the width, of the configured kind."""
    if config.norm == "rms":
        return RMSNorm(
            config.dim,
            config.norm_eps,
            gain=config.norm_gain,
            eps_placement=config.eps_placement,
        )
    return LayerNorm(config.dim, config.norm_eps, gain=config.norm_gain, bias=config.norm_gain)


def first_norm(config: StackConfig) -> nn.Module | None:
    """The norm of the embedding: where blocks end in one, so that every sub-layer reads one."""
    return make_norm(config) if config.ends_in_norm else None


def last_norm(config: StackConfig) -> nn.Module | None:
    """The norm after the last block, where blocks do not end in one and there are norms at all."""
    return make_norm(config) if config.has_norms and not config.ends_in_norm else None


def placed(config: StackConfig) -> Callable[[nn.Module], nn.Module]:
    """A function that puts one sub-layer in the configured placement."""
    alpha, dropout = config.deepnorm[0], config.dropout

    def wrap(sublayer: nn.Module) -> nn.Module:
        if config.placement == "FixedScale":
            return FixedScale(sublayer, dropout=dropout)
        if config.placement == "ReZeroNoNorm":
            return ReZero(sublayer, None, dropout)
        norm = make_norm(config)
        if config.placement == "DeepNorm":
            return DeepNorm(sublayer, norm, alpha, dropout)
        kinds = {"PreLN": PreLN, "PostLN": PostLN, "ReZero": ReZero}
        return kinds[config.placement](sublayer, norm, dropout)

    return wrap


def make_attention(config: StackConfig, score: ScoreSpec) -> Attention:
    """The attention layer of a block, with its own score."""
    return Attention(
        config.dim,
        config.heads,
        config.kv_heads,
        score,
        head_dim=config.head_dim,
        qkv_bias=config.qkv_bias,
        dropout=config.dropout,
    )


def make_feed_forward(config: StackConfig) -> SwiGLU | GELU:
    """The feed-forward layer of a block."""
    kind = SwiGLU if config.feed_forward == "swiglu" else GELU
    return kind(config.dim, config.hidden)


def _block(config: StackConfig, layer: int) -> Block:
    wrap = placed(config)
    score = config.score.layer(layer, config.layers)
    if config.block == "gau":
        unit = GatedAttentionUnit(
            config.dim,
            config.key_size,
            config.expansion,
            score,
            separate_qk=config.separate_qk,
            dropout=config.dropout,
        )
        return Block(wrap(unit), None)
    return Block(wrap(make_attention(config, score)), wrap(make_feed_forward(config)))
