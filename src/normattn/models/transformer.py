"""The stack of Transformer blocks that every model is made of.

Legend: B batch, T tokens, S tokens in all, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normattn.errors import InputError
from normattn.kernels.stats import observers, unobserved
from normattn.layers.attention import Attention
from normattn.layers.cache import KeyValueCache
from normattn.layers.cross_attention import CrossAttention, Memory
from normattn.layers.feed_forward import GELU, SwiGLU
from normattn.layers.gau import GatedAttentionUnit
from normattn.layers.norms import Derf, DyT, LayerNorm, RMSNorm
from normattn.layers.residual import (
    NGPT,
    AttnRes,
    DeepNorm,
    FixedScale,
    LayerOutputs,
    Placed,
    PostLN,
    PreLN,
    ReZero,
)
from normattn.layers.residual_scores import ResidualLayer, residual_layers
from normattn.models.config import StackConfig
from normattn.models.utils import checked_ids, embed
from normattn.plain import plain_operations, use_plain_ops
from normattn.score import ScoreSpec

Stream = Float[Tensor, "b t d"] | LayerOutputs
"""What runs through the blocks: the residual stream, or all outputs so far (`AttnRes`)."""
AfterLayer = Callable[[int, Tensor], None]
"""Called with each layer's number, from 0, and its output (B, T, D)."""


@dataclass(frozen=True)
class AttentionContext:
    """What every layer must know of all S tokens; without `positions` they are 0 … S − 1.

    `causal`: a token sees those before it and itself only. `query_padding` says which tokens no
    statistics should count, `key_padding` where it is not given. `residual` holds the residual
    scores of the layers below. `backend` names the kernel, as in `attention`.
    """

    key_padding: Bool[Tensor, "b s"] | None = None
    positions: Int[Tensor, "*b s"] | None = None
    documents: Int[Tensor, "b s"] | None = None
    causal: bool = True
    residual: ResidualLayer | None = None
    backend: str = "auto"
    query_padding: Bool[Tensor, "b t"] | None = None


class CrossContext(NamedTuple):
    """What a decoder's cross attention must know of its queries: the arguments of its `forward`."""

    positions: Int[Tensor, " t"] | None
    query_padding: Bool[Tensor, "b t"] | None
    residual: ResidualLayer | None
    backend: str


class TokenModel(nn.Module):
    """Embedding, blocks, and the norms around them: the body of every model of one text.

    PreLN and ReZero end in a norm; PostLN and DeepNorm, whose blocks end in one, normalise the
    embedding instead, so that every sub-layer reads a normalised stream; ReZeroNoNorm and
    FixedScale have no norm at all.
    """

    def __init__(self, config: StackConfig, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, config.dim)
        self.embedding_norm = first_norm(config)
        self.blocks = Blocks(config)
        self.final_norm = last_norm(config)

    def read(
        self,
        ids: Int[Tensor, "b t"],
        context: AttentionContext,
        caches: Sequence[KeyValueCache | None] | None = None,
        after: AfterLayer | None = None,
        vocabulary: str | None = None,
    ) -> Float[Tensor, "b t d"]:
        """The last block's output after the final norm.

        `after(layer, x)` is called with the output of every layer, and as layer −1 with what the
        first one reads; `vocabulary` is for the error about an id outside it.
        """
        with plain_operations(context.backend == "reference"):
            x = embed(self.embedding, self.embedding_norm, checked_ids(ids), vocabulary)
            if after is not None:
                after(-1, x)
            x = self.blocks(x, context, caches, after)
            last: Tensor = x if self.final_norm is None else self.final_norm(x)
            return last


