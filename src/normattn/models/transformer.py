"""Stacks of Transformer blocks: an encoder's, a decoder-only model's, a translator's decoder.

Legend: B batch, T tokens, S tokens in all, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normattn.errors import InputError
from normattn.layers.attention import Attention
from normattn.layers.cache import KeyValueCache
from normattn.layers.cross_attention import CrossAttention, Memory
from normattn.layers.feed_forward import GELU, SwiGLU
from normattn.layers.gau import GatedAttentionUnit
from normattn.layers.norms import LayerNorm, RMSNorm
from normattn.layers.residual import DeepNorm, FixedScale, PostLN, PreLN, ReZero
from normattn.layers.residual_scores import ResidualLayer, residual_layers
from normattn.models.config import DecoderConfig, StackConfig
from normattn.score import Score, ScoreSpec

AfterLayer = Callable[[int, Tensor], None]
"""Called with each layer's number, from 0, and its output (B, T, D)."""


@dataclass(frozen=True)
class AttentionContext:
    """What every layer must know of all S tokens; None where tokens are simply counted.

    `causal`: a token sees those before it and itself only. `residual` is what the layers below hand
    on to this one. `backend` names the kernel, as in `attention`.
    """

    key_padding: Bool[Tensor, "b s"] | None = None
    positions: Int[Tensor, "b s"] | None = None
    documents: Int[Tensor, "b s"] | None = None
    causal: bool = True
    residual: ResidualLayer | None = None
    backend: str = "auto"


class Block(nn.Module):
    """An attention sub-layer, then, if there is one, a feed-forward sub-layer."""

    def __init__(self, mixer: nn.Module, feed_forward: nn.Module | None) -> None:
        super().__init__()
        self.mixer = mixer
        self.feed_forward = feed_forward

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        context: AttentionContext | None = None,
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "b t d"]:
        """The block's output; `cache` is its layer's."""
        context = context or AttentionContext()
        x = self.mixer(
            x,
            causal=context.causal,
            key_padding=context.key_padding,
            positions=context.positions,
            documents=context.documents,
            cache=cache,
            residual=context.residual,
            backend=context.backend,
        )
        return x if self.feed_forward is None else self.feed_forward(x)


class BlockList(nn.ModuleList):
    """Blocks of `layers` layers, bottom first; a single block is used for every layer.

    `activation_checkpointing`: in training a block keeps its input alone and computes the rest
    again in the backward pass (see `set_activation_checkpointing`).
    """

    def __init__(self, blocks: Iterator[nn.Module], layers: int) -> None:
        super().__init__(blocks)
        self.layers = layers
        self.activation_checkpointing = False

    @property
    def recomputes(self) -> bool:
        """Whether the activations of this forward pass are computed once more."""
        return self.activation_checkpointing and torch.is_grad_enabled()

    def contexts(self, score: ScoreSpec, context: AttentionContext) -> list[AttentionContext]:
        """The context of every layer of one forward pass, with what residual scores need."""
        residual = residual_layers(score, self.layers)
        if residual is None:
            return [context] * self.layers
        assert score.residual is not None
        if self.recomputes and score.residual.carries == "scores" and context.backend == "auto":
            # A buffer of summed scores cannot be filled once more in a backward pass; the queries
            # and keys of all layers, side by side, can.
            context = replace(context, backend="concatenated")
        return [replace(context, residual=layer) for layer in residual]

    def run(self, layer: int, *arguments: Any) -> Tensor:
        """The output of one layer's block."""
        block = self[layer % len(self)]
        x: Tensor
        if not self.recomputes:
            x = block(*arguments)
            return x
        recomputed: dict[str, Any] = {}
        if any(True for _ in block.buffers()) and not torch.compiler.is_compiling():
            recomputed["context_fn"] = lambda: (nullcontext(), _buffers_kept(block))
        x = checkpoint(block, *arguments, use_reentrant=False, **recomputed)
        return x


