"""Relation data: the NYT24 form, folders of it, the embedded default."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from data.helpers import item, write_json, write_relations
from normattn.errors import InputError
from normattn.lab.data.corpora import rows_of
from normattn.lab.data.relation_sources import parse_relations, pieces_of, relation_row
from normattn.lab.data.relations import RelationConfig, prepare_relations
from normattn.lab.data.sources import Document

SOURCE = '''
import os, sys
import numpy as np
from collections import (
    OrderedDict as Ordered,
    deque,
)
try:
    import zlib
except ImportError:
    zlib = None
from . import sibling

class Store:
    """Keeps things.

    >>> import secrets
    """

    def path(self, name):
        """
        >>> from typing import Any
        >>> Store().path("x")
        """
        import functools; import re as regex
        return regex.sub("a", "b", os.path.join(sibling.root, name))

    def shadow(self, os):
        return os.fspath(deque()), np.zeros(1)

def plain():
    return 1 + 1

async def packed(data):
    return zlib.compress(data), Ordered(), sys.argv
'''


def read_relations(path: Path) -> list[Document]:
    return list(rows_of(relation_row, path.name, path))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"text": "x", "labels": []}, "no field 'triple_list' .its fields: 'text', 'labels'"),
        ({"text": " ", "triple_list": []}, "'text' is blank"),
        ({"text": "x", "triple_list": {}}, "'triple_list' is no list of triples"),
        ({"text": "x", "triple_list": [["a", "b"]]}, "'triple_list' is no list of triples"),
        ({"text": "x", "triple_list": [["a", 1, "b"]]}, "'triple_list' is no list of triples"),
        ({"text": "x", "triple_list": ["abc"]}, "'triple_list' is no list of triples"),
    ],
)
def test_a_bad_item_or_file_is_named(tmp_path: Path, value: Any, said: str) -> None:
    write_json(tmp_path / "a.json", [item("y", "b"), value])
    with pytest.raises(InputError, match=rf"a\.json:2.*{said}"):
        read_relations(tmp_path / "a.json")


def test_a_split_without_documents_is_named(tmp_path: Path) -> None:
    write_relations(tmp_path / "a")
    write_json(tmp_path / "a" / "test_triples.json", [])
    with pytest.raises(InputError, match=r"no document in its test split \(12 in all\)"):
        prepare_relations(RelationConfig(corpus=str(tmp_path / "a"), vocab_size=200), tmp_path)


def test_every_form_gives_the_same_documents(tmp_path: Path) -> None:
    items = [item("Ada was born in London .", "lived", "born", "born"), item("It rains .")]
    write_json(tmp_path / "a.json", items)
    lines = "\ufeff" + "\n\n".join(json.dumps(each) for each in items) + "\n"
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    pl.DataFrame(items).write_parquet(tmp_path / "a.parquet")
    read = [read_relations(tmp_path / f"a.{kind}") for kind in ("json", "jsonl", "parquet")]
    for documents in read:
        assert [(d.text, d.labels) for d in documents] == [
            ("Ada was born in London .", ("born", "lived")),
            ("It rains .", ()),
        ]
    assert [d.name for d in read[1]] == ["a.jsonl:1", "a.jsonl:3"]


def test_a_folder_is_read_by_the_names_that_such_data_has(tmp_path: Path) -> None:
    write_relations(tmp_path / "casrel")
    write_relations(tmp_path / "plain", names=("train.jsonl", "validation.jsonl", "test.jsonl"))
    for name in ("casrel", "plain"):
        config = RelationConfig(corpus=str(tmp_path / name), vocab_size=200)
        assert prepare_relations(config, tmp_path).labels == ("born", "lived", "unseen")
    one, other = (
        [(each.split, each.text) for each in parse_relations(str(tmp_path / name)).documents()]
        for name in ("casrel", "plain")
    )
    assert one == other


def test_labels_are_in_the_order_of_rel2id(tmp_path: Path) -> None:
    write_relations(tmp_path / "a")
    names = ["unseen", "lived", "never", "born"]
    numbered = {name: number for number, name in enumerate(names)}
    config = RelationConfig(corpus=str(tmp_path / "a"), vocab_size=200)
    write_json(tmp_path / "a" / "rel2id.json", [{str(n): k for k, n in numbered.items()}, numbered])
    assert prepare_relations(config, tmp_path).labels == tuple(names)
    write_json(tmp_path / "a" / "rel2id.json", {"born": 0})
    with pytest.raises(InputError, match=r"lacks the relation 'lived'"):
        prepare_relations(config, tmp_path)
    wrong: Any
    for wrong in ({"born": 1}, {}, [], {"born": "0"}, 3):
        write_json(tmp_path / "a" / "rel2id.json", wrong)
        with pytest.raises(InputError, match=r"rel2id\.json: .* numbered from 0"):
            prepare_relations(config, tmp_path)


def test_a_folder_that_lacks_a_split_or_has_it_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist; expected python-imports"):
        parse_relations(str(tmp_path / "none"))
    write_relations(tmp_path / "a")
    (tmp_path / "a" / "dev_triples.json").rename(tmp_path / "a" / "other.json")
    with pytest.raises(InputError, match=r"has no validation set: expected dev_triples\.json"):
        parse_relations(str(tmp_path / "a"))
    (tmp_path / "a" / "dev.json").write_text("[]")
    (tmp_path / "a" / "validation.json").write_text("[]")
    with pytest.raises(InputError, match=r"one validation set, but has dev\.json, validation"):
        parse_relations(str(tmp_path / "a"))


def test_a_piece_is_labelled_by_the_imports_that_its_code_uses() -> None:
    pieces = {piece.text.splitlines()[0].strip(): piece for piece in pieces_of("a.py", SOURCE)}
    assert pieces["def path(self, name):"].labels == ("os", "re")
    # Its argument hides the module, numpy is not of the standard library.
    assert pieces["def shadow(self, os):"].labels == ("collections",)
    assert pieces["def plain():"].labels == ()
    assert pieces["async def packed(data):"].labels == ("collections", "sys", "zlib")


def test_the_embedded_corpus_splits_by_file_and_leaks_no_import() -> None:
    config = RelationConfig(
        modules=8, test_fraction=0.2, validation_fraction=0.2, max_bytes=500_000
    )
    corpus = config.open_corpus()
    documents = list(corpus.documents())
    labels = {label for each in documents for label in each.labels}
    assert len(labels) == 8
    files: dict[str, set[str]] = {}
    for each in documents:
        files.setdefault(str(each.split), set()).add(each.name.rpartition(":")[0])
    assert files.keys() == {"train", "validation", "test"}
    assert sum(map(len, files.values())) == len(set.union(*files.values()))
    assert len({each.text for each in documents}) == len(documents)
    assert all(each.labels for each in documents)
    imports = re.compile(r"^\s*(>>> )?(import \w|from [\w.]+ import\b)", re.MULTILINE)
    assert not [each for each in documents if imports.search(each.text)]
    with pytest.raises(InputError, match="fewer than the 400 labels"):
        list(RelationConfig(modules=400, max_bytes=300_000).open_corpus().documents())


def test_prepared_data_is_cached_and_the_same_again(tmp_path: Path) -> None:
    write_relations(tmp_path / "a")
    config = RelationConfig(corpus=str(tmp_path / "a"), vocab_size=200, max_tokens=4)
    first = prepare_relations(config, tmp_path / "cache")
    again = prepare_relations(config, tmp_path / "cache")
    assert first.split("test") is first.test
    with pytest.raises(InputError, match="no split 'dev': expected train, validation, test"):
        first.split("dev")
    assert first.fingerprint == again.fingerprint
    assert first.train.cut > 0
    assert max(len(row) for row in first.train.tokens) == 4
    assert first.vocab_size == 200
    assert 0 < first.tokeniser.vocab_size <= 200
    lines = (tmp_path / "a" / "train_triples.json").read_text()
    (tmp_path / "a" / "train_triples.json").write_text(lines.replace("London", "Paris"))
    assert prepare_relations(config, tmp_path / "cache").fingerprint != first.fingerprint
