"""The stack of Transformer blocks that all models share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normattn import layers
from normattn.errors import InputError
from normattn.kernels.stats import observers, unobserved
from normattn.layers.cache import KeyValueCache
from normattn.layers.cross_attention import Memory
from normattn.layers.residual import FixedScale, LayerOutputs, ResidualConnection
from normattn.layers.residual_scores import ResidualLayer, residual_layers
from normattn.models.config import NORMLESS, StackConfig
from normattn.models.utils import checked_ids, embed
from normattn.plain import plain_operations, use_plain_ops
from normattn.score import ScoreSpec

Stream = Float[Tensor, "b t d"] | LayerOutputs
"""The residual stream, or with `AttnRes` the outputs of all sub-layers so far."""
AfterLayer = Callable[[int, Tensor], None]
"""Called with the index of each layer, from 0, and its output (B, T, D)."""
AnyContext = TypeVar("AnyContext", "AttentionContext", "CrossContext")


@dataclass(frozen=True)
class AttentionContext:
    """The arguments of self-attention that all layers share, for all S tokens.

    `query_padding`, by default `key_padding`, leaves tokens out of statistics. `residual` is a
    layer's (`residual_layers`); `backend` is as in `attention`.
    """

    key_padding: Bool[Tensor, "b s"] | None = None
    documents: Int[Tensor, "b s"] | None = None
    causal: bool = True
    residual: ResidualLayer | None = None
    backend: str = "auto"
    query_padding: Bool[Tensor, "b t"] | None = None


@dataclass(frozen=True)
class CrossContext:
    """The arguments of a decoder's cross-attention, for all T target tokens."""

    positions: Int[Tensor, " t"] | None
    query_padding: Bool[Tensor, "b t"] | None
    backend: str
    residual: ResidualLayer | None = None


class TokenModel(nn.Module):
    """Base class of models of one token sequence: embedding, blocks, and the norms around them.

    PreLN, ReZero and AttnRes end in a norm. With PostLN, DeepNorm and nGPT, whose blocks end in
    one, the embedding is normalised, so every sub-layer reads a normalised stream. ReZeroNoNorm and
    FixedScale have none.

    In all models `backend` is the kernel of every layer, as in `attention`: with "reference" the
    whole model is plain operations, for any derivative and torch.func. Weights are drawn from
    torch's global generator (`initialise`). Ids outside the vocabulary raise `InputError` (on CPU).
    """

    def __init__(self, config: StackConfig, num_embeddings: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_embeddings, config.dim)
        self.embedding_norm, final_norm = make_outer_norms(config)
        self.blocks = Blocks(config)
        self.final_norm = final_norm

    def hidden_states(
        self,
        ids: Int[Tensor, "b t"],
        context: AttentionContext,
        caches: Sequence[KeyValueCache | None] | None = None,
        after: AfterLayer | None = None,
    ) -> Float[Tensor, "b t d"]:
        """The last block's output after the final norm.

        `after(layer, x)` is called with the output of each layer, and with layer −1 for the input
        of the first one.
        """
        with plain_operations(context.backend == "reference"):
            x = embed(self.embedding, self.embedding_norm, checked_ids(ids))
            if after is not None:
                after(-1, x)
            x = self.blocks(x, context, caches, after)
            hidden: Tensor = x if self.final_norm is None else self.final_norm(x)
            return hidden