@contextmanager
def _buffers_kept(block: nn.Module) -> Iterator[None]:
    """Running statistics, which the forward pass has taken already, are not taken once more."""
    before = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def set_activation_checkpointing(model: nn.Module, on: bool = True) -> None:
    """Let the blocks of a model compute their activations again in the backward pass, or not.

    Memory for activations falls to the blocks' inputs, for about a third more computation; the
    gradients are the same, for every score. Raises `InputError` for a model without blocks of ours.
    """
    stacks = [module for module in model.modules() if isinstance(module, BlockList)]
    if not stacks:
        raise InputError(
            f"activation checkpointing needs a model of normattn's blocks; a "
            f"{type(model).__name__} has none"
        )
    for stack in stacks:
        stack.activation_checkpointing = on


class Blocks(BlockList):
    """The blocks of a `StackConfig`; with `shared_layers` one block, used again.

    `blocks(x, context)` runs them all; x and the result are (B, T, D). Residual scores live for one
    call.
    """

    def __init__(self, config: StackConfig) -> None:
        own = 1 if config.shared_layers else config.layers
        super().__init__((make_block(config, layer) for layer in range(own)), config.layers)
        self._score = config.score

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        context: AttentionContext | None = None,
        caches: Sequence[KeyValueCache | None] | None = None,
        after: AfterLayer | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Every layer in turn; `caches` has one for each, `after` is called with every output."""
        contexts = self.contexts(self._score, context or AttentionContext())
        for layer in range(self.layers):
            x = self.run(layer, x, contexts[layer], None if caches is None else caches[layer])
            if after is not None:
                after(layer, x)
        return x

    @property
    def specs(self) -> list[ScoreSpec]:
        """The active score of every layer."""
        specs = [module.spec for module in self.modules() if isinstance(module, Score)]
        return specs * (self.layers // len(specs))


class DecoderBlock(nn.Module):
    """A self-attention, a cross-attention and a feed-forward sub-layer, each in the placement."""

    def __init__(self, config: DecoderConfig, score: ScoreSpec, across: ScoreSpec) -> None:
        super().__init__()
        self.mixer = place(config, make_attention(config, score))
        self.cross = place(
            config,
            CrossAttention(
                config.dim,
                config.heads,
                config.kv_heads,
                across,
                head_dim=config.head_dim,
                dropout=config.dropout,
            ),
        )
        self.feed_forward = place(config, make_feed_forward(config))

    @property
    def cross_attention(self) -> CrossAttention:
        """The layer that reads the source."""
        layer = self.cross.sublayer
        assert isinstance(layer, CrossAttention)
        return layer

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        memory: Memory,
        positions: Int[Tensor, " t"],
        padding: Bool[Tensor, "b t"] | None = None,
        own: AttentionContext | None = None,
        across: AttentionContext | None = None,
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "b t d"]:
        """The block's output for tokens at `positions`.

        `padding`, on the right and so seen by nobody, is left out of statistics. `own` and `across`
        hold residual and kernel of self-attention and cross attention; `cache` is the former's.
        """
        own, across = own or AttentionContext(), across or AttentionContext()
        x = self.mixer(
            x,
            causal=True,
            query_padding=padding,
            cache=cache,
            residual=own.residual,
            backend=own.backend,
        )
        x = self.cross(
            x,
            memory=memory,
            positions=positions,
            query_padding=padding,
            residual=across.residual,
            backend=across.backend,
        )
        y: Tensor = self.feed_forward(x)
        return y


class DecoderBlocks(BlockList):
    """The blocks of a translator's decoder; with `shared_layers` one block, used again.

    Self-attention and cross attention have residual scores of their own, which live for one call.
    """

    def __init__(self, config: DecoderConfig, across: ScoreSpec) -> None:
        layers = config.layers
        blocks = (
            DecoderBlock(config, config.score.layer(layer, layers), across.layer(layer, layers))
            for layer in range(1 if config.shared_layers else layers)
        )
        super().__init__(blocks, layers)
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
        backend: str = "auto",
    ) -> Float[Tensor, "b t d"]:
        """Every layer in turn; there is a memory for each block and a cache for each layer."""
        own, across = (
            self.contexts(score, AttentionContext(backend=backend)) for score in self._scores
        )
        for layer in range(self.layers):
            cache = None if caches is None else caches[layer]
            memory = memories[layer % len(self)]
            x = self.run(layer, x, memory, positions, padding, own[layer], across[layer], cache)
        return x

    @property
    def specs(self) -> list[ScoreSpec]:
        """The active self-attention score of every layer."""
        layers: list[Any] = [block.mixer.sublayer for block in self._blocks]
        return [layers[layer % len(layers)].score.spec for layer in range(self.layers)]

    @property
    def _blocks(self) -> list[DecoderBlock]:
        return [block for block in self if isinstance(block, DecoderBlock)]


def make_block(config: StackConfig, layer: int) -> Block:
    """The block of one layer, from 0, with that layer's score."""
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
        return Block(place(config, unit), None)
    attention, feed_forward = make_attention(config, score), make_feed_forward(config)
    return Block(place(config, attention), place(config, feed_forward))


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


