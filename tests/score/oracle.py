"""The definition of truth: attention over a `Recipe`, in float64 and plain torch operations.

Each of the T·S pairs is rotated by itself, as complex numbers. Gradients are autograd's. It shares
no code with the library, and takes a `Recipe`, not a specification.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import recipe as scalars
from .recipe import Recipe as Recipe

Places = npt.NDArray[np.int64]
Learned = Mapping[str, Tensor]


def runs(documents: Places, padding: npt.NDArray[np.bool_] | None) -> Places:
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
    q_positions: Places | None,
    k_positions: Places | None,
    documents: Places | None = None,
) -> tuple[Places, Places]:
    """Positions (B, T) and (B, S): counted from the first real token, queries at the end."""
    key = np.zeros((batch, keys), np.int64)
    for b in range(batch):
        count = 0
        for j in range(keys):
            if documents is not None and j > 0 and documents[b, j] != documents[b, j - 1]:
                count = 0
            count += padding is None or not padding[b, j]
            key[b, j] = max(count - 1, 0)
    if k_positions is not None:
        key[:] = k_positions
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
    documents: Places | None,
    mask: npt.NDArray[np.bool_] | npt.NDArray[np.float64],
) -> Places:
    """n of every head's query (B, H, T): the keys that it may see, windows and chunks aside.

    Causal, keys before the first one given are seen as well: n is the position + 1, less the keys
    that the mask (B, H, T, S) hides.
    """
    query, key = where[0][:, :, None], where[1][:, None]
    there = np.ones(np.broadcast_shapes(query.shape, key.shape), bool)
    if documents is not None:
        there &= documents[:, documents.shape[1] - query.shape[1] :, None] == documents[:, None]
    if padding is not None:
        there &= ~padding[:, None]
    hidden = np.logical_not(mask) if mask.dtype == np.bool_ else np.isneginf(mask)
    if causal:
        n = query[:, None, :, 0] + 1 - ((there & (key <= query))[:, None] & hidden).sum(-1)
    else:
        n = (there[:, None] & ~hidden).sum(-1)
    least: Places = np.maximum(n, 1).astype(np.int64)
    return least


def normed(recipe: Recipe, side: str, x: Tensor, learned: Learned, real: Tensor | None) -> Tensor:
    """N(x), x (B, H, T, D)."""
    kind = recipe.kind(side)
    if not kind:
        return x
    if kind == "l2":
        return x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-12)
    if kind in ("layer", "rms"):
        dims = (1, 3) if recipe.across == "all" else (3,)
        centre = x.mean(dims, keepdim=True) if kind == "layer" else torch.zeros_like(x)
        y = (x - centre) / ((x - centre).square().mean(dims, keepdim=True) + recipe.eps).sqrt()
    else:
        dims = (0, 2) if kind == "batch" else (2,)
        keep = torch.ones_like(x[:, :1, :, :1]) if real is None else real[:, None, :, None]
        keep = keep.to(x).expand(x.shape[0], 1, x.shape[2], 1)
        count = keep.sum(dims, keepdim=True)
        centre = (x * keep).sum(dims, keepdim=True) / count
        variance = ((x - centre).square() * keep).sum(dims, keepdim=True) / count
        y = (x - centre) / (variance + recipe.eps).sqrt()
    for word, apply in (("gain", torch.mul), ("bias", torch.add)):
        if f"{side}.{word}" in learned:
            value = learned[f"{side}.{word}"].reshape(-1, x.shape[-1])
            y = apply(y, value.expand(x.shape[1], -1)[None, :, None])
    return y


def _rotated(recipe: Recipe, x: Tensor, at: Tensor, theta: Tensor, growing: float = 0.0) -> Tensor:
    """x (B, H, N, D) rotated at the positions (B, N) by frequencies (B, N, P), as complex numbers.

    `growing` is +1 where pairs grow with the position, -1 where they shrink.
    """
    first = scalars.start(recipe, x.shape[-1])
    end = first + 2 * theta.shape[-1]
    if recipe.position == "half":
        a, b = x[..., first:end].chunk(2, -1)
    else:
        a, b = x[..., first:end].reshape(*x.shape[:-1], -1, 2).unbind(-1)
    decay = torch.tensor(scalars.decays(recipe, x.shape[-1]), dtype=torch.float64)
    phase = torch.exp((1j * theta + growing * decay) * at[..., None])[:, None]
    y = torch.complex(a, b) * phase
    turned = _side_by_side(recipe, y.real, y.imag)
    return torch.cat((x[..., :first], turned, x[..., end:]), -1)


def _side_by_side(recipe: Recipe, a: Tensor, b: Tensor) -> Tensor:
    half = recipe.position == "half"
    return torch.cat((a, b), -1) if half else torch.stack((a, b), -1).flatten(-2)


def _products(
    recipe: Recipe,
    q: Tensor,
    k: Tensor,
    where: tuple[Places, Places],
    learned: Learned,
    real: Tensor | None,
    own: Tensor | None,
) -> Tensor:
    """⟨P N(q), P N(k)⟩ or ⟨N(P q), N(P k)⟩ of all pairs, (B, H, T, S).

    A pair may be rotated at positions of its own, so each is: as T·S tokens.
    """
    batch, heads, queries, d = q.shape
    keys, groups = k.shape[2], heads // k.shape[1]

    def norm(side: str, x: Tensor) -> Tensor:
        return normed(recipe, side, x, learned, own if side == "Q" else real)

    if not recipe.rotate_first:
        q, k = norm("Q", q), norm("K", k)
    if recipe.shape == "PoPE" and recipe.position != "none":
        delta = learned["position.delta"][:, None]
        size_q, size_k = ((1 + x.exp()).log() for x in (q, k))
        q = _side_by_side(recipe, size_q, 0 * size_q)
        k = _side_by_side(recipe, size_k * delta.cos(), size_k * delta.sin())
    if recipe.position == "none":
        return torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(groups, 1))
    size = scalars.rotary_dim(recipe, d)
    blocks = where[0] // recipe.train_length
    theta = torch.tensor(
        [[scalars.frequencies(recipe, size, int(n)) for n in row] for row in blocks],
        dtype=torch.float64,
    )
    if recipe.leaks and recipe.rotate_first:
        # Statistics over tokens: each stands at one position only.
        q = norm("Q", _rotated(recipe, q, torch.from_numpy(where[0]), theta))
        k = norm("K", _rotated(recipe, k, torch.from_numpy(where[1]), theta[:, :1]))
        return torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(groups, 1))
    at = torch.tensor(
        [
            [[scalars.rotated_at(recipe, int(i), int(j)) for j in columns] for i in rows]
            for rows, columns in zip(*where, strict=True)
        ],
        dtype=torch.float64,
    )
    wide = theta[:, :, None].expand(-1, -1, keys, -1).flatten(1, 2)
    left = q[:, :, :, None].expand(-1, -1, -1, keys, -1).flatten(2, 3)
    right = k[:, :, None].expand(-1, -1, queries, -1, -1).flatten(2, 3)
    left = _rotated(recipe, left, at[..., 0].flatten(1), wide, 1.0)
    right = _rotated(recipe, right, at[..., 1].flatten(1), wide, -1.0)
    if recipe.rotate_first:
        left, right = norm("Q", left), norm("K", right)
    product = (left * right.repeat_interleave(groups, 1)).sum(-1)
    return product.reshape(batch, heads, queries, keys)


def _penalty(recipe: Recipe, distance: Tensor, heads: int, learned: Learned) -> Tensor:
    """b(h, r), without its sign, (B, H, T, S)."""
    r = distance[:, None].double()
    if recipe.bias == "ALiBi":
        slopes = torch.tensor([scalars.alibi(h, heads) for h in range(heads)], dtype=torch.float64)
        return slopes[:, None, None] * r
    p, a = learned["bias.p"][:, None, None], learned["bias.a"][:, None, None]
    if recipe.bias == "KERPLELog":
        return p * (1 + a * r).log()
    return p * torch.where(r > 0, (a * r.clamp(min=1).log()).exp(), 0.0)


def _fire(recipe: Recipe, relative: Tensor, at: Tensor, learned: Learned) -> Tensor:
    """f(ln(1 + c·r)/ln(1 + c·max(μ·T, i))), (B, H, T, S), T a quarter of the training length."""
    names = ("c", "mu", "w_in", "b_in", "w_out", "b_out")
    c, mu, w_in, b_in, w_out, b_out = (learned[f"bias.{name}"] for name in names)
    threshold = mu * max(1, recipe.train_length // 4)
    whole = torch.where(at > threshold, at.double(), threshold)
    share = (1 + c * relative.clamp(min=0)).log() / ((1 + c * whole).log() + 1e-6)[:, :, None]
    units = torch.einsum("bts,w->bwts", share, w_in) + b_in[:, None, None]
    units = torch.where(units > 0, units, 0.0)
    return torch.einsum("hw,bwts->bhts", w_out, units) + b_out[:, None, None]


def _counted(score: Tensor, visible: Tensor, at: Tensor, query: Tensor, e: Tensor) -> Tensor:
    """⟨q, e[p]⟩ with p the sum of the gates of the keys from each on, pair by pair of keys."""
    gate = torch.where(visible, 1 / (1 + (-score).exp()), 0.0)
    # (…, j, l): whether key l stands at key j or after it.
    since = at[..., None, :] >= at[..., :, None]
    place = torch.where(since, gate[..., None, :], 0.0).sum(-1).clamp(max=len(e) - 1)
    low, high = place.floor().long(), place.ceil().long()
    vector = (place - low)[..., None] * e[high] + (1 - place + low)[..., None] * e[low]
    return torch.einsum("bhtd,bhtsd->bhts", query, vector)


def _weight(recipe: Recipe, score: Tensor, visible: Tensor, relative: Tensor, at: Tensor) -> Tensor:
    """The weights of rows where they are not softmax's; `at` are the positions of the keys."""
    if recipe.normaliser.startswith("Sigmoid"):
        tokens = 5 if "tokens=5" in recipe.normaliser else recipe.train_length
        return torch.where(visible, 1 / (1 + tokens * (-score).exp()), 0.0)
    if recipe.normaliser.startswith("Entmax"):
        return _entmax(recipe, score, visible)
    visible = visible if "current=true" in recipe.normaliser else visible & (relative > 0)
    share = torch.where(visible, 1 / (1 + (-score).exp()), 0.0)
    # (…, j, l): whether key l stands between key j and the query, and is seen.
    between = (at[..., None, :] > at[..., :, None]) & visible[..., None, :]
    return share * torch.where(between, 1 - share[..., None, :], 1.0).prod(-1)


