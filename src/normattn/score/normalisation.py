"""Normalisation of queries and keys: L2, LayerNorm, RMSNorm, BatchNorm, InstanceNorm.

A `Normalisation` is a value; `build` makes the module that holds what it learns. Modules take
x (B, H, T, D) and, where statistics run over the sequence, padding (B, T) with True = padding.
Statistics are computed in float32 for half-precision inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from normattn.errors import InputError
from normattn.plain import plain
from normattn.score.rms_norm import rms_norm

Kind = Literal["l2", "layer", "rms", "batch", "instance"]
Across = Literal["head", "all", "each"]
DEFAULT_EPS: dict[str, float] = {
    "l2": 1e-12,
    "layer": 1e-5,
    "rms": 1e-6,
    "batch": 1e-5,
    "instance": 1e-5,
}


class ScoreNorm(Protocol):
    """What a built normalisation can do."""

    def __call__(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Normalise x (B, H, T, D)."""
        ...


@dataclass(frozen=True)
class Normalisation:
    """Which normalisation, over what, with which gain.

    `across="head"` takes statistics over D of each head and shares a gain (D,) between heads;
    `across="each"` likewise with a gain of each head's own, (H, D); `across="all"` takes them over
    H·D together and has a gain (H, D). LayerNorm's gain comes with
    a bias. BatchNorm and InstanceNorm take statistics over tokens, so they leak the future.
    """

    kind: Kind
    gain: bool = False
    across: Across = "head"
    eps: float | None = None

    @property
    def leaks_future(self) -> bool:
        """Whether a token's result depends on later tokens."""
        return self.kind in ("batch", "instance")

    @property
    def by_head(self) -> bool:
        """Whether each head's vector is normalised by itself alone."""
        return self.across != "all" and self.kind not in ("batch", "instance")

    def build(self, heads: int, head_dim: int) -> nn.Module:
        """The module for `heads` heads of `head_dim`."""
        eps = DEFAULT_EPS[self.kind] if self.eps is None else self.eps
        if self.kind == "l2":
            return L2Norm(eps)
        if self.kind == "batch":
            return BatchScoreNorm(heads, head_dim, eps, self.gain)
        if self.kind == "instance":
            return InstanceScoreNorm(heads, head_dim, eps, self.gain)
        if self.across == "each":
            return FeatureNorm(self.kind, (head_dim,), eps, self.gain, heads)
        shape = (head_dim,) if self.across == "head" else (heads, head_dim)
        return FeatureNorm(self.kind, shape, eps, self.gain)


class _L2(torch.autograd.Function):
    """y = x / max(‖x‖, eps) and 1/max(‖x‖, eps), with a backward that reads these two only.

    The inverse norm is an output so that the backward, a function of outputs, can be
    differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.clamp(min=eps).reciprocal_()
        y = x * inverse
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, inverse, norm > eps)
        return y, inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        y, inverse, free = ctx.saved_tensors
        by_y, by_inverse = grads
        if by_y is None:
            by_y = torch.zeros_like(y)
        along = (by_y * y).sum(-1, keepdim=True)
        if by_inverse is not None:
            along = along + by_inverse * inverse
        return torch.addcmul(by_y, y, along * free, value=-1).mul_(inverse), None


class L2Norm(nn.Module):
    """x / max(‖x‖, eps): a result of Euclidean norm 1 (not √d), eps = 1e-12 by default."""

    def __init__(self, eps: float = 1e-12) -> None:
        super().__init__()
        self.eps = eps

    def forward(
        self, x: Float[Tensor, "b h t d"], padding: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b h t d"]:
        """Normalise each head's vector to length 1."""
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if plain():
            size: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            return (wide / size.clamp(min=self.eps)).to(x.dtype)
        if not torch.is_grad_enabled():
            # A decode step has so little to do that the recording of a backward would show.
            norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            return (wide * norm.clamp_(min=self.eps).reciprocal_()).to(x.dtype)
        y, _ = _L2.apply(wide, self.eps)  # type: ignore[no-untyped-call]
        return y.to(x.dtype)  # type: ignore[no-any-return]


