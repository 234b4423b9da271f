"""The definition of truth: attention scores pair by pair, in float64, straight from the formulas.

Two loops over queries and keys, a 2 × 2 rotation written out, `math` for every scalar. It shares
no code with the library, and takes a `Recipe`, not a specification.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from . import recipe as scalars
from .recipe import Recipe as Recipe

Array = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


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


def rotated(x: Array, recipe: Recipe, by: float, block: int, growing: float = 0.0) -> Array:
    """x (D,) rotated by the position `by`, its pairs multiplied as for the distance `growing`."""
    theta = scalars.frequencies(recipe, scalars.rotary_dim(recipe, len(x)), block)
    decay, half, y = scalars.decays(recipe, len(x)), len(theta), np.array(x)
    start = scalars.start(recipe, len(x))
    for m, frequency in enumerate(theta):
        a, b = (m, m + half) if recipe.position == "half" else (2 * m, 2 * m + 1)
        a, b = start + a, start + b
        cos, sin = math.cos(by * frequency), math.sin(by * frequency)
        size = math.exp(growing * decay[m])
        y[a] = size * (cos * x[a] - sin * x[b])
        y[b] = size * (sin * x[a] + cos * x[b])
    return y


def runs(
    documents: npt.NDArray[np.int64], padding: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.int64]:
    """The number (B, S) of the run of equal numbers that each token is in, padding overlooked."""
    found = np.zeros_like(documents)
    for b in range(documents.shape[0]):
        run, last = 0, None
        for j in range(documents.shape[1]):
            if padding is None or not padding[b, j]:
                run += last is not None and documents[b, j] != last
                last = documents[b, j]
            found[b, j] = run
    return found


def places(
    queries: int,
    keys: int,
    batch: int,
    padding: npt.NDArray[np.bool_] | None,
    q_positions: npt.NDArray[np.int64] | None,
    k_positions: npt.NDArray[np.int64] | None,
    documents: npt.NDArray[np.int64] | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions (B, T) and (B, S): counted from the first real token, queries at the end."""
    key = np.zeros((batch, keys), np.int64)
    for b in range(batch):
        count = 0
        for j in range(keys):
            if k_positions is not None:
                key[b, j] = np.broadcast_to(k_positions, (batch, keys))[b, j]
                continue
            if documents is not None and j > 0 and documents[b, j] != documents[b, j - 1]:
                count = 0
            count += 0 if padding is not None and padding[b, j] else 1
            key[b, j] = max(count - 1, 0)
    if q_positions is not None:
        query = np.broadcast_to(q_positions, (batch, queries)).astype(np.int64)
    elif queries <= keys:
        query = key[:, keys - queries :]
    else:
        query = np.broadcast_to(np.arange(queries), (batch, queries))
    return query, key


def counts(
    where: tuple[Places, Places],
    causal: bool,
    padding: npt.NDArray[np.bool_] | None,
    documents: npt.NDArray[np.int64] | None,
    mask: npt.NDArray[np.generic],
) -> npt.NDArray[np.int64]:
    """n of every head's query (B, H, T): the keys that it may see, windows and chunks aside.

    Causal, keys before the first one given are seen as well: n is the position + 1, less the keys
    that the mask (B, H, T, S) hides.
    """
    n = np.zeros(mask.shape[:3], np.int64)
    for b, h, i in np.ndindex(*n.shape):
        n[b, h, i] = where[0][b, i] + 1 if causal else 0
        for j in range(mask.shape[3]):
            own = documents is None or documents[b, i - mask.shape[2]] == documents[b, j]
            there = own and not (padding is not None and padding[b, j])
            allowed = mask[b, h, i, j]
            hidden = not allowed if mask.dtype == np.bool_ else allowed == -math.inf
            if causal:
                n[b, h, i] -= there and where[1][b, j] <= where[0][b, i] and hidden
            else:
                n[b, h, i] += there and not hidden
    return np.maximum(n, 1)


