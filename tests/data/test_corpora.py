"""Corpora as values: what they read, in which order, and what they say of bad input.

The frozen one is pinned wheels, fetched by pip, the same text and tokens everywhere:
`python scripts/freeze_packages.py --check` makes all of it, and compares with `frozen_tokens.json`.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import polars as pl
import pytest

import apart
from normattn.errors import InputError
from normattn.lab.data import corpora
from normattn.lab.data import frozen_packages as frozen
from normattn.lab.data.corpora import PIECE_CHARACTERS, parse_corpus
from normattn.lab.data.frozen_packages import is_generated
from normattn.lab.data.sources import sample_evenly

from .helpers import COMMIT, fake_hub


def names_and_texts(address: object, limit: int | None = None) -> list[tuple[str, str]]:
    return [(doc.name, doc.text) for doc in parse_corpus(str(address)).documents(limit)]


def test_python_source_is_the_library_without_tests_or_packages() -> None:
    documents = names_and_texts("python-source")
    names = [name for name, _ in documents]
    assert names == sorted(names)
    assert len({text for _, text in documents}) == len(documents)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not [n for n in names if {"test", "tests", "site-packages"} & set(n.split("/"))]
    assert dict(documents)["argparse.py"] == Path(argparse.__file__).read_text("utf-8")


def test_a_folder_is_read_recursively_by_name(tmp_path: Path) -> None:
    for folder in ("b", ".git"):
        (tmp_path / folder).mkdir()
    (tmp_path / "b" / "x.md").write_text("deep", encoding="utf-8")
    (tmp_path / "a.txt").write_text("flat\r\n", encoding="utf-8", newline="")
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n', encoding="utf-8")
    (tmp_path / "image.png").write_bytes(b"\xff\xd8")
    (tmp_path / ".git" / "hidden.txt").write_text("no", encoding="utf-8")
    names = ("a.txt", "b/x.md", "c.jsonl:1", "c.jsonl:3")
    texts = ("flat\r\n", "deep", "one", "two")
    assert names_and_texts(tmp_path) == list(zip(names, texts, strict=True))


def test_a_large_file_is_cut_at_line_ends_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"{i}: é😀 {'x' * (i % 90)}\n" for i in range(2_000))
    (tmp_path / "book.txt").write_text("\ufeff" + text, encoding="utf-8", newline="")
    documents = names_and_texts(tmp_path / "book.txt")
    assert len(documents) > 2
    assert "".join(piece for _, piece in documents) == text
    assert all(piece.endswith("\n") and len(piece) <= PIECE_CHARACTERS for _, piece in documents)
    for packed in (tmp_path / "book.txt.gz", tmp_path / "BOOK.TXT.GZ"):
        packed.write_bytes(gzip.compress(text.encode()))
        assert "".join(piece for _, piece in names_and_texts(packed)) == text
        packed.unlink()
    # In a folder a small one is whole.
    monkeypatch.setattr(corpora, "WHOLE_BYTES", 50_000)
    (tmp_path / "small.txt").write_text("word\n" * 9_000, encoding="utf-8")
    names = [name for name, _ in names_and_texts(tmp_path)]
    assert names == [*(name for name, _ in documents), "small.txt"]


@pytest.mark.parametrize("form", ["parquet", "csv", "tsv"])
def test_a_column_of_a_table_is_streamed(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"rows?.{form}"
    rows = [f'row {i}, of\nü "{i}"' for i in range(700)]
    table = pl.DataFrame({"body": rows, "n": list(range(700))})
    if form == "parquet":
        table.write_parquet(file, row_group_size=100)
    else:
        table.write_csv(file, separator="," if form == "csv" else "\t")
    found = names_and_texts(f"{file}?field=body")
    assert [text for _, text in found] == rows
    assert found[699][0] == f"rows?.{form}:699"
    assert len(names_and_texts(f"{file}?field=body", limit=1000)) < 100
    with pytest.raises(InputError, match=r"no field 'text' .*'body', 'n'"):
        names_and_texts(file)
    assert [text for _, text in names_and_texts(f"{tmp_path}?field=body")] == rows


def test_tables_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pl.DataFrame({"text": ["a", None], "n": [1, 2]}).write_parquet(file)
    with pytest.raises(InputError, match="'n' is not text"):
        names_and_texts(f"{file}?field=n")
    with pytest.raises(InputError, match=r":1: field 'text' has no value"):
        names_and_texts(file)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InputError, match=r"rows\.parquet cannot be read as parquet, from row 0"):
        names_and_texts(file)
    # Only `text` is read, but no word behind an unquoted comma is dropped.
    (tmp_path / "rows.csv").write_text("text,n\none,1\nHello, world,2\n")
    with pytest.raises(InputError, match=r"rows\.csv cannot be read as csv.* more fields"):
        names_and_texts(tmp_path / "rows.csv")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in kB on Linux")
def test_a_table_is_held_in_part(tmp_path: Path) -> None:
    """Of 128 MB of text in row groups of 1 MB, a part is held at a time."""
    file = tmp_path / "rows.parquet"
    rows = pl.DataFrame({"text": [os.urandom(1 << 9).hex() for _ in range(1 << 12)] * 32})
    rows.write_parquet(file, row_group_size=1 << 10, compression="uncompressed")
    code = """