class FeatureNorm(nn.Module):
    """LayerNorm or RMSNorm over a head's D features, or over H·D of all heads.

    LayerNorm (x − mean)/√(var + eps), biased variance; RMSNorm x/√(mean x² + eps). With `heads`
    each of them has a gain (D,) of its own.
    """

    def __init__(
        self, kind: Kind, shape: tuple[int, ...], eps: float, gain: bool, heads: int | None = None
    ) -> None:
        super().__init__()
        self.kind, self.shape, self.eps, self.apart = kind, shape, eps, heads is not None
        learned = shape if heads is None else (heads, *shape)
        self.weight = nn.Parameter(torch.ones(learned)) if gain else None
        self.bias = nn.Parameter(torch.zeros(learned)) if gain and kind == "layer" else None

    def forward(
        self, x: Float[Tensor, "b h t d"], padding: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b h t d"]:
        """Normalise over the last axis (or over heads and the last axis)."""
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if len(self.shape) == 2:
            wide = wide.transpose(1, 2)
        gain = None if self.weight is None else self.weight.to(wide.dtype)
        bias = None if self.bias is None else self.bias.to(wide.dtype)
        own, shift = (gain, bias) if self.apart else (None, None)
        if self.apart:
            gain = bias = None
        if self.kind == "layer":
            y = nn.functional.layer_norm(wide, self.shape, gain, bias, self.eps)
        elif len(self.shape) == 1:
            y = rms_norm(wide, gain, self.eps)
        else:
            y = nn.functional.rms_norm(wide, self.shape, gain, self.eps)
        y = y if own is None else y * own[:, None]
        y = y if shift is None else y + shift[:, None]
        return (y.transpose(1, 2) if len(self.shape) == 2 else y).to(x.dtype)


def _moments(x: Tensor, padding: Tensor | None, dims: tuple[int, ...], sync: bool) -> list[Tensor]:
    """Mean, biased variance and count over `dims`, without padding, of all processes if `sync`."""
    keep = torch.ones_like(x[:1, :1, :, :1]) if padding is None else (~padding)[:, None, :, None]
    keep = keep.to(x.dtype).expand(x.shape[0], 1, -1, 1)
    sums = [keep.sum(dims, keepdim=True), (x * keep).sum(dims, keepdim=True)]
    if sync:
        sums = [all_reduce(part) for part in sums]  # type: ignore[no-untyped-call]
    count = sums[0].clamp(min=1)
    mean = sums[1] / count
    square = ((x - mean) ** 2 * keep).sum(dims, keepdim=True)
    if sync:
        square = all_reduce(square)  # type: ignore[no-untyped-call]
    return [mean, square / count, count]


class _SequenceNorm(nn.Module):
    """What BatchNorm and InstanceNorm share: a gain and bias per head and feature."""

    def __init__(self, heads: int, head_dim: int, eps: float, gain: bool) -> None:
        super().__init__()
        self.eps = eps
        shape = (1, heads, 1, head_dim)
        self.weight = nn.Parameter(torch.ones(shape)) if gain else None
        self.bias = nn.Parameter(torch.zeros(shape)) if gain else None

    def _scale(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        y = (x - mean) * torch.rsqrt(variance + self.eps)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight + self.bias
        return y


class BatchScoreNorm(_SequenceNorm):
    """BatchNorm of each head's features over batch and tokens; padding does not count.

    Training uses the batch's own mean and biased variance (synchronised across processes) and
    moves the running ones by `momentum`, the running variance by the unbiased one, as
    `torch.nn.BatchNorm1d` does; evaluation uses the running statistics. A forward that a backward
    computes once more (activation checkpointing) moves nothing.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, heads: int, head_dim: int, eps: float, gain: bool, momentum: float = 0.1
    ) -> None:
        super().__init__(heads, head_dim, eps, gain)
        self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(1, heads, 1, head_dim))
        self.register_buffer("running_var", torch.ones(1, heads, 1, head_dim))

    def forward(
        self, x: Float[Tensor, "b h t d"], padding: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b h t d"]:
        """Normalise each feature over the unpadded tokens of the batch."""
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if not self.training:
            return self._scale(wide, self.running_mean, self.running_var).to(x.dtype)
        sync = dist.is_available() and dist.is_initialized()
        mean, variance, count = _moments(wide, padding, (0, 2), sync)
        if not _recomputed():
            self._move(mean, variance, count)
        return self._scale(wide, mean, variance).to(x.dtype)

    def _move(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Take a batch into the running statistics."""
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)


def _recomputed() -> bool:
    """Whether a backward runs, and with it a forward once more."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0


class InstanceScoreNorm(_SequenceNorm):
    """InstanceNorm: each feature over the unpadded tokens of its own row."""

    def forward(
        self, x: Float[Tensor, "b h t d"], padding: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b h t d"]:
        """Normalise each feature over the row's unpadded tokens."""
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        mean, variance, _ = _moments(wide, padding, (2,), sync=False)
        return self._scale(wide, mean, variance).to(x.dtype)


def refuse_future(causal: bool, leaks: bool, name: str) -> None:
    """Raise `InputError` when a score that reads across the sequence is used causally."""
    if causal and leaks:
        raise InputError(
            f"{name} takes statistics across the sequence and so leaks the future: "
            "it cannot be used with causal attention"
        )