class Blocks(nn.ModuleList):
    """The blocks of a `StackConfig`, bottom first; with `shared_layers` one block, used again.

    `blocks(x, context)` runs them all; x and the result are (B, T, D). With `across`, the score of
    a cross attention, they are a decoder's. Residual scores live for one call.
    `activation_checkpointing`: with gradients a block keeps its input alone and computes the rest
    again in the backward pass (see `set_activation_checkpointing`).
    """

    def __init__(self, config: StackConfig, across: ScoreSpec | None = None) -> None:
        own = 1 if config.shared_layers else config.layers
        super().__init__(Block(config, layer, across) for layer in range(own))
        self.layers = config.layers
        self.activation_checkpointing = False
        self._score, self._across = config.score, across
        self._eps = config.norm_eps
        self.query = (
            nn.Parameter(torch.zeros(config.dim)) if config.placement == "AttnRes" else None
        )

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        context: AttentionContext | None = None,
        caches: Sequence[KeyValueCache | None] | None = None,
        after: AfterLayer | None = None,
        memories: Sequence[Memory] | None = None,
        positions: Int[Tensor, " t"] | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Every layer in turn; `after` is called with every output.

        `caches` has one for each layer. A decoder needs `memories`, one for each block, and reads
        them from `positions`, if its cross attention has any. Raises `InputError` for memories
        without cross attention, and for cross attention without memories.
        """
        context = AttentionContext() if context is None else context
        contexts = self._layer_contexts(self._score, context)
        crossing: Sequence[CrossContext | None] = [None] * self.layers
        if memories is not None and self._across is None:
            raise InputError("memories are for cross attention, which these blocks do not have")
        if memories is None and self._across is not None:
            raise InputError("blocks with cross attention need memories, one for each of them")
        if self._across is not None:
            crossing = self._cross_contexts(self._across, context, positions, x.shape[1])
        stream: Stream = x if self.query is None else LayerOutputs((x,))
        for layer in range(self.layers):
            block: Any = self[layer % len(self)]
            cache = None if caches is None else caches[layer]
            memory = None if memories is None else memories[layer % len(self)]
            arguments = stream, contexts[layer], cache, memory, crossing[layer]
            if self._recomputes:
                stream = checkpoint(block, *arguments, use_reentrant=False, **_as_in_forward())
            else:
                stream = block(*arguments)
            if after is not None:
                after(layer, self._output(stream))
        return self._output(stream)

    def _output(self, stream: Stream) -> Float[Tensor, "b t d"]:
        """What is read of the stream: itself, or a mixture of all layers' outputs (AttnRes)."""
        if isinstance(stream, LayerOutputs):
            assert self.query is not None
            return stream.mixed(self.query, self._eps)
        return stream

    def remember(
        self, source: Float[Tensor, "b s d"], padding: Tensor | None, positions: Tensor
    ) -> tuple[Memory, ...]:
        """The keys and values that each block of a decoder reads of a source."""
        crosses: list[Any] = [block.cross for block in self if isinstance(block, Block)]
        return tuple(cross.sublayer.remember(source, padding, positions) for cross in crosses)

    @property
    def specs(self) -> list[ScoreSpec]:
        """The active self-attention score of every layer."""
        blocks: list[Any] = list(self)
        return [blocks[n % len(self)].mixer.sublayer.score.spec for n in range(self.layers)]

    @property
    def _recomputes(self) -> bool:
        return self.activation_checkpointing and torch.is_grad_enabled()

    def _layer_contexts(
        self, score: ScoreSpec, context: AttentionContext
    ) -> list[AttentionContext]:
        """The context of every layer of one forward pass, with its residual scores."""
        residual = residual_layers(score, self.layers)
        if residual is None:
            return [context] * self.layers
        context = replace(context, backend=self._backend(score, context.backend))
        return [replace(context, residual=layer) for layer in residual]

    def _cross_contexts(
        self, score: ScoreSpec, context: AttentionContext, positions: Tensor | None, tokens: int
    ) -> list[CrossContext]:
        """What the cross attention of every layer must know, with its residual scores."""
        padding = context.query_padding
        if padding is None and context.key_padding is not None:
            padding = context.key_padding[:, -tokens:]
        residual = residual_layers(score, self.layers) or (None,) * self.layers
        backend = self._backend(score, context.backend)
        return [CrossContext(positions, padding, layer, backend) for layer in residual]

    def _backend(self, score: ScoreSpec, backend: str) -> str:
        """The kernel to ask for: recomputed layers cannot fill a buffer of summed scores again.

        The queries and keys of all layers, side by side, can be made once more.
        """
        summed = score.residual is not None and score.residual.summed == "scores"
        return "concatenated" if self._recomputes and summed and backend == "auto" else backend