import resource, sys
from normattn.lab.data.corpora import parse_corpus
documents = parse_corpus(sys.argv[1]).documents()
next(documents)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert sum(len(document.text) for document in documents) > 100 << 20
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = apart.run(code, file)
    assert done.code == 0, done.err
    assert int(done.out) < 64 << 10


def test_a_hub_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    given = 0

    def load(*args: Any, **options: Any) -> Iterator[dict[str, str]]:
        nonlocal given
        asked.append((args, options))
        while True:
            given += 1
            yield {"body": f"row {given}"}

    fake_hub(monkeypatch, load)
    rows = parse_corpus("hf:me/data?config=en&field=body").documents()
    assert (next(rows).text, next(rows).name) == ("row 1", "000000001")
    assert given == 2
    assert asked == [(("me/data", "en"), {"split": "train", "revision": COMMIT, "streaming": True})]


def test_a_hub_dataset_that_changes_is_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ("hf:me/data", "hf:me/data?revision=old", f"hf:me/data?revision={COMMIT}")
    prints = []
    for commit in (COMMIT, "f" * 40):
        fake_hub(monkeypatch, lambda *_, **__: [{"text": "row"}], commit)
        corpora = [parse_corpus(address) for address in addresses]
        sources = [corpus.sources()["hf:me/data"] for corpus in corpora]
        assert sources == [commit, commit, COMMIT]
        prints.append([corpus.fingerprint() for corpus in corpora])
    same = [first == second for first, second in zip(*prints, strict=True)]
    assert same == [False, False, True]
    with pytest.raises(InputError, match=r"no route to host; .*\?revision=COMMIT") as caught:
        parse_corpus("hf:offline").fingerprint()
    assert "and much more" not in str(caught.value)
    assert parse_corpus(f"hf:offline?revision={COMMIT}").sources() == {"hf:offline": COMMIT}


