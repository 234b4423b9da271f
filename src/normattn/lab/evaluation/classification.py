"""Evaluate classifiers of documents and images: loss and correctness of every item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
    batch_by_length,
    batches,
    weights_digest,
)
from normattn.lab.stats import Identity, concat, scalar, sums, with_identity
from normattn.models.classifier import Classifier
from normattn.models.flops import parameter_count
from normattn.models.utils import without_dropout
from normattn.models.vision_transformer import VisionTransformer


@dataclass(frozen=True)
class Predictions:
    """Probabilities, true labels, and the `loss` in nats of each document, a mean over labels."""

    probabilities: Float32[np.ndarray, "n k"]
    true: Bool[np.ndarray, "n k"]
    loss: Float32[np.ndarray, "n"]


@torch.no_grad()
def predict(
    model: Classifier,
    split: RelationSplit,
    pad_id: int,
    *,
    max_tokens: int = 16384,
    precision: Precision = "fp32",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Predictions:
    """Return the probability of every label for every document, in their order.

    Batches have documents of similar length and at most `max_tokens` padded tokens, which affects
    results only by rounding. Dropout is off. `progress` receives how many are done.
    """
    device, labels = next(model.parameters()).device, model.config.labels
    probabilities = np.empty((len(split), labels), dtype=np.float32)
    loss = np.empty(len(split), dtype=np.float32)
    lengths, done = np.array([len(row) for row in split.tokens]), 0
    with without_dropout(model), autocast(device, precision):
        for chosen in batch_by_length(lengths, max_tokens):
            ids, padding = pad_rows([split.tokens[i] for i in chosen], pad_id)
            inputs = (torch.from_numpy(array).to(device) for array in (ids, padding))
            logits = model(*inputs).float().cpu()
            targets = torch.from_numpy(multi_hot(split, np.array(chosen), labels))
            losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
            probabilities[chosen] = logits.sigmoid().numpy()
            loss[chosen] = losses.mean(-1).numpy()
            done += len(chosen)
            progress(done, len(split))
    true = multi_hot(split, np.arange(len(split)), labels) > 0
    return Predictions(probabilities, true, loss)


def tune_threshold(predictions: Predictions) -> tuple[float, float]:
    """Return the threshold with the best micro F1, and that F1 (0 … 1).

    Among equally good ones, the nearest to ½. Use only the development set.
    """
    scores = {}
    for threshold in np.linspace(0.01, 0.99, 99).round(2).tolist():
        predicted = predictions.probabilities >= threshold
        hits = np.count_nonzero(predicted & predictions.true)
        marked = np.count_nonzero(predicted) + np.count_nonzero(predictions.true)
        scores[threshold] = 2 * hits / marked if marked else 0.0
    best = min(scores, key=lambda threshold: (-scores[threshold], abs(threshold - 0.5)))
    return best, scores[best]


def evaluate_classifier(
    model: Classifier,
    data: RelationData,
    identity: Identity,
    *,
    precision: Precision = "fp32",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pl.DataFrame:
    """Tune the threshold on the development set, then measure every document of the test set.

    For each document: the counts behind F1, a bin for each label (sum = 2 · true positives, of =
    predicted + true), and its loss in nats. For the model, under the protocol "training": its
    parameters, the threshold, and micro F1 (0 … 1) on the development set.
    """
    development = predict(model, data.validation, data.pad_id, precision=precision)
    threshold, micro_f1 = tune_threshold(development)
    predictions = predict(model, data.test, data.pad_id, precision=precision, progress=progress)
    identity = replace(identity, split="test", data=data.fingerprint, weights=weights_digest(model))
    by_document = document_sums(predictions, threshold, data.test.names)
    facts = [
        scalar("parameters", float(parameter_count(model))),
        scalar("threshold", threshold),
        scalar("development_micro_f1", micro_f1),
    ]
    of_model = with_identity(replace(identity, protocol="training"), facts)
    return concat([with_identity(identity, by_document), of_model])


def document_sums(
    predictions: Predictions, threshold: float, documents: Sequence[str]
) -> list[pl.DataFrame]:
    """Return the counts behind F1 by label, and the loss, of every document."""
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
    """Return the correctness and loss in nats of every image, `rows` at a time."""
    device = next(model.parameters()).device
    values: dict[str, list[float]] = {"accuracy": [], "loss": []}
    for chosen in batches(len(split), rows):
        images = torch.from_numpy(split.images(chosen)).to(device)
        scores = model.scores(images, torch.from_numpy(split.labels[chosen]).to(device))
        values["accuracy"] += scores.correct.double().tolist()
        values["loss"] += scores.loss.tolist()
        progress(min(chosen.stop, len(split)), len(split))
    units = [f"{number:06}" for number in range(len(split))]
    return [sums(name, units, column, np.ones(len(units))) for name, column in values.items()]
