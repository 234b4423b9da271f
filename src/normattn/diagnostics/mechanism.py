"""The source's explanation of KeyNorm, measured in one trained model (kexue.fm/archives/9859)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from normattn.data.evaluation_sets import EvaluationSet
from normattn.diagnostics.cosines import count_cosines
from normattn.diagnostics.ranks import rank_correlation
from normattn.diagnostics.received import received_attention
from normattn.diagnostics.watching import Seen, watching
from normattn.kernels.cosines import BINS
from normattn.measure import Identity, identified, joined, sums
from normattn.models import CausalLM
from normattn.models.dropout import without_dropout

Array = NDArray[np.float64]
DENSITY = (np.linspace(-1.5, 1.5, 42), np.linspace(-6.0, 6.0, 42))
"""Edges of `density`: log2 of ‖k‖ over its mean, and log2 of the attention received."""

# Norms that differ by less than this share of their mean differ by rounding only.
_SAME = 1e-4


def measure_mechanism(
    model: CausalLM,
    texts: EvaluationSet,
    *,
    seed: int,
    weights: str,
    tokens_per_batch: int = 4096,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pl.DataFrame:
    """Read each text whole and its first L tokens alone, and measure what the scores do.

    Key norms and attention received are those at L, over a horizon of L/2; cosines are counted at
    both lengths (`cosine`, per head, in equal bins over −1 … 1). `correlation`: Spearman's, of
    ‖k_j‖ with the attention that j receives, over the texts in which norms differ at all;
    `raw_correlation` of the key before its normalisation; `spread`: the standard deviation of ‖k_j‖
    over its mean; `density`: keys by log2 of ‖k‖ over its mean and, as the factor `received`, log2
    of the attention received. `tokens_per_batch` bounds memory; `progress` is told texts done.
    """
    counts = _Counts(model, texts)
    rows = max(1, tokens_per_batch // texts.length)
    device = next(model.parameters()).device
    with without_dropout(model), torch.no_grad():
        for first in range(0, len(texts), rows):
            part = slice(first, min(first + rows, len(texts)))
            ids = torch.from_numpy(np.array(texts.windows[part], dtype=np.int64)).to(device)
            with watching(model, counts.near(part)):
                model.hidden(ids[:, : texts.train_length])
            with watching(model, counts.far(part)):
                model.hidden(ids[:, : texts.length])
            progress(part.stop, len(texts))
    return counts.measured(seed, weights)


class _Counts:
    """Sums by document and head, filled layer by layer."""

    def __init__(self, model: CausalLM, texts: EvaluationSet) -> None:
        self.model, self.texts = model, texts
        self.documents = sorted(set(texts.documents))
        numbers = {name: index for index, name in enumerate(self.documents)}
        self.document_of = np.array([numbers[name] for name in texts.documents])
        config = model.config
        self.layers, self.heads = config.layers, config.heads
        shape = (len(self.documents), self.layers, self.heads)
        names = ("correlation", "varied", "raw_correlation", "spread")
        self.sums = {name: np.zeros(shape) for name in names}
        self.cosines = {name: np.zeros((*shape, BINS), np.int64) for name in ("near", "far")}
        self.ends = {
            name: np.tile([np.inf, -np.inf], (len(self.documents), 1)) for name in ("near", "far")
        }
        self.density = np.zeros([len(edges) - 1 for edges in DENSITY], np.int64)

    def near(self, part: slice) -> Callable[[Seen], None]:
        def see(seen: Seen) -> None:
            self._cosines("near", part, seen)
            self._norms(part, seen)

        return see

    def far(self, part: slice) -> Callable[[Seen], None]:
        return lambda seen: self._cosines("far", part, seen)

    def _cosines(self, name: str, part: slice, seen: Seen) -> None:
        counted = count_cosines(seen)
        rows = self.document_of[part]
        np.add.at(self.cosines[name][:, seen.layer], rows, counted.counts.cpu().numpy())
        ends = self.ends[name]
        np.minimum.at(ends[:, 0], rows, counted.least.amin(-1).cpu().numpy())
        np.maximum.at(ends[:, 1], rows, counted.most.amax(-1).cpu().numpy())

    def _norms(self, part: slice, seen: Seen) -> None:
        received = received_attention(seen, max(1, self.texts.train_length // 2))
        kept = received.shape[-1]
        norms = _key_norms(seen.problem.k, self.heads)[..., :kept]
        spread = norms.std(-1, correction=0) / norms.mean(-1)
        varied = spread > _SAME
        correlation = rank_correlation(norms, received)
        raw = rank_correlation(_key_norms(seen.key, self.heads)[..., :kept], received)
        values = {
            "spread": spread,
            "varied": varied.double(),
            "correlation": torch.where(varied, correlation, 0.0),
            "raw_correlation": raw.nan_to_num(0.0),
        }
        for name, value in values.items():
            rows = self.sums[name][:, seen.layer]
            np.add.at(rows, self.document_of[part], value.nan_to_num(0.0).cpu().numpy())
        x = (norms / norms.mean(-1, keepdim=True)).log2().clamp(*_ends(DENSITY[0]))
        y = received.clamp_min(1e-12).log2().clamp(*_ends(DENSITY[1]))
        flat = (x.flatten().cpu().numpy(), y.flatten().cpu().numpy())
        self.density += np.histogram2d(*flat, bins=DENSITY)[0].astype(np.int64)

    def measured(self, seed: int, weights: str) -> pl.DataFrame:
        """The sums as rows of the frame."""
        near = [
            self._by_head("correlation", self.sums["correlation"], self.sums["varied"]),
            self._by_head("raw_correlation", self.sums["raw_correlation"], self.windows),
            self._by_head("spread", self.sums["spread"], self.windows),
            *self._cosine_rows("near"),
        ]
        whose = self._identity(seed, weights, self.texts.train_length)
        density = [
            identified(replace(whose, factors={"received": float(low)}), [self._densities(index)])
            for index, low in enumerate(DENSITY[1][:-1])
        ]
        far = self._identity(seed, weights, self.texts.length)
        frames = [identified(whose, near), identified(far, self._cosine_rows("far")), *density]
        return joined(frames)

    def _identity(self, seed: int, weights: str, length: int) -> Identity:
        score = self.model.config.score
        return Identity(
            study="",
            row=score.variant_name,
            score=str(score),
            seed=seed,
            protocol="mechanism",
            length=length,
            train_length=self.texts.train_length,
            data=self.texts.fingerprint,
            weights=weights,
        )

    @property
    def windows(self) -> NDArray[np.float64]:
        """Texts of each document, (documents, 1, 1)."""
        counted = np.bincount(self.document_of, minlength=len(self.documents))
        return counted.astype(float)[:, None, None]

    def _by_head(self, name: str, above: Array, below: Array, **axis: Any) -> pl.DataFrame:
        """(documents, layers, heads, bins of an axis if there is one)."""
        below = np.broadcast_to(below, above.shape)
        return pl.concat(
            sums(name, self.documents, above[at], below[at], layer=at[1], head=at[2], **axis)
            for at in product((slice(None),), range(self.layers), range(self.heads))
        )

    def _cosine_rows(self, name: str) -> list[pl.DataFrame]:
        counts, edges = self.cosines[name].astype(np.float64), np.linspace(-1.0, 1.0, BINS + 1)
        ends = self.ends[name]
        ones = np.ones(len(ends))
        return [
            self._by_head("cosine", counts, counts, axis="cosine", edges=edges.tolist()),
            sums("least_cosine", self.documents, ends[:, 0], ones),
            sums("largest_cosine", self.documents, ends[:, 1], ones),
        ]

    def _densities(self, index: int) -> pl.DataFrame:
        """Keys by log2 of ‖k‖ over its mean, at one bin of the attention received."""
        counts = self.density[None, :, index].astype(float)
        return sums("density", ["all"], counts, counts, axis="log2 norm", edges=DENSITY[0].tolist())


def _key_norms(k: Tensor, heads: int) -> Tensor:
    """‖k_j‖ for every query head, (B, H, S), in float64."""
    norms: Tensor = k.double().norm(dim=-1)
    return norms.repeat_interleave(heads // k.shape[1], 1)


def _ends(edges: NDArray[np.float64]) -> tuple[float, float]:
    """The ends of the edges, the last one just inside."""
    return float(edges[0]), float(edges[-1]) - 1e-9
