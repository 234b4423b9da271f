"""Classifiers of documents and of images on a held-out set: loss and correctness of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float32
from torch.nn import functional as F

from normattn.lab.data.batches import pad_rows
from normattn.lab.data.images import ImageSplit
from normattn.lab.data.relations import RelationData, RelationSplit, multi_hot
from normattn.lab.evaluation.scorer import (
    Precision,
    autocast,
    batches,
    by_length,
    weights_digest,
)
from normattn.lab.stats import Identity, fact, identified, joined, sums
from normattn.models.classifier import Classifier
from normattn.models.flops import parameter_count
from normattn.models.utils import without_dropout
from normattn.models.vision_transformer import VisionTransformer

THRESHOLDS = np.linspace(0.01, 0.99, 99)
"""What is tried on the development set."""


@dataclass(frozen=True)
class Predictions:
    """What a classifier predicts for N documents and K labels, and what is true.

    `loss` (N,) is each document's binary cross-entropy in nats, the mean over labels.
    """

    probabilities: Float32[np.ndarray, "n k"]
    true: Bool[np.ndarray, "n k"]
    loss: Float32[np.ndarray, "n"]


@torch.no_grad()
def predict(
    model: Classifier,
    split: RelationSplit,
    pad: int,
    *,
    max_tokens: int = 16384,
    precision: Precision = "fp32",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Predictions:
    """The probabilities of every label of every document, in their order.

    Documents go through by length, as many at a time as `max_tokens` padded tokens hold; that
    changes no result but for rounding. Dropout is off. `progress` receives how many are done.
    """
    device, labels = next(model.parameters()).device, model.config.labels
    probabilities = np.empty((len(split), labels), dtype=np.float32)
    loss = np.empty(len(split), dtype=np.float32)
    lengths, done = np.array([len(row) for row in split.tokens]), 0
    with without_dropout(model), autocast(device, precision):
        for chosen in by_length(lengths, max_tokens):
            ids, padding = pad_rows([split.tokens[i] for i in chosen], pad)
            given = (torch.from_numpy(part).to(device) for part in (ids, padding))
            logits = model(*given).float().cpu()
            wanted = torch.from_numpy(multi_hot(split, np.array(chosen), labels))
            losses = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
            probabilities[chosen] = logits.sigmoid().numpy()
            loss[chosen] = losses.mean(-1).numpy()
            done += len(chosen)
            progress(done, len(split))
    everything = np.arange(len(split))
    return Predictions(probabilities, multi_hot(split, everything, labels) > 0, loss)


def tune_threshold(predictions: Predictions) -> tuple[float, float]:
    """The threshold of `THRESHOLDS` with the best micro F1, and that F1 (0 … 1).

    Of equally good ones the nearest to ½. To be called with the development set alone.
    """
    scores = {}
    for threshold in THRESHOLDS.round(2).tolist():
        predicted = predictions.probabilities >= threshold
        hits = np.count_nonzero(predicted & predictions.true)
        below = np.count_nonzero(predicted) + np.count_nonzero(predictions.true)
        scores[threshold] = 2 * hits / below if below else 0.0
    best = min(scores, key=lambda threshold: (-scores[threshold], abs(threshold - 0.5)))
    return best, scores[best]


def evaluate_classifier(
    model: Classifier,
    data: RelationData,
    identity: Identity,
    *,
    precision: Precision = "fp32",
    max_tokens: int = 16384,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pl.DataFrame:
    """Tune the threshold on the development set, classify the test set, measure every document.

    Of a document: the counts behind F1, a bin for each label (sum = 2 · rightly predicted, of =
    predicted + true), and its loss in nats. Of the model, under the protocol "training": its
    parameters, the threshold, and micro F1 (0 … 1) on the development set.
    """
    settings: dict[str, Any] = {"max_tokens": max_tokens, "precision": precision}
    development = predict(model, data.split("validation"), data.pad_id, **settings)
    threshold, reached = tune_threshold(development)
    split = data.split("test")
    predictions = predict(model, split, data.pad_id, **settings, progress=progress)
    who = replace(identity, split="test", data=data.fingerprint, weights=weights_digest(model))
    facts = {
        "parameters": parameter_count(model),
        "threshold": threshold,
        "development_micro_f1": reached,
    }
    return joined(
        [
            identified(who, document_sums(predictions, threshold, split.names)),
            identified(
                replace(who, protocol="training"),
                [fact(name, float(value)) for name, value in facts.items()],
            ),
        ]
    )


def document_sums(
    predictions: Predictions, threshold: float, documents: Sequence[str]
) -> list[pl.DataFrame]:
    """The counts behind F1, by label, and the loss of every document."""
    predicted = predictions.probabilities >= threshold
    hits, marked = 2.0 * (predicted & predictions.true), predicted.astype(float) + predictions.true
    labels = range(predictions.true.shape[1])
    return [
        sums("f1", documents, hits, marked, axis="class", edges=labels),
        sums("loss", documents, predictions.loss, np.ones(len(predictions.loss))),
    ]


def measure_images(
    model: VisionTransformer,
    split: ImageSplit,
    rows: int = 256,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[pl.DataFrame]:
    """Correctness and loss in nats of every image, `rows` at a time; the mode does not matter.

    `progress` receives how many images are done, of how many.
    """
    device = next(model.parameters()).device
    found: dict[str, list[float]] = {"accuracy": [], "loss": []}
    for part in batches(len(split), rows):
        images = torch.from_numpy(split.images(part)).to(device)
        scores = model.scores(images, torch.from_numpy(split.labels[part]).to(device))
        found["accuracy"] += scores.correct.double().tolist()
        found["loss"] += scores.loss.tolist()
        progress(min(part.stop, len(split)), len(split))
    units = [f"{number:06}" for number in range(len(split))]
    return [sums(name, units, values, np.ones(len(units))) for name, values in found.items()]
