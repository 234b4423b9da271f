"""Normalisation of queries and keys: L2, LayerNorm, RMSNorm, BatchNorm, InstanceNorm.

A `Normalisation` is a value; `build` makes the module that holds what it learns. Modules take
x (B, H, T, D) and, where statistics run over the sequence, padding (B, T) with True = padding.
Statistics are computed in float32 for half-precision inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F

from normattn.plain import plain

Kind = Literal["l2", "layer", "rms", "batch", "instance"]
Across = Literal["head", "all", "each"]
_EPS = {"l2": 1e-12, "layer": 1e-5, "rms": 1e-6, "batch": 1e-5, "instance": 1e-5}


@dataclass(frozen=True)
class Normalisation:
    """Which normalisation, over what, with which gain.

    `across="head"` takes statistics over D of each head and shares a gain (D,) between heads;
    `across="each"` likewise with a gain of each head's own, (H, D); `across="all"` takes them over
    H·D together and has a gain (H, D). LayerNorm's gain comes with a bias. BatchNorm and
    InstanceNorm take statistics over tokens, so they leak the future.
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
        return self.across != "all" and not self.leaks_future

    def build(self, heads: int, head_dim: int) -> nn.Module:
        """The module for `heads` heads of `head_dim`."""
        eps = _EPS[self.kind] if self.eps is None else self.eps
        if self.kind == "l2":
            return L2Norm(eps)
        if self.kind == "batch":
            return BatchScoreNorm(heads, head_dim, eps, self.gain)
        if self.kind == "instance":
            return InstanceScoreNorm(heads, head_dim, eps, self.gain)
        return FeatureNorm(self, heads, head_dim, eps)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a norm's statistics are taken in: float32 for half precision."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


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


# Past what `apply` does for torch.func, which takes as long as a small norm.
_l2_directly: Any = super(torch.autograd.Function, _L2).apply


