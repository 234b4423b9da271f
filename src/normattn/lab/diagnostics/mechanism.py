"""The source's explanation of KeyNorm, measured in one trained model (kexue.fm/archives/9859)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels.cosines import BINS
from normattn.lab.data.windows import EvaluationSet
from normattn.lab.diagnostics.keys import (
    FIRST,
    REGIONS,
    Array,
    Seen,
    count_cosines,
    first_norms,
    key_norms,
    pairs_by_region,
    position_correlation,
    rank_correlation,
    received_attention,
    spread,
    trained_range,
    varied,
    watching,
)
from normattn.lab.stats import Identity, identified, joined, sums
from normattn.models import CausalLM
from normattn.models.utils import without_dropout

DENSITY = (np.linspace(-1.5, 1.5, 42), np.linspace(-6.0, 6.0, 42))
"""Edges of `density`: log2 of ‖k‖ over its mean, and log2 of the attention received."""
READINGS = ("alone", "as is", "clamped")
"""The last L tokens with nothing before them; behind the whole text; the same with every relative
position of at least L − 1 read as L − 1 (ReRoPE, w = L − 1), so that none is unseen."""


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

    At L, over a horizon of L/2: `correlation`, Spearman's, of ‖k_j‖ with the attention that j
    receives, over the texts in which norms differ at all; `raw_correlation` of the key before its
    normalisation; `spread`, the standard deviation of ‖k_j‖ over its mean; `density`, keys by log2
    of ‖k‖ over its mean and, as the factor `received`, log2 of the attention received; `position`,
    Spearman's correlation of ‖k_j‖ with j for j ≥ F; `position_size`, the same with its sign
    (`signed_elsewhere`); `first_norms`, by j < F, ‖k_j‖ over the median norm of the later keys
    (these three also `raw_`, before the normalisation; none for texts of fewer than F + 2 tokens).

    At both lengths `cosine`, per head, in equal bins over −1 … 1. At the longer one, by region,
    `pairs` of all pairs that are seen and `attention` Σ α over the queries at i ≥ L; by reading
    (`READINGS`), `last_accuracy` and `last_loss` (nats) of the last L tokens. A score that cannot
    be clamped has `of` 0 there. `tokens_per_batch` bounds memory.
    """
    measured = _Mechanism(model, texts)
    rows = max(1, tokens_per_batch // texts.length)
    parts = [slice(first, first + rows) for first in range(0, len(texts), rows)]
    with without_dropout(model), torch.no_grad():
        for part in parts:
            with watching(model, partial(measured.at_train_length, part)):
                model.hidden(measured.ids(part, texts.train_length))
        # The range at L is known only now.
        inside = torch.from_numpy(trained_range(measured.near.sums["cosine"].sum(0)))
        for part in parts:
            with watching(model, partial(measured.beyond, part, inside)):
                model.hidden(measured.ids(part, texts.length))
            measured.read_last(part)
            progress(min(part.stop, len(texts)), len(texts))
    return measured.frame(seed, weights)


class DocumentSums:
    """Sums over the texts of each document, (D, layers, heads, …), and what they are over."""

    def __init__(self, document_of_text: Sequence[str], layers: int) -> None:
        self.names = sorted(set(document_of_text))
        self.of_text = np.searchsorted(self.names, document_of_text)
        self.layers = layers
        self.sums: dict[str, Array] = {}
        self.counts: dict[str, Array] = {}

    def add(
        self, name: str, part: slice, layer: int, values: Tensor, of: Tensor | float = 1.0
    ) -> None:
        """Add the values (B, H, …) that a layer has in a part of the texts, each over `of`."""
        if name not in self.sums:
            shape = (len(self.names), self.layers, *values.shape[1:])
            self.sums[name], self.counts[name] = np.zeros(shape), np.zeros(shape)
        of = torch.as_tensor(of, dtype=torch.float64).expand(values.shape)
        for totals, each in ((self.sums, values), (self.counts, of)):
            np.add.at(totals[name][:, layer], self.of_text[part], each.cpu().numpy())

    def rows(self, axes: Mapping[str, tuple[str, Sequence[float]]]) -> list[pl.DataFrame]:
        """Every statistic by document, layer and head; `axes` name the axis of those with bins."""
        frames = []
        for name, above in self.sums.items():
            axis, edges = axes.get(name.removeprefix("raw_"), ("", None))
            for layer, head in product(range(self.layers), range(above.shape[2])):
                both = above[:, layer, head], self.counts[name][:, layer, head]
                where: dict[str, Any] = {"axis": axis, "edges": edges, "layer": layer}
                frames.append(sums(name, self.names, *both, head=head, **where))
        return frames


class _Mechanism:
    """Sums at L and at the longer length, filled layer by layer."""

    def __init__(self, model: CausalLM, texts: EvaluationSet) -> None:
        self.model, self.texts, self.length = model, texts, texts.train_length
        layers = model.config.layers
        self.near = DocumentSums(texts.documents, layers)
        self.far = DocumentSums(texts.documents, layers)
        documents = len(self.near.names)
        self.ends = {
            id(at): np.tile([np.inf, -np.inf], (documents, 1)) for at in (self.near, self.far)
        }
        self.density = np.zeros([len(edges) - 1 for edges in DENSITY])
        self.last = {name: np.zeros((documents, len(READINGS))) for name in ("accuracy", "loss")}
        self.last_tokens = np.zeros((documents, len(READINGS)))

    def ids(self, part: slice, length: int) -> Tensor:
        """The first `length` tokens of some texts, where the model is."""
        ids = np.array(self.texts.windows[part, :length], dtype=np.int64)
        return torch.from_numpy(ids).to(next(self.model.parameters()).device)

    def at_train_length(self, part: slice, seen: Seen) -> None:
        """Add what a layer does in texts of L tokens."""
        self._add_cosines(self.near, part, seen)
        received = received_attention(seen, max(1, self.length // 2))
        heads, kept = received.shape[1:]
        norms, raw = (key_norms(k) for k in (seen.inputs.k, seen.key))
        for side, each in (("", norms), ("raw_", raw)):
            if self.length >= FIRST + 2:
                differ = varied(each[..., FIRST:])
                position = torch.where(differ, position_correlation(each), 0.0)
                self.near.add(f"{side}position", part, seen.layer, position, differ)
                first = first_norms(each).nan_to_num(0.0, 0.0, 0.0)
                self.near.add(f"{side}first_norms", part, seen.layer, first)
        norms, raw = (
            each.repeat_interleave(heads // each.shape[1], 1)[..., :kept] for each in (norms, raw)
        )
        differ = varied(norms)
        correlation = torch.where(differ, rank_correlation(norms, received), 0.0).nan_to_num(0.0)
        self.near.add("correlation", part, seen.layer, correlation, differ)
        correlation = rank_correlation(raw, received).nan_to_num(0.0)
        self.near.add("raw_correlation", part, seen.layer, correlation)
        self.near.add("spread", part, seen.layer, spread(norms).nan_to_num(0.0))
        self._add_density(norms / norms.mean(-1, keepdim=True), received)

    def beyond(self, part: slice, inside: Tensor, seen: Seen) -> None:
        """Add what a layer does in whole texts; `inside` is each head's trained range."""
        self._add_cosines(self.far, part, seen)
        inside = inside[seen.layer].to(seen.inputs.q.device)
        pairs, attention = pairs_by_region(seen, inside, self.length)
        self.far.add("pairs", part, seen.layer, pairs, pairs.sum(-1, keepdim=True))
        late = (seen.inputs.visibility.query >= self.length).sum(-1)
        of = late.expand(len(pairs))[:, None, None].double()
        self.far.add("attention", part, seen.layer, attention, of)

    def _add_cosines(self, at: DocumentSums, part: slice, seen: Seen) -> None:
        counted = count_cosines(seen)
        at.add("cosine", part, seen.layer, counted.counts, counted.counts.double())
        ends, rows = self.ends[id(at)], at.of_text[part]
        np.minimum.at(ends[:, 0], rows, counted.least.amin(-1).cpu().numpy())
        np.maximum.at(ends[:, 1], rows, counted.most.amax(-1).cpu().numpy())

    def _add_density(self, norms: Tensor, received: Tensor) -> None:
        points = []
        for values, edges in zip((norms, received.clamp_min(1e-12)), DENSITY, strict=True):
            inner = values.log2().clamp(float(edges[0]), float(edges[-1]) - 1e-9)
            points.append(inner.flatten().cpu().numpy())
        self.density += np.histogram2d(points[0], points[1], bins=DENSITY)[0]

    def read_last(self, part: slice) -> None:
        """Score the last L tokens of some texts in each of the `READINGS`."""
        ids = self.ids(part, self.texts.length + 1)
        for number, reading in enumerate(READINGS):
            with ExitStack() as stack:
                if reading == "clamped":
                    try:
                        clamped = self.model.using("ReRoPE", window=self.length - 1)
                    except InputError:  # Nothing turns, or far positions have a rule of their own.
                        continue
                    stack.enter_context(clamped)
                alone = reading == "alone"
                scores = self.model.token_scores(ids[:, -self.length - 1 :] if alone else ids)
            rows = self.near.of_text[part]
            for name, values in (("accuracy", scores.correct), ("loss", scores.loss)):
                last = values[:, -self.length :].double().sum(-1).cpu().numpy()
                np.add.at(self.last[name][:, number], rows, last)
            np.add.at(self.last_tokens[:, number], rows, float(self.length))

    def frame(self, seed: int, weights: str) -> pl.DataFrame:
        """The sums as rows of the measurements table."""
        for side in ("", "raw_"):
            position = f"{side}position"
            if position in self.near.sums:
                signed = signed_elsewhere(self.near.sums[position], self.near.counts[position])
                self.near.sums[f"{position}_size"], self.near.counts[f"{position}_size"] = signed
        score = self.model.config.score
        near = Identity(
            study="",
            row=score.variant_name,
            score=str(score),
            seed=seed,
            protocol="mechanism",
            length=self.length,
            train_length=self.length,
            data=self.texts.fingerprint,
            weights=weights,
        )
        parts = [
            identified(near, self._rows(self.near)),
            identified(
                replace(near, length=self.texts.length),
                [*self._rows(self.far), *self._last_rows()],
            ),
        ]
        norms, received = DENSITY
        for index, low in enumerate(received[:-1]):
            counts = self.density[None, :, index]
            rows = sums("density", ["all"], counts, counts, axis="log2 norm", edges=norms.tolist())
            parts.append(identified(replace(near, factors={"received": float(low)}), [rows]))
        return joined(parts)

    def _rows(self, at: DocumentSums) -> list[pl.DataFrame]:
        regions = range(len(REGIONS))
        axes: dict[str, tuple[str, Sequence[float]]] = {
            "cosine": ("cosine", np.linspace(-1.0, 1.0, BINS + 1).tolist()),
            "first_norms": ("position", range(FIRST + 1)),
            "pairs": ("region", regions),
            "attention": ("region", regions),
        }
        ends = self.ends[id(at)]
        ones = np.ones(len(ends))
        return [
            *at.rows(axes),
            sums("least_cosine", at.names, ends[:, 0], ones),
            sums("largest_cosine", at.names, ends[:, 1], ones),
        ]

    def _last_rows(self) -> list[pl.DataFrame]:
        where: dict[str, Any] = {"axis": "reading", "edges": range(len(READINGS))}
        return [
            sums(f"last_{name}", self.near.names, above, self.last_tokens, **where)
            for name, above in self.last.items()
        ]


def signed_elsewhere(total: Array, count: Array) -> tuple[Array, Array]:
    """Sums by document (documents, …), every second one with the sign of all the others together.

    What documents have in common then shows its size, whichever its sign, so that heads of opposite
    signs can be averaged; chance gives 0, and an interval over documents keeps its promise,
    whatever the values within a document have in common. A mean of |·| is above 0 by chance, and a
    sign from all documents but one is all but the document's own. The documents that gave the
    signs, and those that nothing could sign, count for nothing; nor does a single one, which has no
    interval.
    """
    measuring = np.arange(len(total)) % 2 == 1
    sign = np.sign(total[~measuring].sum(0))
    several = (count[measuring] > 0).sum(0) > 1
    kept = measuring.reshape(-1, *[1] * (total.ndim - 1)) & (sign != 0) & several
    return np.where(kept, total * sign, 0.0), np.where(kept, count, 0.0)