def place(config: StackConfig, sublayer: nn.Module) -> nn.Module:
    """A sub-layer in the configured placement of norm and residual."""
    dropout = config.dropout
    if config.placement == "FixedScale":
        return FixedScale(sublayer, dropout=dropout)
    if config.placement == "ReZeroNoNorm":
        return ReZero(sublayer, None, dropout)
    norm = make_norm(config)
    if config.placement == "DeepNorm":
        return DeepNorm(sublayer, norm, config.deepnorm[0], dropout)
    kinds = {"PreLN": PreLN, "PostLN": PostLN, "ReZero": ReZero}
    return kinds[config.placement](sublayer, norm, dropout)


def make_norm(config: StackConfig) -> LayerNorm | RMSNorm:
    """One norm over the width, of the configured kind."""
    if config.norm == "layer":
        return LayerNorm(config.dim, config.norm_eps, gain=config.norm_gain, bias=config.norm_gain)
    return RMSNorm(
        config.dim,
        config.norm_eps,
        gain=config.norm_gain,
        eps_placement=config.eps_placement,
    )


def first_norm(config: StackConfig) -> nn.Module | None:
    """The norm of the embedding: where blocks end in one, so that every sub-layer reads one."""
    return make_norm(config) if config.ends_in_norm else None


def last_norm(config: StackConfig) -> nn.Module | None:
    """The norm after the last block, where blocks do not end in one and there are norms at all."""
    return make_norm(config) if config.has_norms and not config.ends_in_norm else None


# The standard deviation of a unit normal cut off at two, so that the result has the asked one.
_TRUNCATED_STD = 0.8796256610342398


