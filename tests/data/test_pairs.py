"""Sentence pairs: every form they come in, and every way in which they do not fit together."""

from __future__ import annotations

import gzip
import json
import sys
import warnings
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from data.helpers import install, multi_layout, sentences, write_lines
from normattn.errors import InputError
from normattn.lab.data import pair_sources
from normattn.lab.data.pair_sources import PACKAGES, is_sentence_pair, parse_pairs
from normattn.lab.data.pairs import PairsConfig, prepare_pairs

EN_DE = ("en", "de")
PAIRS = sentences(40)


def read(address: object) -> list[tuple[str, str]]:
    return [(pair.text, pair.target) for pair in parse_pairs(str(address), *EN_DE).documents()]


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
    splits = [pair.split for pair in parse_pairs(str(path), *EN_DE).documents()]
    assert splits == [None] * 20 + ["test"] * 20
    path.write_text('{"en": "a", "de": "b"}\n{"en": "a", "de": "b", "split": "dev"}\n')
    with pytest.raises(InputError, match=r"pairs\.jsonl:2.*split is 'dev'"):
        read(path)


def test_a_data_set_of_the_hub_with_its_own_test_split(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets, asked = ModuleType("datasets"), list[Any]()

    def load(*names: Any, **options: Any) -> list[dict[str, Any]]:
        asked.append((names, options))
        return [{"translation": {"en": f"a {options['split']}", "de": "b"}}]

    datasets.load_dataset = load  # type: ignore[attr-defined]
    datasets.get_dataset_split_names = lambda *_, **__: ["train", "test"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    source = parse_pairs(f"hf:me/data?config=en-de&revision={'a' * 40}", *EN_DE)
    assert [(pair.text, pair.target, pair.split) for pair in source.documents()] == [
        ("a train", "b", None),
        ("a test", "b", "test"),
    ]
    assert list(source.own_splits()) == ["test"]
    assert {options["revision"] for _, options in asked} == {"a" * 40}


def test_a_folder_by_split_and_language(tmp_path: Path) -> None:
    source = parse_pairs(str(multi_layout(tmp_path)), *EN_DE)
    found = list(source.documents())
    assert [(pair.text, pair.target) for pair in found[:60]] == sentences(60, seed=1)
    assert [pair.split for pair in found] == [None] * 60 + ["validation"] * 8 + ["test"] * 8
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


def test_catalogues_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    for source, target in found:
        assert is_sentence_pair(source, target)
        assert "%(" not in source + target
        assert "\n" not in source + target


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
    assert [len(split) for split in data] == [60 - data.left_out.get(_LONG, 0), 8, 8]
    assert list(data.test.texts) == sentences(8, seed=3)
    assert data.train.texts == ()
    for index, (source, target) in enumerate(data.test.texts):
        ids = data.test.source_ids(index)
        assert ids[-1] == 2
        assert data.tokeniser.decode(ids[:-1]) == source
        ids = data.test.target_ids(index)
        assert (ids[0], ids[-1]) == (1, 2)
        assert data.tokeniser.decode(ids[1:-1]) == target
    assert (data.train.target.lengths + 1).max() <= 24
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = prepare_pairs(config, tmp_path / "cache")
    assert again.fingerprint == data.fingerprint
    assert len(list((tmp_path / "cache").glob("pairs-*/manifest.json"))) == 1


_LONG = "training pairs too long"


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
    trained = {
        data.tokeniser.decode(data.train.source[i]).rstrip(" !") for i in range(len(data.train))
    }
    assert held_out
    assert not held_out & trained
    few = prepare_pairs(config.model_copy(update={"max_pairs": 7}), tmp_path / "cache")
    assert len(few.train) == 7
    assert len(few.test) == len(data.test)
    with pytest.raises(InputError, match="no document in its test split"):
        prepare_pairs(config.model_copy(update={"test_fraction": 0.0}), tmp_path / "cache")