class Block(nn.Module):
    """Attention, in a decoder cross attention, and a feed-forward layer; or one gated unit.

    Each is a sub-layer in the configured placement of norm and residual. `layer` counts from 0;
    `across` is the score of a decoder's cross attention.
    """

    def __init__(self, config: StackConfig, layer: int, across: ScoreSpec | None = None) -> None:
        super().__init__()
        score = config.score.layer(layer, config.layers)
        self.cross: nn.Module | None = None
        self.feed_forward: nn.Module | None = None
        if config.block == "gau":
            unit = GatedAttentionUnit(
                config.dim,
                config.key_size,
                config.expansion,
                score,
                separate_qk=config.separate_qk,
                dropout=config.dropout,
            )
            self.mixer: nn.Module = place(config, unit)
            return
        heads = config.dim, config.heads, config.kv_heads
        more: dict[str, Any] = {"head_dim": config.head_dim, "dropout": config.dropout}
        self.mixer = place(config, Attention(*heads, score, qkv_bias=config.qkv_bias, **more))
        if across is not None:
            spec = across.layer(layer, config.layers)
            self.cross = place(config, CrossAttention(*heads, spec, **more))
        kind = SwiGLU if config.feed_forward == "swiglu" else GELU
        self.feed_forward = place(config, kind(config.dim, config.hidden))

    def forward(
        self,
        x: Stream,
        context: AttentionContext,
        cache: KeyValueCache | None = None,
        memory: Memory | None = None,
        crossing: CrossContext | None = None,
    ) -> Stream:
        """The block's output; `cache` is its layer's, `memory` what its cross attention reads."""
        x = self.mixer(x, cache=cache, **vars(context))
        if self.cross is not None and crossing is not None:
            x = self.cross(x, memory=memory, **crossing._asdict())
        return x if self.feed_forward is None else self.feed_forward(x)


def place(config: StackConfig, sublayer: nn.Module) -> Placed:
    """A sub-layer in the configured placement of norm and residual."""
    dropout = config.dropout
    if config.placement == "FixedScale":
        return FixedScale(sublayer, dropout=dropout)
    if config.placement == "ReZeroNoNorm":
        return ReZero(sublayer, None, dropout)
    norm = make_norm(config)
    if config.placement == "DeepNorm":
        return DeepNorm(sublayer, norm, config.deepnorm[0], dropout)
    if config.placement == "nGPT":
        return NGPT(sublayer, norm, config.dim, dropout)
    if config.placement == "AttnRes":
        size = config.residual_block
        return AttnRes(sublayer, norm, config.dim, dropout, block=size, eps=config.norm_eps)
    kinds: dict[str, type[Placed]] = {"PreLN": PreLN, "PostLN": PostLN, "ReZero": ReZero}
    return kinds[config.placement](sublayer, norm, dropout)


def make_norm(config: StackConfig) -> nn.Module:
    """One norm over the width, or what takes its place, of the configured kind."""
    dim, eps, gain = config.dim, config.norm_eps, config.norm_gain
    if config.norm in ("dyt", "derf"):
        return (DyT if config.norm == "dyt" else Derf)(dim, gain=gain)
    if config.placement == "nGPT":
        return RMSNorm(dim, eps, gain=False)
    if config.norm == "layer":
        return LayerNorm(dim, eps, gain=gain, bias=gain)
    return RMSNorm(dim, eps, gain=gain, eps_placement=config.eps_placement)


def first_norm(config: StackConfig) -> nn.Module | None:
    """The norm of the embedding, where the blocks end in a norm."""
    return make_norm(config) if config.ends_in_norm else None


def last_norm(config: StackConfig) -> nn.Module | None:
    """The norm after the last block, where blocks do not end in one and there are norms at all."""
    return make_norm(config) if config.has_norms and not config.ends_in_norm else None


def set_activation_checkpointing(model: nn.Module, on: bool = True) -> None:
    """Let the blocks of a model compute their activations again in the backward pass, or not.

    Memory for activations falls to the blocks' inputs, for about a third more computation; the
    gradients are the same, for every score. Raises `InputError` for a model without blocks of ours.
    """
    stacks = [module for module in model.modules() if isinstance(module, Blocks)]
    if not stacks:
        raise InputError(
            f"activation checkpointing needs a model of normattn's blocks; a "
            f"{type(model).__name__} has none"
        )
    for stack in stacks:
        stack.activation_checkpointing = on


def _as_in_forward() -> dict[str, Any]:
    """How to recompute a block: by the same operations and kernels, seen by nobody a second time.

    A backward pass runs outside of what was switched on for the forward one.
    """
    if torch.compiler.is_compiling():
        return {}
    plainly, observed = use_plain_ops(), bool(observers())

    @contextmanager
    def recomputed() -> Iterator[None]:
        with plain_operations(plainly), unobserved(observed):
            yield

    return {"context_fn": lambda: (nullcontext(), recomputed())}