@torch.no_grad()
def initialise(model: nn.Module, config: StackConfig) -> None:
    """Draw every weight matrix of `model` from a normal cut off at two deviations.

    The deviation is `init_std`, or 1/√fan-in where it is None (embedding: `embedding_std` where
    given; else 1/√dim, so that tied logits of a normalised stream have unit variance), times a
    gain that keeps a deep stack calm:

    - PreLN: the output weights of the M sub-layers by M^−½ (GPT-2);
    - DeepNorm: β of the stack on the value, output and feed-forward weights; with `init_std`
      None their deviation, and that of q and k, is Xavier's √(2/(fan-in + fan-out));
    - a gated attention unit under any placement but DeepNorm: every weight by N^−⅓, because three
      factors (u, v, W_out) multiply (GAU-α, kexue 9052); under DeepNorm β on v and W_out
      replaces it;
    - ReZero and PostLN with attention, and placements without norms: none.

    γ of a gated attention unit is drawn with the deviation `gamma_std` where there is one. Gains of
    norms, other γ, β and what a score learns keep the values that their modules gave them.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            deviation = config.embedding_std or config.init_std or config.dim**-0.5
            _draw(module.weight, deviation)
        elif isinstance(module, Attention):
            _attention(module, config)
        elif isinstance(module, CrossAttention):
            _cross_attention(module, config)
        elif isinstance(module, GatedAttentionUnit):
            _gated_attention_unit(module, config)
        elif isinstance(module, SwiGLU | GELU):
            _feed_forward(module, config)
    head = getattr(model, "head", None)
    if isinstance(head, nn.Linear):
        _draw(head.weight, config.init_std or config.dim**-0.5)


def _attention(layer: Attention, config: StackConfig) -> None:
    into, out = _branch_gains(config)
    kv = layer.kv_heads * layer.head_dim
    q, k, v = torch.split(layer.qkv.weight, [layer.heads * layer.head_dim, kv, kv])
    for weight, gain in ((q, 1.0), (k, 1.0), (v, into), (layer.out.weight, out)):
        _draw(weight, gain * _deviation(weight, config))
    if layer.qkv.bias is not None:
        layer.qkv.bias.zero_()
    _gates(layer, config)


def _cross_attention(layer: CrossAttention, config: StackConfig) -> None:
    into, out = _branch_gains(config)
    k, v = layer.kv.weight.chunk(2)
    for weight, gain in ((layer.q.weight, 1.0), (k, 1.0), (v, into), (layer.out.weight, out)):
        _draw(weight, gain * _deviation(weight, config))


def _feed_forward(layer: SwiGLU | GELU, config: StackConfig) -> None:
    into, out = _branch_gains(config)
    for weight in torch.split(layer.up.weight, layer.hidden):
        _draw(weight, into * _deviation(weight, config))
    _draw(layer.down.weight, out * _deviation(layer.down.weight, config))


def _gated_attention_unit(layer: GatedAttentionUnit, config: StackConfig) -> None:
    if config.placement == "DeepNorm":
        _, beta = config.deepnorm
        gate, value, key, out = 1.0, beta, 1.0, beta
    else:
        gate = value = key = out = config.layers ** (-1 / 3)
    u, v, *keys = torch.split(layer.expand.weight, layer.widths)
    weights = [(u, gate), (v, value), *((z, key) for z in keys), (layer.out.weight, out)]
    for weight, gain in weights:
        # Fan-in also under DeepNorm: swish and the gate already shrink what Xavier would shrink.
        _draw(weight, gain * (config.init_std or weight.shape[1] ** -0.5))
    if config.gamma_std is not None and layer.gamma is not None:
        _draw(layer.gamma, config.gamma_std)
    _gates(layer, config)


def _gates(layer: Attention | GatedAttentionUnit, config: StackConfig) -> None:
    """The projections that an output gate or a forgetting gate has, without a gain."""
    for gate in (layer.gate, layer.forget):
        if gate is not None:
            _draw(gate.weight, config.init_std or gate.in_features**-0.5)
            if gate.bias is not None:
                gate.bias.zero_()


def _branch_gains(config: StackConfig) -> tuple[float, float]:
    """The gains of a branch's first (value, up) and last (output, down) weights."""
    if config.placement == "DeepNorm":
        _, beta = config.deepnorm
        return beta, beta
    if config.placement == "PreLN":
        return 1.0, config.sublayers**-0.5
    return 1.0, 1.0


def _deviation(weight: Tensor, config: StackConfig) -> float:
    if config.init_std is not None:
        return config.init_std
    fan_out, fan_in = weight.shape
    if config.placement == "DeepNorm":
        return math.sqrt(2 / (fan_in + fan_out))
    return 1 / math.sqrt(fan_in)


def _draw(weight: Tensor, deviation: float) -> None:
    scale = deviation / _TRUNCATED_STD
    nn.init.trunc_normal_(weight, std=scale, a=-2 * scale, b=2 * scale)