def test_hub_mistakes_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(*_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        yield {"text": "fine"}
        raise TimeoutError("read timed out")

    fake_hub(monkeypatch, half)
    with pytest.raises(InputError, match="read timed out"):
        names_and_texts("hf:x")
    fake_hub(monkeypatch, lambda *_, **__: [{"text": None}])
    with pytest.raises(InputError, match="row 0: field 'text' has no value"):
        names_and_texts("hf:x")
    with pytest.raises(InputError, match=r"no field 'body' \(its fields: 'text'\)"):
        names_and_texts("hf:x?field=body")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'normattn\[data\]'"):
        names_and_texts("hf:x")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("pyton-source", "'pyton-source' does not exist: did you mean 'python-source'"),
        ("/no/such/place.txt", "'/no/such/place.txt' does not exist: expected python-source"),
        (" ", "the corpus has no name"),
        ("hf:", "names no dataset"),
        ("python-source?field=x", "has no option 'field': it takes none"),
        ("python-packages", "python-packages-2026"),
        ("python-packages?versions=corpus.json", "python-packages-2026"),
        ("hf:x?feld=y", "has no option 'feld': it knows config, split, revision, field"),
        ("hf:x?field", r"expected \?option=value"),
        ("hf:x?field=a&field=b", "each option once"),
    ],
)
def test_a_wrong_address_is_refused(address: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_corpus(address)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("latin.txt", b"a" * 65_535 + "é".encode() + b"\xe9 caf", " is not UTF-8 .byte 0xe9"),
        ("cut.txt", b"cut \xc3", " is not UTF-8 .byte 0xc3"),
        ("rows.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', " is not UTF-8 .byte 0xff"),
        ("rows.jsonl", b'\n{"body": "x"}', ":2 has no field 'text' .its fields: 'body'"),
        ("rows.jsonl", b'\n{"text": 3}', ":2: field 'text' is not text but a int"),
        ("rows.jsonl", b"\n[1]", ":2 is not a JSON object but a list"),
        ("rows.jsonl", b'\n{"text": "x"', ":2 is damaged: it is not valid JSON"),
        ("latin.csv", b"text\ncaf\xe9\n", " cannot be read as csv"),
        ("x.txt.gz", gzip.compress(b"some text" * 99, mtime=0)[:-12], " is not a whole gzip file"),
        ("plain.txt?field=body", b"x", "plain text has no fields"),
        ("one.json", b'{"text": "x"}', "expected one array of objects"),
        ("one.json?field=body", b'[{"text": "x"}]', "no field 'body'"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    file = tmp_path / name.partition("?")[0]
    file.with_suffix(".png").write_bytes(content)
    with pytest.raises(InputError, match=f"{tmp_path.name}' holds no file of a known kind"):
        names_and_texts(tmp_path)
    file.write_bytes(content)
    with pytest.raises(InputError, match=said) as caught:
        names_and_texts(tmp_path / name)
    assert file.name in str(caught.value)


def test_a_limit_is_spread_and_never_passed(tmp_path: Path) -> None:
    assert sample_evenly("abcdefghij", [10] * 10, 30) == ["a", "e", "h"]
    assert sample_evenly("ab", [100, 100], 30) == ["a"]
    assert sample_evenly("ab", [5, 5], None) == ["a", "b"]
    assert sample_evenly("abc", [10, 800, 10], 82) == ["a", "c"]
    file = tmp_path / "one.txt"
    file.write_text("first line\nsecond line\n", encoding="utf-8")
    assert names_and_texts(file, limit=15) == [("one.txt#00000", "first line\n")]
    assert names_and_texts(file, limit=4) == [("one.txt#00000", "firs")]


def test_the_fingerprint_sees_changes_but_not_the_place(tmp_path: Path) -> None:
    def write(place: Path, text: str) -> str:
        place.mkdir(exist_ok=True)
        (place / "x.txt").write_text(text, encoding="utf-8")
        os.utime(place / "x.txt", ns=(10**18, 10**18))
        return parse_corpus(str(place)).fingerprint()

    first = write(tmp_path / "a", "text")
    # Of one name, size and time, and of another content.
    assert write(tmp_path / "b", "TEXT") != first
    (tmp_path / "a").rename(tmp_path / "c")
    assert parse_corpus(str(tmp_path / "c")).fingerprint() == first
    assert write(tmp_path / "c", "TEXT") != first


# The frozen corpus.
SAMPLE = ("h2", "sqlparse", "toolz")
SAMPLE_TEXT = "b5528fabca02a792fda8e267919167b4a41965f0d5bdeeb13cb971325de57c25"
SAMPLE_TOKENS = "101db4c151068ab901a1e5cf9de28c953f32efb7d94828f7de15b1077bf3a79a"


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of the sample; skips where pip does not reach its index."""
    folder = tmp_path_factory.mktemp("wheels")
    try:
        frozen.download(write_list(folder / "list.txt"), folder)
    except InputError as error:
        pytest.skip(f"the package index is not reached: {error}")
    return folder


def write_list(path: Path, names: tuple[str, ...] = SAMPLE, *more: str) -> Path:
    """The list of a sample of the pinned packages, and further lines."""
    whole = frozen.LIST.read_text("utf-8").splitlines()
    kept = [line for line in whole if line.startswith((*(f"{n}==" for n in names), "# near-"))]
    path.write_text("\n".join([f"# text-sha256 {SAMPLE_TEXT}", *kept, *more]) + "\n", "utf-8")
    return path


MAKE = """
import sys
from pathlib import Path
from normattn.lab.data import tokens
from normattn.lab.data.tokens import DataConfig, prepare_tokens
from normattn.lab.data.frozen_packages import frozen_packages, package_text

listed = Path(sys.argv[1])
corpus = frozen_packages(listed)
tokens.parse_corpus = lambda address: corpus
shares = {"test_fraction": 0.3, "validation_fraction": 0.3, "seed": 2}
config = DataConfig(corpus="python-packages-2026", vocab_size=400, **shares)
print(package_text(listed), prepare_tokens(config).fingerprint)
assert not {"h2", "sqlparse", "toolz"} & set(sys.modules)
"""


def test_another_machine_has_the_recorded_text_and_tokens(wheels: Path, tmp_path: Path) -> None:
    """In a process of its own, with a cache, a hash seed and a language of its own."""
    listed = write_list(tmp_path / "list.txt")
    changes = {"NORMATTN_CACHE": str(tmp_path / "cache"), "PYTHONHASHSEED": "1", "LC_ALL": "C"}
    command = [sys.executable, "-c", MAKE, str(listed)]
    done = subprocess.run(command, env=os.environ | changes, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text, digest = done.stdout.split()
    assert digest == SAMPLE_TOKENS
    assert hashlib.sha256(Path(text).read_bytes()).hexdigest() == SAMPLE_TEXT
    names = {path.name for path in Path(text).parent.iterdir()}
    assert names == {"documents.jsonl", "manifest.json"}


def test_another_text_is_refused(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMATTN_CACHE", str(tmp_path / "cache"))
    copy = partial(copytree, wheels, dirs_exist_ok=True)
    monkeypatch.setattr(frozen, "download", lambda _, folder: copy(folder))
    repeated = "# near-duplicate toolz/toolz/dicttoolz.py"
    listed = write_list(tmp_path / "list.txt", SAMPLE, repeated)
    with pytest.raises(InputError, match=rf"instead of {SAMPLE_TEXT}: a different corpus"):
        frozen.package_text(listed)


def test_no_pip_or_index_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMATTN_CACHE", str(tmp_path / "cache"))
    for name in ("PIP_NO_INDEX", "PIP_RETRIES"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    corpus = frozen.frozen_packages(write_list(tmp_path / "list.txt", ("h2",)))
    said = r"pip could not fetch the packages pinned in list\.txt: .*h2"
    with pytest.raises(InputError, match=said) as caught:
        list(corpus.documents())
    assert "\n" not in str(caught.value)


def test_the_list_is_pinned_and_says_its_size() -> None:
    corpus = parse_corpus("python-packages-2026")
    facts, lines = frozen.read_facts(frozen.LIST), frozen.LIST.read_text("utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert len(corpus.sources()) == len(pinned) == 127
    for line in pinned:
        assert re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}  # \S.*", line)
        assert "GPL" not in line
    assert 64_000_000 < int(facts["text-bytes"]) < 80_000_000
    (note,) = corpus.notes()
    assert "127 pinned packages" in note
    assert f"{int(facts['download-bytes']) / 1e6:.0f} MB" in note
    with pytest.raises(InputError, match="has no option 'split'"):
        parse_corpus("python-packages-2026?split=train")


PLAIN = "".join(f"def plain_{word}(): return {word!r}\n" for word in "abcdefghijklmnopqrstuvwxyz")


@pytest.mark.parametrize(
    ("text", "generated"),
    [
        ("# a parser for what people wrote by hand\n" + PLAIN, False),
        ("# Generated by the protocol compiler.  DO NOT EDIT!\n" + PLAIN, True),
        (PLAIN * 2 + "# do not edit\n", False),
        (PLAIN + "x = '" + "a" * 1001 + "'\n", True),
        (("word " * 30 + "\n") * 10, True),
        ("".join(f"    {i}: {i * i},  # one\n" for i in range(200)), True),
        ("+-*/ [] () {} == <= ab\n" * 9, True),
    ],
)
def test_what_programs_wrote_is_told_from_what_people_wrote(text: str, generated: bool) -> None:
    assert is_generated(text) is generated