class Blocks(nn.ModuleList):
    """The blocks of a `StackConfig`, bottom first; with `shared_layers` one block for all layers.

    `blocks(x, context)` runs all of them: (B, T, D) → (B, T, D). A decoder has a `cross_score` for
    its cross-attention. With `activation_checkpointing` a block keeps only its input and recomputes
    the rest in the backward pass (see `set_activation_checkpointing`).
    """

    def __init__(self, config: StackConfig, cross_score: ScoreSpec | None = None) -> None:
        num_blocks = 1 if config.shared_layers else config.layers
        super().__init__(Block(config, layer, cross_score) for layer in range(num_blocks))
        self.layers = config.layers
        self.activation_checkpointing = False
        self._score, self._cross_score = config.score, cross_score
        self._eps = config.norm_eps
        attn_res = config.placement == "AttnRes"
        self.query = nn.Parameter(torch.zeros(config.dim)) if attn_res else None

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        context: AttentionContext,
        caches: Sequence[KeyValueCache | None] | None = None,
        after: AfterLayer | None = None,
        memories: Sequence[Memory] | None = None,
        positions: Int[Tensor, " t"] | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Run all layers; `after` is called with the output of each.

        `caches` has one for each layer. A decoder needs `memories`, one for each block, and the
        `positions` of its queries if its cross-attention uses positions.
        """
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        cross = CrossContext(positions, context.query_padding, context.backend)
        contexts = self._for_layers(context, self._score, recompute)
        cross_contexts = self._for_layers(cross, self._cross_score, recompute)
        stream: Stream = x if self.query is None else LayerOutputs((x,))
        for layer in range(self.layers):
            block: Any = self[layer % len(self)]
            cache = None if caches is None else caches[layer]
            memory = None if memories is None else memories[layer % len(self)]
            args = stream, contexts[layer], cache, memory, cross_contexts[layer]
            if recompute:
                stream = checkpoint(block, *args, use_reentrant=False, **_recompute_options())
            else:
                stream = block(*args)
            if after is not None:
                after(layer, self._output(stream))
        return self._output(stream)

    def _for_layers(
        self, context: AnyContext, score: ScoreSpec | None, recompute: bool
    ) -> list[AnyContext]:
        """The context of each layer, with its residual."""
        if score is None or score.residual is None:
            return [context] * self.layers
        if recompute and score.residual.summed == "scores" and context.backend == "auto":
            # Recomputed layers cannot fill a buffer of summed scores again.
            context = replace(context, backend="concatenated")
        residual = residual_layers(score, self.layers) or ()
        return [replace(context, residual=layer) for layer in residual]

    def _output(self, stream: Stream) -> Float[Tensor, "b t d"]:
        """The stream, or with AttnRes the mixture of all outputs."""
        if isinstance(stream, LayerOutputs):
            assert self.query is not None
            return stream.mixed(self.query, self._eps)
        return stream

    def remember(
        self, source: Float[Tensor, "b s d"], padding: Tensor | None, positions: Tensor
    ) -> tuple[Memory, ...]:
        """Compute keys and values of a source for the cross-attention of each block."""
        blocks: list[Any] = list(self)
        return tuple(block.remember(source, padding, positions) for block in blocks)

    @property
    def specs(self) -> list[ScoreSpec]:
        """The active self-attention score of every layer."""
        blocks: list[Any] = list(self)
        return [blocks[n % len(self)].mixer.sublayer.score.spec for n in range(self.layers)]


class Block(nn.Module):
    """Attention, a decoder's cross-attention, and feed-forward; or one gated attention unit.

    Each is wrapped in the configured placement of norm and residual. `layer` counts from 0.
    """

    def __init__(
        self, config: StackConfig, layer: int, cross_score: ScoreSpec | None = None
    ) -> None:
        super().__init__()
        score = config.score.layer(layer, config.layers)
        self.cross: nn.Module | None = None
        self.feed_forward: nn.Module | None = None
        if config.block == "gau":
            gau_sizes = config.dim, config.key_size, config.expansion
            options: dict[str, Any] = {"dropout": config.dropout, "separate_qk": config.separate_qk}
            unit = layers.GatedAttentionUnit(*gau_sizes, score, **options)
            self.mixer: nn.Module = wrap_sublayer(config, unit)
            return
        sizes = config.dim, config.heads, config.kv_heads
        options = {"dropout": config.dropout, "head_dim": config.head_dim}
        attention = layers.Attention(*sizes, score, qkv_bias=config.qkv_bias, **options)
        self.mixer = wrap_sublayer(config, attention)
        if cross_score is not None:
            spec = cross_score.layer(layer, config.layers)
            self.cross = wrap_sublayer(config, layers.CrossAttention(*sizes, spec, **options))
        kind = layers.SwiGLU if config.feed_forward == "swiglu" else layers.GELU
        self.feed_forward = wrap_sublayer(config, kind(config.dim, config.hidden))

    def forward(
        self,
        x: Stream,
        context: AttentionContext,
        cache: KeyValueCache | None = None,
        memory: Memory | None = None,
        cross_context: CrossContext | None = None,
    ) -> Stream:
        """The block's output; cross-attention reads `memory`."""
        x = self.mixer(x, cache=cache, **vars(context))
        if self.cross is not None and cross_context is not None:
            x = self.cross(x, memory=memory, **vars(cross_context))
        return x if self.feed_forward is None else self.feed_forward(x)

    def remember(self, *source: Any) -> Memory:
        """Compute keys and values for the cross-attention; a method that FSDP can wrap."""
        cross: Any = self.cross
        memory: Memory = cross.sublayer.remember(*source)
        return memory


