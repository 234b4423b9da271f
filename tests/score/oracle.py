"""The definition of truth: attention scores pair by pair, in float64, straight from the formulas.

Two loops over queries and keys, a 2 × 2 rotation written out, `math` for every scalar. It shares
no code with the library, and takes a `Recipe`, not a specification.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

FEATURE = {"LayerNorm": "layer", "RMSNorm": "rms", "BatchNorm": "batch", "InstanceNorm": "instance"}
L2_SIDES = {"QNA": "Q", "KNA": "K", "CosA": "QK", "QKNorm2020": "QK"}


@dataclass(frozen=True)
class Recipe:
    """One score, spelt out. `method` is a spectrum, "ReRoPE" or nothing."""

    variant: str = "Baseline"
    logn: str = ""
    position: str = "half"
    method: str = ""
    train_length: int = 6
    base: float = 10000.0
    factor: float = 4.0
    window: int = 3
    b: float = 0.625
    c: float = 4.0
    eps: float = 1e-6
    gain: bool = True
    across: str = "head"

    @property
    def text(self) -> str:
        """How a user would write it."""
        fields: dict[str, object] = {}
        if self.kind("Q") in ("layer", "rms") or self.kind("K") in ("layer", "rms"):
            fields = {"gain": str(self.gain).lower(), "across": self.across, "eps": self.eps}
        elif self.leaks:
            fields = {"gain": str(self.gain).lower(), "eps": self.eps}
        elif self.variant == "CosA":
            fields = {"c": self.c}
        words = [self.variant + _brackets(fields)]
        words += [self.logn] if self.logn else []
        if self.position == "none":
            words.append("NoPE")
        else:
            words.append(f"RoPE(base={self.base},layout={self.position})")
        fields = {"factor": self.factor}
        if self.method == "NTKMixed":
            fields["b"] = self.b
        elif self.method in ("ReRoPE", "ABF"):
            fields = {"window": self.window} if self.method == "ReRoPE" else {"base": 500000.0}
        words += [self.method + _brackets(fields)] if self.method else []
        return "-".join(words) + f"@{self.train_length}"

    def kind(self, side: str) -> str:
        """Which normalisation the side ("Q" or "K") gets; empty for none."""
        if self.variant in L2_SIDES:
            return "l2" if side in L2_SIDES[self.variant] else ""
        for title, kind in FEATURE.items():
            if self.variant.endswith(title):
                return kind if side in self.variant.removesuffix(title) else ""
        return ""

    @property
    def leaks(self) -> bool:
        """Whether statistics run over tokens."""
        return {self.kind("Q"), self.kind("K")} & {"batch", "instance"} != set()


def _brackets(fields: Mapping[str, object]) -> str:
    inside = ",".join(f"{key}={value}" for key, value in fields.items())
    return f"({inside})" if inside else ""


def frequencies(recipe: Recipe, d: int) -> list[float]:
    """θ'_m, m = 0 … d/2 − 1."""
    s, base, length = recipe.factor, recipe.base, recipe.train_length
    plain = [base ** (-2 * m / d) for m in range(d // 2)]
    if recipe.method in ("", "ReRoPE"):
        return plain
    if recipe.method == "PI":
        return [theta / s for theta in plain]
    if recipe.method == "ABF":
        return [500000.0 ** (-2 * m / d) for m in range(d // 2)]
    if recipe.method == "NTK":
        return [(base * s ** (d / (d - 2))) ** (-2 * m / d) for m in range(d // 2)]
    if recipe.method == "NTKMixed":
        a = math.log(s) / (d / 2) ** recipe.b
        return [theta * math.exp(-a * (m + 1) ** recipe.b) for m, theta in enumerate(plain)]
    assert recipe.method == "YaRN"

    def dim(r: float) -> float:
        return d * math.log(length / (2 * math.pi * r)) / (2 * math.log(base))

    low: float = min(max(math.floor(dim(32)), 0), d - 1)
    high: float = min(max(math.ceil(dim(1)), 0), d - 1)
    if low == high:
        high += 0.001
    result = []
    for m, theta in enumerate(plain):
        ramp = min(max((m - low) / (high - low), 0.0), 1.0)
        result.append(ramp * theta / s + (1 - ramp) * theta)
    return result


def scale(recipe: Recipe, d: int, n: int, learned: float = 1.0) -> float:
    """λ for n visible keys."""
    length = recipe.train_length
    if recipe.variant in ("QNA", "KNA"):
        value = 1.0
    elif recipe.variant == "CosA":
        value = recipe.c * math.log(n if recipe.logn == "logn" else length / 2)
    elif recipe.variant == "QKNorm2020":
        value = learned
    else:
        value = 1 / math.sqrt(d)
    if recipe.logn == "logn" and recipe.variant != "CosA":
        value *= math.log(n) / math.log(length)
    if recipe.logn == "logn+":
        value *= max(1.0, math.log(n) / math.log(length))
    if recipe.method == "YaRN":
        value *= (0.1 * math.log(recipe.factor) + 1) ** 2
    return value


def normalised(
    recipe: Recipe,
    side: str,
    x: Array,
    learned: Mapping[str, Array],
    real: npt.NDArray[np.bool_] | None,
) -> Array:
    """N(x) for x (B, H, T, D), one number at a time; `real` (B, T) marks tokens that count."""
    kind, y = recipe.kind(side), np.array(x)
    if not kind:
        return y
    batch, heads, tokens, d = x.shape
    real = np.ones((batch, tokens), bool) if real is None else real
    eps = 1e-12 if kind == "l2" else recipe.eps
    for b in range(batch):
        for h in range(heads):
            for t in range(tokens):
                for f in range(d):
                    over = x[b, h, t]
                    if kind in ("layer", "rms") and recipe.across == "all":
                        over = x[b, :, t].ravel()
                    elif kind == "batch":
                        over = x[:, h, :, f][real]
                    elif kind == "instance":
                        over = x[b, h, :, f][real[b]]
                    y[b, h, t, f] = _one(kind, x[b, h, t, f], over, eps)
    gain, bias = learned.get(f"{side}.gain"), learned.get(f"{side}.bias")
    if gain is not None:
        y = y * _per_feature(gain, heads, d)
    return y if bias is None else y + _per_feature(bias, heads, d)


def _one(kind: str, value: float, over: Array, eps: float) -> float:
    if kind == "l2":
        return value / max(math.sqrt(sum(float(u) ** 2 for u in over)), eps)
    if kind == "rms":
        return value / math.sqrt(sum(float(u) ** 2 for u in over) / len(over) + eps)
    mean = sum(float(u) for u in over) / len(over)
    variance = sum((float(u) - mean) ** 2 for u in over) / len(over)
    return (value - mean) / math.sqrt(variance + eps)


def _per_feature(value: Array, heads: int, d: int) -> Array:
    """A gain of D, (H, D) or (1, H, 1, D) as (1, H, 1, D)."""
    return np.broadcast_to(value.reshape(-1, d), (heads, d))[None, :, None, :]


def turned(x: Array, angles: list[float], layout: str) -> Array:
    """x (D,) with pair m turned by angles[m]."""
    half, y = len(angles), np.array(x)
    for m, angle in enumerate(angles):
        a, b = (m, m + half) if layout == "half" else (2 * m, 2 * m + 1)
        y[a] = math.cos(angle) * x[a] - math.sin(angle) * x[b]
        y[b] = math.sin(angle) * x[a] + math.cos(angle) * x[b]
    return y


def places(
    queries: int,
    keys: int,
    batch: int,
    padding: npt.NDArray[np.bool_] | None,
    q_positions: npt.NDArray[np.int64] | None,
    k_positions: npt.NDArray[np.int64] | None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions (B, T) and (B, S): counted from the first real token, queries at the end."""
    key = np.zeros((batch, keys), np.int64)
    for b in range(batch):
        count = 0
        for j in range(keys):
            if k_positions is not None:
                key[b, j] = np.broadcast_to(k_positions, (batch, keys))[b, j]
            elif padding is None:
                key[b, j] = j
            else:
                count += 0 if padding[b, j] else 1
                key[b, j] = max(count - 1, 0)
    if q_positions is not None:
        query = np.broadcast_to(q_positions, (batch, queries)).astype(np.int64)
    elif queries <= keys:
        query = key[:, keys - queries :]
    else:
        query = np.broadcast_to(np.arange(queries), (batch, queries))
    return query, key


def attend(
    recipe: Recipe,
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    mask: npt.NDArray[np.generic] | None = None,
    padding: npt.NDArray[np.bool_] | None = None,
    q_positions: npt.NDArray[np.int64] | None = None,
    k_positions: npt.NDArray[np.int64] | None = None,
    learned: Mapping[str, Array] | None = None,
) -> Array:
    """o_i = Σ_j softmax_j(s(i, j)) v_j, (B, H, T, E); 0 for a query that sees no key."""
    learned = {} if learned is None else learned
    batch, heads, queries, d = q.shape
    groups, keys = heads // k.shape[1], k.shape[2]
    real = None if padding is None else ~padding
    q = normalised(recipe, "Q", q, learned, real if queries == keys else None)
    k = normalised(recipe, "K", k, learned, real)
    theta = frequencies(recipe, d)
    where_q, where_k = places(queries, keys, batch, padding, q_positions, k_positions)
    full = None if mask is None else np.broadcast_to(mask, (batch, heads, queries, keys))
    out = np.zeros((batch, heads, queries, v.shape[-1]))
    g = float(learned.get("scale", np.array(1.0)))
    for b, h, i in np.ndindex(batch, heads, queries):
        seen, scores = [], []
        n = int(where_q[b, i]) + 1 if causal else keys if real is None else int(real[b].sum())
        factor = scale(recipe, d, max(n, 1), g)
        for j in range(keys):
            relative = int(where_q[b, i] - where_k[b, j])
            if (causal and relative < 0) or (padding is not None and padding[b, j]):
                continue
            bias = 0.0
            if full is not None and full.dtype == np.bool_:
                if not full[b, h, i, j]:
                    continue
            elif full is not None:
                bias = float(full[b, h, i, j])
            if bias == -math.inf:
                continue
            if recipe.method == "ReRoPE":
                relative = min(relative, recipe.window)
            query = q[b, h, i]
            if recipe.position != "none":
                query = turned(query, [relative * t for t in theta], recipe.position)
            seen.append(j)
            scores.append(factor * float(query @ k[b, h // groups, j]) + bias)
        top = max(scores, default=0.0)
        total = sum(math.exp(s - top) for s in scores)
        for j, s in zip(seen, scores, strict=True):
            out[b, h, i] += math.exp(s - top) / total * v[b, h // groups, j]
    return out
