"""A test set translated by beam search, and its references scored: what a table is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from normattn.errors import InputError, import_library
from normattn.lab.data.batches import pad_rows
from normattn.lab.data.pairs import EOS_ID, PAD_ID, PairSplit
from normattn.lab.data.tokeniser import Tokeniser
from normattn.lab.evaluation.masked import unigram_nats
from normattn.lab.evaluation.scorer import batches, by_length
from normattn.models.beam_search import beam_search
from normattn.models.translator import Translator
from normattn.models.utils import without_dropout

HOPELESS = 1e6
Array = NDArray[np.float64]
Progress = Callable[[int, int], None]
"""Receives how many sentences are done, of how many."""


class Counted(NamedTuple):
    """What sacrebleu counts in each sentence for a metric, (N, counts), and its signature."""

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
    """The best translation of every sentence of `split`, as text, in its order.

    By beam search: `beam` hypotheses at a time, ranked by log p / ((5 + |Y|)/6)^α with α =
    `length_penalty`, `batch` sentences together.

    Sentences are translated in the order of their lengths, so that a batch wastes little; a
    sentence's translation does not depend on the others.
    """
    order = np.argsort(split.source.lengths, kind="stable").tolist()
    texts = [""] * len(split)
    with torch.inference_mode(), without_dropout(model):
        for part in batches(len(order), batch):
            chosen = order[part]
            translations = beam_search(
                model,
                [split.source_ids(index) for index in chosen],
                beam=beam,
                length_penalty=length_penalty,
                batch=batch,
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
    """Of every sentence's reference: summed loss in nats, tokens predicted right, tokens.

    Each is read word by word, every token predicted from those before it.
    `tokens_per_batch` bounds the padded tokens that are scored at once (memory, never a result
    beyond rounding). A sentence whose loss is not finite, as a model that fell apart may give,
    counts as `HOPELESS` nats.
    """
    device = next(model.parameters()).device
    loss, correct, tokens = (np.zeros(len(split)) for _ in range(3))
    lengths, done = split.source.lengths + split.target.lengths + 3, 0
    with torch.inference_mode(), without_dropout(model):
        for chosen in by_length(lengths, tokens_per_batch):
            source, target = (
                torch.from_numpy(pad_rows([ids_of(index) for index in chosen], PAD_ID)[0]).to(
                    device
                )
                for ids_of in (split.source_ids, split.target_ids)
            )
            scores = model.token_scores(source, target)
            nats = scores.loss.double().sum(-1).nan_to_num(HOPELESS, HOPELESS)
            loss[chosen] = nats.cpu().numpy()
            correct[chosen] = scores.correct.sum(-1).cpu().numpy()
            tokens[chosen] = (target[:, 1:] != PAD_ID).sum(-1).cpu().numpy()
            done += len(chosen)
            progress(done, len(split))
    return loss, correct, tokens


def unigram_loss(train: PairSplit, split: PairSplit, vocab_size: int) -> NDArray[np.float64]:
    """The summed nats of every reference in `split`, each token guessed by its share of `train`.

    The end of a sentence counts as a token. `vocab_size`: the words of the target language.
    """
    counts = np.bincount(np.asarray(train.target.values), minlength=vocab_size)
    counts[EOS_ID] += len(train)
    nats = unigram_nats(counts)
    sentence = np.repeat(np.arange(len(split)), split.target.lengths)
    words = np.bincount(sentence, nats[np.asarray(split.target.values)], minlength=len(split))
    return np.asarray(words + nats[EOS_ID])


def corpus_counts(translations: Sequence[str], references: Sequence[str]) -> dict[str, Counted]:
    """What sacrebleu counts for BLEU ("bleu") and chrF ("chrf").

    Raises `InputError` where sacrebleu is not installed and where the numbers of sentences differ.
    """
    if len(translations) != len(references):
        raise InputError(
            f"there are {len(translations):,} translations of {len(references):,} sentences"
        )
    metrics = import_library(
        "sacrebleu.metrics",
        "BLEU and chrF need sacrebleu, which is not installed: pip install 'normattn[translation]'",
    )
    counted = {}
    for name, metric in (("bleu", metrics.BLEU()), ("chrf", metrics.CHRF())):
        score = metric.corpus_score(list(translations), [list(references)])
        # sacrebleu's own resampling works on these rows; it has no public name for them.
        rows = metric._extract_corpus_statistics(list(translations), [list(references)])
        signature = f"{score.name}|{metric.get_signature()}"
        counted[name] = Counted(np.asarray(rows, np.float64), signature)
    return counted