class L2Norm(nn.Module):
    """x / max(‖x‖, eps): a result of Euclidean norm 1 (not √d), eps = 1e-12 by default."""

    def __init__(self, eps: float = 1e-12) -> None:
        super().__init__()
        self.eps = eps

    def forward(
        self, x: Float[Tensor, "b h t d"], padding: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b h t d"]:
        """Normalise each head's vector to length 1."""
        rows = x.to(wide(x.dtype))
        # A decode step has so little to do that the recording of a backward would show.
        if not torch.is_grad_enabled() or plain():
            norm: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            return (rows * norm.clamp(min=self.eps).reciprocal()).to(x.dtype)
        y, _ = _L2.apply(rows, self.eps)  # type: ignore[no-untyped-call]
        return y.to(x.dtype)  # type: ignore[no-any-return]

    def apply_directly(self, x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
        """The same in few calls, where neither a compiler nor torch.func looks on."""
        if self._forward_hooks or self._forward_pre_hooks or self._backward_hooks:
            return self(x)  # type: ignore[no-any-return]
        if not torch.is_grad_enabled():
            return self.forward(x)
        rows = x if x.element_size() > 2 else x.float()
        return _l2_directly(rows, self.eps)[0].to(x.dtype)  # type: ignore[no-any-return]


class FeatureNorm(nn.Module):
    """LayerNorm or RMSNorm over a head's D features, or over H·D of all heads.

    LayerNorm (x − mean)/√(var + eps), biased variance; RMSNorm x/√(mean x² + eps).
    """

    def __init__(self, norm: Normalisation, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.kind, self.across, self.eps = norm.kind, norm.across, eps
        shape = (head_dim,) if norm.across == "head" else (heads, head_dim)
        biased = norm.gain and norm.kind == "layer"
        self.weight = nn.Parameter(torch.ones(shape)) if norm.gain else None
        self.bias = nn.Parameter(torch.zeros(shape)) if biased else None

    def forward(
        self, x: Float[Tensor, "b h t d"], padding: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b h t d"]:
        """Normalise over the last axis (or over heads and the last axis)."""
        rows = x if x.element_size() > 2 else x.float()
        gain: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        gain = None if gain is None else gain.to(rows.dtype)
        bias = None if bias is None else bias.to(rows.dtype)
        shape, last = tuple(x.shape[-1:]), (gain, bias)
        if self.across == "each":
            last = (None, None)
        elif self.across == "all":
            shape, rows = (x.shape[1], x.shape[-1]), rows.transpose(1, 2)
        if self.kind == "layer":
            y = torch.layer_norm(rows, shape, *last, self.eps)
        elif self.across == "all":
            y = F.rms_norm(rows, shape, gain, self.eps)
        else:
            y = rms_norm(rows, last[0], self.eps)
        if self.across == "all":
            y = y.transpose(1, 2)
        elif self.across == "each":
            y = y if gain is None else y * gain[:, None]
            y = y if bias is None else y + bias[:, None]
        return y.to(x.dtype)

    def apply_directly(self, x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
        """The same in few calls, where neither a compiler nor torch.func looks on."""
        if self._forward_hooks or self._forward_pre_hooks or self._backward_hooks:
            return self(x)  # type: ignore[no-any-return]
        if self.across == "all" or self.kind != "rms" or not x.is_cpu:
            return self.forward(x)
        rows = x if x.element_size() > 2 else x.float()
        gain: Tensor | None = self.weight
        gain = None if gain is None else gain.to(rows.dtype)
        own = gain if self.across == "head" else None
        if torch.is_grad_enabled():
            y = _rms_directly(x if self.across == "head" else rows, own, self.eps)
        else:
            y, _ = _normed(x if self.across == "head" else rows, own, self.eps)
        if self.across == "each" and gain is not None:
            y = (y * gain[:, None]).to(x.dtype)
        return y.to(x.dtype)  # type: ignore[no-any-return]


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
        rows = x.to(wide(x.dtype))
        if not self.training:
            return self._scale(rows, self.running_mean, self.running_var).to(x.dtype)
        sync = dist.is_available() and dist.is_initialized()
        mean, variance, count = _moments(rows, padding, (0, 2), sync)
        recomputed = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0
        if not recomputed:
            self._move(mean, variance, count)
        return self._scale(rows, mean, variance).to(x.dtype)

    @torch.no_grad()
    def _move(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Take a batch into the running statistics."""
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)


class InstanceScoreNorm(_SequenceNorm):
    """InstanceNorm: each feature over the unpadded tokens of its own row."""

    def forward(
        self, x: Float[Tensor, "b h t d"], padding: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b h t d"]:
        """Normalise each feature over the row's unpadded tokens."""
        rows = x.to(wide(x.dtype))
        mean, variance, _ = _moments(rows, padding, (2,), sync=False)
        return self._scale(rows, mean, variance).to(x.dtype)


CHUNK_BYTES = 1 << 19
"""About this much of the rows, in float32, is worked on at a time: it stays in a core's cache."""


def rms_norm(
    x: Float[Tensor, "*rows d"], gain: Float[Tensor, " d"] | None, eps: float
) -> Float[Tensor, "*rows d"]:
    """x/√(mean x² + eps)·gain in the dtype of x; computed in float32 where that is a half one.

    On a CPU torch runs `F.rms_norm` as separate small operations, several times slower than this.
    """
    dtype = wide(x.dtype)
    gain = None if gain is None else gain.to(dtype)
    if plain() or x.device.type != "cpu":
        return F.rms_norm(x.to(dtype), (x.shape[-1],), gain, eps).to(x.dtype)
    if not torch.is_grad_enabled():
        return _normed(x, gain, eps)[0]
    y: Tensor = _RMSNorm.apply(x, gain, eps)  # type: ignore[no-untyped-call]
    return y


def _pieces(x: Tensor, rows: int) -> tuple[Tensor, ...]:
    """Contiguous rows in pieces of as many; what is strided or small stays as it is."""
    if not x.is_contiguous() or x.numel() <= rows * x.shape[-1]:
        return (x,)
    return torch.split(x.view(-1, x.shape[-1]), rows)


def _normed(x: Tensor, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """y, in the dtype of x, and r = (mean(x²) + eps)^−½ of every row."""
    rows = max(1, CHUNK_BYTES // (4 * x.shape[-1]))
    if x.numel() > rows * x.shape[-1] and x.is_contiguous():
        pieces = _pieces(x, rows)
        y, inverse = (
            torch.empty_like(x),
            x.new_empty(x.numel() // x.shape[-1], 1, dtype=wide(x.dtype)),
        )
        for part, out, r in zip(pieces, _pieces(y, rows), torch.split(inverse, rows), strict=True):
            own, own_r = _normed(part, gain, eps)
            out.copy_(own)
            r.copy_(own_r)
        return y, inverse.view(*x.shape[:-1], 1)
    wide_x = x if x.element_size() > 2 else x.float()
    norm: Tensor = torch.linalg.vector_norm(wide_x, dim=-1, keepdim=True)
    inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normal = wide_x * inverse
    return (normal if gain is None else normal.mul_(gain)).to(x.dtype), inverse


class _RMSNorm(torch.autograd.Function):
    """y = x·r·g with r = (mean(x²) + eps)^−½; two temporaries backward instead of seven."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        y, inverse = _normed(x, gain, eps)
        ctx.save_for_backward(x, gain, inverse)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, gain, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_differentiable(x, gain, grad, ctx.eps), None
        if not x.is_contiguous():
            return *_gradients(x, grad, inverse, gain), None
        rows = max(1, CHUNK_BYTES // (4 * x.shape[-1]))
        by_x, by_gain = torch.empty_like(x), None if gain is None else torch.zeros_like(gain)
        tensors = (x, grad.contiguous(), inverse, by_x)
        split = (torch.split(tensor.view(-1, tensor.shape[-1]), rows) for tensor in tensors)
        for part, above, r, out in zip(*split, strict=True):
            own, own_gain = _gradients(part, above, r, gain)
            out.copy_(own)
            if by_gain is not None and own_gain is not None:
                by_gain += own_gain
        return by_x, by_gain, None


_rms_directly: Any = super(torch.autograd.Function, _RMSNorm).apply


def _gradients(
    x: Tensor, grad: Tensor, inverse: Tensor, gain: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """dx = r·(g·dy − n·⟨g·dy, n⟩/d) with n = x·r, and dg = Σ rows dy·n."""
    grad, dim = grad.to(inverse.dtype), x.shape[-1]
    normal = x * inverse
    product, by_gain = grad * normal, None
    if gain is None:
        along = product.sum(-1, keepdim=True).div_(dim)
        by_x = product.copy_(grad)
    else:
        rows = product.reshape(-1, dim)
        by_gain = rows.sum(0)
        along = torch.mv(rows, gain).div_(dim).view(*x.shape[:-1], 1)
        by_x = torch.mul(grad, gain, out=product)
    return by_x.addcmul_(normal, along, value=-1.0).mul_(inverse).to(x.dtype), by_gain


def _differentiable(
    x: Tensor, gain: Tensor | None, grad: Tensor, eps: float
) -> tuple[Tensor | None, Tensor | None]:
    """The same gradients through torch's own operations, for a derivative of the derivative."""
    inputs = [part for part in (x, gain) if part is not None and part.requires_grad]
    y = F.rms_norm(x.to(wide(x.dtype)), (x.shape[-1],), gain, eps).to(x.dtype)
    gradients = iter(torch.autograd.grad(y, inputs, grad, create_graph=True))
    by_x = next(gradients) if x.requires_grad else None
    return by_x, next(gradients) if gain is not None and gain.requires_grad else None