def _entmax(recipe: Recipe, score: Tensor, visible: Tensor) -> Tensor:
    """Weights by halving, and dp = s·(dz − Σ s dz / Σ s), s = p^(2 − α), as in arXiv 1905.05702."""
    alpha = 1.25 if "1.25" in recipe.normaliser else 1.5
    x = ((alpha - 1) * score.detach()).masked_fill(~visible, -torch.inf)
    low = x.amax(-1, keepdim=True).clamp(min=-1e300) - 1
    high = low + 1
    for _ in range(70):
        tau = (low + high) / 2
        weight = (x - tau).clamp(min=0) ** (1 / (alpha - 1))
        large = weight.sum(-1, keepdim=True) > 1
        low, high = torch.where(large, tau, low), torch.where(large, high, tau)
    slope = torch.where(weight > 0, weight.clamp(min=1e-300) ** (2 - alpha), 0.0)
    moved = torch.where(visible, score, 0.0)
    moved = moved - moved.detach()
    mean = (slope * moved).sum(-1, keepdim=True) / slope.sum(-1, keepdim=True).clamp(min=1e-300)
    return weight + slope.detach() * (moved - mean)


def _taken(
    score: Tensor, visible: Tensor, relative: Tensor, at: Places, padding: Tensor | None
) -> Tensor:
    """What earlier rows of head 0 took from each key, (B, T, S)."""
    counts = visible & (relative != 0) & torch.from_numpy(at != 0)[:, None]
    if padding is not None:
        counts = counts & ~padding[:, -score.shape[1] :, None]
    chosen = torch.where(counts & (score > 0), score, 0.0)
    return torch.ones(score.shape[1], score.shape[1], dtype=score.dtype).tril(-1) @ chosen