class _Products:
    """⟨P_i N(q_i), P_j N(k_j)⟩ of a pair, or ⟨N(P_i q_i), N(P_j k_j)⟩."""

    def __init__(
        self,
        recipe: Recipe,
        q: Array,
        k: Array,
        where: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
        learned: Mapping[str, Array],
        real: npt.NDArray[np.bool_] | None,
        own: npt.NDArray[np.bool_] | None,
    ) -> None:
        self.recipe, self.q, self.k, self.where = recipe, q, k, where
        self.learned, self.real, self.own = learned, real, own
        self.known: dict[tuple[int, int], tuple[Array, Array]] = {}
        if not recipe.rotate_first:
            self.q, self.k = self._normalised(q, k)

    def _normalised(self, q: Array, k: Array) -> tuple[Array, Array]:
        return (
            normalised(self.recipe, "Q", q, self.learned, self.own),
            normalised(self.recipe, "K", k, self.learned, self.real),
        )

    def _rotated(self, block: int, rule: int) -> tuple[Array, Array]:
        """All queries and keys rotated by their own position under a rule and then normalised."""
        if (block, rule) not in self.known:
            q, k, recipe = np.array(self.q), np.array(self.k), self.recipe
            for b, h, i in np.ndindex(*q.shape[:3]):
                at = int(self.where[0][b, i])
                by = scalars.rotated_at(recipe, at, scalars.example_of(recipe, rule, i=at))[0]
                q[b, h, i] = rotated(q[b, h, i], recipe, by, block)
            for b, h, j in np.ndindex(*k.shape[:3]):
                at = int(self.where[1][b, j])
                by = scalars.rotated_at(recipe, scalars.example_of(recipe, rule, j=at), at)[1]
                k[b, h, j] = rotated(k[b, h, j], recipe, by, block)
            self.known[block, rule] = self._normalised(q, k)
        return self.known[block, rule]

    def __call__(self, b: int, h: int, i: int, j: int) -> float:
        g = h // (self.q.shape[1] // self.k.shape[1])
        at_q, at_k = int(self.where[0][b, i]), int(self.where[1][b, j])
        block = at_q // self.recipe.train_length
        if self.recipe.rotate_first:
            q, k = self._rotated(block, scalars.rule(self.recipe, at_q, at_k))
            return float(q[b, h, i] @ k[b, g, j])
        query = self.q[b, h, i]
        if self.recipe.shape == "PoPE" and self.recipe.position != "none":
            return self._polar(query, self.k[b, g, j], g, at_q, at_k)
        if self.recipe.position != "none":
            left, right = scalars.rotated_at(self.recipe, at_q, at_k)
            query = rotated(query, self.recipe, left - right, block, left - right)
        return float(query @ self.k[b, g, j])

    def _polar(self, q: Array, k: Array, g: int, at_q: int, at_k: int) -> float:
        """Sizes by softplus, angles by position, one feature at a time."""
        block = at_q // self.recipe.train_length
        theta = scalars.frequencies(self.recipe, 2 * len(q), block)
        left, right = scalars.rotated_at(self.recipe, at_q, at_k)
        delta = self.learned["position.delta"]
        return sum(
            math.log1p(math.exp(q[c]))
            * math.log1p(math.exp(k[c]))
            * math.cos((left - right) * theta[c] - float(delta[g, c]))
            for c in range(len(q))
        )


def _weights(recipe: Recipe, scores: Mapping[int, float], i: int) -> dict[int, float]:
    """The weights of a row's visible keys, by their positions, where they are not softmax's."""
    if recipe.normaliser.startswith("StickBreaking"):
        return scalars.broken(recipe, scores, i)
    if recipe.normaliser.startswith("Entmax"):
        return scalars.entmax(recipe, scores)
    tokens = 5 if "tokens=5" in recipe.normaliser else recipe.train_length
    return {j: 1 / (1 + tokens * math.exp(-s)) for j, s in scores.items()}


