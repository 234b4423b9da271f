"""Documents labelled by the relations they state: NYT24's form, and an embedded default."""

from __future__ import annotations

from normattn.data.relations.batches import RelationBatch, RelationBatches, one_hot
from normattn.data.relations.config import PYTHON_IMPORTS, RelationConfig
from normattn.data.relations.documents import RelationCorpus, RelationDocument
from normattn.data.relations.folder import RelationFolder, read_folder
from normattn.data.relations.prepared import (
    RelationData,
    RelationSplit,
    look_for_relations,
    padded,
    prepare_relations,
    read_corpus,
)
from normattn.data.relations.python_imports import PythonImports
from normattn.data.relations.reading import read_relations
from normattn.data.relations.word_pieces import WordPieces, train_word_pieces

__all__ = [
    "PYTHON_IMPORTS",
    "PythonImports",
    "RelationBatch",
    "RelationBatches",
    "RelationConfig",
    "RelationCorpus",
    "RelationData",
    "RelationDocument",
    "RelationFolder",
    "RelationSplit",
    "WordPieces",
    "look_for_relations",
    "one_hot",
    "padded",
    "prepare_relations",
    "read_corpus",
    "read_folder",
    "read_relations",
    "train_word_pieces",
]
