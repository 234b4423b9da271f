"""KeyNorm, log-n and ReRoPE in plain torch on one page, compared with the library.

For query position i and key position j (from 0), with n = i + 1 visible keys, head dimension d and
training length L, the attention weights are softmax over j ≤ i of

    RoPE         s(i, j) = ⟨R^i q_i, R^j k_j⟩ / √d        R rotates pair m by θ_m = 10000^(−2m/d)
    KeyNorm      s(i, j) = ⟨R^i q_i, R^j k_j / ‖k_j‖⟩     the length of a key replaces 1/√d
    log-n        s(i, j) · ln n / ln L
    ReRoPE(w)    relative position min(i − j, w): R^w q_i and k_j unrotated, where i − j ≥ w

Sources: kexue.fm/archives/9859 (KeyNorm), 8823 (log-n), 8265 (RoPE), 9708 (ReRoPE).

Run it: `python examples/one_page.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import normattn


def rotate(x: Tensor, position: Tensor, base: float = 10000.0) -> Tensor:
    """R^position x for x (…, T, d): feature m and feature m + d/2 are the two sides of a plane."""
    half = x.shape[-1] // 2
    theta = base ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = position.to(x.dtype)[:, None] * theta
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_norm: bool = False,
    log_n: int | None = None,
    rerope: int | None = None,
) -> Tensor:
    """softmax(s) · v, causal, for q, k, v (…, T, d); `log_n` is L and `rerope` is w."""
    tokens, width = q.shape[-2:]
    i = torch.arange(tokens)
    if key_norm:
        k = k / k.norm(dim=-1, keepdim=True)
    score = rotate(q, i) @ rotate(k, i).mT
    if rerope is not None:
        far = rotate(q, torch.full((tokens,), rerope)) @ k.mT
        score = torch.where(i[:, None] - i < rerope, score, far)
    if not key_norm:
        score = score / math.sqrt(width)
    if log_n is not None:
        score = score * ((i + 1).to(q.dtype).log() / math.log(log_n))[:, None]
    score = score.masked_fill(i[:, None] < i, -math.inf)
    return score.softmax(-1) @ v


def main() -> None:
    """Compare each with the library in float64, by the reference and by the kernel it chooses."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 96, 32, dtype=torch.float64)
    for name, plain in {
        "Baseline": attention(q, k, v),
        "Baseline-logn": attention(q, k, v, log_n=32),
        "Baseline-ReRoPE(window=8)": attention(q, k, v, rerope=8),
        "KNA": attention(q, k, v, key_norm=True),
        "KNA-logn": attention(q, k, v, key_norm=True, log_n=32),
        "KNA-logn-ReRoPE(window=8)": attention(q, k, v, key_norm=True, log_n=32, rerope=8),
    }.items():
        for backend in ("reference", "auto"):
            ours = normattn.attention(q, k, v, f"{name}@32", backend=backend)
            error = (ours - plain).abs().max().item()
            assert error < 1e-12, f"{name} by {backend} is {error} apart"
        print(f"{name:26} equal to 1e-12")


if __name__ == "__main__":
    main()
