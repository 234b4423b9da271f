"""Parameters and floating-point operations of models.

A multiplication and an addition count as two operations. Elementwise operations (norms, rotations,
softmax, gates) are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch import nn

from normattn.errors import require_sizes
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig, StackConfig, TranslatorConfig, VisionConfig
from normattn.models.transformer import Blocks
from normattn.models.utils import on_meta
from normattn.score import ScoreSpec


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of the matmuls with weights, and of attention.

    `weights` include the head. `attention` counts scores and weighted values of visible pairs of a
    query and a key: within causality, windows and chunks, regardless of documents and padding.
    """

    weights: float
    attention: float

    @property
    def forward(self) -> float:
        """One forward pass."""
        return self.weights + self.attention

    @property
    def training(self) -> float:
        """Forward and backward: three times the forward, as each matmul has two gradients."""
        return 3 * self.forward


def parameter_count(model: nn.Module | CausalLMConfig) -> int:
    """The number of parameters of a model or a configuration; shared ones count once."""
    if isinstance(model, CausalLMConfig):
        return planned_parameters(CausalLM, model)
    return sum(parameter.numel() for parameter in model.parameters())


@lru_cache(maxsize=256)
def planned_parameters(model: Callable[[Any], nn.Module], config: Hashable) -> int:
    """`parameter_count` of `model(config)`, built on the meta device and cached for sweeps."""
    with on_meta():
        return parameter_count(model(config))


def flops_per_token(config: CausalLMConfig, length: int) -> Flops:
    """FLOPs per token of `config`'s model on sequences of `length` tokens (at least 1)."""
    stack = stack_flops(config, length)
    return Flops(stack.weights + 2.0 * config.vocab_size * config.dim, stack.attention)


def flops_per_image(config: VisionConfig) -> Flops:
    """FLOPs of one image."""
    stack = stack_flops(config, config.tokens)
    ends = 2.0 * config.dim * (config.patches * config.patch_size + config.classes)
    return Flops(stack.weights * config.tokens + ends, stack.attention * config.tokens)


def translator_flops(config: TranslatorConfig, source_length: int, target_length: int) -> Flops:
    """FLOPs of one pair of sentences, with the head (not per token).

    Cross-attention computes keys and values per source token, queries and outputs per target token,
    and scores per pair of tokens.
    """
    stack = config.decoder
    encoder, decoder = stack_flops(config, source_length), stack_flops(stack, target_length)
    width, kv_width = _widths(config)
    keys_and_values = 4 * stack.layers * config.dim * kv_width
    queries_and_head = 4 * stack.layers * config.dim * width + 2 * config.target_size * config.dim
    pairs = target_length * source_length
    cross = _attention_flops(stack, config.resolved_cross_score, target_length, lambda spec: pairs)
    return Flops(
        source_length * (encoder.weights + keys_and_values)
        + target_length * (decoder.weights + queries_and_head),
        source_length * encoder.attention + target_length * decoder.attention + cross,
    )


def stack_flops(config: StackConfig, length: int) -> Flops:
    """FLOPs per token of a stack without embedding and head; `InputError` for a length below 1."""
    require_sizes("FLOPs", length=length)
    attention = _attention_flops(
        config, config.score, length, lambda spec: visible_pairs(spec, length, config.causal)
    )
    return Flops(2.0 * _matrices(config), attention / length)


@lru_cache(maxsize=256)
def _matrices(config: StackConfig) -> int:
    """The weights in the matrices of all layers; shared ones count for each layer."""
    with on_meta():
        blocks = Blocks(config)
    weights = sum(x.weight.numel() for x in blocks.modules() if isinstance(x, nn.Linear))
    return weights * config.layers // len(blocks)


def visible_pairs(score: ScoreSpec, length: int, causal: bool = True) -> int:
    """The number of visible pairs of a query and a key among `length` tokens.

    Query i sees key j where j ≤ i (causal), |i − j| < window or j < sinks, and ⌊i/c⌋ = ⌊j/c⌋.
    """
    window, sinks = score.window
    chunk = length if score.chunk is None else score.chunk
    query = np.arange(length)
    begin = query // chunk * chunk
    end = query if causal else np.minimum(begin + chunk, length) - 1
    low, high = begin, end
    if window is not None:
        low, high = np.maximum(begin, query - window + 1), np.minimum(end, query + window - 1)
    # Sink tokens outside the window.
    outside = (np.minimum(low, sinks) - begin).clip(min=0)
    return int((high - low + 1 + outside).sum())


def _widths(config: StackConfig) -> tuple[int, int]:
    """The total width of the values of all query heads, and of all key heads."""
    if config.block == "gau":
        return config.expansion * config.dim, config.key_size
    size = config.score_head_dim
    return config.heads * size, (config.kv_heads or config.heads) * size


def _attention_flops(
    config: StackConfig, score: ScoreSpec, queries: int, pairs_of: Callable[[ScoreSpec], int]
) -> float:
    """FLOPs of scores and weighted values of `queries` in all layers."""
    heads, size = config.heads, config.score_head_dim
    flops = 0.0
    for layer in range(config.layers):
        spec = score.layer(layer, config.layers)
        pairs = pairs_of(spec)
        position: Any = spec.position
        bias: Any = spec.bias
        # Each head of a differential pair reads the values of both.
        value = _widths(config)[0] // heads * (1 if spec.difference is None else 2)
        # A position may widen queries and keys.
        score_size = max(size, position.rotary_dim(size)) if position.rotary else size
        flops += 2.0 * pairs * heads * (score_size + value)
        if bias is not None and bias.name == "FIRE":
            # An MLP with one hidden layer for each pair, with an output for each head.
            flops += 2.0 * pairs * bias.width * (1 + heads)
        elif bias is not None and bias.name == "XLNet":
            # Projected sinusoids of each distance, multiplied with queries.
            flops += 2.0 * heads * heads * size * (pairs + queries * size)
        elif bias is not None and bias.name == "CoPE":
            flops += 2.0 * queries * heads * bias.positions * size
        elif bias is not None and bias.name == "NEZHA":
            # Queries, and the weights summed by distance, times each clipped distance's vector.
            flops += 2.0 * queries * heads * (2 * bias.clip + 1) * (size + value)
    return flops
