"""Normalisation of queries and keys: L2, LayerNorm, RMSNorm, BatchNorm, InstanceNorm, DyT, Derf.

A `Normalisation` is a value; `build` makes the module with its parameters. Modules take x
(B, H, T, D) and padding (B, T), True = padding, which norms over tokens leave out. Statistics are
computed in float32 for half-precision inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F

from normattn.kernels.numerics import at_least_float32
from normattn.plain import use_plain_ops

Kind = Literal["l2", "layer", "rms", "batch", "instance", "dyt", "derf"]
Across = Literal["head", "all", "each"]
Heads = Float[Tensor, "b h t d"]
Padding = Bool[Tensor, "b t"] | None
_EPS = {"l2": 1e-12, "layer": 1e-5, "rms": 1e-6, "batch": 1e-5, "instance": 1e-5}

# Rows of a backward at a time, so that its temporary tensors stay in a core's cache.
CHUNK_BYTES = 1 << 19


@dataclass(frozen=True)
class Normalisation:
    """The kind of a normalisation, and what its statistics and gain cover.

    - `across="head"`: statistics over D of each head, one gain (D,) for all heads.
    - `across="each"`: the same statistics, a gain (H, D).
    - `across="all"`: statistics over H·D together, a gain (H, D).

    Except in L2 and RMSNorm a gain comes with a bias. BatchNorm and InstanceNorm, over tokens, leak
    the future. In DyT, Derf and these two, `across` has no effect.
    """

    kind: Kind
    gain: bool = False
    across: Across = "head"
    eps: float | None = None

    @property
    def leaks_future(self) -> bool:
        """Whether a token's result depends on later tokens."""
        return self.kind in ("batch", "instance")

    def build(self, heads: int, head_dim: int) -> nn.Module:
        """The module for `heads` heads of `head_dim`."""
        if self.kind in ("dyt", "derf"):
            return BoundedFeatures(self, head_dim)
        eps = _EPS[self.kind] if self.eps is None else self.eps
        kind: type[FeatureNorm | TokenNorm] = TokenNorm if self.leaks_future else FeatureNorm
        return kind(self, heads, head_dim, eps)


