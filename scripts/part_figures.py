"""A small figure for every component of a score, computed by the component itself.

RoPE scaling draws its frequencies and log-n its factor. Other components draw the attention weights
of the same queries and keys: with the identity as values, attention returns its weights.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from normattn import Score, ScoreSpec, attention
from normattn.layers import residual_layers
from normattn.score.compatibility import example
from normattn.score.parts import LengthScaling, RopeScaling, Slot, rope_frequencies

TOKENS, LENGTH, FACTOR, HEADS, HEAD_DIM, LAYERS = 64, 16, 4.0, 4, 32, 4
# For these slots queries and keys are nearly equal, so that the pattern of positions is visible.
_BY_POSITION = {Slot.POSITION, Slot.REMAPPING, Slot.BIAS, Slot.WINDOW, Slot.LAYOUT, Slot.DOCUMENTS}


def figure(name: str) -> tuple[bytes, str]:
    """The PNG of a component, and its caption."""
    spec = _small(name)
    part = next(candidate for candidate in spec.parts if candidate.name == name)
    if isinstance(part, RopeScaling):
        return _png(1, lambda axes: _frequencies(axes[0], part, name)), (
            f"Radians per token of each feature pair, d = {HEAD_DIM}, L = {LENGTH}"
            f"{', third block of rows' if part.blockwise else f', factor {FACTOR:g}'}. "
            "Dashed: RoPE."
        )
    if isinstance(part, LengthScaling):
        return _png(1, lambda axes: _factor(axes[0], part)), (
            f"What λ is multiplied with, by the number of visible keys n; L = {LENGTH}."
        )
    maps = _weights(spec, noise=0.2 if part.slot in _BY_POSITION else 1.0)
    return _png(len(maps), lambda axes: _maps(axes, maps)), (
        f"Square roots of attention weights of the same random queries (rows) and keys (columns), "
        f"{TOKENS} tokens, L = {LENGTH}: {spec}."
    )


def _small(name: str) -> ScoreSpec:
    """The smallest score with this component, at a length that can be drawn."""
    text = "-".join(part.name for part in example(name).parts)
    return ScoreSpec.parse(text, train_length=LENGTH).resolve(factor=FACTOR)


def _frequencies(axis: Axes, part: RopeScaling, name: str) -> None:
    still = part.for_block(2, LENGTH)
    axis.semilogy(rope_frequencies(HEAD_DIM, 10000.0), "--", color="#888888")
    axis.semilogy(still.inverse_frequencies(HEAD_DIM, 10000.0, LENGTH), color="#3949ab", label=name)
    axis.set_xlabel("feature pair m")
    axis.set_ylabel("θ'")


def _factor(axis: Axes, part: LengthScaling) -> None:
    n = torch.arange(1, 8 * LENGTH + 1, dtype=torch.float64)
    factor, learned = part.factor(n, LENGTH), part.learned(1, LENGTH)
    if learned:
        factor = factor * part.learned_factor(n, learned)[0]
    axis.plot(n, factor, color="#3949ab")
    axis.axvline(LENGTH, color="#888888", linestyle="--", linewidth=0.8)
    axis.set_xlabel("visible keys n")
    axis.set_ylabel("factor of λ")


def _weights(spec: ScoreSpec, noise: float) -> dict[str, Tensor]:
    """Head 0's weights (T, T) by title: of one layer, or of the lowest and highest of a stack."""
    torch.manual_seed(0)
    shared = torch.randn(HEAD_DIM) * 0.7
    # Two query heads for each key head, where a component gates groups of heads.
    kv_heads = HEADS if spec.gate is None else spec.gate.outputs(HEADS)
    q, k = torch.randn(2, 1, HEADS, TOKENS, HEAD_DIM) * noise + shared
    k, values = k[:, :kv_heads], torch.eye(TOKENS).expand(1, kv_heads, TOKENS, TOKENS)
    documents = None
    if spec.documents is not None:
        documents = (torch.arange(TOKENS) // 24)[None]
    inputs = _of_input(spec)
    pairs = spec.difference is not None
    if pairs:
        # The attention of each head of a pair, before their outputs are combined.
        unpaired = (part for part in spec.parts if part.slot is not Slot.NORMALISER)
        spec = ScoreSpec(tuple(unpaired), spec.train_length)
    stacked = Slot.RESIDUAL in {part.slot for part in spec.parts} or spec.layout is not None
    layers = LAYERS if stacked else 1
    residual, drawn = residual_layers(spec, layers), {}
    for layer in range(layers):
        score = Score(spec.layer(layer, layers), HEADS, HEAD_DIM, kv_heads)
        out = attention(
            q,
            k,
            values,
            score,
            causal=not spec.leaks_future,
            documents=documents,
            residual=None if residual is None else residual[layer],
            backend="auto" if residual is not None else "reference",
            return_lse=False,
            **inputs,
        )
        if layer in (0, layers - 1):
            drawn[f"layer {layer + 1} of {layers}" if stacked else ""] = out[0, 0].detach()
    return {"first of a pair": out[0, 0], "second": out[0, 1]} if pairs else drawn


def _of_input(spec: ScoreSpec) -> dict[str, Any]:
    """Gate and forget logits, which a layer computes from its input; every eighth token forgets."""
    logits_by_name = {}
    if spec.gate is not None:
        logits = spec.gate.logits(HEADS, TOKENS)
        logits_by_name["gate"] = torch.linspace(-3, 3, TOKENS)[None, :, None].expand(1, -1, logits)
    if spec.forgets:
        every = torch.where(torch.arange(TOKENS) % 8 == 7, 0.0, 4.0)
        logits_by_name["forget"] = every[None, :, None].expand(1, -1, HEADS)
    return logits_by_name


def _maps(axes: list[Axes], maps: dict[str, Tensor]) -> None:
    for axis, (title, weights) in zip(axes, maps.items(), strict=True):
        axis.imshow(weights.abs().sqrt().numpy(), cmap="magma_r", vmin=0)
        axis.set_title(title, fontsize=8)
        axis.tick_params(labelsize=7)


def _png(panels: int, draw: Callable[[list[Axes]], None]) -> bytes:
    canvas = Figure(figsize=(0.4 + 2.6 * panels, 2.6), dpi=110, layout="constrained")
    axes = list(canvas.subplots(1, panels, squeeze=False)[0])
    draw(axes)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
