"""Sentence pairs and relations: every form they come in, and how they do not fit together."""

from __future__ import annotations

import gzip
import json
import re
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from data.helpers import (
    COMMIT,
    fake_hub,
    install,
    item,
    multi_layout,
    sentences,
    write_json,
    write_lines,
    write_relations,
)
from normattn.errors import InputError
from normattn.lab.data import pair_sources
from normattn.lab.data.corpora import rows_of
from normattn.lab.data.pair_sources import PACKAGES, parse_pairs
from normattn.lab.data.pairs import PairsConfig, prepare_pairs
from normattn.lab.data.relation_sources import parse_relations, pieces_of, relation_row
from normattn.lab.data.relations import RelationConfig, prepare_relations
from normattn.lab.data.sources import Document

EN_DE = ("en", "de")
PAIRS = sentences(40)


def documents(address: object) -> list[tuple[str, str, str | None]]:
    found = parse_pairs(str(address), *EN_DE).documents()
    return [(pair.text, pair.target, pair.split) for pair in found]


def read(address: object) -> list[tuple[str, str]]:
    return [pair[:2] for pair in documents(address)]


def test_two_aligned_files_plain_and_packed(tmp_path: Path) -> None:
    here, there = write_lines(tmp_path, PAIRS)
    assert read(f"{here},{there}") == PAIRS
    packed = there.with_name("train.de.gz")
    packed.write_bytes(gzip.compress(there.read_bytes()))
    assert read(f"{here},{packed}") == PAIRS
    here.write_text(here.read_text() + "one more\nand another\n")
    with pytest.raises(InputError, match=r"train\.en has a line 41 and .*train\.de\.gz has not"):
        read(f"{here},{packed}")


def test_json_lines_flat_nested_and_with_splits(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    nested = [{"translation": {"en": a, "de": b}} for a, b in PAIRS[:20]]
    flat = [{"en": a, "de": b, "split": "test"} for a, b in PAIRS[20:]]
    path.write_text("\n\n".join(json.dumps(each) for each in (*nested, *flat)), encoding="utf-8")
    assert read(path) == PAIRS
    assert [split for *_, split in documents(path)] == [None] * 20 + ["test"] * 20
    path.write_text('{"en": "a", "de": "b"}\n{"en": "a", "de": "b", "split": "dev"}\n')
    with pytest.raises(InputError, match=r"pairs\.jsonl:2.*split is 'dev'"):
        read(path)


def test_a_data_set_of_the_hub_with_its_own_test_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*names: Any, **options: Any) -> list[dict[str, Any]]:
        asked.append((names, options))
        return [{"translation": {"en": f"a {options['split']}", "de": "b"}}]

    fake_hub(monkeypatch, load, splits=("train", "test"))
    address = f"hf:me/data?config=en-de&revision={COMMIT}"
    assert documents(address) == [("a train", "b", None), ("a test", "b", "test")]
    assert list(parse_pairs(address, *EN_DE).own_splits()) == ["test"]
    assert {options["revision"] for _, options in asked} == {COMMIT}


def test_a_folder_by_split_and_language(tmp_path: Path) -> None:
    source = parse_pairs(str(multi_layout(tmp_path)), *EN_DE)
    assert read(tmp_path)[:60] == sentences(60, seed=1)
    splits = [split for *_, split in documents(tmp_path)]
    assert splits == [None] * 60 + ["validation"] * 8 + ["test"] * 8
    assert set(source.own_splits()) == {"validation", "test"}
    write_lines(tmp_path, PAIRS, "test_other")
    with pytest.raises(InputError, match=r"one test set, but has test_other\.en, test_small"):
        read(tmp_path)
    assert read(f"{tmp_path}?test=test_other")[-40:] == PAIRS
    with pytest.raises(InputError, match=r"test_none\.en and test_none\.de .* but has none"):
        read(f"{tmp_path}?test=test_none")
    (tmp_path / "val.de").unlink()
    with pytest.raises(InputError, match=r"validation\.en and .* but has val\.en$"):
        read(f"{tmp_path}?test=test_other")
    (tmp_path / "train.en").unlink()
    (tmp_path / "train.de").unlink()
    with pytest.raises(InputError, match=r"train\.en and train\.de .* but has none"):
        read(f"{tmp_path}?test=test_other")


def test_catalogues_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = {
        "%d files could not be read": "%d Dateien konnten nicht gelesen werden",
        "menu\x04_Open the selected file": "Gewählte Datei ö_ffnen bitte",
        "%(n)s day is left\0%(n)s days are left": "%(n)s Tag ist übrig\0%(n)s Tage sind übrig",
        "not translated at all": "not translated at all",
        "Yes": "Ja",
        "[-f] [-t TYPE] FILE... [REV]": "[-f] [-t TYP] DATEI... [REV]",
    }
    install(tmp_path, "talkative", messages)
    install(tmp_path, "other", {"Not translated at ALL": "Gar nicht übersetzt hier"})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(pair_sources, "PACKAGES", ("talkative", "other"))
    assert read("catalogues") == [
        ("X day is left", "X Tag ist übrig"),
        ("X files could not be read", "X Dateien konnten nicht gelesen werden"),
        ("Open the selected file", "Gewählte Datei öffnen bitte"),
        ("Not translated at ALL", "Gar nicht übersetzt hier"),
    ]
    with pytest.raises(InputError, match="talkative has no translations into 'fr'"):
        parse_pairs("catalogues", "en", "fr")
    monkeypatch.setattr(pair_sources, "PACKAGES", ("silent",))
    with pytest.raises(InputError, match="silent is not installed: pip install"):
        read("catalogues")


