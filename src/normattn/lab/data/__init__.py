"""Corpora, tokenisers, tokens, training batches and the length-controlled evaluation sets."""

from __future__ import annotations

from normattn.lab.data.batches import MaskedBatches, Masking, TrainingBatches
from normattn.lab.data.corpora import Corpus, Document, parse_corpus
from normattn.lab.data.retrieval import RetrievalSet, retrieval_set
from normattn.lab.data.tokeniser import Tokeniser, train_tokeniser
from normattn.lab.data.tokens import (
    CopyTask,
    DataConfig,
    Tiling,
    TokenData,
    TokenSplit,
    prepare_tokens,
)
from normattn.lab.data.windows import (
    EvaluationSet,
    MaskedSet,
    by_position_set,
    last_segment_sets,
    masked_set,
    non_repeated_set,
    repeated_set,
    train_length_set,
)

__all__ = [
    "CopyTask",
    "Corpus",
    "DataConfig",
    "Document",
    "EvaluationSet",
    "MaskedBatches",
    "MaskedSet",
    "Masking",
    "RetrievalSet",
    "Tiling",
    "TokenData",
    "TokenSplit",
    "Tokeniser",
    "TrainingBatches",
    "by_position_set",
    "last_segment_sets",
    "masked_set",
    "non_repeated_set",
    "parse_corpus",
    "prepare_tokens",
    "repeated_set",
    "retrieval_set",
    "train_length_set",
    "train_tokeniser",
]
