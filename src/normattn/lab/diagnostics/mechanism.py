"""Measure the KeyNorm post's explanation in a trained model (kexue.fm/archives/9859)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from normattn.lab.diagnostics import keys
from normattn.lab.diagnostics.keys import FIRST, REGIONS, Array, LayerInputs
from normattn.lab.stats import Identity, concat, sums, with_identity
from normattn.models import CausalLM
from normattn.models.utils import without_dropout

READINGS = ("alone", "unmodified", "clamped")
"""The last L tokens without context; after the whole text; the same with relative positions clamped
to L − 1 (ReRoPE, w = L − 1), so that none is unseen."""


def measure_mechanism(
    model: CausalLM,
    texts: EvaluationSet,
    *,
    seed: int,
    weights: str,
    tokens_per_batch: int = 4096,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pl.DataFrame:
    """Measure the scores in the first L tokens of each text, and in the whole text.

    At L, over a horizon of L/2:

    - `correlation`: Spearman's, of ‖k_j‖ with the attention that j receives, over texts whose norms
      differ; `raw_correlation`: the same for keys before normalisation.
    - `spread`: the standard deviation of ‖k_j‖ over its mean.
    - `mean_direction`: the share of the unit keys' energy in their mean, before positions.
    - `position`: Spearman's correlation of ‖k_j‖ with j for j ≥ F; `position_size`: its size
      (`size_by_split_sign`). Both need F + 2 tokens.

    At both lengths `cosine` by head, in equal bins over −1 … 1. At the longer length:

    - `pairs` (visible pairs) and `attention` (Σ α over queries at i ≥ L) by region.
    - `product`: q_i · k_j by distance, in octaves, one of which begins at L.
    - `last_accuracy` and `last_loss` (nats) of the last L tokens by `READINGS`. A score that cannot
      be clamped has `of` 0 there.

    `tokens_per_batch` bounds memory.
    """
    measured = _Mechanism(model, texts)
    rows = max(1, tokens_per_batch // texts.length)
    batches = [slice(first, first + rows) for first in range(0, len(texts), rows)]
    with without_dropout(model), torch.no_grad():
        for batch in batches:
            with keys.observe_scores(model, partial(measured.add_train_length, batch)):
                model.hidden(measured.ids(batch, texts.train_length))
        # The range at L needs all texts.
        inside = torch.from_numpy(keys.trained_range(measured.near.sums["cosine"].sum(0)))
        for batch in batches:
            with keys.observe_scores(model, partial(measured.add_beyond, batch, inside)):
                model.hidden(measured.ids(batch, texts.length))
            measured.add_last(batch)
            progress(min(batch.stop, len(texts)), len(texts))
    return measured.frame(seed, weights)


class DocumentSums:
    """Sums and counts over the texts of each document, (D, layers, heads, …)."""

    def __init__(self, document_of_text: Sequence[str], layers: int) -> None:
        self.names = sorted(set(document_of_text))
        self.of_text = np.searchsorted(self.names, document_of_text)
        self.layers = layers
        self.sums: dict[str, Array] = {}
        self.counts: dict[str, Array] = {}

    def add(
        self, name: str, batch: slice, layer: int, values: Tensor, of: Tensor | float = 1.0
    ) -> None:
        """Add the values (B, H, …) of a layer in a batch of texts, with the counts `of`."""
        if name not in self.sums:
            shape = (len(self.names), self.layers, *values.shape[1:])
            self.sums[name], self.counts[name] = np.zeros(shape), np.zeros(shape)
        of = torch.as_tensor(of, dtype=torch.float64).expand(values.shape)
        for totals, added in ((self.sums, values), (self.counts, of)):
            np.add.at(totals[name][:, layer], self.of_text[batch], added.cpu().numpy())

    def rows(self, octaves: Sequence[int]) -> list[pl.DataFrame]:
        """Return every statistic by document, layer and head."""
        regions, cosines = range(len(REGIONS)), np.linspace(-1.0, 1.0, BINS + 1).tolist()
        axes: dict[str, tuple[str, Sequence[float]]] = {
            "cosine": ("cosine", cosines),
            "pairs": ("region", regions),
            "attention": ("region", regions),
            "product": ("distance", octaves),
        }
        frames = []
        for name, total in self.sums.items():
            axis, edges = axes.get(name, ("", None))
            for layer, head in product(range(self.layers), range(total.shape[2])):
                both = total[:, layer, head], self.counts[name][:, layer, head]
                where: dict[str, Any] = {"axis": axis, "edges": edges, "layer": layer}
                frames.append(sums(name, self.names, *both, head=head, **where))
        return frames


class _Mechanism:
    """Sums at L and at the longer length, added layer by layer."""

    def __init__(self, model: CausalLM, texts: EvaluationSet) -> None:
        self.model, self.texts, self.length = model, texts, texts.train_length
        self.near = DocumentSums(texts.documents, model.config.layers)
        self.far = DocumentSums(texts.documents, model.config.layers)
        self.last = DocumentSums(texts.documents, len(READINGS))  # By reading instead of layer.
        self.octaves = distance_octaves(self.length, texts.length)

    def ids(self, batch: slice, length: int) -> Tensor:
        ids = np.array(self.texts.windows[batch, :length], dtype=np.int64)
        return torch.from_numpy(ids).to(next(self.model.parameters()).device)

    def add_train_length(self, batch: slice, captured: LayerInputs) -> None:
        """Add the statistics of a layer in texts of L tokens."""
        add = partial(self.near.add, batch=batch, layer=captured.layer)
        counts = keys.count_cosines(captured).counts
        add("cosine", values=counts, of=counts.double())
        received = keys.received_attention(captured, max(1, self.length // 2))
        heads, count = received.shape[1:]
        add("mean_direction", values=keys.mean_direction(captured.key))
        sides = captured.inputs.k.double(), captured.key.double()
        norms, raw = (torch.linalg.vector_norm(key, dim=-1) for key in sides)
        if self.length >= FIRST + 2:
            differ = keys.spread(norms[..., FIRST:]) > keys.MIN_SPREAD
            position = torch.where(differ, keys.position_correlation(norms), 0.0)
            add("position", values=position, of=differ)
        # A key has a norm for each query head that reads it.
        norms, raw = (x.repeat_interleave(heads // x.shape[1], 1) for x in (norms, raw))
        norms, raw = norms[..., :count], raw[..., :count]
        spread = keys.spread(norms)
        differ = spread > keys.MIN_SPREAD
        correlation = torch.where(differ, keys.rank_correlation(norms, received), 0.0)
        add("correlation", values=correlation.nan_to_num(0.0), of=differ)
        add("spread", values=spread.nan_to_num(0.0))
        add("raw_correlation", values=keys.rank_correlation(raw, received).nan_to_num(0.0))

    def add_beyond(self, batch: slice, inside: Tensor, captured: LayerInputs) -> None:
        """Add the statistics of a layer in whole texts; `inside` is each head's trained range."""
        add = partial(self.far.add, batch=batch, layer=captured.layer)
        counts = keys.count_cosines(captured).counts
        add("cosine", values=counts, of=counts.double())
        inside = inside[captured.layer].to(captured.inputs.q.device)
        pairs, attention = keys.pairs_by_region(captured, inside, self.length)
        add("pairs", values=pairs, of=pairs.sum(-1, keepdim=True))
        octaves = torch.tensor(self.octaves)
        products, count = keys.products_by_distance(captured, octaves.to(captured.inputs.q.device))
        add("product", values=products, of=count)
        late = (captured.inputs.mask.query >= self.length).sum(-1)
        add("attention", values=attention, of=late.expand(len(pairs))[:, None, None].double())

    def add_last(self, batch: slice) -> None:
        """Score the last L tokens of a batch in each of the `READINGS`."""
        ids = self.ids(batch, self.texts.length + 1)
        for number, reading in enumerate(READINGS):
            with ExitStack() as stack:
                if reading == "clamped":
                    try:
                        clamped = self.model.using("ReRoPE", window=self.length - 1)
                    except InputError:  # No rotation, or the score remaps far positions itself.
                        continue
                    stack.enter_context(clamped)
                alone = reading == "alone"
                scores = self.model.token_scores(ids[:, -self.length - 1 :] if alone else ids)
            for name, values in (("accuracy", scores.correct), ("loss", scores.loss)):
                last = values[:, -self.length :].double().sum(-1)
                self.last.add(f"last_{name}", batch, number, last, float(self.length))

    def frame(self, seed: int, weights: str) -> pl.DataFrame:
        if "position" in self.near.sums:
            sizes = size_by_split_sign(self.near.sums["position"], self.near.counts["position"])
            self.near.sums["position_size"], self.near.counts["position_size"] = sizes
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
        bins: dict[str, Any] = {"axis": "reading", "edges": range(len(READINGS))}
        last = [
            sums(name, self.last.names, total, self.last.counts[name], **bins)
            for name, total in self.last.sums.items()
        ]
        far, far_rows = replace(near, length=self.texts.length), self.far.rows(self.octaves)
        near_frame = with_identity(near, self.near.rows(self.octaves))
        return concat([near_frame, with_identity(far, [*far_rows, *last])])


def distance_octaves(train_length: int, length: int) -> list[int]:
    """Return the bin edges 0, L/2^n … L/2, L, 2 L … `length` of distances."""
    edges = [train_length]
    while edges[0] % 2 == 0:
        edges.insert(0, edges[0] // 2)
    while edges[-1] * 2 < length:
        edges.append(edges[-1] * 2)
    return [0, *edges, length]


def size_by_split_sign(total: Array, count: Array) -> tuple[Array, Array]:
    """Multiply the sums of every second document by the sign of all other documents together.

    This measures the size of an effect regardless of its sign, so that heads of opposite signs can
    be averaged. Chance gives 0, and intervals over documents stay valid. Two simpler ways do not: a
    mean of |·| is above 0 by chance, and a sign from all documents but one is nearly the document's
    own. Documents that gave the signs, those without a sign, and a single one have count 0.
    """
    measured = np.arange(len(total)) % 2 == 1
    sign = np.sign(total[~measured].sum(0))
    several = (count[measured] > 0).sum(0) > 1
    valid = measured.reshape(-1, *[1] * (total.ndim - 1)) & (sign != 0) & several
    return np.where(valid, total * sign, 0.0), np.where(valid, count, 0.0)
