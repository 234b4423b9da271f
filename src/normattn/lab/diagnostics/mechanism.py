"""The source's explanation of KeyNorm, measured in one trained model (kexue.fm/archives/9859)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from normattn.kernels.cosines import BINS
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.diagnostics.cosines import count_cosines
from normattn.lab.diagnostics.key_norms import (
    Documents,
    NormPositions,
    key_norms,
    rank_correlation,
    received_attention,
    spread,
    varied,
)
from normattn.lab.diagnostics.ranges import ClampedReading, RangeCounts
from normattn.lab.diagnostics.watching import Seen, watching
from normattn.lab.stats import Identity, identified, joined, sums
from normattn.models import CausalLM
from normattn.models.utils import without_dropout

DENSITY = (np.linspace(-1.5, 1.5, 42), np.linspace(-6.0, 6.0, 42))
"""Edges of `density`: log2 of ‖k‖ over its mean, and log2 of the attention received."""


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
    of the attention received. What norms say of positions is `NormPositions`', at L; what leaves
    its trained range, near and far, `RangeCounts`', at the longer length, and what unseen positions
    cost there `ClampedReading`'s. `tokens_per_batch` bounds memory; `progress` is told texts done.
    """
    counts = _Counts(model, texts)
    rows = max(1, tokens_per_batch // texts.length)
    starts = range(0, len(texts), rows)
    parts = [slice(first, min(first + rows, len(texts))) for first in starts]
    with without_dropout(model), torch.no_grad():
        for part in parts:
            with watching(model, counts.near(part)):
                model.hidden(_ids(model, texts, part, texts.train_length))
        # The range at L is known only now.
        ranges = RangeCounts(counts.documents, counts.cosines["near"], texts.train_length)
        for part in parts:
            with watching(model, counts.far(part, ranges)):
                model.hidden(_ids(model, texts, part, texts.length))
            counts.clamped.add(part, model, _ids(model, texts, part, texts.length + 1))
            progress(part.stop, len(texts))
    return counts.measured(seed, weights, ranges)


def _ids(model: CausalLM, texts: EvaluationSet, part: slice, length: int) -> Tensor:
    """The first `length` tokens of some texts, where the model is."""
    ids = np.array(texts.windows[part, :length], dtype=np.int64)
    return torch.from_numpy(ids).to(next(model.parameters()).device)


class _Counts:
    """Sums by document and head, filled layer by layer."""

    def __init__(self, model: CausalLM, texts: EvaluationSet) -> None:
        self.model, self.texts = model, texts
        config = model.config
        self.heads = config.heads
        documents = self.documents = Documents(texts.documents, config.layers)
        names = ("correlation", "varied", "raw_correlation", "spread")
        self.sums = {name: documents.room(self.heads) for name in names}
        self.cosines = {
            name: documents.room(self.heads, BINS, dtype=np.int64) for name in ("near", "far")
        }
        self.ends = {
            name: np.tile([np.inf, -np.inf], (len(documents.names), 1)) for name in ("near", "far")
        }
        self.density = np.zeros([len(edges) - 1 for edges in DENSITY], np.int64)
        key_heads = config.kv_heads or config.heads
        self.positions = NormPositions(documents, key_heads, texts.train_length)
        self.clamped = ClampedReading(documents, texts.train_length)

    def near(self, part: slice) -> Callable[[Seen], None]:
        def see(seen: Seen) -> None:
            self._cosines("near", part, seen)
            self._norms(part, seen)
            self.positions.add(part, seen)

        return see

    def far(self, part: slice, ranges: RangeCounts) -> Callable[[Seen], None]:
        def see(seen: Seen) -> None:
            self._cosines("far", part, seen)
            ranges.add(part, seen)

        return see

    def _cosines(self, name: str, part: slice, seen: Seen) -> None:
        counted = count_cosines(seen)
        self.documents.add(self.cosines[name], part, seen.layer, counted.counts)
        rows, ends = self.documents.of_text[part], self.ends[name]
        np.minimum.at(ends[:, 0], rows, counted.least.amin(-1).cpu().numpy())
        np.maximum.at(ends[:, 1], rows, counted.most.amax(-1).cpu().numpy())

    def _norms(self, part: slice, seen: Seen) -> None:
        received = received_attention(seen, max(1, self.texts.train_length // 2))
        kept = received.shape[-1]
        norms = _by_query_head(seen.problem.k, self.heads)[..., :kept]
        differ = varied(norms)
        correlation = rank_correlation(norms, received)
        raw = rank_correlation(_by_query_head(seen.key, self.heads)[..., :kept], received)
        values = {
            "spread": spread(norms),
            "varied": differ.double(),
            "correlation": torch.where(differ, correlation, 0.0),
            "raw_correlation": raw.nan_to_num(0.0),
        }
        for name, value in values.items():
            self.documents.add(self.sums[name], part, seen.layer, value.nan_to_num(0.0))
        x = (norms / norms.mean(-1, keepdim=True)).log2().clamp(*_ends(DENSITY[0]))
        y = received.clamp_min(1e-12).log2().clamp(*_ends(DENSITY[1]))
        flat = (x.flatten().cpu().numpy(), y.flatten().cpu().numpy())
        self.density += np.histogram2d(*flat, bins=DENSITY)[0].astype(np.int64)

    def measured(self, seed: int, weights: str, ranges: RangeCounts) -> pl.DataFrame:
        """The sums as rows of the frame."""
        rows, texts = self.documents.rows, self.documents.texts
        near = [
            rows("correlation", self.sums["correlation"], self.sums["varied"]),
            rows("raw_correlation", self.sums["raw_correlation"], texts),
            rows("spread", self.sums["spread"], texts),
            *self.positions.measured(),
            *self._cosine_rows("near"),
        ]
        whose = self._identity(seed, weights, self.texts.train_length)
        density = [
            identified(replace(whose, factors={"received": float(low)}), [self._densities(index)])
            for index, low in enumerate(DENSITY[1][:-1])
        ]
        longer = self._identity(seed, weights, self.texts.length)
        far = [*self._cosine_rows("far"), *ranges.measured(), *self.clamped.measured()]
        return joined([identified(whose, near), identified(longer, far), *density])

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

    def _cosine_rows(self, name: str) -> list[pl.DataFrame]:
        counts, edges = self.cosines[name].astype(np.float64), np.linspace(-1.0, 1.0, BINS + 1)
        ends = self.ends[name]
        ones = np.ones(len(ends))
        return [
            self.documents.rows("cosine", counts, counts, axis="cosine", edges=edges.tolist()),
            sums("least_cosine", self.documents.names, ends[:, 0], ones),
            sums("largest_cosine", self.documents.names, ends[:, 1], ones),
        ]

    def _densities(self, index: int) -> pl.DataFrame:
        """Keys by log2 of ‖k‖ over its mean, at one bin of the attention received."""
        counts = self.density[None, :, index].astype(float)
        return sums("density", ["all"], counts, counts, axis="log2 norm", edges=DENSITY[0].tolist())


def _by_query_head(k: Tensor, heads: int) -> Tensor:
    """‖k_j‖ for every query head, (B, H, S), in float64."""
    return key_norms(k).repeat_interleave(heads // k.shape[1], 1)


def _ends(edges: NDArray[np.float64]) -> tuple[float, float]:
    """The ends of the edges, the last one just inside."""
    return float(edges[0]), float(edges[-1]) - 1e-9