def wrap_sublayer(config: StackConfig, sublayer: nn.Module) -> ResidualConnection:
    """Wrap a sub-layer in the configured placement of norm and residual."""
    dim, dropout = config.dim, config.dropout
    match config.placement:
        case "FixedScale":
            return FixedScale(sublayer, dropout=dropout)
        case "ReZeroNoNorm":
            return layers.ReZero(sublayer, None, dropout)
        case "DeepNorm":
            return layers.DeepNorm(sublayer, make_norm(config), config.deepnorm[0], dropout)
        case "nGPT":
            return layers.NGPT(sublayer, make_norm(config), dim, dropout)
        case "AttnRes":
            block, eps = config.residual_block, config.norm_eps
            return layers.AttnRes(sublayer, make_norm(config), dim, dropout, block=block, eps=eps)
        case _:
            kinds = {"PreLN": layers.PreLN, "PostLN": layers.PostLN, "ReZero": layers.ReZero}
            return kinds[config.placement](sublayer, make_norm(config), dropout)


def make_norm(config: StackConfig) -> nn.Module:
    """The configured norm over the width, or its replacement."""
    dim, eps, gain = config.dim, config.norm_eps, config.norm_gain
    if config.norm in ("dyt", "derf"):
        return (layers.DyT if config.norm == "dyt" else layers.Derf)(dim, gain=gain)
    if config.placement == "nGPT":
        return layers.RMSNorm(dim, eps, gain=False)
    if config.norm == "layer":
        return layers.LayerNorm(dim, eps, gain=gain)
    return layers.RMSNorm(dim, eps, gain=gain, eps_placement=config.eps_placement)


def make_outer_norms(config: StackConfig) -> tuple[nn.Module | None, nn.Module | None]:
    """The norms before the first block, where blocks end in a norm, or else after the last one."""
    norm = None if config.placement in NORMLESS else make_norm(config)
    return (norm, None) if config.placement in ("PostLN", "DeepNorm", "nGPT") else (None, norm)


def set_activation_checkpointing(model: nn.Module, on: bool = True) -> None:
    """Switch activation checkpointing of a model on or off.

    The backward pass then recomputes the activations within each block: only the blocks' inputs are
    kept, for about a third more computation. Gradients are the same for every score. Raises
    `InputError` for a model without `Blocks`.
    """
    stacks = [module for module in model.modules() if isinstance(module, Blocks)]
    if not stacks:
        raise InputError(
            f"activation checkpointing needs a model of normattn's blocks; a "
            f"{type(model).__name__} has none"
        )
    for stack in stacks:
        stack.activation_checkpointing = on


def _recompute_options() -> dict[str, Any]:
    """Options that make `checkpoint` recompute a block with the same kernels, without observers."""
    if torch.compiler.is_compiling():
        return {}
    plain_ops, observed = use_plain_ops(), bool(observers())

    @contextmanager
    def recomputed() -> Iterator[None]:
        with plain_operations(plain_ops), unobserved(observed):
            yield

    return {"context_fn": lambda: (nullcontext(), recomputed())}
