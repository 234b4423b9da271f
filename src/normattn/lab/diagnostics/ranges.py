"""What leaves its trained range on longer text, and what positions never trained cost there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from normattn.errors import InputError
from normattn.kernels.cosines import BINS
from normattn.lab.diagnostics.alpha import alpha
from normattn.lab.diagnostics.key_norms import Documents
from normattn.lab.diagnostics.watching import Seen
from normattn.lab.stats import sums
from normattn.models import CausalLM

TAIL = 0.001
"""The share of the cosines at L left out at either end of their range."""

REGIONS = ("near inside", "near outside", "far inside", "far outside")
"""Pairs by i − j < L (trained) or ≥ L (never trained), and by their cosine's trained range."""

# Query rows whose pairs are held at once.
_ROWS = 64


def trained_range(counts: NDArray[np.float64]) -> NDArray[np.bool_]:
    """The bins of a head's range, (…, bins), from its cosines' histogram at L.

    Those that hold any of the cosines but for `TAIL` of them at either end.
    """
    shares = counts.cumsum(-1) / counts.sum(-1, keepdims=True)
    before = np.concatenate((np.zeros_like(shares[..., :1]), shares[..., :-1]), axis=-1)
    return np.asarray((shares > TAIL) & (before < 1 - TAIL))