def attend(
    recipe: Recipe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    mask: Tensor | None = None,
    padding: Tensor | None = None,
    query_padding: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    documents: Tensor | None = None,
    learned: Learned | None = None,
    drop: Tensor | None = None,
    below: list[Tensor] | None = None,
    layers: int = 1,
) -> Tensor:
    """o_i = Σ_j softmax_j(s(i, j)) v_j, (B, H, T, E); 0 for a query that sees no key.

    `drop` (B, H, T, S) multiplies the weights. `below` holds the scores of the layers below, which
    this layer joins; softmax reads their sum over `layers`.
    """
    learned = {} if learned is None else learned
    batch, heads, queries, d = q.shape
    keys, real = k.shape[2], None if padding is None else ~padding
    own = None if query_padding is None else ~query_padding
    padded = None if padding is None else padding.numpy()
    at = None if q_positions is None else q_positions.numpy()
    k_at = None if k_positions is None else k_positions.numpy()
    apart = None if documents is None else runs(documents.numpy(), padded)
    documents = None if apart is None else torch.from_numpy(apart)
    where = places(queries, keys, batch, padded, at, k_at, apart)
    relative = torch.from_numpy(where[0][:, :, None] - where[1][:, None, :])
    visible = torch.tensor(
        [
            [[scalars.sees(recipe, int(i), int(j)) for j in columns] for i in rows]
            for rows, columns in zip(*where, strict=True)
        ]
    )
    visible = visible & (relative >= 0) if causal else visible
    if documents is not None:
        visible = visible & (documents[:, keys - queries :, None] == documents[:, None])
    visible = visible[:, None].expand(batch, heads, -1, -1)
    if real is not None:
        visible = visible & real[:, None, None]
    given = np.array(True) if mask is None else mask.detach().numpy()
    allowed = np.broadcast_to(given, (batch, heads, queries, keys))
    n = counts(where, causal, padded, apart, allowed)
    factors = np.vectorize(lambda each: scalars.scale(recipe, d, int(each)), otypes=[float])(n)
    factor = torch.from_numpy(factors)[..., None]
    factor = factor * learned["scale"] if "scale" in learned else factor
    if "logn.s" in learned:
        grown = torch.from_numpy(n).double().log() * learned["logn.s"][:, None]
        grown = grown + learned["logn.b"][:, None] if "logn.b" in learned else grown
        factor = factor * grown[..., None]
    score = factor * _products(recipe, q, k, where, learned, real, own)
    if below is not None:
        below.append(score)
        score = sum(below, torch.zeros(())) / layers
    if recipe.cap is not None:
        score = recipe.cap * (score / recipe.cap).tanh()
    if recipe.bias == "FIRE":
        score = score + _fire(recipe, relative, torch.from_numpy(where[0]), learned)
    elif recipe.bias and not recipe.whole_rows:
        score = score - _penalty(recipe, relative.abs(), heads, learned)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        score = score + mask
    key_at = torch.from_numpy(where[1])[:, None, None]
    if recipe.bias.startswith("CoPE"):
        query = factor * normed(recipe, "Q", q, learned, own)
        score = score + _counted(score, visible, key_at, query, learned["bias.e"])
    if recipe.normaliser == "Selective":
        score = score - _taken(score[:, 0], visible[:, 0], relative, where[1], padding)[:, None]
    if recipe.normaliser in ("", "Selective"):
        top = score.detach().amax(-1, keepdim=True).clamp(min=-1e300)
        weight = torch.where(visible, (score - top).exp(), 0.0)
        total = weight.sum(-1, keepdim=True)
        if "sink" in learned:
            total = total + (learned["sink"][:, None, None] - top).exp()
        weight = weight / torch.where(total > 0, total, 1.0)
    else:
        weight = _weight(recipe, score, visible, relative[:, None], key_at)
    v = v.repeat_interleave(heads // v.shape[1], 1)
    return (weight if drop is None else weight * drop) @ v