class FeatureNorm(nn.Module):
    """L2 norm, LayerNorm or RMSNorm over a head's D features, or over H·D of all heads.

    L2: x/max(‖x‖, eps), a result of length 1 (not √d). LayerNorm: (x − mean)/√(var + eps), biased
    variance. RMSNorm: x/√(mean x² + eps).
    """

    def __init__(self, norm: Normalisation, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.kind, self.across, self.eps = norm.kind, norm.across, eps
        shape = (head_dim,) if norm.across == "head" else (heads, head_dim)
        biased = norm.gain and norm.kind == "layer"
        self.weight = nn.Parameter(torch.ones(shape)) if norm.gain else None
        self.bias = nn.Parameter(torch.zeros(shape)) if biased else None

    def forward(self, x: Heads, padding: Padding = None) -> Heads:
        """Normalise over the last axis (or over heads and the last axis)."""
        return self.apply_directly(x, _scale_rows)

    def apply_directly(self, x: Heads, scale_rows: Callable[..., Tensor] | None = None) -> Heads:
        """`forward` in fewer Python calls; without support for compilers and torch.func."""
        if scale_rows is None:
            if self._forward_hooks or self._forward_pre_hooks or self._backward_hooks:
                return self(x)  # type: ignore[no-any-return]
            scale_rows = _scale_with_gradient if torch.is_grad_enabled() else _scale_rows_in_place
            scale_rows = scale_rows if x.is_cpu else _scale_rows_plainly
        # An attribute of a module costs a Python call; a lookup in `_parameters` does not.
        gain, bias, rows = self._parameters.get("weight"), self._parameters.get("bias"), x
        # Parametrisations, pruning and replicas store parameters as attributes.
        gain, bias = self.weight if gain is None else gain, self.bias if bias is None else bias
        row_gain: Tensor | None = gain
        row_bias: Tensor | None = bias
        if self.across == "all":
            rows = x.transpose(1, 2).flatten(2)
            row_gain = gain if gain is None else gain.flatten()
            row_bias = bias if bias is None else bias.flatten()
        elif self.across == "each":
            # Gain and bias are applied below.
            rows, row_gain, row_bias = x if x.element_size() > 2 else x.float(), None, None
        if self.kind == "layer":
            dtype = x.dtype if x.element_size() > 2 else torch.float32
            row_gain = row_gain if row_gain is None else row_gain.to(dtype)
            row_bias = row_bias if row_bias is None else row_bias.to(dtype)
            shape = rows.shape[-1:]
            y = torch.layer_norm(rows.to(dtype), shape, row_gain, row_bias, self.eps).to(rows.dtype)
        elif self.kind == "l2":
            y = scale_rows(rows, None, self.eps, True)
            y = y if row_gain is None else y * row_gain.to(y.dtype)
        else:
            y = scale_rows(rows, row_gain, self.eps, False)
        if self.across == "all":
            return y.view(*rows.shape[:2], x.shape[1], x.shape[3]).transpose(1, 2)
        if self.across == "each":
            y = y if gain is None else y * gain.to(y.dtype)[:, None]
            y = y if bias is None else y + bias.to(y.dtype)[:, None]
        return y.to(x.dtype)


class BoundedFeatures(nn.Module):
    """tanh(α·x), or erf(α·x + s), of each feature, times a gain (D,) plus a bias (D,).

    α and s are learned scalars, initially ½ and 0. All heads share gain and bias.
    """

    def __init__(self, norm: Normalisation, head_dim: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((), 0.5))
        self.shift = nn.Parameter(torch.zeros(())) if norm.kind == "derf" else None
        self.weight = nn.Parameter(torch.ones(head_dim)) if norm.gain else None
        self.bias = nn.Parameter(torch.zeros(head_dim)) if norm.gain else None

    def forward(self, x: Heads, padding: Padding = None) -> Heads:
        """Bound every feature."""
        return bounded(x, self.alpha, self.shift, self.weight, self.bias)

    apply_directly = forward


def bounded(
    x: Float[Tensor, "*rows d"],
    alpha: Float[Tensor, ""],
    shift: Float[Tensor, ""] | None,
    gain: Float[Tensor, " d"] | None,
    bias: Float[Tensor, " d"] | None,
) -> Float[Tensor, "*rows d"]:
    """tanh(α·x)·gain + bias, or with a shift s erf(α·x + s)·gain + bias, in float32 or wider."""
    y = alpha * x.to(at_least_float32(x.dtype))
    y = torch.tanh(y) if shift is None else torch.erf(y + shift)
    return (y if gain is None or bias is None else y * gain + bias).to(x.dtype)


class TokenNorm(nn.Module):
    """BatchNorm or InstanceNorm of each head's features over tokens, without padding.

    InstanceNorm takes statistics over the tokens of each row. BatchNorm works as
    `torch.nn.BatchNorm1d`: training uses the batch's mean and biased variance, synchronised across
    processes, and moves the running mean and unbiased variance by a tenth; evaluation uses the
    running ones. Recomputation for a backward (activation checkpointing) does not move them.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: Normalisation, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.kind, self.eps = norm.kind, eps
        shape = (1, heads, 1, head_dim)
        self.weight = nn.Parameter(torch.ones(shape)) if norm.gain else None
        self.bias = nn.Parameter(torch.zeros(shape)) if norm.gain else None
        if norm.kind == "batch":
            self.register_buffer("running_mean", torch.zeros(shape))
            self.register_buffer("running_var", torch.ones(shape))

    def forward(self, x: Heads, padding: Padding = None) -> Heads:
        """Normalise each feature over the unpadded tokens of its row, or of the batch."""
        rows = x.to(at_least_float32(x.dtype))
        if self.kind == "instance":
            mean, variance, _ = _moments(rows, padding, (2,), synchronise=False)
        elif not self.training:
            mean, variance = self.running_mean, self.running_var
        else:
            synchronise = dist.is_available() and dist.is_initialized()
            mean, variance, count = _moments(rows, padding, (0, 2), synchronise)
            # No recomputation inside a backward.
            if torch.compiler.is_compiling() or torch._C._current_graph_task_id() < 0:
                with torch.no_grad():
                    unbiased = variance * (count / (count - 1).clamp(min=1))
                    share = 0.1 * (count > 0).to(self.running_mean.dtype)
                    self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                    self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        y = (rows - mean) * torch.rsqrt(variance + self.eps)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight + self.bias
        return y.to(x.dtype)


def _moments(
    x: Tensor, padding: Tensor | None, dims: tuple[int, ...], synchronise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and count over `dims`, without padding."""

    def total(x: Tensor) -> Tensor:
        local: Tensor = x.sum(dims, keepdim=True)
        return all_reduce(local) if synchronise else local  # type: ignore[no-untyped-call]

    keep = torch.ones_like(x[:1, :1, :, :1]) if padding is None else (~padding)[:, None, :, None]
    keep = keep.to(x.dtype).expand(x.shape[0], 1, -1, 1)
    count = total(keep)
    divisor = count.clamp(min=1)
    mean = total(x * keep) / divisor
    return mean, total((x - mean) ** 2 * keep) / divisor, count


def rms_norm(
    x: Float[Tensor, "*rows d"], gain: Float[Tensor, " d"] | None, eps: float
) -> Float[Tensor, "*rows d"]:
    """x/√(mean x² + eps)·gain in the dtype of x; on a CPU much faster than `F.rms_norm`."""
    return _scale_rows(x, gain, eps, unit=False)


def _scale_rows(x: Tensor, gain: Tensor | None, eps: float, unit: bool) -> Tensor:
    """x·r·gain with r = (mean(x²) + eps)^−½ of each row; with `unit`, x/max(‖x‖, eps)."""
    if not x.is_cpu or use_plain_ops():
        return _scale_rows_plainly(x, gain, eps, unit)
    if not torch.is_grad_enabled():
        return _scale_rows_in_place(x, gain, eps, unit)
    y: Tensor = _ScaleRows.apply(x, gain, eps, unit)  # type: ignore[no-untyped-call]
    return y


def _scale_rows_plainly(x: Tensor, gain: Tensor | None, eps: float, unit: bool) -> Tensor:
    """`_scale_rows` by torch's own operations."""
    rows = x if x.element_size() > 2 else x.float()
    if unit:
        norm: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return (rows / norm.clamp_min(eps)).to(x.dtype)
    gain = gain if gain is None else gain.to(rows.dtype)
    return F.rms_norm(rows, x.shape[-1:], gain, eps).to(x.dtype)


def _scale_rows_in_place(x: Tensor, gain: Tensor | None, eps: float, unit: bool) -> Tensor:
    """`_scale_rows` on a CPU without a gradient, in few passes."""
    return _scale_rows_and_factors(x, gain, eps, unit)[0]


def _scale_rows_and_factors(
    x: Tensor, gain: Tensor | None, eps: float, unit: bool
) -> tuple[Tensor, Tensor]:
    """x·r·gain in the dtype of x, and r of every row; 1/r with `unit`."""
    rows = x if x.element_size() > 2 else x.float()
    norm: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    if unit:
        norm = norm.clamp_min_(eps)
        return (rows / norm).to(x.dtype), norm
    inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normal = rows * inverse
    return (normal if gain is None else normal.mul_(gain)).to(x.dtype), inverse


class _ScaleRows(torch.autograd.Function):
    """`_scale_rows` with a backward that needs two temporary tensors instead of seven."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, eps: float, unit: bool) -> Tensor:
        y, scale = _scale_rows_and_factors(x, gain, eps, unit)
        ctx.save_for_backward(x, gain, scale)
        ctx.settings = eps, unit
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, gain, scale = ctx.saved_tensors
        if not torch.is_grad_enabled():
            eps, unit = ctx.settings
            if not unit:
                return *_rms_norm_grads(x, gain, grad, scale), None, None
            # dx = (dy − x·⟨dy, x⟩/‖x‖²)/‖x‖; dy/eps where ‖x‖ ≤ eps.
            grad = grad.to(scale.dtype)
            along = (grad * x).sum(-1, keepdim=True).div_(scale).div_(scale)
            along = torch.ops.aten.threshold_backward(along, scale, eps)
            grad = torch.addcmul(grad, x, along, value=-1.0).div_(scale)
            return grad.to(x.dtype), None, None, None
        # This backward is differentiated itself, so torch's own operations compute it.
        inputs = [tensor for tensor in (x, gain) if tensor is not None and tensor.requires_grad]
        y = _scale_rows_plainly(x, gain, *ctx.settings)
        gradients = iter(torch.autograd.grad(y, inputs, grad, create_graph=True))
        grad_x = next(gradients) if x.requires_grad else None
        return grad_x, next(gradients, None), None, None


# Skips `apply`'s checks for torch.func, which take as long as a small norm.
_scale_with_gradient: Any = super(torch.autograd.Function, _ScaleRows).apply


def _rms_norm_grads(
    x: Tensor, gain: Tensor | None, grad: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor | None]:
    """dx = r·(g·dy − n·⟨g·dy, n⟩/d) with n = x·r, and dg = Σ rows dy·n."""
    if gain is None:
        # n is not computed, which saves a pass over the rows.
        grad = grad.to(inverse.dtype)
        along = (grad * x).sum(-1, keepdim=True).mul_(inverse).mul_(inverse)
        along = along.div_(x.shape[-1])
        return torch.addcmul(grad, x, along, value=-1.0).mul_(inverse).to(x.dtype), None
    gain = gain.to(inverse.dtype)
    if x.numel() > max(CHUNK_BYTES // 4, x.shape[-1]) and x.is_contiguous():
        grad_x, grad_gain = torch.empty_like(x), torch.zeros_like(gain)
        count = max(1, CHUNK_BYTES // (4 * x.shape[-1]))
        parts = (torch.split(y.flatten(0, -2), count) for y in (x, grad, inverse, grad_x))
        for x_chunk, *chunks, grad_x_chunk in zip(*parts, strict=True):
            chunk_grad_x, chunk_grad_gain = _rms_norm_grads(x_chunk, gain, *chunks)
            grad_x_chunk.copy_(chunk_grad_x)
            grad_gain += 0 if chunk_grad_gain is None else chunk_grad_gain
        return grad_x, grad_gain
    grad, normal = grad.to(inverse.dtype), x * inverse
    product = grad * normal
    rows = product.reshape(-1, x.shape[-1])
    grad_gain = rows.sum(0)
    along = torch.mv(rows, gain).view(*x.shape[:-1], 1)
    along.div_(x.shape[-1])
    grad_x = torch.mul(grad, gain, out=product)
    return grad_x.addcmul_(normal, along, value=-1.0).mul_(inverse).to(x.dtype), grad_gain
