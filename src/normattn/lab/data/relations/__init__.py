"""Documents labelled by the relations they state: NYT24's form, and an embedded default."""

from __future__ import annotations

from normattn.lab.data.relations.batches import RelationBatch, RelationBatches, one_hot
from normattn.lab.data.relations.config import PYTHON_IMPORTS, RelationConfig
from normattn.lab.data.relations.documents import RelationCorpus, RelationDocument
from normattn.lab.data.relations.folder import RelationFolder, read_folder
from normattn.lab.data.relations.prepared import (
    RelationData,
    RelationSplit,
    look_for_relations,
    padded,
    prepare_relations,
    read_corpus,
)
from normattn.lab.data.relations.python_imports import PythonImports
from normattn.lab.data.relations.reading import read_relations
from normattn.lab.data.relations.word_pieces import WordPieces, train_word_pieces

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