def test_the_default_catalogues() -> None:
    for package in PACKAGES:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed: pip install 'normattn[translation]'")
    found = read("catalogues")
    assert len(found) > 3000
    assert len({source.casefold() for source, _ in found}) == len(found)
    assert not [pair for pair in found if re.search(r"%\(|\n", "".join(pair))]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("", "has no name"),
        ("nowhere", "'nowhere' holds no sentence pairs: expected catalogues"),
        ("catalogues?langage=de", "no option 'langage'"),
    ],
)
def test_bad_addresses(address: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(address)


def test_prepared_once_with_splits_of_its_own(tmp_path: Path) -> None:
    corpus = multi_layout(tmp_path / "corpus")
    config = PairsConfig(corpus=str(corpus), vocab_size=300, max_length=24)
    data = prepare_pairs(config, tmp_path / "cache")
    left_out = data.left_out.get("training pairs too long", 0)
    assert [len(split) for split in data] == [60 - left_out, 8, 8]
    assert list(data.test.texts) == sentences(8, seed=3)
    assert data.train.texts == ()
    for name in ("test_fraction", "validation_fraction", "seed"):
        with pytest.raises(InputError, match=f"{name} has no meaning for the corpus"):
            prepare_pairs(config.model_copy(update={name: 1}), tmp_path / "cache")
    for index, (source, target) in enumerate(data.test.texts):
        ids, others = data.test.source_ids(index), data.test.target_ids(index)
        assert (ids[-1], others[0], others[-1]) == (2, 1, 2)
        assert data.tokeniser.decode(ids[:-1]) == source
        assert data.tokeniser.decode(others[1:-1]) == target
    assert (data.train.target.lengths + 1).max() <= 24
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = prepare_pairs(config, tmp_path / "cache")
    assert again.fingerprint == data.fingerprint
    assert len(list((tmp_path / "cache").glob("pairs-*/manifest.json"))) == 1


def test_cut_by_sentence_where_the_corpus_has_no_splits(tmp_path: Path) -> None:
    pairs = sentences(200)
    twice = [*pairs, *((f"{source} !", target) for source, target in pairs)]
    here, there = write_lines(tmp_path, [*twice, ("", "nichts")])
    config = PairsConfig(corpus=f"{here},{there}", vocab_size=270, test_fraction=0.3)
    data = prepare_pairs(config, tmp_path / "cache")
    assert sum(map(len, data)) == 400
    assert data.left_out["with an empty side"] == 1
    assert data.tokeniser.vocab_size == 270
    held_out = {source.rstrip(" !") for source, _ in data.test.texts}
    decoded = (data.tokeniser.decode(data.train.source[i]) for i in range(len(data.train)))
    assert held_out
    assert held_out.isdisjoint(source.rstrip(" !") for source in decoded)
    few = prepare_pairs(config.model_copy(update={"max_pairs": 7}), tmp_path / "cache")
    assert len(few.train) == 7
    assert len(few.test) == len(data.test)
    with pytest.raises(InputError, match="no document in its test split"):
        prepare_pairs(config.model_copy(update={"test_fraction": 0.0}), tmp_path / "cache")


# Relations.
NO_TRIPLES: tuple[Any, ...] = ({}, [["a", "b"]], [["a", 1, "b"]], ["abc"])
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
        *(({"text": "x", "triple_list": wrong}, "is no list of triples") for wrong in NO_TRIPLES),
    ],
)
def test_a_bad_item_or_file_is_named(tmp_path: Path, value: Any, said: str) -> None:
    write_json(tmp_path / "a.json", [item("y", "b"), value])
    with pytest.raises(InputError, match=rf"a\.json:2.*{said}"):
        read_relations(tmp_path / "a.json")


def test_every_form_gives_the_same_documents(tmp_path: Path) -> None:
    items = [item("Ada was born in London .", "lived", "born", "born"), item("It rains .")]
    write_json(tmp_path / "a.json", items)
    lines = "\ufeff" + "\n\n".join(json.dumps(each) for each in items) + "\n"
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    pl.DataFrame(items).write_parquet(tmp_path / "a.parquet")
    read = [read_relations(tmp_path / f"a.{kind}") for kind in ("json", "jsonl", "parquet")]
    expected = [("Ada was born in London .", ("born", "lived")), ("It rains .", ())]
    for documents in read:
        assert [(each.text, each.labels) for each in documents] == expected
    assert [d.name for d in read[1]] == ["a.jsonl:1", "a.jsonl:3"]


def test_a_folder_is_read_by_the_names_that_such_data_has(tmp_path: Path) -> None:
    write_relations(tmp_path / "casrel")
    write_relations(tmp_path / "plain", names=("train.jsonl", "validation.jsonl", "test.jsonl"))
    for name in ("casrel", "plain"):
        config = RelationConfig(corpus=str(tmp_path / name), vocab_size=200)
        assert prepare_relations(config, tmp_path).labels == ("born", "lived", "unseen")
    one, other = (parse_relations(str(tmp_path / name)) for name in ("casrel", "plain"))
    texts = [[(each.split, each.text) for each in found.documents()] for found in (one, other)]
    assert texts[0] == texts[1]


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
    made = RelationConfig(modules=8, test_fraction=0.2, validation_fraction=0.2, max_bytes=500_000)
    documents = list(made.open_corpus().documents())
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