def attend(
    recipe: Recipe,
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    mask: npt.NDArray[np.generic] | None = None,
    padding: npt.NDArray[np.bool_] | None = None,
    query_padding: npt.NDArray[np.bool_] | None = None,
    q_positions: npt.NDArray[np.int64] | None = None,
    k_positions: npt.NDArray[np.int64] | None = None,
    documents: npt.NDArray[np.int64] | None = None,
    learned: Mapping[str, Array] | None = None,
    below: Array | None = None,
    layers: int = 1,
) -> Array:
    """o_i = Σ_j softmax_j(s(i, j)) v_j, (B, H, T, E); 0 for a query that sees no key.

    `below` (B, H, T, S) holds the scores of the layers below, which this layer joins; softmax reads
    the sum over `layers`.
    """
    learned = {} if learned is None else learned
    batch, heads, queries, d = q.shape
    groups, keys = heads // k.shape[1], k.shape[2]
    real = None if padding is None else ~padding
    own = None if query_padding is None else ~query_padding
    documents = None if documents is None else runs(documents, padding)
    where_q, where_k = places(queries, keys, batch, padding, q_positions, k_positions, documents)
    product = _Products(recipe, q, k, (where_q, where_k), learned, real, own)
    full = np.broadcast_to(True if mask is None else mask, (batch, heads, queries, keys))
    n = counts((where_q, where_k), causal, padding, documents, full)
    out = np.zeros((batch, heads, queries, v.shape[-1]))
    g = float(learned.get("scale", np.array(1.0)))
    taken = np.zeros((batch, queries + 1, keys))
    for b, h, i in np.ndindex(batch, heads, queries):
        seen, scores = [], []
        factor = scalars.scale(recipe, d, int(n[b, h, i]), g)
        if "logn.s" in learned:
            slope, shift = (float(learned.get(f"logn.{x}", np.zeros(heads))[h]) for x in "sb")
            factor *= scalars.growth(recipe, int(n[b, h, i]), slope, shift)
        p, a = (float(learned.get(f"bias.{x}", np.ones(heads))[h]) for x in "pa")
        for j in range(keys):
            at_q, at_k = int(where_q[b, i]), int(where_k[b, j])
            if (causal and at_q < at_k) or (padding is not None and padding[b, j]):
                continue
            other = documents is not None and documents[b, keys - queries + i] != documents[b, j]
            if other or not scalars.sees(recipe, at_q, at_k):
                continue
            added = 0.0
            if full.dtype != np.bool_:
                added = float(full[b, h, i, j])
            elif not full[b, h, i, j]:
                continue
            if added == -math.inf:
                continue
            score = factor * product(b, h, i, j)
            if below is not None:
                below[b, h, i, j] += score
                score = float(below[b, h, i, j]) / layers
            if recipe.cap is not None:
                score = recipe.cap * math.tanh(score / recipe.cap)
            if recipe.bias == "FIRE":
                score += scalars.fire(recipe, h, at_q, at_k, learned)
            elif not recipe.whole_rows:
                score -= scalars.penalty(recipe, h, heads, abs(at_q - at_k), p, a)
            seen.append(j)
            scores.append(score + added)
        at = [int(where_k[b, j]) for j in seen]
        if recipe.bias.startswith("CoPE"):
            row = dict(zip(at, scores, strict=True))
            more = scalars.counted(recipe, row, factor * product.q[b, h, i], learned["bias.e"])
            scores = [score + more[place] for score, place in zip(scores, at, strict=True)]
        if recipe.normaliser == "Selective":
            if h == 0:
                # What queries up to this one took from each key, for the next.
                taken[b, i + 1] = taken[b, i]
                padded = padding is not None and padding[b, keys - queries + i]
                for j, s, place in zip(seen, scores, at, strict=True):
                    if place not in (0, int(where_q[b, i])) and not padded:
                        taken[b, i + 1, j] += max(s, 0.0)
            scores = [s - taken[b, i, j] for s, j in zip(scores, seen, strict=True)]
        elif recipe.normaliser:
            weights = _weights(recipe, dict(zip(at, scores, strict=True)), int(where_q[b, i]))
            for j, place in zip(seen, at, strict=True):
                out[b, h, i] += weights[place] * v[b, h // groups, j]
            continue
        extra = [float(learned["sink"][h])] if "sink" in learned else []
        top = max(scores + extra, default=0.0)
        total = sum(math.exp(s - top) for s in scores + extra)
        for j, s in zip(seen, scores, strict=True):
            out[b, h, i] += math.exp(s - top) / total * v[b, h // groups, j]
    return out