@torch.no_grad()
def pairs_by_region(
    seen: Seen, inside: Bool[Tensor, "h bins"], length: int
) -> tuple[Float[Tensor, "b h 4"], Float[Tensor, "b h 4"]]:
    """Visible pairs and attention in each of the `REGIONS`.

    Of pairs their count; of attention Σ_i Σ_j α_ij over the queries at i ≥ L = `length` alone,
    which are those that can see a distance never trained. `inside` is each head's `trained_range`.
    Computed in blocks of query rows, cosines in float64: no (T, S) matrix is kept.
    """
    problem, visibility = seen.problem, seen.problem.visibility
    q, k = (normalize(x.double(), dim=-1) for x in (problem.q, problem.k))
    batch, heads, queries = q.shape[:3]
    k = k.repeat_interleave(heads // k.shape[1], 1).transpose(-1, -2)
    pairs = torch.zeros(batch, heads, len(REGIONS), dtype=torch.float64, device=q.device)
    attention = torch.zeros_like(pairs)
    head = torch.arange(heads, device=q.device)[:, None, None]
    for first in range(0, queries, _ROWS):
        rows = slice(first, min(first + _ROWS, queries))
        # Later keys are seen by none of these rows.
        keys = k.shape[-1]
        aligned = visibility.causal and visibility.aligned
        upto = rows.stop + keys - queries if aligned else keys
        columns = slice(0, upto)
        bin_of = _bins(q[:, :, rows] @ k[..., columns])
        outside = (~inside).double()[head, bin_of]
        far = (visibility.distance(rows, columns) >= length).double()
        hidden = visibility.hidden(rows, columns)
        visible = torch.ones_like(far) if hidden is None else (~hidden).double()
        pairs += _by_region(visible.expand(outside.shape), outside, far)
        weights = alpha(problem, torch.arange(rows.start, rows.stop, device=q.device))
        late = (visibility.query[..., rows] >= length).double()[..., None]
        late = late[:, None] if late.dim() == 3 else late
        attention += _by_region(weights[..., columns].double() * late, outside, far)
    return pairs, attention


def _bins(cosine: Tensor) -> Int[Tensor, "b h r s"]:
    """As `kernels.cosines` counts them."""
    return cosine.clamp(-1, 1).add_(1).mul_(BINS / 2).long().clamp_(max=BINS - 1)


def _by_region(
    values: Float[Tensor, "b h r s"], outside: Float[Tensor, "b h r s"], far: Tensor
) -> Float[Tensor, "b h 4"]:
    """Sums of values in each of the `REGIONS`; `outside` and `far` are 1 or 0."""
    whole, beyond = (_near_and_far(part, far) for part in (values, values * outside))
    return torch.stack((whole - beyond, beyond), -1).flatten(-2)


def _near_and_far(values: Float[Tensor, "b h r s"], far: Tensor) -> Float[Tensor, "b h 2"]:
    """Sums over pairs nearer than L, and over the rest; `far` is (r, s) or (b, 1, r, s)."""
    kinds = torch.stack((1 - far, far), -1).flatten(-3, -2)
    return values.flatten(2) @ (kinds if kinds.dim() == 2 else kinds[:, 0])


class RangeCounts:
    """Pairs and attention at the longer length in each of the `REGIONS`, by document and head.

    Rows, by the number of the region: `pairs`, of all pairs that are seen; `attention`, Σ α over
    the queries at i ≥ L, of those queries. What the attention lacks to 1 a learned sink has.
    """

    def __init__(self, documents: Documents, near: NDArray[np.int64], length: int) -> None:
        """`near` are the cosines' histograms at L, (documents, layers, heads, bins)."""
        self.documents, self.length = documents, length
        self.inside = torch.from_numpy(trained_range(near.sum(0).astype(np.float64)))
        heads = near.shape[2]
        self.pairs = documents.room(heads, len(REGIONS))
        self.attention, self.queries = self.pairs.copy(), documents.room(heads, 1)

    def add(self, part: slice, seen: Seen) -> None:
        """Add what a layer has in a part of the texts."""
        inside = self.inside[seen.layer].to(seen.problem.q.device)
        pairs, attention = pairs_by_region(seen, inside, self.length)
        late = (seen.problem.visibility.query >= self.length).sum(-1)
        self.documents.add(self.pairs, part, seen.layer, pairs)
        self.documents.add(self.attention, part, seen.layer, attention)
        counted = late.expand(pairs.shape[0])[:, None, None].expand(*pairs.shape[:2], 1)
        self.documents.add(self.queries, part, seen.layer, counted)

    def measured(self) -> list[pl.DataFrame]:
        """The rows of the frame, without an identity."""
        whole = self.pairs.sum(-1, keepdims=True)
        named = {"axis": "region", "edges": list(range(len(REGIONS)))}
        return [
            self.documents.rows("pairs", self.pairs, whole, **named),
            self.documents.rows("attention", self.attention, self.queries, **named),
        ]


READINGS = ("alone", "as is", "clamped")
"""The last L tokens with nothing before them; behind the whole text; the same with every relative
position of at least L − 1 read as L − 1 (ReRoPE, w = L − 1), so that none is unseen."""


class ClampedReading:
    """Accuracy and loss of the same last L tokens in each of the `READINGS`, by document.

    Rows, by the number of the reading: `last_accuracy`, right predictions of all; `last_loss`,
    nats. A score without rotary positions, or with a rule of its own for far ones, cannot be
    clamped: `of` is 0 there.
    """

    def __init__(self, documents: Documents, length: int) -> None:
        self.documents, self.length = documents, length
        shape = (len(documents.names), len(READINGS))
        self.correct, self.loss, self.tokens = (np.zeros(shape) for _ in range(3))

    def add(self, part: slice, model: CausalLM, ids: Int[Tensor, "b t1"]) -> None:
        """Read a part of the texts, whose last tokens are only predicted."""
        self._score(part, 0, model, ids[:, -self.length - 1 :])
        self._score(part, 1, model, ids)
        with _clamped(model, self.length - 1) as possible:
            if possible:
                self._score(part, 2, model, ids)

    def _score(self, part: slice, reading: int, model: CausalLM, ids: Tensor) -> None:
        scored = model.token_scores(ids)
        rows = self.documents.of_text[part]
        for total, values in (
            (self.correct, scored.correct),
            (self.loss, scored.loss),
            (self.tokens, torch.ones_like(scored.loss)),
        ):
            last = values[:, -self.length :].double().sum(-1)
            np.add.at(total[:, reading], rows, last.cpu().numpy())

    def measured(self) -> list[pl.DataFrame]:
        """The rows of the frame, without an identity."""
        names, edges = self.documents.names, list(range(len(READINGS)))
        return [
            sums(name, names, above, self.tokens, axis="reading", edges=edges)
            for name, above in (("last_accuracy", self.correct), ("last_loss", self.loss))
        ]


@contextmanager
def _clamped(model: CausalLM, window: int) -> Iterator[bool]:
    """The model reading no relative position beyond `window`; False where its score cannot."""
    try:
        method = model.using("ReRoPE", window=window)
    except InputError:
        yield False
        return
    with method:
        yield True
