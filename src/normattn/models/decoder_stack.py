"""The decoder's blocks: self-attention, cross attention to a source, feed-forward.

Legend: B rows, T target tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from normattn.layers.cache import KeyValueCache
from normattn.layers.cross_attention import CrossAttention, Memory
from normattn.layers.residual_scores import ResidualLayer, residual_layers
from normattn.models.stack import make_attention, make_feed_forward, placed
from normattn.models.translator_config import DecoderConfig
from normattn.score import ScoreSpec


class DecoderBlock(nn.Module):
    """A self-attention, a cross-attention and a feed-forward sub-layer, each in the placement."""

    def __init__(self, config: DecoderConfig, score: ScoreSpec, across: ScoreSpec) -> None:
        super().__init__()
        wrap = placed(config)
        self.mixer = wrap(make_attention(config, score))
        self.cross = wrap(
            CrossAttention(
                config.dim,
                config.heads,
                config.kv_heads,
                across,
                head_dim=config.head_dim,
                dropout=config.dropout,
            )
        )
        self.feed_forward = wrap(make_feed_forward(config))

    @property
    def cross_attention(self) -> CrossAttention:
        """The layer that reads the source."""
        layer = self.cross.sublayer
        assert isinstance(layer, CrossAttention)
        return layer

    @property
    def own_score(self) -> ScoreSpec:
        """The active score of the self-attention."""
        layer: Any = self.mixer.sublayer
        spec: ScoreSpec = layer.score.spec
        return spec

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        memory: Memory,
        positions: Int[Tensor, " t"],
        padding: Bool[Tensor, "b t"] | None = None,
        own: ResidualLayer | None = None,
        across: ResidualLayer | None = None,
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Apply the block to tokens that stand at `positions`.

        `padding`, on the right and so seen by nobody, is for statistics to leave out. `own` and
        `across` are the residuals of the two attentions, `cache` is the self-attention's.
        """
        x = self.mixer(x, causal=True, query_padding=padding, cache=cache, residual=own)
        told = {"positions": positions, "query_padding": padding, "residual": across}
        x = self.cross(x, memory=memory, **told)
        y: Tensor = self.feed_forward(x)
        return y


class DecoderBlocks(nn.ModuleList):
    """The blocks of a decoder, bottom first; with `shared_layers` one block, used again.

    Self-attention and cross attention have residual scores of their own, which live for one call.
    """

    def __init__(self, config: DecoderConfig, across: ScoreSpec) -> None:
        count = config.layers
        super().__init__(
            DecoderBlock(config, config.score.layer(layer, count), across.layer(layer, count))
            for layer in range(1 if config.shared_layers else count)
        )
        self.layers = count
        self._scores = config.score, across

    def remember(
        self, source: Float[Tensor, "b s d"], padding: Tensor | None, positions: Tensor
    ) -> tuple[Memory, ...]:
        """The keys and values that each block reads of a source."""
        return tuple(
            block.cross_attention.remember(source, padding, positions) for block in self._blocks
        )

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        memories: Sequence[Memory],
        positions: Int[Tensor, " t"],
        padding: Bool[Tensor, "b t"] | None = None,
        caches: Sequence[KeyValueCache | None] | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Every layer in turn; there is a memory for each block and a cache for each layer."""
        residuals = [residual_layers(spec, self.layers) for spec in self._scores]
        for layer in range(self.layers):
            cache = None if caches is None else caches[layer]
            block, memory = self[layer % len(self)], memories[layer % len(self)]
            own, across = (None if below is None else below[layer] for below in residuals)
            x = block(x, memory, positions, padding, own, across, cache)
        return x

    @property
    def specs(self) -> list[ScoreSpec]:
        """The active self-attention score of every layer."""
        blocks = self._blocks
        return [blocks[layer % len(blocks)].own_score for layer in range(self.layers)]

    @property
    def _blocks(self) -> list[DecoderBlock]:
        return [block for block in self if isinstance(block, DecoderBlock)]
