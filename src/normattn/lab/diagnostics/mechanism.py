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
    mean_direction,
    pairs_by_region,
    position_correlation,
    products_by_distance,
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

READINGS = ("alone", "unmodified", "clamped")
"""The last L tokens with nothing before them; behind the whole text; the same with every relative
position of at least L − 1 read as L − 1 (ReRoPE, w = L − 1), so that none is unseen."""
AXES: Mapping[str, tuple[str, Sequence[float]]] = {
    "cosine": ("cosine", np.linspace(-1.0, 1.0, BINS + 1).tolist()),
    "pairs": ("region", range(len(REGIONS))),
    "attention": ("region", range(len(REGIONS))),
}
"""The axis of the statistics that have bins, and their edges."""


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
    normalisation; `spread`, the standard deviation of ‖k_j‖ over its mean; `mean_direction`, the
    share of the energy of unit keys in their mean, before positions; `position`, Spearman's
    correlation of ‖k_j‖ with j for j ≥ F; `position_size`, the same with its sign
    (`signed_elsewhere`). The last two are none for texts of fewer than F + 2 tokens.

    At both lengths `cosine`, per head, in equal bins over −1 … 1. At the longer one, by region,
    `pairs` of all visible pairs and `attention` Σ α over the queries at i ≥ L; by distance,
    `product` q_i · k_j, in octaves of which one begins at L; by reading (`READINGS`),
    `last_accuracy` and `last_loss` (nats) of the last L tokens. A score that cannot be clamped has
    `of` 0 there. `tokens_per_batch` bounds memory.
    """
    measured = _Mechanism(model, texts)
    rows = max(1, tokens_per_batch // texts.length)
    parts = [slice(first, first + rows) for first in range(0, len(texts), rows)]
    with without_dropout(model), torch.no_grad():
        for part in parts:
            with watching(model, partial(measured.add_train_length, part)):
                model.hidden(measured.ids(part, texts.train_length))
        # The range at L is known only now.
        inside = torch.from_numpy(trained_range(measured.near.sums["cosine"].sum(0)))
        for part in parts:
            with watching(model, partial(measured.add_beyond, part, inside)):
                model.hidden(measured.ids(part, texts.length))
            measured.add_last(part)
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

    def rows(self, octaves: Sequence[int]) -> list[pl.DataFrame]:
        """Every statistic by document, layer and head."""
        frames, axes = [], {**AXES, "product": ("distance", octaves)}
        for name, above in self.sums.items():
            axis, edges = axes.get(name, ("", None))
            for layer, head in product(range(self.layers), range(above.shape[2])):
                both = above[:, layer, head], self.counts[name][:, layer, head]
                where: dict[str, Any] = {"axis": axis, "edges": edges, "layer": layer}
                frames.append(sums(name, self.names, *both, head=head, **where))
        return frames


class _Mechanism:
    """Sums at L and at the longer length, filled layer by layer."""

    def __init__(self, model: CausalLM, texts: EvaluationSet) -> None:
        self.model, self.texts, self.length = model, texts, texts.train_length
        self.near, self.far = (
            DocumentSums(texts.documents, model.config.layers) for _ in ("near", "far")
        )
        self.octaves = distance_octaves(self.length, texts.length)
        shape = (len(self.near.names), len(READINGS))
        self.last = {name: np.zeros(shape) for name in ("accuracy", "loss", "tokens")}

    def ids(self, part: slice, length: int) -> Tensor:
        """The first `length` tokens of some texts, where the model is."""
        ids = np.array(self.texts.windows[part, :length], dtype=np.int64)
        return torch.from_numpy(ids).to(next(self.model.parameters()).device)

    def add_train_length(self, part: slice, seen: Seen) -> None:
        """Add what a layer does in texts of L tokens."""
        add = partial(self.near.add, part=part, layer=seen.layer)
        counts = count_cosines(seen).counts
        add("cosine", values=counts, of=counts.double())
        received = received_attention(seen, max(1, self.length // 2))
        heads, kept = received.shape[1:]
        add("mean_direction", values=mean_direction(seen.key))
        for side, key in (("", seen.inputs.k), ("raw_", seen.key)):
            norms = torch.linalg.vector_norm(key.double(), dim=-1)
            if not side and self.length >= FIRST + 2:
                differ = varied(norms[..., FIRST:])
                position = torch.where(differ, position_correlation(norms), 0.0)
                add("position", values=position, of=differ)
            norms = norms.repeat_interleave(heads // norms.shape[1], 1)[..., :kept]
            correlation = rank_correlation(norms, received).nan_to_num(0.0)
            if side:
                add("raw_correlation", values=correlation)
            else:
                differ = varied(norms)
                add("correlation", values=torch.where(differ, correlation, 0.0), of=differ)
                add("spread", values=spread(norms).nan_to_num(0.0))

    def add_beyond(self, part: slice, inside: Tensor, seen: Seen) -> None:
        """Add what a layer does in whole texts; `inside` is each head's trained range."""
        add = partial(self.far.add, part=part, layer=seen.layer)
        counts = count_cosines(seen).counts
        add("cosine", values=counts, of=counts.double())
        inside = inside[seen.layer].to(seen.inputs.q.device)
        pairs, attention = pairs_by_region(seen, inside, self.length)
        add("pairs", values=pairs, of=pairs.sum(-1, keepdim=True))
        octaves = torch.tensor(self.octaves)
        products, count = products_by_distance(seen, octaves.to(seen.inputs.q.device))
        add("product", values=products, of=count)
        late = (seen.inputs.mask.query >= self.length).sum(-1)
        add("attention", values=attention, of=late.expand(len(pairs))[:, None, None].double())

    def add_last(self, part: slice) -> None:
        """Score the last L tokens of some texts in each of the `READINGS`."""
        ids, rows = self.ids(part, self.texts.length + 1), self.near.of_text[part]
        for number, reading in enumerate(READINGS):
            with ExitStack() as stack:
                if reading == "clamped":
                    try:
                        clamped = self.model.using("ReRoPE", window=self.length - 1)
                    except InputError:  # No rotation, or far positions have a rule of their own.
                        continue
                    stack.enter_context(clamped)
                alone = reading == "alone"
                scores = self.model.token_scores(ids[:, -self.length - 1 :] if alone else ids)
            for name, values in (("accuracy", scores.correct), ("loss", scores.loss)):
                last = values[:, -self.length :].double().sum(-1).cpu().numpy()
                np.add.at(self.last[name][:, number], rows, last)
            np.add.at(self.last["tokens"][:, number], rows, float(self.length))

    def frame(self, seed: int, weights: str) -> pl.DataFrame:
        """The sums as rows of the measurements table."""
        if "position" in self.near.sums:
            signed = signed_elsewhere(self.near.sums["position"], self.near.counts["position"])
            self.near.sums["position_size"], self.near.counts["position_size"] = signed
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
        where: dict[str, Any] = {"axis": "reading", "edges": range(len(READINGS))}
        last = [
            sums(f"last_{name}", self.near.names, self.last[name], self.last["tokens"], **where)
            for name in ("accuracy", "loss")
        ]
        far = replace(near, length=self.texts.length)
        by_layer = [totals.rows(self.octaves) for totals in (self.near, self.far)]
        return joined([identified(near, by_layer[0]), identified(far, [*by_layer[1], *last])])


def distance_octaves(train_length: int, length: int) -> list[int]:
    """0, then L/2^n … L/2, L, 2 L … up to `length`: the first distance of each bin, and the end."""
    edges = [train_length]
    while edges[0] % 2 == 0:
        edges.insert(0, edges[0] // 2)
    while edges[-1] * 2 < length:
        edges.append(edges[-1] * 2)
    return [0, *edges, length]


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
