"""Evaluate translators: beam search, scores of references, BLEU and chrF."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from normattn.errors import import_library
from normattn.lab.data.batches import pad_rows
from normattn.lab.data.pairs import EOS_ID, PAD_ID, PairSplit
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.evaluation.masked import unigram_nats
from normattn.lab.evaluation.scorer import batch_by_length, batches
from normattn.models.beam_search import beam_search
from normattn.models.translator import Translator
from normattn.models.utils import without_dropout

Array = NDArray[np.float64]
Progress = Callable[[int, int], None]
"""Receives the number of sentences done and the total."""


class MetricCounts(NamedTuple):
    """sacrebleu's counts of each sentence for a metric, (N, counts), and its signature."""

    counts: Array
    signature: str


def translate(
    model: Translator,
    split: PairSplit,
    tokeniser: Tokeniser,
    *,
    beam: int = 4,
    length_penalty: float = 0.6,
    batch: int = 64,
    progress: Progress = lambda done, total: None,
) -> list[str]:
    """Return the best translation of every sentence of `split`, in its order.

    Beam search with `beam` hypotheses, ranked by log p / ((5 + |Y|)/6)^α with α = `length_penalty`.
    A batch has `batch` sentences of similar length, which affects results only by rounding.
    """
    order = np.argsort(split.source.lengths, kind="stable").tolist()
    texts = [""] * len(split)
    for part in batches(len(order), batch):
        chosen = order[part]
        translations = beam_search(
            model,
            [split.source_ids(index) for index in chosen],
            beam=beam,
            length_penalty=length_penalty,
        )
        for index, hypotheses in zip(chosen, translations, strict=True):
            ids = [token for token in hypotheses[0].tokens if token > EOS_ID]
            texts[index] = tokeniser.decode(ids).strip()
        progress(min(part.stop, len(texts)), len(texts))
    return texts


def score_references(
    model: Translator,
    split: PairSplit,
    tokens_per_batch: int = 4096,
    progress: Progress = lambda done, total: None,
) -> tuple[Array, Array, Array]:
    """Return loss in nats, correct tokens and tokens of every sentence's reference.

    A batch has about `tokens_per_batch` padded tokens at most, which affects results only by
    rounding. A loss that is not finite counts as 1e6 nats.
    """
    device = next(model.parameters()).device
    loss, correct, tokens = (np.zeros(len(split)) for _ in range(3))
    lengths, done = split.source.lengths + split.target.lengths + 3, 0
    with torch.inference_mode(), without_dropout(model):
        for chosen in batch_by_length(lengths, tokens_per_batch):
            sides = ([ids(i) for i in chosen] for ids in (split.source_ids, split.target_ids))
            source, target = (
                torch.from_numpy(pad_rows(side, PAD_ID)[0]).to(device) for side in sides
            )
            scores = model.token_scores(source, target)
            nats = scores.loss.double().sum(-1).nan_to_num(1e6, 1e6)
            loss[chosen] = nats.cpu().numpy()
            correct[chosen] = scores.correct.sum(-1).cpu().numpy()
            tokens[chosen] = (target[:, 1:] != PAD_ID).sum(-1).cpu().numpy()
            done += len(chosen)
            progress(done, len(split))
    return loss, correct, tokens


def unigram_loss(train: PairSplit, split: PairSplit, vocab_size: int) -> NDArray[np.float64]:
    """Return the loss in nats of `train`'s token frequencies on every reference and its end."""
    counts = np.bincount(np.asarray(train.target.values), minlength=vocab_size)
    counts[EOS_ID] += len(train)
    nats = unigram_nats(counts)
    sentence = np.repeat(np.arange(len(split)), split.target.lengths)
    words = np.bincount(sentence, nats[np.asarray(split.target.values)], minlength=len(split))
    return np.asarray(words + nats[EOS_ID])


def corpus_counts(
    translations: Sequence[str], references: Sequence[str]
) -> dict[str, MetricCounts]:
    """Return sacrebleu's counts for BLEU and chrF; `InputError` if it is not installed."""
    metrics = import_library(
        "sacrebleu.metrics",
        "BLEU and chrF need sacrebleu, which is not installed: pip install 'normattn[translation]'",
    )
    counts = {}
    for name, metric in (("bleu", metrics.BLEU()), ("chrf", metrics.CHRF())):
        score = metric.corpus_score(list(translations), [list(references)])
        # The rows that sacrebleu resamples; they have no public name.
        rows = metric._extract_corpus_statistics(list(translations), [list(references)])
        signature = f"{score.name}|{metric.get_signature()}"
        counts[name] = MetricCounts(np.asarray(rows, np.float64), signature)
    return counts
