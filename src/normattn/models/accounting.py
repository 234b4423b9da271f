"""What a model costs: parameters, and FLOPs per token."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from normattn.errors import InputError
from normattn.layers.feed_forward import swiglu_hidden
from normattn.models.causal_lm import CausalLM
from normattn.models.config import CausalLMConfig
from normattn.models.meta import on_meta
from normattn.models.stack_config import StackConfig


def parameter_count(model: nn.Module | CausalLMConfig) -> int:
    """The number of learned numbers of a model, one that is used twice counted once.

    Of a causal language model's configuration, its model's; `planned_parameters` counts others.
    """
    if isinstance(model, CausalLMConfig):
        return planned_parameters(CausalLM, model)
    return sum(parameter.numel() for parameter in model.parameters())


@lru_cache(maxsize=256)
def planned_parameters(model: Callable[[Any], nn.Module], config: Hashable) -> int:
    """`parameter_count` of `model(config)`, built without memory (on torch's meta device).

    A sweep asks for the same few configurations again and again: answers are remembered.
    """
    with on_meta():
        return parameter_count(model(config))


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token; a multiplication and an addition count as two.

    `weights` are the matmuls with weights, the head among them; `attention` the scores and the
    weighted values of the pairs that are needed: causal attention's (length + 1)/2 a token.
    Elementwise work (norms, rotations, softmax, gates) is left out: it is linear in the width.
    """

    weights: float
    attention: float

    @property
    def forward(self) -> float:
        """One forward pass."""
        return self.weights + self.attention

    @property
    def training(self) -> float:
        """Forward and backward: the gradients of both factors of each matmul, so three times."""
        return 3 * self.forward


def flops_per_token(config: CausalLMConfig, length: int) -> Flops:
    """FLOPs per token of `config`'s model on sequences of `length` tokens.

    A post-hoc method with two regimes touches the same number of pairs. Raises `InputError` for
    a length below 1.
    """
    stack = stack_flops(config, length)
    return Flops(stack.weights + 2.0 * config.vocab_size * config.dim, stack.attention)


def stack_flops(config: StackConfig, length: int) -> Flops:
    """FLOPs per token of a stack of blocks, without embedding and head.

    Where the stack is not causal every token sees all `length`. Raises `InputError` for a length
    below 1.
    """
    if length < 1:
        raise InputError(f"FLOPs were asked for at a length of {length}; it must be at least 1")
    if config.block == "gau":
        value = config.expansion * config.dim
        matrices = (
            config.dim * (2 * value + config.key_size * (1 + config.separate_qk))
            + value * config.dim
        )
        matrices += _gates(config, 1, value)
        pair = config.key_size + value
    else:
        width = config.heads * config.score_head_dim
        kv_width = (config.kv_heads or config.heads) * config.score_head_dim
        matrices = config.dim * (width + 2 * kv_width) + width * config.dim
        matrices += _feed_forward_size(config)
        matrices += _gates(config, config.heads, config.score_head_dim)
        # Each head of a pair reads the values of both.
        pair = (2 if config.score.difference is None else 3) * width
    seen = (length + 1) / 2 if config.causal else float(length)
    return Flops(2.0 * config.layers * matrices, 2 * config.layers * pair * seen)


def _gates(config: StackConfig, heads: int, size: int) -> int:
    """Weights of an output gate and of a forgetting gate, where the score has one."""
    gate = config.score.gate
    rows = 0 if gate is None else heads * (size if gate.per == "feature" else 1)
    return config.dim * (rows + (heads if config.score.forgets else 0))


def _feed_forward_size(config: StackConfig) -> int:
    if config.feed_forward == "swiglu":
        return 3 * config.dim * (config.hidden or swiglu_hidden(config.dim))
    return 2 * config.dim * (config.hidden or 4 * config.dim)
